"""Variables of the environment: what each does for a run of whet, with `whet launch` and without it.

A row of the table says what becomes of a variable, or of all whose names begin so. `translate` reads the variables of
a draft once its launcher is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from whet.config import secrets
from whet.config.environment import VARIABLES as OWN
from whet.migrate.draft import Draft, Status, shown
from whet.migrate.shell import Live, Word


class Fact(NamedTuple):
    """What becomes of a variable."""

    status: Status
    why: str
    alone: Status | None = None
    """The status without whet launch, if it is another one."""
    why_alone: str = ""


_TORCH = "torch and its libraries read it"
_HUB = "the hub's libraries read it"
_BINDS = Fact(
    "done", "whet launch binds each rank to physical cores, one thread each, and leaves out what binds single threads",
    "kept", "the OpenMP library reads it",
)  # fmt: skip
_THREADS = Fact("done", "whet launch counts the cores of each rank", "kept", _TORCH)
_MEET = Fact("done", "ranks of one machine meet on 127.0.0.1, at a free port", "kept", "whet reads it, as torchrun's")
_RANK = Fact("done", "whet launch numbers the ranks", "kept", "whet reads it, as torchrun's")
_NO_MPI = Fact("no effect", "whet starts ranks without MPI, over ssh on several hosts, and they exchange over gloo")
_NO_CCL = Fact("no effect", "ranks exchange over gloo; Intel's oneCCL bindings for PyTorch are archived")
_INTERFACE = Fact(
    "done", "whet launch finds the interface that leads to the other ranks", "kept", "ranks exchange over it"
)
_NO_ACCELERATE = Fact("no effect", "whet's commands do not run on accelerate")
_CACHE = "transformers 5 does not read it any more"

FACTS: Mapping[str, Fact] = {
    # threads and memory
    "OMP_NUM_THREADS": _THREADS,
    "MKL_NUM_THREADS": _THREADS,
    "OMP_PROC_BIND": _BINDS,
    "OMP_PLACES": _BINDS,
    "GOMP_CPU_AFFINITY": _BINDS,
    "KMP_AFFINITY": _BINDS,
    "KMP_HW_SUBSET": _BINDS,
    "KMP_BLOCKTIME": Fact("kept", "Intel's OpenMP library reads it; whet launch sets it to 1 if it is not given"),
    "KMP_*": Fact("kept", "Intel's OpenMP library reads it"),
    "OMP_*": Fact("kept", "the OpenMP library reads it"),
    "MALLOC_*": Fact("kept", "the memory allocator reads it"),
    "TCMALLOC_*": Fact("kept", "the memory allocator reads it"),
    # how ranks meet and exchange
    "CCL_WORKER_AFFINITY": Fact(
        "done",
        "whet launch keeps cores free for the exchange (--kept_free_cores)",
        "no effect",
        "a process alone exchanges nothing",
    ),
    "CCL_*": _NO_CCL,
    "FI_*": _NO_CCL,
    "UCX_*": _NO_CCL,
    "I_MPI_PIN*": Fact("done", "whet launch binds each rank to physical cores", "no effect", _NO_MPI.why),
    "I_MPI_*": _NO_MPI,
    "OMPI_*": _NO_MPI,
    "PMI_*": _NO_MPI,
    "PMIX_*": _NO_MPI,
    "MPICH_*": _NO_MPI,
    "HYDRA_*": _NO_MPI,
    "MV2_*": _NO_MPI,
    "MASTER_ADDR": _MEET,
    "MASTER_PORT": _MEET,
    "RANK": _RANK,
    "WORLD_SIZE": _RANK,
    "LOCAL_RANK": _RANK,
    "LOCAL_WORLD_SIZE": _RANK,
    "NODE_RANK": _RANK,
    "NUM_PROCESSES": Fact("no effect", "nothing but the script that sets it reads it"),
    "NUM_PROCESSES_PER_NODE": Fact("no effect", "nothing but the script that sets it reads it"),
    "GLOO_SOCKET_IFNAME": _INTERFACE,
    "TP_SOCKET_IFNAME": _INTERFACE,
    "NCCL_*": Fact("kept", "NCCL reads it, on GPUs"),
    "LOGLEVEL": Fact("no effect", "it is the level of torchrun's log; --log_level is that of a run"),
    "PET_*": Fact("no effect", "whet launch has options of its own", "kept", "torchrun reads it"),
    "TORCHELASTIC_*": Fact("no effect", "whet launch has options of its own", "kept", "torchrun reads it"),
    # libraries
    "IPEX_*": Fact("no effect", "Intel's extension for PyTorch is archived; whet has its own CPU path"),
    "ACCELERATE_*": _NO_ACCELERATE,
    "WANDB_DISABLED": Fact("done", "a run reports to no tracker unless --report_to names one"),
    "DISABLE_MLFLOW_INTEGRATION": Fact("done", "a run reports to no tracker unless --report_to names one"),
    "COMET_MODE": Fact("done", "a run reports to no tracker unless --report_to names one"),
    "TOKENIZERS_PARALLELISM": Fact("kept", "the tokenizers read it"),
    "HF_*": Fact("kept", _HUB),
    "HUGGINGFACE_*": Fact("kept", _HUB),
    "TRANSFORMERS_*": Fact("kept", "transformers reads it"),
    "WANDB_LOG_MODEL": Fact("no effect", "whet sends no model, and refuses it with --report_to wandb"),
    "WANDB_WATCH": Fact("no effect", "whet sends the gradient's norm, and refuses it with --report_to wandb"),
    "HF_MLFLOW_LOG_ARTIFACTS": Fact("no effect", "whet sends no model, and refuses it with --report_to mlflow"),
    "TENSORBOARD_LOGGING_DIR": Fact("kept", "whet writes TensorBoard's files there; add --report_to tensorboard"),
    "WANDB_*": Fact("kept", "the tracker reads it; add --report_to wandb"),
    "MLFLOW_*": Fact("kept", "the tracker reads it; add --report_to mlflow"),
    "ATEN_*": Fact("kept", _TORCH),
    "DNNL_*": Fact("kept", _TORCH),
    "ONEDNN_*": Fact("kept", _TORCH),
    "MKL_*": Fact("kept", _TORCH),
    "TORCH*": Fact("kept", _TORCH),
    "PYTORCH_*": Fact("kept", _TORCH),
}
"""Name, or its beginning and a star -> what becomes of it. The first that fits counts; others are passed on."""
_OTHERS = Fact("kept", "whet passes it on")
MOVED = {
    "TRANSFORMERS_CACHE": "HF_HUB_CACHE",
    "PYTORCH_TRANSFORMERS_CACHE": "HF_HUB_CACHE",
    "PYTORCH_PRETRAINED_BERT_CACHE": "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE": "HF_HUB_CACHE",
}
"""Older variables -> the one that today's libraries read."""
_LIBRARIES = {"tcmalloc": ("memory_allocator", "tcmalloc"), "jemalloc": ("memory_allocator", "jemalloc"),
              "libiomp5": ("openmp", "intel")}  # fmt: skip
