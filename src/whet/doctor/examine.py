"""What the doctor examines: one record for each part, and the function that fills it in."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import whet.kernels
from whet import __version__
from whet.doctor.arguments import DoctorArguments
from whet.hardware import cpu, gpu, memory, openmp
from whet.hardware.cgroup import ROOT
from whet.hardware.cpu import features


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Processor, memory and disk, as this process may use them."""

    processor: str
    usable_cpus: int
    """Logical CPUs that this process may run on."""
    usable_cores: int
    """Threads that can compute at once: physical cores of these CPUs, or less if a cgroup grants less."""
    quota_cores: float | None
    """Cores that the cgroup grants; None: no limit."""
    numa_nodes: int
    """NUMA nodes with a CPU that this process may run on; 0 if unknown."""
    instruction_sets: list[str]
    lacking: list[str]
    load: float | None
    """Threads that wanted to run in the last minute, on the complete machine."""
    memory_bytes: int | None
    memory_limit_bytes: int | None
    """The cgroup's limit; None: no limit."""
    memory_available_bytes: int | None
    huge_pages: str | None
    folder: str
    """The current folder."""
    disk_free_bytes: int
    nvidia_gpus: list[str]
    """NVIDIA GPUs in the machine, whether or not torch can use them."""


@dataclass(frozen=True, kw_only=True)
class Software:
    """The installation, and how torch uses the machine."""

    python: str
    whet: str
    torch: str | None
    """None: not installed."""
    torch_error: str | None
    """Why torch cannot compute here; None if it can."""
    transformers: str | None
    packages: dict[str, str]
    """Optional packages that are installed, with their versions."""
    not_installed: list[str]
    threads: int | None
    """Threads of torch's operators; None: torch cannot say."""
    settings: dict[str, str]
    """Environment variables that control the threads, if they are set."""
    openmp: list[str]
    """The OpenMP libraries that this process has loaded."""
    gpus: list[str]
    """GPUs that torch can use."""


@dataclass(frozen=True, kw_only=True)
class Native:
    """The library of native operators, and what is needed to build it."""

    path: str | None
    """The library's file; None: no library."""
    isa: str | None
    """The instruction set in use; None: the library cannot be used."""
    best_isa: str
    """The best instruction set of the library that this processor supports."""
    error: str | None
    """Why an existing library cannot be used."""
    asked_isa: str | None
    """The environment variable WHET_ISA."""
    asked_kernels: str | None = None
    """The environment variable WHET_KERNELS; None: not set."""
    source_tree: str | None
    """Where it can be built from."""
    cmake: str | None
    compiler: str | None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured now, with torch's threads; None for what this torch cannot compute."""

    shape: tuple[int, int, int]
    """Rows, inputs and outputs of the products."""
    fp32_mm_gflops: float
    fp32_onednn_gflops: float | None
    bf16_mm_gflops: float | None
    bf16_onednn_gflops: float | None
    bf16_widened_gflops: float | None
    """Of bf16 that whet widens to fp32; None if it leaves bf16 to torch."""
    int8_gops: float | None
    copy_gb_per_s: float
    """Bytes read and written."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All findings; None: not examined."""

    machine: Machine | None
    software: Software | None
    native: Native
    rates: Rates | None


def examine_machine(root: Path = ROOT) -> Machine:
    """Return what this process may use of the machine; `root` contains /proc and /sys."""
    cpus = cpu.usable_cpus()
    has, lacks = cpu.instruction_sets(root)
    return Machine(
        processor=cpu.model_name(root),
        usable_cpus=len(cpus),
        usable_cores=cpu.usable_cores(root, cpus),
        quota_cores=cpu.quota_cores(root),
        numa_nodes=sum(1 for node in cpu.numa_nodes(root).values() if node & cpus),
        instruction_sets=has,
        lacking=lacks,
        load=cpu.load(),
        memory_bytes=memory.machine_bytes(root),
        memory_limit_bytes=memory.cgroup_bytes(root),
        memory_available_bytes=memory.available_bytes(root),
        huge_pages=memory.huge_pages(root),
        folder=str(Path.cwd()),
        disk_free_bytes=shutil.disk_usage(Path.cwd()).free,
        nvidia_gpus=gpu.nvidia_gpus(root),
    )


