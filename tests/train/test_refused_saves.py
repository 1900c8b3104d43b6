"""A disk that refuses: each reason has its own fix, and the newest checkpoint and the command to continue are named."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_qa import command, save_encoder, squad, write_json

from whet.cli.main import run
from whet.errors import EXIT_IO
from whet.store import write

FIXES = {
    "ENOSPC": r"free space on the disk of .* \([\d,.]+ MB are free\)",
    "EDQUOT": r"quota",
    "EFBIG": r"ulimit -f unlimited",
    "EROFS": r"mounted read-only",
    "EACCES": r"ls -ld",
    "EPERM": r"ls -ld",
    "EIO": r"dmesg",
    "ENAMETOOLONG": r"a shorter --output_dir",
    "EMFILE": r"ulimit -n",
    "ESTALE": r"mount it again",
    "ENOENT": r"was moved or removed while the run used it",
}


@pytest.mark.parametrize("name", FIXES)
def test_each_reason_has_a_fix_of_its_own(tmp_path: Path, name: str) -> None:
    import re

    number = getattr(errno, name)
    told = write.disk_fix(OSError(number, os.strerror(number)), tmp_path)
    in_rust = write.disk_fix(Exception(f"I/O error: {os.strerror(number)} (os error {number})"), tmp_path)
    assert re.search(FIXES[name], told)
    assert re.search(FIXES[name], in_rust)
    others = [pattern for other, pattern in FIXES.items() if pattern != FIXES[name]]
    assert not any(re.search(pattern, told) for pattern in others)


@pytest.mark.reliability
def test_a_full_disk_names_the_checkpoint_and_prints_the_command_that_works(tmp_path: Path) -> None:
    """The files of step 2 do not fit, as their log is longer; then the limit is lifted and the command is run."""
    out = tmp_path / "my out"
    data = write_json(tmp_path / "data.json", squad())
    encoder = tmp_path / "encoder"
    save_encoder(encoder)
    words = command(
        encoder, out, "--do_train", train_file=data, save_steps=1, max_steps=2, save_strategy="steps", max_seq_length=64
    )
    assert run([*words[:-1], words[-1], "--max_steps", "1"]) == 0
    size = (out / "checkpoint-1" / "optimizer.safetensors").stat().st_size
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); "
    script += "from whet.cli.main import main; main(sys.argv[2:])"
    again = [*words, "--resume_from_checkpoint", "auto"]
    done = subprocess.run(
        [sys.executable, "-c", script, str(size - 1), *again], capture_output=True, text=True, check=False
    )
    assert done.returncode == EXIT_IO, done.stderr
    assert "the checkpoint of step 2 cannot be written" in done.stderr
    assert f"newest complete checkpoint is {out / 'checkpoint-1'}" in done.stderr
    assert "ulimit -f unlimited" in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("whet qa ")]
    assert run(shlex.split(line)[1:]) == 0
    assert (out / "checkpoint-2").is_dir()
    assert (out / "train_results.json").is_file()
