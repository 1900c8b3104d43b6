"""The bars of a forecast, memory and time by part: on the page of a run, and as the picture of `whet plan`.

Parts have the names of plan.json, which a run's record uses as well. On a page, what a run took stands next to what was
forecast. In a picture each way to run it has a bar of its own, and a part has one colour in all of them.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from whet.console import amount, duration, fine_duration
from whet.plan.memory import PARTS as MEMORY
from whet.plan.show import TIME
from whet.report.curves import MOST_COLOURS, STAND_INS, for_the_page
from whet.report.runs import TIMES, Run, number

_STEP = ("data", "forward", "backward", "exchange", "optimizer")
_PASSES, _UPDATE = TIMES["forward_backward"], TIMES["update"]
_AS_RECORDED = {"trial": TIME["trial"], "data": TIMES["data"], "forward": _PASSES, "backward": _PASSES,
                "exchange": _UPDATE, "optimizer": _UPDATE, "evaluation": TIMES["evaluation"],
                "saving": TIMES["saving"]}  # fmt: skip
"""Parts of a forecast -> the words for the part of a run's record that they are in."""
_LEAST_FRAC = 0.01
"""Parts with a smaller share in every bar are drawn together."""
_FAR = 2.5
"""A line further away than so many bars is named but not drawn, as the bars could not be read."""
_REST = "other parts"
_WIDTH, _EDGE = 360, 10
"""Of a figure in points, which are pixels on a phone."""
_TITLE, _LINE, _BAR, _GAP, _AXIS, _KEY = 20, 15, 18, 12, 27, 18
"""Heights in points."""
_LINES: Sequence[Any] = ((0, (4, 2)), (0, (1.5, 1.5)))
_DPI = 200


@dataclass(frozen=True)
class Bar:
    """The parts of one amount."""

    name: str
    parts: Mapping[str, float]
    """The words for a part -> its size, in the order in which they are drawn."""

    @property
    def total(self) -> float:
        """All parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Bars:
    """A figure: bars that share an axis, and what they are compared with."""

    title: str
    bars: Sequence[Bar]
    form: Callable[[float], str]
    """Makes text of a size."""
    lines: Mapping[str, float]
    """Words -> size."""
    svg: Markup | None = None

    @property
    def words(self) -> str:
        """The sizes, for those who do not see the figure."""
        texts = []
        for bar in self.bars:
            parts = ", ".join(f"{name} {self.form(size)}" for name, size in bar.parts.items())
            texts.append(f"{bar.name}: {self.form(bar.total)} ({parts})")
        return "; ".join([*texts, *(f"{words}: {self.form(size)}" for words, size in self.lines.items())]) + "."


def of_plans(plans: Mapping[str, Mapping[str, Any]]) -> list[Bars]:
    """Return the bars of these forecasts: words for the settings -> `memory`, and `time` if known, as in plan.json."""
    memory = [Bar(name, _sizes(plan["memory"]["parts"], MEMORY)) for name, plan in plans.items()]
    step_words = {part: TIME[part] for part in _STEP}
    steps = [Bar(name, _sizes(plan["time"]["step"], step_words)) for name, plan in plans.items() if plan.get("time")]
    free = next(iter(plans.values()))["memory"]["free_bytes"]
    lines = {"free for this run": float(free)} if free else {}
    return _shown(
        Bars("Memory of one rank at its peak", memory, amount, lines), Bars("Time of a step", steps, fine_duration, {})
    )


def of_run(run: Run) -> list[Bars]:
    """Return what was forecast of a run next to what it took; nothing if its record has no parts of a forecast."""
    forecast = run.forecast
    memory, time = _sizes(forecast.get("parts"), MEMORY), _sizes(forecast.get("time"), _AS_RECORDED)
    lines = {"it took": _size(run.end.get("peak_bytes")), "was free": _size(forecast.get("free_bytes"))}
    known = {name: size for name, size in lines.items() if size}
    taken = [Bar("it took", _sizes(run.seconds_of_last, TIMES))] if run.end else []
    return _shown(
        Bars("Memory at the peak", [Bar("forecast", memory)], amount, known),
        Bars("Time of the training", [Bar("forecast", time), *taken] if time else [], time_text, {}),
    )


def draw(runs: Sequence[Run]) -> list[Bars]:
    """Return the figures of one run's forecast, drawn for its page; the page of several runs has none."""
    drawn = []
    for n, figure in enumerate(of_run(runs[0]) if len(runs) == 1 else (), start=1):
        svg = _svg([figure], f"bars-{n}")
        drawn.append(replace(figure, svg=for_the_page(svg, f"bars-{n}", figure.title, figure.words)))
    return drawn


