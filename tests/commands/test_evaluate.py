"""`mezo eval`: a flag that does not fit what is evaluated is refused, not ignored."""

from pathlib import Path

from tests.command_line import error_line, mezo

RUN = Path(__file__).parents[1] / "fixtures" / "runs" / "mezo"


def test_a_checkpoint_is_named_once(roberta: Path, movies: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "best").mkdir(parents=True)
    (run / "config.yaml").write_bytes((RUN / "config.yaml").read_bytes())
    line = error_line(mezo("eval", run / "checkpoints" / "best", "--checkpoint", "last"))
    assert "--checkpoint last" in line
    assert "the checkpoint 'best'" in line
    words = ["task=sst2", "data=files", f"data.dir={movies}", "--checkpoint", "last"]
    assert "a plain model folder already" in error_line(mezo("eval", roberta, *words))
