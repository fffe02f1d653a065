"""What the tests of runs with an engine share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def eager() -> Iterator[None]:
    """Draw z without compiled kernels: to compile them, in each process, takes longer than these runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZO_EAGER", "1")
        yield
