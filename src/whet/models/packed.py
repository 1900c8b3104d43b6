"""Models that run packed: prepared for it, attention keeps sequences apart and dropout masks follow positions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from whet.card import Card
from whet.data.batch import Batch
from whet.data.padding import PaddingTokens
from whet.errors import ConfigError, WhetError
from whet.kernels.batch_position import BatchPosition, Kernel, Placement, Site
from whet.kernels.random import seed_torch
from whet.log import logger
from whet.models import attention, record
from whet.models.adapters import unwrapped
from whet.models.family import Family
from whet.models.forwards import bind, home_of, instance_forward
from whet.models.fused import parts
from whet.models.fused.layers import PLACEMENT, PlacedDropout
from whet.models.packable import attentions_of, family_of, why_other_direction, why_other_window
from whet.models.standard import is_harmless

CARD = Card(
    name="packing",
    asked_by="default",
    does="The sequences of a micro-batch lie end to end, without padding tokens.",
    improves="both",
    same_result="yes",
    hurts="Never so far; models of unknown families run padded.",
    source="Krell et al. 2021, arXiv:2107.02027",
    page="speed.md#packing",
)

_CHUNK = "whet_chunk_size"
"""Attribute that keeps a module's chunk_size_feed_forward."""
_PACKED = "packed"
"""The entry in the record of a model that is prepared."""
GRAPHS = "cuda graphs"
"""The entry in the record of a model whose training passes may be launched as one: the graphs of its encoder."""
_REPLICATE = "_replicate_for_data_parallel"
"""The method that torch.nn.DataParallel copies a module by."""


_GIVES_ROWS = "peft."
"""The package whose hooks hand a layer something for each row, such as the name of its adapter."""

_ALPHA = "neftune_noise_alpha"


class InnerHooks:
    """The hooks inside one encoder, which get all rows of a batch in one, (1, N, D).

    They are looked for again after a hook was registered anywhere: torch counts them.
    """

    def __init__(self) -> None:
        self._newest = -1
        self._has_warned = False
        self.row_wise = False
        """Whether a library's hooks give each row something of its own."""
        self.reshape = False
        """Whether a pass has shown that a hook returns another shape than it gets, and hooks are still there."""
        self.has_grown = False
        """Whether a pass has met a part that came into the model later, in a model that keeps its padding then."""
        self.want_padding = False
        """Whether a user's own hooks and later parts are to get rows as they are in the batch, with their padding."""
        self.are_there = False
        """Whether there are hooks of a user's own."""
        self._noisy: list[Any] = []
        """Embedding tables to whose results NEFTune (`neftune_noise_alpha`) adds noise."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy keeps: torch counts hooks by process, and elsewhere they are looked for again."""
        return self.__dict__ | {"_newest": -1}

    def look(self, encoder: nn.Module) -> None:
        """See which hooks there are, and say once that those of a user's own get packed tensors."""
        newest = RemovableHandle.next_id
        seen = self.row_wise or self.reshape or (self.want_padding and self.are_there)
        if newest == self._newest and not seen:  # torch does not count those removed
            return
        self._newest = newest
        hooks = list(_hooks_inside(encoder))
        self._noisy = [encoder.get_submodule(name) for name, hook in hooks if _adds_noise(hook)]
        homes = [(name, home_of(hook)) for name, hook in hooks if not _adds_noise(hook)]
        names = dict.fromkeys(name for name, home in homes if not home.startswith(_GIVES_ROWS))
        self.row_wise = any(home.startswith(_GIVES_ROWS) for _, home in homes)
        self.are_there = bool(names)
        self.reshape = self.reshape and self.are_there
        if names and not self._has_warned and not self.want_padding:
            self._has_warned = True
            _warn([*names])

    @contextmanager
    def noise_as_padded(self, length: int, n_tokens: int) -> Iterator[None]:
        """Let NEFTune add noise of the size that it has in a batch padded to this length, and not to `n_tokens`.

        Its amplitude is alpha / sqrt(length * width) (Jain et al. 2023, arXiv:2310.05914, algorithm 1).
        """
        noisy = [table for table in self._noisy if hasattr(table, _ALPHA)]  # its end takes the attribute away
        before = [getattr(table, _ALPHA) for table in noisy]
        for table, alpha in zip(noisy, before, strict=True):
            setattr(table, _ALPHA, alpha * math.sqrt(n_tokens / length))
        try:
            yield
        finally:
            for table, alpha in zip(noisy, before, strict=True):
                setattr(table, _ALPHA, alpha)


def _adds_noise(hook: Any) -> bool:
    """Return whether this is the hook of transformers' NEFTune, whose noise shrinks with the length that it sees."""
    return getattr(hook, "__name__", "") == "neftune_post_forward_hook"


