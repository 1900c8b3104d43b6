"""The doctor's findings as one screen of text, or as JSON."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from whet.doctor.findings import Findings, Machine, Native, Rates, Software
from whet.errors import Problem

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
