"""Passes by graphs, on a CPU: a recording of torch's operators stands in for a graph of CUDA, and repeats them.

Like a graph, it knows nothing of Python: what a pass reads from anywhere but its inputs stays what it was when it was
recorded. On a GPU the same is shown with real graphs, in tests/gpu.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers import default_data_collator

import engine
import whet
from tiny import arguments, losses, plain_torch, tiny_model, tiny_rows
from whet.config import methods
from whet.errors import ConfigError
from whet.kernels import gpu_attention, packed_attention
from whet.log import logger
from whet.methods import capture
from whet.models import captured, packed
from whet.models.families import deberta
from whet.precision import compare

sys.path.append(str(Path(__file__).resolve().parents[1] / "precision"))
from timed_runs import clock_of


class Recording(TorchDispatchMode):
    """Operators with the memory of their arguments and results, in which a replay computes them again."""

    made = 0
    replays = 0

    def __init__(self) -> None:
        super().__init__()
        self._tape: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        self._tape.append((func, *tree_map_only(Tensor, Tensor.detach, (args, kwargs or {}, out))))
        return out

    def capture(self, run: Callable[[], Any]) -> Any:
        Recording.made += 1
        with self:
            return run()

    @torch.no_grad()
    def replay(self) -> None:
        Recording.replays += 1
        for func, args, kwargs, out in self._tape:
            found = func(*args, **kwargs)
            if isinstance(out, int | float | bool):
                assert found == out, "a number that was read back has changed"
                continue
            if any(one.alias_info is not None for one in func._schema.returns):
                continue  # views see what is written below them; what writes in place has written
            pairs = [(out, found)] if isinstance(out, Tensor) else zip(out or (), found or (), strict=True)
            for old, new in pairs:
                if isinstance(old, Tensor) and old is not new:
                    old.copy_(new)


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let CPU passes be recorded, by the operators that a GPU without flash kernels runs."""
    for module in (methods, capture):
        monkeypatch.setattr(module, "have_graphs", lambda: True)
    monkeypatch.setattr(captured, "cuda_graphs", lambda device: Recording)
    monkeypatch.setattr(packed_attention, "plain", gpu_attention.attend)
    Recording.made = Recording.replays = 0
    with plain_torch():
        yield


