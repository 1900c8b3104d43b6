"""`whet doctor`: what this machine and this installation can do, what is broken, and what could be better.

One record for each part that is examined, the advice that follows from them, and both as text or JSON.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, distributions, requires, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import whet.kernels
from whet import __version__, json_output
from whet.config import environment
from whet.errors import EXIT_OK, EXIT_OTHER, Problem
from whet.hardware import cpu, gpu, memory, openmp
from whet.hardware.cgroup import ROOT
from whet.hardware.cpu import features
from whet.system import is_linux

if TYPE_CHECKING:
    from whet.own_loop.examine import ModelFindings
    from whet.plan.rates import Kind


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
    cuda: str | None = None
    """The version of CUDA that torch was built for; None: a build for CPUs, or for other devices."""
    cuda_bytes: int = 0
    """Size of torch and of the packages that only its build for CUDA needs; 0 without one."""
    onednn: str | None = None
    """The version of oneDNN in torch; None: torch does not say."""
    too_old: list[str] = field(default_factory=list)
    """Packages of another version than whet supports, with both."""


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
    training_rates: dict[str, Any] | None = None
    """How fast the parts of a training run here, as `plan/rates.py` writes them; None: not asked for."""


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
        cuda=None if error else _cuda(),
        cuda_bytes=0 if error or _cuda() is None else _size_of_cuda(),
        onednn=None if error else _onednn_version(),
        too_old=unsupported(requires_of("whet-train")),
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


def _cuda() -> str | None:
    import torch

    return torch.version.cuda


def _size_of_cuda() -> int:
    """Return the bytes of torch and of NVIDIA's packages, as their installation listed them."""
    names = {one: (one.metadata["Name"] or "").lower() for one in distributions()}
    parts = [one for one, name in names.items() if re.match(r"(?:torch|triton)$|(?:nvidia|cuda)-", name)]
    return sum(file.size or 0 for one in parts for file in one.files or ())


def _onednn_version() -> str | None:
    import torch

    found = re.search(r"(?:MKL-DNN|oneDNN) v([\d.]+)", torch.__config__.show())
    return found[1] if found else None


def requires_of(package: str) -> list[str]:
    """Return the requirements of an installed package; none if it is not installed."""
    try:
        return requires(package) or []
    except PackageNotFoundError:
        return []


def unsupported(requirements: Sequence[str]) -> list[str]:
    """Return the installed packages that do not meet these requirements, those of extras left out."""
    from packaging.requirements import Requirement

    asked, here = [Requirement(one) for one in requirements], {"extra": ""}
    found = {
        one.name: (one.specifier, version_of(one.name))
        for one in asked
        if one.marker is None or one.marker.evaluate(here)
    }
    return [
        f"{name} {installed} (whet needs {specifier})"
        for name, (specifier, installed) in found.items()
        if installed is not None and not specifier.contains(installed, prereleases=True)
    ]


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


def examine(*, kernels: bool, measure: bool, training: bool = False) -> Findings:
    """Return the findings; the native library is loaded before the OpenMP libraries are counted.

    `training`: the rates of a training's parts too; they are measured once, for about ten seconds.
    """
    native = examine_native()
    if kernels:
        return Findings(machine=None, software=None, native=native, rates=None)
    software, rates, of_training = examine_software(), None, None
    if measure and software.torch_error is None:
        rates = measure_rates(has_native=native.isa is not None)
    if training and software.torch_error is None and software.transformers is not None:
        of_training = _training_rates()
    return Findings(
        machine=examine_machine(), software=software, native=native, rates=rates, training_rates=of_training
    )  # fmt: skip


def _training_rates() -> dict[str, Any]:
    from whet.plan import rates

    return rates.as_json(rates.of_this_machine(lambda text: print(text, file=sys.stderr, flush=True)))


