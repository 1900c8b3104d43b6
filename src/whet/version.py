"""The version of whet, and the name under which it is installed."""

from pathlib import Path

DISTRIBUTION = "whet-train"
"""The name of the distribution. On package indexes, `whet` is somebody else's package."""
__version__ = "0.1.0"


def require_own_files() -> None:
    """Raise ImportError where the other project's `whet` is installed into the same folder: files of both are mixed."""
    others = [path.name for path in Path(__file__).parents[1].glob("whet-*.dist-info")]
    if others:
        raise ImportError(
            f"files of {DISTRIBUTION} and of another project's package are mixed in this installation\n"
            f"  got: {others[0]}\n"
            "  why: both bring a package named whet, and the one that was installed last has overwritten the other\n"
            f"  fix: `pip uninstall whet`, then `pip install --force-reinstall --no-deps {DISTRIBUTION}`"
        )