def batch(*lengths: int, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(10, 190, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def model(family: str = "bert", *, dropout: float = 0.0, graphs: bool = True, **options: Any) -> Any:
    made = tiny_model(family, dropout=dropout, **({"pad_token_id": 0} if family == "roberta" else {}))
    return whet.optimize(made, cuda_graphs=graphs, **options).train()


def loss_of(model: Any, given: dict[str, Tensor]) -> Tensor:
    out = model(**given)
    return (out.start_logits * given["attention_mask"]).square().mean() + out.end_logits.sin().mean()


def steps(model: Any, batches: list[dict[str, Tensor]], *, accumulate: int = 1) -> list[Tensor]:
    """Return the losses and all gradients of steps with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(4)
    found = []
    for number, given in enumerate(batches):
        loss = loss_of(model, given)
        loss.backward()
        found.append(loss.detach())
        if (number + 1) % accumulate == 0:
            found += [one.grad.clone() for one in model.parameters() if one.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
    return found


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    """Products over more rows may sum in another order: equal to rounding of float32, over some steps.

    A GPU makes products of float32 from several of a shorter format.
    """
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 if one.is_cuda else 1e-6)


LENGTHS = [(30, 11, 22), (30, 12, 20), (5, 28, 9), (60, 60, 55), (31, 10, 22), (60, 59, 58)]
BATCHES = [batch(*lengths, seed=number) for number, lengths in enumerate(LENGTHS)]


@pytest.mark.each_value
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet", "modernbert", "albert", "deberta-v2"])
def test_steps_by_graphs_are_those_without(family: str, dropout: float) -> None:
    wanted = steps(model(family, dropout=dropout, graphs=False), BATCHES)
    assert Recording.made == 0
    found = steps(model(family, dropout=dropout), BATCHES)
    assert Recording.made == 4, "two sizes came twice, each with a graph forward and one backward"
    assert Recording.replays == 6
    assert_equal(found, wanted)


@pytest.mark.parametrize("padding", ["sampled", "all", "none"])
def test_padding_tokens_that_are_computed_are_those_without(padding: Any) -> None:
    wanted = steps(model(graphs=False, padding=padding), BATCHES)
    assert_equal(steps(model(padding=padding), BATCHES), wanted)
    assert Recording.replays > 0


def test_gradients_are_summed_over_micro_batches() -> None:
    assert_equal(steps(model(), BATCHES, accumulate=3), steps(model(graphs=False), BATCHES, accumulate=3))


def test_two_passes_before_one_backward_keep_their_activations() -> None:
    """As a contrastive loss has them. The second pass runs launch by launch."""
    found, wanted = model(), model(graphs=False)
    for one in (found, wanted):
        steps(one, BATCHES[:2])
        (loss_of(one, BATCHES[0]) * loss_of(one, BATCHES[1])).backward()
    assert Recording.replays == 4, "one step, and a forward and a backward pass of the two"
    assert_equal([one.grad for one in found.parameters()], [one.grad for one in wanted.parameters()])


def test_passes_whose_loss_is_dropped_free_the_graph() -> None:
    found = model()
    steps(found, BATCHES[:2])
    for _ in range(3):
        loss_of(found, BATCHES[0])
    assert Recording.replays == 2 + 3


def test_gradients_of_chosen_tensors_leave_grad_alone() -> None:
    found, wanted = model(), model(graphs=False)
    results = []
    for one in (found, wanted):
        steps(one, BATCHES[:2])
        loss_of(one, BATCHES[0]).backward()
        weights = list(one.parameters())
        grads = torch.autograd.grad(loss_of(one, BATCHES[1]), weights)
        loss_of(one, BATCHES[0]).backward(inputs=weights[:1])
        results.append([*grads, *(weight.grad for weight in weights)])
    assert_equal(*results)


def test_a_gradient_that_somebody_keeps_stays_as_it_was() -> None:
    found = model()
    steps(found, BATCHES[:2])
    loss_of(found, BATCHES[0]).backward()
    weights = list(found.parameters())
    kept = [weight.grad for weight in weights]
    before = [one.clone() for one in kept]
    found.zero_grad()
    loss_of(found, BATCHES[1]).backward()
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))
    wanted = model(graphs=False)
    steps(wanted, BATCHES[:2])
    loss_of(wanted, BATCHES[1]).backward()
    assert_equal([one.grad for one in weights], [one.grad for one in wanted.parameters()])


def test_gradients_of_a_users_own_are_added_to() -> None:
    """Views of one buffer, say, whose data somebody replaces as well."""
    found, wanted = model(), model(graphs=False)
    results = []
    for one in (found, wanted):
        steps(one, BATCHES[:2])
        weights = list(one.parameters())
        flat = torch.zeros(sum(weight.numel() for weight in weights))
        for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
            weight.grad = part.view_as(weight)
        loss_of(one, BATCHES[0]).backward()
        kept = [flat.clone()]
        for weight in weights:
            weight.grad.data = weight.grad.data * 0.5
        loss_of(one, BATCHES[1]).backward()
        results.append([*kept, *(weight.grad for weight in weights)])
    assert_equal(*results)


def test_a_change_between_forward_and_backward_pass() -> None:
    found, wanted = model(), model(graphs=False)
    for one in (found, wanted):
        steps(one, BATCHES[:2])
        first = loss_of(one, BATCHES[0])
        _attend_less(one)
        (first + loss_of(one, BATCHES[1])).backward()
    assert_equal([one.grad for one in found.parameters()], [one.grad for one in wanted.parameters()])


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_call_has_its_gradients(reentrant: bool) -> None:
    results = []
    for graphs in (True, False):
        one = model(dropout=0.1, graphs=graphs)
        steps(one, BATCHES[:2])
        one.zero_grad()
        scale = torch.ones((), requires_grad=True)
        for given in BATCHES[:2]:
            loss = checkpoint(lambda by, given=given, one=one: loss_of(one, given) * by, scale, use_reentrant=reentrant)
            loss.backward()  # pyright: ignore
        results.append([weight.grad for weight in one.parameters()])
    assert_equal(*results)


def test_weights_that_a_function_gives_have_gradients() -> None:
    results = []
    for graphs in (True, False):
        one = model(graphs=graphs)
        steps(one, BATCHES[:2])
        one.zero_grad()
        given = {name: weight * 1.01 for name, weight in one.named_parameters()}
        out = torch.func.functional_call(one, given, (), dict(BATCHES[0]))
        out.start_logits.square().mean().backward()
        results.append([weight.grad for weight in one.parameters() if weight.grad is not None])
    assert_equal(*results)
    assert len(results[0]) > 10


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_several_backward_passes_of_one_forward_pass(dropout: float) -> None:
    """As of two losses; what a graph's backward pass has overwritten is computed again, with the same masks."""
    found, wanted = model(dropout=dropout), model(dropout=dropout, graphs=False)
    for one in (found, wanted):
        steps(one, BATCHES[:2])
        out = one(**BATCHES[0])
        out.start_logits.square().mean().backward(retain_graph=True)
        loss_of(one, BATCHES[1]).backward()  # while the first pass is kept
        out.end_logits.sin().mean().backward(retain_graph=True)
        (out.end_logits.square() * out.start_logits).mean().backward()
    assert Recording.replays == 2 + 1 + 1 + 2 * 2, "a step, the pass, its backward pass, and two that compute it again"
    assert_equal([one.grad for one in found.parameters()], [one.grad for one in wanted.parameters()])


def test_a_backward_pass_whose_activations_are_gone_is_refused() -> None:
    found, given = model(), batch(21, 21, 21)
    steps(found, [given, given])
    states = found.bert(**given).last_hidden_state  # of which torch saves nothing for the backward pass of a sum
    states.sum().backward()
    loss_of(found, given).backward()
    with pytest.raises(ConfigError, match=r"cuda_graphs=False.*WHET_RUN=off"):
        states.sum().backward()


def test_weights_that_change_before_the_backward_pass_are_refused() -> None:
    found = model()
    steps(found, BATCHES[:2])
    loss = loss_of(found, BATCHES[0])
    with torch.no_grad():
        found.bert.encoder.layer[0].output.dense.weight.mul_(1.1)
    with pytest.raises(ConfigError, match="weights have changed"):
        loss.backward()


def _freeze(one: Any) -> None:
    for weight in one.bert.encoder.layer[0].parameters():
        weight.requires_grad_(False)


def _drop_more(one: Any) -> None:
    for part in one.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.5


def _move(one: Any) -> None:
    for weight in one.parameters():
        weight.data = weight.data.clone().mul_(1.1)


def _attend_less(one: Any) -> None:
    for layer in one.bert.encoder.layer:
        layer.attention.self.scaling = 0.2


def _new_weights(one: Any) -> None:
    for module in one.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(weight.data))


def _watch_backward(one: Any) -> None:
    one.bert.encoder.layer[0].register_full_backward_pre_hook(lambda module, grads: tuple(g * 3.0 for g in grads))


def _own_forward(one: Any) -> None:
    dense = one.bert.encoder.layer[0].output.dense
    inner = dense.forward
    dense.forward = lambda x: inner(x) * 2.0


def _stop_dropping(one: Any) -> None:
    for part in one.bert.encoder.layer[1].modules():
        part.eval()


def _hook(one: Any) -> None:
    one.bert.encoder.layer[0].register_forward_hook(lambda module, given, out: out * 2.0)


def _watch(one: Any) -> None:
    next(one.parameters()).register_hook(lambda grad: grad * 3.0)


@pytest.mark.parametrize(
    "change",
    [
        _freeze,
        _drop_more,
        _move,
        _attend_less,
        _new_weights,
        _own_forward,
        _watch_backward,
        _stop_dropping,
        _hook,
        _watch,
    ],
)
def test_changes_of_the_model_count_afterwards(change: Callable[[Any], None]) -> None:
    found, wanted = model(dropout=0.1), model(dropout=0.1, graphs=False)
    results = []
    for one in (found, wanted):
        steps(one, BATCHES[:2])
        one.zero_grad()
        change(one)
        results.append(steps(one, BATCHES[:2]) + steps(one, BATCHES[:2]))
    assert_equal(*results)


def test_frozen_encoder_runs_as_it_did(caplog: pytest.LogCaptureFixture) -> None:
    results = []
    for graphs in (True, False):
        one = model(graphs=graphs)
        for weight in one.bert.parameters():
            weight.requires_grad_(False)
        results.append(steps(one, BATCHES))
    assert_equal(*results)
    assert "CUDA graphs" not in caplog.text


def test_an_encoder_that_changes_at_each_step_is_recorded_a_few_times(caplog: pytest.LogCaptureFixture) -> None:
    found, wanted = model(), model(graphs=False)
    results = []
    for one in (found, wanted):
        losses = []
        for number in range(5):
            one.bert.encoder.layer[0].attention.self.scaling = 0.1 + number / 100
            losses += steps(one, BATCHES[:2])
        results.append(losses)
    assert_equal(*results)
    assert "change all the time" in caplog.text
    assert Recording.made == 2 * 3


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # peft asks for it
def test_adapters_come_and_go(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    results = []
    for graphs in (True, False):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
        one = peft.get_peft_model(tiny_model("bert"), config)
        whet.optimize(one, cuda_graphs=graphs).train()
        found = steps(one, BATCHES)
        with one.disable_adapter():
            found += [loss_of(one, given).detach() for given in BATCHES[:2] * 2]
        found += steps(one, BATCHES)
        one.add_adapter("other", peft.LoraConfig(target_modules=["query"], init_lora_weights=False))
        one.set_adapter("other")
        found += steps(one, BATCHES)
        one.set_adapter("default")
        results.append(found + steps(one, BATCHES))
    assert_equal(*results)
    assert Recording.replays >= 16
    assert "CUDA graphs: off" not in caplog.text


def test_threads_have_losses_of_their_own() -> None:
    found = model()
    steps(found, BATCHES[:2])
    wanted = [float(loss_of(found, given).detach()) for given in BATCHES]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert [*pool.map(lambda given: float(loss_of(found, given).detach()), BATCHES)] == pytest.approx(
                wanted, rel=1e-4
            )


def test_a_copy_has_graphs_of_its_own() -> None:
    first = model()
    steps(first, BATCHES[:2])
    other, wanted = copy.deepcopy(first), model(graphs=False)
    steps(wanted, BATCHES[:2])
    found = steps(other, BATCHES)
    assert_equal(found, steps(wanted, BATCHES))
    assert all(one.grad is None for one in first.parameters())


def test_a_pass_that_cannot_be_recorded_runs_launch_by_launch(caplog: pytest.LogCaptureFixture) -> None:
    made = tiny_model("bert")
    layer = made.bert.encoder.layer[1]
    inner = layer.intermediate.dense.forward

    def reads(x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("operation not permitted when stream is capturing")  # as torch says it on a GPU
        return inner(x)

    layer.intermediate.dense.forward = reads
    found = whet.optimize(made).train()
    with caplog.at_level(logging.WARNING, logger.name):
        results = steps(found, BATCHES)
    assert "CUDA graphs: off" in caplog.text
    assert_equal(results, steps(model(graphs=False), BATCHES))


def test_restore_takes_the_graphs_out() -> None:
    found = model()
    steps(found, BATCHES[:2])
    assert "CUDA graphs" in str(whet.changes(found))
    whet.restore(found)
    n_replays = Recording.replays
    steps(found, BATCHES[:2])
    assert Recording.replays == n_replays


@pytest.mark.parametrize(
    "task",
    ["padding sampled", *(pytest.param(one, marks=pytest.mark.night) for one in ("padding none", "two micro-batches"))],
)
def test_a_training_of_the_engine_has_the_curve_without_graphs(tmp_path: Path, task: str) -> None:
    more: dict[str, Any] = {
        "padding none": {"padding_in_loss": "none"},
        "padding sampled": {"padding_in_loss": "sampled"},
        "two micro-batches": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    }[task]
    curves = []
    for graphs in (True, False):
        usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "max_steps": 12, "seed": 5}
        args = arguments(tmp_path / str(graphs), **(usual | more | {"cuda_graphs": graphs}))
        trainer = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(24))
        trainer.train()
        curves.append(losses(trainer))
    assert Recording.replays > 4
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)  # float32, in another order of its sums, over twelve steps


