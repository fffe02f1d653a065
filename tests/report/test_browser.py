"""The page in headless Chromium: no message, no request, nothing clipped at two widths, no figure without a drawing."""

import html
import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mezo_cli.report.figures import COLOURS
from tests.command_line import HANGS, mezo
from tests.report.run_directories import SEEDS, make_curves, make_run

pytestmark = pytest.mark.slow

WIDTHS = (390, 1280)
PAGES = ("one", "several", "six")
# Without these it asks for updates and tries names of its own.
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
OPTIONS += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"]
OPTIONS += ["--enable-logging=stderr", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]

# A page that opens the reports in frames of two widths, with every section open, and writes down what it measures.
CHECK = """<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,"><body><script>
const wait = (frame) => new Promise((done) => { frame.onload = done; });
const within = (a, b) => a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1;
const overlap = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 2 && b.top < a.bottom - 2;
async function measure(name, width) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; width: ${width}px; height: 3000px`;
  frame.src = name;
  const loaded = wait(frame);
  document.body.append(frame);
  await loaded;
  const page = frame.contentDocument, found = {name, width, outside: [], cut: [], overlaps: [], empty: [], figures: 0};
  page.querySelectorAll("details").forEach((one) => { one.open = true; });
  const say = (one) => `${one.tagName} ${one.getAttribute("class")} ${one.textContent.trim().slice(0, 50)}`;
  for (const one of page.body.querySelectorAll("*")) {
    const box = one.getBoundingClientRect();
    if (one.closest(".scroll > *") || one.closest(".skip") || !box.width) continue;
    if (box.left < -0.5 || box.right > width + 0.5) found.outside.push(say(one));
    if (getComputedStyle(one).overflowX === "hidden" && one.scrollWidth > one.clientWidth + 1) found.cut.push(say(one));
  }
  for (const figure of page.querySelectorAll("svg.plot")) {
    found.figures += 1;
    const frame = figure.getBoundingClientRect(), label = figure.getAttribute("aria-label");
    const texts = [...figure.querySelectorAll("text")].map((one) => [one, one.getBoundingClientRect()]);
    for (const [one, box] of texts) {
      if (!within(box, frame)) found.cut.push(`${label}: ${one.textContent}`);
      for (const [other, second] of texts)
        if (one !== other && overlap(box, second))
          found.overlaps.push(`${label}: ${one.textContent}, ${other.textContent}`);
    }
    const drawn = [...figure.querySelectorAll("path, use")].filter((one) => one.closest("defs") === null)
      .filter((one) => !/--rule|--quiet/.test(one.getAttribute("style"))).map((one) => one.getBoundingClientRect());
    if (!drawn.some((box) => box.width > 3 || box.height > 3)) found.empty.push(label);
  }
  found.scrolls = page.documentElement.scrollWidth;
  found.requests = frame.contentWindow.performance.getEntriesByType("resource").map((one) => one.name);
  found.background = getComputedStyle(page.body).backgroundColor;
  found.line = getComputedStyle(page.querySelector('svg [style*="stroke: var(--c"]')).stroke;
  return found;
}
(async () => {
  const all = [];
  for (const name of PAGES) for (const width of WIDTHS) all.push(await measure(name, width));
  const out = document.createElement("pre");
  out.id = "measured";
  out.textContent = JSON.stringify(all);
  document.body.replaceChildren(out);
})();
</script>"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the pages: one run; many of several kinds; a task of six labels with texts that have no space."""
    site, runs = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("runs")
    few = {"data.shots": 16}
    make_curves(runs / "one" / "run", {"steps": 300, **few})
    for seed in SEEDS[:3]:
        for lr in (1e-7, 1e-6, 1e-5):
            grid = {"optimizer.lr": lr, "seed": seed, **few}
            make_curves(runs / "several" / f"{lr}-{seed}", grid, gain=0.2 + lr * 1e4 + seed / 500)
        make_curves(
            runs / "several" / f"long-name-without-any-place-to-break-{'x' * 60}-{seed}", {"seed": seed, "steps": 80}
        )
    make_run(runs / "several" / "failed", few, ended="a reason " * 30)
    make_run(runs / "several" / "zero-shot", {"steps": 0, **few})
    held = make_curves(runs / "several" / "running", {"seed": 87, **few}, ended="running")
    make_curves(runs / "six" / "run", {"task": "trec", "eval_every": 2}, text="y" * 300)
    for name in PAGES:
        said = mezo("report", runs / name, "--out", site / f"{name}.html")
        assert (said.code, said.err) == (0, ""), said
    del held  # with its lock
    pages = [f"{name}.html" for name in PAGES]
    check = CHECK.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (site / "check.html").write_text(check, encoding="utf-8")
    return site


class Recorder(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and keeps the paths that were asked for."""

    asked: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        self.asked.append(self.path)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    handler = type("SiteRecorder", (Recorder,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_the_pages_in_a_browser(scheme: int, chromium: str, address: tuple[str, list[str]], tmp_path: Path) -> None:
    url, asked = address
    command = [chromium, *OPTIONS, "--dump-dom", "--virtual-time-budget=60000", f"--user-data-dir={tmp_path}"]
    command += [f"--blink-settings=preferredColorScheme={1 - scheme}", f"{url}/check.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stdout[-500:] + done.stderr[-2000:]
    measured = json.loads(html.unescape(found[1]))
    places = [(f"{name}.html", width) for name in PAGES for width in WIDTHS]
    assert [(one["name"], one["width"]) for one in measured] == places
    for one in measured:
        where = f"{one['name']} at {one['width']}"
        for kind in ("outside", "cut", "overlaps", "empty", "requests"):
            assert one[kind] == [], f"{where}: {kind}"
        assert one["scrolls"] <= one["width"], where
        assert one["figures"] >= 4, where
        assert one["background"] == f"rgb{tuple(bytes.fromhex(COLOURS['page'][scheme][1:]))}", where
        assert one["line"] in [f"rgb{tuple(bytes.fromhex(COLOURS[f'c{n}'][scheme][1:]))}" for n in range(1, 7)], where
    assert "CONSOLE" not in done.stderr, done.stderr
    assert set(asked) == {"/check.html", *(f"/{name}.html" for name in PAGES)}
