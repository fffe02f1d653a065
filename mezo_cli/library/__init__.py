"""The MeZO step for a training loop of one's own: `MezoOptimizer`, and `replay` of its file (docs/how-to/library.md)."""
