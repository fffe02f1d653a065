"""Seeded campaigns of damage to runs, and of mistakes (docs/concepts/reliability.md)."""