def write(path: Path, title: str, figures: Sequence[Bars]) -> None:
    """Write the figures as a picture: an SVG is light or dark as its reader's screen is, a PNG is light."""
    from whet.watch import files as output_files

    light, _ = palettes()
    if path.suffix.lower() == ".svg":
        content = _of_its_own(_svg(figures, "plan", title), title, figures).encode()
    else:
        with io.BytesIO() as out:
            _figure(figures, light, title).savefig(out, format="png", dpi=_DPI)
            content = out.getvalue()
    with output_files.stored(f"{path.name} cannot be written", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        output_files.write_bytes(path, content)


def palettes() -> Sequence[Mapping[str, str]]:
    """Return the light and the dark colours of the page, by their names."""
    blocks = re.findall(r":root \{(.*?)\}", Path(__file__).with_name("page.css").read_text("utf-8"), re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in blocks]


def time_text(seconds: float) -> str:
    """Return a time of a run's part: 9.3s, 40s or 2m05s."""
    return duration(seconds) if seconds >= 60 or seconds == int(seconds) else f"{seconds:.1f}s"


# ---- sizes ----


def _size(value: Any) -> float:
    """Return the size that a file has; 0 for what is none."""
    found = number(value)
    return found if found is not None and math.isfinite(found) and found > 0 else 0.0


def _sizes(parts: Any, words: Mapping[str, str]) -> dict[str, float]:
    """Return the sizes of these parts by their words; parts with the same words are added up."""
    found: dict[str, float] = {}
    for name, text in words.items():
        if size := _size(parts.get(name)) if isinstance(parts, Mapping) else 0.0:
            found[text] = found.get(text, 0.0) + size
    return found


def _shown(*figures: Bars) -> list[Bars]:
    """Return the figures that have something to show, their small parts joined."""
    return [
        replace(figure, bars=_joined(figure.bars)) for figure in figures if any(bar.total > 0 for bar in figure.bars)
    ]


def _joined(bars: Sequence[Bar]) -> list[Bar]:
    """Return the bars with one part for all that are small, or have no colour left."""
    shares: dict[str, float] = {}
    for bar in bars:
        for name, size in bar.parts.items():
            shares[name] = max(shares.get(name, 0.0), size / bar.total)
    small = [name for name, share in shares.items() if share < _LEAST_FRAC]
    own = shares.keys() - (small if len(small) > 1 else ())
    own = sorted(own, key=lambda name: -shares[name])[: MOST_COLOURS - 1]
    joined = []
    for bar in bars:
        parts = {name: size for name, size in bar.parts.items() if name in own}
        rest = bar.total - sum(parts.values())
        joined.append(Bar(bar.name, parts | ({_REST: rest} if len(parts) < len(bar.parts) else {})))
    return joined


# ---- drawing ----


def _svg(figures: Sequence[Bars], salt: str, title: str = "") -> str:
    """Return the figures as SVG, in the colours that stand for those of the page."""
    import matplotlib as mpl

    # letters stay letters; parts that refer to each other have names that no other figure of a page has
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}), io.StringIO() as out:
        no_facts = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _figure(figures, STAND_INS, title).savefig(out, format="svg", metadata=no_facts)
        return out.getvalue()


def _of_its_own(svg: str, title: str, figures: Sequence[Bars]) -> str:
    """Return the SVG as a file: as wide as its window, in light or dark colours, with its title and its words."""
    light, dark = palettes()
    rules = []
    for name, stand_in in STAND_INS.items():
        svg = svg.replace(stand_in, light[name])
        rules += [f'[style*="{what}: {light[name]}"]{{{what}:{dark[name]}!important}}' for what in ("fill", "stroke")]
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(dict.fromkeys(rules))}}}</style>"
    words = " ".join(f"{figure.title}: {figure.words}" for figure in figures)
    width = '<svg role="img" width="100%" style="max-width:60rem;height:auto"'
    svg = re.sub(r'<svg(.*?) width="[^"]*" height="[^"]*"', lambda found: width + found[1], svg, count=1)
    at = svg.index(">", svg.index("<svg")) + 1
    return f"{svg[:at]}<title>{escape(title)}</title><desc>{escape(words)}</desc>{style}{svg[at:]}"


