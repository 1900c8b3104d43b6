"""Rules about how a model computes: number formats, torch.compile, methods asked for by name."""

from collections.abc import Mapping
from typing import Any

from whet.config.fields import TrainingFields
from whet.config.method_names import method_files, names_to_ask_for
from whet.config.rules.ranges import Rule, at_least, broken_if, excludes, only_with
from whet.errors import Problem

_SWITCHES = ("bf16", "fp16")


def resolve_precision(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return precision, bf16 and fp16, each filled in from the others; the rules report contradictions.

    bf16 false without a precision means fp32, because auto could choose bf16 otherwise.
    """
    on = [name for name in _SWITCHES if values[name]]
    precision = values["precision"]
    if precision == "auto" and len(on) == 1:
        precision = on[0]
    elif precision == "auto" and not on and values["bf16"] is False:
        precision = "fp32"
    decided = precision != "auto"
    filled = {name: precision == name if decided and values[name] is None else values[name] for name in _SWITCHES}
    return {"precision": precision, **filled}


def switch_agrees(name: str) -> Rule:
    """Return the rule that the ecosystem's switch of a format agrees with precision."""

    def rule(args: TrainingFields) -> Problem | None:
        said = getattr(args, name)
        if args.precision == "auto" or said is None or said == (args.precision == name):
            return None
        return Problem(
            what=f"precision and {name} contradict each other",
            got=f"precision={args.precision}, {name}={said}",
            why=f"--{name} means --precision {name}, and a run computes in one precision",
            fix=f"keep --precision alone, or --{name} alone; for dataclasses.replace: {name}=None and a new precision",
        )

    rule.__name__ = f"{name}_agrees_with_precision"
    return rule


PRECISION_RULES: tuple[Rule, ...] = (
    broken_if(
        "one_half_precision",
        ("bf16", "fp16"),
        lambda args: args.bf16 and args.fp16,
        what="bf16 and fp16 are both asked for",
        why="the products of a run compute in one number format",
        fix="keep --bf16, which needs no loss scaling, or --fp16",
    ),
    switch_agrees("bf16"),
    switch_agrees("fp16"),
    broken_if(
        "tf32_has_a_gpu",
        ("tf32", "use_cpu"),
        lambda args: args.tf32 and args.use_cpu,
        what="tf32 is asked for on the CPU",
        why="TF32 is a format of the tensor cores of NVIDIA's GPUs, and would do nothing here",
        fix="leave out one of --tf32 and --use_cpu",
    ),
    excludes(
        "int8_is_not_compiled",
        "precision=int8",
        ("torch_compile",),
        why="the compiler cannot look into whet's products of 8 bits, and would run its own in fp32",
        fix="leave --torch_compile out, or use --precision fp32",
    ),
)


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


COMPILE_RULES: tuple[Rule, ...] = (
    backend_is_not_gone,
    broken_if(
        "mode_is_inductors",
        ("torch_compile_mode", "torch_compile_backend"),
        lambda args: (
            args.torch_compile_mode is not None and args.torch_compile_backend not in (DEFAULT_BACKEND, None, *GONE)
        ),
        what="torch_compile_mode goes with the backend inductor",
        why="the other backends have no modes",
        fix="leave --torch_compile_mode out, or use --torch_compile_backend inductor",
    ),
    broken_if(
        "compiled_blocks_are_whole",
        ("torch_compile", "checkpointing_policy"),
        lambda args: args.torch_compile and args.gradient_checkpointing and (args.checkpointing_policy == "selective"),
        what="selective checkpointing does not go with torch_compile",
        why="a compiled block chooses itself what it keeps for backward and what it computes again",
        fix="use --checkpointing_policy blocks, or leave --torch_compile out",
    ),
    excludes(
        "offload_meets_no_graph",
        "activation_offload",
        ("torch_compile",),
        why="a compiled block keeps its activations itself, and they would stay on the GPU",
        fix="leave one of the two out; --gradient_checkpointing saves memory in compiled models, too",
    ),
)


def methods_are_known(args: TrainingFields) -> Problem | None:
    """Some methods have a setting of their own; the others are asked for by name."""
    strange = [name for name in args.methods if name not in names_to_ask_for()]
    if not strange:
        return None
    reasons = [_why(name, method_files()[name].asked_by) for name in strange if name in method_files()]
    return Problem(
        what="methods names what cannot be asked for by name",
        got=", ".join(strange),
        why="; ".join(reasons) or "no file of whet/methods has a card with this name",
        fix=f"use some of {', '.join(names_to_ask_for())}, or leave --methods out",
    )


def _why(name: str, setting: str) -> str:
    if setting == "default":
        return f"{name} is applied without being asked for"
    return f"{name} has a setting of its own, --{setting}"


METHOD_RULES: tuple[Rule, ...] = (
    methods_are_known,
    at_least("freeze_layers", 0, "blocks are counted from the input"),
    only_with(
        "some_layers_are_frozen",
        "freeze_layers of 1 or more",
        ("cache_frozen_trunk",),
        is_on=lambda args: bool(args.freeze_layers),
        why="it keeps the results of layers that are not trained",
        fix="add --freeze_layers 4, or leave --cache_frozen_trunk out",
    ),
    excludes(
        "kept_states_are_those_of_passes",
        "cache_frozen_trunk",
        ("torch_compile", "precision=int8", "padding_in_loss", "label_smoothing_factor", "deepspeed"),
        why="the hidden states of the frozen layers are kept as whet's operators compute them in fp32 or bf16, without "
        "padding tokens",
    ),
)
