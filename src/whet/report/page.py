"""The page of one run, or of several next to each other: one file of HTML, with its style, script and figures inside.

Everything that comes from a file is text here, never markup: the template escapes it, and control characters and those
that change the writing direction are shown as escapes. The page asks for nothing from any address, and its policy lets
no script run but its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

from whet.config.rules.training import REPORT_NAME
from whet.console import amount, duration, plural
from whet.errors import escape_controls
from whet.report.bars import Bars, time_text
from whet.report.curves import MOST_COLOURS, Curve
from whet.report.runs import (
    SPLITS,
    TIMES,
    UNKNOWN,
    Confusion,
    Examples,
    Run,
    judged_names,
    judges,
    number,
    number_text,
    words_of,
)
from whet.report.runs import finite as _known
from whet.version import __version__

GENERATOR = "whet report"
_LONGEST_HEAD, _LONGEST_TEXT, _LONGEST_ANSWER = 600, 6000, 600
"""Characters of an example that are shown at once, and after a click; and of its expected or predicted answer."""
_MOST_LABELS = 150
"""Labels of the largest matrix that is drawn; with more, those that are confused most."""
_MOST_PAIRS = 20
_HEADLINES = ("accuracy", "f1", "exact_match", "exact", "f1_micro", "f1_macro", "pearson", "perplexity",
              "cosine_ndcg@10", "ndcg@10", "cosine_mrr@10", "mrr@10", "spearman_cosine", "spearman", "cosine_accuracy",
              "average_precision", "loss")  # fmt: skip
"""The metrics that are worth the largest letters, if a run has them."""


def render(runs: Sequence[Run], curves: Sequence[Curve], bars: Sequence[Bars], folder: Path) -> str:
    """Return the page of these runs, with their curves and the bars of a forecast.

    Links to pages of single runs begin in `folder`.
    """
    script = _resource("page.js")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}\n".encode()).digest()).decode()
    shared = {
        "css": Markup(_resource("page.css")),  # noqa: S704 - a file of this package
        "script": Markup(script),  # noqa: S704 - a file of this package
        "script_hash": Markup(f"sha256-{digest}"),  # noqa: S704 - base64
        "generator": f"{GENERATOR}, whet {__version__}",
    }
    empty = dict.fromkeys(
        ("figures", "compared", "forecast", "tried", "worst", "confusions", "metrics", "evaluations", "charts", "times",
         "settings", "command", "facts")
    )  # fmt: skip
    content = empty | (_one(runs[0]) if len(runs) == 1 else _several(runs, folder)) | {"charts": curves, "bars": bars}
    content["lacks"] = [(run.name if len(runs) > 1 else "", *lack) for run in runs for lack in run.lacks]
    content["sections"] = [(id_, words) for id_, part, words in _SECTIONS if content[part]]
    written = _when(time.time())
    names = ", ".join(runs[0].read_from) if len(runs) == 1 else f"the files of {len(runs)} runs"
    content["footer"] = f"Written by whet {__version__} on {written} from {names}."
    return _template().render(shared | content)


_SECTIONS = (
    ("runs", "compared", "Runs"), ("examples", "worst", "Worst examples"),
    ("confusion", "confusions", "Confused labels"), ("metrics", "metrics", "Metrics"),
    ("forecast", "forecast", "Forecast"), ("curves", "charts", "Curves"), ("time", "times", "Time"),
    ("auto", "tried", "Automatic choice"), ("settings", "settings", "Settings"),
    ("run", "facts", "Command and machine"), ("lacks", "lacks", "Missing"),
)  # fmt: skip


@cache
def _template() -> jinja2.Template:
    """Return the template. What it prints is escaped, unless it is Markup: only this module makes some."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, finalize=_finalized, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "attr": lambda text: escape(escape_controls(str(text))),
        "count": lambda value: f"{value:,}" if isinstance(value, int) else number_text(value),
        "figure": number_text,
        "percent": lambda share: f"{share:.1%}" if share < 0.0995 else f"{share:.0%}",
        "plain": lambda value: "" if (found := number(value)) is None else repr(found),
        "probability": lambda value: UNKNOWN if value is None else f"{value:.3f}" if value >= 0.0005 else "< 0.001",
        "loss": lambda value: UNKNOWN if value is None else f"{value:.2f}",
        "row": lambda value: UNKNOWN if value is None else str(value),
        "shown": _shown,
        "label": lambda text: Markup("_<wbr>").join(map(_shown, str(text).split("_"))),
    }
    return environment.from_string(_resource("page.html"))


