"""`whet plan` and `--dry_run`: what they print, for models that exist and for those of the guides."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from known_rates import known_rates
from peft import LoraConfig, get_peft_model
from tiny_qa import command, squad, write_json
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertForSequenceClassification, LlamaConfig

from saved_decoder import save_decoder
from text_tasks import SAILING, save_encoder, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.config.arguments import TrainingArguments
from whet.config.ranks import Place
from whet.console import fine_duration
from whet.engine.description import planned_bytes
from whet.hardware import cpu
from whet.hardware import memory as memory_of_machine
from whet.jobs import fit
from whet.models.loading.adapter import quiet_peft
from whet.plan.memory import MemoryForecast
from whet.plan.rates import as_json, key_here
from whet.plan.rehearsal import Rehearsal

GB = 1e9


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and a file of rows next to it."""
    save_encoder(tmp_path / "model")
    write_csv(tmp_path / "train.csv", topic_rows())
    return tmp_path


def _planned(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str, **options: Any) -> dict[str, Any]:
    given = words(
        "plan", folder / "model", folder / "out", "--json", *flags, train_file=folder / "train.csv", **options
    )
    assert run(given) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_has_the_bytes_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = _planned(folder, capsys)["memory"]
    assert run(words("classify", folder / "model", folder / "out", "--do_train", train_file=folder / "train.csv")) == 0
    log = (folder / "out" / "run.log").read_text()
    from safetensors.torch import load_file

    saved = load_file(folder / "out" / "model.safetensors")
    parts = memory["parts"]
    assert sum(parts.values()) == memory["peak_bytes"]
    weights = sum(one.nbytes for one in saved.values())
    assert parts["weights"] == pytest.approx(weights, rel=0.02)  # buffers, such as position ids, are not saved
    assert parts["optimizer"] == 2 * weights
    assert "optimizer state" in log


def test_a_plan_reads_no_weights_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path for path in folder.rglob("*"))
    _planned(folder, capsys, per_device_train_batch_size=12)
    assert sorted(path for path in folder.rglob("*")) == before


def test_a_dry_run_prints_the_table_and_trains_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words(
        "classify", folder / "model", folder / "out", "--do_train", "--dry_run", train_file=folder / "train.csv"
    )
    assert run(given) == 0
    out = capsys.readouterr().out
    assert "memory of one rank" in out
    assert "optimizer state" in out
    assert "a step takes" in out
    assert max(map(len, out.splitlines())) <= 80
    assert not (folder / "out").exists()


