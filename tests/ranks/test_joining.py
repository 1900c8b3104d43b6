"""Ranks that find rank 0 late or not at all: each says that it waits, and ends with the reason; where they listen."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from many import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

_APART = {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}
"""As scripts that set RANK and WORLD_SIZE by hand: each rank is then taken for one of another machine."""
_JOBS: dict[str, dict[str, Any]] = {
    "no such name": {"environment": {"MASTER_ADDR": "nohost.invalid"} | _APART, "timeout_s": 2},
    "another machine": {"environment": {"MASTER_ADDR": "192.0.2.1"} | _APART, "timeout_s": 2},
    "something else": {"environment": _APART, "timeout_s": 2, "rank_0_does": "is something else"},
    "late": {"rank_0_does": "starts late"},
    "one machine": {"kind": "listens"},
    "by its name": {"kind": "listens", "environment": {"MASTER_ADDR": socket.gethostname()}},
    "started again": {
        "kind": "listens",
        "environment": {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "1"},
    },
    "nobody else": {"of_rank": {"1": {"WORLD_SIZE": "1"}}, "timeout_s": 20},
    "interface": {"environment": _APART, "timeout_s": 3, "of_rank": {"1": {"GLOO_SOCKET_IFNAME": "nosuch0"}}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("joining"))
    for name, job in _JOBS.items():
        jobs.add(name, n_ranks=2, **({"kind": "joins"} | job))
    return jobs.run()


def _printed(found: Jobs, name: str, rank: int) -> str:
    return (found.folder(name, 2) / f"output-{rank}.txt").read_text("utf-8")


@pytest.mark.parametrize("name", ["no such name", "another machine"])
def test_address_that_leads_nowhere_ends_every_rank_with_what_to_check(found: Jobs, name: str) -> None:
    host = _JOBS[name]["environment"]["MASTER_ADDR"]
    for number, rank in enumerate(found[name, 2]):
        assert f"rank {number} of 2 did not meet the others at {host}:" in rank["text"]
        assert "that MASTER_ADDR is an address of rank 0's machine" in rank["text"]


def test_other_program_on_the_port_does_not_keep_a_rank(found: Jobs) -> None:
    assert "rank 1 of 2 did not meet the others" in found["something else", 2][1]["text"]


def test_rank_0_that_starts_late_is_waited_for_with_a_line(found: Jobs) -> None:
    assert [rank.get("agreed") for rank in found["late", 2]] == [True, True]
    assert "rank 1 of 2 waits at 127.0.0.1:" in _printed(found, "late", 1)


def test_rank_0_says_that_it_waits_for_ranks_that_never_come(found: Jobs) -> None:
    first = found["nobody else", 2][0]
    assert "rank 0 of 2 waits at 127.0.0.1:" in _printed(found, "nobody else", 0)
    assert "did not meet the others" in first["text"]


@pytest.mark.parametrize("name", ["one machine", "by its name", "started again"])
def test_ranks_of_one_machine_listen_on_loopback_only(found: Jobs, name: str) -> None:
    """127.0.0.1, as /proc/net/tcp writes it: nobody outside can take the place of a rank."""
    for rank in found[name, 2]:
        assert set(rank["listens"]) == {"0100007F"}, rank


def test_interface_that_a_machine_lacks_is_named(found: Jobs) -> None:
    first, second = found["interface", 2]
    assert "GLOO_SOCKET_IFNAME names a network interface that this machine does not have" in second["text"]
    assert "nosuch0" in second["text"]
    assert "did not meet the others" in first["text"]
