"""Under `whet.optimize` a language model's logits are computed when they are read; its loss does without them."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments

import whet
from tiny import DECODERS, VOCABULARY
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.kernels.matrix import is_widened
from whet.objectives import lazy_logits
from whet.objectives.lazy_logits import LazyLogits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.usefixtures("fresh_accelerate"),
]
CAPPED = {"final_logit_softcapping": 3.0}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the few tokens of a test count as many: logits exist for 8 of them at a time."""
    monkeypatch.setattr(lazy_logits, "chunk_rows", lambda _: 8)


def _batch(seed: int = 1) -> dict[str, Tensor]:
    return collate(token_rows(6, seed=seed))


def _optimized(family: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return a decoder under whet.optimize, in training, and the same one untouched."""
    model, plain = (tiny_decoder(family, **changes).train() for _ in range(2))
    return whet.optimize(model), plain


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def _equal(found: Any, wanted: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Compare with room for sums of some hundred terms in another order."""
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def _shifted(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """The loss as scripts compute it from logits."""
    cut, labels = logits[..., :-1, :].contiguous(), batch["labels"][..., 1:].contiguous()
    return nn.CrossEntropyLoss()(cut.view(-1, cut.size(-1)), labels.view(-1))


@pytest.mark.parametrize("family", [*DECODERS, "gemma2 with a cap"])
@pytest.mark.parametrize("items", [None, 7, torch.tensor(7)], ids=["mean", "int", "tensor"])
def test_a_models_own_loss_needs_no_logits(family: str, items: Any) -> None:
    changes = CAPPED if family.endswith("cap") else {}
    model, plain = _optimized(family.split()[0], **changes)
    given = _batch() | ({} if items is None else {"num_items_in_batch": items})
    out, wanted = model(**given), plain(**given)
    assert type(out.logits) is LazyLogits
    assert out.logits.is_open
    assert (out.logits.shape, out.logits.dtype) == (wanted.logits.shape, wanted.logits.dtype)
    for one in (out, wanted):
        one.loss.backward()
    _equal(out.loss, wanted.loss)
    _equal(_grads(model), _grads(plain))
    real = given["attention_mask"].bool()
    _equal(out.logits[real], wanted.logits[real])


def test_a_loss_of_the_scripts_own_needs_none_either() -> None:
    model, plain = _optimized()
    batch = _batch()
    given = {name: one for name, one in batch.items() if name != "labels"}
    found = model(**given).logits
    for logits, of in ((found, model), (plain(**given).logits, plain)):
        _shifted(logits, batch).backward()
        assert of is plain or found.is_open
    _equal(_grads(model), _grads(plain))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 3])
def test_cross_entropy_is_torchs(reduction: str, ignored: int) -> None:
    model, plain = _optimized()
    batch = _batch()
    labels = batch["labels"].clamp_min(ignored).flatten()
    for one in (model, plain):
        logits = one(batch["input_ids"], batch["attention_mask"]).logits
        loss = nn.functional.cross_entropy(
            logits.reshape(-1, VOCABULARY), labels, ignore_index=ignored, reduction=reduction
        )
        loss.sum().backward()
    _equal(_grads(model), _grads(plain))


def test_cross_entropy_takes_its_arguments_by_name() -> None:
    model, plain = _optimized()
    batch = _batch()
    found, wanted = (
        nn.functional.cross_entropy(
            input=one(batch["input_ids"], batch["attention_mask"]).logits.flatten(0, 1),
            target=batch["labels"].flatten(),
        )
        for one in (model, plain)
    )
    _equal(found, wanted)


def _masked_words() -> BertForMaskedLM:
    config = BertConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
    torch.manual_seed(0)
    plain = BertForMaskedLM(config).train()
    nn.init.normal_(plain.cls.predictions.bias, std=0.5)
    return plain


def test_masked_words_with_a_bias() -> None:
    plain = _masked_words()
    model = whet.optimize(copy.deepcopy(plain))
    for one in (model, plain):
        out = one(**_batch())
        out.loss.backward()
    assert type(model(**_batch()).logits) is LazyLogits
    _equal(_grads(model), _grads(plain))


