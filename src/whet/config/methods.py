"""What the methods are asked for: the settings that `whet/methods` reads, made from TrainingArguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from whet.config.fields import LastBlockTokens, PaddingInLoss
from whet.config.rules.computing import DEFAULT_BACKEND
from whet.config.rules.sharing import stage_of_run

if TYPE_CHECKING:
    import torch

    from whet.config.arguments import TrainingArguments

Place = Literal["first", "last"]
"""A token of each row that pooling may take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSettings:
    """How torch.compile compiles."""

    backend: str = DEFAULT_BACKEND
    mode: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MethodSettings:
    """What each method is asked for. The defaults ask for nothing."""

    operators: Literal["auto"] | None = None
    """auto: native operators if the model is on a CPU and the library is there."""
    row_gradients: bool = False
    """Whether the word table keeps its gradient between steps, for an optimizer that skips rows without a gradient."""
    unpad: PaddingInLoss | None = None
    """What padding tokens get in calls with padded batches; None: such calls keep their padding."""
    unpad_dtype: torch.dtype | None = None
    """What the encoder computes in during such calls; None: as without whet."""
    last_block: LastBlockTokens | None = None
    """Which tokens the last block computes; None: all."""
    pooled: tuple[Place, ...] = ()
    """Which tokens of each row are taken by what pools the hidden states of this bare encoder; empty: not known."""
    precision: str = "fp32"
    """The number format of matrix products; auto: not chosen yet."""
    compile: CompileSettings | None = None
    cuda_graphs: bool = False
    """Whether training passes on a GPU are launched as one; not with what compiles, recomputes or offloads them."""
    checkpointing: Literal["blocks", "selective", "theirs"] | None = None
    """What is recomputed in backward; theirs: the blocks of a packed model in which transformers' own switch is on, now
    or later."""
    weights_come_and_go: bool = False
    """Whether a block has its weights only while it computes, forward or backward (zero_stage 3)."""
    names: tuple[str, ...] = ()
    """The methods that are asked for by name."""
    freeze_layers: int | None = None
    """How many blocks are not trained, from the first on, with the embeddings; None: all are trained."""
    offload: bool = False
    """Whether activations wait in the host's memory for backward."""


def have_graphs() -> bool:
    """Return whether this machine has a device with graphs."""
    import torch

    return torch.cuda.is_available()


def may_use_graphs(args: Any) -> bool:
    """Return whether these arguments, of a command or of whet.Trainer, let passes on a GPU be launched as one.

    What is compiled, recomputed or offloaded runs launch by launch.
    """
    others = args.gradient_checkpointing or args.torch_compile or getattr(args, "activation_offload", False)
    return getattr(args, "cuda_graphs", True) and not others


def method_settings(args: TrainingArguments, *, operators: Literal["auto"] | None) -> MethodSettings:
    """Return what a training run asks of the methods."""
    backend, mode = args.torch_compile_backend or DEFAULT_BACKEND, args.torch_compile_mode
    return MethodSettings(
        operators=operators,
        row_gradients=True,
        weights_come_and_go=stage_of_run(args) == 3 and args.world_size > 1,
        names=tuple(args.methods),
        last_block=args.last_block_tokens,
        precision=args.precision,
        compile=CompileSettings(backend=backend, mode=mode) if args.torch_compile else None,
        cuda_graphs=may_use_graphs(args) and have_graphs(),
        checkpointing=args.checkpointing_policy if args.gradient_checkpointing else None,
        freeze_layers=args.freeze_layers,
        offload=args.activation_offload,
    )
