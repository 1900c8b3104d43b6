"""Which code computes a model's attention: whet's, or one of transformers' own if `attn_implementation` asks for it.

whet's is one function, which serves every family through transformers' AttentionInterface.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from whet.card import Card
from whet.errors import ConfigError
from whet.kernels.attention_spec import AttentionSpec, window_of
from whet.kernels.batch_position import Drop, Site, running, running_position
from whet.kernels.packed_attention import attend as attend_rows
from whet.log import logger
from whet.models.family import window_in_pass
from whet.models.fused.attention import require_all
from whet.models.fused.limits import came_later, require_no_other_pass, require_pass, require_understood

CARD = Card(
    name="attention",
    asked_by="attn_implementation",
    does="Chooses whet's packed attention or one of transformers' padded ones.",
    improves="both",
    same_result="without dropout",
    hurts="All but the default run padded, except flash attention on a GPU.",
    source="Vaswani et al. 2017, equation 1; Dao et al. 2022, arXiv:2205.14135",
    page="speed.md#attention",
)

NAME = "whet"
SITE = "whet_site"
"""Attribute of an attention module that holds its Site."""


class Routed(str):
    """The name of a model's attention implementation, as it was loaded, in the configuration of a prepared model.

    It is that name for everybody who reads it. While a pass runs, the configuration names whet's attention instead.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return _loaded_again, (str(self),)


def _loaded_again(name: str) -> Routed:
    """Return the name in the process that has loaded the model: transformers there knows nothing of whet yet."""
    register()
    return Routed(name)


def register() -> None:
    """Make `attn_implementation="whet"` known to transformers, and let configurations name it in whet's passes."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    given: Any = PreTrainedConfig._attn_implementation
    if given.fget is not _in_force:
        PreTrainedConfig._attn_implementation = property(_in_force, given.fset, doc=given.__doc__)  # pyright: ignore


def route(model: nn.Module) -> None:
    """Let the model compute attention by whet's function within passes, and by its own elsewhere."""
    for config in _configs_of(model):
        config._attn_implementation_internal = Routed(config._attn_implementation_internal)


def unroute(model: nn.Module) -> None:
    """Undo `route`, exactly."""
    for config in _configs_of(model):
        if is_routed(config):
            config._attn_implementation_internal = str(config._attn_implementation_internal)


def is_routed(config: Any) -> bool:
    """Return whether passes compute attention by whet's function: nobody has set another one since `route`."""
    return type(config._attn_implementation_internal) is Routed


def why_other_function(model: nn.Module) -> str | None:
    """Return which attention or mask function of a user's own the model was loaded with: a pass would replace it."""
    for name in map(_loaded, _configs_of(model)):
        for what, known in (("attention", ALL_ATTENTION_FUNCTIONS), ("mask", ALL_MASK_ATTENTION_FUNCTIONS)):
            function = known.get(name)
            if function is not None and not _home_of_code(function).startswith(("transformers.", "whet.")):
                return f"the {what} function of its attention implementation '{name}' is not one of transformers"
    return None


def _home_of_code(function: Any) -> str:
    """Return the module in which a function was written; functools.wraps gives it the name of another one."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__globals__", {}).get("__name__") or ""


def _configs_of(model: nn.Module) -> list[Any]:
    """Return the configurations that the model's modules read and that name an attention implementation."""
    found = (module.__dict__.get("config") for module in model.modules())
    named = {id(one): one for one in found if isinstance(getattr(one, "_attn_implementation_internal", None), str)}
    return list(named.values())


def _in_force(config: Any) -> str | None:
    """Return the attention implementation of a configuration: whet's where a pass of a prepared model runs.

    Modules, masks and parts that came into the model later all read it. Other threads, and calls outside of a pass,
    read what was loaded. So does a tracer of other models, which sees a plain text here.
    """
    found = config._attn_implementation_internal
    return NAME if type(found) is Routed and _is_whets_turn() else found


