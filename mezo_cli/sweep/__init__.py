"""A sweep is a list of `mezo train` commands: expand, validate all, run each, and go on with what is missing."""
