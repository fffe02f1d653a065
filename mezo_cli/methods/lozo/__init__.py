"""LOZO: its settings, which import no torch, and the method."""
