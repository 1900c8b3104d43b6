"""`accelerate launch`: its options, and the keys of its configuration file, which have the same names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from whet.config.settings import nearest
from whet.migrate.draft import Draft, Status
from whet.migrate.shell import Word

Act = Callable[[Draft, str, Word], None]
Item = tuple[str, str, Word]
"""Name, how it was written, value."""


def _says(status: Status, why: str) -> Act:
    return lambda draft, text, _: draft.say(text, status, why)


def _becomes(option: str, why: str = "", words: Mapping[str, str] | None = None) -> Act:
    """Return what makes an option of whet of a value, in the words of a table if there is one."""

    def act(draft: Draft, text: str, value: Word) -> None:
        meant = value.text if words is None else words.get(value.text.lower())
        if value.text == "auto":
            draft.say(text, "done", "it takes the value of the script's option")
        elif meant is None:
            known = ", ".join(words or ())
            draft.say(text, "refused", f"whet takes {known}: use one of these, or leave it out")
        else:
            draft.say(text, "translated", why, draft.put(option, value if words is None else meant))

    return act


def _if_on(act: Act, off_why: str = "it is off") -> Act:
    """Return what does something only for a value that switches on."""

    def checked(draft: Draft, text: str, value: Word) -> None:
        if value.text.lower() in _OFF:
            draft.say(text, "no effect", off_why)
        else:
            act(draft, text, value)

    return checked


_OFF = ("", "false", "no", "none", "null", "0")
_TRUE = {"true": "true", "yes": "true", "1": "true"}


def _total(draft: Draft, text: str, value: Word) -> None:
    draft.ranks.total, draft.ranks.per_host = value, None
    draft.say(text, "translated", "ranks in all; whet launch counts those of a host", "whet launch")


def _launch(option: str) -> Act:
    def act(draft: Draft, text: str, value: Word) -> None:
        draft.ranks.options[option] = value
        draft.say(text, "translated", "", f"whet launch --{option} {value.text}")

    return act


def _machines(draft: Draft, text: str, value: Word) -> None:
    if value.text == "1":
        draft.say(text, "done", "one machine")
    elif "hostfile" in draft.ranks.options:
        draft.ranks.n_hosts = value
        draft.say(text, "translated", "accelerate starts mpirun with the hosts of the file", "whet launch --hostfile")
    else:
        _launch("nnodes")(draft, text, value)


def _of_machines(option: str) -> Act:
    """Return what names something that counts on several machines alone."""

    def act(draft: Draft, text: str, value: Word) -> None:
        if "nnodes" in draft.ranks.options or (draft.ranks.n_hosts is not None and option == "master_addr"):
            _launch(option)(draft, text, value)
        elif draft.ranks.n_hosts is not None:
            draft.say(text, "done", "whet launch numbers the hosts of the file, and finds a free port")
        else:
            draft.say(text, "done", "ranks of one machine meet on 127.0.0.1")

    return act


def _precision(draft: Draft, text: str, value: Word) -> None:
    named = {"bf16": "bf16", "fp16": "fp16", "no": "fp32"}.get(value.text.lower())
    if named is None:
        draft.say(text, "refused", "whet computes in fp32, bf16, fp16 and int8: use --precision with one of these")
    elif "precision" in draft.options or {"bf16", "fp16"} & draft.options.keys():
        draft.say(text, "done", "the options of the script say it too")
    elif named == "fp32":
        draft.say(text, "done", "fp32 or bf16, whatever is faster on this machine: --precision fp32 keeps to fp32")
    else:
        draft.say(text, "translated", "", draft.put("precision", named))


def _offload(draft: Draft, text: str, value: Word) -> None:
    if value.text.lower() in _OFF:
        draft.say(text, "no effect", "nothing is offloaded")
    elif draft.on_cpu:
        draft.say(text, "no effect", "on CPUs weights and the optimizer's state are in the host's memory already")
    elif value.text.lower() in ("cpu", "true"):
        draft.say(text, "translated", "for GPUs", draft.put("offload", "params" if "param" in text else "optimizer"))
    else:
        draft.say(text, "refused", "whet offloads to the host's memory alone: write cpu, or leave it out")


def _deepspeed_file(draft: Draft, text: str, value: Word) -> None:
    draft.say(text, "translated", "whet migrate FILE explains its keys", draft.put("deepspeed", value))


def _dynamo(draft: Draft, text: str, value: Word) -> None:
    if value.text.lower() in (*_OFF, "eager"):
        draft.say(text, "no effect", "nothing is compiled")
    else:
        draft.say(text, "translated", "", draft.put("torch_compile_backend", value.text.lower()))


_KIND = {
    "no": ("done", "one process"),
    "multi_cpu": ("done", "whet launch starts ranks on CPUs"),
    "multi_gpu": ("done", "ranks of machines with GPUs use them, unless --use_cpu is given"),
    "deepspeed": ("done", "zero_stage and the options below say what ranks share"),
    "fsdp": ("done", "fsdp and the options below say what ranks share"),
}


def _kind(draft: Draft, text: str, value: Word) -> None:
    status, why = _KIND.get(value.text.lower(), ("refused", f"whet has {', '.join(_KIND)}: choose one of these"))
    draft.say(text, "refused" if status == "refused" else "done", why)
    if value.text.lower() == "fsdp" and not {"fsdp", "zero_stage"} & draft.options.keys():
        draft.put("fsdp", "full_shard")


_STRATEGIES = {
    "full_shard": "full_shard", "1": "full_shard", "shard_grad_op": "shard_grad_op", "2": "shard_grad_op",
    "true": "full_shard", "false": "shard_grad_op",
}  # fmt: skip
_BY_BLOCK = _says("done", "each block of a model is shared by itself")
_BY_TORCH = _says("done", "torch's fully_shard decides it")
_FILES = _says("done", "checkpoints are the files of one process")
_ENGINE = _says("no effect", "it tunes DeepSpeed's engine: name its file in --deepspeed to use that")
_ONE_LOCAL = _says("done", "a run is on this machine, or on the hosts that whet launch is given")
_HERE = _says("no effect", "it says how accelerate starts, and whet launch has its own way")
_NO_TPU = _if_on(_says("refused", "whet runs on CPUs and NVIDIA's GPUs: leave it out"))

_ACTS: Mapping[str, Act] = {
    "compute_environment": _ONE_LOCAL,
    "distributed_type": _kind,
    "cpu": _if_on(_becomes("use_cpu", words=_TRUE)),
    "use_cpu": _if_on(_becomes("use_cpu", words=_TRUE)),
    "mixed_precision": _precision,
    "num_processes": _total,
    "num_machines": _machines,
    "machine_rank": _of_machines("node_rank"),
    "main_process_ip": _of_machines("master_addr"),
    "main_process_port": _of_machines("master_port"),
    "num_cpu_threads_per_process": _says("done", "whet launch counts the cores of each rank"),
    "enable_cpu_affinity": _says("done", "whet launch binds each rank to the cores of its part of the machine"),
    "max_restarts": _launch("max_restarts"),
    "log_dir": _launch("log_dir"),
    "mpirun_hostfile": _launch("hostfile"),
    "mpirun_ccl": _says("no effect", "ranks exchange over gloo; Intel's oneCCL bindings for PyTorch are archived"),
    "ipex": _says("no effect", "Intel's extension for PyTorch is archived; whet has its own CPU path"),
    "use_xpu": _if_on(_says("refused", "whet runs on CPUs and NVIDIA's GPUs: leave it out")),
    "gpu_ids": _says("done", "CUDA_VISIBLE_DEVICES chooses among GPUs"),
    **dict.fromkeys(("multi_gpu", "quiet", "debug", "same_network", "rdzv_backend", "rdzv_conf", "role", "tee",
                     "monitor_interval", "main_training_function", "no_python", "downcast_bf16", "use_deepspeed",
                     "deepspeed_multinode_launcher", "deepspeed_hostfile", "deepspeed_exclusion_filter",
                     "deepspeed_inclusion_filter", "zero3_init_flag"), _HERE),
    **dict.fromkeys(("tpu", "tpu_use_cluster", "tpu_use_sudo", "tpu_env", "tpu_name", "tpu_zone", "use_megatron_lm",
                     "use_parallelism_config"), _NO_TPU),
    # compiling
    "dynamo_backend": _dynamo,
    "dynamo_mode": _if_on(_becomes("torch_compile_mode")),
    "dynamo_use_regional_compilation": _says("done", "each block of a model is compiled by itself"),
    **dict.fromkeys(("dynamo_use_fullgraph", "dynamo_use_dynamic"),
                    _says("done", "one graph of a block serves all lengths")),
    # DeepSpeed
    "zero_stage": _becomes("zero_stage", "what ranks share; --deepspeed FILE runs DeepSpeed's own engine"),
    "deepspeed_config_file": _deepspeed_file,
    "gradient_accumulation_steps": _becomes("gradient_accumulation_steps"),
    "gradient_clipping": _becomes("max_grad_norm"),
    "offload_optimizer_device": _offload,
    "offload_param_device": _offload,
    **dict.fromkeys(("offload_optimizer_nvme_path", "offload_param_nvme_path"),
                    _if_on(_says("no effect", "whet offloads to the host's memory alone"))),
    "zero3_save_16bit_model": _FILES,
    "deepspeed_moe_layer_cls_names": _ENGINE,
    # FSDP
    "use_fsdp": _if_on(_becomes("fsdp", words={"true": "full_shard"})),
    "fsdp_version": _BY_TORCH,
    "fsdp_sharding_strategy": _becomes("fsdp", words=_STRATEGIES),
    "fsdp_reshard_after_forward": _becomes("fsdp", words=_STRATEGIES),
    "fsdp_offload_params": _offload,
    "fsdp_activation_checkpointing": _if_on(_becomes("gradient_checkpointing", words=_TRUE)),
    **dict.fromkeys(("fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap", "fsdp_min_num_params"), _BY_BLOCK),
    **dict.fromkeys(("fsdp_backward_prefetch", "fsdp_backward_prefetch_policy", "fsdp_forward_prefetch",
                     "fsdp_use_orig_params", "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states",
                     "fsdp_activation_checkpointing_offload"), _BY_TORCH),
    "fsdp_state_dict_type": _FILES,
}  # fmt: skip
_ALONE = {"cpu", "multi_gpu", "tpu", "use_deepspeed", "use_fsdp", "use_megatron_lm", "use_parallelism_config", "quiet",
          "enable_cpu_affinity", "same_network", "no_python", "downcast_bf16", "debug", "use_xpu", "ipex",
          "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation"}  # fmt: skip
FLAGS: Mapping[str, int] = {**{name: 0 if name in _ALONE else 1 for name in _ACTS}, "config_file": 1}
"""Option of accelerate launch -> the words that follow it."""
_SECTIONS = ("deepspeed_config", "fsdp_config", "dynamo_config", "mpirun_config", "ipex_config")
_MARKS = {"compute_environment", "distributed_type", "num_machines", "machine_rank", "main_training_function"}
_ON_GPUS = {"multi_gpu", "use_deepspeed", "use_fsdp"}
"""Options of accelerate launch that start one process for each GPU."""
_ORDER = ("cpu", "use_cpu", "mpirun_hostfile", "num_machines")
"""What others depend on."""


def is_config(found: Mapping[str, Any]) -> bool:
    """Return whether a file holds a configuration of accelerate."""
    return bool(_MARKS & found.keys())


def translate_flags(draft: Draft, given: Sequence[Item], *, nested: bool) -> None:
    """Read the options of accelerate launch, and the configuration that they complete; `nested`: mpirun starts it."""
    items = {name: (name, text, value) for name, text, value in given}
    named = items.pop("config_file", None)
    path = _own_config() if named is None else Path(named[2].text).expanduser()
    config: dict[str, Any] = {}
    if path is not None and path.is_file():
        draft.say(str(path) if named is None else named[1], "translated", "accelerate reads it: its values follow")
        config = _read(path)
    elif named is not None:
        draft.say(named[1], "refused", "the file is not here: run whet migrate where it is, or on the file itself")
    every = {item[0]: item for item in _items(config)} | items
    if nested:
        every.pop("num_processes", None)
    _apply(draft, [*every.values()])
    if not every and not nested:
        draft.say("accelerate launch", "translated", "one process, as without a configuration", "whet")


def translate_config(draft: Draft, found: Mapping[str, Any]) -> None:
    """Read a configuration file of accelerate."""
    _apply(draft, list(_items(found)))


def _apply(draft: Draft, items: Sequence[Item]) -> None:
    draft.ranks.launched = True
    on = {name for name, _, value in items if value.text.lower() not in _OFF}
    if "num_processes" not in on and not draft.ranks.total:
        _usual_number(draft, on)
    for name, text, value in sorted(items, key=lambda item: _ORDER.index(item[0]) if item[0] in _ORDER else 9):
        act = _ACTS.get(name)
        if act is not None:
            act(draft, text, value)
            continue
        like = nearest(name, [*_ACTS])
        draft.say(text, "refused", f"did you mean {like}?" if like else "whet does not know it: leave it out")
    ranks = draft.ranks
    nodes = ranks.options.get("nnodes") or ranks.n_hosts or (Word.of(1) if "hostfile" in ranks.options else None)
    if ranks.total is not None and nodes is not None and ranks.total.text.isdigit() and nodes.text.isdigit():
        ranks.per_host = Word.of(max(int(ranks.total.text) // int(nodes.text), 1))


def _usual_number(draft: Draft, on: Set[str]) -> None:
    """Start as many ranks as accelerate does without a number: one for each GPU, or one process."""
    if _ON_GPUS & on and not {"cpu", "use_cpu"} & on:
        draft.ranks.per_host = Word.of("auto")
        why = "one rank for each NUMA node; accelerate starts one for each GPU"
        draft.say("(no num_processes)", "translated", why, "whet launch --nproc_per_node auto")
    else:
        draft.ranks.per_host = Word.of(1)


def _items(found: Mapping[str, Any]) -> Iterator[Item]:
    for name, value in found.items():
        if name in _SECTIONS:
            yield from _items(value or {})
        elif isinstance(value, (list, dict)) and not value:
            continue
        elif value is not None:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            yield name, f"{name}: {text}", Word.of(text)


def _read(path: Path) -> dict[str, Any]:
    from whet.config.command_line import read_config

    return read_config(str(path))


def _own_config() -> Path | None:
    """Return the user's own configuration, which accelerate launch reads if none is named."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", f"{cache}/huggingface")
    path = Path(home).expanduser() / "accelerate" / "default_config.yaml"
    return path if path.is_file() else None
