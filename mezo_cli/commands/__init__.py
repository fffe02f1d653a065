"""One module per command: what it does, and what it prints. Its arguments are the options that cli.py describes."""
