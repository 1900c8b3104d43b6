"""`whet doctor`: examine, advise, print."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from whet.config import environment
from whet.doctor.arguments import DoctorArguments
from whet.doctor.examine import Findings, Machine, Native, Rates, Software, examine
from whet.errors import EXIT_OK, EXIT_OTHER, Problem

if TYPE_CHECKING:  # it imports torch
    from whet.own_loop.examine import ModelFindings

_LABEL = 14
_WIDEST = 110
Row = tuple[str, str]


def as_json(found: Findings, broken: Sequence[Problem], advice: Sequence[Problem]) -> str:
    """Return all findings and the advice as one JSON object."""
    parts = {name: part for name, part in asdict(found).items() if part is not None}
    problems = [asdict(one) | {"broken": one in broken} for one in [*broken, *advice]]
    return json.dumps(parts | {"ok": not broken, "advice": problems}, indent=2, default=str)


def as_text(found: Findings, broken: Sequence[Problem], advice: Sequence[Problem]) -> str:
    """Return the findings as lines of label and value, and the advice below."""
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    lines = [line for row in _rows(found) for line in _wrapped(row, width)]
    for kind, problems in (("broken", broken), ("advice", advice)):
        for problem in problems:
            lines += ["", f"{kind}: {problem}"]
    if not broken and not advice:
        lines += ["", "nothing to fix"]
    return "\n".join(lines)


def model_as_json(found: ModelFindings) -> str:
    """Return the findings about a model as one JSON object."""
    return json.dumps(asdict(found), indent=2)


def model_as_text(found: ModelFindings) -> str:
    """Return the findings about a model as lines of label and value."""
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
    return "\n".join(line for row in _model(found) for line in _wrapped(row, width))


def _model(found: ModelFindings) -> Iterator[Row]:
    yield "model", f"{found.model} ({found.model_class}, model_type {found.model_type})"
    yield "padding", f"{'runs without' if found.packed else 'runs with'} padding: {found.how}"
    yield "head", found.head
    counted = ", ".join(f"{n} {name}" for name, n in found.fused.items())
    yield "fused", f"{counted or 'nothing'}" + (f" ({found.isa})" if found.isa and counted else "")
    by_reason: dict[str, list[str]] = {}
    for name, why in found.called.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        yield "not fused", f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"


def _rows(found: Findings) -> Iterator[Row]:
    if found.machine is not None:
        yield from _machine(found.machine)
    if found.software is not None:
        yield from _software(found.software)
    yield from _native(found.native)
    if found.rates is not None:
        yield from _rates(found.rates)


def _machine(machine: Machine) -> Iterator[Row]:
    quota = "" if machine.quota_cores is None else f", the cgroup grants {machine.quota_cores:g}"
    nodes = f", {_count(machine.numa_nodes, 'NUMA node')}" if machine.numa_nodes else ""
    load = "" if machine.load is None else f", load {machine.load:.1f}"
    yield "processor", machine.processor
    yield "cores", f"{machine.usable_cores} for this process ({machine.usable_cpus} CPUs{quota}{nodes}{load})"
    lacks = f"; lacks {', '.join(machine.lacking)}" if machine.lacking else ""
    yield "instructions", f"{', '.join(machine.instruction_sets) or 'none that training uses'}{lacks}"
    yield "memory", _memory(machine)
    yield "disk", f"{_size(machine.disk_free_bytes)} free in {machine.folder}"
    if machine.nvidia_gpus:
        yield "GPU", ", ".join(machine.nvidia_gpus)


def _memory(machine: Machine) -> str:
    limit = "" if machine.memory_limit_bytes is None else f", the cgroup allows {_size(machine.memory_limit_bytes)}"
    pages = f"; transparent huge pages: {machine.huge_pages}" if machine.huge_pages else ""
    return f"{_size(machine.memory_bytes)}, {_size(machine.memory_available_bytes)} free{limit}{pages}"


def _software(software: Software) -> Iterator[Row]:
    torch, transformers = software.torch or "missing", software.transformers or "missing"
    yield "software", f"whet {software.whet}, Python {software.python}, torch {torch}, transformers {transformers}"
    installed = ", ".join(f"{name} {version}" for name, version in software.packages.items())
    yield "packages", f"{installed or 'none of the optional ones'}; not installed: {', '.join(software.not_installed)}"
    if software.threads is not None:
        settings = ", ".join(f"{name}={value}" for name, value in software.settings.items()) or "no settings"
        yield "threads", f"{software.threads} ({settings})"
    yield "OpenMP", ", ".join(software.openmp) or "not loaded"
    yield "torch's GPUs", ", ".join(software.gpus) or "none"


def _native(native: Native) -> Iterator[Row]:
    if native.asked_kernels == "reference":
        yield "operators", f"plain torch (WHET_KERNELS=reference; native: {native.isa or 'none'})"
    elif native.isa is not None:
        yield "operators", f"native, {native.isa}, results right"
        yield "library", str(native.path)
    else:
        yield "operators", f"plain torch (the native ones: {'cannot be used' if native.error else 'not built'})"
    builds = ", ".join(found for found in (native.cmake, native.compiler) if found) or "no cmake, no compiler"
    yield "to build", f"{native.source_tree or 'no source tree'}; {builds}"


def _rates(rates: Rates) -> Iterator[Row]:
    shape = " x ".join(map(str, rates.shape))
    yield "products", f"of {shape}, in billions of operations a second:"
    yield "  fp32", f"{rates.fp32_mm_gflops:,.0f} by torch.mm, {_rate(rates.fp32_onednn_gflops)} by oneDNN"
    bf16 = max(rates.bf16_mm_gflops or 0, rates.bf16_onednn_gflops or 0, rates.bf16_widened_gflops or 0)
    fp32 = max(rates.fp32_mm_gflops, rates.fp32_onednn_gflops or 0)
    ratio = f"; {bf16 / fp32:.1f}x fp32: {'--bf16 can pay' if bf16 > fp32 else 'leave --bf16 out'}" if bf16 else ""
    widened = f", {_rate(rates.bf16_widened_gflops)} by whet in fp32" if rates.bf16_widened_gflops else ""
    by_torch = f"{_rate(rates.bf16_mm_gflops)} by torch.mm, {_rate(rates.bf16_onednn_gflops)} by oneDNN"
    yield "  bf16", f"{by_torch}{widened}{ratio}"
    yield "  int8", _rate(rates.int8_gops)
    yield "memory copy", f"{rates.copy_gb_per_s:.1f} GB/s, read and written (measured in {rates.seconds:.1f} s)"


def _wrapped(row: Row, width: int) -> list[str]:
    start = f"{row[0]:<{_LABEL}}"
    return textwrap.wrap(
        row[1], max(width, 40), initial_indent=start, subsequent_indent=" " * _LABEL, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _rate(gflops: float | None) -> str:
    return "not possible" if gflops is None else f"{gflops:,.0f}"


def _size(n_bytes: int | None) -> str:
    return "an unknown amount" if n_bytes is None else f"{n_bytes / 2**30:.1f} GiB"


def _count(n: int, what: str) -> str:
    return f"{n} {what}" + ("" if n == 1 else "s")


_GIB = 2**30
_LITTLE_MEMORY_BYTES = 2 * _GIB
_LITTLE_DISK_BYTES = 5 * _GIB
"""A few checkpoints of a BERT-base-size model: weights and AdamW's two moments, 1.3 GB each."""
_REINSTALL_TORCH = "run: pip install --force-reinstall torch (on a machine without GPU its CPU build)"
_KNOWN_ISAS = (None, *environment.VARIABLES["WHET_ISA"])


