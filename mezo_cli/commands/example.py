"""`mezo example`: write the files of an example, as the tutorial uses them."""

from pathlib import Path

from mezo_cli.console import print_line
from mezo_cli.errors import UserError, did_you_mean, join
from mezo_cli.runs.files import write_error
from mezo_cli.runs.output import write_file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def example(name: str, out: Path) -> None:
    """Write the files of an example below `out`, and print their names; files that are there already stay."""
    names = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
    if name not in names:
        raise UserError(f"{name}: no such example{did_you_mean(name, names)}; there are {join(names)}")
    if not out.is_dir():
        raise UserError(f"--out {out}: no such folder")
    sources = {path.relative_to(EXAMPLES / name): path for path in sorted((EXAMPLES / name).rglob("*.*"))}
    for path, source in sources.items():
        if (out / path).exists() and (out / path).read_bytes() != source.read_bytes():
            raise UserError(f"{out / path}: it is there already, with another content; nothing was written")
    try:
        for path, source in sources.items():
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            write_file(out / path, source.read_bytes())
            print_line(str(out / path))
    except OSError as error:
        raise write_error(f"--out {out}", error) from error
