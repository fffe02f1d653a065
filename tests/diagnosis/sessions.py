"""Loaded models and encoded rows, as `mezo doctor` examines them."""

from pathlib import Path

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Example, TokenizedExample
from mezo_cli.diagnosis.findings import Finding, Section
from mezo_cli.training.prepare import load_session
from mezo_cli.training.session import Session
from tests import tiny


def config(*words: str) -> Config:
    return build_config(["task=sst2", "data=demo", "batch_size=8", "steps=20", *words])


def load(model: Path, *words: str) -> tuple[Session, list[TokenizedExample], dict[str, int]]:
    """Return a session, 24 encoded rows, and the sizes of the parameters that the loss does not depend on."""
    session = load_session(config(f"model.path={model}", *words))
    rows = [Example((row["sentence"],), int(row["label"] == "positive")) for row in tiny.movie_rows(24)]
    encoded = session.encoder.encode_all(rows)
    sizes = {name: p.numel() for name, p in session.params.tensors.items()}
    return session, encoded, {name: sizes[name] for name in session.exclude_unreachable(encoded[0])}


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


def named(section: Section) -> dict[str, Finding]:
    return {one.name: one for one in section.findings}