_LITTLE_MEMORY_BYTES = 2 * 2**30
_LITTLE_DISK_BYTES = 5 * 2**30
"""A few checkpoints of a BERT-base-size model: weights and AdamW's two moments, 1.3 GB each."""
_INSTALL_CPU_TORCH = (
    "pip install {0} --index-url https://download.pytorch.org/whl/cpu (uv: uv pip install {0} --torch-backend=cpu)"
)
"""PyTorch's default build for Linux brings CUDA along."""
_REINSTALL_TORCH = (
    "run: pip install --force-reinstall torch, without a GPU with --index-url https://download.pytorch.org/whl/cpu "
    "(uv: uv pip install --reinstall torch --torch-backend=auto)"
)
_SLOW_FP16_ONEDNN = "3.12.3"
"""Of torch 2.14; 3.12.4 is right again. https://github.com/pytorch/pytorch/issues/193951"""
_PLAIN_TORCH = "plain torch runs instead, which is slower in all parts between the matrix products"


def broken_parts(found: Findings) -> list[Problem]:
    """Return the problems that break training; any of them makes the exit code 1."""
    software = [] if found.software is None else [*_broken_software(found.software)]
    torch_fails = found.software is not None and found.software.torch_error is not None
    return software if torch_fails else [*software, *_broken_native(found.native)]


def advice_for(found: Findings) -> list[Problem]:
    """Return what costs speed or may end a run, although training works."""
    machine, software = found.machine, found.software
    of_machine = [] if machine is None else [*_about_machine(machine)]
    of_torch = [] if machine is None or software is None else [*_about_torch(machine, software)]
    of_threads = [] if machine is None or software is None else [*_about_threads(machine, software)]
    return [*_about_native(found.native), *of_machine, *of_torch, *of_threads]


def _broken_software(software: Software) -> Iterator[Problem]:
    if software.torch_error is not None:
        yield Problem(
            what="torch cannot compute here",
            got=software.torch_error,
            why="every model runs on it",
            fix=_REINSTALL_TORCH,
        )
    if software.transformers is None:
        yield Problem(
            what="transformers is missing",
            why="models and tokenizers come from it",
            fix="run: pip install transformers",
        )
    if software.too_old:
        yield Problem(
            what="packages are not of a version that whet supports",
            got=", ".join(software.too_old),
            why="whet is tested with these versions alone; something that was installed later has changed them",
            fix="install whet again, which brings its versions; what needs the others gets an environment of its own",
        )


def _broken_native(native: Native) -> Iterator[Problem]:
    if native.error is not None and native.path is None:
        yield Problem(
            what="the native operators cannot be loaded",
            got=native.error,
            why="they are loaded after torch, because they share its threads",
            fix=_REINSTALL_TORCH,
        )
    elif native.error is not None:
        yield Problem(
            what=f"the native operators in {native.path} cannot be used",
            got=native.error,
            why=_PLAIN_TORCH,
            fix=_how_to_build(native),
        )


def _about_native(native: Native) -> Iterator[Problem]:
    known = environment.VARIABLES["WHET_ISA"]
    if native.path is None and native.error is None and is_linux():
        yield Problem(what="there are no native operators", why=_PLAIN_TORCH, fix=_how_to_build(native))
    if native.asked_kernels == "reference":
        yield Problem(
            what="the native operators are turned off",
            got="WHET_KERNELS=reference",
            why=_PLAIN_TORCH,
            fix="run: unset WHET_KERNELS",
        )
    if native.asked_isa not in (None, *known):
        yield Problem(
            what="WHET_ISA names no instruction set",
            got=native.asked_isa,
            why=f"it is one of {', '.join(known)}; any other value has no effect",
            fix="run: unset WHET_ISA",
        )
    if native.isa not in (None, native.best_isa) and native.asked_isa in ("v3", "baseline"):
        yield Problem(
            what=f"the native operators use {native.isa}",
            got=f"WHET_ISA={native.asked_isa}",
            why=f"this processor has {native.best_isa}, with wider registers",
            fix="run: unset WHET_ISA",
        )


def _how_to_build(native: Native) -> str:
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