def _is_whets_turn() -> bool:
    """Return whether a pass runs, or may have run: a backward pass that computes a part again cannot see it."""
    if torch.compiler.is_compiling():
        return True
    if running() is None:
        return torch._C._current_graph_task_id() != -1
    return running_position() is not None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Return the attention output (B, T, H, K) for query, key and value (B, H, T, K).

    In a packed pass B is 1, T is all tokens of all rows, and each row sees itself alone. Outside of one (the model is
    called by somebody else) it is transformers' own: eager, with its weights, if the model was loaded so, or else SDPA.
    """
    site: Site | None = getattr(module, SITE, None)
    position = None if site is None else site.placement.now
    if site is None and running() is not None:
        raise came_later(module)
    if site is not None and position is None:
        require_no_other_pass(module, query.shape[0], query.shape[2])
        if attention_mask is None:
            require_pass(module, site, query)
    if site is None or position is None or not position.is_of(query.shape[0], query.shape[2]):
        return _outside(module)(module, query, key, value, attention_mask, **options)
    require_understood(module, attention_mask, options)
    require_all(module, query.shape[2], position)
    drop = Drop.at(site, options.get("dropout", 0.0), position)
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    spec = AttentionSpec(
        position.cu_seqlens,
        scale,
        causal=site.placement.causal,
        drop=drop,
        max_seqlen=position.max_seqlen,
        kernel=site.placement.kernel,
        key_counts=position.key_counts,
        window=window_of(window_in_pass(module, options.get("sliding_window"))),
    )
    # Under autocast a family's own rotation leaves queries and keys in fp32, and values are in bf16.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    return attend_rows(q, k, v, spec)[None], None


def _outside(module: Any) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return the attention function that the model has outside of whet's passes."""
    if _loaded(getattr(module, "config", None)) != "eager":
        return sdpa_attention_forward
    homes = (sys.modules[part.__module__] for part in type(module).__mro__)
    return next(home.eager_attention_forward for home in homes if hasattr(home, "eager_attention_forward"))


def mask(*args: Any, attention_mask: Tensor | None = None, **options: Any) -> Tensor | None:
    """Return None for packed calls, whose rows and windows the attention knows itself; else the model's own mask."""
    if attention_mask is None and _is_packed(options):
        return None
    made_by = eager_mask if _loaded(options.get("config")) == "eager" else sdpa_mask
    return made_by(*args, attention_mask=attention_mask, **options)


def _loaded(config: Any) -> str:
    """Return the attention implementation that a model was loaded with, whatever runs now."""
    return str(getattr(config, "_attn_implementation_internal", None))


def _is_packed(call: Mapping[str, Any]) -> bool:
    """Return whether a call for a mask belongs to a packed pass."""
    position = running_position()
    return position is not None and position.is_of(call["batch_size"], call["q_length"])


FLASH = "flash_attention_2"


def use_theirs(model: nn.Module, name: str) -> None:
    """Make the model compute attention with transformers' implementation of this name.

    Raises ConfigError if the model or the machine cannot.
    """
    if name == FLASH:
        _require_flash()
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            what=f"attn_implementation {name} cannot be used here",
            got=type(model).__name__,
            why="only models of transformers have a choice of attention",
            fix="leave --attn_implementation out",
        )
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise _refused(name, type(model).__name__, " ".join(str(error).split())[:500]) from error
    found = model.config._attn_implementation
    if found != name:
        raise _refused(name, type(model).__name__, f"transformers kept {found} for this model")
    logger.info("attention: transformers' own %s, asked for by attn_implementation", name)


def require_flash_kernels(device: torch.device) -> None:
    """Raise ConfigError if packed batches find no flash kernels on this device."""
    from whet.kernels import gpu_attention

    if gpu_attention.have(device) != gpu_attention.Have():
        return
    if not torch.cuda.is_available():
        got = "no GPU that torch can use"
    elif device.type != "cuda":
        got = f"the model is on the device {device}"
    else:
        got = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, no package flash-attn"
    raise _refused(
        FLASH, got, "flash kernels run on NVIDIA GPUs since Ampere, by a torch built with them or flash-attn"
    )


def not_known(model: nn.Module) -> ConfigError:
    """Return the error for a model that whet's own attention is asked of, and that whet does not know."""
    return ConfigError(
        what="whet's attention does not serve this model",
        got=type(model).__name__,
        why="it serves models of the families that whet knows, with a head of transformers that runs without padding",
        fix="leave --attn_implementation out: the model then runs padded, with its own attention",
    )


def _require_flash() -> None:
    missing = [] if torch.cuda.is_available() else ["GPU that torch can use"]
    if importlib.util.find_spec("flash_attn") is None:
        missing.append("package flash-attn")
    if missing:
        raise _refused(FLASH, f"no {' and no '.join(missing)}", "its kernels come in a package for GPUs")


def _refused(name: str, got: str, why: str) -> ConfigError:
    others = " or ".join(other for other in ("sdpa", "eager") if other != name)
    return ConfigError(
        what=f"attn_implementation {name} cannot be used here",
        got=got,
        why=why,
        fix=f"use --attn_implementation {others}, or leave it out",
    )
