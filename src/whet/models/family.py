"""What whet knows of a model family, and whose family a class is; docs/families.md explains how to add one.

Each file of `families/` is a plug-in, imported when a model of its packages comes. What families are written with asks
`owner_of` here.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from whet import plugins
from whet.errors import ConfigError


def from_zero(_: nn.Module) -> int:
    """Return 0: most families number the tokens of a row from 0."""
    return 0


def after_padding(model: nn.Module) -> int:
    """Return the padding token's number + 1, where RoBERTa's embeddings start (make_positions of fairseq).

    The embeddings keep the number that the configuration had when they were made; it may have another one by now.
    """
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    padding_id: int | None = getattr(embeddings, "padding_idx", model.config.pad_token_id)  # pyright: ignore
    if padding_id is None:
        raise ConfigError(
            what="the model's configuration names no padding token",
            got="pad_token_id null",
            why="this family counts positions from the number of its padding token",
            fix='set "pad_token_id" in config.json to what the model was trained with: 1 for RoBERTa and XLM-R',
        )
    return padding_id + 1


def by_pooler(encoder: Any, hidden: Tensor) -> Tensor:
    """Return the encoder's pooler applied to hidden states (B, T, D): it reads the first token of each row."""
    return encoder.pooler(hidden)


def packs(_: nn.Module) -> None:
    """Return None: no configuration of the family needs its padding."""


Slots = Mapping[str, type[nn.Module] | str | None]
"""Submodules by path, and the class that each must have exactly; a name is that of one of the family's `rms_norms`.
None: any activation that has an operator."""


@dataclass(frozen=True)
class RmsNorm:
    """How a family's RMSNorm (Zhang and Sennrich 2019) differs from the others."""

    epsilon: str = "variance_epsilon"
    """The attribute that holds its epsilon."""
    weight_offset: float = 0.0
    """What is added to its weight: Gemma's weights are distances from 1."""


@dataclass(frozen=True)
class Part:
    """The fused forward of one class."""

    forward: Callable[..., Any]
    """Takes the module and its inputs. In a forward pass of whet it computes the result with whet's operators, and
    otherwise it calls the class's own forward."""
    slots: Slots
    """The submodules whose weights `forward` reads without calling them."""
    always: bool = False
    """Whether the class's own forward cannot run packed: this one takes its place wherever the model runs packed, on a
    GPU and without the native library too."""
    ends_block: bool = False
    """Whether the result of its block is this part's result, and `forward` passes it through `block_end`."""


@dataclass(frozen=True, kw_only=True)
class FeedForward:
    """Where a block has its feed-forward part, each by its path in the block, and how that computes."""

    path: str
    """The module that experts take the place of."""
    up: tuple[str, ...]
    """The layer before the activation; of a gated part the gate's and the other, in this order."""
    down: str
    """The layer behind it. Where it lies outside of `path`, what holds it adds the residual."""
    activation: str
    joined: bool = False
    """Whether the one layer of `up` is the gate's and the other joined."""
    dropout: str | None = None
    """A dropout of the part's result, within `path`."""
    inner_dropout: str | None = None
    """A dropout between activation and `down`."""


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Where a family has the windows of its attention: how many keys a token sees on one side, itself included."""

    of_attention: Callable[[Any], int | None]
    """The window of an attention module, which a packed pass keeps to; None: none."""
    of_mask: Callable[[Any, int, Any], int | None]
    """The window of the mask that transformers gives a block, by configuration, place and block."""


def _own(attention: Any) -> int | None:
    return getattr(attention, "sliding_window", None)


def _in_config(attention: Any) -> int | None:
    return _own(attention.config)


def _by_layer_types(config: Any, place: int, _: Any) -> int | None:
    kinds = getattr(config, "layer_types", None) or ()
    return config.sliding_window if tuple(kinds[place : place + 1]) == (SLIDING,) else None


def _of_all(config: Any, place: int, block: Any) -> int | None:
    return _own(config)


SLIDING = "sliding_attention"
"""What transformers calls a block with a window."""
WINDOWS_BY_LAYER = Windows(of_attention=_own, of_mask=_by_layer_types)
"""`config.layer_types` says which blocks have one, and each attention has kept its own."""
WINDOWS_OF_ALL = Windows(of_attention=_own, of_mask=_of_all)
"""All blocks have one or none, and each attention has kept it."""
WINDOWS_IN_CONFIG = Windows(of_attention=_in_config, of_mask=_of_all)
"""All blocks have one or none, and read it in each call."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family: the models that share their modules' classes."""

    model_types: tuple[str, ...]
    """The values of `model_type` in config.json."""
    package: str
    """The Python package or module that defines the classes; names below are names of classes in it."""
    attention: tuple[str, ...]
    """The modules that call transformers' AttentionInterface, or have a part that is `always` there."""
    blocks: tuple[str, ...]
    """The modules that the encoder is a stack of."""
    stack: str | None = None
    """The path of the list of blocks in the encoder, if the last block's parts can compute chosen tokens alone: their
    residuals and norms go through `fused.layers`, and their attention asks `fused.attention`. None: they cannot."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """The fused forward of each class that has one. Other modules run as they are."""
    feed_forward: FeedForward | None = None
    """The feed-forward part of each block, if experts can take its place. None: they cannot."""
    causal: bool = False
    """Whether the models are decoders: a token attends to itself and to the tokens of its row before it."""
    rms_norms: Mapping[str, RmsNorm] = field(default_factory=dict)
    """The family's RMSNorm classes, which an operator may replace."""
    first_position: Callable[[nn.Module], int] = from_zero
    """The position id of a row's first token, given the model. The ids of a row are consecutive."""
    skips_padding: bool = False
    """Whether tokens with the padding token's number get no position id of their own, wherever they are in a row."""
    adds_masks: bool = False
    """Whether the model's own attention adds its mask to the scores, and does not call the AttentionInterface."""
    pooled: Callable[[Any, Tensor], Tensor] = by_pooler
    """`pooler_output` (B, D) of the encoder, given the encoder and its hidden states (B, T, D)."""
    why_padded: Callable[[nn.Module], str | None] = packs
    """Why a model of the family, which some configurations give other arithmetic, needs its padding; None: it packs."""
    windows: Windows | None = None
    """The windows of its attention. None: its masks have none, whatever a configuration or a module says."""
    read_by_blocks: tuple[str, ...] = ()
    """Parts of the encoder that stand after its blocks, and whose results each block reads."""
    proven: bool = False
    """Whether a proof has made this family for one model, whose classes may be defined in any package."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the configuration that the tests' tiny model needs besides the common ones."""

    def owns(self, cls: type) -> bool:
        """Return whether the class is defined in this family's package."""
        return cls.__module__ == self.package or cls.__module__.startswith(f"{self.package}.")

    def is_attention(self, module: nn.Module) -> bool:
        """Return whether the module's class is one of the family's attention classes, or a subclass of one."""
        return self._is_one_of(module, self.attention)

    def is_block(self, module: nn.Module) -> bool:
        """Return whether the module's class is one of the family's block classes, or a subclass of one."""
        return self._is_one_of(module, self.blocks)

    def unnumbered(self, model: nn.Module) -> int | None:
        """Return the number of the token that gets no position id of its own but this number; None: all get one."""
        return self.first_position(model) - 1 if self.skips_padding else None

    def padded_positions(self, model: nn.Module, input_ids: Tensor) -> Tensor:
        """Return the position ids (B, T) that the model gives the tokens of a padded call."""
        skipped = self.unnumbered(model)
        if skipped is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device).expand(input_ids.shape)
            return self.first_position(model) + places
        words = input_ids.ne(skipped)
        return words.cumsum(1) * words + skipped

    def _is_one_of(self, module: nn.Module, names: tuple[str, ...]) -> bool:
        return any(cls.__name__ in names and (self.proven or self.owns(cls)) for cls in type(module).__mro__)


