"""One module per command; each is imported when it is used, so that `mezo --help` answers at once."""
