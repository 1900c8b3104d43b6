"""The curves of a page: SVG elements that matplotlib draws, in the letters and the light or dark colours of the page.

Of one run a figure shows the training and the validation; of several it has a line a run.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from whet.console import amount
from whet.errors import escape_controls
from whet.report.runs import Run, judged_names, number, number_text, words_of

MOST_COLOURS = 8
"""Runs whose curves have colours and patterns of their own; more are compared in the tables alone."""
_MOST_POINTS = 300
"""Points of a line; of more, each is the mean of several."""
STAND_INS = {"muted": "#010101", "line": "#020202", "ink": "#030303", "paper": "#040404"} | {
    f"run-{n}": f"#0a0a0{n}" for n in range(MOST_COLOURS)
}
"""The variables of page.css -> the colours that stand for them in what matplotlib draws."""
_DASHES: Sequence[Any] = ("solid", (0, (6, 3)), (0, (2, 2)), (0, (8, 2, 2, 2))) * 2
"""As in page.css."""


@dataclass(frozen=True)
class Line:
    """The values of one quantity in one run."""

    name: str
    slot: int
    """Of the colours and patterns."""
    points: Sequence[tuple[float, float]]
    """(step, value), by step."""
    has_dots: bool = False


@dataclass(frozen=True)
class Curve:
    """A figure with what it shows in words, for those who do not see it."""

    title: str
    lines: Sequence[Line]
    form: Callable[[float], str]
    """Makes text of a value."""
    from_zero: bool = False
    """Whether the axis begins at zero, as of amounts, whose sizes a reader compares."""
    resumed_at: Sequence[int] = ()
    svg: Markup | None = None

    @property
    def words(self) -> str:
        """How each line begins and ends, and between which values it stays."""
        parts = []
        for line in self.lines:
            values = [value for _, value in line.points]
            first, last, low, high = (self.form(value) for value in (values[0], values[-1], min(values), max(values)))
            name = f"{line.name}: " if len(self.lines) > 1 else ""
            if low == high:
                parts.append(f"{name}{first} throughout")
                continue
            between = "" if {low, high} == {first, last} else f" (between {low} and {high})"
            parts.append(f"{name}{first} to {last} at step {line.points[-1][0]:,}{between}")
        if self.resumed_at:
            steps = ", ".join(f"{step:,}" for step in self.resumed_at)
            parts.append(f"dotted line: resumed from step {steps}")
        return "; ".join(parts) + "."


def draw(runs: Sequence[Run]) -> list[Curve]:
    """Return the curves of these runs. matplotlib, whose import takes 0.4 s, is imported if there is one."""
    curves = [curve for curve in _curves(runs[:MOST_COLOURS]) if curve.lines]
    if not curves:
        return []
    import matplotlib as mpl

    drawn = []
    for n, curve in enumerate(curves, start=1):
        # letters stay letters; parts that refer to each other have names that no other figure of the page has
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": str(n), "font.size": 11}):
            drawn.append(replace(curve, svg=for_the_page(_svg(curve), f"curve-{n}", curve.title, curve.words)))
    return drawn


def _curves(runs: Sequence[Run]) -> Iterator[Curve]:
    """Yield what could be drawn of these runs, with lines or without."""
    resumed = runs[0].resumed_at if len(runs) == 1 else []
    losses, judged = _logged(runs, "loss"), _judged(runs, "eval_loss")
    if len(runs) == 1 and losses and judged:
        both = [replace(losses[0], name="training"), replace(judged[0], name="validation", slot=1)]
        yield Curve("Loss", both, number_text, resumed_at=resumed)
    else:
        yield Curve("Loss of the training", losses, number_text, resumed_at=resumed)
        yield Curve("Loss, validation", judged, number_text)
    for name in judged_names(runs):
        if name != "eval_loss":
            title = f"{words_of(name.removeprefix('eval_'))}, validation"
            yield Curve(title[0].upper() + title[1:], _judged(runs, name), number_text)
    yield Curve("Learning rate", _logged(runs, "learning_rate"), number_text, resumed_at=resumed)
    yield Curve("Gradient norm", _logged(runs, "grad_norm"), number_text, resumed_at=resumed)
    speed, memory = _logged(runs, "tokens_per_s"), _logged(runs, "resident_bytes")
    yield Curve("Real tokens a second", speed, "{:,.0f}".format, from_zero=True, resumed_at=resumed)
    yield Curve("Memory of the process", memory, amount, from_zero=True, resumed_at=resumed)


def _logged(runs: Sequence[Run], name: str) -> list[Line]:
    points = [_finite((one.step, getattr(one, name)) for one in run.steps) for run in runs]
    return [Line(run.name, n, own) for n, (run, own) in enumerate(zip(runs, points, strict=True)) if len(own) > 1]


def _judged(runs: Sequence[Run], name: str) -> list[Line]:
    points = [_finite((step, number(one.get(name))) for step, one in run.evaluations.items()) for run in runs]
    return [Line(run.name, n, own, True) for n, (run, own) in enumerate(zip(runs, points, strict=True)) if len(own) > 1]


def _finite(points: Iterable[tuple[int, float | None]]) -> list[tuple[float, float]]:
    return [(step, value) for step, value in points if value is not None and math.isfinite(value)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = -(-len(points) // _MOST_POINTS)
    groups = [points[n : n + size] for n in range(0, len(points), size)]
    return [(sum(step for step, _ in one) / len(one), sum(value for _, value in one) / len(one)) for one in groups]


def _svg(curve: Curve) -> str:
    """Return the figure as a file of its own, in the colours that stand for those of the page."""
    from matplotlib import ticker
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 2.6), facecolor="none")
    axes = figure.add_axes((0.15, 0.15, 0.83, 0.8), facecolor="none")
    for line in curve.lines:
        steps, values = zip(*_thinned(line.points), strict=True)
        dots = {"marker": "o", "markersize": 3.5} if line.has_dots else {}
        axes.plot(
            steps, values, color=STAND_INS[f"run-{line.slot}"], linewidth=1.6, linestyle=_DASHES[line.slot], **dots
        )
    for step in curve.resumed_at:
        axes.axvline(step, color=STAND_INS["muted"], linewidth=1, linestyle=":")
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(STAND_INS["muted"])
    if curve.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=STAND_INS["line"], linewidth=1)
    axes.tick_params(colors=STAND_INS["muted"], length=0)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.yaxis.set_major_locator(ticker.MaxNLocator(4))
    form = "{:g}".format if curve.form is number_text else curve.form
    axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: form(value) if value else "0"))
    with io.StringIO() as out:
        figure.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        return out.getvalue()


def for_the_page(svg: str, name: str, title: str, words: str) -> Markup:
    """Return a figure without what only a file of its own needs, in the page's colours, with its title and its words.

    `name` is that of no other element of the page.
    """
    body = svg[svg.index("<svg") : svg.rindex("</svg>")]
    view, body = re.search(r'viewBox="([^"]*)"', body), body[body.index(">") + 1 :]
    assert view is not None
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    for variable, colour in STAND_INS.items():
        body = body.replace(colour, f"var(--{variable})")
    described = Markup('<title id="{0}-title">{1}</title><desc id="{0}-words">{2}</desc>').format(
        name, escape_controls(title), escape_controls(words)
    )
    start = '<svg class="chart" role="img" viewBox="{0}" aria-labelledby="{1}-title" aria-describedby="{1}-words">'
    return Markup(start).format(view[1], name) + described + Markup(f"{body}</svg>")  # noqa: S704 - matplotlib escapes
