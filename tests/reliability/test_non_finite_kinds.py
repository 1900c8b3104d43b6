"""R9: eight ways in which numbers go bad. None of them changes a weight, each is told, none gets into a checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_runs
import pytest
import torch
from forked_runs import Corpus, corpus, qa
from safetensors.torch import load_file, save_file
from tiny_qa import command
from tiny_runs import Recorder, Toy, arguments, assert_same_weights, checkpoints, entries, toy_trainer, weights_of
from torch import Tensor
from transformers import TrainerCallback

import engine
from whet.errors import NonFiniteError
from whet.models import finite
from whet.store import find

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability
N_STEPS = 40 if forked_runs.SOAK else 20
BAD = 12
"""The step, counted from 1, whose numbers go bad: late enough for a median of losses."""


class Bad(Toy):
    """A `Toy` that goes bad, in one of several ways, where a row holds a 99."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        marked = x == 99
        output = super().forward(x.masked_fill(marked, 0.5), labels)
        return _WAYS[self.how](self, output["loss"]) if labels is not None and bool(marked.any()) else output


_WAYS: dict[str, Callable[[Bad, Tensor], dict[str, Tensor]]] = {
    "nan loss": lambda _, loss: {"loss": loss * math.nan},
    # the root of 0 is 0, its slope is infinite
    "infinite gradient": lambda model, loss: {"loss": loss + (0.0 * model.head.weight.sum()).sqrt()},
    # a mean over no target at all, as a module of one's own may compute it
    "0 / 0": lambda _, loss: {"loss": loss * 0 / torch.zeros(())},
    # 3e38 is the largest number of bfloat16, as of float32: the product is infinite
    "bf16 overflow": lambda _, loss: {"loss": ((loss.to(torch.bfloat16) + 1) * 3e38 * 1e3).float()},
    "100x spike": lambda _, loss: {"loss": loss * 0 + 1e3 + 1e3 * loss},
}


def _rows(*bad: int) -> list[dict[str, Tensor]]:
    x = torch.randn(4 * N_STEPS, 4, generator=torch.Generator().manual_seed(7))
    for step in bad:
        x[4 * step - 2, 0] = 99
    return [{"x": row, "labels": row.masked_fill(row == 99, 0.5).sum()} for row in x]


def _trainer(folder: Path, how: str, *bad: int, **changes: Any) -> engine.Trainer:
    usual = {"logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_loss_spike": 20.0}
    return toy_trainer(folder, model=Bad(how), train_dataset=_rows(*bad), **(usual | changes))


def _all_finite(folder: Path) -> int:
    """Check every tensor of every checkpoint; return how many checkpoints there are."""
    names = checkpoints(folder)
    for name in names:
        assert find.problems_of(folder / name) == []
        for file in ("model.safetensors", "optimizer.safetensors"):
            assert all(bool(t.isfinite().all()) for t in load_file(folder / name / file).values()), (name, file)
    return len(names)


