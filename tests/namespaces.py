"""Several hosts on one machine: network namespaces with their own name, addresses, /etc/hosts and sshd.

They share the processors, the clock and the file system; nothing else.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ENTER = """hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf
shift 2
exec "$@"
"""
_NAMES = "127.0.0.1 localhost\n10.77.0.1 h1\n10.77.0.2 h2\n10.77.0.3 h3\n"


@cache
def missing() -> str | None:
    """Return what this machine lacks for such hosts, None if it has everything."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd"):
        if shutil.which(program) is None:
            return f"{program} is missing (packages iproute2, util-linux, openssh-client, openssh-server)"
    probe = f"whet-{os.getpid()}-probe"
    steps = [
        ["ip", "netns", "add", probe],
        ["ip", "-n", probe, "link", "add", "br0", "type", "bridge"],
        ["ip", "-n", probe, "link", "add", "veth-a", "type", "veth", "peer", "name", "veth-b"],
        ["ip", "netns", "exec", probe, "unshare", "--mount", "--uts", "hostname", "probe"],
    ]
    works = all(subprocess.run(step, capture_output=True, check=False).returncode == 0 for step in steps)
    subprocess.run(["ip", "netns", "delete", probe], check=False, capture_output=True)
    return None if works else "network namespaces with a bridge, or mounts in them, cannot be made here"


