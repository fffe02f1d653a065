"""scripts/bench/directions: estimates in a basis of activations, and a direction per row."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mezo_cli.config.compose import build_config
from mezo_cli.runs import Run
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session
from tests.command_line import error_line, mezo
from tests.scripts.load import SCRIPTS, load_script
from tests.test_extending import forget

FOLDER = SCRIPTS / "bench" / "directions"
DEMO = ["task=sst2", "objective=mlm", "model=demo", "data=demo", "batch_size=8", "peft=fixed_lora", "peft.r=2"]

pytestmark = pytest.mark.usefixtures("eager_kernels")


@pytest.fixture(scope="module", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let this process see the package as if it were installed."""
    info = tmp_path_factory.mktemp("site") / "mezo_directions-0.1.0.dist-info"
    info.mkdir()
    points = (FOLDER / "pyproject.toml").read_text().split("[project.entry-points.", 1)[1].split("[tool.", 1)[0]
    lines = f"[{points}".replace("[project.entry-points.", "[").replace('"', "")
    (info / "entry_points.txt").write_text(lines)
    (info / "METADATA").write_text("Name: mezo-directions\nVersion: 0.1.0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        patch.syspath_prepend(info.parent)
        forget()
        yield
    forget()


def session_of(*words: str) -> Session:
    session = load_session(build_config([*DEMO, "steps=1000", "optimizer.lr=1.0", *words]))
    session.exclude_unreachable(session.objective.check_rows(session.encoder)[0])
    return session


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["mezo", "mezo_rows"])
def test_the_mean_of_many_estimates_is_the_gradient_in_the_basis(optimizer: str) -> None:
    session = session_of(f"optimizer={optimizer}")
    rows = session.objective.check_rows(session.encoder) * 4
    script = load_script("find_bases")
    script.set_bases(session, script.find_bases(session, rows))
    tensors = dict(session.params.tensors)
    with torch.enable_grad():
        for p in tensors.values():
            p.requires_grad_(True)
        exact = torch.autograd.grad(session.loss_of(rows)(), list(tensors.values()))
    gradient = torch.cat([g.flatten() for g in exact])  # of B: G Q, since W is W0 + B Q^T
    total, squares, steps = torch.zeros_like(gradient), torch.zeros_like(gradient), 300
    with torch.no_grad():
        for step in range(steps):
            before = torch.cat([p.flatten() for p in tensors.values()])
            session.step(rows, step)
            estimate = before - torch.cat([p.flatten() for p in tensors.values()])
            total, squares = total + estimate / steps, squares + estimate**2 / steps
            for p, old in zip(tensors.values(), before.split([p.numel() for p in tensors.values()]), strict=True):
                p.copy_(old.view_as(p))
    error = (squares - total**2).sum().sqrt() / steps**0.5  # of the mean, from the spread of the estimates
    assert float((total - gradient).norm()) < 1.3 * float(error)
    along = float((total @ gradient) / gradient.square().sum())
    assert along == pytest.approx(1.0, abs=5 * float(error) / float(gradient.norm()) / len(gradient) ** 0.5)


@pytest.mark.slow
def test_a_run_has_its_basis_and_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*DEMO, "optimizer=mezo_rows", "optimizer.lr=1e-2", "steps=4", "eval_every=2", "data.eval_limit=16"]
    monkeypatch.setattr("sys.argv", ["find_bases", "--out", str(tmp_path), "--seeds", "42", *DEMO])
    load_script("find_bases").main()
    words.append(f"peft.basis={tmp_path}/${{seed}}.safetensors")
    assert mezo("train", *words, f"hydra.run.dir={tmp_path / 'run'}").code == 0
    run = Run(tmp_path / "run")
    assert mezo("replay", run.path, "--step", "4", "--out", tmp_path / "again").code == 0
    name = "adapter_model.safetensors"
    assert (tmp_path / "again" / name).read_bytes() == (run.checkpoints / "last" / name).read_bytes()
    assert mezo("train", *words, "micro_batch_size=3", f"hydra.run.dir={tmp_path / 'small'}").code == 0
    losses = [[one["loss"] for one in Run(tmp_path / d).metrics() if one["kind"] == "train"] for d in ("run", "small")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_what_has_no_branch_per_row_is_refused(tmp_path: Path) -> None:
    words = ["task=sst2", "model=demo", "data=demo", "steps=2", f"hydra.run.dir={tmp_path / 'run'}"]
    assert "use peft=fixed_lora" in error_line(mezo("train", *words, "optimizer=mezo_rows"))
    words.append("peft=fixed_lora")
    assert "peft.basis=nosuch: no such file" in error_line(mezo("train", *words, "peft.basis=nosuch"))
    rows = ["optimizer=mezo_rows", "optimizer.rows=4", "batch_size=8", f"hydra.run.dir={tmp_path / 'rows'}"]
    assert "optimizer.rows=4: the batch has more rows" in error_line(mezo("train", *words, *rows))