def broken_parts(found: Findings) -> list[Problem]:
    """Return the problems that break training; any of them makes the exit code 1."""
    software = [rule(found.software) for rule in _SOFTWARE_BROKEN] if found.software else []
    torch_fails = found.software is not None and found.software.torch_error is not None
    native = [] if torch_fails else [native_works(found.native)]
    return [problem for problem in [*software, *native] if problem is not None]


def advice_for(found: Findings) -> list[Problem]:
    """Return what costs speed or may end a run, although training works."""
    problems = [rule(found.native) for rule in _NATIVE_RULES]
    if found.machine is not None:
        problems += [rule(found.machine) for rule in _MACHINE_RULES]
    if found.machine is not None and found.software is not None:
        problems += [rule(found.machine, found.software) for rule in _THREAD_RULES]
    return [problem for problem in problems if problem is not None]


def torch_works(software: Software) -> Problem | None:
    """Training needs torch."""
    if software.torch_error is None:
        return None
    return Problem(
        what="torch cannot compute here",
        got=software.torch_error,
        why="every model runs on it",
        fix=_REINSTALL_TORCH,
    )


def transformers_is_there(software: Software) -> Problem | None:
    """Transformers provides the models."""
    if software.transformers is not None:
        return None
    return Problem(
        what="transformers is missing", why="models and tokenizers come from it", fix="run: pip install transformers"
    )


