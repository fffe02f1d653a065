"""Loaded models and encoded rows, as `mezo doctor` examines them."""

from pathlib import Path

from mezo_cli.config.compose import build_config
from mezo_cli.config.schema import Config, Example, Splits
from mezo_cli.diagnosis.findings import Finding, Section
from mezo_cli.session.opening import Prepared, opened
from tests import tiny


def config(*words: str) -> Config:
    return build_config(["task=sst2", "data=demo", "batch_size=8", "steps=20", *words])


def load(model: Path, *words: str) -> Prepared:
    """Prepare 24 rows, for train and dev."""
    session = opened(config(f"model.path={model}", *words))
    rows = [Example((row["sentence"],), int(row["label"] == "positive")) for row in tiny.movie_rows(24)]
    encoded = session.encoder.encode_all(rows)
    session.exclude_unreachable(encoded[0])
    return Prepared(session, Splits(rows, rows, None), {"train": encoded, "dev": encoded})


def only(section: Section) -> Finding:
    (finding,) = section.findings
    return finding


def named(section: Section) -> dict[str, Finding]:
    return {one.name: one for one in section.findings}
