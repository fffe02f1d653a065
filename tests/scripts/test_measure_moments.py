"""scripts/measure_moments.py, which made the tables of docs/methods.md: its error of a window is the true error."""

from types import ModuleType

import pytest

from tests.scripts.load import load_script

GIVEN = ["model=demo", "data=demo", "batch_size=4"]
GRADS = [3.0, -1.0, 2.0, 0.5, -4.0, 1.0]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_moments")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["mezo_momentum", "mezo_adam"])
def test_a_window_over_all_steps_has_no_error_and_a_short_window_that_of_the_missing_terms(
    name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEZO_EAGER", "1")
    words, records = script.MOMENTS[name], [(step, [g], 1e-3) for step, g in enumerate(GRADS)]

    def errors(window: int) -> list[float]:
        ours = script.movement([*words, f"optimizer.window={window}"], GIVEN, records, 1)
        return [float((a - b).norm() / b.norm()) for a, b in zip(ours, exact, strict=True)]

    exact = script.movement(words, GIVEN, records, 1)
    assert max(errors(len(GRADS))) < 1e-6
    _, single = errors(2)
    kept = [(0.9**age * g) ** 2 for age, g in enumerate(reversed(GRADS))]  # the directions are nearly orthogonal
    assert single == pytest.approx((sum(kept[2:]) / sum(kept)) ** 0.5, rel=0.02)
