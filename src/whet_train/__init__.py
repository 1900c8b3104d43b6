"""The command `whet`, and the check that the package `whet` is the one that came with it.

On package indexes `whet` is another project's name; the distribution of this one is `whet-train`. Where the other one
is installed too, or a file `whet.py` is found first, `import whet` reads that. This package has a name that nobody else
has, so it can say so.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

_BAD_CONFIG = 78
"""The exit status of whet for settings that cannot be: `EXIT_BAD_CONFIG` of whet.errors, which may not be there."""


def main() -> None:
    """Run the command `whet` with the words of the command line."""
    if other := other_whet():
        sys.exit(other)
    from whet.cli.main import main as command

    command()


def other_whet() -> int:
    """Return 0 if `import whet` reads the package next to this one; otherwise say what it reads, and return 78."""
    own = Path(__file__).parents[1] / "whet" / "__init__.py"
    spec = find_spec("whet")
    found = None if spec is None else spec.origin or ", ".join(spec.submodule_search_locations or ())
    if found and own.exists() and Path(found).exists() and own.samefile(found):
        return 0
    print(  # the words of an error of whet, whose class cannot be imported here
        "whet: error: another package named whet is found before that of whet-train\n"
        f"  got: {found or 'no package of this name'}\n"
        f"  why: the distribution whet-train brings {own.parent}; `whet` on package indexes is another project's\n"
        "  fix: rename the file if it is yours; or `pip uninstall whet`, then "
        "`pip install --force-reinstall --no-deps whet-train`",
        file=sys.stderr,
    )
    return _BAD_CONFIG
