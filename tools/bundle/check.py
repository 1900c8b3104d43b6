"""Install a bundle where there is nothing but Debian and its Python, without a network, and train: `make bundle-check`.

    python tools/bundle/check.py
    python tools/bundle/check.py --root /srv/root     # a root of debootstrap that is there already

Needs root, for debootstrap and chroot. The suite is the one that has the Python that runs this.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from steps import encoder, fail, run, say, write_rows

SUITES = {(3, 11): "bookworm", (3, 13): "trixie", (3, 14): "forky"}
"""Python -> the suite of Debian that has it."""
INSIDE = 'mount -t proc proc "$0/proc" && exec chroot "$0" /bin/sh -ec "$1"'


def main(words: Sequence[str] | None = None) -> None:
    """Make the bundle and the root, install, train; the first step that fails ends it with 1 and its output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, metavar="FOLDER", help="a root with python3 in it; it is copied")
    args = parser.parse_args(words)
    python = sys.version_info[:2]
    if args.root is None and python not in SUITES:
        fail("no suite of Debian has this Python", ".".join(map(str, python)), f"use one of {[*SUITES]}, or --root")
    if os.geteuid() or not (args.root or shutil.which("debootstrap")):
        fail("a root is made by debootstrap, as root", "one of both is missing", "apt-get install debootstrap; sudo")
    model = str(encoder())
    with tempfile.TemporaryDirectory(prefix="whet-bundle-") as name:
        root, file = Path(name, "root"), Path(name, "offline.tar")
        if args.root is None:
            timed("root", lambda: run(["debootstrap", "--variant=minbase", "--include=python3",
                                       SUITES[python], str(root)]))  # fmt: skip
        else:
            timed("root", lambda: run(["cp", "-a", str(args.root), str(root)]))
        made = timed("bundle", lambda: run([sys.executable, "-m", "whet", "bundle", str(file),
                                            "--model_name_or_path", model, "--json"]))  # fmt: skip
        say("packages", f"{len(json.loads(made)['packages'])}, {file.stat().st_size / 1e6:.0f} MB")
        with tarfile.open(file) as archive:
            archive.extractall(root / "opt", filter="data")
        file.unlink()
        (unpacked,) = (root / "opt").glob("whet-*")
        use(root, f"/opt/{unpacked.name}")


def use(root: Path, place: str) -> None:
    """Install and train in the root, and see that its operators are right."""
    timed("installed", lambda: inside(root, f"cd {place} && sh install.sh"))
    found = json.loads(inside(root, f"{place}/venv/bin/whet doctor --kernels --json"))["native"]
    if found["error"]:
        fail("the installation has no native operators", str(found), f"see whet doctor --kernels in {place}")
    say("operators", f"native, {found['isa']}")
    write_rows(root / "tmp/rows.jsonl")
    train = (
        f"cd /tmp && {place}/venv/bin/whet classify --model_name_or_path {place}/models/model"
        " --train_file rows.jsonl --do_train --num_train_epochs 2 --output_dir out"
    )
    timed("trained", lambda: inside(root, train))
    if not (root / "tmp/out/model.safetensors").exists():
        fail("the training left no model", train, "run it by hand there")


def inside(root: Path, script: str) -> str:
    """Return what a script prints in the root, which has no network."""
    clean = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/root", "LANG": "C.UTF-8"}
    return run(["unshare", "--net", "--mount", "sh", "-ec", INSIDE, str(root), script], clean)


def timed(what: str, work: Callable[[], str]) -> str:
    """Do the work, print how long it took, return what it returns."""
    begun = time.monotonic()
    found = work()
    say(what, f"{time.monotonic() - begun:.0f} s")
    return found


if __name__ == "__main__":
    main()