@pytest.mark.parametrize("loss_of", ["its own", "function"])
def test_masked_words_in_bf16(loss_of: str) -> None:
    plain = _masked_words()
    model = whet.optimize(copy.deepcopy(plain))
    for one in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):  # the states before the head are in bf16, its weights are not
            out = one(**_batch())
        assert one is plain or (type(out.logits) is LazyLogits and out.logits.is_open)
        out = out.loss if loss_of == "its own" else LOSSES[loss_of](out.logits[_batch()["attention_mask"].bool()])
        out.backward()
    # bf16 has 8 bits, and gradients are sums of many tokens; a gradient that is missing or another one is off by 1.
    # That of a key's bias is 0 but for rounding, as a softmax does not change with it.
    largest = max(wanted.norm() for wanted in _grads(plain).values())
    for name, wanted in _grads(plain).items():
        assert (_grads(model)[name] - wanted).norm() < 0.05 * wanted.norm() + 1e-3 * largest, name


READS: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda logits: logits.argmax(-1),
    "numpy": lambda logits: logits.detach().numpy(),
    "asarray": lambda logits: np.asarray(logits.detach()),
    "log_softmax": lambda logits: torch.log_softmax(logits, -1),
    "list": lambda logits: logits[0, 0].tolist(),
    "cat": lambda logits: torch.cat([logits, logits]),
    "einsum": lambda logits: torch.einsum("btv,btv->bt", logits, logits),
    "pickle": lambda logits: pickle.loads(pickle.dumps(logits.detach())),
    "copy": lambda logits: copy.deepcopy(logits.detach()),
    "temperature": lambda logits: logits / 0.7,
    "half a cap": lambda logits: torch.tanh(logits / 3.0),
    "last": lambda logits: logits[:, -1],
    "every second word": lambda logits: logits[..., ::2],
    "bool": lambda logits: logits[logits > 0],
    "iterate": lambda logits: [row.sum() for row in logits],
    "in place": lambda logits: logits.clone().mul_(2.0),
    "half": lambda logits: logits.half(),
    "repr": lambda logits: repr(logits.detach()),
    "address": lambda logits: logits.data_ptr() > 0,
}


@pytest.mark.parametrize("read", READS)
def test_whoever_reads_them_gets_the_logits(read: str) -> None:
    model, _ = _optimized()
    batch = _batch()
    found = model(**batch).logits
    states = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    wanted = nn.functional.linear(states, model.lm_head.weight)
    got, expected = READS[read](found), READS[read](wanted)
    if isinstance(got, str):
        assert got == expected
    else:
        _equal(got, expected)


