"""Write docker/requirements.txt: what whet needs besides torch, at the versions of this environment: `make image-pins`.

Run by the Python that the tests ran with, so that the image has what they were run with.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FILE = Path(__file__).resolve().parents[2] / "docker" / "requirements.txt"
EXTRAS = ("peft", "tag")
"""Of whet's own, for tasks and adapters; the others are for trackers, exports and tests."""
HEAD = """\
# What whet needs besides PyTorch, with all that these need, at the versions that the tests ran with (make image-pins).
"""


def main() -> None:
    """Write the pins."""
    found = dict(sorted(needed("whet-train", EXTRAS).items()))
    FILE.write_text(HEAD + "".join(f"{name}=={version}\n" for name, version in found.items()), "utf-8")
    print(f"{FILE.name}: {len(found)} packages")


def needed(name: str, extras: tuple[str, ...] = ()) -> dict[str, str]:
    """Return each package that this one needs, without itself, torch and what torch brings, and its version here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    ahead = [(name, extras)]
    while ahead:
        one = ahead.pop()
        if one in seen:
            continue
        seen.add(one)
        for text in distribution(one[0]).requires or ():
            need = Requirement(text)
            own = canonicalize_name(need.name)
            if own == "torch" or not any(applies(need, extra) for extra in (*one[1], "")):
                continue
            try:
                found[own] = distribution(own).version
            except PackageNotFoundError as error:
                raise SystemExit(f"error: {own} is not installed here, and {one[0]} needs it: make test") from error
            ahead.append((own, tuple(sorted(need.extras))))
    return found


def applies(need: Requirement, extra: str) -> bool:
    """Return whether a requirement holds on this machine, with this extra of its package."""
    return need.marker is None or need.marker.evaluate({"extra": extra})


if __name__ == "__main__":
    main()
