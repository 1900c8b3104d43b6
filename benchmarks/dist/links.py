"""Two hosts on one machine: network namespaces with a link between them, shaped to a rate by a token bucket."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

HOSTS = (("whet-a", "whet-va", "10.78.0.1"), ("whet-b", "whet-vb", "10.78.0.2"))
"""Namespace, interface and address of each host."""


def run(*words: str) -> None:
    """Run a command; raises CalledProcessError with its messages."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextmanager
def linked() -> Iterator[None]:
    """Make the hosts and their link within the block. Needs root."""
    _remove()
    try:
        for name, _, _ in HOSTS:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        (first, first_link, _), (second, second_link, _) = HOSTS
        run(
            "ip",
            "link",
            "add",
            first_link,
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            second_link,
            "netns",
            second,
        )
        for name, link, address in HOSTS:
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", link)
            run("ip", "-n", name, "link", "set", link, "up")
        yield
    finally:
        _remove()


def shape(gbit: float | None) -> None:
    """Limit both directions of the link to a rate in Gbit/s; None: no limit."""
    for name, link, _ in HOSTS:
        with suppress(subprocess.CalledProcessError):  # nothing to remove yet
            run("ip", "netns", "exec", name, "tc", "qdisc", "del", "dev", link, "root")
        if gbit is not None:
            burst = f"{max(256, int(gbit * 256))}kb"
            run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", link, "root", "tbf",
                "rate", f"{gbit:g}gbit", "burst", burst, "latency", "50ms")  # fmt: skip


def start(host: int, core: int, words: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a command on a host, bound to one core."""
    name, link, _ = HOSTS[host]
    given = {**environment, "GLOO_SOCKET_IFNAME": link, "MASTER_ADDR": HOSTS[0][2]}
    return subprocess.Popen(["ip", "netns", "exec", name, "taskset", "-c", str(core), *words], env=given)


def _remove() -> None:
    for name, _, _ in HOSTS:
        with suppress(subprocess.CalledProcessError):
            run("ip", "netns", "del", name)
    time.sleep(0.1)