def _resource(name: str) -> str:
    return Path(__file__).with_name(name).read_text("utf-8").rstrip("\n")


def _finalized(value: Any) -> Any:
    return escape_controls(value, keep="\n\t") if type(value) is str else value


def _shown(text: Any) -> Markup:
    """Return the text as markup that shows each of its control characters as an escape of its own kind of letters."""
    text = str(text)
    if text.replace("\n", "").replace("\t", "").isprintable():
        return escape(text)
    parts = (char if (shown := escape_controls(char, keep="\n\t")) == char else (shown,) for char in text)
    return Markup().join(  # each part is escaped
        Markup('<span class="c">{}</span>').format(part[0]) if isinstance(part, tuple) else part for part in parts
    )


def _one(run: Run) -> dict[str, Any]:
    task = run.begin.get("task")
    return {
        "title": f"{run.name}: report of whet",
        "kicker": f"whet {task}" if task else "Report of a training",
        "heading": run.name,
        "summary": _summary(run),
        "figures": _headlines(run),
        "forecast": _forecast(run),
        "worst": [_examples(one, run) for one in run.examples],
        "confusions": [_confusion(one) for one in run.confusions],
        "metrics": _metrics([run]),
        "evaluations": _evaluations(run),
        "times": _times(run),
        "tried": _tried(run),
        "settings": _settings(run),
        "command": _command(run),
        "facts": _facts(run),
    }


def _several(runs: Sequence[Run], folder: Path) -> dict[str, Any]:
    compared = [
        {
            "name": run.name, "state": _state(run), "link": _link(run, folder),
            "time": duration(taken) if (taken := _train_s(run)) is not None else UNKNOWN,
            "memory": _bytes(run.peak_bytes) + (f" ({run.peak_of.strip()})" if run.peak_of else ""),
        }
        for run in runs
    ]  # fmt: skip
    title = f"{len(runs)} runs: report of whet"
    summary = f"{', '.join(run.name for run in runs)}: what differs in their settings, and what came of it."
    return {
        "title": title, "kicker": "Runs next to each other", "heading": f"{len(runs)} runs", "summary": summary,
        "compared": compared, "most_colours": MOST_COLOURS, "metrics": _metrics(runs), "settings": _differing(runs),
    }  # fmt: skip


def _link(run: Run, folder: Path) -> str | None:
    """Return the address of the run's own page, relative to the folder of this one; None if it has none there."""
    from urllib.parse import quote

    page = run.folder.resolve() / REPORT_NAME
    if not page.is_file() or not page.is_relative_to(folder.resolve()):
        return None
    return "./" + quote(page.relative_to(folder.resolve()).as_posix())


# What a run reached


def _state(run: Run) -> str:
    status = run.end.get("status")
    if status in ("finished", "stopped", "failed"):
        return str(status)
    return "no end recorded" if run.begin.get("event") else "log of a Trainer"