@pytest.mark.parametrize("how", sorted(_WAYS))
def test_a_bad_step_changes_no_bit(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """The step before a save: what is saved is what the last good step left."""
    seen = Recorder(weights_of)
    trainer = _trainer(tmp_path, how, BAD, callbacks=[seen])
    result = trainer.train()
    assert_same_weights(seen.kept[BAD - 1], seen.kept[BAD - 2])
    assert_same_weights(load_file(tmp_path / f"checkpoint-{BAD}" / "model.safetensors"), seen.kept[BAD - 2])
    assert not torch.equal(seen.kept[BAD]["head.weight"], seen.kept[BAD - 1]["head.weight"])
    assert _all_finite(tmp_path) == trainer.state.global_step == N_STEPS
    (told,) = [message for message in caplog.messages if "not applied" in message]
    assert f"step {BAD} was" in told
    assert result.metrics["train_steps_not_applied"] == 1
    assert math.isfinite(result.training_loss)
    shown = dict(entries(trainer, "loss"))
    assert not (0 <= shown[BAD] < 100) or how == "infinite gradient", "never averaged away"


@pytest.mark.parametrize("how", sorted(_WAYS))
def test_three_bad_steps_in_a_row_end_the_run(tmp_path: Path, how: str) -> None:
    trainer = _trainer(tmp_path, how, BAD, BAD + 1, BAD + 2)
    with pytest.raises(NonFiniteError, match=rf"3 steps in a row(?s:.)*step {BAD + 2}") as caught:
        trainer.train()
    assert caught.value.exit_code == 70
    assert _all_finite(tmp_path) == BAD + 1


def test_how_many_are_borne_is_a_setting(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="1 steps in a row"):
        _trainer(tmp_path / "one", "nan loss", BAD, max_nonfinite_steps=1).train()
    borne = _trainer(tmp_path / "five", "nan loss", *range(BAD, BAD + 4), max_nonfinite_steps=5)
    assert borne.train().global_step == N_STEPS


def test_a_spike_is_applied_where_no_guard_is_asked_for(tmp_path: Path) -> None:
    seen = Recorder(weights_of)
    _trainer(tmp_path, "100x spike", BAD, max_loss_spike=None, callbacks=[seen]).train()
    assert not torch.equal(seen.kept[BAD - 1]["head.weight"], seen.kept[BAD - 2]["head.weight"])


def test_a_resumed_run_knows_the_usual_loss(tmp_path: Path) -> None:
    """Resumed one step before the spike, whose measure is the losses of the steps before it."""
    _trainer(tmp_path / "whole", "100x spike", BAD).train()
    _trainer(tmp_path / "parts", "100x spike", BAD, max_steps=BAD - 1, lr_scheduler_type="constant").train()
    whole = _trainer(tmp_path / "constant", "100x spike", BAD, lr_scheduler_type="constant")
    whole.train()
    parts = _trainer(tmp_path / "parts", "100x spike", BAD, lr_scheduler_type="constant")
    result = parts.train(resume_from_checkpoint="auto")
    assert_same_weights(parts.model, whole.model)
    assert result.metrics["train_steps_not_applied"] == 1


def test_a_batch_without_a_target_is_no_loss_of_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every label of the step is left out: nothing is to be learnt, and AdamW's momentum must not move on either."""
    from tiny_runs import masked_rows, tiny_bert
    from transformers import BertForMaskedLM

    rows = masked_rows(12)
    for row in rows[4:8]:
        row["labels"] = torch.full_like(row["labels"], -100)
    seen = Recorder(weights_of)
    model = tiny_bert(BertForMaskedLM)
    args = arguments(tmp_path, logging_steps=1, weight_decay=0.1)
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, callbacks=[seen])
    trainer.train()
    assert_same_weights(seen.kept[1], seen.kept[0])
    assert "step 2 was not applied" in caplog.text
    assert [math.isnan(loss) for _, loss in entries(trainer, "loss")] == [False, True, False]


