"""`mezo report`: the page, figures for a paper, and the mistakes that end in one line."""

import base64
import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mezo_cli.report.entries import read_runs
from mezo_cli.report.figures import panels
from mezo_cli.report.groups import group_runs
from tests.command_line import Result, error_line, mezo, ok
from tests.report.run_directories import SEEDS, make_curves, make_run

EVIL = '<script>alert(1)</script> \x1b[31m & \u202eright-to-left $x^2$ "quoted"'
FEW = {"data.shots": 16}


class Reader:
    """The ids, the tags, what refers to another place, and the text of a page."""

    def __init__(self, page: str) -> None:
        self.tags = re.findall(r"<(\w[^\s>]*)", page)
        self.ids = re.findall(r'\sid="([^"]*)"', page)
        self.links = re.findall(r'\s(?:xlink:)?(?:href|src|srcset|data|action)="([^"]*)"', page)
        self.text = html.unescape(re.sub(r"<[^>]*>", " ", page))


def write(out: Path, *words: object) -> tuple[str, Result]:
    said = ok("report", *words, "--out", out)
    return out.read_text(encoding="utf-8"), said


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of one run whose texts try to be more than texts."""
    root = tmp_path_factory.mktemp("one")
    labels = {"task.labels": ["<b>neg</b>", "_pos$"], "task.label_words": ["terrible", "<i>"]}
    run = make_curves(root / "run <&'\"", {**labels, "task.name": "<u>own</u>"}, text=EVIL)
    return write(root / "page.html", run.path)[0]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two groups with two data seeds each, one of them over a grid of lr and eps, and runs that did not finish."""
    root = tmp_path_factory.mktemp("several")
    for seed in SEEDS[:2]:
        for lr, gain in ((1e-6, 0.4), (1e-5, 0.2)):
            for eps in (1e-3, 1e-2):
                grid = {"optimizer.lr": lr, "optimizer.eps": eps, "seed": seed, **FEW}
                make_curves(root / f"grid-{lr}-{eps}-{seed}", grid, gain=gain + seed / 1000 - eps)
        make_curves(root / f"bias-{seed}", {"peft.name": "bias", "seed": seed, **FEW}, gain=0.1)
    make_run(root / "failed", {"seed": 87, "steps": 40, "eval_every": 10, **FEW}, ended="the <b>disk</b> is\nfull")
    held = make_curves(root / "running", {"seed": 100, **FEW}, ended="running")
    yield root
    del held  # with its lock


@pytest.fixture(scope="module")
def several(root: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("page") / "page.html", root)[0]


def test_the_page_of_one_run(one: str) -> None:
    text = " ".join(Reader(one).text.split())
    for part in ("50.0%", "80.0%", "75.0%", "10 of the 30 correct", "10 of the 10 wrong", "mezo eval"):
        assert part in text, part
    for part in ("Training loss", "Accuracy on dev", "Predictions per label", "8 of 40 are"):
        assert part in text, part
    assert one.count("<svg") == 4


def test_text_from_files_stays_text(one: str) -> None:
    read = Reader(one)
    assert not {"script", "b>neg", "u", "iframe", "img", "object"} & set(read.tags)
    for part in ("<script>alert(1)</script>", "<b>neg</b>", "<u>own</u>", "\\x1b[31m", "\\u202e"):
        assert part in read.text
    assert not re.search("[\x00-\x08\x0b-\x1f\u202e]", one)


def test_nothing_is_loaded(one: str, several: str) -> None:
    for page in (one, several):
        assert "default-src 'none'" in html.unescape(page)
        links = Reader(page).links
        assert links
        assert [link for link in links if not link.startswith(("#", "data:,"))] == []
        assert "url(http" not in page
        assert "@import" not in page
        assert not re.search(r"<(script src|link rel=.stylesheet)", page)
    assert "<script" not in one
    (script,) = re.findall(r"<script>(.*?)</script>", several, re.S)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in html.unescape(several)


