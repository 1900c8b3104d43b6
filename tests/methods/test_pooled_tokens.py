"""Under `whet.optimize`, an encoder whose pooling takes a token or two of each row: these alone in the last block."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from native_rows import RowsOfOperators
from optimized import Inputs, inputs
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.autograd import Function

import whet
from tiny import lora_targets, tiny_model
from whet.config.methods import MethodSettings, Place
from whet.errors import ConfigError
from whet.kernels.library import library
from whet.methods import order
from whet.models.known import known
from whet.models.lazy_tensor import LazyStates, LazyTensor
from whet.models.packed import prepare
from whet.models.view import ModelView

pytestmark = [
    pytest.mark.skipif(library() is None, reason="the native operators are not built here"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
]
CAN = tuple(name for name, family in known().items() if family.stack is not None and not family.causal)
PLACES: tuple[tuple[Place, ...], ...] = (("first",), ("last",), ("first", "last"))
# The same sums in float32, cut in other places, relative to the largest.
GAP = 3e-6


def encoder(family: str = "bert", places: tuple[Place, ...] = (), dropout: float = 0.2, **changes: Any) -> Any:
    """Return a tiny encoder without padding, in training, whose pooling takes the tokens at these places."""
    pad = {"pad_token_id": 0} if known()[family].skips_padding else {}
    return changed(tiny_model(family, dropout=dropout, **pad, **changes).base_model.train(), places)


def changed(model: Any, places: tuple[Place, ...]) -> Any:
    assert prepare(model, encoder_only=True) is not None
    order.apply(ModelView(model), MethodSettings(operators="auto", unpad="none", last_block="read", pooled=places))
    return model


def run(model: Any, batch: Inputs, seed: int = 5) -> Tensor:
    torch.manual_seed(seed)
    return model(**batch).last_hidden_state


def columns(batch: Inputs, places: tuple[Place, ...]) -> list[Tensor]:
    last = batch["attention_mask"].sum(1) - 1
    return [last if place == "last" else torch.zeros_like(last) for place in places]


def gathered(states: Tensor, batch: Inputs, places: tuple[Place, ...]) -> Tensor:
    """Take one state of each row for each place, as the pooling of sentence-transformers does."""
    found = []
    for column in columns(batch, places):
        index = column[:, None, None].expand(-1, 1, states.shape[-1])
        found.append(torch.gather(states, 1, index).squeeze(1))
    return torch.cat(found, dim=-1)


def close(found: Tensor, wanted: Tensor) -> None:
    largest = float(wanted.detach().abs().max())
    torch.testing.assert_close(found, wanted, rtol=0, atol=GAP * max(1.0, largest))


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def same_gradients(model: Any, other: Any) -> None:
    found, wanted = gradients(model), gradients(other)
    assert found.keys() == wanted.keys()
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    for name, grad in wanted.items():
        assert float((found[name] - grad).abs().max()) <= GAP * largest, name


@pytest.mark.parametrize("family", CAN)
@pytest.mark.parametrize("places", PLACES)
def test_pooled_states_and_gradients_are_those_of_all_tokens(family: str, places: tuple[Place, ...]) -> None:
    batch, model, plain = inputs(9, 30, 1, 17), encoder(family, places), encoder(family)
    with RowsOfOperators("bias_act", "gated_act") as rows:
        states = run(model, batch)
    assert rows.forward[-1] <= 4 * len(places) < rows.forward[0]
    assert type(states) is LazyStates
    found, wanted = (gathered(one, batch, places) for one in (states, run(plain, batch)))
    assert type(found) is Tensor
    close(found, wanted)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0))
    for one in (found, wanted):
        (one * weights).sum().backward()
    assert states.is_open
    same_gradients(model, plain)


def test_last_tokens_behind_a_mask_and_first_by_index() -> None:
    """lasttoken multiplies by the mask first; earlier versions take states[:, 0]."""
    batch, model, plain = inputs(9, 30, 17), encoder(places=("first", "last")), encoder()
    states, wanted = run(model, batch), run(plain, batch)
    for one in (states, wanted):
        mask = batch["attention_mask"].unsqueeze(-1).expand_as(one).to(one.dtype) * 0.5
        one.pooled = gathered(one * mask, batch, ("last",)) + one[:, 0] + one[:, -30]
    close(states.pooled, wanted.pooled)
    assert states.is_open
    for one in (states, wanted):
        one.pooled.square().sum().backward()
    same_gradients(model, plain)


READS: dict[str, Callable[[Tensor], Any]] = {
    "mean": lambda states: states.mean(1),
    "another place": lambda states: states[:, 3],
    "a row": lambda states: states[2],
    "first two": lambda states: states[:, :2],
    "numpy": lambda states: np.asarray(states.detach()),
    "list": lambda states: states[0, 0].tolist(),
    "iterate": lambda states: [row.sum() for row in states],
    "norm": lambda states: torch.nn.functional.normalize(states, dim=-1),
    "product": lambda states: states @ states.mT,
    "larger product": lambda states: states * torch.ones(2, 1, 1, 1),
    "with a number": lambda states: states * 2.0,
    "twice": lambda states: states * torch.full((1,), 2.0) * torch.full((1,), 3.0),
    "where": lambda states: torch.where(states > 0, states, 0.0),
    "cat": lambda states: torch.cat([states, states]),
    "gather of parts": lambda states: states.gather(1, torch.arange(32).expand(3, 1, 32) % 2),
    "gather of rows": lambda states: states.gather(0, torch.zeros(1, *states.shape[1:], dtype=torch.int64)),
    "pickle": lambda states: pickle.loads(pickle.dumps(states.detach())),
    "copy": lambda states: copy.deepcopy(states.detach()),
    "half": lambda states: states.bfloat16(),
    "in place": lambda states: states.clone().mul_(2.0),
    "out": lambda states: torch.add(states, 1.0, out=torch.empty(0)) if not states.requires_grad else states + 1.0,
    "repr": lambda states: repr(states.detach()),
    "fill": lambda states: states.masked_fill(states > 1, 0.0).max(dim=1).values,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("grads", [True, False])
def test_whoever_reads_other_states_gets_all(name: str, grads: bool) -> None:
    batch, model, plain = inputs(9, 30, 17), encoder(places=("first",)), encoder()
    with torch.set_grad_enabled(grads):
        found, wanted = (READS[name](run(one, batch)) for one in (model, plain))
    if isinstance(found, str):
        assert found.startswith("tensor(")
    else:
        assert not isinstance(found, LazyTensor)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert type(run(model, batch)) is Tensor, "the next calls compute all at once"


def test_states_that_are_read_after_pooling_have_its_masks(caplog: pytest.LogCaptureFixture) -> None:
    batch, model, plain = inputs(9, 30, 17), encoder(places=("first",)), encoder()
    states, wanted = run(model, batch), run(plain, batch)
    pooled, generator = states[:, 0], torch.get_rng_state()
    with caplog.at_level("INFO", logger="whet"):
        close(states + 0.0, wanted)
    close(states[:, 0], pooled)
    assert torch.equal(torch.get_rng_state(), generator)
    assert "token embeddings were read" in caplog.text


def test_losses_of_pooled_and_of_all_states_add_up() -> None:
    batch, model, plain = inputs(9, 30, 17), encoder(places=("first",)), encoder()
    for one in (model, plain):
        states = run(one, batch)
        (states[:, 0].square().sum() + states.cos().sum()).backward()
    same_gradients(model, plain)


def test_adapters_with_dropout_of_their_own() -> None:
    """peft's dropout draws from torch's generator: what is read later has the masks of the first pass."""
    batch = inputs(9, 30, 17)
    lora = LoraConfig(target_modules=lora_targets("bert"), lora_dropout=0.3, init_lora_weights=False)
    model = get_peft_model(tiny_model("bert").base_model, lora).train()
    changed(model, ("first",))
    found = run(model, batch)
    assert type(found) is LazyStates
    generator = torch.get_rng_state()
    everything = found + 0.0
    assert torch.equal(torch.get_rng_state(), generator)
    torch.testing.assert_close(everything, run(model, batch))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_states_of_an_adapter_that_was_switched_off_since_are_refused(
    dtype: torch.dtype | None, training: bool
) -> None:
    """No weight has changed, and no mode: what the second pass gives contradicts the first."""
    batch = inputs(9, 30, 17)
    lora = LoraConfig(target_modules=lora_targets("bert"), init_lora_weights=False)
    model = get_peft_model(tiny_model("bert", dropout=0.2).base_model, lora).train(training)
    assert prepare(model, encoder_only=True) is not None
    settings = MethodSettings(operators="auto", unpad="none", last_block="read", pooled=("first",), unpad_dtype=dtype)
    order.apply(ModelView(model), settings)
    with model.disable_adapter():
        states = run(model, batch)
    assert type(states) is LazyStates
    with pytest.raises(ConfigError, match="last_block_tokens='all'"):
        states.mean()
    states = run(model, batch)
    assert type(states) is Tensor


def test_states_that_are_not_finite_are_no_others() -> None:
    batch, model = inputs(9, 30, 17), encoder(places=("first",))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[:50] = float("nan")
    states = run(model, batch)
    assert type(states) is LazyStates
    assert bool((states + 0.0).isnan().any())


def test_states_of_weights_that_are_gone_are_refused() -> None:
    batch = inputs(9, 30, 17)
    for change in ("fused step", "step", "write", "eval", "restore"):
        model = encoder(places=("first",))
        states = run(model, batch)
        pooled = states[:, 0]
        pooled.sum().backward()
        if change.endswith("step"):
            torch.optim.AdamW(model.parameters(), fused=change == "fused step").step()
        elif change == "write":
            with torch.no_grad():
                model.embeddings.word_embeddings.weight.mul_(2.0)
        elif change == "eval":
            model.eval()
        else:
            whet.restore(model)
        assert torch.equal(states[:, 0], pooled), change
        with pytest.raises(ConfigError, match="last_block_tokens='all'"):
            states.mean()


def test_hooks_on_states_after_their_pooling_are_refused() -> None:
    batch, model, plain = inputs(9, 30, 17), encoder(places=("first",)), encoder()
    states = run(model, batch)
    states[:, 0].sum()
    with pytest.raises(ConfigError, match="before pooling"):
        states.retain_grad()
    seen: list[Tensor] = []
    for one in (model, plain):
        states = run(one, batch)
        states.register_hook(seen.append)
        states[:, 0].square().sum().backward()
    close(*seen)


class _Squares(Function):
    """An autograd function of somebody's own, which takes the tensor as it is."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, places: slice) -> Tensor:
        ctx.save_for_backward(states)
        ctx.places = places
        return states[:, places].square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (states,) = ctx.saved_tensors
        found = torch.zeros(states.shape)
        found[:, ctx.places] = 2 * states[:, ctx.places] * grads[0]
        return found, None


