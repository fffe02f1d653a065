"""Successors of MeZO, a folder each. Entry points in pyproject.toml register them, as those of any plug-in."""
