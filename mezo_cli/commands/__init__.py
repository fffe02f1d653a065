"""One module per command: what it does, and what it prints."""