def test_autograd_functions_get_numbers_and_no_gradient_is_lost() -> None:
    batch = inputs(9, 30, 17)
    model, plain = encoder(places=("first",)), encoder()
    found, wanted = (_Squares.apply(run(one, batch), slice(1)) for one in (model, plain))
    close(found, wanted)
    for one in (found, wanted):
        one.backward()
    same_gradients(model, plain)
    everything = _Squares.apply(run(encoder(places=("first",)), batch), slice(None))
    with pytest.raises(ConfigError, match="last_block_tokens='all'"):
        everything.backward()


@pytest.mark.parametrize("case", ["hook", "hidden states", "short rows", "compiled", "asked", "padding"])
def test_all_tokens_are_computed_where_others_may_look(case: str) -> None:
    batch, model = inputs(9, 30, 17), encoder(places=("first",))
    if case == "hook":
        model.encoder.layer[-1].register_forward_hook(lambda *_: None)
    elif case == "hidden states":
        batch["output_hidden_states"] = True  # pyright: ignore[reportArgumentType]
    elif case == "short rows":
        batch = inputs(1, 1, 2)
    elif case == "compiled":
        model = torch.compile(model, backend="eager")
    elif case == "asked":
        order.restore(model)
        prepare(model, encoder_only=True)
        order.apply(ModelView(model), MethodSettings(operators="auto", unpad="none", pooled=("first",)))
    else:
        order.restore(model)
        prepare(model, encoder_only=True)
        order.apply(
            ModelView(model), MethodSettings(operators="auto", unpad="sampled", last_block="read", pooled=("first",))
        )
    assert type(run(model, batch)) is Tensor


def test_a_pooler_is_served_and_needs_no_other_states() -> None:
    """BERT's own pooler reads the first token even if sentences are pooled by their last one."""
    batch, model, plain = inputs(9, 30, 17), encoder("bert", ("last",)), encoder("bert")
    pooler = tiny_model("bert").base_model.__class__(model.config, add_pooling_layer=True).pooler
    for one in (model, plain):
        one.pooler = copy.deepcopy(pooler)
    order.restore(model)
    changed(model, ("last",))
    found, wanted = ([torch.manual_seed(5), one(**batch)][1] for one in (model, plain))
    close(found.pooler_output, wanted.pooler_output)
    close(gathered(found.last_hidden_state, batch, ("last",)), gathered(wanted.last_hidden_state, batch, ("last",)))
    assert found.last_hidden_state.is_open
