"""Ranks that find rank 0 late or not at all: each says what it waits for, and ends with the reason."""

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
    "own address": {"environment": {"MASTER_ADDR": "127.0.1.1"} | _APART, "timeout_s": 2, "rank_0_does": "is missing"},
    "something else": {"environment": _APART, "timeout_s": 2, "rank_0_does": "is something else"},
    "late": {"rank_0_does": "starts late"},
    "one machine": {"kind": "listens"},
    "by its name": {"kind": "listens", "environment": {"MASTER_ADDR": socket.gethostname()}},
    "started again": {
        "kind": "listens",
        "environment": {"TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "1"},
    },
    "nobody else": {"of_rank": {"1": {"WORLD_SIZE": "1"}}, "timeout_s": 20},
    "interface": {"environment": _APART, "of_rank": {"1": {"GLOO_SOCKET_IFNAME": "nosuch0"}}},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("joining"))
    for name, job in _JOBS.items():
        jobs.add(name, n_ranks=2, **({"kind": "joins"} | job))
    return jobs.run()


def _printed(found: Jobs, name: str, rank: int) -> str:
    return (found.folder(name, 2) / f"output-{rank}.txt").read_text("utf-8")


def test_name_that_cannot_be_resolved_ends_every_rank_with_the_reason(found: Jobs) -> None:
    for rank in found["no such name", 2]:
        assert "the name nohost.invalid cannot be resolved here" in rank["text"]
        assert "getent hosts nohost.invalid" in rank["text"]


def test_address_of_another_machine_is_named_on_rank_0_and_unreached_by_the_others(found: Jobs) -> None:
    """Some networks answer in the place of every address: then rank 1 finds a program that is not rank 0."""
    first, second = found["another machine", 2]
    assert "192.0.2.1 is no address of rank 0's machine" in first["text"]
    assert "rank 1 of 2 does not reach rank 0 at 192.0.2.1" in second["text"]


def test_rank_that_takes_itself_for_rank_0s_machine_is_named(found: Jobs) -> None:
    second = found["own address", 2][1]
    assert "127.0.1.1 is this machine itself" in second["text"]
    assert "MASTER_ADDR" in second["text"]


def test_other_program_on_the_port_is_named(found: Jobs) -> None:
    second = found["something else", 2][1]
    assert "something else than rank 0 answers on port" in second["text"], second


def test_rank_0_that_starts_late_is_waited_for_with_a_line(found: Jobs) -> None:
    assert [rank.get("agreed") for rank in found["late", 2]] == [True, True]
    assert "rank 1 of 2 waits for 127.0.0.1:" in _printed(found, "late", 1)
    assert "rank 0 does not listen yet" in _printed(found, "late", 1)


def test_rank_0_says_that_it_waits_for_ranks_that_never_come(found: Jobs) -> None:
    first = found["nobody else", 2][0]
    assert "waits at 127.0.0.1:" in _printed(found, "nobody else", 0)
    assert "did not meet the others" in first["text"]


@pytest.mark.parametrize("name", ["one machine", "by its name", "started again"])
def test_ranks_of_one_machine_listen_on_loopback_only(found: Jobs, name: str) -> None:
    """127.0.0.1, as /proc/net/tcp writes it: nobody outside can take the place of a rank."""
    for rank in found[name, 2]:
        assert set(rank["listens"]) == {"0100007F"}, rank


def test_interface_that_one_machine_lacks_ends_every_rank(found: Jobs) -> None:
    for rank in found["interface", 2]:
        assert "GLOO_SOCKET_IFNAME=nosuch0 on rank 1" in rank["text"]
