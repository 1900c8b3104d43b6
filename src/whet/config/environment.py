"""whet's own environment variables: an unknown value is refused, and a misspelled name is reported once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial

from whet.errors import ConfigError, Problem, escape_controls

PREFIX = "WHET_"
VARIABLES: Mapping[str, Sequence[str]] = {
    "WHET_KERNELS": ("native", "reference"),
    "WHET_ISA": ("v4", "v3", "baseline", "v4_bf16"),
    "WHET_PRODUCTS": ("mkl", "onednn"),
    "WHET_INT8": ("forward", "both"),
    "WHET_KEEP_MEMORY": ("0", "1"),
    "WHET_IMPORTS": ("delayed", "eager"),
    "WHET_RUN": ("on", "off"),
    "WHET_RESUME": ("auto",),
}
"""Variable -> the values that it takes. An empty variable counts as unset."""
RESUME = "WHET_RESUME"
"""Set where a command cannot know whether it was started before, as in a pod (`config/ranks.py`)."""
LAUNCH = "WHET_LAUNCH_ID"
"""The id of the job or launcher that starts a command, the same after each failure: `whet k8s` and `whet launch` set
it, and checkpoints hold it."""
AUTO = "WHET_AUTO"
"""What a process that `--auto` starts is to do: whet alone sets it (`jobs/trial_processes.py`)."""
RUN_REPORTS = "WHET_RUN_REPORTS"
"""The folder that processes below `whet run` report to: whet alone sets it (`run/script.py`)."""
TRAINJOB = "KUBEFLOW_TRAINER_SERVER_URL"
"""Kubeflow's variable: where a TrainJob posts its progress."""
_MEANINGS = {
    "WHET_KERNELS": "which operators run: whet's native ones, or the reference in plain torch",
    "WHET_ISA": "the best instruction set that the native operators may use, and with it whether bf16 is widened",
    "WHET_PRODUCTS": "which library multiplies the matrices of linear layers in fp32",
    "WHET_INT8": "which products of a linear layer run in 8 bits",
    "WHET_KEEP_MEMORY": "whether freed memory stays with the process (1) or goes back to the system (0)",
    "WHET_RUN": "whether whet run changes the models of a script (on), or runs it as if whet were not there (off)",
    "WHET_RESUME": "whether a training that names no checkpoint resumes from the newest of its folder",
    "WHET_IMPORTS": "whether a command imports parts of packages once it uses them, or as torch and transformers do",
}
_KNOWN = {*VARIABLES, LAUNCH, AUTO, RUN_REPORTS}
_OF_TESTS = ("WHET_TEST_", "WHET_GATE", "WHET_SOAK", "WHET_RELIABILITY_")
"""What the names of variables begin with that only whet's own tests read."""
_log = logging.getLogger("whet.config")
_reported: set[str] = set()
"""Unknown names that the log has mentioned in this process."""


def require_known(warn: Callable[[str], None] | None = None) -> None:
    """Raise ConfigError for every variable of whet with an unknown value; warn once about unknown names."""
    for text in misspelled(os.environ):
        if text not in _reported:
            _reported.add(text)
            (warn or partial(_log.warning, "%s"))(escape_controls(text))
    if problems := unknown_values(os.environ):
        raise ConfigError.of(problems)


def value(name: str) -> str | None:
    """Return what this variable says, None if it is not set; raises ConfigError for an unknown value."""
    asked = os.environ.get(name) or None
    if asked is not None and (problems := unknown_values({name: asked})):
        raise ConfigError.of(problems)
    return asked


def unknown_values(environment: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each variable of whet whose value is not one of its own."""
    return [
        Problem(
            what=f"the environment variable {name} has an unknown value",
            got=environment[name],
            why=f"it says {_MEANINGS[name]}",
            fix=f"set {name} to {' or '.join(values)}, or unset it",
        )
        for name, values in VARIABLES.items()
        if environment.get(name) and environment[name] not in values
    ]


def misspelled(environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that looks like one of whet's and is not read."""
    return [
        f"the environment variable {name} has no effect{_guess(name)}"
        for name in sorted(environment)
        if name.startswith(PREFIX) and name not in _KNOWN and not name.startswith(_OF_TESTS)
    ]


def _guess(name: str) -> str:
    like = get_close_matches(name, VARIABLES, n=1)
    return f": did you mean {like[0]}?" if like else f"; whet reads {', '.join(VARIABLES)}"