class Cluster:
    """Hosts h1, h2, ... on one switch, with the addresses 10.77.0.1, 10.77.0.2, ..., and interfaces ve1, ve2, ..."""

    def __init__(self, folder: Path, n_hosts: int = 2) -> None:
        self.folder = folder
        self.names = [f"h{n}" for n in range(1, n_hosts + 1)]
        self._prefix = f"w{os.getpid()}"
        self._sshd: dict[str, subprocess.Popen[bytes]] = {}
        self.ssh_config = folder / "ssh_config"
        self._keys()

    def space(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return f"{self._prefix}-{host}"

    def make(self) -> None:
        """Make the switch and the hosts."""
        _ip("netns", "add", self.space("switch"))
        self._in("switch", "link", "add", "br0", "type", "bridge")
        self._in("switch", "link", "set", "br0", "up")
        for n, host in enumerate(self.names, start=1):
            _ip("netns", "add", self.space(host))
            peer = ("peer", "name", f"ve{n}", "netns", self.space(host))
            self._in("switch", "link", "add", f"to-{host}", "type", "veth", *peer)
            self._in("switch", "link", "set", f"to-{host}", "master", "br0", "up")
            self._in(host, "link", "set", "lo", "up")
            self._in(host, "addr", "add", f"10.77.0.{n}/24", "dev", f"ve{n}")
            self._in(host, "link", "set", f"ve{n}", "up")
            etc = self.folder / host
            etc.mkdir()
            self.set_names(host, _NAMES)
            (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # refuses at once
            self.start_sshd(host)

    def set_names(self, host: str, text: str) -> None:
        """Write the /etc/hosts of a host."""
        (self.folder / host / "hosts").write_text(text)

    def start_sshd(self, host: str, *more: str) -> None:
        """Start the sshd of a host, again if it runs, with more lines in its configuration."""
        self.stop_sshd(host)
        lines = [
            *more,  # the first of several lines counts
            "Port 22",
            "ListenAddress 0.0.0.0",
            f"HostKey {self.folder}/host_key",
            f"AuthorizedKeysFile {self.folder}/user_key.pub",
            f"PidFile {self.folder}/{host}/sshd.pid",
            "StrictModes no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "PermitRootLogin prohibit-password",
        ]
        config = self.folder / host / "sshd_config"
        config.write_text("\n".join(lines) + "\n")
        log = self.folder / host / "sshd.log"
        self._sshd[host] = self.start(host, ["/usr/sbin/sshd", "-D", "-f", str(config), "-E", str(log)])
        until = time.monotonic() + 10
        while "Server listening" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < until, "sshd did not start"
            time.sleep(0.02)

    def stop_sshd(self, host: str) -> None:
        """Stop the sshd of a host; its sessions stay."""
        if (running := self._sshd.pop(host, None)) is not None:
            running.terminate()
            running.wait()
            (self.folder / host / "sshd.log").unlink()

    def start(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on a host."""
        enter = ["ip", "netns", "exec", self.space(host), "unshare", "--mount", "--uts", "sh", "-c", _ENTER, "sh"]
        return subprocess.Popen([*enter, host, str(self.folder / host), *command], **options)

    def cut(self, host: str) -> None:
        """Cut the link of a host: packets get lost, and nobody is informed."""
        self._in("switch", "link", "set", f"to-{host}", "nomaster")

    def reconnect(self, host: str) -> None:
        """Connect the host to the switch again."""
        self._in("switch", "link", "set", f"to-{host}", "master", "br0")

    def firewall(self, host: str) -> None:
        """Have a host drop every connection from outside but those of ssh; skip the test if it cannot."""
        rule = ["INPUT", "-p", "tcp", "--syn", "!", "--dport", "22", "!", "-i", "lo", "-j", "DROP"]
        command = ["ip", "netns", "exec", self.space(host), "iptables", "-A", *rule]
        if shutil.which("iptables") is None or subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("iptables does not work here")

    def pids(self, host: str) -> dict[int, str]:
        """Return the processes of a host -> their command lines; sshd itself is left out."""
        done = subprocess.run(["ip", "netns", "pids", self.space(host)], capture_output=True, text=True, check=True)
        found: Mapping[int, str] = {int(word): _command_line(int(word)) for word in done.stdout.split()}
        return {pid: line for pid, line in found.items() if line and "/usr/sbin/sshd -D" not in line}

    def empty(self, within_s: float) -> str:
        """Wait until no process is left on any host; return those that are."""
        until = time.monotonic() + within_s
        while True:
            left = [f"{host}: {pid} {line}" for host in self.names for pid, line in self.pids(host).items()]
            if not left or time.monotonic() > until:
                return "\n".join(left)
            time.sleep(0.05)

    def remove(self) -> None:
        """End all processes of the hosts, and remove them."""
        for host in self.names:
            self.stop_sshd(host)
            for pid in self.pids(host):
                subprocess.run(["kill", "-9", str(pid)], check=False, capture_output=True)
        for host in [*self.names, "switch"]:
            subprocess.run(["ip", "netns", "delete", self.space(host)], check=False, capture_output=True)

    def launched(
        self, *options: str, folder: Path, command: Sequence[str] = ("train.py",), at: str = "h1", **variables: str
    ) -> subprocess.Popen[str]:
        """Start `whet launch` on a host, without preloads: they would only cost time."""
        words = [sys.executable, "-m", "whet", "launch", "--memory_allocator", "default", "--openmp", "default"]
        words += [*options, "--", *command]
        return self.start(at, words, **self.piped(folder, **variables))

    @staticmethod
    def piped(folder: Path, **variables: str) -> dict[str, Any]:
        """Return the options of `start` for a launcher whose output is read."""
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | variables
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return {"cwd": folder, "env": env, "text": True, "start_new_session": True, **pipes}

    def over_ssh(self, hosts: str, *options: str, **more: Any) -> subprocess.Popen[str]:
        """Start `whet launch --hosts` on h1."""
        return self.launched("--hosts", hosts, "--ssh_command", f"ssh -F {self.ssh_config}", *options, **more)

    def _in(self, host: str, *words: str) -> None:
        _ip("-n", self.space(host), *words)

    def _keys(self) -> None:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd insists on it
        for name in ("host_key", "user_key"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True)
        addresses = [f"Host {host}\n  HostName 10.77.0.{n}" for n, host in enumerate(self.names, start=1)]
        shared = [
            "Host *",
            f"  IdentityFile {self.folder}/user_key",
            f"  UserKnownHostsFile {self.folder}/known_hosts",
            "  StrictHostKeyChecking accept-new",
            "  LogLevel ERROR",
        ]
        self.ssh_config.write_text("\n".join([*addresses, *shared]) + "\n")


@contextmanager
def cluster(folder: Path, n_hosts: int = 2) -> Iterator[Cluster]:
    """Make the hosts, and remove them at the end of the block."""
    made = Cluster(folder, n_hosts)
    try:
        made.make()
        yield made
    finally:
        made.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
