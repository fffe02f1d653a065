"""Check a setup before it is trained, for `mezo doctor`: label words, data, signal or rewards, cost.

Each module of a check has `check(...)`, which returns a `Section` of findings. Nothing here writes a file.
"""
