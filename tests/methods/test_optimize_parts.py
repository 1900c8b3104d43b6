"""Parts of a packed model that are called on their own: by a user's checkpoint, by a hook, by a replica."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from optimized import inputs, logits
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import engine
import whet
from tiny import FAMILIES, arguments, tiny_model, tiny_rows
from whet.models.known import known

BATCH = inputs(9, 14, 3)
IMPLEMENTATIONS = [CheckpointImpl.REENTRANT, CheckpointImpl.NO_REENTRANT]


def wrap(model: Any, implementation: CheckpointImpl) -> Any:
    """Put torch's checkpoint around each block of the model."""
    layers = model.bert.encoder.layer
    for i, block in enumerate(layers):
        layers[i] = checkpoint_wrapper(block, implementation)
    return model


def gradient(model: Any, **batch: Any) -> Tensor:
    torch.manual_seed(3)
    model.zero_grad()
    logits(model, batch).square().mean().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_checkpoint_around_a_block_is_refused(operators: None, implementation: CheckpointImpl, p: float) -> None:
    """Its recomputation knows nothing of the pass: gradients were wrong by 0.7 relative, and 1.2 with dropout."""
    model = wrap(whet.optimize(tiny_model("bert", dropout=p)).train(), implementation)
    with pytest.raises(whet.WhetError, match="the forward pass is over"):
        gradient(model, **BATCH)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_checkpoint_around_a_block_is_refused_in_the_trainer(tmp_path: Path, implementation: CheckpointImpl) -> None:
    model = wrap(tiny_model("bert"), implementation)
    trainer = engine.Trainer(model=model, args=arguments(tmp_path, max_steps=1), train_dataset=tiny_rows(4))
    with pytest.raises(whet.WhetError, match="the forward pass is over"):
        trainer.train()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_part_with_dropout_is_refused(operators: None, reentrant: bool) -> None:
    model = whet.optimize(tiny_model("bert", dropout=0.3)).train()
    part = model.bert.encoder.layer[0].output
    own = part.forward
    part.forward = lambda *args: checkpoint(own, *args, use_reentrant=reentrant)
    with pytest.raises(whet.WhetError, match="the forward pass is over") as caught:
        gradient(model, **BATCH)
    assert "activation_checkpointing_enable()" in caught.value.problems[0].fix


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_checkpoint_around_a_block_of_a_padded_call_is_as_before(rows: int, implementation: CheckpointImpl) -> None:
    batch = {name: column[:rows] for name, column in BATCH.items()} | {"output_hidden_states": True}
    plain, model = tiny_model("bert").train(), whet.optimize(tiny_model("bert")).train()
    expected = gradient(plain, **batch)
    torch.testing.assert_close(gradient(wrap(model, implementation), **batch), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_a_padded_call_of_one_row_is_as_before(reentrant: bool) -> None:
    """One row without a mask looks like a packed batch."""
    batch = {"input_ids": BATCH["input_ids"][:1], "output_hidden_states": True}
    plain, model = tiny_model("bert", dropout=0.3).train(), whet.optimize(tiny_model("bert", dropout=0.3)).train()
    for one in (plain, model):
        one.activation_checkpointing_enable({"use_reentrant": reentrant})
        one.enable_input_require_grads()
    expected, found = gradient(plain, **batch), gradient(model, **batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_a_head_with_dropout_is_as_before(reentrant: bool) -> None:
    """The head runs outside of any pass, whose dropout is torch's own."""
    head = nn.Sequential(nn.Dropout(0.3), nn.Linear(32, 3))

    def trained(optimized: Callable[[Any], Any]) -> Tensor:
        model = tiny_model("bert").train()
        model.qa_outputs = head
        states = optimized(model).bert(BATCH["input_ids"][:1, :9])[0]
        torch.manual_seed(3)
        out = checkpoint(model.qa_outputs, states, use_reentrant=reentrant)
        assert isinstance(out, Tensor)
        return torch.autograd.grad(out.square().mean(), states)[0] if not reentrant else gradient_at(states, out)

    torch.testing.assert_close(trained(whet.optimize), trained(lambda model: model), rtol=1e-4, atol=1e-6)


def gradient_at(states: Tensor, out: Tensor) -> Tensor:
    states.retain_grad()
    out.square().mean().backward()
    assert states.grad is not None
    return states.grad


def part_of(model: Any, part: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return a part of the model, and hidden states or tokens for it that are not those of the batch."""
    if part == "embeddings":
        return model.base_model.embeddings, (torch.arange(10).view(2, 5) + 10,)
    blocks = known()[model.config.model_type].blocks
    block = next(module for module in model.modules() if type(module).__name__ in blocks)
    states = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    return (block, (states,)) if part == "block" else (block.get_submodule("output"), (states.repeat(1, 1, 2), states))


def options_of(model: Any, part: str) -> dict[str, Any]:
    """Return what a call of the part needs besides hidden states or tokens."""
    modernbert = model.config.model_type == "modernbert"
    if part == "block" and model.config.model_type.startswith("deberta"):
        return {
            "attention_mask": torch.ones(2, 1, 5, 5),
            "rel_embeddings": model.base_model.encoder.get_rel_embedding(),
        }
    if part == "embeddings":
        return {} if modernbert else {"position_ids": torch.arange(5).expand(2, 5) + 1}
    if not modernbert or part != "block":
        return {}
    rotary = model.base_model.rotary_emb
    return {"position_embeddings": rotary(torch.zeros(2, 5, 32), torch.arange(5).expand(2, 5), rotary.layer_types[0])}


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, part) for family in FAMILIES for part in ("embeddings", "block")] + [("bert", "output")],
)
def test_a_part_that_a_hook_calls_with_other_tokens_runs_as_outside(operators: None, family: str, part: str) -> None:
    """Only its first row ran, with the rows and masks of the pass; where those were longer, the process crashed."""
    model = whet.optimize(tiny_model(family, **({"pad_token_id": 0} if known()[family].skips_padding else {}))).eval()
    called, given = part_of(model, part)
    options = options_of(model, part)
    found: list[Tensor] = []

    def hook(*_: Any) -> None:
        if not found:
            found.append(torch.empty(0))  # not within itself
            found.append(called(*given, **options))

    alone, expected = logits(model, BATCH), called(*given, **options)
    model.base_model.embeddings.register_forward_hook(hook)
    again = logits(model, BATCH)
    torch.testing.assert_close(found[1], expected, rtol=0, atol=0)
    torch.testing.assert_close(again, alone, rtol=0, atol=5e-6)  # a module with a hook is called, and rounds apart


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_that_a_hook_calls_with_other_tokens_drops_without_the_pass(operators: None, family: str) -> None:
    changes = {"pad_token_id": 0} if known()[family].skips_padding else {}
    model = whet.optimize(tiny_model(family, dropout=0.3, **changes)).train()
    (called, given), options = part_of(model, "block"), options_of(model, "block")
    found: list[Tensor] = []

    def hook(*_: Any) -> None:
        if not found:
            found.append(torch.empty(0))
            torch.manual_seed(7)
            found.append(called(*given, **options))

    torch.manual_seed(7)
    expected = called(*given, **options)
    model.base_model.embeddings.register_forward_hook(hook)
    logits(model, BATCH)
    torch.testing.assert_close(found[1], expected, rtol=0, atol=0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_copies_of_data_parallel_are_refused(wrapped: bool) -> None:
    """torch.nn.parallel.replicate copies each module so; the copies computed with the weights of the original."""
    model = whet.optimize(tiny_model("bert"))
    network = nn.Sequential(model) if wrapped else model
    with pytest.raises(whet.WhetError, match="DataParallel") as caught:
        [module._replicate_for_data_parallel() for module in network.modules()]
    assert "whet.restore(model)" in caught.value.problems[0].fix
    whet.restore(model)
    assert all(module._replicate_for_data_parallel() is not module for module in network.modules())
