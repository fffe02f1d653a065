"""Training: the loop, its set-up, evaluation, restoring of any step, linear probing, loggers."""
