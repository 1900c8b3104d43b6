"""Hosts as users write them: `--hosts` and MPI hostfiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whet.errors import ConfigError
from whet.launch.arguments import HostsArguments
from whet.launch.over_ssh import Host, hosts_of_file, hosts_of_option, variables


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1,h2", [Host("h1", None), Host("h2", None)]),
        ("h1:2, h2:4,", [Host("h1", 2), Host("h2", 4)]),
        ("ada@node-1.cluster:2", [Host("ada@node-1.cluster", 2)]),
        ("10.0.0.1:2,[fe80::1]:3,2001:db8::7", [Host("10.0.0.1", 2), Host("fe80::1", 3), Host("2001:db8::7", None)]),
        ("ada@[fd00::1]:2,ada@fd00::2", [Host("ada@fd00::1", 2), Host("ada@fd00::2", None)]),
        ("fe80::1%eth0,[fe80::2%eth0.7]:3", [Host("fe80::1%eth0", None), Host("fe80::2%eth0.7", 3)]),
        ("h1,h1", [Host("h1", 2)]),
        ("h1:2,h2,h1:1", [Host("h1", 3), Host("h2", None)]),
    ],
)
def test_hosts_option_is_read(text: str, hosts: list[Host]) -> None:
    assert hosts_of_option(text) == hosts


def test_hostfile_is_read_in_every_form_of_mpi(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# our machines\nh1\nh2 slots=2   # two sockets\n\nh3:4\nh4 slots=2 max_slots=4\nh5 cpu=3\n", "utf-8"
    )
    found = hosts_of_file(path)
    assert found == [Host("h1", None), Host("h2", 2), Host("h3", 4), Host("h4", 2), Host("h5", 3)]


def test_hostfile_of_other_systems_is_read(tmp_path: Path) -> None:
    """Editors of Windows begin a file with a mark and end lines with CR LF; Open MPI allows spaces around =."""
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfh1 slots=2\r\nh2 slots = 4 max-slots=8\r\n# the end\r\n")
    assert hosts_of_file(path) == [Host("h1", 2), Host("h2", 4)]


@pytest.mark.parametrize(
    ("line", "got", "why"),
    [
        ("h2 slots=4 max_slots=2", "max_slots=2, slots=4", "max_slots must allow them"),
        ("h2 max_slots=2", "max_slots=2, without slots=N", "max_slots must allow them"),
        ("h2 max_slots=two slots=1", "two", "a whole number from 1"),
        ("h2:2 slots=4", "slots=4", "given once"),
        ("h2 slots=2 slots=4", "slots=4", "given once"),
        ("h2:2 ifname=ib0", "ifname=ib0", "--master_addr"),
        ("h2 binding=user", "binding=user", "only slots=N is understood"),
    ],
)
def test_words_of_a_hostfile_that_cannot_be_honoured_are_refused(line: str, got: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"h1\n{line}\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        hosts_of_file(path)
    (problem,) = caught.value.problems
    assert "line 2" in problem.what
    assert problem.got == got
    assert why in problem.why


def test_every_bad_line_of_a_hostfile_is_reported_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("h1\nh2 slots=0\n-oProxyCommand=x\nh3 gpus=4\nh4:two\n", "utf-8")
    with pytest.raises(ConfigError) as caught:
        hosts_of_file(path)
    lines = [problem.what for problem in caught.value.problems]
    assert [line.rpartition("line ")[2] for line in lines] == ["2)", "3)", "4)", "5)"]


@pytest.mark.parametrize("text", ["", ",", "h1:0", "h1:-1", "h 1", "-oProxyCommand=touch", "h1;reboot", "h1:2:3x"])
def test_hosts_that_are_not_understood_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        hosts_of_option(text)


def test_a_missing_hostfile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the hostfile cannot be read"):
        hosts_of_file(tmp_path / "none")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": "h1", "hostfile": "f"}, "the hosts are given in two ways"),
        ({"hosts": "h1", "nnodes": 2, "master_addr": "h1"}, "the hosts are given in two ways"),
        ({"nnodes": 2}, "master_addr is missing"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h1"}, "node_rank is not the number of a node"),
        ({"nnodes": 0}, "node_rank is not the number of a node"),
        ({"env": ("A=1",)}, "env has no effect here"),
        ({"nnodes": 2, "master_addr": "h1", "working_dir": "/"}, "working_dir has no effect here"),
        ({"hosts": "h1", "join_timeout_s": 5}, "join_timeout_s has no effect here"),
        ({"heartbeat_timeout_s": 20}, "heartbeat_timeout_s has no effect here"),
        ({"hosts": "h1", "heartbeat_timeout_s": 1}, "heartbeat_timeout_s is out of range"),
        ({"hosts": "h1", "master_port": 70000}, "master_port is out of range"),
    ],
)
def test_options_for_hosts_that_contradict_or_do_nothing_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        HostsArguments(**given)


def test_a_variable_that_is_not_set_cannot_be_passed() -> None:
    assert variables(["A", "B=x=y"], {"A": "1", "HF_HOME": "/hf", "OTHER": "2"}) == {
        "A": "1", "B": "x=y", "HF_HOME": "/hf",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="a variable that is to be passed is not set"):
        variables(["NONE_SUCH"], {})
