"""The MeZO step for one's own training loop: `MezoOptimizer`, and `replay` of its file (docs/how-to/library.md)."""
