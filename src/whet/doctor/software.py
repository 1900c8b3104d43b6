"""Versions, optional packages, threads and GPUs, as torch sees them."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from whet import __version__
from whet.doctor.findings import Software
from whet.hardware import openmp

OPTIONAL = ("tensorboard", "wandb", "mlflow", "trackio", "bitsandbytes", "torchao", "flash_attn", "peft")
SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
)


def examine() -> Software:
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