class _Squares(torch.autograd.Function):
    """An operator of somebody's own, which torch does not announce to subclasses of tensors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return (logits * logits).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore
        return 2 * grads[0] * ctx.saved_tensors[0]


LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "function": _Squares.apply,
    "torch": lambda logits: logits.square().sum(),
    "checkpoint": lambda logits: checkpoint(_Squares.apply, logits, use_reentrant=True),
}


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("loss_of", LOSSES)
def test_gradients_of_any_loss_reach_the_weights(loss_of: str, shifted: bool) -> None:
    model, _ = _optimized()
    batch = _batch()
    grads = []
    for lazy in (True, False):
        model.zero_grad()
        if lazy:
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
        else:
            states = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
            logits = nn.functional.linear(states, model.lm_head.weight)
        logits = logits[..., :-1, :].float() if shifted else logits
        LOSSES[loss_of](logits).backward()
        grads.append(_grads(model))
    _equal(*grads)


def test_what_is_written_to_logits_counts_in_the_loss() -> None:
    batch = _batch()
    model, plain = _optimized()
    real = batch["attention_mask"].bool()
    for write in (
        lambda logits: logits.mul_(0.5),
        lambda logits: logits.__setitem__((..., slice(0, 9)), -5.0),
        lambda logits: logits.detach().mul_(0.5),
    ):
        found = []
        for one in (model, plain):
            with torch.no_grad():
                logits = one(batch["input_ids"], batch["attention_mask"]).logits
                early = logits[..., :-1, :]
                write(logits)
                found.append((_shifted(logits, batch), early[real[:, 1:]], logits[real]))
        _equal(*found)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_a_step_of_the_optimizer_makes_unread_logits_unreadable(options: Any) -> None:
    model, _ = _optimized()
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    out = model(**_batch())
    out.loss.backward()
    kept = out.logits.detach().clone()
    optimizer.step()
    assert torch.equal(out.logits, kept)  # which were read
    out = model(**_batch())
    out.loss.backward()
    optimizer.step()
    with pytest.raises(whet.ConfigError, match=r"read them before optimizer\.step"):
        out.logits.argmax(-1)
    with pytest.raises(whet.ConfigError, match=r"read them before optimizer\.step"):
        _shifted(out.logits, _batch())


def _by_hand(model: nn.Module, tied: bool) -> None:
    """Change weights as loops do that have no optimizer: through `data`, which torch does not count."""
    for name, weight in model.named_parameters():
        if weight.grad is not None and (not tied or "embed" in name):
            weight.data.add_(weight.grad, alpha=0.1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_changed_by_hand_make_them_unreadable_too(dtype: torch.dtype, tied: bool) -> None:
    model = whet.optimize(tiny_decoder("llama", tie_word_embeddings=tied).train().to(dtype))
    batch = _batch()
    out = model(**batch)
    out.loss.backward()
    before = [weight.detach().clone() for weight in model.parameters()]
    _by_hand(model, tied)
    with pytest.raises(whet.ConfigError, match="you change the weights"):
        out.logits.argmax(-1)
    with pytest.raises(whet.ConfigError, match="you change the weights"):
        _shifted(out.logits, batch)
    for weight, kept in zip(model.parameters(), before, strict=True):
        weight.data.copy_(kept)  # as adversarial training takes its step back
    found = _shifted(out.logits.float(), batch).detach()
    assert float(found) == pytest.approx(float(out.loss.detach()), rel=1e-2)  # of bf16


def test_what_a_script_holds_may_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `whet run` has it: the logits are those of the weights before, and until these change they have gradients."""
    monkeypatch.setattr(lazy_logits, "_KEEPS", True)
    model, plain = _optimized()
    batch, found = _batch(), []
    real = batch["attention_mask"].bool()
    for one in (plain, model):
        out, again = one(**batch), one(**batch)
        out.loss.backward(retain_graph=True)
        out.logits[real].square().mean().backward()
        again.loss.backward()
        _by_hand(one, False)
        found.append([_grads(one), out.logits[real].detach(), again.logits[real].detach()])
    _equal(found[1], found[0])


def test_a_step_of_another_models_optimizer_does_not() -> None:
    model, other = _optimized()
    optimizer = torch.optim.AdamW(other.parameters())
    out = model(**_batch())
    other(**_batch()).loss.backward()
    optimizer.step()
    assert out.logits.argmax(-1).shape == out.logits.shape[:2]


def test_a_hook_on_logits_is_run_or_refused() -> None:
    model, _ = _optimized()
    batch = _batch()
    seen: list[Tensor] = []
    logits = model(batch["input_ids"], batch["attention_mask"]).logits
    logits.register_hook(seen.append)
    _shifted(logits, batch).backward()
    assert len(seen) == 1
    with pytest.raises(whet.ConfigError, match="without labels"):
        model(**batch).logits.retain_grad()


def test_labels_outside_of_the_vocabulary_are_refused_as_ever() -> None:
    model, plain = _optimized()
    batch = _batch()
    labels = batch["labels"].clone().flatten()
    labels[3] = VOCABULARY
    for one in (model, plain):
        logits = one(batch["input_ids"], batch["attention_mask"]).logits
        with pytest.raises(IndexError, match="out of bounds"):
            nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels)


def test_no_labels_at_all_are_no_number_as_ever() -> None:
    model, plain = _optimized()
    batch = _batch() | {"labels": torch.full_like(_batch()["labels"], -100)}
    assert torch.isnan(model(**batch).loss)
    assert torch.isnan(plain(**batch).loss)


def test_autocast_computes_products_in_its_format() -> None:
    model, plain = _optimized()
    batch = _batch()
    found = []
    for one in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            out = one(**batch)
        out.loss.backward()
        found.append((out.loss, out.logits[batch["attention_mask"].bool()], one.lm_head.weight.grad))
    # bf16 has 8 bits; operators round at other places, and weights not at all where the processor is faster in fp32
    _equal(*found, rtol=0.05, atol=0.04 if is_widened() else 0.02)
    assert found[0][1].dtype is torch.bfloat16


