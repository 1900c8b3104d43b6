"""The sizes of a model and of its run: what a forecast of memory and time counts with.

Both are read from the prepared model and from the run's own batches. Neither depends on the values of weights, so that
a model without weights has the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import nn

from whet.methods import counting
from whet.models.known import of_model as of_family
from whet.models.packed import packed_model
from whet.models.view import ModelView

Part = Literal["embeddings", "blocks", "head"]
"""Embeddings: the tables, what is read before the first block. Head: what reads the last block's result."""
PARTS: tuple[Part, ...] = ("embeddings", "blocks", "head")


@dataclass(frozen=True)
class Product:
    """A linear layer, as often as a forward pass runs one of its sizes: 2 * n_in * n_out operations for each row.

    Backward has a product of the same size for the gradient of its input, and one more if its weight is trained.
    """

    n_in: int
    n_out: int
    times: int
    """How many layers of this size a forward pass runs; shared layers count each time."""
    part: Part
    trained: bool
    """Whether its weight gets a gradient."""
    rank: int = 0
    """The rank of a trained low-rank pair next to it (LoRA); 0: it has none."""

    @property
    def n_weights(self) -> int:
        """Weights of one such layer."""
        return self.n_in * self.n_out


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A prepared model, in numbers. Sizes that its configuration does not name are 0."""

    model_class: str
    model_type: str
    """That of config.json; "" for a model without one."""
    family: str | None
    """The package of its family; None: whet does not know it."""
    packed: bool
    """Whether its batches run without padding."""
    causal: bool
    parameters: Mapping[Part, int]
    """Parameters by part; adapters count where they are."""
    trained: Mapping[Part, int]
    """The same, of those that are trained."""
    width: int
    """Of the hidden states."""
    layers: int
    """Blocks that a forward pass runs, shared ones each time."""
    heads: int
    kv_heads: int
    head_width: int
    inner_width: int
    """Of the feed-forward parts."""
    vocabulary: int
    products: tuple[Product, ...]
    precision: str
    """Of the products: fp32, bf16, fp16, int8; auto before it is chosen."""
    weight_bytes: int
    """All parameters and buffers, in their formats."""
    checkpointing: Literal["blocks", "selective"] | None
    optimizer: str
    """The value of `optim`."""
    in_backward: bool
    """Whether weights are updated inside the backward pass."""
    adapter_rank: int
    """The largest rank of its low-rank pairs; 0: it has none."""
    has_experts: bool = False
    """Whether some of its products are those of experts: a token runs through a few of many."""
    teacher: Anatomy | None = None
    """The model that computes each batch next to it, to teach it; None: there is none."""

    @property
    def n_parameters(self) -> int:
        """All parameters."""
        return sum(self.parameters.values())

    @property
    def n_trained(self) -> int:
        """Parameters that are trained."""
        return sum(self.trained.values())

    @property
    def trained_frac(self) -> float:
        """The share of the parameters that is trained."""
        return self.n_trained / max(self.n_parameters, 1)

    @property
    def attention_width(self) -> int:
        """Numbers of a token's queries: attention takes 4 * this for each pair of tokens in a block, forward."""
        return self.heads * self.head_width

    def products_of(self, part: Part) -> list[Product]:
        """Return the products of this part."""
        return [one for one in self.products if one.part == part]


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass of one rank."""

    lengths: np.ndarray
    """Tokens of each row (rows,), without padding."""
    n_computed: int
    """Tokens that the model computes, padding and filling included."""
    n_targets: int
    """Places whose logits the loss reads."""
    padded_to: int = 0
    """The length of every row of a padded batch; 0: it is packed."""

    @property
    def n_rows(self) -> int:
        """Its rows."""
        return len(self.lengths)

    @property
    def n_tokens(self) -> int:
        """Real tokens."""
        return int(self.lengths.sum())

    @property
    def n_pairs(self) -> int:
        """Pairs of tokens that attend to each other: of each row, its length squared; a causal one needs half of it."""
        return int(np.square(np.full(self.n_rows, self.padded_to) if self.padded_to else self.lengths).sum())


@dataclass(frozen=True)
class Reading:
    """Rows that one rank of a run computes without gradients."""

    batches: tuple[MicroBatch, ...]
    """Some of its batches, spread evenly."""
    n_batches: int
    """All of them."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one rank of a run computes."""

    n_steps: int
    """Optimizer steps of the run."""
    n_rows: int
    """Rows of the training set."""
    sees_all_rows: bool = True
    """Whether the run reads every row that an epoch has; one of fewer steps may leave out the longest."""
    n_tokens: float | None = None
    """Real tokens of all steps; None: the data set does not know the lengths of its rows."""
    steps: tuple[tuple[MicroBatch, ...], ...]
    """The micro-batches of some steps, spread evenly over the run's first epoch: all of them if they are few."""
    heaviest: tuple[MicroBatch, ...]
    """The step with the micro-batch that takes the most memory, of all that were looked at."""
    n_evaluations: int = 0
    """How often the run evaluates, its start and its end included."""
    evaluation: Reading | None = None
    """One evaluation; None: the run has none."""
    readings: tuple[Reading, ...] = ()
    """What is computed once: the predictions of the test split, and rows that a reference reads before the steps."""
    n_saves: int = 0
    """Checkpoints of the run; with `save_interval_s` its time says how many there are."""
    save_interval_s: float | None = None
    """Seconds between checkpoints; None: the steps say when one comes."""
    saves_best: bool = False
    """Whether an evaluation is followed by a checkpoint only if it is the best so far. Then `n_saves` are the most."""
    save_bytes: int = 0
    """The size of one."""
    n_ranks: int = 1
    zero_stage: int = 0
    """What the ranks share."""
    sampled: bool = False
    """Whether `steps` leaves some out."""
    n_seeds: int = 1
    """How often all of it runs, each time with another seed."""

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a step computes, on average."""
        found = [sum(batch.n_computed for batch in step) for step in self.steps]
        return float(np.mean(found)) if found else 0.0


def of_model(model: nn.Module, args: Any, precision: str | None = None) -> Anatomy:
    """Return the anatomy of a model that `engine/prepare.py` has prepared with these settings.

    `precision`: that of the run, where `auto` has chosen; None: as the settings say.
    """
    view = ModelView(model)
    base, family = view.model, of_family(view.model)
    config: Any = getattr(base, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads, width = _size(text, "num_attention_heads"), _size(text, "hidden_size")
    places = _Places.of(view)
    products = _products(view, places)
    weights = [*model.parameters(), *model.buffers()]
    return Anatomy(
        model_class=type(base).__name__,
        model_type=getattr(config, "model_type", ""),
        family=None if family is None else family.package,
        packed=packed_model(base) is not None,
        causal=family is not None and family.causal,
        parameters=_counted(places, list(base.named_parameters())),
        trained=_counted(places, [one for one in base.named_parameters() if one[1].requires_grad]),
        width=width,
        layers=places.n_uses * len(places.blocks),
        heads=heads,
        kv_heads=_size(text, "num_key_value_heads") or heads,
        head_width=_size(text, "head_dim") or (width // heads if heads else 0),
        inner_width=_size(text, *_INNER) or 4 * width,
        vocabulary=_size(text, "vocab_size"),
        products=products,
        precision=precision or args.precision,
        weight_bytes=sum(one.numel() * one.element_size() for one in weights),
        checkpointing=args.checkpointing_policy if args.gradient_checkpointing else None,
        optimizer=args.optim,
        in_backward=args.optimizer_in_backward,
        adapter_rank=max((one.rank for one in products), default=0),
        has_experts=any(True for _ in _experts(view)),
    )


_INNER = ("intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "d_ff")
"""What configurations call the width of the feed-forward part."""
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "top_k_experts")
"""What configurations call the number of experts that compute a token."""
_STACKED = 3
"""Dimensions of the weights of all experts of a layer: the expert comes first."""
_BASE = ".base_layer"
"""How the name of a layer ends that one of peft's stands around."""