def _about_machine(machine: Machine) -> Iterator[Problem]:
    free = machine.memory_available_bytes
    if free is not None and free < _LITTLE_MEMORY_BYTES:
        yield Problem(
            what="little memory is free",
            got=_size(free),
            why="weights, gradients and moments of a BERT-base-size model take 1.6 GiB, and its batches take more",
            fix="end other programs, raise the container's limit, or lower --per_device_train_batch_size",
        )
    if machine.disk_free_bytes < _LITTLE_DISK_BYTES:
        yield Problem(
            what="little space is free in the current folder",
            got=f"{_size(machine.disk_free_bytes)} in {machine.folder}",
            why="a checkpoint of a BERT-base-size model takes 1.3 GB, and a run keeps all of them by default",
            fix="add --save_total_limit 2, or use another disk in --output_dir",
        )
    if machine.huge_pages == "never":
        yield Problem(
            what="transparent huge pages are switched off",
            got="never",
            why="no program can request them, so large tensors are in pages of 4 KiB",
            fix="run as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    if machine.numa_nodes > 1:
        yield Problem(
            what="this process spans several NUMA nodes",
            got=machine.numa_nodes,
            why="access to another node's memory is slower than to the own node's; what is faster depends on the model",
            fix="compare with one node: numactl --cpunodebind=0 --membind=0 whet qa ...",
        )


def _about_torch(machine: Machine, software: Software) -> Iterator[Problem]:
    if software.cuda is not None and not machine.nvidia_gpus and not software.gpus:
        yield Problem(
            what="torch is a build for CUDA on a machine without a GPU",
            got=f"torch {software.torch}, CUDA {software.cuda}: {_size(software.cuda_bytes)} with its packages",
            why="the build for CPUs computes the same, and takes a fraction of the disk, the image and the download",
            fix="run: pip freeze | grep -oE '^(nvidia|cuda|triton)[^= ]*' | xargs pip uninstall -y torch; then: "
            + _INSTALL_CPU_TORCH.format(f"torch=={(software.torch or '').partition('+')[0]}"),
        )
    if software.onednn == _SLOW_FP16_ONEDNN and any(name.startswith("AMX") for name in machine.instruction_sets):
        yield Problem(
            what="this torch multiplies fp16 a thousand times slower than fp32",
            got=f"torch {software.torch} with oneDNN {software.onednn}, a processor with AMX",
            why="oneDNN falls back to its reference loops there (pytorch issue 193951); bf16 and fp32 are not affected",
            fix="leave --fp16 out, and load models that are stored in fp16 as float32; or use torch 2.13",
        )


def _about_threads(machine: Machine, software: Software) -> Iterator[Problem]:
    granted = "" if machine.quota_cores is None else f" (the cgroup grants {machine.quota_cores:g})"
    cores = f"{_count(machine.usable_cores, 'core')}{granted}"
    n_threads = machine.usable_cores if software.threads is None else software.threads
    if n_threads > machine.usable_cores:
        yield Problem(
            what="torch starts more threads than it has cores",
            got=f"{n_threads} threads, {cores}",
            why="an operator waits for its last thread, and threads that share a core take turns",
            fix=f"run: export OMP_NUM_THREADS={machine.usable_cores}",
        )
    if n_threads < machine.usable_cores:
        asked = [f"{name}={value}" for name, value in software.settings.items() if name.endswith("NUM_THREADS")]
        yield Problem(
            what="torch leaves cores idle",
            got=f"{n_threads} of {cores} ({' and '.join(asked) or 'torch chose so'})",
            why="a process trains on as many cores as it has threads",
            fix=f"run: export OMP_NUM_THREADS={machine.usable_cores}, unless the other cores are for other work",
        )
    policy = software.settings.get("OMP_WAIT_POLICY", "").lower()
    has_quota = machine.quota_cores is not None and machine.quota_cores < machine.usable_cpus
    busy = machine.load is not None and machine.load > machine.usable_cores + 0.5
    if policy != "passive" and (software.threads or 1) > 1 and (has_quota or busy):
        shared = f"a load of {machine.load:.1f}" if busy else f"a quota of {machine.quota_cores:g} cores"
        yield Problem(
            what="OpenMP's threads wait busily on a shared machine",
            got=f"{shared}, OMP_WAIT_POLICY={policy or 'unset'}",
            why="a waiting thread occupies its core for a while, and the thread that it waits for may not get one",
            fix="run: export OMP_WAIT_POLICY=passive",
        )
    if len(software.openmp) > 1:
        yield Problem(
            what="several OpenMP libraries are loaded",
            got=", ".join(software.openmp),
            why="each has its own threads, and all of them wait on the same cores",
            fix="check LD_PRELOAD; run: pip install --force-reinstall torch, then python -m whet.kernels.build",
        )
    if machine.nvidia_gpus and not software.gpus and software.torch_error is None:
        yield Problem(
            what="torch cannot use the GPU of this machine",
            got=f"{', '.join(machine.nvidia_gpus)}; torch {software.torch}",
            why="this build of torch is without CUDA, or the driver is older than it needs",
            fix="run: pip install --force-reinstall torch (the build with CUDA); nvidia-smi shows the driver's version",
        )


_LABEL = 14
_WIDEST = 110
Row = tuple[str, str]


def _as_json(found: Findings, broken: Sequence[Problem], advice: Sequence[Problem]) -> dict[str, Any]:
    """Return all findings and the advice for the JSON object."""
    parts = {name: part for name, part in asdict(found).items() if part is not None}
    problems = [asdict(one) | {"broken": one in broken} for one in [*broken, *advice]]
    return parts | {"ok": not broken, "advice": problems}


def as_text(found: Findings, broken: Sequence[Problem], advice: Sequence[Problem]) -> str:
    """Return the findings as lines of label and value, and the advice below."""
    lines = [line for row in _rows(found) for line in _wrapped(row)]
    for kind, problems in (("broken", broken), ("advice", advice)):
        for problem in problems:
            lines += ["", f"{kind}: {problem}"]
    if not broken and not advice:
        lines += ["", "nothing to fix"]
    return "\n".join(lines)


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
    if found.training_rates is not None:
        yield from _of_training(found.training_rates)


def _machine(machine: Machine) -> Iterator[Row]:
    quota = "" if machine.quota_cores is None else f", the cgroup grants {machine.quota_cores:g}"
    nodes = f", {_count(machine.numa_nodes, 'NUMA node')}" if machine.numa_nodes else ""
    load = "" if machine.load is None else f", load {machine.load:.1f}"
    yield "processor", machine.processor
    yield "cores", f"{machine.usable_cores} for this process ({machine.usable_cpus} CPUs{quota}{nodes}{load})"
    lacks = f"; lacks {', '.join(machine.lacking)}" if machine.lacking else ""
    if machine.instruction_sets or machine.lacking:
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
        why = "cannot be used" if native.error else "not built" if is_linux() else "for Linux alone"
        yield "operators", f"plain torch (the native ones: {why})"
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


def _of_training(found: dict[str, Any]) -> Iterator[Row]:
    from whet.plan.rates import FORMATS, from_json

    rates = from_json(found)
    load = "" if rates.load is None else f" at load {rates.load:.1f}"
    yield "training", f"{rates.key.threads} threads, measured in {rates.took_s:.0f} s{load}; for whet plan --hardware"
    known: tuple[tuple[Kind, float], ...] = (("encoder", 7_077_888), ("decoder", 12_582_912))
    for kind, weights in known:
        times = {
            form: sum(rates.block_s(kind, form, part, weights, 512) for part in ("forward", "backward"))
            for form in FORMATS
        }
        shown = ", ".join(f"{1e3 * seconds:,.0f} ms in {form}" for form, seconds in times.items())
        yield f"  {kind}", f"a block of {weights / 1e6:.0f}M weights, forward and backward over 512 tokens: {shown}"


def _wrapped(row: Row) -> list[str]:
    width = min(shutil.get_terminal_size((_WIDEST, 24)).columns, _WIDEST)
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


def run_doctor(model: str, *, kernels: bool, measure: bool, training: bool = False) -> int:
    """Print what this machine can do; return 0, or 1 if torch, transformers or the native library is broken."""
    if model:
        _show_model(model)
        return EXIT_OK
    found = examine(kernels=kernels, measure=measure, training=training)
    broken, advice = broken_parts(found), advice_for(found)
    if json_output.is_wanted():
        json_output.add(**_as_json(found, broken, advice))
    else:
        print(as_text(found, broken, advice))
    return EXIT_OTHER if broken else EXIT_OK


def _show_model(model: str) -> None:
    from whet.own_loop import examine as own_loop

    found = own_loop.examine(model)
    if json_output.is_wanted():
        json_output.add(**asdict(found))
    else:
        print("\n".join(line for row in _model(found) for line in _wrapped(row)))
