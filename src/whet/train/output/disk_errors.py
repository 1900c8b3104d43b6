"""The fix for each reason why writing to a disk fails."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from whet.errors import WhetError

_E = TypeVar("_E", bound=WhetError)
_IN_TEXT = re.compile(r"os error (\d+)")
"""How Rust libraries write the number of a system error."""
_ANOTHER = "use an {option} on another disk"
_FULL = "free space on the disk of {folder}{free}, or " + _ANOTHER
_FIXES: Mapping[int, str] = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "the quota of this user is used up (quota -s shows it): delete files of yours, or " + _ANOTHER,
    errno.EFBIG: "no file may grow so large here: lift the limit of this shell (ulimit -f unlimited), or if it has "
    "none, " + _ANOTHER,
    errno.EROFS: "the disk of {folder} is mounted read-only, perhaps after errors (mount shows it): " + _ANOTHER,
    errno.EACCES: "let this user write there (ls -ld {quoted} shows who may), or use another {option}",
    errno.EIO: "the disk of {folder} fails (see dmesg): " + _ANOTHER,
    errno.ENAMETOOLONG: "use a shorter {option}",
    errno.EMFILE: "too many files are open: raise the limit of this shell (ulimit -n)",
    errno.ENOENT: "{folder} was moved or removed while the run used it: put it back, or use another {option}",
    errno.ESTALE: "the network folder of {folder} was lost: mount it again, or " + _ANOTHER,
}
_SAME = {
    errno.EPERM: errno.EACCES, errno.ENFILE: errno.EMFILE, errno.ENODEV: errno.ESTALE, errno.ENXIO: errno.ESTALE,
    errno.ETIMEDOUT: errno.ESTALE, errno.EHOSTDOWN: errno.ESTALE, errno.ENOTCONN: errno.ESTALE,
}  # fmt: skip
_IN_THE_WAY = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENOTEMPTY}


def fix(error: BaseException, folder: Path, option: str = "--output_dir") -> str:
    """Return what helps when writing to the folder, which `option` names, failed with this error."""
    reason = _reason(error)
    if reason in _IN_THE_WAY:
        return f"move away what is at {_place(error, folder)}, or use another {option}"
    text = _FIXES.get(_SAME.get(reason, reason), _FULL)
    return text.format(folder=folder, option=option, quoted=shlex.quote(str(folder)), free=_free(folder))


def resumable(error: _E, last: Path | None, again: Mapping[str, object]) -> _E:
    """Return the error with the newest complete checkpoint, if there is one, and the settings that resume from it."""
    (problem,) = error.problems
    if last is None:
        kept, then = "no checkpoint was written yet", "then start again with the same command"
    else:
        kept = f"the newest complete checkpoint is {last}"
        then = f"then resume with --resume_from_checkpoint {shlex.quote(str(last))}"
    why, fix = f"{problem.why}; {kept}", f"{problem.fix}; {then}"
    extended = type(error)(what=problem.what, got=problem.got, why=why, fix=fix)
    extended.again = dict(again) if last is not None else {}
    return extended


def _reason(error: BaseException) -> int:
    """Return the number of the system error; 0 if it is none."""
    number = getattr(error, "errno", None)
    found = _IN_TEXT.search(str(error))
    return number or (int(found[1]) if found else 0)


def _place(error: BaseException, folder: Path) -> str:
    names = [getattr(error, name, None) for name in ("filename2", "filename")]
    found = next((os.fsdecode(name) for name in names if isinstance(name, str | bytes | Path)), str(folder))
    return shlex.quote(found)


def _free(folder: Path) -> str:
    """Return how much is free there, in brackets; empty if that is unknown."""
    try:
        return f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free)"
    except OSError:
        return ""