def _hooks_inside(encoder: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the hooks on modules inside the encoder that may see or change something, and the module's name."""
    for name, module in encoder.named_modules():
        found = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        if name and any(found):
            yield from ((name, hook) for hooks in found for hook in hooks.values() if not is_harmless(hook))


def _warn(names: list[str]) -> None:
    shown = f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 3 else ", ".join(names)
    logger.warning("hooks on %s get packed tensors: all rows of a batch in one, (1, N, D), without padding", shown)


@dataclass(frozen=True)
class PackedModel:
    """A transformers model that reads packed batches; `module` still answers padded calls of its own kind."""

    module: nn.Module
    family: Family
    placement: Placement
    attention_before: str
    """The attention implementation that the model came with."""
    hooks: InnerHooks = field(default_factory=InnerHooks, compare=False)

    @cached_property
    def attentions(self) -> list[nn.Module]:
        """The attention modules of the family."""
        return attentions_of(self.module, self.family)

    @property
    def why_other_attention(self) -> str | None:
        """Which attention looks elsewhere than a pass does; None: none, or a proof has compared results instead."""
        if self.family.proven:
            return None
        return why_other_direction(self.attentions, self.family) or why_other_window(self.module, self.family)

    @cached_property
    def position_offset(self) -> int:
        """The first position id of a row."""
        return self.family.first_position(self.module)

    @cached_property
    def unnumbered(self) -> int | None:
        """The number of the token that gets no position id of its own, as `Family.unnumbered` has it."""
        return self.family.unnumbered(self.module)

    def __call__(self, batch: Batch, *, seed: int, step: int) -> object:
        """Return the model's output for the packed batch; its token dims are (1, N)."""
        if not attention.is_routed(self.module.base_model.config):  # pyright: ignore
            raise _changed_since("another attention implementation")
        if (why := self.why_other_attention) is not None:
            raise _changed_since(why)
        position = position_of(batch, seed=seed, step=step)
        if self.module.training:  # dropouts that have no site draw from torch's generator: a resumed run draws the same
            seed_torch(position.key(int(position.row_slots[0])))
        self.hooks.look(self.module.base_model)  # pyright: ignore[reportArgumentType]
        with explained(self.module, batch.inputs), self.placement.at(position), self.by_graphs():
            return self.module(**batch.inputs)

    def encode(self, *given: Any, **options: Any) -> Any:
        """Return the output of the encoder in the running pass, by a graph if the model has graphs and one serves."""
        encoder: Any = self.module.base_model
        graphs = record.read(self.module, GRAPHS)
        found = None if graphs is None else graphs.encode(self, given, options)
        return type(encoder).forward(encoder, *given, **options) if found is None else found

    @contextmanager
    def by_graphs(self) -> Iterator[None]:
        """Let a call of the complete model run its encoder by `encode`, if it has graphs and nothing else runs it."""
        encoder: Any = self.module.base_model
        if record.read(self.module, GRAPHS) is None or "forward" in encoder.__dict__ or encoder is self.module:
            yield
            return
        encoder.forward = self.encode
        try:
            yield
        finally:
            encoder.__dict__.pop("forward", None)


def graphs_in(model: nn.Module) -> list[Any]:
    """Return the graphs of all encoders in the model (`models/captured.py`)."""
    found = (record.read(module, GRAPHS) for module in model.modules())
    return [graphs for graphs in found if graphs is not None]


@contextmanager
def without_graphs(model: nn.Module) -> Iterator[bool]:
    """Run the block with all passes of the model launch by launch, with the same masks; yield whether it has graphs."""
    found = graphs_in(model)
    for graphs in found:
        graphs.pause()
    try:
        yield bool(found)
    finally:
        for graphs in found:
            graphs.resume()


@contextmanager
def trial_of_graphs(model: nn.Module) -> Iterator[None]:
    """Let the graphs of the model be after the block as if its passes had not run: as in a trial of formats or sizes.

    Its passes may have other weights, or run out of memory where those of the training do not.
    """
    with ExitStack() as stack:
        for graphs in graphs_in(model):
            stack.enter_context(graphs.trial())
        yield


def other_shape(states: Tensor, n_tokens: int) -> ConfigError:
    """Return the refusal of what a model made of a packed batch (1, n_tokens), if its shape is another."""
    return ConfigError(
        what="the model made something else of a packed batch than states of its tokens",
        got=f"{tuple(states.shape)} in place of (1, {n_tokens}, ...)",
        why="a hook or a module of your own inside the encoder gets all rows in one, and returned another shape",
        fix="let it return what has the shape of its input; or run the model with its padding:"
        " --attn_implementation sdpa",
    )


def _changed_since(got: str) -> ConfigError:
    return ConfigError(
        what="the model's attention was changed after whet had prepared it",
        got=got,
        why="without padding, only whet's attention keeps the rows of a batch apart",
        fix="change it first and then make the Trainer; or use --attn_implementation sdpa, which trains with padding",
    )


def position_of(batch: Batch, *, seed: int, step: int) -> BatchPosition:
    """Return the position of a packed batch in the run; what fills it up is a row more."""
    assert batch.cu_seqlens is not None
    assert batch.positions is not None
    cu_seqlens = with_filling(batch.cu_seqlens, batch.n_in_rows, batch.n_computed)
    end_slot = batch.first_slot + len(cu_seqlens) - 1
    row_slots = torch.arange(batch.first_slot, end_slot, dtype=torch.int32, device="cpu")
    slots = _by_token(row_slots, cu_seqlens.diff(), batch)
    return BatchPosition(
        seed=seed,
        step=step,
        slots=slots,
        positions=batch.positions,
        cu_seqlens=cu_seqlens,
        row_slots=row_slots,
        max_seqlen=torch.tensor(max(batch.max_seqlen, batch.n_computed - batch.n_in_rows), device="cpu"),
        key_counts=None if batch.padding is None else _key_counts(batch, batch.padding),
        sizes=None if batch.padding is None else _sizes(batch, batch.padding),
    )


def _by_token(row_slots: Tensor, lengths: Tensor, batch: Batch) -> Tensor:
    """Return the slot of each token's row, where the batch is."""
    if lengths.device.type == "cpu":  # torch would start its threads for these few rows
        return torch.from_numpy(np.repeat(row_slots.numpy(), lengths.numpy()))
    on_device = row_slots.to(lengths.device, non_blocking=True)  # a copy that waits would stall the GPU
    return on_device.repeat_interleave(lengths, output_size=batch.n_computed)


def _key_counts(batch: Batch, padding: PaddingTokens) -> Tensor:
    """Return how many tokens of each row are keys; what fills the batch up is a row without padding."""
    n_more = batch.n_computed - batch.n_in_rows
    return nn.functional.pad(padding.key_counts, (0, 1), value=n_more) if n_more else padding.key_counts


def _sizes(batch: Batch, padding: PaddingTokens) -> Tensor:
    """Return how many tokens of the padded batch each token stands for; what fills the batch up is a row of its own."""
    return nn.functional.pad(padding.log_sizes.exp(), (0, batch.n_computed - len(padding.log_sizes)), value=1.0)


def with_filling(cu_seqlens: Tensor, n_tokens: int, n_filled: int) -> Tensor:
    """Return where rows begin (rows + 1,), with one row more where n_filled token places are more than n_tokens."""
    return cu_seqlens if n_filled == n_tokens else nn.functional.pad(cu_seqlens, (0, 1), value=n_filled)


_EARLIER: WeakKeyDictionary[nn.Module, Placement] = WeakKeyDictionary()
"""Model -> its link when it was last prepared."""


def prepare(
    model: nn.Module, kernel: Kernel = "auto", *, encoder_only: bool = False, family: Family | None = None
) -> PackedModel | None:
    """Change the model, once, so that it can run packed; None (and no change) where `packable.why_padded` has a reason.

    Weights, their names and the saved form stay as they are. `kernel` says what its attention runs on a GPU. Of a model
    that peft has wrapped, the model inside is what runs. `encoder_only`: its head stays as it is, outside of passes.
    `family`: run it as a model of this one, whatever `packable` says.
    """
    family, model = family or family_of(model), unwrapped(model)
    if family is None:
        return None
    attention.register()
    before = str(model.config._attn_implementation)  # pyright: ignore[reportAttributeAccessIssue]
    placement = _placement_of(model, kernel, causal=family.causal)
    changed = model.base_model if encoder_only else model
    assert isinstance(changed, nn.Module)
    _place_sites(changed, family, placement)
    _feed_all_at_once(model)
    for module in model.modules():
        setattr(module, _REPLICATE, refuse_replicas)
    _bind_parts(changed, placement)
    attention.route(model)
    packed = PackedModel(model, family, placement, before)
    record.keep(model, _PACKED, packed)
    return packed


def packed_model(model: nn.Module) -> PackedModel | None:
    """Return the model as `prepare` returned it; None if it is not prepared."""
    return record.read(unwrapped(model), _PACKED)


def _placement_of(model: nn.Module, kernel: Kernel, *, causal: bool) -> Placement:
    """Return the link that the model had when it was prepared before, or that its parts have; a new one if none fits.

    Trainers and calls that prepared the model earlier have that link, and so do fused parts; all run in its passes.
    Encoders with tied blocks share one, so that these blocks run in the passes of each.
    """
    sites = (module.__dict__.get(attention.SITE) for module in model.modules())
    before = _EARLIER.get(model) or next((site.placement for site in sites if site is not None), None)
    if before is None or (before.kernel, before.causal) != (kernel, causal):
        before = Placement(kernel, causal=causal)
    _EARLIER[model] = before
    return before


def release(packed: PackedModel) -> None:
    """Undo `prepare`, exactly."""
    record.take(packed.module, _PACKED)
    for module in packed.module.modules():
        module.__dict__.pop(attention.SITE, None)
        module.__dict__.pop(_REPLICATE, None)
        if _CHUNK in module.__dict__:
            module.chunk_size_feed_forward = module.__dict__.pop(_CHUNK)
        if isinstance(module, PlacedDropout):
            del module.site
            module.__class__ = nn.Dropout  # pyright: ignore[reportAttributeAccessIssue]
        if parts.runs_always(module):
            module.__dict__.pop(PLACEMENT, None)
            module.__dict__.pop("forward", None)
    attention.unroute(packed.module)


def _place_sites(model: nn.Module, family: Family, placement: Placement) -> None:
    """Number every attention and every dropout in the order of the model's modules.

    A dropout of another class, or with a forward of its own, stays as it is.
    """
    holders = [module for module in model.modules() if family.is_attention(module)]
    found = (child for parent in model.modules() for child in parent.children() if _is_plain_dropout(child))
    dropouts = list({id(child): child for child in found}.values())
    n_sites = len(holders) + len(dropouts)
    for number, holder in enumerate(holders):
        setattr(holder, attention.SITE, Site(placement, number, n_sites))
    for number, plain in enumerate(dropouts, start=len(holders)):
        plain.__class__ = PlacedDropout
        setattr(plain, "site", Site(placement, number, n_sites))  # noqa: B010


def _bind_parts(model: nn.Module, placement: Placement) -> None:
    """Give the modules whose own forward cannot run packed another one."""
    for module in model.modules():
        part = parts.part_of(module)
        if part is not None and part.always and instance_forward(module) is None:
            module.__dict__[PLACEMENT] = placement
            module.forward = bind(part.forward, module)


def _is_plain_dropout(module: nn.Module) -> bool:
    return type(module) in (nn.Dropout, PlacedDropout) and "forward" not in module.__dict__


def refuse_replicas() -> NoReturn:
    """Stand in for what copies a module for torch.nn.DataParallel: the copy's forward would be that of the original."""
    raise ConfigError(
        what="torch.nn.DataParallel cannot copy a model that whet has changed",
        why="a copy would compute with the weights of the original, on the original's device",
        fix="call whet.restore(model) first, let the process see one GPU alone (CUDA_VISIBLE_DEVICES=0), or start one "
        "process a GPU with torchrun",
    )


def _feed_all_at_once(model: nn.Module) -> None:
    """Switch off the cutting of a row before the feed-forward layers: the rows of a packed batch have many lengths."""
    for module in model.modules():
        if _CHUNK not in module.__dict__ and getattr(module, "chunk_size_feed_forward", 0):
            module.__dict__[_CHUNK] = module.chunk_size_feed_forward
            setattr(module, "chunk_size_feed_forward", 0)  # noqa: B010


# ---- what fails ----

_FAILURES = (IndexError, ValueError, RuntimeError, TypeError)
"""What torch and transformers raise for a batch that does not fit the model."""


def _is_on_gpu(ids: Any) -> bool:
    return isinstance(ids, Tensor) and ids.device.type == "cuda"


@contextmanager
def explained(model: nn.Module, inputs: Mapping[str, Any], places: Tensor | None = None) -> Iterator[None]:
    """Raise DataError in place of the model's own error where the batch's columns do not fit the model.

    ConfigError if its code does not run under autocast. A GPU gets no ids that the host knows to be wrong: its kernels
    would end the process, and name none. `places` (N,) are those of the flattened batch that are computed; None: all
    are. What is padding may be a token that the model does not know.
    """
    if _is_on_gpu(inputs.get("input_ids")):
        from whet.models.bad_batch import outside_of_tables

        if (odd := outside_of_tables(model, inputs, places)) is not None:
            raise odd
    try:
        yield
    except _FAILURES as error:
        if isinstance(error, WhetError):
            raise
        from whet.models.bad_batch import explanation_of

        if (found := explanation_of(error, model, inputs, places)) is None:
            raise
        raise found from error


def checked(collate: Callable[[list[Any]], Any], model: Any = None) -> Callable[[list[Any]], Any]:
    """Return the collator, with DataError in place of its own error if it cannot make a batch of such rows.

    The numbers that `model` gives its labels are named in the error.
    """

    def collate_or_explain(rows: list[Any]) -> Any:
        try:
            return collate(rows)
        except (*_FAILURES, KeyError, AttributeError) as error:
            if isinstance(error, WhetError):
                raise
            from whet.models.bad_batch import problem_of_rows

            if (found := problem_of_rows(rows, model)) is None:
                raise
            raise found from error

    return collate_or_explain
