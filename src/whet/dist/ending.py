"""Ends the process of a rank without the destructors of native libraries.

gloo's threads run until a process has ended, while those destructors take away what they use. Once in thousands of
runs, a rank whose work was done and saved was ended by SIGABRT there, and its launcher started all ranks once more.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress

import torch.distributed as torch_dist


def end_rank(code: int) -> None:
    """End this process with the exit code if it is a rank whose exchanges go through gloo; return if it is none.

    Threads are waited for and the functions of `atexit` called, as at each end of Python; `join` has put `leave` there.
    """
    if not (torch_dist.is_available() and torch_dist.is_initialized() and torch_dist.get_backend() == "gloo"):
        return
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # there is none, or it is broken or closed
            stream.flush()
    os._exit(code)
