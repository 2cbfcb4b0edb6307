"""The style of all plots: one colour and marker per encoding, labels at line ends, titles.

Series also differ in marker and dashes, so that plots are readable in greyscale.
"""

import colorsys
import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..data.scrolls_prompts import DATASETS

INK = "#161b22"
"""Text and axes. In SVG it becomes the page's text colour, so that one picture fits light and dark pages."""
NO_VALUE = "#b0b0b0"
"""Cells of a heat map without a value."""
SEQUENTIAL, DIVERGING = "viridis", "RdBu_r"
"""Colour maps; the diverging one is white at zero."""
LABEL_SIZE = 8.5
MARKERS = "os^Dv<>P*Xd"
LINE_STYLES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)))
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx")
"""Hatches distinguish bars, which have no markers or dashes, without colour."""
# medium lightness, visible on white and on black
ENCODINGS = {
    "tape": ("#d55e00", "o"),
    "tape2": ("#a80000", "h"),
    "rope": ("#1f77b4", "s"),
    "nope": ("#7f7f7f", "^"),
    "alibi": ("#2a9d5c", "D"),
    "fire": ("#c2185b", "v"),
    "fox": ("#66a61e", "p"),
    "t5": ("#7e57c2", "<"),
    "cope": ("#d081c4", ">"),
    "path": ("#00897b", "H"),
    "xpos": ("#17a2b8", "P"),
    "randpe": ("#5c6bc0", "*"),
    "learned": ("#8c6d1f", "X"),
    "sinusoidal": ("#b5a632", "d"),
    "tensor_tape": ("#a0522d", "s"),
}
"""Colour and marker of every encoding, fixed in all reports."""
OTHERS = ("#3d8b8b", "#b0413e", "#6b8e23", "#9c6ade", "#c98b2b", "#4f7cac")
"""Colours of plugin encodings and of models without a known encoding."""
STYLE = {
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@dataclass(frozen=True, kw_only=True)
class Plot:
    """A rendered picture."""

    name: str
    """File name without extension."""
    title: str
    alt: str
    """Text alternative for screen readers."""
    caption: str = ""
    """What bands, frames and lines mean."""
    svg: str
    """SVG for a page, which shows the title itself."""
    png: bytes
    """PNG for a file, with its title."""


@dataclass(frozen=True, kw_only=True)
class SeriesStyle:
    """The look of one series in all plots of a report."""

    colour: str
    marker: str = ""
    dashes: Any = "-"
    hatch: str = ""

    def of_line(self) -> dict[str, Any]:
        """Arguments of matplotlib's `plot`."""
        return {
            "color": self.colour,
            "marker": self.marker,
            "linestyle": self.dashes,
            "markersize": 4.5,
            "linewidth": 1.4,
        }


def series_styles(kinds: Mapping[str, str | None]) -> dict[str, SeriesStyle]:
    """The style of every label. kinds: the encoding of each label, None if unknown.

    A label that equals its encoding's name, or is the only one of its encoding, gets the encoding's colour and marker.
    Other variants get shades of the colour, other markers and other dashes.
    """
    # a label without a known encoding may be an encoding's name
    kinds = {label: kind or (label if label in ENCODINGS else None) for label, kind in kinds.items()}
    styles: dict[str, SeriesStyle] = {}
    used: list[tuple[str, str, Any]] = []
    for kind in dict.fromkeys(kinds.values()):
        labels = [label for label, its in kinds.items() if its == kind]
        # the encoding itself comes first, to keep the plain colour
        labels.sort(key=lambda label: label != kind)
        for index, label in enumerate(labels):
            if kind in ENCODINGS:
                base, first = ENCODINGS[kind]
                # find gives -1 for a marker that only an encoding has
                marker = MARKERS[(MARKERS.find(first) + index) % len(MARKERS)] if index else first
                look = shade(base, index, len(labels)), marker, LINE_STYLES[index % len(LINE_STYLES)]
            else:
                look = free_look(label if kind is None or index else kind, used)
            used.append(look)
            styles[label] = SeriesStyle(
                colour=look[0], marker=look[1], dashes=look[2], hatch=HATCHES[list(kinds).index(label) % len(HATCHES)]
            )
    return {label: styles[label] for label in kinds}


def free_look(name: str, used: Sequence[tuple[str, str, Any]]) -> tuple[str, str, Any]:
    """(colour, marker, dashes) of a name without its own: derived from the name, avoiding those in use if possible."""
    # the counts are coprime, so that a pair repeats only after 11 x 5 names
    count = len(MARKERS) * len(LINE_STYLES)
    places = [(zlib.crc32(name.encode()) + step) % count for step in range(count)]
    looks = [
        (OTHERS[place % len(OTHERS)], MARKERS[place % len(MARKERS)], LINE_STYLES[place % len(LINE_STYLES)])
        for place in places
    ]
    markers = {marker for _, marker, _ in used}
    pairs = {(marker, str(dashes)) for _, marker, dashes in used}
    colours = {(marker, colour) for colour, marker, _ in used}
    apart = [look for look in looks if (look[1], str(look[2])) not in pairs and (look[1], look[0]) not in colours]
    return next((look for look in apart if look[1] not in markers), apart[0] if apart else looks[0])


def shade(colour: str, index: int, count: int) -> str:
    """Index 0 is the colour itself; then alternately darker and lighter shades, further away each time."""
    if index == 0:
        return colour
    steps = (count + 1) // 2
    amount = ((index + 1) // 2) / max(steps, 1) * 0.55
    red, green, blue = (int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5))
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    lightness = lightness * (1 - amount) if index % 2 else lightness + (0.9 - lightness) * amount
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


@contextmanager
def figure_of(width: float, height: float) -> Iterator[Any]:
    """A matplotlib figure in the report style, sizes in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def finish(figure: Any, name: str, title: str, alt: str, caption: str = "") -> Plot:
    """Render a figure as SVG without title, and as PNG with its title."""
    import matplotlib

    svg, png = io.StringIO(), io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        figure.suptitle(heading(title), fontsize="large")
        figure.savefig(png, format="png", dpi=120, facecolor="white", metadata={"Software": None})
    return Plot(name=name, title=title, alt=alt, caption=caption, svg=inline(svg.getvalue(), name), png=png.getvalue())


def inline(svg: str, prefix: str) -> str:
    """An SVG to embed in a page with others: no header, unique ids, the page's text colour."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{prefix}-", svg)
    svg = svg.replace(INK, "currentColor")
    # screen readers use the text of the surrounding figure
    return re.sub(r"<svg ", '<svg aria-hidden="true" ', svg, count=1)


def heading(title: str) -> str:
    """A title with a capital letter; one that begins with the id of a SCROLLS set gets the set's name."""
    first, colon, rest = title.partition(":")
    known = DATASETS.get(first)
    return f"{known.title}{colon}{rest}" if known is not None else title[:1].upper() + title[1:]


def file_name(prefix: str, title: str) -> str:
    """A title as a file name."""
    return f"{prefix}-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


@dataclass(frozen=True, kw_only=True)
class EndLabel:
    """The label at the end of a series."""

    text: str
    x: float
    y: float
    colour: str


def label_ends(axes: Any, labels: Sequence[EndLabel]) -> None:
    """Write labels to the right of a plot at the height of each series' end, without overlaps.

    Call this when limits and scales are final.
    """
    if not labels:
        return
    figure = axes.figure
    figure.draw_without_rendering()
    height = axes.get_window_extent().height
    line = 1.25 * LABEL_SIZE * figure.dpi / 72 / height
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = [float(to_axes.transform((label.x, label.y))[1]) for label in labels]
    for label, place in zip(labels, spread_out(wanted, line), strict=True):
        axes.annotate(
            label.text,
            xy=(label.x, label.y),
            xytext=(1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize=LABEL_SIZE,
            color=label.colour,
            # to the middle of the label's left edge; to its centre, lines would cross the labels between
            arrowprops={
                "arrowstyle": "-",
                "color": label.colour,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
            annotation_clip=False,
        )


def spread_out(wanted: Sequence[float], gap: float) -> list[float]:
    """Heights at least `gap` apart, in the order of the wanted ones, moved as little as possible.

    Neighbours that are too close form a block around the mean of their wanted heights; touching blocks merge.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    blocks: list[list[int]] = []

    def start(block: list[int]) -> float:
        return sum(wanted[index] for index in block) / len(block) - gap * (len(block) - 1) / 2

    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and start(blocks[-1]) < start(blocks[-2]) + gap * len(blocks[-2]):
            last = blocks.pop()
            blocks[-1] += last
    places = [0.0] * len(wanted)
    for block in blocks:
        for step, index in enumerate(block):
            places[index] = start(block) + gap * step
    return places