def test_accelerate_casts_them_without_reading_them() -> None:
    accelerator = whet.Accelerator(mixed_precision="bf16", cpu=True)
    model = accelerator.prepare(tiny_decoder("llama").train())
    out = model(**_batch())
    assert type(out.logits) is LazyLogits
    assert out.logits.is_open
    assert out.logits.dtype is torch.float32
    out.loss.backward()


def _right(given: Any) -> dict[str, float]:
    return {"right": float((given.predictions.argmax(-1) == given.label_ids).mean())}


def test_transformers_trainer_evaluates_with_them(tmp_path: Path) -> None:
    rows: Any = token_rows(12)
    found = []
    for optimized in (True, False):
        model = tiny_decoder("llama")
        trainer = Trainer(
            whet.optimize(model) if optimized else model,
            TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, max_steps=2, per_device_eval_batch_size=4),
            collate, rows, rows, compute_metrics=_right,
        )  # fmt: skip
        trainer.train()
        result = trainer.evaluate()
        found.append({name: result[name] for name in ("eval_loss", "eval_right")})
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-4)  # two steps of AdamW in fp32
    assert found[0]["eval_right"] == pytest.approx(found[1]["eval_right"], abs=0.01)


def test_copies_and_pickles_have_it_and_restore_takes_it_out() -> None:
    model, plain = _optimized()
    batch = _batch()
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.normal_(one.lm_head.weight, generator=torch.Generator().manual_seed(3))
        assert type(one(**batch).logits) is LazyLogits
        states = one.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
        _equal(one(**batch).logits, nn.functional.linear(states, one.lm_head.weight))
    whet.restore(model)
    assert type(model(**batch).logits) is Tensor
    assert "forward" not in model.lm_head.__dict__
    assert vars(model.lm_head).keys() == vars(plain.lm_head).keys()


def test_hooks_and_adapters_on_the_head_see_logits() -> None:
    peft = pytest.importorskip("peft")
    model, _ = _optimized()
    seen: list[type] = []
    handle = model.lm_head.register_forward_hook(lambda _, __, out: seen.append(type(out)))
    model(**_batch()).loss.backward()
    handle.remove()
    assert seen == [Tensor]
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    out = adapted(**_batch())
    assert type(out.logits) is Tensor
    out.loss.backward()
    assert all(weight.grad is not None for weight in adapted.parameters() if weight.requires_grad)
    whet.restore(adapted)
    assert not any("forward" in module.__dict__ for module in adapted.modules())


def test_lora_trains_with_them() -> None:
    peft = pytest.importorskip("peft")
    found = []
    for optimized in (True, False):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(tiny_decoder("llama"), config).train()
        out = (whet.optimize(model) if optimized else model)(**_batch())
        assert not optimized or out.logits.is_open
        out.loss.backward()
        found.append((out.loss, _grads(model)))
    _equal(*found)


def test_a_second_backward_pass_and_accumulation() -> None:
    model, plain = _optimized()
    for one in (model, plain):
        for seed in (1, 2):
            loss = one(**_batch(seed)).loss
            loss.backward(retain_graph=True)
            loss.backward()
    _equal(_grads(model), _grads(plain))


def test_generate_is_as_ever() -> None:
    model, plain = _optimized()
    ids = torch.tensor([[5, 6, 7, 8]] * 3)
    found = [one.eval().generate(ids, max_new_tokens=5, do_sample=False) for one in (model, plain)]
    assert torch.equal(*found)


def test_an_optimizer_steps_while_other_threads_compute_logits() -> None:
    """Logits that are held are looked through at each step, and those of other threads come and go meanwhile."""
    states, weight = torch.randn(1, 12, 4), nn.Parameter(torch.randn(16, 4))
    held = [LazyLogits.of(states, weight, None) for _ in range(1000)]
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    is_over, interval = threading.Event(), sys.getswitchinterval()

    def serve() -> None:
        with torch.no_grad():
            while not is_over.is_set():
                LazyLogits.of(states, weight, None)

    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=serve) for _ in range(2)]
    for one in threads:
        one.start()
    try:
        for _ in range(20):
            lazy_logits.keep_readable(optimizer)
            optimizer.step()
    finally:
        is_over.set()
        for one in threads:
            one.join()
        sys.setswitchinterval(interval)
    assert all(type(one) is LazyLogits and one.is_open for one in held)
