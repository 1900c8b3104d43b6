"""What a head of transformers reads of its encoder's output, so that it can be given that and nothing else."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from whet.models.adapters import unwrapped, why_not_inside
from whet.models.forwards import home_of, is_whets, other_forward
from whet.models.packable import predicts_next_tokens, runs_forward_of
from whet.models.standard import has_hooks, is_trusted, is_unchanged

Reads = Literal["first tokens", "tokens"]
"""The hidden state of each sequence's first token, or that of each token on its own."""
_FIRST_TOKEN_HEADS = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_TOKEN_HEADS = ("ForTokenClassification", "ForMaskedLM")
_KNOWN_HOMES = ("peft.", "whet.")
_OF_EACH_TOKEN = (
    *(nn.Linear, nn.Dropout, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict),
    *(nn.GELU, nn.ReLU, nn.Tanh, nn.SiLU, nn.Sigmoid, nn.ELU, nn.CELU, nn.SELU, nn.LeakyReLU, nn.ReLU6, nn.Mish),
    *(nn.Softplus, nn.Softsign, nn.Softshrink, nn.Tanhshrink, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish),
    *(nn.Hardsigmoid, nn.Hardshrink, nn.modules.loss._Loss),
)
"""Layers of torch that compute each token by itself, and losses of logits; others may pool a row, flatten it or mix its
tokens."""
ALL_LAYERS = ("output_hidden_states", "output_attentions")
"""Settings by which a model returns more than its last hidden states."""


def reads(model: nn.Module) -> Reads | None:
    """Return what the model's head reads; None if that is not known for certain.

    It is known for heads of transformers with the forward that is written there, as long as every module of theirs is
    a class of transformers or peft with its own forward, or a layer of torch that computes each token by itself, and
    none has a hook: code of a user's own may read anything.
    """
    base: Any = unwrapped(model)
    found = reads_beside(base)
    if found is None:
        return None
    return None if "forward" in vars(base.base_model) or has_hooks(base.base_model) else found


def reads_beside(model: nn.Module) -> Reads | None:
    """Return what `reads` does, whoever runs or watches the encoder."""
    base: Any = unwrapped(model)
    found = _by_name(base)
    if found is None or base.base_model is base or not all(map(_is_standard, _beside_blocks(base))):
        return None
    if found == "first tokens" and not pools_first_tokens(base):
        return None
    return None if asks_for_layers(base) else found


def why_not_parts(model: nn.Module) -> str | None:
    """Return why the complete model has to be called, with its batch as it is, and not its encoder and head alone.

    None: what is around these two does nothing else. A language model's loss is then that of its next tokens.
    """
    if (why := why_not_inside(model)) is not None:
        return why
    base: Any = unwrapped(model)
    if has_hooks(base):
        return f"hooks on its {type(base).__name__} see its calls"
    own = other_forward(base)
    if own is not None and not home_of(own).startswith("whet."):
        return f"the forward of its {type(base).__name__} was replaced"
    if asks_for_layers(base):
        return f"the configuration of its {type(base).__name__} asks for {' or '.join(ALL_LAYERS)}"
    if predicts_next_tokens(model) and base.loss_function is not ForCausalLMLoss:
        return f"the loss_function of its {type(base).__name__} is not that of next tokens"
    return None


def pools_first_tokens(model: nn.Module) -> bool:
    """Return whether the configuration lets a head for rows read first tokens alone.

    ELECTRA's multiple choice may take a mean or the last token, EuroBERT's and ModernBERT's classifiers a mean.
    """
    config = getattr(unwrapped(model), "config", None)
    takes_first = getattr(config, "summary_type", "first") == "first"
    return takes_first and getattr(config, "classifier_pooling", "cls") in ("cls", "bos")


def asks_for_layers(model: nn.Module) -> bool:
    """Return whether the model's configuration asks for more than its last hidden states."""
    config = getattr(unwrapped(model), "config", None)
    return any(getattr(config, name, False) for name in ALL_LAYERS)


def _by_name(base: Any) -> Reads | None:
    """Return what heads of this class read, by the class of transformers whose forward it runs."""
    kinds: tuple[tuple[Reads, tuple[str, ...]], ...] = (("first tokens", _FIRST_TOKEN_HEADS), ("tokens", _TOKEN_HEADS))
    for kind, ends in kinds:
        heads = [cls for cls in type(base).__mro__ if cls.__name__.endswith(ends) and is_trusted(cls)]
        names = tuple(cls.__name__ for cls in heads)
        if names and runs_forward_of(base, names):
            return kind
    return None


def _beside_blocks(base: Any) -> list[nn.Module]:
    """Return the modules of the head, and the encoder's pooler: what reads the encoder's last hidden states."""
    encoder = base.base_model
    beside = [child for child in base.children() if child is not encoder]
    head = [module for child in beside for module in child.modules()]
    pooler = getattr(encoder, "pooler", None)
    return head + (list(pooler.modules()) if isinstance(pooler, nn.Module) else [])


def _is_standard(module: nn.Module) -> bool:
    """Return whether what the module reads is known from its class."""
    if _is_watched(module):
        return False
    home = f"{type(module).__module__}."
    if home.startswith("torch.nn."):
        over_several = isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) != 1
        return isinstance(module, _OF_EACH_TOKEN) and not over_several
    return home.startswith(_KNOWN_HOMES) or is_unchanged(module)


def _is_watched(module: nn.Module) -> bool:
    """Return whether somebody else sees the module's calls, or runs them; whet is nobody else."""
    own = other_forward(module)
    return (own is not None and not is_whets(own)) or has_hooks(module)