def test_a_plan_of_questions_evaluates_rows_without_labels(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_json(tmp_path / "data.json", squad())
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 64}
    files = {"train_file": data, "validation_file": data}
    given = command(encoder, tmp_path / "out", "--do_eval", "--no_time", "--json", **files, **sizes)
    found = []
    for more in ((), ("--ranks", "2", "--zero_stage", "3")):
        assert run(["plan", *given, *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["memory"])
    alone, shared = (one["parts"] for one in found)
    assert [one["moment"] for one in found] == ["in an evaluation"] * 2
    assert shared["weights"] + shared["saving"] == alone["weights"], "each rank has the complete model then"


def test_the_prediction_of_a_test_split_is_planned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its batches may be the largest of the run, and they come after a training that fits."""
    write_csv(folder / "test.csv", topic_rows() * 30)
    sizes = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 256}
    alone = _planned(folder, capsys, **sizes)
    found = _planned(folder, capsys, "--do_predict", test_file=folder / "test.csv", **sizes)
    assert (alone["memory"]["moment"], alone["time"]["run"]["evaluation"]) == ("in a training step", 0.0)
    assert found["memory"]["moment"] == "in the prediction of the test split"
    assert found["memory"]["peak_bytes"] > alone["memory"]["peak_bytes"]
    assert found["time"]["run"]["evaluation"] > 0


def test_the_time_counts_every_seed_evaluation_and_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = {"validation_file": folder / "train.csv", "num_train_epochs": 2}
    evaluated = _planned(folder, capsys, "--do_eval", **usual)["time"]
    seeds = _planned(folder, capsys, "--do_eval", seeds=3, **usual)["time"]
    assert seeds["step_s"] == pytest.approx(evaluated["step_s"])
    for part in ("forward", "backward", "optimizer", "evaluation"):
        assert seeds["run"][part] == pytest.approx(3 * evaluated["run"][part])
    more = {"eval_strategy": "epoch", "eval_on_start": "true", "save_strategy": "best"}
    best = _planned(folder, capsys, **usual, **more, metric_for_best_model="accuracy")["time"]["run"]
    assert best["evaluation"] == pytest.approx(4 * evaluated["run"]["evaluation"]), "at the start and end, two epochs"
    assert best["saving"] > 0
    timed = _planned(folder, capsys, save_strategy="time", save_interval_s=1e-4)["time"]["run"]
    assert timed["saving"] > best["saving"]


def test_the_time_counts_what_a_reference_computes_before_the_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_decoder(tmp_path / "decoder")
    pairs = [{"prompt": "a boat", "chosen": f" {text}", "rejected": " bread"} for text in SAILING * 4]
    write_lines(tmp_path / "pairs.jsonl", pairs)
    given = words("plan", tmp_path / "decoder", tmp_path / "out", "--json", train_file=tmp_path / "pairs.jsonl")
    found = {}
    for loss in ("dpo", "next_tokens"):
        data = pairs if loss == "dpo" else [{"prompt": one["prompt"], "completion": one["chosen"]} for one in pairs]
        write_lines(tmp_path / "pairs.jsonl", data)
        assert run([given[0], "lm", *given[1:], "--loss", loss]) == 0
        found[loss] = json.loads(capsys.readouterr().out)["time"]["run"]["evaluation"]
    assert found["next_tokens"] == 0
    assert found["dpo"] > 0


def test_a_token_runs_through_some_of_the_experts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = _planned(folder, capsys)["time"]
    few, more = (_planned(folder, capsys, moe_experts=4, moe_top_k=n)["time"] for n in (1, 2))
    assert few["step"]["forward"] == pytest.approx(dense["step"]["forward"], rel=0.01)
    assert more["step"]["forward"] > 1.1 * few["step"]["forward"]
    assert any("experts" in doubt for doubt in few["doubts"])


def test_a_teacher_takes_memory_and_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    labels = dict(enumerate(sorted({row["label"] for row in topic_rows()})))
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=64, id2label=labels, label2id={label: n for n, label in labels.items()},
    )  # fmt: skip
    teacher = BertForSequenceClassification(config)
    teacher.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")
    alone, taught = (_planned(folder, capsys, **more) for more in ({}, {"teacher_model": folder / "teacher"}))
    weights = [one["memory"]["parts"]["weights"] for one in (alone, taught)]
    theirs = sum(one.nbytes for one in (*teacher.parameters(), *teacher.buffers()))
    assert weights[1] - weights[0] == pytest.approx(theirs, rel=0.02)
    states = [one["memory"]["parts"]["optimizer"] for one in (alone, taught)]
    assert states[0] == states[1], "it learns nothing"
    assert taught["time"]["step"]["forward"] > 2 * alone["time"]["step"]["forward"]
    assert taught["time"]["step"]["backward"] == alone["time"]["step"]["backward"]
    assert any("teacher" in doubt for doubt in taught["time"]["doubts"])


def test_a_rank_holds_the_activations_of_its_own_rows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"per_device_train_batch_size": 64, "max_seq_length": 32, "memory": "1TB"}
    parts = {}
    for ranks in (1, 8):
        given = words("plan", folder / "model", folder / "out", "--json", "--no_time", ranks=ranks, **sizes)
        assert run([given[0], "classify", *given[1:]]) == 0
        parts[ranks] = json.loads(capsys.readouterr().out)["memory"]["parts"]
    assert parts[8]["activations"] == pytest.approx(parts[1]["activations"], rel=0.05)
    assert parts[8].get("allocator", 0) < parts[1].get("allocator", 0) + parts[1]["activations"]


def test_of_several_splits_the_last_is_named() -> None:
    halves, quarters = (fit.Change(f"--rows {n}", "smaller products", (), is_split=True) for n in (6, 3))
    rounded = fit.Change("--precision bf16", "rounding", ())
    assert fit._added(fit._added([halves], rounded), quarters) == [rounded, quarters]


@pytest.mark.parametrize(
    ("packed", "changed", "same"),
    [(True, {}, True), (False, {}, False), (True, {"dataloader_drop_last": True}, False),
     (True, {"train_sampling_strategy": "batch_rebalance"}, False)],
)  # fmt: skip
def test_a_split_keeps_the_result_of_runs_that_auto_would_split(
    packed: bool, changed: dict[str, Any], same: bool
) -> None:
    args = TrainingArguments(output_dir="unused", per_device_train_batch_size=8, **changed)
    forecast: Any = SimpleNamespace(anatomy=SimpleNamespace(packed=packed))
    split = next(fit.changes(None, args, forecast))
    assert (split.is_split, split.same_result) == (True, same)


@pytest.mark.parametrize(
    ("rows", "batches", "splits"),
    [(15, 1, [(5, 3), (3, 5), (1, 15)]), (12, 1, [(6, 2), (4, 3), (3, 4), (2, 6), (1, 12)]),
     (4, 3, [(3, 4), (2, 6), (1, 12)]), (1, 8, [])],
)  # fmt: skip
def test_a_step_is_split_into_any_micro_batches_of_as_many_rows(
    rows: int, batches: int, splits: list[tuple[int, int]]
) -> None:
    args = TrainingArguments(output_dir="unused", per_device_train_batch_size=rows, gradient_accumulation_steps=batches)
    job: Any = SimpleNamespace(lora_r=1)
    forecast: Any = SimpleNamespace(anatomy=SimpleNamespace(packed=True, layers=0))
    found = [one.settings[1] for one in fit.changes(job, args, forecast) if one.is_split]
    assert [(one.per_device_train_batch_size, one.gradient_accumulation_steps) for one in found] == splits


def test_the_largest_split_that_fits_is_found() -> None:
    args = TrainingArguments(output_dir="unused", per_device_train_batch_size=60)
    job: Any = SimpleNamespace(lora_r=1)
    looked_at: list[int] = []

    def forecast(_: Any, args: TrainingArguments) -> Any:
        rows = args.per_device_train_batch_size
        looked_at.append(rows)
        memory = MemoryForecast(parts={"activations": rows}, moment="", free_bytes=None, micro_batch_tokens=rows)
        return SimpleNamespace(memory=memory, anatomy=SimpleNamespace(packed=True, layers=0))

    (found,) = fit.that_fit(job, args, 13, forecast(job, args), forecast)
    assert found.flags == "--per_device_train_batch_size 12 --gradient_accumulation_steps 5"
    assert len([rows for rows in looked_at if rows != 60]) <= 4


def test_a_picture_is_svg_or_png(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words("plan", folder / "model", folder / "out", picture="plan.jpg", train_file=folder / "train.csv")
    assert run(given) == 78
    assert "its ending says what is written: .svg or .png" in capsys.readouterr().err


def test_a_run_with_compiled_blocks_is_planned_without_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words("classify", folder / "model", folder / "out", "--do_train", "--dry_run", "--torch_compile")
    assert run([*given, "--train_file", str(folder / "train.csv")]) == 0
    shown = capsys.readouterr()
    assert "memory of one rank" in shown.out
    assert "blocks which are not compiled" in shown.err


def test_a_plan_has_the_time_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    time, longer = (_planned(folder, capsys, num_train_epochs=n)["time"] for n in (1, 3))
    assert time["total_s"] == pytest.approx(sum(time["run"].values()))
    assert longer["run"]["forward"] == pytest.approx(3 * time["run"]["forward"])
    again = _planned(folder, capsys, gradient_checkpointing=True)["time"]
    assert [price["flag"] for price in again["prices"]] == ["--gradient_checkpointing"]
    assert "time" not in _planned(folder, capsys, "--no_time")


@pytest.mark.true_start
def test_a_plan_where_the_speed_cannot_be_measured_has_the_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a small container, whose kernel ends the process that measures."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "nothing measured"))
    monkeypatch.setattr(sys, "executable", "/bin/false")  # a process that ends without rates
    given = words("plan", folder / "model", folder / "out", train_file=folder / "train.csv")
    assert run(given) == 0
    shown = capsys.readouterr()
    assert "no time: this machine's speed cannot be measured" in shown.err
    assert "memory of one rank" in shown.out


def test_the_time_on_another_machine_is_that_of_its_rates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = known_rates(numbers=known_rates().numbers | {"start": 1000.0})
    machine = {"memory_available_bytes": 3_000_000_000, "memory_limit_bytes": None}
    for rates in ({}, {"training_rates": as_json(there)}):
        (folder / "report.json").write_text(json.dumps({"machine": machine, **rates}))
        found = _planned(folder, capsys, hardware=folder / "report.json")
        assert ("time" in found) == bool(rates)
    assert found["time"]["run"]["start"] > 1000


def test_memory_without_a_unit_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words("plan", folder / "model", folder / "out", train_file=folder / "train.csv")
    assert run([*given, "--memory", "16"]) == 78
    assert "add its unit: --memory 16GB" in capsys.readouterr().err
    assert _planned(folder, capsys, "--no_time", memory=16_000_000_000)["memory"]["free_bytes"] == 16_000_000_000


def test_a_training_on_a_gpu_has_no_plan(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = {"train_file": folder / "train.csv", "use_cpu": "false"}
    for asked in (("plan",), ("classify", "--do_train", "--dry_run")):
        assert run(words(asked[0], folder / "model", folder / "out", *asked[1:], **options)) == 78
        assert "this run is on a GPU (cuda)" in capsys.readouterr().err
    report = {"machine": {"memory_available_bytes": 3_000_000_000}}
    (folder / "report.json").write_text(json.dumps(report))
    found = _planned(folder, capsys, "--no_time", hardware=folder / "report.json", use_cpu="false")
    assert found["memory"]["fits"]


def test_memory_is_less_sure_for_a_machine_with_other_operators(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = key_here()
    machine = {"memory_available_bytes": 10**12, "instruction_sets": cpu.instruction_sets()[0]}
    keys = {"same": here, "processor": replace(here, processor="Another"), "both": replace(
        here, processor="Another", operators="scalar")}  # fmt: skip
    found = {}
    for name, key in keys.items():
        report = {"machine": machine, "training_rates": as_json(known_rates(key=key))}
        (folder / "report.json").write_text(json.dumps(report))
        found[name] = _planned(folder, capsys, hardware=folder / "report.json")["memory"]
    assert [len(one["doubts"]) for one in found.values()] == [0, 1, 2]
    assert found["same"]["low_bytes"] == found["same"]["high_bytes"]
    width = {name: one["high_bytes"] / one["peak_bytes"] for name, one in found.items()}
    assert 1 == width["same"] < width["processor"] < width["both"]
    given = words("plan", folder / "model", folder / "out", train_file=folder / "train.csv")
    assert run([*given, "--hardware", str(folder / "report.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"the operators here ({here.operators}), and that machine runs scalar" in shown
    assert ": fits" in shown
    peak = found["both"]["peak_bytes"]
    machine["memory_available_bytes"] = int(1.1 * peak)
    (folder / "report.json").write_text(json.dumps(report))
    assert run([*given, "--hardware", str(folder / "report.json")]) == 0
    assert ": may not fit" in " ".join(capsys.readouterr().out.split())


def test_too_little_memory_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory = _planned(folder, capsys, memory="100MB")["memory"]
    assert memory["free_bytes"] == 100_000_000
    assert memory["fits"] is False
    assert _planned(folder, capsys, memory="1TB")["memory"]["fits"] is True


@pytest.mark.slow
def test_a_plan_under_a_limit_on_addresses_says_what_that_leaves(folder: Path) -> None:
    limit = 3 << 30
    given = words("plan", folder / "model", folder / "out", "--json", "--no_time", train_file=folder / "train.csv")
    done = subprocess.run(
        [sys.executable, "-m", "whet", *given], capture_output=True, text=True, check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    memory = json.loads(done.stdout)["memory"]
    assert memory["peak_bytes"] < memory["free_bytes"] < limit
    assert memory["fits"] is True


@pytest.mark.slow
def test_changes_that_fit_are_listed_those_that_keep_the_result_first_and_the_fastest_of_them(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_of_machine, "resident_bytes", lambda: 100_000_000)  # this process grows by more
    usual = {"per_device_train_batch_size": 64, "max_seq_length": 32}  # activations outweigh what glibc rounds
    peak = _planned(folder, capsys, **usual)["memory"]["peak_bytes"]
    picture = folder / "plan.svg"
    found = _planned(folder, capsys, "--fit", memory=str(peak - 1), picture=picture, **usual)
    flags = [one["flags"] for one in found["fit"]]
    drawn = re.findall(r">([^<]*)</(?:tspan|text)>", picture.read_text("utf-8"))
    assert f"these settings: {fine_duration(found['time']['step_s'])}" in drawn
    assert len([text for text in drawn if text.startswith("--optim adafactor: ")]) == 2
    assert all(one["memory"]["peak_bytes"] < peak for one in found["fit"])
    assert {"--optim adamw_whet_8bit", "--freeze_layers 1"} < set(flags)  # code for an adapter outweighs so few weights
    places = [(not one["same_result"], one["times_as_long"]) for one in found["fit"]]
    assert places == sorted(places)
    assert found["fit"][0]["same_result"]
    assert not found["fit"][-1]["same_result"]
    assert _planned(folder, capsys, "--fit", memory="1TB")["fit"] == []
    assert _planned(folder, capsys, "--fit", memory="1MB")["fit"] == []  # nothing makes Python fit into it


@pytest.mark.parametrize("given", [{"max_tokens_per_batch": 100}, {"max_loss_spike": 5.0}], ids=str)
def test_changes_that_do_not_go_with_the_settings_are_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    monkeypatch.setattr(memory_of_machine, "resident_bytes", lambda: 100_000_000)
    usual = {"per_device_train_batch_size": 16, "max_seq_length": 32} | given
    peak = _planned(folder, capsys, "--no_time", **usual)["memory"]["peak_bytes"]
    found = _planned(folder, capsys, "--no_time", "--fit", memory=str(peak - 1), **usual)["fit"]
    assert found
    assert not any("in_backward" in one["flags"] for one in found)


@pytest.mark.slow
def test_ranks_share_what_is_free_and_zero_is_a_change_of_theirs(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_of_machine, "resident_bytes", lambda: 100_000_000)
    alone = _planned(folder, capsys, memory="1TB")["memory"]
    memory = _planned(folder, capsys, ranks=2, memory="1TB")["memory"]
    assert memory["free_bytes"] == alone["free_bytes"] / 2
    assert memory["parts"]["optimizer"] == alone["parts"]["optimizer"]
    times = [_planned(folder, capsys, ranks=n, memory="1TB")["time"] for n in (1, 2)]
    assert times[1]["step"]["forward"] == pytest.approx(2 * times[0]["step"]["forward"], rel=0.25), (
        "two share the cores of one"
    )
    assert any("each of 2 ranks" in doubt for doubt in times[1]["doubts"])
    saves = {"ranks": 2, "zero_stage": 3, "save_strategy": "epoch"}
    sharded = _planned(folder, capsys, memory="1TB", **saves)["memory"]
    assert "saving" not in sharded["parts"], "rank 0 writes the state of others as it comes"
    assert sharded["low_bytes"] < sharded["peak_bytes"], "what is gathered may fill gaps or not"
    adapted = _planned(folder, capsys, memory="1TB", lora_r=2, **saves)["memory"]
    unsure, unsure_adapted = (one["peak_bytes"] - one["low_bytes"] for one in (sharded, adapted))
    assert unsure_adapted < 0.3 * unsure, "frozen weights have no gradients"
    found = _planned(folder, capsys, "--fit", ranks=2, memory=str(2 * memory["peak_bytes"] - 2))
    by_flags = {one["flags"]: one for one in found["fit"]}
    shared = by_flags["--zero_stage 1"]
    assert shared["same_result"]
    assert shared["memory"]["parts"]["optimizer"] == pytest.approx(memory["parts"]["optimizer"] / 2, rel=0.1)
    assert not any("in_backward" in flags for flags in by_flags)
    few = _planned(folder, capsys, "--fit", memory=str(alone["peak_bytes"] - 1))["fit"]
    assert not any("zero_stage" in one["flags"] for one in few), "one process has nobody to share with"


def test_the_report_of_another_machine_says_what_is_free(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = {"machine": {"memory_available_bytes": 3_000_000_000, "memory_limit_bytes": 2_000_000_000}}
    (folder / "report.json").write_text(json.dumps(report))
    assert _planned(folder, capsys, hardware=folder / "report.json")["memory"]["free_bytes"] == 2_000_000_000
    for given in ({"hardware": folder / "report.json"}, {"memory": "64GB"}):
        memory = _planned(folder, capsys, "--no_time", memory_limit_gb=0.5, **given)["memory"]
        assert memory["free_bytes"] == 1 << 29, "the run itself would stop there"
    (folder / "report.json").write_text("{}")
    given = words("plan", folder / "model", folder / "out", hardware=folder / "report.json")
    assert run(given) == 78
    assert "run whet doctor --json there" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["qa", "classify", "tag"])
def test_rows_are_made_up_without_data(task: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words("plan", folder / "model", folder / "out", "--json", max_seq_length=24, doc_stride=8)
    assert run([given[0], task, *given[1:]]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert memory["micro_batch_tokens"] == pytest.approx(6 * 24, rel=0.1)


def test_the_task_follows_from_the_data_and_is_named_if_not_known(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.json").write_text(json.dumps({"data": [{"title": "", "paragraphs": [
        {"context": "the boat lay", "qas": [{"id": "1", "question": "what?", "answers": [
            {"text": "boat", "answer_start": 4}]}]}]}]}))  # fmt: skip
    given = words("plan", folder / "model", folder / "out", "--json", train_file=folder / "train.json", doc_stride=8)
    assert run(given) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "qa"
    named = {"train_file": str(folder / "train.json"), "model_name_or_path": str(folder / "model"), "doc_stride": 8}
    usual = {"output_dir": str(folder / "out"), "max_seq_length": 24, "use_cpu": True, "precision": "fp32"}
    (folder / "run.json").write_text(json.dumps(named | usual))
    assert run(["plan", "--config", str(folder / "run.json"), "--no_time", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "qa"
    assert run(["plan", "swimming", *given[1:]]) == 78
    assert "whet plans classify, lm, qa, tag" in capsys.readouterr().err


def test_the_figures_of_the_guides_come_out() -> None:
    """7 billion parameters: AdamW and the gradients take 84 GB; with 200 million in an adapter, 2.4 GB."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32)
    args = TrainingArguments(output_dir="unused", use_cpu=True, optim="adamw_whet")
    place = Place()
    with Rehearsal(), quiet_peft():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        n_weights = sum(one.numel() for one in model.parameters())
        alone = planned_bytes(model, args, None, place)
        bits = planned_bytes(model, TrainingArguments(output_dir="unused", optim="adamw_whet_8bit"), None, place)
        adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=80, target_modules="all-linear"))
        small = planned_bytes(adapted, args, None, place)
    assert n_weights / 1e9 == pytest.approx(6.74, rel=0.01)
    assert (alone.gradients + (alone.state or 0)) / GB * 7e9 / n_weights == pytest.approx(84, rel=0.001)
    assert (small.gradients + (small.state or 0)) / GB == pytest.approx(2.4, rel=0.01)
    assert (alone.state or 0) / GB * 3e9 / n_weights == pytest.approx(24, rel=0.001)
    assert (bits.state or 0) / GB * 3e9 / n_weights == pytest.approx(6, rel=0.02)
