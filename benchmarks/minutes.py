"""Minutes and money of a training: the tables of docs/cost.md, from the rates in the result files of the benchmarks.

    python benchmarks/minutes.py            # prints the tables
    python benchmarks/minutes.py --write    # writes them into the page

A rate is the median, over the steps of a match, of real tokens a second; whet and transformers' fastest options took
the same steps. The rows of the H200's steps are made again to count their tokens, which its result file has not.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "cost.md"
EXAMPLES, EPOCHS = 10_000, 3
"""What the tables are made for; the site's page takes others."""


@dataclass(frozen=True)
class Machine:
    """What was measured, and an example of its price."""

    name: str
    what: str
    results: str
    """The suffix of the result files that were measured on it."""
    usd_per_h: float


@dataclass(frozen=True)
class Rate:
    """Real tokens a second of a training on a machine."""

    job: str
    machine: str
    tokens_per_example: float
    whet: float
    transformers: float


@dataclass(frozen=True)
class Step:
    """What one side did in one step, or in several that were timed together."""

    tokens: float
    seconds: float


TWO_OF_SIXTEEN = 1.00 * 2 / 16
"""$ an hour of two of the 16 vCPUs of Hugging Face Jobs' CPU XL."""
MACHINES = (
    Machine("Zen 5", "two cores of an AMD EPYC with AVX-512 and bf16", "", TWO_OF_SIXTEEN),
    Machine("AMX", "two cores of an Intel Xeon with AMX", "-amx", TWO_OF_SIXTEEN),
    Machine("AVX2", "two cores of an AMD EPYC (Zen 3) with AVX2 alone", "-avx2", TWO_OF_SIXTEEN),
    Machine("H200", "one NVIDIA H200 and 16 cores", "", 5.00),
)
CPUS = MACHINES[:3]
ANSWERS = {
    "minilm": "answers, MiniLM",
    "distilbert": "answers, DistilBERT's size",
    "bert-base": "answers, BERT-base size",
}
INTENTS = {"minilm": "intents, MiniLM", "deberta": "intents, DeBERTa-v3-base size"}
BATCH = {"minilm": 16, "deberta": 8}
"""Rows of a step in the benchmark of encoders; of answers it is in the file."""


def rates() -> Iterator[Rate]:
    """Yield each job on each machine that was measured with it."""
    for model, job in ANSWERS.items():
        for machine in CPUS:
            steps = _read("cpu", machine)["steps"]
            matches = {name: _of_rounds(rounds) for name, rounds in steps["raw"][model].items()}
            yield _rate(job, machine, _tokens_of_answers(), matches)
        if model == "bert-base":
            yield _on_a_gpu(job)
    for model, job in INTENTS.items():
        found = _read("encoders", CPUS[0])[model]["intents"]
        tokens = mean(found["defaults"]["tokens"]) / BATCH[model]
        for machine in (CPUS[0], CPUS[2]):
            matches = _read("encoders", machine).get(model, {}).get("intents")
            if matches:
                yield _rate(job, machine, tokens, {name: _of_sides(match) for name, match in matches.items()})


def _read(folder: str, machine: Machine) -> Any:
    return json.loads((HERE / folder / f"results{machine.results}.json").read_text("utf-8"))


def _of_rounds(rounds: Sequence[Mapping[str, Any]]) -> dict[str, list[Step]]:
    """Return each side's steps of a match on answers, in which the first side says how many tokens a step had."""
    first, *_ = sides = list(rounds[0])
    return {side: [Step(one[first]["n_tokens"], one[side]["seconds"]) for one in rounds] for side in sides}


def _of_sides(match: Mapping[str, Any]) -> dict[str, list[Step]]:
    """Return each side's steps of a match of the encoders."""
    return {
        side: [Step(*one) for one in zip(match["tokens"], seconds, strict=True)]
        for side, seconds in match["seconds"].items()
    }


def _rate(job: str, machine: Machine, tokens: float, matches: Mapping[str, Mapping[str, Sequence[Step]]]) -> Rate:
    """Return the rates in the match with the faster of transformers' best options."""
    best = {name: match for name, match in matches.items() if name.startswith("best")}
    name = max(best, key=lambda name: _per_s(best[name][name]))
    whet = best[name].get("whet_auto") or best[name]["whet_fp32"]
    return Rate(job, machine.name, tokens, _per_s(whet), _per_s(best[name][name]))


def _per_s(steps: Sequence[Step]) -> float:
    return median(one.tokens / one.seconds for one in steps)


@cache
def _tokens_of_answers() -> float:
    """Return the mean tokens of a row of XQuAD, in the steps whose rows were drawn at random."""
    rounds = _read("cpu", CPUS[0])["steps"]["raw"]["minilm"]["guides_fp32+optimize_fp32"]
    found = [one["guides_fp32"] for one in rounds]
    return sum(one["n_tokens"] for one in found) / sum(len(one["rows"]) for one in found)


def _on_a_gpu(job: str) -> Rate:
    """Return the rates of the GPU's steps, on rows of the demo's data in batches of like lengths."""
    sys.path.insert(0, str(HERE / "gpu"))
    from worker import JOBS, in_order

    model = JOBS["bert-base"]
    data = HERE.parent / "src/whet/jobs/demo_data/train.json"
    measured = [row for row in json.loads((HERE / "gpu/results.json").read_text("utf-8"))["rows"]
                if row["job"] == "bert-base"]  # fmt: skip
    (batch,) = {row["batch"] for row in measured}
    rows = in_order(model.rows(data, model.longest), batch, 60)
    per_step = mean(len(row["input_ids"]) for row in rows) * batch  # pyright: ignore[reportArgumentType]
    ms = {row["side"]: median(row["ms"]) for row in measured}
    return Rate(job, "H200", _tokens_of_answers(), 1e3 * per_step / ms["whet"], 1e3 * per_step / ms["best"])


def tables() -> dict[str, str]:
    """Return both tables by the name of their place on the page."""
    prices = [(one.name, one.what, f"{one.usd_per_h:g}") for one in MACHINES]
    usd_per_h = {one.name: one.usd_per_h for one in MACHINES}
    runs = []
    for rate in rates():
        tokens, *per_s = map(round, (rate.tokens_per_example, rate.whet, rate.transformers))  # as readers see them
        minutes = [EXAMPLES * EPOCHS * tokens / of / 60 for of in per_s]
        usd = [of / 60 * usd_per_h[rate.machine] for of in minutes]
        runs.append(
            (rate.job, rate.machine, f"{tokens}", *(f"{of:,}" for of in per_s), *map(_digits, (*minutes, *usd)))
        )  # fmt: skip
    return {
        "prices": _table(("machine", "measured on", "$ an hour"), prices),
        "runs": _table(
            ("job", "machine", "tokens an example", "whet, tokens/s", "transformers, tokens/s", "whet, min",
             "transformers, min", "whet, $", "transformers, $"), runs,
        ),
    }  # fmt: skip


def _digits(value: float) -> str:
    """Return the value with the digits that mean something."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in (head, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:], ""])


def written() -> str:
    """Return the page with its tables made again."""
    text = PAGE.read_text("utf-8")
    for name, table in tables().items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        assert marks.search(text), f"the page has no place for the table of {name}"
        text = marks.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)
    return text


def main() -> None:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/cost.md")
    if parser.parse_args().write:
        PAGE.write_text(written(), "utf-8")
    else:
        print("\n".join(tables().values()))


if __name__ == "__main__":
    main()
