"""Draw with matplotlib, and put its SVG into a page, in the colours of the page's style sheet."""

import io
import logging
from collections.abc import Iterator
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
    "font.size": 10.5,
    "font.sans-serif": ["DejaVu Sans"],
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
    "lines.solid_capstyle": "round",
}
SIZE = (400, 240)  # of a figure in a page, in SVG units
MARGINS = (46, 14, 40, 22)  # left, right, bottom, top


def colour(name: str) -> str:
    """Return a colour of the style sheet as it is on white."""
    return COLOURS[name][0]


def series_name(number: int) -> str:
    """Return the name of a series' colour; after the last the first comes again."""
    return SERIES[number % len(SERIES)]


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
    from matplotlib.ticker import MaxNLocator

    (width, height), (left, right, bottom, top) = size, MARGINS
    figure = Figure((width / 72, height / 72))
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    axes = figure.add_axes(box)
    axes.margins(x=0.02)
    axes.xaxis.labelpad = 2
    axes.yaxis.set_major_locator(MaxNLocator(5, min_n_ticks=3))
    return axes


def inline_svg(axes: "Axes", name: str, label: str) -> str:
    """Return the figure of some axes as an SVG element for a page: matplotlib's, with the colours as CSS variables.

    Args:
        axes: as `new_axes` made them.
        name: unique in the page; the ids that are referred to inside the SVG follow from it.
        label: what the figure shows, for readers who do not see it.
    """
    import matplotlib

    figure: Any = axes.figure
    file, undated = io.StringIO(), dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata=undated)
    text = file.getvalue()
    for variable, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--{variable})")
    head = f'<svg class="plot" role="img" aria-label="{escape(printable(label))}"'
    return head + text[text.index("<svg") + len("<svg") :]