def _summary(run: Run) -> str:
    last = run.steps[-1] if run.steps else None
    at = f"step {last.step:,} of {last.of:,}" if last and last.of else ""
    began, ended = (_known(one.get("time")) for one in (run.begin, run.end))
    taken = f", {duration(ended - began)} after it began" if began is not None and ended is not None else ""
    when = f" on {_when(ended)}" if ended is not None else ""
    parts = {
        "finished": f"The run finished{when}{taken}.",
        "stopped": f"The run was stopped{when}{taken}{f', at {at}' if at else ''}.",
        "failed": f"The run failed{when}{taken}{f', at {at}' if at else ''}: {run.end.get('error')}",
    }
    words = parts.get(str(run.end.get("status")))
    if words is None and run.begin.get("event"):
        began_at = f" It began on {_when(began)}." if began is not None else ""
        words = (
            f"No end of the run is recorded: it still runs, or it was killed{f' after {at}' if at else ''}.{began_at}"
        )
    if words is None:
        words = f"What transformers' Trainer has logged{f', up to {at}' if at else ''}."
    if run.resumed_at:
        words += f" It was resumed from step {' and '.join(f'{step:,}' for step in run.resumed_at)}."
    return words


def _headlines(run: Run) -> list[dict[str, str]]:
    found = []
    for prefix in ("eval", "predict"):
        for one in [one for one in _HEADLINES if f"{prefix}_{one}" in run.metrics][:2]:
            value, before = (
                run.metrics[f"{prefix}_{one}"],
                run.metrics.get(f"start_{one}") if prefix == "eval" else None,
            )
            text = number_text(value) + ("" if before is None else f", {number_text(before)} before")
            found.append((f"{words_of(one)}, {SPLITS[prefix]}", text))
    for one in run.examples:
        if one.n_wrong is not None:
            of = "" if one.n_judged is None else f" of {one.n_judged:,}"
            found.append((f"wrong, {SPLITS[one.prefix]}", f"{one.n_wrong:,}{of}"))
    if (taken := _train_s(run)) is not None:
        found.append(("training time", duration(taken)))
    if (rate := _known(run.metrics.get("train_tokens_per_second"))) is not None:
        found.append(("real tokens a second", f"{rate:,.0f}"))
    if (peak := run.peak_bytes) is not None:
        found.append((f"peak memory{run.peak_of}", amount(peak)))
    return [{"label": label, "value": value} for label, value in found]


def _train_s(run: Run) -> float | None:
    return run.train_s or _known(run.metrics.get("train_runtime"))


def _forecast(run: Run) -> list[dict[str, str]]:
    """Return what was expected of memory and time, next to what came; of a resumed run, of its last process."""
    forecast, rows, since = run.forecast, [], " since the resume" if run.resumed_at else ""
    peak, found = _known(forecast.get("peak_bytes")), _known(run.end.get("peak_bytes"))
    if peak is not None:
        rows.append((f"peak memory{since}", amount(peak), _bytes(found), _ratio(peak, found)))
    expected, began = _known(forecast.get("train_s")), _known(run.begin.get("time"))
    taken = _known(run.end.get("train_s")) or (None if run.resumed_at else _known(run.metrics.get("train_runtime")))
    if expected is not None:
        low, high = _known(forecast.get("low")), _known(forecast.get("high"))
        between = f" ({duration(low)} to {duration(high)})" if low is not None and high is not None else ""
        shown = UNKNOWN if taken is None else duration(taken)
        rows.append((f"training time{since}", duration(expected) + between, shown, _ratio(expected, taken)))
        if began is not None:
            shown = UNKNOWN if taken is None else _when(began + taken)
            rows.append(("end of the training", _when(began + expected), shown, ""))
    return [dict(zip(("label", "expected", "found", "ratio"), row, strict=True)) for row in rows]


def _tried(run: Run) -> dict[str, Any] | None:
    """Return what --auto has tried, what it has taken, and what flags of the user's cost; None without --auto."""
    auto = run.begin.get("auto")
    if not isinstance(auto, dict):
        return None
    tried, prices = (found if isinstance(found := auto.get(name), list) else [] for name in ("tried", "prices"))
    rows = [
        {
            "setting": str(one.get("setting")), "memory": _bytes(one.get("peak_bytes")),
            "step": UNKNOWN if (seconds := _known(one.get("step_s"))) is None else f"{seconds:.3g} s",
            "note": "taken" if one.get("setting") == auto.get("setting") else str(one.get("why") or ""),
        }
        for one in tried if isinstance(one, dict)
    ]  # fmt: skip
    return {"rows": rows, "prices": [str(text) for text in prices]} if rows else None