def _poisoned_encoder(corpus: Corpus, folder: Path) -> Path:
    shutil.copytree(corpus.folder / "encoder", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["encoder.layer.1.output.dense.weight"][3, 5] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_bad_initial_weights(corpus: Corpus, tmp_path: Path) -> None:
    """Before anything is computed, the weight named; in a model of one's own as well."""
    encoder = _poisoned_encoder(corpus, tmp_path / "encoder")
    child = qa(corpus.words(tmp_path / "out", model_name_or_path=encoder), tmp_path / "log")
    assert child.wait() == 78, child.text()
    assert "encoder.layer.1.output.dense.weight" in child.text()
    assert not (tmp_path / "out").exists()
    model = Toy()
    model.norm.bias.data[0] = math.inf
    with pytest.raises(NonFiniteError, match=r"(?s)before the first step.*norm\.bias"):
        toy_trainer(tmp_path / "toy", model=model).train()


def test_nan_in_an_evaluation_is_shown_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is in the log as NaN, is never the best, and ends nothing: the weights are good."""
    trainer = toy_trainer(
        tmp_path, model=Bad("nan loss"), eval_dataset=_rows(1), eval_strategy="epoch", save_strategy="epoch",
        metric_for_best_model="loss", num_train_epochs=2, log_format="json",
    )  # fmt: skip
    trainer.train()
    assert [math.isnan(loss) for _, loss in entries(trainer, "eval_loss")] == [True, True]
    assert trainer.state.best_metric is None
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["eval_loss"] for line in shown if "eval_loss" in line] == [None, None]
    trainer.save_metrics("eval", trainer.evaluate())
    kept = json.loads((tmp_path / "eval_results.json").read_text("utf-8"), parse_constant=pytest.fail)
    assert kept["eval_loss"] == "NaN"


def test_scores_that_overflow_in_an_evaluation_are_told(corpus: Corpus, tmp_path: Path) -> None:
    """Weights that are numbers, but too large to compute with: there are no metrics of such answers."""
    out = tmp_path / "out"
    child = qa(corpus.words(out, max_steps=1, eval_strategy="no"), tmp_path / "log")
    assert child.wait() == 0, child.text()
    tensors = load_file(out / "model.safetensors")
    tensors["qa_outputs.weight"] = torch.full_like(tensors["qa_outputs.weight"], 3e38)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    words = command(out, tmp_path / "again", "--do_eval", validation_file=corpus.folder / "v1.json")
    judged = qa(words, tmp_path / "log2")
    assert judged.wait() == 70, judged.text()
    assert "the model's logits are infinite or not numbers" in judged.text()
    left = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert left == ["results_of.json", "run.jsonl", "run.log"], "no predictions from nothing"


class Poison(TrainerCallback):
    """Spoils a weight, or what the optimizer keeps of it, just before a save."""

    def __init__(self, what: str, step: int) -> None:
        self.what = what
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, optimizer: Any, **_: Any) -> None:
        if state.global_step == self.step:
            held = model.head.weight if self.what == "weight" else optimizer.state[model.head.weight]["exp_avg_sq"]
            held.data[0, 2] = math.nan


@pytest.mark.parametrize("what", ["weight", "exp_avg_sq"])
def test_nan_just_before_a_save(tmp_path: Path, what: str) -> None:
    """However it got there: what is saved after it would be of no use, and the checkpoint before it is kept."""
    trainer = _trainer(tmp_path, "nan loss", callbacks=[Poison(what, BAD)], save_total_limit=1)
    with pytest.raises(NonFiniteError, match=rf"(?s)after step {BAD}.*head\.weight") as caught:
        trainer.train()
    assert caught.value.exit_code == 70
    assert _all_finite(tmp_path) == 1
    assert checkpoints(tmp_path) == [f"checkpoint-{BAD - 1}"]


def test_the_final_model_is_not_saved_with_bad_weights(corpus: Corpus, tmp_path: Path) -> None:
    """A last step of infinite size: no later loss could show it. Through the command line: exit code 70."""
    words = corpus.words(
        tmp_path / "out", learning_rate=1e38, max_grad_norm=0, weight_decay=10, max_steps=1, save_strategy="no",
        eval_strategy="no", lr_scheduler_type="constant",
    )  # fmt: skip
    child = qa(words, tmp_path / "log")
    assert child.wait() == 70, child.text()
    assert "the weights are not finite at the end of the training" in child.text()
    assert not list((tmp_path / "out").glob("**/model.safetensors"))


def test_the_command_line_ends_with_70(corpus: Corpus, tmp_path: Path) -> None:
    words = corpus.words(tmp_path / "out", learning_rate=1e18, max_grad_norm=0, max_nonfinite_steps=2)
    child = qa(words, tmp_path / "log")
    assert child.wait() == 70, child.text()
    assert "not finite" in child.text()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_sum_that_overflows_is_not_a_weight_that_does() -> None:
    model = torch.nn.Linear(4, 4)
    model.weight.data.fill_(3e38)
    assert finite.not_finite(model) == []
    model.weight.data[0, 0] = math.inf
    assert finite.not_finite(model) == ["weight"]