def _figure(figures: Sequence[Bars], colours: Mapping[str, str], title: str) -> Any:
    """Return the figures one below the other; with a title, on a ground of their own."""
    from matplotlib.figure import Figure

    head = [line for text in title.splitlines() for line in textwrap.wrap(text, 50)]
    heights = [_height(figure, has_title=bool(title)) for figure in figures]
    height = sum(heights) + (len(head) * _LINE + 2 * _EDGE if title else 0)
    drawn = Figure(figsize=(_WIDTH / 72, height / 72), facecolor=colours["paper"] if title else "none")
    top = height
    if title:
        top -= _EDGE
        drawn.text(
            _EDGE / _WIDTH, top / height, "\n".join(head), va="top", size=11, weight="bold", color=colours["ink"]
        )
        top -= len(head) * _LINE + _EDGE / 2
    for figure, own in zip(figures, heights, strict=True):
        if title:
            drawn.text(_EDGE / _WIDTH, top / height, figure.title, va="top", size=11, color=colours["ink"])
        _draw(drawn, figure, colours, top - (_TITLE if title else 0), height, left=_EDGE if title else _EDGE / 3)
        top -= own
    return drawn


def _height(figure: Bars, *, has_title: bool) -> float:
    n_keys = len(_names(figure)) + len(figure.lines)
    return (_TITLE if has_title else 0) + _bars_height(figure) + _AXIS + n_keys * _KEY + _GAP


def _bars_height(figure: Bars) -> float:
    return sum(len(_label(figure, bar)) * _LINE + _BAR + _GAP for bar in figure.bars)


def _names(figure: Bars) -> list[str]:
    """Return the parts in the order of their colours, those that are joined last."""
    found = dict.fromkeys(name for bar in figure.bars for name in bar.parts if name != _REST)
    return [*found, *([_REST] if any(_REST in bar.parts for bar in figure.bars) else [])]


def _label(figure: Bars, bar: Bar) -> list[str]:
    """Return the name of a bar and its size, in lines; a flag and its value stay on one."""
    joined = re.sub(r"(--\S+) (?!-)", "\\1\N{NO-BREAK SPACE}", bar.name)
    lines = textwrap.wrap(f"{joined}: {figure.form(bar.total)}", 52, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _draw(drawn: Any, figure: Bars, colours: Mapping[str, str], top: float, height: float, left: float) -> None:
    """Draw the bars of a figure with their axis and the key to their colours; `top` is in points from below."""
    from matplotlib import ticker
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    own, largest = _bars_height(figure), max(bar.total for bar in figure.bars)
    near = [size for size in figure.lines.values() if size <= _FAR * largest]
    axes = drawn.add_axes(
        (left / _WIDTH, (top - own) / height, 1 - (left + 2 * _EDGE) / _WIDTH, own / height), facecolor="none"
    )
    axes.set_xlim(0, 1.02 * max([largest, *near]))
    axes.set_ylim(own, 0)
    names = _names(figure)
    colour_of = {name: colours[f"run-{MOST_COLOURS - 1 if name == _REST else n}"] for n, name in enumerate(names)}
    y = 0.0
    for bar in figure.bars:
        label = _label(figure, bar)
        y += len(label) * _LINE
        ground = {"facecolor": colours["paper"], "edgecolor": "none", "pad": 1.5}
        axes.text(0, y - 3, "\n".join(label), va="bottom", size=11, color=colours["ink"], bbox=ground)
        begin = 0.0
        for name in names:
            size = bar.parts.get(name, 0.0)
            edge = {"edgecolor": colours["paper"], "linewidth": 0.8}
            axes.barh(y + _BAR / 2, size, left=begin, height=_BAR, color=colour_of[name], **edge)
            begin += size
        y += _BAR + _GAP
    handles: list[Any] = [Patch(facecolor=colour_of[name], edgecolor="none") for name in names]
    labels = [_with_size(figure, name) for name in names]
    for (words, size), style in zip(figure.lines.items(), _LINES, strict=False):
        is_near = size in near
        if is_near:
            axes.axvline(size, color=colours["ink"], linewidth=1.4, linestyle=style)
        handles.append(Line2D([], [], color=colours["ink"] if is_near else "none", linewidth=1.4, linestyle=style))
        labels.append(f"{words}: {figure.form(size)}{'' if is_near else ', far to the right'}")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(colours["muted"])
    axes.grid(axis="x", color=colours["line"], linewidth=1)
    axes.set_axisbelow(True)
    axes.set_yticks([])
    axes.tick_params(colors=colours["muted"], length=0, labelsize=11)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(4))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda size, _: figure.form(size) if size else "0"))
    axes.legend(
        handles, labels, loc="upper left", bbox_to_anchor=(0, -_AXIS / own), borderaxespad=0, borderpad=0,
        frameon=False, labelcolor=colours["ink"], fontsize=11, handlelength=1.2, handletextpad=0.6, labelspacing=0.45,
    )  # fmt: skip


def _with_size(figure: Bars, name: str) -> str:
    """Return the words for a part, with its size in the only bar."""
    return name if len(figure.bars) > 1 else f"{name}: {figure.form(figure.bars[0].parts[name])}"
