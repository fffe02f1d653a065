"""`mezo fetch`: bring the model and the data of a run into the local cache, for a node without a network."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from mezo_cli import data
from mezo_cli.config.compose import build_config
from mezo_cli.console import print_line
from mezo_cli.errors import UserError
from mezo_cli.hub import hub_url, is_offline, is_reachable


def fetch(overrides: Sequence[str], config_dir: str | None) -> None:
    """Download what a run with these settings reads, and print revision, size and folder of each."""
    config = build_config(overrides, config_dir)
    from mezo_cli.models import download

    downloads = config.data.name == "hub" or not download.is_local(config.model.path)
    if downloads and (is_offline() or not is_reachable()):
        why = "HF_HUB_OFFLINE is set" if is_offline() else f"{hub_url()} does not answer"
        raise UserError(f"mezo fetch downloads from the hub, and {why}; run it where there is a network")
    folder = download.fetch(config.model)
    where = download.hub_commit(folder) or ("part of mezo" if config.model.is_embedded else "a local folder")
    print_line(f"model  {config.model.path}  {where}  {_size(folder.iterdir())}  {folder}")
    splits = data.load(config.data_task, config.data, config.data_seed)
    counts = f"{len(splits.train)} train, {len(splits.dev)} dev, {len(splits.test or [])} test"
    if config.data.name == "hub":
        from mezo_cli.data.hub import cached_files

        name = " ".join(part for part in (config.task.hub.path, config.task.hub.name) if part)
        files = cached_files(config.task)
        print_line(f"data   {name}  {splits.revision}  {_size(files)}  {files[0].parent}  ({counts})")
    else:
        part = "part of mezo, " if config.data.name == "demo" else ""
        print_line(f"data   data={config.data.name}: {part}nothing to download ({counts})")


def _size(files: Iterable[Path]) -> str:
    return f"{sum(path.stat().st_size for path in files if path.is_file()) / 1e6:,.1f} MB"