def native_works(native: Native) -> Problem | None:
    """An existing library must be usable."""
    if native.error is None:
        return None
    if native.path is None:
        return Problem(
            what="the native operators cannot be loaded",
            got=native.error,
            why="they are loaded after torch, because they share its threads",
            fix=_REINSTALL_TORCH,
        )
    return Problem(
        what=f"the native operators in {native.path} cannot be used",
        got=native.error,
        why="plain torch runs instead, which is slower in all parts between the matrix products",
        fix=how_to_build(native),
    )


def native_is_there(native: Native) -> Problem | None:
    """Plain torch is slower than the native operators."""
    if native.path is not None or native.error is not None:
        return None
    return Problem(
        what="there are no native operators",
        why="plain torch runs instead, which is slower in all parts between the matrix products",
        fix=how_to_build(native),
    )


def kernels_are_native(native: Native) -> Problem | None:
    """The reference operators are for tests and comparisons."""
    if native.asked_kernels != "reference":
        return None
    return Problem(
        what="the native operators are turned off",
        got="WHET_KERNELS=reference",
        why="plain torch runs instead, which is slower in all parts between the matrix products",
        fix="run: unset WHET_KERNELS",
    )


def isa_is_known(native: Native) -> Problem | None:
    """An unknown value would be ignored silently."""
    if native.asked_isa in _KNOWN_ISAS:
        return None
    return Problem(
        what="WHET_ISA names no instruction set",
        got=native.asked_isa,
        why=f"it is one of {', '.join(environment.VARIABLES['WHET_ISA'])}; any other value has no effect",
        fix="run: unset WHET_ISA",
    )


def isa_is_the_best(native: Native) -> Problem | None:
    """A smaller instruction set is for tests and comparisons."""
    if native.isa in (None, native.best_isa) or native.asked_isa not in ("v3", "baseline"):
        return None
    return Problem(
        what=f"the native operators use {native.isa}",
        got=f"WHET_ISA={native.asked_isa}",
        why=f"this processor has {native.best_isa}, with wider registers",
        fix="run: unset WHET_ISA",
    )


def how_to_build(native: Native) -> str:
    """Return the command that builds the library, and what must be installed for it."""
    if native.source_tree is None:
        return (
            "install a C++ compiler (apt install g++), then install from the source tree of whet: "
            "pip install --force-reinstall --no-deps PATH_OF_THE_TREE"
        )
    missing = ["a C++ compiler (apt install g++)"] if native.compiler is None else []
    missing += ["cmake (pip install cmake)"] if native.cmake is None else []
    first = f"install {' and '.join(missing)}, then " if missing else ""
    return f"{first}run: python -m whet.kernels.build"


def memory_is_free(machine: Machine) -> Problem | None:
    """The kernel kills a run without memory."""
    free = machine.memory_available_bytes
    if free is None or free >= _LITTLE_MEMORY_BYTES:
        return None
    return Problem(
        what="little memory is free",
        got=f"{free / _GIB:.1f} GiB",
        why="weights, gradients and moments of a BERT-base-size model take 1.6 GiB, and its batches take more",
        fix="end other programs, raise the container's limit, or lower --per_device_train_batch_size",
    )


def disk_is_free(machine: Machine) -> Problem | None:
    """Checkpoints need disk space."""
    if machine.disk_free_bytes >= _LITTLE_DISK_BYTES:
        return None
    return Problem(
        what="little space is free in the current folder",
        got=f"{machine.disk_free_bytes / _GIB:.1f} GiB in {machine.folder}",
        why="a checkpoint of a BERT-base-size model takes 1.3 GB, and a run keeps all of them by default",
        fix="add --save_total_limit 2, or use another disk in --output_dir",
    )


