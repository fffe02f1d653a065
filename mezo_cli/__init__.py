"""MeZO fine-tuning with forward passes only."""
