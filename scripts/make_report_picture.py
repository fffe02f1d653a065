#!/usr/bin/env python3
"""Make docs/images/report.png, the beginning of the page about a run of experiment=demo, by headless Chromium.

    python scripts/make_report_picture.py               # trains the demo first, about a minute
    python scripts/make_report_picture.py --run RUN     # of a run that exists

The picture says of which templates it is (`templates`, their sha256); a test fails when they have changed since.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.PngImagePlugin import PngInfo

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "report.png"
TEMPLATES = ROOT / "mezo_cli" / "report" / "templates"
SIZE = (1100, 1480)
# Without these it asks for updates and tries names of its own.
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


def digest() -> str:
    """Return the sha256 of the page's templates."""
    files = sorted(path for path in TEMPLATES.rglob("*") if path.is_file())
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def main() -> None:
    """Train, write the page, take its picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--run", type=Path, help="A run directory.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), args.run or Path(name) / "demo"
        mezo = [sys.executable, "-m", "mezo_cli"]
        where: dict[str, Any] = {
            "cwd": run.absolute().parent,
            "env": {**os.environ, "PYTHONPATH": str(ROOT)},
            "check": True,
        }
        if args.run is None:
            subprocess.run([*mezo, "train", "experiment=demo", f"hydra.run.dir={run.name}"], **where)
        subprocess.run([*mezo, "report", run.name, "--out", folder / "page.html"], **where)
        shot, window = folder / "shot.png", ",".join(map(str, SIZE))
        words = [*OPTIONS, f"--user-data-dir={folder}/user", f"--window-size={window}", f"--screenshot={shot}"]
        subprocess.run(["chromium", *words, (folder / "page.html").as_uri()], check=True)
        about = PngInfo()
        about.add_text("templates", digest())
        with Image.open(shot) as picture:
            picture.convert("RGB").quantize(64).save(PICTURE, pnginfo=about, optimize=True)
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
