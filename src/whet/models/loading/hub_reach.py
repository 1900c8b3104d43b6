"""Whether the hub answers, found out once and in at most three seconds, and whether something of it is here already."""

from __future__ import annotations

import os
import threading
from functools import cache
from pathlib import Path

from whet.errors import Problem

_LONGEST_S = 3.0


def hub_problem(name: str, flag: str, kind: str, cache_dir: str | None = None) -> Problem | None:
    """Return that this model or dataset (`kind`) has to come from the hub, and that the hub cannot be reached."""
    if Path(name).exists() or is_cached(name, kind, cache_dir):
        return None
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()
    if reason is None:
        return None
    first = "unset HF_HUB_OFFLINE" if constants.HF_HUB_OFFLINE else "connect to the network (a mirror: HF_ENDPOINT)"
    return Problem(
        what=f"{flag}: there is no such folder, and the hub, which may have a {kind} of this name, cannot be reached",
        got=name,
        why=f"{reason}, and nothing of this name is on this machine",
        fix=f"correct the path, if it is one; else {first}; "
        f"or download it elsewhere, copy it here and name its folder in {flag}",
    )


def is_cached(name: str, kind: str, cache_dir: str | None = None) -> bool:
    """Return whether an earlier download of this name lies on this machine; what of it, reading will say."""
    from huggingface_hub import constants

    folder = Path(cache_dir or constants.HF_HUB_CACHE)
    found = [folder / f"{kind}s--{name.replace('/', '--')}"]
    if kind == "dataset":
        converted = Path(cache_dir) if cache_dir else Path(constants.HF_HOME) / "datasets"
        found += [converted / name.replace("/", "___"), *folder.glob(f"datasets--*--{Path(name).name}")]
        found += [path for path in converted.glob(f"*{Path(name).name}*") if path.is_dir()]
    return any(os.path.isdir(path) for path in found)  # noqa: PTH112 - Path.is_dir raises if this user may not look


@cache
def unreachable() -> str | None:
    """Return why the hub does not answer; None if it does."""
    said: list[str | None] = []
    asking = threading.Thread(target=lambda: said.append(_ask()), daemon=True)  # a name server may take half a minute
    asking.start()
    asking.join(_LONGEST_S)
    return said[0] if said else f"it did not answer within {_LONGEST_S:g} s"


def _ask() -> str | None:
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=_LONGEST_S)
    except Exception as error:  # of the client's own library, or of the system
        return str(error) or type(error).__name__
    return None
