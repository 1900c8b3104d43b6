"""Python runs this at its start, because `whet run` has put its folder in front of PYTHONPATH.

It has the entry points of `whet.run.entry_points` replaced in this process, takes its folder out of sys.path again, and
runs the sitecustomize that it stands in front of, if there is one.
"""

import os
import sys
from importlib import import_module, util
from importlib.machinery import PathFinder

_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 (pathlib takes a third of Python's start)
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _FOLDER]  # noqa: PTH100

if os.environ.get("WHET_RUN_REPORTS"):
    try:
        import_module("whet.run.entry_points").install()
    except ImportError:  # another Python, into which whet is not installed
        with open(os.path.join(os.environ["WHET_RUN_REPORTS"], "no-whet"), "w") as _file:  # noqa: PTH118, PTH123
            _file.write(sys.executable)

_other = PathFinder.find_spec("sitecustomize", sys.path)
if _other is not None and _other.loader is not None:
    sys.modules["sitecustomize"] = _module = util.module_from_spec(_other)
    _other.loader.exec_module(_module)
