"""Numbers for figures: thinning."""

from mezo_cli.report.document import thin_indices


def test_thinning_keeps_the_ends() -> None:
    assert thin_indices(1000, 5).tolist() == [0, 250, 500, 749, 999]
    assert thin_indices(3, 5).tolist() == [0, 1, 2]
    assert thin_indices(0, 5).tolist() == []