_ROOM = "models.families"


@cache
def _modules() -> Mapping[str, str]:
    """Return which file has the family of each package that defines classes, by its constant `PACKAGES`."""
    found = plugins.constants(_ROOM, "PACKAGES")
    return {package: module for module, tree in found.items() for package in ast.literal_eval(tree)}


@cache
def registered() -> Mapping[str, Family]:
    """Return every family by `model_type`, sorted by it; this imports all of them."""
    families = [family for module in dict.fromkeys(_modules().values()) for family in _families_in(module)]
    found = {model_type: family for family in families for model_type in family.model_types}
    n_types = sum(len(family.model_types) for family in families)
    assert len(found) == n_types, "two families have one model_type"
    return dict(sorted(found.items()))


@cache
def _families_in(module: str) -> tuple[Family, ...]:
    file = plugins.load(_ROOM, module)
    odd = {family.package for family in file.FAMILIES} ^ {*file.PACKAGES}
    assert not odd, f"{module}.py: PACKAGES are not those of its FAMILIES: {odd}"
    return file.FAMILIES


@cache
def _family_of(module: str) -> Family | None:
    """Return the family in whose package this module is."""
    package = next((one for one in _modules() if module == one or module.startswith(f"{one}.")), None)
    found = () if package is None else _families_in(_modules()[package])
    return next((family for family in found if family.package == package), None)


def owner_of(cls: type) -> Family | None:
    """Return the family in whose package the class is defined."""
    return _family_of(cls.__module__)


def home_of_forward(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class, this one or one that it inherits from, that defines its forward."""
    return next(one for one in cls.__mro__ if "forward" in vars(one))


def owner_of_forward(cls: type[nn.Module]) -> Family | None:
    """Return the family in whose package the forward of the class is defined."""
    return owner_of(home_of_forward(cls))


# A graph need not look through the families. This is torch.compiler.assume_constant_result without the 0.5 s that its
# first call takes to import torch's compiler.
vars(owner_of)["_dynamo_marked_constant"] = True
vars(owner_of_forward)["_dynamo_marked_constant"] = True


def window_in_pass(attention: nn.Module, option: int | None = None) -> int | None:
    """Return the window of an attention in a packed pass: that of the masks that transformers makes.

    `option` is what the attention was called with, for transformers' flash attention. A class may leave it out, or hand
    on one that its masks do not have; without a file for the family nothing else says whether there is a window.
    """
    family = owner_of_forward(type(attention))
    if family is None:
        return option
    return None if family.windows is None else family.windows.of_attention(attention)
