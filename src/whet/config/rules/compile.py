"""The rules about torch.compile: names of backends that are gone, and what does not go with it."""

from collections.abc import Mapping
from typing import Any

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule
from whet.errors import Problem

DEFAULT_BACKEND = "inductor"

GONE: Mapping[str, str] = {
    "nvfuser": "nvFuser left torch with release 2.2; use inductor, which writes its own fused kernels",
    "aot_nvfuser": "nvFuser left torch with release 2.2; use inductor, which writes its own fused kernels",
    "nvprims_nvfuser": "nvFuser left torch with release 2.2; use inductor, which writes its own fused kernels",
    "aot_cudagraphs": "CUDA graphs need a GPU, and this backend is called cudagraphs now; use inductor, on a GPU with "
    "--torch_compile_mode reduce-overhead",
    "aot_inductor": "inductor is the name for training; use that",
    "ofi": "it froze models for TorchScript and served inference alone; use inductor",
    "fx2trt": "TensorRT serves inference alone and cannot train; use inductor",
    "tensorrt": "TensorRT serves inference alone and cannot train; use inductor",
    "torch_tensorrt": "TensorRT serves inference alone and cannot train; use inductor",
    "onnxrt": "ONNX Runtime serves inference alone and left torch's backends; use inductor",
    "ipex": "Intel's extension for PyTorch is archived since March 2026; use inductor, which compiles for CPUs itself",
    "torchxla_trivial": "the XLA backend is called openxla now; use that, with the package torch_xla",
    "torchxla_trace_once": "the XLA backend is called openxla now; use that, with the package torch_xla",
    "aot_torchxla_trivial": "the XLA backend is called openxla now; use that, with the package torch_xla",
    "aot_torchxla_trace_once": "the XLA backend is called openxla now; use that, with the package torch_xla",
    "nnc": "torch's NNC fuser went with TorchScript; use inductor",
    "ts_nvfuser": "nvFuser left torch with release 2.2; use inductor, which writes its own fused kernels",
    "aot_ts_nvfuser": "nvFuser left torch with release 2.2; use inductor, which writes its own fused kernels",
    "ts_nnc": "torch's NNC fuser went with TorchScript; use inductor",
    "hidet": "Hidet serves inference on GPUs alone; use inductor",
}
"""Backends of older guides -> what became of each, and what to use."""


def resolve_compile(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of torch.compile as `transformers` fills them in: a backend or a mode turns it on."""
    backend, mode = values["torch_compile_backend"], values["torch_compile_mode"]
    on = bool(values["torch_compile"] or backend or mode)
    return {"torch_compile": on, "torch_compile_backend": backend or (DEFAULT_BACKEND if on else None)}


def backend_is_not_gone(args: TrainingFields) -> Problem | None:
    """Known before torch is loaded; whether torch knows the others is asked later."""
    name = args.torch_compile_backend
    if name is None or name not in GONE:
        return None
    why, _, fix = GONE[name].partition("; ")
    return Problem(what=f"torch.compile has no backend {name} any more", got=name, why=why, fix=fix)


def mode_is_inductors(args: TrainingFields) -> Problem | None:
    """The other backends would ignore it."""
    if args.torch_compile_mode is None or args.torch_compile_backend in (DEFAULT_BACKEND, None, *GONE):
        return None
    return Problem(
        what="torch_compile_mode goes with the backend inductor",
        got=f"torch_compile_mode={args.torch_compile_mode}, torch_compile_backend={args.torch_compile_backend}",
        why="the other backends have no modes",
        fix="leave --torch_compile_mode out, or use --torch_compile_backend inductor",
    )


def compiled_blocks_are_whole(args: TrainingFields) -> Problem | None:
    """A compiled graph chooses itself what it keeps."""
    if not (args.torch_compile and args.gradient_checkpointing and args.checkpointing_policy == "selective"):
        return None
    return Problem(
        what="selective checkpointing does not go with torch_compile",
        got="torch_compile=true, checkpointing_policy=selective",
        why="a compiled block chooses itself what it keeps for backward and what it computes again",
        fix="use --checkpointing_policy blocks, or leave --torch_compile out",
    )


def offload_meets_no_graph(args: TrainingFields) -> Problem | None:
    """Hooks on saved tensors and compiled graphs are not tried together."""
    if not (args.torch_compile and args.activation_offload):
        return None
    return Problem(
        what="activation_offload does not go with torch_compile",
        got="torch_compile=true, activation_offload=true",
        why="a compiled block keeps its activations itself, and they would stay on the GPU",
        fix="leave one of the two out; --gradient_checkpointing saves memory in compiled models, too",
    )


COMPILE_RULES: tuple[Rule, ...] = (
    backend_is_not_gone,
    mode_is_inductors,
    compiled_blocks_are_whole,
    offload_meets_no_graph,
)