@dataclass(frozen=True)
class _Places:
    """Where the modules of a model stand, by name: before its blocks, in one, or behind them."""

    blocks: tuple[str, ...]
    n_uses: int
    """How often a forward pass runs each block."""
    order: Mapping[str, int]

    @classmethod
    def of(cls, view: ModelView) -> _Places:
        blocks = tuple(name for name, _ in view.blocks())
        n_layers = _size(getattr(view.model, "config", None), "num_hidden_layers")
        shared = packed_model(view.model) is not None and blocks
        order = {name: number for number, (name, _) in enumerate(view.model.named_modules())}
        return cls(blocks, max(1, n_layers // len(blocks)) if shared else 1, order)

    def part_of(self, module: str) -> Part:
        """Return the part of the model that this module belongs to."""
        if any(module == block or module.startswith(f"{block}.") for block in self.blocks):
            return "blocks"
        if not self.blocks or self.order.get(module, 0) < self.order[self.blocks[0]]:
            return "embeddings"
        return "head"


def _products(view: ModelView, places: _Places) -> tuple[Product, ...]:
    """Return the products of the linear layers, equal ones counted together."""
    found: Counter[tuple[int, int, Part, bool, int]] = Counter()
    for name, layer in view.linears():
        weight = layer._parameters.get("weight")
        trained, part = weight is not None and weight.requires_grad, places.part_of(name)
        n_in, n_out = counting.features(layer)
        uses = places.n_uses if part == "blocks" else 1
        found[n_in, n_out, part, trained, _rank(view.model, name)] += uses
    for name, weight, n_chosen in _experts(view):
        part = places.part_of(name)
        n_out, n_in = weight.shape[1:]
        found[n_in, n_out, part, weight.requires_grad, 0] += n_chosen * (places.n_uses if part == "blocks" else 1)
    return tuple(
        Product(n_in, n_out, times, part, trained, rank) for (n_in, n_out, part, trained, rank), times in found.items()
    )


def _experts(view: ModelView) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield the weights of experts, which lie in one tensor each, and how many of them compute a token.

    The name is that of their module: whet's own, or one of transformers'.
    """
    config: Any = getattr(view.model, "config", None)
    for name, module in view.model.named_modules():
        n_experts = _size(module, "n_experts", "num_experts")
        for weight in module.parameters(recurse=False) if n_experts else ():
            if weight.dim() == _STACKED and len(weight) == n_experts:
                yield name, weight, max(_size(module, "top_k") or _size(config, *_CHOSEN), 1)


def _rank(base: Any, name: str) -> int:
    """Return the rank of the pair that peft has put next to a layer; 0: none."""
    if not name.endswith(_BASE):
        return 0
    around = base.get_submodule(name.removesuffix(_BASE))
    active = next(iter(getattr(around, "active_adapters", [])), None)
    return int(getattr(around, "r", {}).get(active, 0))


def _counted(places: _Places, named: Sequence[tuple[str, nn.Parameter]]) -> dict[Part, int]:
    """Return how many of these parameters each part has; of tied ones, the first counts."""
    found: dict[Part, int] = dict.fromkeys(PARTS, 0)
    for name, parameter in named:
        found[places.part_of(name.rpartition(".")[0])] += parameter.numel()
    return found


def _size(config: Any, *names: str) -> int:
    """Return the first of these entries of a configuration that is a number; 0 if none is."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), 0)
