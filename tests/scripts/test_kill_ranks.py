"""A rank of a training under torchrun is killed; it is started again, and ends in the bits of one process."""

import pytest

from tests.scripts.load import load_script


@pytest.mark.slow
def test_a_killed_rank_is_started_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("kill_ranks")
    monkeypatch.setattr("sys.argv", ["kill_ranks", "--kills", "1", "steps=300", "eval_every=150", "data.eval_limit=16"])
    assert script.main() == 0, capsys.readouterr().out
    assert "1 kills; torchrun's exit status 0; the same bits as one process: True" in capsys.readouterr().out
