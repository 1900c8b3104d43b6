"""What the table says about runs that were measured: ratios, medians, and losses that must be equal."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from whet.bench import run as bench
from whet.bench.arguments import BenchArguments
from whet.bench.run import Row, cells, plain_settings, run_child
from whet.bench.techniques import PLAIN, TECHNIQUES, Base, choose, why_not
from whet.config.arguments import TrainingArguments
from whet.config.optimizer_names import OPTIONS
from whet.tasks.qa.arguments import QaArguments

NAMED = {one.name: one for one in TECHNIQUES}


def run(step_s: float = 0.5, peak_bytes: int = 100, losses: tuple[float, ...] = (3.0, 2.0)) -> dict[str, Any]:
    return {
        "step_s": [step_s, step_s], "peak_bytes": peak_bytes, "losses": list(losses), "precision": "fp32",
    }  # fmt: skip


def test_ratios_are_within_a_round_and_the_median_counts() -> None:
    plain = Row(NAMED[PLAIN], runs=[run(0.5), run(1.0), run(0.5)])
    slower = Row(NAMED["checkpointing_blocks"], runs=[run(1.0, 40), run(2.0, 40), run(5.0, 60)])
    line = bench.lines([plain, slower])[1]
    assert (line.speed_ratio, line.steps_per_s) == (0.5, 0.5)
    assert (line.peak_bytes, line.peak_ratio) == (40, 0.4)


@pytest.mark.parametrize(
    ("losses", "equal"),
    [((3.0, 2.0), True), ((3.0, 2.00001), True), ((3.0, 2.01), False), ((3.0,), False), ((3.0, math.nan), False)],
)
def test_losses_that_must_be_equal_are_compared(losses: tuple[float, ...], equal: bool) -> None:
    rows = [Row(NAMED[PLAIN], runs=[run()]), Row(NAMED["accumulation"], runs=[run(losses=losses)])]
    line = bench.lines(rows)[1]
    shown = cells(line)
    assert line.equal is equal
    assert shown[-2] == ("=" if equal else "!=")
    assert equal or shown[-1].startswith("WRONG: its losses must equal those of plain")
    json.dumps(line.to_dict(), allow_nan=False)


def test_a_technique_that_changes_the_loss_on_purpose_is_not_judged() -> None:
    rows = [Row(NAMED[PLAIN], runs=[run()]), Row(NAMED["adafactor"], runs=[run(losses=(3.0, 1.0))])]
    line = bench.lines(rows)[1]
    assert line.equal is None
    assert line.error is None


def test_a_row_that_failed_shows_why_and_no_figure() -> None:
    line = bench.lines([Row(NAMED[PLAIN], runs=[run()]), Row(NAMED["tf32"], error="no GPU")])[1]
    assert cells(line)[1:] == ["-", "-", "-", "-", "-", "", "CANNOT RUN: no GPU"]


def test_what_a_technique_must_equal_runs_too() -> None:
    assert [one.name for one in choose(["optimizer_in_backward"], [])] == [
        PLAIN,
        "no_clipping",
        "optimizer_in_backward",
    ]
    assert "muon" not in [one.name for one in choose([], ["muon"])]


@pytest.mark.parametrize(("rows", "split"), [(12, (3, 8)), (6, (2, 6)), (7, (1, 14))])
def test_accumulation_keeps_the_rows_of_a_step(rows: int, split: tuple[int, int]) -> None:
    args = TrainingArguments(per_device_train_batch_size=rows, gradient_accumulation_steps=2)
    changes = NAMED["accumulation"].changes(Base(plain_settings(args, 5), 384))
    assert (changes["per_device_train_batch_size"], changes["gradient_accumulation_steps"]) == split


def test_a_recipe_keeps_its_settings_but_not_its_length() -> None:
    settings = plain_settings(TrainingArguments(recipe="few_samples", layerwise_lr_decay=0.9), 5)
    args = TrainingArguments(**settings)
    assert (args.max_steps, args.min_steps, args.layerwise_lr_decay, args.warmup_steps) == (5, None, 0.9, 0.1)


def test_what_cannot_be_tried_says_why() -> None:
    base = Base(plain_settings(TrainingArguments(per_device_train_batch_size=1), 5), 384)
    assert "one row" in str(why_not(NAMED["accumulation"], base))
    assert why_not(NAMED["fp32"], base) == "the plain run has this setting already"
    assert why_not(NAMED["checkpointing_blocks"], base) is None
    unknown = type(NAMED[PLAIN])(name="new", changes=lambda _: {"not_a_field": 1})
    assert why_not(unknown, base) == "this version of whet has no not_a_field"


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda one: one.name)
def test_settings_of_every_technique_construct_or_are_refused_by_a_rule(technique: Any) -> None:
    base = Base(plain_settings(TrainingArguments(), 5), 384)
    if why_not(technique, base) is None:
        TrainingArguments(**{**base.settings, **technique.changes(base)})


@pytest.mark.slow
def test_a_process_that_takes_too_long_is_ended() -> None:
    assert run_child({"qa": {}, "args": {}, "warmup": 0}, 0.05) == {"error": "not finished after 0.05 s (--limit_s)"}


def test_every_optimizer_and_what_the_guides_name_has_a_row() -> None:
    others_by_another_name = {"adamw_hf", "adamw_8bit", "auto"}
    assert OPTIONS.keys() - NAMED.keys() == others_by_another_name
    fields = {name for one in TECHNIQUES for name in one.changes(Base(plain_settings(TrainingArguments(), 5), 384))}
    guides = {
        "gradient_accumulation_steps", "gradient_checkpointing", "bf16", "fp16", "tf32", "optim", "attn_implementation",
        "dataloader_pin_memory", "dataloader_num_workers", "torch_empty_cache_steps", "torch_compile",
        "auto_find_batch_size", "activation_offload", "max_tokens_per_batch", "optimizer_in_backward",
    }  # fmt: skip
    assert guides - fields == set()


def test_the_file_grows_with_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that were ended by hand leave what was measured before; what is refused is skipped, with the reason."""
    told = {"adafactor": {"error": "no room", "why": "w", "refused": False},
            "sgd": {"error": "needs a GPU", "why": "its kernels run there", "refused": True}}  # fmt: skip
    monkeypatch.setattr(bench, "run_child", lambda spec, _: told.get(spec["args"]["optim"], run()))
    qa = QaArguments(model_name_or_path="m", train_file="t.json")
    asked, base = BenchArguments(rounds=2), Base(plain_settings(TrainingArguments(optim="adamw_torch"), 5), 384)
    seen: list[list[int]] = []
    rows = bench.measure(
        asked, qa, base, [NAMED[name] for name in (PLAIN, "sgd", "adafactor", "muon")],
        lambda so_far: seen.append([len(row.runs) for row in so_far]),
    )  # fmt: skip
    assert seen == [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 1], [2, 0, 0, 1], [2, 0, 0, 2]]
    assert [cells(line)[-1] for line in bench.lines(rows)][1:3] == [
        "skipped: needs a GPU (its kernels run there)",
        "CANNOT RUN: no room",
    ]
