"""How a host is reached: the command that starts its agent, and what the failures of ssh mean."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from whet.errors import Problem
from whet.hardware import network
from whet.version import DISTRIBUTION

_OPTIONS = (
    "-T", "-oBatchMode=yes", "-oServerAliveInterval=5", "-oServerAliveCountMax=3", "-oControlPath=none",
)  # fmt: skip
"""No questions, no terminal, an end to waiting, and a connection of our own: a shared one outlives its users."""
_AGENT = ("-m", "whet.launch.agent")
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SSH_PORT = "22"
_RESOLVES_S = 2.0
_CAUSES = (
    ("Permission denied", "ssh asks for a password, or does not accept the key",
     "let the key in once: ssh-copy-id {host}; an encrypted key needs a running ssh-agent"),
    ("Host key verification failed", "ssh does not know this host's key",
     "check and accept it once: ssh {host} true"),
    ("Could not resolve hostname", "this machine does not know the name",
     "correct the name, or give the host's address: a Host entry in ~/.ssh/config, or a line in /etc/hosts"),
    ("Connection refused", "nothing listens on the ssh port of the host",
     "start sshd there (systemctl start ssh), or set its Port in ~/.ssh/config"),
    ("timed out", "the host does not answer",
     "check that it is on, and that no firewall drops ssh: ssh -v {host} true"),
    ("No route to host", "no network leads to the host",
     "check that it is on, and its address: ssh -v {host} true"),
    ("Network is unreachable", "no network leads to the host",
     "check the routes of this machine: ip route; then: ssh -v {host} true"),
    ("No module named", "whet is not installed for the Python that is started there",
     f"install the same whet there (pip install {DISTRIBUTION}), or name the Python that has it with --python"),
    ("not found", "the Python of this launcher does not exist there",
     "name the Python of the hosts with --python PATH"),
    ("No such file", "the Python of this launcher does not exist there",
     "name the Python of the hosts with --python PATH"),
)  # fmt: skip
"""A part of what ssh or the remote shell says -> what it means, and the fix."""


def agent_command(host: str, ssh_command: str, python: str, within_s: float) -> list[str]:
    """Return the command that starts the agent of a host; without ssh if the host is this machine.

    `within_s` is how long the host may take to answer.
    """
    if is_this_machine(host, ssh_command):
        return local_agent(python)
    return [*remote(ssh_command, within_s), host, f"exec {shlex.join([python, *_AGENT])}"]


def local_agent(python: str) -> list[str]:
    """Return the command that starts the agent of this machine."""
    return [python, *_AGENT]


def remote(ssh_command: str, within_s: float) -> list[str]:
    """Return the words of the ssh command; only to ssh itself are options added."""
    words = shlex.split(ssh_command) or ["ssh"]
    # ssh gives up a little earlier, to say why; for a second at least
    waits = f"-oConnectTimeout={max(int(within_s) - 1, 1)}"
    return [*words, *_OPTIONS, waits] if Path(words[0]).name == "ssh" else words


def is_this_machine(host: str, ssh_command: str) -> bool:
    """Return whether a host is the machine that the launcher runs on.

    A port of its own may lead into a container or through a tunnel, and a user name to another account: then it is not.
    """
    if "@" in host:
        return False
    if host in (*_LOCAL_NAMES, os.uname().nodename) and Path((shlex.split(ssh_command) or ["ssh"])[0]).name != "ssh":
        return True
    name, port = _as_ssh_sees_it(host, ssh_command)
    if port != _SSH_PORT:
        return False
    return name in (*_LOCAL_NAMES, os.uname().nodename) or _is_own_address(name) or _names_this_machine(name)


def problem(host: str, code: int | None, said: Sequence[str]) -> Problem:
    """Return what keeps the agent of a host from answering; `code` is ssh's exit code, None if it still ran."""
    text = " ".join(line.strip() for line in said if line.strip())[-300:]
    got = text or ("no answer in time" if code is None else f"ssh ended with exit code {code} and no message")
    unknown = (
        "the launcher must be able to start Python there",
        "try it by hand: ssh -v {host} true; --connect_timeout_s gives a slow host more time",
    )
    why, fix = next(((why, fix) for part, why, fix in _CAUSES if part in got), unknown)
    return Problem(what=f"{host} cannot be reached", got=got, why=why, fix=fix.format(host=host))


def _as_ssh_sees_it(host: str, ssh_command: str) -> tuple[str, str]:
    """Return the name and port that ssh would connect to: aliases of its configuration are replaced."""
    with suppress(OSError, subprocess.TimeoutExpired, ValueError):
        command = [*shlex.split(ssh_command), "-G", host]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=5)  # noqa: S603
        found = dict(line.split(" ", 1) for line in done.stdout.splitlines() if " " in line)
        return found.get("hostname", host), found.get("port", "22")
    return host, _SSH_PORT


def _names_this_machine(name: str) -> bool:
    """Return whether a name is this machine's own with or without its domain, and leads nowhere else."""
    given, own = name.lower().rstrip("."), os.uname().nodename.lower()
    if not (given.startswith(f"{own}.") or own.startswith(f"{given}.")):
        return False
    found, _ = network.resolve(name, _RESOLVES_S)
    return not found or any(_is_own_address(address) for address in found)


def _is_own_address(name: str) -> bool:
    """Return whether the address is one of this machine's; a name is not looked up, which might take long."""
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    try:
        socket.inet_pton(family, name)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((name, 0))
    except OSError:
        return False
    return True