def test_runs_are_named_by_what_differs_and_stand_in_one_table(several: str) -> None:
    columns = re.findall(r"<button>(.*?)</button>", several)
    assert columns[:5] == ["run", "verdict", "dev", "before", "test"]  # they are seen without scrolling
    assert {"lr", "eps", "seed", "step", "dev", "test"} <= set(columns)
    assert len(re.findall(r'<td><a href="#run-\d+">', several)) == 12
    assert re.search(r"<summary>[^<]*grid-1e-05-0.01-13<span[^>]*>finished, test at best [^<]*<", several)


def test_the_page_of_several_runs(several: str) -> None:
    text = " ".join(Reader(several).text.split())
    for part in ("12 runs", "10 finished, 1 failed, 1 running", "sst2: accuracy on dev", "90.5 (1.2)"):
        assert part in text, part
    for part in ("Filled diamonds: test", "Hollow diamonds: the paper's test score"):
        assert part in text, part
    for part in ("failed (the <b>disk</b> is full)", "The run is still running at step 40 of 40"):
        assert part in text, part
    assert several.count("<article") == 12


def test_bands_are_the_spread_over_seeds(root: Path) -> None:
    """The curve of the best point of the grid: 0.5 at the start, 0.912 and 0.920 at the end, so 91.6 and 0.4."""
    runs, _ = read_runs([root])
    rows = {group.label: rows for group, rows in panels(group_runs(runs))["sst2: accuracy on dev"]}
    assert rows["MeZO"].loc[0].to_list() == [50, 50, 50]
    assert rows["MeZO"].loc[80].to_list() == pytest.approx([91.6, 91.2, 92.0])


def test_beside_backpropagation_the_axis_is_seconds_and_a_line_is_the_moved_threshold(tmp_path: Path) -> None:
    results = Path(__file__).resolve().parents[2] / "results"
    runs, _ = read_runs([results / "smollm2-sst2-s13", results / "smollm2-sst2-adamw-s13"])
    shown = panels(group_runs(runs))
    assert {rows.index.name for _, rows in shown["sst2: accuracy on dev"]} == {"seconds"}
    page, _ = write(tmp_path / "page.html", results)
    assert "the untrained model at a moved threshold: dev 70.2" in " ".join(Reader(page).text.split())


@pytest.mark.slow
def test_fifty_runs_fit_into_five_megabytes(tmp_path: Path) -> None:
    for number in range(50):
        long = {"seed": SEEDS[number % 5], "optimizer.lr": 1e-6 * (1 + number // 5), "steps": 2000, "eval_every": 100}
        make_curves(tmp_path / "runs" / str(number), {**long, **FEW}, text="long words on the way " * 20, test_rows=100)
    page, _ = write(tmp_path / "page.html", tmp_path / "runs")
    assert page.count("<article") == 50
    assert len(page.encode()) < 5_000_000


@pytest.mark.parametrize(
    ("end", "begin"),
    [
        ("svg", b"<?xml"),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("pdf", b"%PDF"), ("png", b"\x89PNG"))),
    ],
)
def test_a_figure_for_a_paper(end: str, begin: bytes, root: Path, tmp_path: Path) -> None:
    ok("report", root / "running" if end == "pdf" else root, "--figure", tmp_path / f"figure.{end}")
    (file,) = tmp_path.iterdir()
    assert file.read_bytes().startswith(begin)
    assert file.stat().st_size > 8000


def test_mistakes_end_in_one_line(root: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    bare = make_run(tmp_path_factory.mktemp("bare") / "run", ended="no memory").path
    (bare / "metrics.jsonl").unlink()
    for words, text in (
        ([root], "give --out FILE.html"),
        ([root, "--out", tmp_path / "no" / "page.html"], "there is no folder"),
        ([root, "--figure", tmp_path / "figure.gif"], "allowed are .svg, .pdf, .png"),
        ([tmp_path, "--out", tmp_path / "page.html"], "no runs under"),
        ([bare, "--out", tmp_path / "page.html", "--figure", tmp_path / "figure.svg"], "nothing to draw"),
    ):
        assert text in error_line(mezo("report", *words)), words
    assert list(tmp_path.iterdir()) == []
