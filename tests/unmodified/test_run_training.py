"""What `whet run` does to the models of a script: losses, files and logits stay the script's, and the report says all.

The scripts are processes with the entry points replaced, as `sitecustomize` has it done; one test goes through the
command itself.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from whet.run import reports
from whet.run.changing import N_JUDGED, N_TIMED, N_UNCHANGED, N_WARM_UP

TOLERANCE = 1e-4
"""Relative, of a loss: sums run in another order without padding, and a step of AdamW carries that on."""
N_STEPS = N_UNCHANGED + N_WARM_UP + 3
_INSTALLED = """
from whet.run import changing, entry_points
entry_points.install()
changing.LEAST_GAIN = LEAST_GAIN
"""
_MODEL = """
import json, sys
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed
from transformers import AutoModel, OPTConfig, OPTForCausalLM
from transformers import BertForQuestionAnswering, BertForMaskedLM

def config(**others):
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertConfig(**{**sizes, "intermediate_size": 64, "max_position_embeddings": 80, **rates, **others})

def rows(n, labels):
    made = torch.Generator().manual_seed(0)
    for k in range(n):
        ids = torch.full((40,), 0)
        length = int(torch.randint(5, 30, (), generator=made))
        ids[:length] = torch.randint(5, 200, (length,), generator=made)
        yield {"input_ids": ids, "attention_mask": (ids > 0).long(), **labels(k)}

def arguments(**others):
    usual = {"per_device_train_batch_size": 4, "learning_rate": 1e-3, "report_to": "none", "use_cpu": True}
    usual |= {"save_strategy": "no", "logging_steps": 1, "disable_tqdm": True, "seed": 3}
    return TrainingArguments("out", **{**usual, **others})

def losses(trainer):
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]
"""
_TRAINER = """
set_seed(1)
model = BertForQuestionAnswering(config())
data = list(rows(400, lambda k: {"start_positions": k % 4, "end_positions": k % 4 + 1}))
trainer = Trainer(model, arguments(max_steps=N, max_grad_norm=0.5), train_dataset=data, eval_dataset=data[:8])
found = losses(trainer)
trainer.save_model("saved")
print(json.dumps({"losses": found, "eval": trainer.evaluate()["eval_loss"], "draw": float(torch.rand(()))}))
"""
_LOOP = """
from accelerate import Accelerator

set_seed(1)
accelerator = Accelerator(cpu=True)
model = BertForMaskedLM(config(vocab_size=60_000))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(list(rows(400, lambda k: {"labels": torch.arange(40) % 5})), batch_size=4)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
model.train()
found = []
for step, batch in zip(range(N), data):
    outputs = model(**batch)
    accelerator.backward(outputs.loss)
    optimizer.step()
    optimizer.zero_grad()
    found.append([outputs.loss.item(), float(outputs.logits.square().mean())])
print(json.dumps(found))
"""

# Sharpness-aware minimisation (Foret et al. 2021) by hand: weights move between two passes.
_SAM = _LOOP.replace(
    "    optimizer.step()\n",
    """
    with torch.no_grad():
        moved = [(weight, weight.grad * 0.01) for weight in model.parameters() if weight.grad is not None]
        for weight, by in moved:
            weight.add_(by)
    optimizer.zero_grad()
    accelerator.backward(model(**batch).loss)
    for weight, by in moved:
        weight.data.sub_(by)
    optimizer.step()
