"""Completion in a real bash, switched on as the README says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_BASH = """
eval "$({python} -m argcomplete.scripts.register_python_argcomplete whet)"
COMP_LINE=$1 COMP_POINT=${{#COMP_LINE}} COMP_TYPE=9
read -ra COMP_WORDS <<< "$COMP_LINE"
[[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
$(complete -p whet | sed 's/.*-F \\([^ ]*\\).*/\\1/') whet "${{COMP_WORDS[COMP_CWORD]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""

pytestmark = [
    pytest.mark.skipif(find_spec("argcomplete") is None, reason="argcomplete is not installed"),
    pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash"),
]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("whet cl", ["classify"]),
        ("whet qa --learning_r", ["--learning_rate"]),
        ("whet qa --lr_scheduler_type warm", ["warmup_stable_decay"]),
        ("whet qa --bf16 t", ["true"]),
        ("whet qa --bf16 --save_st", ["--save_steps", "--save_strategy"]),
        ("whet qa ru", ["run.yaml"]),
        ("whet qa --train_file ru", ["run.yaml"]),
        ("whet k8s sub", ["submit"]),
        ("whet qa --help a", ["all"]),
        ("whet nothing --x", []),
    ],
)
def test_bash_completes_commands_options_values_and_files(tmp_path: Path, line: str, offered: list[str]) -> None:
    (tmp_path / "run.yaml").write_text("seed: 1\n")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = _BASH.format(python=sys.executable)
    done = subprocess.run(
        ["bash", "--norc", "-c", script, "bash", line], capture_output=True, text=True, env=environment, cwd=tmp_path,
        check=True,
    )  # fmt: skip
    assert sorted(filter(None, map(str.strip, done.stdout.splitlines()))) == offered, done.stderr


def test_without_argcomplete_nothing_is_offered() -> None:
    code = "import sys; sys.modules['argcomplete'] = None; from whet.cli.main import main; main()"
    environment = os.environ | {"_ARGCOMPLETE": "1", "COMP_LINE": "whet q", "COMP_POINT": "6"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
