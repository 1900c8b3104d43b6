"""Hosts as users write them: `--hosts` and MPI hostfiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from whet.errors import ConfigError
from whet.launch.arguments import HostsArguments
from whet.launch.over_ssh import Host, hosts_of_file, hosts_of_option, variables


def test_hosts_option_is_read() -> None:
    assert hosts_of_option("h1, ada@node-1.cluster:2,") == [Host("h1", None), Host("ada@node-1.cluster", 2)]
    assert hosts_of_option("10.0.0.1:2,[fe80::1%eth0]:3,ada@fd00::2") == [
        Host("10.0.0.1", 2), Host("fe80::1%eth0", 3), Host("ada@fd00::2", None),
    ]  # fmt: skip
    assert hosts_of_option("h1:2,h2,h1:1") == [Host("h1", 3), Host("h2", None)]


def test_hostfile_is_read_in_every_form_of_mpi(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text(
        "# our machines\nh1\nh2 slots=2   # two sockets\n\nh3:4\nh4 slots=2 max_slots=4\nh5 cpu=3\n", "utf-8"
    )
    found = hosts_of_file(path)
    assert found == [Host("h1", None), Host("h2", 2), Host("h3", 4), Host("h4", 2), Host("h5", 3)]


@pytest.mark.parametrize(
    ("line", "got", "why"),
    [
        ("h2 slots=4 max_slots=2", "max_slots=2, slots=4", "max_slots must allow them"),
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


def test_hosts_that_are_not_understood_are_refused() -> None:
    for text in ("", "h1:0", "h 1", "-oProxyCommand=touch", "h1;reboot", "h1:2:3x"):
        with pytest.raises(ConfigError):
            hosts_of_option(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": "h1", "hostfile": "f"}, "the hosts are given in two ways"),
        ({"nnodes": 2}, "master_addr is missing"),
        ({"nnodes": 2, "node_rank": 2, "master_addr": "h1"}, "node_rank is not the number of a node"),
        ({"hosts": "h1", "master_port": 70000}, "master_port is not from 1, up to 65535"),
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
