"""Draw with matplotlib, and turn a figure into SVG for a page: small, and in the colours of the page's style sheet."""

import io
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

from mezo_cli.console import printable

if TYPE_CHECKING:  # matplotlib is imported when a figure is drawn
    from matplotlib.axes import Axes

# Name of a variable of the style sheet -> colour on white and on black. Each is distinct: SVG is coloured by replacing
# the first by the variable. The six of the series differ in lightness too, for readers who see no hue.
COLOURS = {
    "ink": ("#1d1e20", "#e8e6e1"),
    "quiet": ("#5c6066", "#a3a8b0"),
    "rule": ("#dcdad3", "#33373e"),
    "page": ("#fcfbf8", "#15171a"),
    "c1": ("#1f5fbf", "#78aefc"),
    "c2": ("#c04a0a", "#ff9c5e"),
    "c3": ("#0d7a5c", "#4ecba5"),
    "c4": ("#8a3f9e", "#d694ec"),
    "c5": ("#8a6a00", "#e2bd55"),
    "c6": ("#b01f5c", "#ff8ab5"),
}
SERIES = ("c1", "c2", "c3", "c4", "c5", "c6")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mezo",
    "font.size": 10.5,
    "font.family": "sans-serif",
    "axes.edgecolor": COLOURS["rule"][0],
    "axes.labelcolor": COLOURS["quiet"][0],
    "text.color": COLOURS["ink"][0],
    "xtick.color": COLOURS["quiet"][0],
    "ytick.color": COLOURS["quiet"][0],
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": COLOURS["rule"][0],
    "grid.linewidth": 0.8,
    "ytick.left": False,
    "xtick.bottom": False,
    "ytick.major.pad": 4,
    "lines.solid_capstyle": "round",
    "path.simplify": False,
}
SIZE = (400, 240)  # of a figure in a page, in SVG units
REFERENCE = re.compile(r'(?:url\(#|xlink:href="#)([\w.-]+)')
FONT = re.compile(
    r"font: (?:(\w+) )?[\d.]+px [^;\"]*"
)  # matplotlib before 3.10 writes weight, size and family together
USUAL_STYLE = re.compile(  # what style.css says of every figure
    rf"(font-family: [^;\"]*|font-size: {STYLE['font.size']}px|stroke-line(cap: square|join: miter))(; )?"
)
MARGINS = (46, 14, 40, 22)  # left, right, bottom, top


def colour(name: str) -> str:
    """Return a colour of the style sheet as it is on white."""
    return COLOURS[name][0]


@contextmanager
def drawing(**style: Any) -> Iterator[None]:
    """Draw with the style of the pages inside the block, whatever the user's matplotlibrc says."""
    import matplotlib

    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # of fonts and caches, which do not matter here
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE | style)
        yield


def new_axes(size: tuple[int, int] = SIZE) -> "Axes":
    """Return the axes of a new figure for a page. Must be called inside `drawing`."""
    from matplotlib.figure import Figure

    (width, height), (left, right, bottom, top) = size, MARGINS
    figure = Figure((width / 72, height / 72))
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    axes = figure.add_axes(box)
    axes.margins(x=0.02)
    axes.xaxis.labelpad = 2
    return axes


def inline_svg(axes: "Axes", name: str, label: str) -> str:
    """Return the figure of some axes as an SVG element for a page.

    Args:
        axes: as `new_axes` made them.
        name: unique in the page; the ids inside the SVG start with it.
        label: what the figure shows, for readers who do not see it.
    """
    file = io.StringIO()
    figure: Any = axes.figure
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    used = {name: str(number) for number, name in enumerate(dict.fromkeys(re.findall(REFERENCE, text)))}
    text = re.sub(r"<[^>]*>", lambda tag: _small_tag(tag[0], name, used), text)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r'<path d="[^"]*" style="fill: none"/>|<defs></defs>', "", text)  # the invisible background
    text = _without_plain_groups(text)
    for variable, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{variable})")
    width, height = (round(72 * side) for side in figure.get_size_inches())
    head = f'<svg class="plot" role="img" viewBox="0 0 {width} {height}" aria-label="{escape(printable(label))}">'
    return head + text[text.index(">") + 1 :].strip()


def _small_tag(tag: str, name: str, used: Mapping[str, str]) -> str:
    """Return a tag without what a page does not need; ids that are referred to begin with `name`."""
    if tag.startswith("</"):
        return tag
    tag = re.sub(r' id="([\w.-]+)"', lambda found: f' id="{name}-{used[found[1]]}"' if found[1] in used else "", tag)
    tag = re.sub(REFERENCE, lambda found: f"{found[0].removesuffix(found[1])}{name}-{used[found[1]]}", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^)]*\)"', "", tag.replace("xlink:href", "href"))
    tag = re.sub(FONT, lambda found: f"font-weight: {found[1] or 'normal'}", tag)
    tag = re.sub(USUAL_STYLE, "", tag)
    tag = re.sub(r"-?\d+\.\d+", lambda found: f"{round(float(found[0]), 1):g}", tag)
    tag = re.sub(r"\s*\n\s*", " ", tag).replace(' "', '"')
    return re.sub(r' d="[^"]*"', lambda path: path[0].replace(" L ", " "), tag)  # more points after M are lines


def _without_plain_groups(text: str) -> str:
    """Return SVG without groups that have no attributes: they change nothing."""
    kept: list[bool] = []

    def keep(tag: re.Match[str]) -> str:
        if tag[0] != "</g>":
            kept.append(tag[0] != "<g>")
            return tag[0] if kept[-1] else ""
        return tag[0] if kept.pop() else ""

    return re.sub(r"<g>|<g [^>]*>|</g>", keep, text)