"""Part of the name of a library in LD_PRELOAD -> the option of whet launch that preloads it."""
_FIRST = ("LD_PRELOAD", "ACCELERATE_USE_CPU", "CUDA_VISIBLE_DEVICES")
"""Variables that decide about others."""


def translate(draft: Draft) -> None:
    """Read the variables that the run was started with."""
    names = sorted(draft.given_variables, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    for name in names:
        value = draft.given_variables[name]
        given = shown(f"{name}={value.text}", secret=bool(secrets.in_variables([f"{name}={value.text}"])))
        special = _SPECIAL.get(name)
        if special is None or not special(draft, given, value):
            _by_table(draft, name, given, value)
    if draft.ranks.through_whet and draft.ranks.over_ssh:
        from whet.launch.over_ssh import PREFIXES

        draft.ranks.env += [name for name in draft.variables if not name.startswith(PREFIXES)]


def _by_table(draft: Draft, name: str, given: str, value: Word) -> None:
    fact = fact_of(name)
    is_alone = fact.alone is not None and not draft.ranks.through_whet
    status, why = (fact.alone or fact.status, fact.why_alone) if is_alone else (fact.status, fact.why)
    if name in MOVED:
        _keep(draft, given, MOVED[name], value, "translated", _CACHE)
    elif name in OWN and value.text not in OWN[name] and not value.live:
        draft.say(given, "refused", f"it takes {' or '.join(OWN[name])}: set one of these, or unset it")
    elif name.startswith("NCCL_") and draft.on_cpu:
        draft.say(given, "no effect", "NCCL connects GPUs, and the run stays on CPUs")
    elif status == "kept":
        _keep(draft, given, name, value, "kept", why)
    else:
        draft.say(given, status, why)


def fact_of(name: str) -> Fact:
    """Return the row of a variable."""
    if name in FACTS:
        return FACTS[name]
    return next((fact for begin, fact in FACTS.items() if begin[-1] == "*" and name.startswith(begin[:-1])), _OTHERS)


def is_read(name: str) -> bool:
    """Return whether a library, a launcher or whet reads a variable of this name."""
    fact = fact_of(name)
    return name in _SPECIAL or name in MOVED or (fact is not _OTHERS and fact.status != "no effect")


def _keep(draft: Draft, given: str, name: str, value: Word, status: Status, why: str) -> None:
    """Start the command of whet with the variable; a secret stays where it is set now."""
    if secrets.in_variables([f"{name}={value.text}"]):
        draft.say(
            given, "kept", "whet reads it from the environment; set it there as before: others can read a command"
        )
        return
    draft.variables[name] = value
    draft.say(given, status, why, f"{name}={value.text}" if status == "translated" else "")


def _preloaded(draft: Draft, given: str, value: Word) -> bool:
    """Name the libraries that whet launch preloads; others stay."""
    if draft.ranks.stays or (draft.ranks.outer and not draft.ranks.launched):
        return False
    options: dict[str, str] = {}
    others: list[str | Live] = []
    for part in _listed(value):
        found = next((option for name, option in _LIBRARIES.items() if name in part.text), None)
        if found is not None:
            options[found[0]] = found[1]
        elif part.text.strip("${}") != "LD_PRELOAD" and part.text:
            others += [":", *part.parts] if others else part.parts
    if not options:
        return False
    draft.ranks.launched = draft.ranks.binds = True
    draft.ranks.options |= {name: Word.of(value) for name, value in options.items()}
    becomes = " ".join(f"--{name} {value}" for name, value in options.items())
    if others:
        draft.variables["LD_PRELOAD"] = Word(tuple(others), quoted=True)
        becomes += f" LD_PRELOAD={draft.variables['LD_PRELOAD'].text}"
    why = "whet launch finds the libraries on each host, and verifies that the running process has them"
    draft.say(given, "translated", why, f"whet launch {becomes}")
    return True


def _listed(value: Word) -> list[Word]:
    """Return the files of LD_PRELOAD, which colons or spaces separate."""
    found, rest = list[Word](), value
    while (pair := rest.cut(":")) or (pair := rest.cut(" ")):
        found.append(pair[0])
        rest = pair[1]
    return [*found, rest]


def _address(draft: Draft, given: str, value: Word) -> bool:
    name = "master_addr" if "ADDR" in given.partition("=")[0] else "master_port"
    if not (draft.ranks.through_whet and draft.ranks.several_hosts):
        return False
    draft.ranks.options.setdefault(name, value)
    draft.say(given, "translated", "", f"whet launch --{name} {value.text}")
    return True


def _workers(draft: Draft, given: str, value: Word) -> bool:
    if not draft.ranks.through_whet:
        draft.say(given, "no effect", "a process alone exchanges nothing, and needs no threads for it")
        return True
    draft.ranks.options["kept_free_cores"] = value
    why = "cores of each rank that are left for the exchange; without it, 1 of a rank with 8 or more"
    draft.say(given, "translated", why, f"whet launch --kept_free_cores {value.text}")
    return True


def _gpus(draft: Draft, given: str, value: Word) -> bool:
    if value.text in ("", "-1"):
        draft.say(given, "translated", "no GPU is to be used", draft.put("use_cpu", "true"))
    elif draft.on_cpu:
        draft.say(given, "no effect", "the run stays on CPUs")
    else:
        return False
    return True


def _use_cpu(draft: Draft, given: str, value: Word) -> bool:
    if value.text.lower() not in ("true", "1", "yes"):
        return False
    draft.say(given, "translated", "", draft.put("use_cpu", "true"))
    return True


def _precision(draft: Draft, given: str, value: Word) -> bool:
    if value.text not in ("bf16", "fp16", "no"):
        return False
    becomes = draft.put("precision", "fp32" if value.text == "no" else value.text)
    draft.say(given, "translated", "", becomes)
    return True


_SPECIAL = {
    "LD_PRELOAD": _preloaded,
    "MASTER_ADDR": _address,
    "MASTER_PORT": _address,
    "CCL_WORKER_COUNT": _workers,
    "CUDA_VISIBLE_DEVICES": _gpus,
    "ACCELERATE_USE_CPU": _use_cpu,
    "ACCELERATE_MIXED_PRECISION": _precision,
}
"""Variables whose values become options: each returns whether it has done so; else its row of the table counts."""
