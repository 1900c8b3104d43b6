"""Builds the native operators in place: `python -m whet.kernels.build`, with cmake and a C++ compiler."""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from whet.errors import ConfigError, WhetError
from whet.kernels.native_file import FILE_NAME

_PACKAGE = Path(__file__).parent


def build(source: Path | None = None) -> Path:
    """Build the library from the source tree that contains CMakeLists.txt; return its path in this folder.

    Takes about half a minute on one core. A library in use is replaced and not overwritten.
    """
    source = source or _PACKAGE.parents[2]
    cmake = _cmake(source)
    with tempfile.TemporaryDirectory(prefix="whet-build-") as folder:
        _run([cmake, "-S", str(source), "-B", folder])
        _run([cmake, "--build", folder, "--parallel"])
        built = Path(folder) / FILE_NAME
        if not built.exists():
            raise ConfigError(
                what="the native operators were not built",
                why="cmake found no C++ compiler that it can use (GCC or Clang)",
                fix="install g++ or set CXX, then run: python -m whet.kernels.build",
            )
        staged = _PACKAGE / f".{FILE_NAME}.new"
        shutil.copy2(built, staged)
        return staged.replace(_PACKAGE / FILE_NAME)


def _cmake(source: Path) -> str:
    if not (source / "CMakeLists.txt").exists():
        raise ConfigError(
            what="there is no source tree to build from",
            got=str(source),
            why="only a checkout or an editable install contains CMakeLists.txt; a wheel contains the library",
            fix="install from the source tree of whet: pip install --force-reinstall --no-deps PATH_OF_THE_TREE",
        )
    cmake = shutil.which("cmake")
    if cmake is None:
        raise ConfigError(what="cmake is missing", why="it runs the build", fix="run: pip install cmake")
    return cmake


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (our own cmake calls)
    if done.returncode:
        raise WhetError(
            what="the build of the native operators failed",
            got=(done.stdout + done.stderr)[-2000:],
            why=f"{' '.join(command)} ended with {done.returncode}",
            fix="correct what the compiler reports, or run whet without the operators: plain torch is used instead",
        )


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
