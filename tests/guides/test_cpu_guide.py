"""Training on one CPU: the guides' question answering commands and settings, older and newer, under whet's name.

Not covered yet, for they belong to training in several processes: `mpirun`, `torchrun`, the hosts file and the
variables of the cluster guide, and Kubernetes. The command of the cluster guide runs here as one of its processes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_runs import span_rows, tiny_bert

import whet
from whet.cli.main import run

_OLD = """--model_name_or_path bert-base-uncased --dataset_name squad --do_train --do_eval
    --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384 --doc_stride 128
    --output_dir {out} --use_ipex --bf16 --no_cuda"""
_NEW = _OLD.replace("--use_ipex --bf16 --no_cuda", "--bf16 --use_cpu")
_CLUSTER = """--model_name_or_path distilbert-base-uncased --dataset_name squad --do_train --do_eval
    --per_device_train_batch_size 32 --num_train_epochs 1 --output_dir {out} --overwrite_output_dir
    --no_cuda --xpu_backend ccl --bf16"""
_WORKER = """--model_name_or_path distilbert/distilbert-base-uncased --dataset_name squad --do_train --do_eval
    --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384 --doc_stride 128
    --output_dir {out} --bf16"""


@pytest.mark.parametrize(
    ("words", "n_steps", "older"),
    [
        (_OLD, 2, {"--use_ipex has no effect", "--no_cuda is an older name"}),
        (_NEW, 2, set()),
        (_CLUSTER, 1, {"--no_cuda is an older name", "--xpu_backend is an older name"}),
        (_WORKER, 2, set()),
    ],
    ids=["old", "new", "cluster", "kubernetes_worker"],
)
def test_the_command_trains_and_evaluates(
    words: str, n_steps: int, older: set[str], in_stand_ins: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """12 questions are one step an epoch; every name that has changed is told, and no other."""
    assert run(["qa", *words.format(out=tmp_path / "out").split()]) == 0
    results = json.loads((tmp_path / "out" / "all_results.json").read_text("utf-8"))
    state = json.loads((tmp_path / "out" / "trainer_state.json").read_text("utf-8"))
    kept = json.loads((tmp_path / "out" / "training_args.json").read_text("utf-8"))
    assert state["global_step"] == n_steps
    assert results["eval_samples"] == 12
    assert 0 <= results["eval_f1"] <= 100
    assert (kept["precision"], kept["bf16"]) == ("bf16", True)
    said = capfd.readouterr().err
    assert all(one in said for one in older), said
    assert ("older name" in said or "no effect" in said) == bool(older)


def test_the_settings_of_the_newer_guide_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    args = whet.TrainingArguments(output_dir="./outputs", bf16=True, use_cpu=True)
    alike = span_rows(1) * 12  # of one length, which no collator has to pad
    trainer = whet.Trainer(model=tiny_bert(), args=args, train_dataset=alike, eval_dataset=alike[:6])
    assert trainer.train().global_step == 6  # 12 rows, 8 a step, 3 epochs
    assert trainer.accelerator.mixed_precision == "bf16"
    assert trainer.evaluate()["eval_loss"] > 0
