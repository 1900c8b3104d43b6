"""Commands that cannot be a job: they wait for a terminal or for callers, which a pod does not have, or start ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from whet.errors import ConfigError

_INTERPRETERS = frozenset({"IPython", "asyncio", "bpython", "code", "idlelib", "pdb", "ptpython"})
_SERVERS = frozenset({
    "flask", "gradio", "gunicorn", "http.server", "jupyter", "jupyter_server", "jupyterlab", "notebook", "streamlit",
    "tensorboard", "tensorboard.main", "uvicorn", "vllm.entrypoints.openai.api_server", "xmlrpc.server",
})  # fmt: skip
_LAUNCHERS = frozenset({
    "accelerate", "accelerate.commands.launch", "deepspeed", "deepspeed.launcher.runner", "torch.backends.xeon.run_cpu",
    "torch.distributed.launch", "torch.distributed.run",
})  # fmt: skip
_INPUTS = ("/dev/stdin", "/dev/tty", "/dev/fd/", "/proc/self/fd/")
_READ = ("context", "file")
"""Options that take - for standard input, next to those that end in _file."""


def require_no_terminal(settings: Any) -> None:
    """Raise ConfigError if a command of whet would read what a person types, or what another program pipes in."""
    if getattr(settings, "chat", False) and not settings.prompts:
        raise ConfigError(
            what="whet generate --chat waits for what you type",
            got="--chat without a prompt",
            why="a pod has no terminal: its standard input is empty, and the job would end without an answer",
            fix="add --prompt TEXT, once for each turn, and see the answers with whet k8s logs; or copy the model to "
            "this machine and run: whet generate FOLDER --chat",
        )
    for name in settings.__dataclass_fields__:
        value = getattr(settings, name)
        takes_dash = name in _READ or name.endswith("_file")
        if isinstance(value, str) and (value.startswith(_INPUTS) or (value == "-" and takes_dash)):
            raise ConfigError(
                what=f"{name} is read from standard input",
                got=f"--{name} {value}",
                why="nobody can pipe or type anything into a pod: its standard input is empty",
                fix=f"put it into a file on a claim: --{name} /data/FILE with --data_claim",
            )


def require_job_module(words: Sequence[str]) -> None:
    """Raise ConfigError if `-m MODULE ...` waits for a person or for callers, or starts ranks itself."""
    name = words[1].removesuffix(".__main__")
    shown = f"-m {words[1]}"
    if name in _INTERPRETERS:
        raise ConfigError(
            what=f"{shown} waits for a person",
            got=shown,
            why="a pod has no terminal, and the job would end at once or never",
            fix="put the script itself after --; to look into a pod that runs: kubectl exec -it POD -- bash",
        )
    if name in _SERVERS:
        raise ConfigError(
            what=f"{shown} waits for callers",
            got=shown,
            why="a job ends when its command does; this one would hold its CPUs until somebody deletes it",
            fix="put the command that trains after --; for a server make a Deployment and a Service with kubectl",
        )
    if name in _LAUNCHERS:
        raise ConfigError(
            what=f"{shown} starts ranks itself",
            got=shown,
            why="the pods start one rank for each --nproc_per_node themselves, each with its share of the CPUs",
            fix=f"put {_script(words)} itself after --, and the number of ranks into --nproc_per_node and --nodes",
        )


def _script(words: Sequence[str]) -> str:
    return next((word for word in words[2:] if PurePosixPath(word).suffix == ".py"), "the script")