OPTIONAL = ("tensorboard", "wandb", "mlflow", "trackio", "bitsandbytes", "torchao", "flash_attn", "peft")
SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
)


def examine_software() -> Software:
    """Return the installation. Loads torch; if that fails, the record says why."""
    packages = {name: version_of(name) for name in OPTIONAL}
    error = torch_error()
    return Software(
        python=platform.python_version(),
        whet=__version__,
        torch=version_of("torch"),
        torch_error=error,
        transformers=version_of("transformers"),
        packages={name: found for name, found in packages.items() if found is not None},
        not_installed=[name for name, found in packages.items() if found is None],
        threads=None if error else _threads(),
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
        openmp=openmp.libraries(),
        gpus=[] if error else _gpus(),
    )


def torch_error() -> str | None:
    """Return why torch cannot compute a product here; None if it can."""
    try:
        import torch

        found = float((torch.ones(16, 16) @ torch.ones(16, 16)).sum())
    except Exception as error:  # a broken installation may raise anything
        return f"{type(error).__name__}: {error}"
    return None if found == 16**3 else f"a product of ones gave {found}, not {16**3}"


def version_of(package: str) -> str | None:
    """Return the installed version, None if there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _gpus() -> list[str]:
    import torch

    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in found]


_V3 = {"avx2", "fma", "bmi1", "bmi2"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_MOST_ERROR = 1e-4
"""fp32 operators of a hundred terms are exact to about 1e-6; a larger error is not rounding."""
_COMPILERS = ("c++", "g++", "clang++")


def examine_native(root: Path = ROOT) -> Native:
    """Return the state of the library. Loads it, after torch, and compares it with plain torch."""
    path, isa, error = _try()
    trees = [Path(place).parents[2] for place in whet.kernels.__path__]  # an editable install has two folders
    tree = next((one for one in trees if (one / "CMakeLists.txt").exists()), None)
    compilers = (os.environ.get("CXX"), *_COMPILERS)
    return Native(
        path=path,
        isa=isa,
        best_isa=best_isa(root),
        error=error,
        asked_isa=os.environ.get("WHET_ISA"),
        asked_kernels=os.environ.get("WHET_KERNELS") or None,
        source_tree=None if tree is None else str(tree),
        cmake=shutil.which("cmake"),
        compiler=next((found for name in compilers if name and (found := shutil.which(name))), None),
    )


def best_isa(root: Path = ROOT) -> str:
    """Return the best of the library's instruction sets that this processor has."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64"):
        return "neon" if machine in ("aarch64", "arm64") else "baseline"
    has = features(root)
    return "x86-64-v4" if has >= _V4 else "x86-64-v3" if has >= _V3 else "x86-64"


def _try() -> tuple[str | None, str | None, str | None]:
    """Return the library's path, its instruction set, and its error."""
    try:
        from whet.kernels import library
    except Exception as error:  # torch, which must be loaded first
        return None, None, f"torch cannot be loaded: {error}"
    path = library.find()
    if path is None:
        return None, None, None
    try:
        isa = library.load(path).isa
    except (OSError, AttributeError, ValueError) as error:
        return str(path), None, str(error)
    error = _largest_error()
    wrong = None if error < _MOST_ERROR else f"its results are off by {error:.1e}"
    return str(path), None if wrong else isa, wrong


def _largest_error() -> float:
    """Return the largest difference of two operators from plain torch in float64."""
    import torch

    from whet.kernels.activation import bias_act, bias_act_reference
    from whet.kernels.norm import Norm, add_norm, add_norm_reference

    x = torch.linspace(-3, 3, 6400).view(64, 100)
    norm = Norm(torch.linspace(0, 1, 100), torch.linspace(1, 0, 100), 1e-5)
    exact_norm = Norm(norm.weight.double(), norm.weight.double().flip(0), 1e-5)
    found = [bias_act(x, None, "gelu"), add_norm(x, x, norm)[0]]
    exact = [bias_act_reference(x.double(), None, "gelu"), add_norm_reference(x.double(), x.double(), exact_norm)[0]]
    return max(float((ours - theirs).abs().max()) for ours, theirs in zip(found, exact, strict=True))