""",
)


def script(
    tmp_path: Path, text: str, n_steps: int = N_STEPS, *, run: bool, least_gain: float = 0.0, ranks: int = 1
) -> tuple[Any, list[reports.Report]]:
    """Return what a script of N steps prints last, and what was reported; `run`: with the entry points replaced."""
    folder = tmp_path / ("run" if run else "plain")
    (folder / "reports").mkdir(parents=True)
    (folder / "train.py").write_text(
        f"LEAST_GAIN, N = {least_gain}, {n_steps}\n{_INSTALLED if run else ''}{_MODEL}{text}", "utf-8"
    )
    variables = {**os.environ, "WHET_RUN_REPORTS": str(folder / "reports"), "OMP_NUM_THREADS": "1"}
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *start, "train.py"], cwd=folder, env=variables, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "whet" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]), reports.read(folder / "reports")


def test_trainer_has_the_losses_of_the_script(tmp_path: Path) -> None:
    """The steps before the change are bitwise the script's, later ones equal; the files are named as without whet."""
    n_steps = N_UNCHANGED + N_WARM_UP + N_TIMED + 2
    plain, none = script(tmp_path, _TRAINER, n_steps, run=False)
    run, (report,) = script(tmp_path, _TRAINER, n_steps, run=True)
    assert none == []
    assert run["losses"][:N_UNCHANGED] == plain["losses"][:N_UNCHANGED]
    assert run["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE)
    assert run["losses"] != plain["losses"]
    assert run["eval"] == pytest.approx(plain["eval"], rel=TOLERANCE)
    assert run["draw"] == plain["draw"]
    (model,) = report.models
    assert model.changed is not None
    assert model.left is None
    assert model.before is not None
    assert model.after is not None
    assert (model.before.n_steps, model.after.n_steps) == (N_UNCHANGED, N_TIMED)
    said = reports.line([report], has_whet=True)
    assert "BertForQuestionAnswering of transformers' Trainer" in said
    assert f"(median of {N_TIMED})" in said
    assert "the faster of the first 2 steps" in said
    assert {path.name for path in (tmp_path / "run" / "saved").iterdir()} == {
        path.name for path in (tmp_path / "plain" / "saved").iterdir()
    }


def test_model_that_became_slower_is_put_back(tmp_path: Path) -> None:
    n_steps = N_UNCHANGED + N_WARM_UP + N_JUDGED + 2
    text = _LOOP.replace("60_000", "200")
    plain, _ = script(tmp_path, text, n_steps, run=False)
    run, (report,) = script(tmp_path, text, n_steps, run=True, least_gain=1e9)
    for one, other in zip(run, plain, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    assert report.models[0].changed is None
    assert re.fullmatch(r"steps took longer: .* times as fast, so it was put back", str(report.models[0].left))


@pytest.mark.slow
@pytest.mark.parametrize("text", [_LOOP, _SAM], ids=["optimizer", "by hand"])
def test_loop_of_accelerate_may_read_logits_after_the_step(tmp_path: Path, text: str) -> None:
    """Logits of this size exist under whet.optimize when they are read, and not after the weights have changed."""
    plain, _ = script(tmp_path, text, run=False)
    run, (report,) = script(tmp_path, text, run=True)
    for one, other in zip(run, plain, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    assert [(one.name, one.by, one.left) for one in report.models] == [("BertForMaskedLM", "accelerate", None)]
    assert report.models[0].changed is not None


@pytest.mark.slow
def test_ranks_have_the_losses_of_the_script_and_a_speed(tmp_path: Path) -> None:
    """DistributedDataParallel is around the model when it is changed, on each rank after the same step."""
    text = _LOOP.replace("60_000", "200").replace("print(", "if accelerator.is_main_process: print(")
    text = text.replace("outputs.logits.square().mean()", "accelerator.reduce(outputs.loss.detach())")
    plain, _ = script(tmp_path, text, run=False, ranks=2)
    run, (report,) = script(tmp_path, text, run=True, ranks=2)
    for one, other in zip(run, plain, strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    (model,) = report.models
    assert model.changed is not None
    assert model.gain is not None


_PICKLES = """
import copy
from accelerate import Accelerator

set_seed(1)
accelerator = Accelerator(cpu=True)
model = BertForSequenceClassification(config())
teacher = BertForSequenceClassification(config()).requires_grad_(False).eval()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(list(rows(80, lambda k: {"labels": k % 2})), batch_size=4)
model, teacher, optimizer, data = accelerator.prepare(model, teacher, optimizer, data)
found = []
for step, batch in zip(range(N), data):
    model.train()
    with torch.no_grad():
        wanted = teacher(**batch).logits
    if step == 1:
        model(**batch)  # and the step fails, and is taken again
    outputs = model(**batch)
    loss = outputs.loss + (outputs.logits - wanted).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found.append([loss.item(), float(model(**batch).logits.square().mean())])
    if step in (0, N - 1):
        torch.save({"model": accelerator.unwrap_model(model), "step": step}, f"{step}.pt")
        torch.save({"model": copy.deepcopy(model)}, f"copy-{step}.pt")
        torch.save(batch, f"batch-{step}.pt")
accelerator.unwrap_model(model).save_pretrained("saved")
print(json.dumps({"found": found, "names": sorted(model.state_dict())}))
"""


def test_model_that_a_script_pickles_loads_without_whet(tmp_path: Path) -> None:
    """Also while its steps are timed, and a copy of it. A frozen teacher is changed at once."""
    plain, _ = script(tmp_path, _PICKLES, run=False)
    run, (report,) = script(tmp_path, _PICKLES, run=True)
    assert run["names"] == plain["names"]
    for one, other in zip(run["found"], plain["found"], strict=True):
        assert one == pytest.approx(other, rel=TOLERANCE)
    for step in (0, N_STEPS - 1):
        batch = torch.load(tmp_path / "run" / f"batch-{step}.pt", weights_only=False)
        for name in (f"{step}.pt", f"copy-{step}.pt"):
            assert b"whet" not in (tmp_path / "run" / name).read_bytes()
            own = torch.load(tmp_path / "run" / name, weights_only=False)["model"]
            assert float(own.eval()(**batch).logits.detach().square().mean()) == pytest.approx(
                run["found"][step][1], rel=TOLERANCE
            )
    model, teacher = report.models
    assert model.after is not None
    assert None not in (model.changed, teacher.changed)
    assert teacher.untimed == "it was not trained"


_LATER = """
from accelerate import Accelerator
from transformers import BertModel

class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        inputs.pop("labels", None)
        return model(**inputs).last_hidden_state[:, 0].float().square().mean()

set_seed(1)
data = list(rows(80, lambda k: {"labels": torch.arange(40) % 5}))
batch = {name: torch.stack([one[name] for one in data[:4]]) for name in data[0]}
found = {}
model = BertForMaskedLM(config())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = Accelerator(cpu=True).prepare(model, optimizer)
compiled = torch.compile(model, backend="eager", fullgraph=True)
found["compiled"] = []
for _ in range(N):
    loss = compiled(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found["compiled"].append(loss.item())
large = BertForMaskedLM(config(vocab_size=60_000))
found["trainer"] = losses(Trainer(large, arguments(max_steps=N), train_dataset=data))
found["again"] = losses(Trainer(large, arguments(max_steps=2), train_dataset=data))
optimizer = torch.optim.AdamW(large.parameters(), lr=1e-3)
kept = [large.train()(**batch)]
kept[0].loss.backward()
optimizer.step()
found["logits after a step"] = float(kept[0].logits.detach().square().mean())
encoder, kinds = BertModel(config()), []
encoder.encoder.layer[1].output.dense.register_forward_hook(lambda *given: kinds.append(str(given[2].dtype)))
found["half"] = losses(Own(encoder, arguments(max_steps=N, bf16=True), train_dataset=data))
print(json.dumps(found | {"kinds": sorted(set(kinds))}))
"""


@pytest.mark.slow
def test_what_a_script_does_to_its_model_later(tmp_path: Path) -> None:
    """It compiles the model, trains it a second time and in another loop, or has put mixed precision around it."""
    plain, _ = script(tmp_path, _LATER, run=False)
    run, (report,) = script(tmp_path, _LATER, run=True)
    assert run["kinds"] == plain["kinds"] == ["torch.bfloat16"]
    assert run.pop("half") == pytest.approx(plain.pop("half"), rel=2e-2)  # bf16 rounds sums at the third digit
    for name, losses in plain.items():
        assert run[name] == (losses if name == "kinds" else pytest.approx(losses, rel=TOLERANCE))
    compiled, large, encoder = report.models
    assert compiled.left == "torch.compile reads it, or its parts are called one by one"
    assert run["compiled"] == plain["compiled"]
    assert large.changed is not None
    assert encoder.changed is not None


_TWO = """
import whet
from peft import LoraConfig, get_peft_model

def classes(k):
    return {"labels": k % 2}

data = list(rows(80, classes))
set_seed(1)
first = BertForSequenceClassification(config())
first.resize_token_embeddings(210)
first = get_peft_model(first, LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"], lora_dropout=0.0))
second = whet.optimize(BertForSequenceClassification(config()))
shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 64}
third = OPTForCausalLM(OPTConfig(vocab_size=200, **shape))
found = [losses(Trainer(first, arguments(max_steps=N, gradient_checkpointing=True), train_dataset=data))]
found += [losses(Trainer(second, arguments(max_steps=3, bf16=True), train_dataset=data))]
texts = list(rows(80, lambda k: {"labels": torch.arange(40)}))
found += [losses(Trainer(third, arguments(max_steps=3), train_dataset=texts))]
short = BertForSequenceClassification(config())
found += [losses(Trainer(short, arguments(max_steps=1), train_dataset=data))]
only = BertForSequenceClassification(config())
found += [[Trainer(only, arguments(), eval_dataset=data).evaluate()["eval_loss"]]]
half = BertForSequenceClassification(config())
found += [losses(Trainer(half, arguments(max_steps=N, bf16=True), train_dataset=data))]
print(json.dumps(found))
"""


def test_each_model_of_a_script_is_changed_or_named(tmp_path: Path) -> None:
    """An adapter, a model that whet cannot change, one of the script's own, one step, an evaluation, bf16."""
    plain, _ = script(tmp_path, _TWO, run=False)
    run, (report,) = script(tmp_path, _TWO, run=True)
    tolerances = [TOLERANCE] * 5 + [2e-2]  # bf16 rounds the order of sums at the third digit
    for one, other, tolerance in zip(run, plain, tolerances, strict=True):
        assert one == pytest.approx(other, rel=tolerance)
    adapter, own, opt, short, only, half = report.models
    assert adapter.changed is not None
    assert adapter.after is not None
    assert own.left == "the script itself calls whet"
    assert opt.changed is None
    assert opt.left
    assert (short.changed, short.left) == (None, None)
    assert only.changed is not None
    assert only.untimed == "it was not trained"
    assert half.changed is not None
    said = reports.line([report], has_whet=True)
    assert f"OPTForCausalLM of transformers' Trainer ({opt.left})" in said
    assert "too few steps to change it" in said


@pytest.mark.slow
@pytest.mark.true_start
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="binds cores through calls of Linux")
def test_command_trains_a_script(tmp_path: Path) -> None:
    """Losses through the command, with a worker process for the data; WHET_RUN=off is bitwise the script."""
    text = f"N = {N_STEPS}\n{_MODEL}" + _TRAINER.replace("=N,", "=N, dataloader_num_workers=1,")
    (tmp_path / "train.py").write_text(text, "utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GOMP_")}
    found = {}
    for switch in ("plain", "off", "on"):
        words = ["train.py"] if switch == "plain" else ["-m", "whet", "run", "train.py"]
        variables = {**kept, "OMP_NUM_THREADS": "1", "WHET_RUN": "off" if switch == "plain" else switch}
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300,
            check=True,
        )  # fmt: skip
        found[switch] = json.loads(done.stdout.splitlines()[-1])
    said = [line for line in done.stderr.splitlines() if line.startswith("whet run: ")]
    assert len(said) == 2
    assert said[-1].startswith("whet run: BertForQuestionAnswering: ")
    assert "times as fast per place of the batch" in said[-1]
    assert found["off"] == found["plain"]
    assert found["on"]["losses"] == pytest.approx(found["plain"]["losses"], rel=TOLERANCE)


_INSIDE = """
from accelerate import Accelerator
from torch.nn.functional import normalize

def mixed(states):
    return 0.7 * states + 0.3 * states.flip(0)

def put(model, name, step):
    block = model.bert.encoder.layer[0]
    if name == "forward hook" or (name == "late hook" and step == 3):
        block.register_forward_hook(lambda module, given, out: mixed(out))
    if name == "backward hook":
        block.register_full_backward_hook(lambda module, grads, _: tuple(g if g is None else mixed(g) for g in grads))
    if name == "captured states":
        block.register_forward_hook(lambda module, given, out: seen.update(it=out))
    if name == "captured attention":
        block.attention.self.register_forward_hook(lambda module, given, out: seen.update(it=out[1]))
    if name == "patched block":
        forward = block.forward
        block.forward = lambda *given, **named: mixed(forward(*given, **named))
    if name == "own block":
        class Own(type(block)):
            def forward(self, *given, **named):
                return mixed(super().forward(*given, **named))
        model.bert.encoder.layer[0] = Own(model.config)
    if name == "new block" and step == 4:
        model.bert.encoder.layer.append(type(block)(model.config))
    if name == "token types":
        model.bert.embeddings.token_type_ids.fill_(1)
    if name == "positions":
        model.bert.embeddings.position_ids = (torch.arange(80) % 8)[None]

def more(model, name, loss):
    if name == "captured states":
        first = normalize(seen["it"][:, 0], dim=-1)
        return (first @ first.T).exp().mean()
    if name == "captured attention":
        return seen["it"].square().mean()
    if name == "gradient penalty":
        table = model.bert.embeddings.word_embeddings.weight
        return torch.autograd.grad(loss, [table], create_graph=True)[0].square().sum()
    return 0.0

data = list(rows(4 * N, lambda k: {"labels": k % 2}))
found, seen = {}, {}
for name in NAMES:
    set_seed(1)
    model = BertForSequenceClassification(config(attn_implementation="eager")).train()
    put(model, name, 0)
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    found[name] = []
    for step in range(N):
        if step:
            put(model, name if name in ("late hook", "new block") else None, step)
        some = data[4 * step : 4 * step + 4]
        batch = {key: torch.stack([torch.as_tensor(one[key]) for one in some]) for key in some[0]}
        loss = model(**batch).loss
        loss = loss + more(model, name, loss)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found[name].append(loss.item())
print(json.dumps(found))
"""
_SEEN = ("forward hook", "late hook", "backward hook", "captured states", "captured attention")
_OWN = {"patched block": "itself", "own block": "itself", "gradient penalty": "create_graph"}


def test_hooks_and_parts_of_a_script_get_its_rows(tmp_path: Path) -> None:
    """They may mix the rows of a batch, or take a place of each: all rows in one would train another model."""
    names = [*_SEEN, *_OWN, "new block", "token types", "positions"]
    text = f"NAMES = {names!r}\n{_INSIDE}"
    plain, _ = script(tmp_path, text, run=False)
    run, (report,) = script(tmp_path, text, run=True)
    for name, losses in plain.items():
        assert run[name] == pytest.approx(losses, rel=TOLERANCE), name
    left = {name: one.left for name, one in zip(names, report.models, strict=True)}
    assert all(left[name] is None for name in _SEEN)
    assert any("hooks inside the encoder" in note for note in report.notes)
    assert any("into which a part came afterwards" in note for note in report.notes)
    assert all(said in str(left[name]) for name, said in _OWN.items())


_LOGITS = """
from accelerate import Accelerator
from torch.nn.functional import cross_entropy, kl_div
from transformers import BertForTokenClassification, LlamaConfig, LlamaForCausalLM

def new(kind):
    if kind == "decoder":
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
        return LlamaForCausalLM(LlamaConfig(vocab_size=200, use_cache=False, **shape))
    return BertForMaskedLM(config()) if kind == "words" else BertForTokenClassification(config(num_labels=5))

data = list(rows(4 * N, lambda k: {"labels": torch.arange(40) % 5}))
found = {}
for name in NAMES:
    kind, _, how = name.partition(", ")
    set_seed(1)
    model, teacher = new(kind).train(), new(kind).requires_grad_(False).eval()
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.SGD(model.parameters(), lr=0.1)
    model, teacher, optimizer = accelerator.prepare(model, teacher, optimizer)
    found[name] = []
    for step in range(N):
        some = data[4 * step : 4 * step + 4]
        batch = {key: torch.stack([one[key] for one in some]) for key in some[0]}
        everywhere = batch["labels"].clone()
        if "full at first" in how and step < 2:
            batch["attention_mask"].fill_(1)
        batch["labels"][batch["attention_mask"] == 0] = -100
        if "usual" in how or how == "distilled":
            out = model(**batch)
            loss = out.loss
            if how == "distilled":  # also from the teacher's padding
                wanted = teacher(**batch).logits.log_softmax(-1)
                loss = loss + kl_div(out.logits.log_softmax(-1), wanted, log_target=True, reduction="batchmean")
        else:
            batch.pop("labels")
            loss = cross_entropy(model(**batch).logits.flatten(0, 1), everywhere.flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found[name].append(loss.item())
print(json.dumps(found))
"""
_KINDS = ("words", "classes", "decoder")
_KEPT = "decoders whose hidden states of padding tokens are read"


def same_losses(tmp_path: Path, text: str) -> reports.Report:
    plain, _ = script(tmp_path, text, run=False)
    run, (report,) = script(tmp_path, text, run=True)
    for name, losses in plain.items():
        assert run[name] == pytest.approx(losses, rel=TOLERANCE), name
    assert all(one.changed is not None for one in report.models)
    return report


def test_loss_that_reads_logits_at_padding_is_the_scripts(tmp_path: Path) -> None:
    names = [f"{kind}, {how}" for kind in _KINDS for how in ("everywhere", "full at first", "distilled")]
    report = same_losses(tmp_path, f"NAMES = {names!r}\n{_LOGITS}")
    assert any(_KEPT in note for note in report.notes)


def test_loss_whose_labels_leave_padding_out_has_none_computed(tmp_path: Path) -> None:
    names = [f"{kind}, {how}" for kind in _KINDS for how in ("usual", "usual, full at first")]
    report = same_losses(tmp_path, f"NAMES = {names!r}\n{_LOGITS}")
    assert not any(_KEPT in note for note in report.notes)


_EVALUATED = """
set_seed(1)
model = BertForSequenceClassification(config())
data = list(rows(80, lambda k: {"labels": k % 2}))
trainer = Trainer(model, arguments(max_steps=N), train_dataset=data, eval_dataset=data[:8])
print(json.dumps([trainer.evaluate()["eval_loss"], *losses(trainer)]))
"""


def test_model_that_is_evaluated_first_is_timed_when_it_trains(tmp_path: Path) -> None:
    plain, _ = script(tmp_path, _EVALUATED, run=False)
    run, (report,) = script(tmp_path, _EVALUATED, run=True)
    assert run == pytest.approx(plain, rel=TOLERANCE)
    assert run[1 : 1 + N_UNCHANGED] == plain[1 : 1 + N_UNCHANGED]
    (model,) = report.models
    assert (model.by, model.untimed) == ("transformers' Trainer", None)
    assert model.gain is not None


def test_packages_in_a_folder_of_pythonpath_are_no_code_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "torch").symlink_to(Path(torch.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    _, (report,) = script(tmp_path, _EVALUATED, run=True)
    assert report.models[0].changed is not None