def huge_pages_are_allowed(machine: Machine) -> Problem | None:
    """Large tensors in small pages need more address lookups."""
    if machine.huge_pages != "never":
        return None
    return Problem(
        what="transparent huge pages are switched off",
        got="never",
        why="no program can request them, so large tensors are in pages of 4 KiB",
        fix="run as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def one_numa_node(machine: Machine) -> Problem | None:
    """Access to the memory of another node is slower."""
    if machine.numa_nodes < 2:
        return None
    return Problem(
        what="this process spans several NUMA nodes",
        got=machine.numa_nodes,
        why="access to another node's memory is slower than to the own node's; what is faster depends on the model",
        fix="compare with one node: numactl --cpunodebind=0 --membind=0 whet qa ...",
    )


def not_too_many_threads(machine: Machine, software: Software) -> Problem | None:
    """Threads that share a core slow each other down."""
    if software.threads is None or software.threads <= machine.usable_cores:
        return None
    return Problem(
        what="torch starts more threads than it has cores",
        got=f"{software.threads} threads, {_cores(machine)}",
        why="an operator waits for its last thread, and threads that share a core take turns",
        fix=f"run: export OMP_NUM_THREADS={machine.usable_cores}",
    )


def not_too_few_threads(machine: Machine, software: Software) -> Problem | None:
    """Idle cores do not train."""
    if software.threads is None or software.threads >= machine.usable_cores:
        return None
    asked = {name: value for name, value in software.settings.items() if name.endswith("NUM_THREADS")}
    why = " and ".join(f"{name}={value}" for name, value in asked.items()) or "torch chose so"
    return Problem(
        what="torch leaves cores idle",
        got=f"{software.threads} of {_cores(machine)} ({why})",
        why="a process trains on as many cores as it has threads",
        fix=f"run: export OMP_NUM_THREADS={machine.usable_cores}, unless the other cores are for other work",
    )


def waiting_is_passive(machine: Machine, software: Software) -> Problem | None:
    """OpenMP's threads wait by spinning, which takes time from working threads on a shared machine."""
    policy = software.settings.get("OMP_WAIT_POLICY", "").lower()
    quota = machine.quota_cores is not None and machine.quota_cores < machine.usable_cpus
    busy = machine.load is not None and machine.load > machine.usable_cores + 0.5
    if policy == "passive" or (software.threads or 1) < 2 or not (quota or busy):
        return None
    shared = f"a load of {machine.load:.1f}" if busy else f"a quota of {machine.quota_cores:g} cores"
    return Problem(
        what="OpenMP's threads wait busily on a shared machine",
        got=f"{shared}, OMP_WAIT_POLICY={policy or 'unset'}",
        why="a waiting thread occupies its core for a while, and the thread that it waits for may not get one",
        fix="run: export OMP_WAIT_POLICY=passive",
    )


def one_openmp(machine: Machine, software: Software) -> Problem | None:
    """Two pools of threads share the same cores."""
    if len(software.openmp) < 2:
        return None
    return Problem(
        what="several OpenMP libraries are loaded",
        got=", ".join(software.openmp),
        why="each has its own threads, and all of them wait on the same cores",
        fix="check LD_PRELOAD; run: pip install --force-reinstall torch, then python -m whet.kernels.build",
    )


def gpus_are_used(machine: Machine, software: Software) -> Problem | None:
    """A torch build for CPUs cannot use the GPU."""
    if not machine.nvidia_gpus or software.gpus or software.torch_error is not None:
        return None
    return Problem(
        what="torch cannot use the GPU of this machine",
        got=f"{', '.join(machine.nvidia_gpus)}; torch {software.torch}",
        why="this build of torch is without CUDA, or the driver is older than it needs",
        fix="run: pip install --force-reinstall torch (the build with CUDA); nvidia-smi shows the driver's version",
    )


def _cores(machine: Machine) -> str:
    cores = f"{machine.usable_cores} core" + ("s" if machine.usable_cores != 1 else "")
    return cores if machine.quota_cores is None else f"{cores} (the cgroup grants {machine.quota_cores:g})"


_SOFTWARE_BROKEN: tuple[Callable[[Software], Problem | None], ...] = (torch_works, transformers_is_there)
_NATIVE_RULES: tuple[Callable[[Native], Problem | None], ...] = (
    native_is_there,
    kernels_are_native,
    isa_is_known,
    isa_is_the_best,
)
_MACHINE_RULES: tuple[Callable[[Machine], Problem | None], ...] = (
    memory_is_free,
    disk_is_free,
    huge_pages_are_allowed,
    one_numa_node,
)
_THREAD_RULES: tuple[Callable[[Machine, Software], Problem | None], ...] = (
    not_too_many_threads,
    not_too_few_threads,
    waiting_is_passive,
    one_openmp,
    gpus_are_used,
)


def run_doctor(asked: DoctorArguments) -> int:
    """Print what this machine can do; return 0, or 1 if torch, transformers or the native library is broken."""
    if asked.model:
        sys.stdout.write(f"{_about_model(asked)}\n")
        return EXIT_OK
    found = examine(asked)
    broken, more = broken_parts(found), advice_for(found)
    text = as_json(found, broken, more) if asked.json else as_text(found, broken, more)
    sys.stdout.write(f"{text}\n")
    return EXIT_OTHER if broken else EXIT_OK


def _about_model(asked: DoctorArguments) -> str:
    from whet.own_loop import examine as own_loop

    found = own_loop.examine(asked.model)
    return model_as_json(found) if asked.json else model_as_text(found)