SHAPE = (1024, 768, 3072)
"""A thousand tokens through the wider linear layer of a BERT-base-size block."""
_COPY_BYTES = 128 * 2**20
_MOST_S = 0.3
"""Repetitions of each product; the best one counts, because other work only slows them down."""


def measure_rates(*, has_native: bool) -> Rates:
    """Return the rates; takes about two seconds. `has_native`: whether the native operators can be used."""
    import torch

    from whet.kernels.matrix import is_widened, widened_product

    began_s = time.perf_counter()
    n, inputs, outputs = SHAPE
    with torch.no_grad():
        x, w, bias = torch.randn(n, inputs), torch.randn(outputs, inputs), torch.zeros(outputs)
        x16, w16, bias16 = x.bfloat16(), w.bfloat16(), bias.bfloat16()
        x8, w8 = ((one * 20).clamp(-127, 127).to(torch.int8) for one in (x, w))
        return Rates(
            shape=SHAPE,
            fp32_mm_gflops=_gflops(lambda: torch.mm(x, w.T)) or 0.0,
            fp32_onednn_gflops=_gflops(lambda: _onednn(x, w, bias)),
            bf16_mm_gflops=_gflops(lambda: torch.mm(x16, w16.T)),
            bf16_onednn_gflops=_gflops(lambda: _onednn(x16, w16, bias16)),
            bf16_widened_gflops=_gflops(lambda: widened_product(x16, w, bias)) if has_native and is_widened() else None,
            int8_gops=_gflops(lambda: torch.ops.aten._int_mm(x8, w8.T)),
            copy_gb_per_s=_copy_gb_per_s(),
            seconds=round(time.perf_counter() - began_s, 2),
        )


def _onednn(x: Any, w: Any, bias: Any) -> Any:
    """The same product in oneDNN; torch.mm uses MKL in fp32."""
    import torch

    return torch.ops.mkldnn._linear_pointwise(x, w, bias, "none", [], "")


def _gflops(product: Callable[[], Any]) -> float | None:
    try:
        best_s = _best_s(product)
    except (RuntimeError, NotImplementedError, AttributeError):  # missing in this torch or on this processor
        return None
    n, inputs, outputs = SHAPE
    return round(2 * n * inputs * outputs / best_s / 1e9, 1)


def _copy_gb_per_s() -> float:
    import torch

    source, target = torch.ones(_COPY_BYTES // 4), torch.zeros(_COPY_BYTES // 4)
    return round(2 * _COPY_BYTES / _best_s(lambda: target.copy_(source)) / 1e9, 1)


def _best_s(work: Callable[[], Any]) -> float:
    """Return the shortest time of one call, after a warm-up call; a long warm-up is the only call, and counts."""
    began_s, best_s = time.perf_counter(), float("inf")
    for number in range(20):
        start_s = time.perf_counter()
        work()
        end_s = time.perf_counter()
        long = end_s - start_s > _MOST_S
        if number or long:
            best_s = min(best_s, end_s - start_s)
        if (number and end_s - began_s > _MOST_S) or long:
            break
    return best_s


def examine(asked: DoctorArguments) -> Findings:
    """Return the requested findings; the native library is loaded before the OpenMP libraries are counted."""
    its_library = examine_native()
    if asked.kernels:
        return Findings(machine=None, software=None, native=its_library, rates=None)
    installed = examine_software()
    measured = None
    if asked.measure and installed.torch_error is None:
        measured = measure_rates(has_native=its_library.isa is not None)
    return Findings(machine=examine_machine(), software=installed, native=its_library, rates=measured)
