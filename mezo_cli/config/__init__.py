"""Configuration: the typed schema, composition of conf/, overrides, validation, shell completion."""