def test_graphs_keep_the_tables_that_they_read() -> None:
    """A cache holds the table of a length; evaluations of other lengths push it out, and its memory is used again."""
    found = model("deberta-v2")
    encoder = found.deberta.encoder
    steps(found, BATCHES[:2])
    buckets, most = getattr(encoder, "position_buckets", -1), encoder.max_relative_positions
    device = encoder.rel_embeddings.weight.device
    reach = 127  # of rows of up to 128 tokens
    table = weakref.ref(deberta._places_on(buckets, most, reach, device)[2])
    for other in range(300):
        deberta._places_on(buckets, most, 1000 + other, device)
    kept = [tables for passes in packed.graphs_in(found) for one in passes._passes.values() for tables in one.tables]
    assert any(table() is tensor for _, _, tensor in kept)


def test_experts_run_launch_by_launch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Their router's balance is that of the batch's tokens, and which experts compute is read in each pass."""
    curves = []
    for graphs in (True, False):
        made = whet.upcycle(tiny_model("bert"), whet.ExpertSettings(experts=4, every=1, aux_loss_coef=0.1))
        args = arguments(tmp_path / str(graphs), per_device_train_batch_size=4, max_steps=4, cuda_graphs=graphs)
        trainer = engine.Trainer(model=made, args=args, train_dataset=tiny_rows(24, lengths=(20, 20)))
        trainer.train()
        curves.append(losses(trainer))
    assert Recording.made == 0
    assert curves[0] == curves[1]
    assert "CUDA graphs" not in caplog.text


def test_a_pass_that_does_not_fit_next_to_graphs_runs_without_them() -> None:
    """On a GPU the graphs' memory is that of their largest batch, and stays theirs between steps."""
    made = tiny_model("bert")
    dense = made.bert.encoder.layer[1].intermediate.dense
    inner = dense.forward

    def needs_room(x: Tensor) -> Tensor:
        if x.shape[1] > 100 and any(passes._passes for passes in packed.graphs_in(made)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return inner(x)

    dense.forward = needs_room
    found = whet.optimize(made).train()
    order = [0, 1, 3, 0, 1, 1]
    wanted = steps(model(graphs=False), [BATCHES[number] for number in order])
    assert_equal(steps(found, [BATCHES[number] for number in order]), wanted)
    (passes,) = packed.graphs_in(found)
    assert Recording.made == 4, "the small size has graphs before and after"
    assert passes.why_not is None


def test_memory_that_runs_out_again_and_again_ends_the_use_of_graphs(caplog: pytest.LogCaptureFixture) -> None:
    made = tiny_model("bert")
    dense = made.bert.encoder.layer[1].intermediate.dense
    inner = dense.forward

    def needs_room(x: Tensor) -> Tensor:
        if x.shape[1] > 100 and any(passes._passes for passes in packed.graphs_in(made)):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return inner(x)

    dense.forward = needs_room
    found = whet.optimize(made).train()
    batches = [given for n_rows in (3, 4, 5, 3) for given in (*BATCHES[:2], batch(*[60] * n_rows))]
    assert_equal(steps(found, batches), steps(model(graphs=False), batches))
    assert "CUDA graphs: off" in caplog.text
    assert "memory does not suffice" in caplog.text
    assert Recording.made == 2 * 3


def test_graphs_of_other_models_are_recorded_again_after_a_failed_recording() -> None:
    """On a GPU it leaves the device another generator, and theirs would draw from the one before."""
    first, wanted = model(dropout=0.2), model(dropout=0.2, graphs=False)
    steps(first, BATCHES[:2])
    steps(wanted, BATCHES[:2])
    assert Recording.made == 2
    made = tiny_model("bert")
    dense = made.bert.encoder.layer[1].intermediate.dense
    inner = dense.forward

    def fails(x: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("operation not permitted when stream is capturing")
        return inner(x)

    dense.forward = fails
    steps(whet.optimize(made).train(), BATCHES[:2])
    Recording.made = 0
    assert_equal(steps(first, BATCHES), steps(wanted, BATCHES))
    assert Recording.made == 4


@pytest.mark.parametrize("settings", [{"auto_find_batch_size": True}, {"precision": "auto"}])
def test_trials_before_the_first_step_leave_the_graphs_on(
    tmp_path: Path, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Their passes have stand-ins for the weights, which are gone with them."""
    curves = []
    for graphs in (True, False):
        size = {"hidden_size": 128, "num_hidden_layers": 4, "intermediate_size": 256}  # worth a measurement
        made = tiny_model("bert", **(size if "precision" in settings else {}))
        usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 3}
        args = arguments(tmp_path / str(graphs), **(usual | settings | {"cuda_graphs": graphs}))
        trainer = engine.Trainer(model=made, args=args, train_dataset=tiny_rows(24, lengths=(30, 30)))
        trainer.precision.clock = clock_of(1.0, 1.0)
        before = Recording.replays
        trainer.train()
        curves.append(losses(trainer))
        if graphs:
            assert Recording.replays >= before + 2 * 5, "of six micro-batches the first runs launch by launch"
            (passes,) = packed.graphs_in(made)
            weights = {id(one) for one in made.parameters()}
            assert passes._gradients
            assert all(id(weight) in weights for weight, _ in passes._gradients)
    assert "CUDA graphs: off" not in caplog.text
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


@pytest.mark.parametrize("by", ["engine", "whet.Trainer"])
def test_a_trial_that_runs_out_of_memory_leaves_the_graphs_on(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The training runs in bf16, whose graphs there is memory for."""
    capture_of = captured.Passes._capture

    def scarce(passes: captured.Passes, packed: Any, forward: Any, size: Any, *given: Any) -> Any:
        if size.autocast is None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return capture_of(passes, packed, forward, size, *given)

    monkeypatch.setattr(captured.Passes, "_capture", scarce)
    monkeypatch.setattr(compare, "LEAST_FLOP", 0.0)
    monkeypatch.setattr(compare, "MARGIN", 0.0)  # whatever this processor takes longer for
    made, rows = tiny_model("bert"), tiny_rows(24, lengths=(30, 30))
    if by == "engine":
        usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "precision": "auto"}
        trainer: Any = engine.Trainer(made, arguments(tmp_path, max_steps=6, **usual), train_dataset=rows)
        trainer.precision.clock = clock_of(1.0, 0.1)
    else:
        own = whet.TrainingArguments(
            str(tmp_path), max_steps=6, per_device_train_batch_size=4, precision="auto", use_cpu=True, report_to="none",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        given = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
        trainer = whet.Trainer(made, own, data_collator=default_data_collator, train_dataset=given)
    with caplog.at_level(logging.INFO, logger="whet"):
        trainer.train()
    assert "precision auto: bf16" in caplog.text
    assert "CUDA graphs: off in this trial" in caplog.text
    assert "CUDA graphs: off, this model" not in caplog.text
    (passes,) = packed.graphs_in(made)
    assert passes.why_not is None
    assert Recording.replays >= 2 * 4, "of six steps the first runs launch by launch"


def test_passes_without_graphs_for_a_while_have_their_masks() -> None:
    found, wanted = model(dropout=0.2), model(dropout=0.2)
    results = []
    for one in (found, wanted):
        result = steps(one, BATCHES[:2])
        before = Recording.replays
        with packed.without_graphs(one) if one is found else contextlib.nullcontext():
            result += steps(one, BATCHES[:2])
        assert Recording.replays == before + (0 if one is found else 4)
        results.append(result + steps(one, BATCHES[:2]))
    assert_equal(*results)


def test_a_profiled_step_shows_its_operators(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=4, max_steps=12, profile=True)
    trainer = engine.Trainer(model=tiny_model("bert"), args=args, train_dataset=tiny_rows(24, lengths=(30, 30)))
    trainer.train()
    assert Recording.replays == 2 * 6, "of the seven steps before the five profiled ones, the first is launched"
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('{"profile"')]
    seen = json.loads(line)["profile"]
    assert seen["cuda_graphs"] == "paused"
    assert all(seen["groups"][name]["ms"] > 0 for name in ("attention", "matrix_products", "norms"))
