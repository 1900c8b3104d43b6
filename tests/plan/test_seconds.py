"""The forecast of a run's time: its parts add up, and each setting moves the part that it should."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from known_rates import FLOPS, known_rates

from whet.console import duration, fine_duration
from whet.plan.anatomy import Anatomy, MicroBatch, Product, Reading, Workload
from whet.plan.rates import nominal
from whet.plan.seconds import STEP_PARTS, forecast, prices, table

WIDTH, LAYERS, VOCABULARY = 384, 6, 30522


def encoder(**changes: Any) -> Anatomy:
    """Return the sizes of a MiniLM with a head for answers."""
    sizes = [(WIDTH, WIDTH, 4 * LAYERS), (WIDTH, 4 * WIDTH, LAYERS), (4 * WIDTH, WIDTH, LAYERS)]
    products = [Product(n_in, n_out, times, "blocks", trained=True) for n_in, n_out, times in sizes]
    blocks = sum(one.n_weights * one.times for one in products)
    parameters = {"embeddings": (VOCABULARY + 512) * WIDTH, "blocks": blocks, "head": 2 * WIDTH}
    given: dict[str, Any] = {
        "model_class": "BertForQuestionAnswering", "model_type": "bert", "family": "bert", "packed": True,
        "causal": False, "parameters": parameters, "trained": parameters, "width": WIDTH, "layers": LAYERS,
        "heads": 12, "kv_heads": 12, "head_width": 32, "inner_width": 4 * WIDTH, "vocabulary": VOCABULARY,
        "products": (*products, Product(WIDTH, 2, 1, "head", trained=True)), "precision": "fp32",
        "weight_bytes": 4 * sum(parameters.values()), "checkpointing": None, "optimizer": "auto",
        "in_backward": False, "adapter_rank": 0,
    }  # fmt: skip
    return Anatomy(**(given | changes))


def batch(n_rows: int = 8, length: int = 128, n_targets: int | None = None) -> MicroBatch:
    """Return a packed batch of rows of one length."""
    n = n_rows * length
    return MicroBatch(np.full(n_rows, length), n, n if n_targets is None else n_targets)


def work(*steps: tuple[MicroBatch, ...], **changes: Any) -> Workload:
    """Return a run of a hundred such steps."""
    steps = steps or ((batch(),),)
    return Workload(**({"n_steps": 100, "n_rows": 800, "steps": steps, "heaviest": steps[0]} | changes))


def test_the_parts_add_up_to_the_run() -> None:
    found = forecast(known_rates(), encoder(), work(n_evaluations=2, evaluation=Reading((batch(),), 5)))
    assert found.step.keys() == set(STEP_PARTS)
    assert found.train_s == pytest.approx(100 * found.step_s + found.run["evaluation"])
    assert found.total_s == pytest.approx(found.train_s + found.run["start"])
    low, high = found.range_s
    assert low < found.total_s < high


def test_products_take_the_operations_that_they_have() -> None:
    found = forecast(known_rates(), encoder(), work())
    products = 2 * 1024 * LAYERS * 12 * WIDTH**2 / FLOPS["fp32"]
    assert found.step["forward"] == pytest.approx(products, rel=0.2)  # and attention, and the ends
    assert found.step["forward"] > products
    assert found.step["backward"] > 2 * products


def test_a_step_is_the_mean_over_the_rows_of_its_own() -> None:
    short, long = ((batch(8, 32),), (batch(8, 256),))
    model = encoder(optimizer="adamw_torch")  # whose update does not depend on the words in the rows
    each = [forecast(known_rates(), model, work(step)).step_s for step in (short, long)]
    both = forecast(known_rates(), model, work(short, long))
    assert both.step_s == pytest.approx(sum(each) / 2)
    assert each[1] > 8 * each[0] * 0.9  # attention grows faster than the tokens


def test_without_a_measurement_settings_have_their_order() -> None:
    """Which is all that --auto asks of forecasts where no memory is left to measure the machine."""
    rates = nominal()
    pieces = ((batch(2),) * 4,)
    once, split, again = (
        forecast(rates, encoder(checkpointing=policy), work(*steps)).step_s
        for policy, steps in ((None, ()), (None, pieces), ("blocks", ()))
    )
    assert once <= split < again
    large = encoder(products=[replace(one, times=2 * one.times) for one in encoder().products])
    assert forecast(rates, large, work()).step_s > 1.5 * once
    assert all(forecast(rates, encoder(precision=form), work()).step_s > 0 for form in ("fp32", "bf16", "auto"))


def test_checkpointing_adds_about_a_forward_pass_to_backward() -> None:
    plain = forecast(known_rates(), encoder(), work())
    again = forecast(known_rates(), encoder(checkpointing="blocks"), work())
    assert again.step["forward"] == plain.step["forward"]
    more = again.step["backward"] - plain.step["backward"]
    assert 0.5 * plain.step["forward"] < more < plain.step["forward"]
    selective = forecast(known_rates(), encoder(checkpointing="selective"), work())
    assert plain.step_s < selective.step_s < again.step_s


def test_adapters_leave_out_the_gradients_of_frozen_weights() -> None:
    rates, plain = known_rates(), encoder()
    products = tuple(replace(one, trained=False, rank=8 if one.n_out == WIDTH else 0) for one in plain.products)
    trained = {"embeddings": 0, "blocks": 1000, "head": 768}
    adapted = encoder(products=products, trained=trained, adapter_rank=8)
    found, full = forecast(rates, adapted, work()), forecast(rates, plain, work())
    assert found.step["backward"] < full.step["backward"]
    assert found.step["optimizer"] < 0.01 * full.step["optimizer"]
    assert found.error_frac > full.error_frac


def test_blocks_below_the_first_trained_weight_have_no_backward_pass() -> None:
    plain = encoder()
    halves = [
        replace(one, times=one.times // 2, trained=trained)
        for one in plain.products
        if one.part == "blocks"
        for trained in (True, False)
    ]
    trained = plain.parameters | {"embeddings": 0, "blocks": plain.parameters["blocks"] // 2}
    found = forecast(known_rates(), encoder(products=tuple(halves), trained=trained), work())
    full = forecast(known_rates(), plain, work())
    assert found.step["forward"] == pytest.approx(full.step["forward"])
    assert found.step["backward"] == pytest.approx(full.step["backward"] / 2, rel=0.1)


def test_a_head_that_reads_first_tokens_saves_most_of_the_last_block() -> None:
    all_tokens = forecast(known_rates(), encoder(), work((batch(n_targets=8),)))  # a span's loss has a target a row
    classes = encoder(model_class="BertForSequenceClassification")
    first = forecast(known_rates(), classes, work((batch(n_targets=8),)))
    saved = 1 - first.step["forward"] / all_tokens.step["forward"]
    assert 0.6 / LAYERS < saved < 1 / LAYERS


def test_a_vocabulary_costs_by_its_targets() -> None:
    head = Product(WIDTH, 50000, 1, "head", trained=True)
    model = encoder(products=(*encoder().products[:-1], head), causal=True)
    few, many = (forecast(known_rates(), model, work((batch(n_targets=n),))) for n in (100, 1000))
    logits = 6 * 900 * head.n_weights / FLOPS["fp32"]
    assert many.step_s - few.step_s == pytest.approx(logits, rel=0.01)
    frozen = replace(model, products=(*model.products[:-1], replace(head, trained=False)))
    few, many = (forecast(known_rates(), frozen, work((batch(n_targets=n),))) for n in (100, 1000))
    assert many.step_s - few.step_s == pytest.approx(2 / 3 * logits, rel=0.01)  # without the gradient of its weight


def test_auto_takes_the_format_that_its_trial_would() -> None:
    assert forecast(known_rates(), encoder(precision="auto"), work()).precision == "bf16"
    rates = known_rates()
    slow = {name: rates.surfaces[name.replace("bf16", "fp32")] for name in rates.surfaces}
    assert forecast(replace(rates, surfaces=slow), encoder(precision="auto"), work()).precision == "fp32"
    few = tuple(replace(one, n_in=8, n_out=8) for one in encoder().products)
    assert forecast(rates, encoder(precision="auto", products=few), work()).precision == "fp32"


def test_a_format_other_than_fp32_is_tried_before_the_first_step() -> None:
    tried = {name: forecast(known_rates(), encoder(precision=name), work()) for name in ("fp32", "bf16", "auto")}
    assert tried["fp32"].run["trial"] == 0
    assert tried["bf16"].run["trial"] == pytest.approx(tried["auto"].run["trial"])
    assert 0 < tried["auto"].run["trial"] < 10 * tried["fp32"].step_s


def test_an_optimizer_takes_what_was_measured_of_it() -> None:
    auto, adafactor = (forecast(known_rates(), encoder(optimizer=name), work()) for name in ("auto", "adafactor"))
    assert adafactor.step["optimizer"] > 3 * auto.step["optimizer"]
    unknown = forecast(known_rates(), encoder(optimizer="muon"), work())
    assert any("muon" in doubt for doubt in unknown.doubts)
    assert unknown.error_frac > auto.error_frac


def test_rows_of_the_vocabulary_that_no_text_has_are_not_updated() -> None:
    every = forecast(known_rates(), encoder(optimizer="adamw_torch"), work()).step["optimizer"]
    used = forecast(known_rates(), encoder(), work()).step["optimizer"]
    assert used < every


def test_what_is_not_known_widens_the_range() -> None:
    usual = forecast(known_rates(), encoder(), work()).error_frac
    assert forecast(known_rates(load=9.0), encoder(), work()).error_frac > usual
    assert forecast(known_rates(), encoder(packed=False), work()).error_frac > usual
    assert forecast(known_rates(noise=0.3), encoder(), work()).error_frac > usual
    assert forecast(known_rates(), encoder(precision="int8"), work()).error_frac > usual


def test_settings_that_cost_time_have_a_price() -> None:
    rates = known_rates(numbers=known_rates().numbers | {"format fp16": 10.0})
    split = tuple(batch(1) for _ in range(8))
    found = prices(rates, encoder(precision="fp16", checkpointing="blocks"), work(split))
    by_flag = {price.flag: price for price in found}
    assert by_flag.keys() == {"--fp16", "--gradient_checkpointing", "--gradient_accumulation_steps"}
    assert by_flag["--fp16"].frac > 5
    assert found == sorted(found, key=lambda price: -price.seconds)
    assert all(price.seconds > 0 for price in found)


def test_a_plain_run_has_no_price() -> None:
    assert prices(known_rates(), encoder(), work()) == []


def test_the_table_shows_each_part_the_sum_and_what_a_setting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rates, model, run = known_rates(), encoder(checkpointing="blocks", optimizer="muon"), work()
    found = forecast(rates, model, run)
    lines = table(rates, found, prices(rates, model, run))
    assert all(len(line) <= 80 for line in lines)
    shown = " ".join(" ".join(lines).split())
    low, high = map(duration, found.range_s)
    assert f"between {low} and {high}" in shown
    assert f"from the command to its end {duration(found.total_s)}" in shown
    assert "the update of muon is not measured" in shown
    assert "--gradient_checkpointing costs" in shown
    assert "checkpoints" not in shown  # a run without any


def test_the_forecast_as_json_has_its_parts_and_its_range() -> None:
    found = forecast(known_rates(), encoder(), work())
    told = json.loads(json.dumps(found.as_json()))
    assert told["total_s"] == pytest.approx(sum(told["run"].values()))
    assert told["step_s"] == pytest.approx(sum(told["step"].values()))
    assert told["low_s"] < told["total_s"] < told["high_s"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5e-4, "0.250 ms"),
        (0.0421, "42.1 ms"),
        (0.684, "0.684 s"),
        (1.04, "1.04 s"),
        (99.97, "100 s"),
        (1234.5, "1234 s"),
    ],
)
def test_the_time_of_a_step_has_three_digits(seconds: float, text: str) -> None:
    assert fine_duration(seconds) == text