def _ratio(expected: float, found: float | None) -> str:
    return UNKNOWN if found is None or expected <= 0 else f"{found / expected:.2f}"


def _metrics(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Return the table of final metrics: of one run a column a split, of several a column a run."""
    if not any(run.metrics for run in runs):
        return None
    if len(runs) > 1:
        names = dict.fromkeys(name for run in runs for name in run.metrics)
        rows = {name: [run.metrics.get(name) for run in runs] for name in names}
        columns = [run.name for run in runs]
    else:
        by_split = {prefix: {} for prefix in SPLITS}
        for name, value in runs[0].metrics.items():
            prefix, _, rest = name.partition("_")
            of_split = by_split.get(prefix)
            if of_split is None or not rest:
                by_split["train"][name] = value
            else:
                of_split[rest] = value
        splits = {prefix: own for prefix, own in by_split.items() if own}
        names = dict.fromkeys(name for own in splits.values() for name in own)
        rows = {name: [own.get(name) for own in splits.values()] for name in names}
        columns = [SPLITS[prefix] for prefix in splits]
    plain = [name for name in rows if judges(name)]
    return {
        "caption": "Metrics at the end",
        "columns": columns,
        "rows": [{"name": name, "values": rows[name]} for name in plain],
        "others": [{"name": name, "values": rows[name]} for name in rows if name not in plain],
    }


def _evaluations(run: Run) -> dict[str, Any] | None:
    if len(run.evaluations) < 2:
        return None
    names = judged_names([run])
    rows = [{"step": step, "values": [found.get(name) for name in names]} for step, found in run.evaluations.items()]
    return {"columns": [name.removeprefix("eval_") for name in names], "rows": rows}


def _times(run: Run) -> dict[str, Any] | None:
    total = sum(run.seconds.values())
    if total <= 0:
        return None
    ordered = sorted(run.seconds.items(), key=lambda part: -part[1])
    longest = ordered[0][1]
    rows = [
        {
            "name": TIMES.get(name, words_of(name)),
            "time": time_text(s),
            "share": s / total,
            "width": round(100 * s / longest, 1),
        }
        for name, s in ordered
    ]
    return {"caption": f"{duration(total)} of the training, by part", "rows": rows}


# Its examples and labels


def _examples(one: Examples, run: Run) -> dict[str, Any]:
    """Return the table of the worst examples; labels can be chosen if they are those of a few or of a matrix."""
    rows = [_example(row, one.file) for row in one.rows]
    for n, row in enumerate(rows if one.n_wrong is not None else []):
        row["is_right"] = n >= one.n_wrong_rows
    expected, predicted = ([*dict.fromkeys(row[name] for row in rows)] for name in ("expected", "predicted"))
    labels = {label for matrix in run.confusions if matrix.prefix == one.prefix for label in matrix.labels}
    if {*expected, *predicted} <= labels or 2 * max(len(expected), len(predicted)) <= len(rows):
        expected, predicted = sorted(expected), sorted(predicted)
        for row in rows:
            row |= {"expected_at": expected.index(row["expected"]), "predicted_at": predicted.index(row["predicted"])}
    else:
        expected = predicted = []
    numbers = [name for name in ("score", "probability", "loss", "rank") if any(row[name] is not None for row in rows)]
    numbers += ["row"] if any(row["row"] is not None for row in rows) else []
    return {
        "id": f"{one.prefix}-examples",
        "split": SPLITS[one.prefix],
        "caption": _caption(one, run.begin.get("task")),
        "columns": ["Example", "Expected", "Predicted", *numbers],
        "numbers": numbers,
        "rows": rows,
        "expected_names": expected,
        "predicted_names": predicted,
    }


def _caption(one: Examples, task: Any) -> str:
    n_all, split = len(one.rows) + one.n_more, SPLITS[one.prefix]
    if not n_all:
        return f"The model gets no example of the {split} split wrong."
    rest = f" Shown are the worst {len(one.rows):,}; {one.file} has all {n_all:,}." if one.n_more else ""
    if any(row.get("score") is not None for row in one.rows):
        rest += " First come answers that share no word with the expected one, the surest of them at the top: the score"
        rest += " is the probability of the predicted answer."
    known = [row.get("probability") is not None for row in one.rows]
    if any(known):
        missing = "" if all(known) else f"; {UNKNOWN}: it is not among the model's best"
        rest += f" The probability is that of the expected answer{missing}."
    if any("rank" in row for row in one.rows):
        far = (
            f"; {UNKNOWN}: it is not among the first hundred"
            if any(row.get("rank") is None for row in one.rows)
            else ""
        )
        rest += f" The rank is the place of the first text that fits the query{far}."
    if one.n_wrong is None:
        stretch = " Expected is the hardest stretch of the text; predicted, the likeliest tokens in its place."
        return f"{plural(n_all, 'example')} of the {split} split, worst first.{rest}{stretch if task == 'lm' else ''}"
    unsure = f", then {n_all - one.n_wrong:,} that it is least sure of" if n_all > one.n_wrong else ""
    return (
        f"{plural(one.n_wrong, 'example')} of the {split} split that the model gets wrong, worst first{unsure}.{rest}"
    )


def _example(row: Mapping[str, Any], file: str) -> dict[str, Any]:
    question = row.get("question")
    empty = "nothing" if question is None else "no answer"
    expected, predicted = (_answer(row.get(name), empty) for name in ("expected", "predicted"))
    texts = [str(row[name]) for name in ("text", "text_pair", "context") if row.get(name)]
    text = "\n\n".join(texts)
    head, rest = text[:_LONGEST_HEAD], text[_LONGEST_HEAD:_LONGEST_TEXT]
    if len(rest) < _LONGEST_HEAD // 4 and len(text) < _LONGEST_TEXT:
        head, rest = text, ""
    return {
        "passage": {
            "lead": "" if question is None else str(question)[:_LONGEST_HEAD],
            "head": head, "rest": rest, "n_lost": max(0, len(text) - _LONGEST_TEXT), "file": file,
        },
        "expected": expected, "predicted": predicted, "is_right": None,
        "expected_at": None, "predicted_at": None,
        "score": number(row.get("score")),
        "probability": number(row.get("probability")), "loss": number(row.get("loss")),
        "rank": number(row.get("rank")),
        "row": row["row"] if isinstance(row.get("row"), int | str) else None,
    }  # fmt: skip


def _answer(value: Any, empty: str) -> str:
    if value is None:
        return UNKNOWN
    if value in ("", []):
        return empty
    if isinstance(value, list) and all(isinstance(part, str) for part in value):
        value = ", ".join(value)
    text = value if isinstance(value, str) else f"{value:.5g}" if isinstance(value, float) else json.dumps(value)
    return text if len(text) <= _LONGEST_ANSWER else f"{text[:_LONGEST_ANSWER]} …"


def _confusion(one: Confusion) -> dict[str, Any]:
    totals = [sum(row) for row in one.counts]
    wrong = sorted(
        ((n, a, b) for a, row in enumerate(one.counts) for b, n in enumerate(row) if a != b and n),
        key=lambda pair: (-pair[0], pair[1], pair[2]),
    )
    pairs = [
        {"expected": one.labels[a], "predicted": one.labels[b], "n": n, "of": totals[a], "share": n / totals[a]}
        for n, a, b in wrong[:_MOST_PAIRS]
    ]
    kept = range(len(one.labels))
    if len(one.labels) > _MOST_LABELS:
        kept = sorted([*dict.fromkeys(label for _, a, b in wrong for label in (a, b))][:_MOST_LABELS])
    split = SPLITS[one.prefix]
    more = f"the {len(pairs)} most frequent of {len(wrong):,}" if len(wrong) > len(pairs) else f"all {len(pairs)}"
    of = f"the {len(kept)} most confused of {len(one.labels):,} labels" if len(kept) < len(one.labels) else ""
    return {
        "split": split,
        "examples": f"{one.prefix}-examples",
        "pairs": pairs,
        "pairs_caption": f"Pairs of labels that are confused in the {split} split: {more}.",
        "labels": [one.labels[n] for n in kept],
        "caption": f"Confusion matrix of the {split} split{f', {of} ({one.file} has all)' if of else ''}. Rows: the"
        " expected label. Columns: the predicted one. An empty cell is 0; the shade is the share of the row.",
        "rows": [
            {"label": one.labels[a], "cells": [_cell(one, a, b, totals[a]) for b in kept]} for a in kept
        ],
        "note": "Point at a cell, or touch it, for its labels.",
    }  # fmt: skip


def _cell(one: Confusion, a: int, b: int, total: int) -> dict[str, Any]:
    n = one.counts[a][b]
    if not n:
        return {"n": 0}
    words = f"expected {one.labels[a]}, predicted {one.labels[b]}: {n:,} of {total:,}"
    # at most 45: letters in the page's ink stay readable on it
    return {"n": n, "kind": "right" if a == b else "off", "shade": round(8 + 37 * n / total), "words": words}


# Its settings and its machine


def _settings(run: Run) -> dict[str, Any] | None:
    if not run.settings:
        return None
    chosen, others = [], []
    for name, entry in run.settings.items():
        origin = entry.get("from")
        is_default = origin in (None, "default")
        row = {"name": name, "values": [_value(entry.get("value"))], "origin": None if is_default else str(origin)}
        (others if is_default else chosen).append(row)
    words = "Settings that differ from their default, and where each came from." if chosen else ""
    return {
        "rows": chosen, "others": others, "columns": ["Value", "From"],
        "caption": words or "Every setting has its default value.",
    }  # fmt: skip


def _differing(runs: Sequence[Run]) -> dict[str, Any] | None:
    if not any(run.settings for run in runs):
        return None
    names = dict.fromkeys(name for run in runs for name in run.settings)
    values = {name: [_value(run.settings[name].get("value")) if name in run.settings else UNKNOWN for run in runs]
              for name in names}  # fmt: skip
    rows = [{"name": name, "values": own, "origin": None} for name, own in values.items()
            if len({*own}) > 1 and name != "output_dir"]  # fmt: skip
    words = "Settings that differ between the runs." if rows else "The runs have the same settings."
    return {"rows": rows, "others": [], "columns": [run.name for run in runs], "caption": words}


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _command(run: Run) -> str | None:
    command = run.begin.get("command")
    return " ".join(map(str, command)) if isinstance(command, list) else command


def _facts(run: Run) -> list[tuple[str, str]]:
    """Return what the run recorded of its model, its data and its machine, in words."""
    found = []
    for part in ("model", "data", "machine"):
        entries = run.begin.get(part)
        for name, value in entries.items() if isinstance(entries, dict) else ():
            if value is not None:
                shown = amount(float(value)) if name.endswith("_bytes") and number(value) is not None else value
                words = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else _value(value)
                found.append((f"{part}: {words_of(name.removesuffix('_bytes'))}", shown if shown != value else words))
    for name, words in (("host", "host"), ("version", "whet"), ("whet", "whet")):
        if run.begin.get(name) is not None:
            found.append((words, _value(run.begin[name])))
    return found


# Times and amounts


def _bytes(value: Any) -> str:
    found = _known(value)
    return UNKNOWN if found is None else amount(found)


def _when(seconds: float) -> str:
    with suppress(OverflowError, ValueError, OSError):
        then = time.gmtime(seconds)
        return f"{then.tm_mday} {time.strftime('%b %Y, %H:%M UTC', then)}"
    return UNKNOWN
