"""Build the image of docker/Dockerfile, and train in it as a pod does: `make image-check`.

    python tools/containers/check.py
    python tools/containers/check.py --engine buildah --wheels /srv/wheels

The engine is docker, podman or buildah, the first that answers. Where no registry answers, buildah (as root) gets the
base image from debootstrap. PyTorch's build for CPUs comes from its own index or, with --wheels, from a folder that
this machine serves during the build. Behind a proxy with certificates of its own, PIP_CERT names their file, which the
build by podman or buildah then sees.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from steps import CPU_INDEX, ROOT, copy_tracked, encoder, fail, index, run, say, write_rows

FILE = ROOT / "docker" / "Dockerfile"
IMAGE = "localhost/whet-check:1"
LOCAL_BASE = "localhost/debian:bookworm-slim"
LOADED = "import os; print(sorted({os.path.basename(l.split()[-1]) for l in open('/proc/self/maps') if '.so' in l}))"


def main(words: Sequence[str] | None = None) -> None:
    """Build and check; the first step that fails ends it with 1 and its output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["docker", "podman", "buildah"])
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="with torch's wheel, in place of PyTorch's index")
    parser.add_argument("--keep", action="store_true", help="leave the image there")
    args = parser.parse_args(words)
    engine = args.engine or next((one for one in ("docker", "podman", "buildah") if answers(one)), None)
    if engine is None:
        fail("no docker, podman or buildah answers", "none is on PATH and running", "apt-get install buildah")
    base = base_image(engine)
    say("base image", base)
    if args.wheels is None:
        build(engine, base, CPU_INDEX)
    else:
        with index({"torch": [*args.wheels.glob("torch-*.whl")]}) as address:
            build(engine, base, address)
    say("built", IMAGE)
    model = encoder()
    with tempfile.TemporaryDirectory(prefix="whet-image-") as folder:
        scratch = Path(folder)
        scratch.chmod(0o777)  # the image's user is nobody here
        shutil.copytree(model, scratch / "model")
        write_rows(scratch / "rows.jsonl")
        use(engine, scratch)
    if not args.keep:
        run([engine, "rmi", "--force", IMAGE])


def base_image(engine: str) -> str:
    """Return the base image: the Dockerfile's, if a registry has it, else one that debootstrap makes."""
    (named,) = re.findall(r"^ARG BASE=(\S+)", FILE.read_text("utf-8"), re.MULTILINE)
    if engine != "buildah" or succeeds([engine, "pull", "-q", named]):
        return named
    if succeeds([engine, "inspect", "--type", "image", LOCAL_BASE]):
        return LOCAL_BASE
    if os.geteuid() or not shutil.which("debootstrap"):
        fail(f"no registry has {named}", "debootstrap would make it", "apt-get install debootstrap, and run as root")
    suite = re.findall(r":(\w+)", named)[0]
    with tempfile.TemporaryDirectory(prefix="whet-base-") as folder:
        run(["debootstrap", "--variant=minbase", suite, f"{folder}/root"])
        container = run([engine, "from", "scratch"]).strip()
        run([engine, "copy", "-q", container, f"{folder}/root", "/"])
        run([engine, "commit", "-q", "--rm", container, LOCAL_BASE])
    return LOCAL_BASE


def build(engine: str, base: str, torch_index: str) -> None:
    """Build the image from a copy of what git tracks."""
    asked = [f"--build-arg={name}={value}" for name, value in (("BASE", base), ("TORCH_INDEX_URL", torch_index))]
    if cert := os.environ.get("PIP_CERT"):
        asked += ["--build-arg=PIP_CERT=/certificates.pem", f"--volume={cert}:/certificates.pem:ro"]
    with tempfile.TemporaryDirectory(prefix="whet-context-") as folder:
        copy_tracked(Path(folder))
        run([engine, "build", *asked, "-f", f"{folder}/docker/Dockerfile", "-t", IMAGE, folder])


def use(engine: str, scratch: Path) -> None:
    """Run whet in the image as its user, without a network: operators, preloaded libraries, a training."""
    who = inside(engine, scratch, ["id", "-u"]).strip()
    if who != "1000":
        fail("the image does not run as its user", who, "see USER in the Dockerfile")
    megabytes = sum(
        int(line.split()[0]) for line in inside(engine, scratch, ["du", "-sm", "/opt", "/usr"]).splitlines()
    )
    say("size", f"{megabytes} MB")
    native = json.loads(inside(engine, scratch, ["whet", "doctor", "--kernels", "--json"]))["native"]
    if native["error"]:
        fail("the image has no native operators", str(native), "see whet doctor --kernels in it")
    say("operators", f"native, {native['isa']}, as user {who}")
    launched = inside(engine, scratch, ["whet", "launch", "--nproc_per_node", "1", "--log_dir", "/data/logs", "--",
                                        "python", "-c", LOADED])  # fmt: skip
    for wanted in ("libtcmalloc", *(["libiomp5"] if os.uname().machine == "x86_64" else [])):
        if wanted not in launched:
            fail(f"whet launch does not load {wanted} in the image", launched[-800:], "see the Dockerfile")
    say("whet launch loads", "tcmalloc and libiomp5")
    trained = inside(engine, scratch, ["whet", "launch", "--nproc_per_node", "1", "--log_dir", "/data/logs", "--",
                                       "classify", "--model_name_or_path", "/data/model", "--train_file",
                                       "/data/rows.jsonl", "--do_train", "--num_train_epochs", "2",
                                       "--output_dir", "/data/out"])  # fmt: skip
    if not (scratch / "out/model.safetensors").exists():
        fail("the training left no model", trained[-800:], "run it by hand in the image")
    told = re.findall(r"^.*(?:everything|mean training loss).*$", trained, re.MULTILINE)
    say("trained", "; ".join(" ".join(line.split()) for line in told))


def inside(engine: str, scratch: Path, words: Sequence[str]) -> str:
    """Return what a command in the image prints; /data is the scratch folder."""
    if engine != "buildah":
        return run([engine, "run", "--rm", "--network=none", "--read-only", "--tmpfs=/tmp", "--tmpfs=/cache",
                    f"--volume={scratch}:/data", IMAGE, *words])  # fmt: skip
    container = run([engine, "from", IMAGE]).strip()
    try:
        return run([engine, "run", f"--volume={scratch}:/data", container, "--", *words])
    finally:
        run([engine, "rm", container])


def answers(engine: str) -> bool:
    """Return whether an engine is installed, and its daemon runs if it has one."""
    return shutil.which(engine) is not None and succeeds([engine, "info"])


def succeeds(command: Sequence[str]) -> bool:
    """Return whether a command ends with 0."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


if __name__ == "__main__":
    main()
