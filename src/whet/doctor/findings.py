"""What the doctor examines: one record for each part, filled in by the other modules of this folder."""

from __future__ import annotations

from dataclasses import dataclass


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
