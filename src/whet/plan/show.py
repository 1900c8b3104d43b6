"""A forecast as text: a table of its parts that fits a terminal, and a line for the start of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from whet import console
from whet.plan.memory import PARTS, MemoryForecast

if TYPE_CHECKING:  # which imports torch
    from whet.plan.anatomy import Anatomy, Workload

TIME: Mapping[str, str] = {
    "start": "imports and weights",
    "trial": "trial of the number format",
    "data": "batches",
    "forward": "forward passes",
    "backward": "backward passes",
    "exchange": "exchange between ranks",
    "optimizer": "updates",
    "evaluation": "evaluations and predictions",
    "saving": "checkpoints",
}
"""Part of the time in plan.json -> the words for it."""
_NAME, _AMOUNT, _SHARE = 44, 12, 8


def table(sizes: Anatomy, work: Workload, forecast: MemoryForecast) -> list[str]:
    """Return what the run is, its memory by part, the sum, what is free, and whether it fits."""
    return [*_of_run(sizes, work, forecast), "", *_of_memory(forecast, work.n_ranks)]


def _of_memory(forecast: MemoryForecast, n_ranks: int) -> list[str]:
    total = max(forecast.peak_bytes, 1)
    rows = [
        _row(PARTS[name], console.amount(n_bytes), f"{n_bytes / total:.0%}") for name, n_bytes in forecast.parts.items()
    ]
    rule = "  " + "-" * (_NAME + _AMOUNT + _SHARE)
    rows += [rule, _row(f"at the peak, {forecast.moment}", console.amount(forecast.peak_bytes), "")]
    if forecast.free_bytes is not None:
        share = f"{forecast.peak_bytes / max(forecast.free_bytes, 1):.0%}"
        whom = "this run" if n_ranks == 1 else f"each of {n_ranks} ranks"
        rows.append(_row(f"free for {whom}", console.amount(forecast.free_bytes), share))
    texts = [verdict(forecast), *(f"less sure, as {doubt}" for doubt in forecast.doubts)]
    folded = [line for text in texts for line in console.folded_message(f"  {text}", console.width(), "    ")]
    return ["memory of one rank", *rows, *folded]


def verdict(forecast: MemoryForecast) -> str:
    """Return whether the run fits, in words."""
    low, high = map(console.amount, forecast.range_bytes)
    why = f", as {forecast.why}" if forecast.why else ""
    return f"between {low} and {high}{why}: {_fits(forecast)}" if why or forecast.error_frac else _fits(forecast)


def _fits(forecast: MemoryForecast) -> str:
    if forecast.free_bytes is None:
        return "this system does not say what is free"
    if forecast.peak_bytes > forecast.free_bytes:
        return f"does not fit: {console.amount(forecast.peak_bytes - forecast.free_bytes)} too much"
    if not forecast.fits:
        return "may not fit"
    return "fits, barely" if forecast.is_tight else "fits"


def _of_run(sizes: Anatomy, work: Workload, forecast: MemoryForecast) -> list[str]:
    trained = "" if sizes.trained_frac == 1 else f", {sizes.trained_frac:.2%} trained"
    batches = len(work.heaviest)
    each = console.plural(batches, "micro-batch") if batches == 1 else f"{batches} micro-batches"
    seeds = "" if work.n_seeds == 1 else f", {work.n_seeds} times with seeds of their own"
    lines = {
        "model": f"{sizes.model_class}, {console.count(sizes.n_parameters)} parameters{trained}",
        "batches": f"{'packed' if sizes.packed else 'padded'}, {each} a step, at most "
        f"{console.plural(forecast.micro_batch_tokens, 'token')} in one",
        "settings": _settings(sizes),
        "length": f"{console.plural(work.n_steps, 'step')} over {console.plural(work.n_rows, 'row')}{seeds}",
    }
    return [console.shorten(f"{label:<11}{text}", console.width()) for label, text in lines.items()]


def _settings(sizes: Anatomy) -> str:
    parts = [sizes.precision, f"optim {sizes.optimizer}"]
    parts += [f"checkpointing {sizes.checkpointing}"] if sizes.checkpointing else []
    parts += ["optimizer in backward"] if sizes.in_backward else []
    parts += [f"LoRA of rank {sizes.adapter_rank}"] if sizes.adapter_rank else []
    return ", ".join(parts)


def _row(name: str, amount: str, share: str) -> str:
    return f"  {name:<{_NAME}}{amount:>{_AMOUNT}}{share:>{_SHARE}}".rstrip()
