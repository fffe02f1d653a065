"""Conformance tests for plug-ins: optimizers, objectives and rewards. They need pytest."""

try:
    import pytest
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("mezo_cli.testing needs pytest: pip install pytest", name="pytest") from error

# So that their assertions show the values.
pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("objectives", "optimizers", "rewards")))
