"""Several processes (ranks) that share one run: how they were started, how they exchange scalars, how they end.

Every rank holds theta and updates it by the same arithmetic. Rank 0 alone prints and writes the run directory.
"""
