"""Training: the loop, its setup, evaluation, restoring of any step, linear probing, loggers."""
