"""Conformance tests for plug-ins: optimizers and objectives. They need pytest."""
