"""Hosts that answer late, in the words of another version, or under two names; the launcher's own machine."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from whet.errors import ConfigError
from whet.hardware.network import nominal_speeds
from whet.launch.agent.facts import Facts
from whet.launch.hosts import checks, ssh
from whet.launch.hosts.member import Member, close_all, opened
from whet.launch.hosts.preflight import prepare
from whet.version import __version__

AGENT = """
import json, sys, time
facts = json.loads(sys.argv[1])
for line in sys.stdin:
    asked = json.loads(line.partition(": ")[2])
    answer = {"find": {"facts": facts}, "clock": {"time": time.time()}, "show": {"picture": []}}.get(asked.get("ask"))
    if answer is not None:
        time.sleep(2.5 if asked["ask"] == "clock" else 0)  # the launcher waits for 2 s
        print("whet-launch:", json.dumps(answer | {"question": asked.get("question")}), flush=True)
"""


@pytest.fixture
def members() -> Iterator[list[Member]]:
    found: list[Member] = []
    yield found
    close_all(found)


def answering(name: str, **facts: Any) -> Member:
    """Return a host that is real to the launcher: a process at the other end of two pipes."""
    own = {"name": name, "whet": __version__, "python": "3.12.1", "torch": "2.9", "n_ranks": 1, "port": 29500} | facts
    return opened(name, [sys.executable, "-c", AGENT, json.dumps(own)])


def prepared(members: Sequence[Member]) -> Any:
    return prepare(members, lambda _: {}, None, 10)


def test_a_late_answer_is_not_taken_for_that_of_the_next_question(members: list[Member]) -> None:
    members.append(answering("h1"))
    assert prepared(members).shown["h1"]["picture"] == []


def test_another_version_is_named_whatever_else_it_says(members: list[Member]) -> None:
    members += [answering("h1"), answering("h2", whet="9.0", cores=[1, 2], problems=[{"what": "odd", "color": 3}])]
    with pytest.raises(ConfigError, match="h2: another version of whet"):
        prepared(members)


@pytest.mark.parametrize("by_hand", [False, True])
def test_another_build_of_torch_is_installed_where_it_lacks(members: list[Member], by_hand: bool) -> None:
    """A build's name after + is none that pip finds; launchers that were started by hand have no --python."""
    members += [answering("h1", torch="2.13.0+cpu"), answering("h2", torch="2.9.0"), answering("h3", torch="")]
    for member in members:
        member.by_hand = by_hand
    with pytest.raises(ConfigError) as refused:
        prepared(members)
    fixes = {problem.what: problem.fix for problem in refused.value.problems}
    for name in ("h2", "h3"):
        fix = fixes[f"{name}: another version of torch"]
        assert f"install it on {name} (pip install torch==2.13.0, from PyTorch's index for cpu)" in fix
        assert ("--python" in fix) is not by_hand


def test_torch_that_the_first_host_lacks_is_installed_there(members: list[Member]) -> None:
    members += [answering("h1", torch=""), answering("h2")]
    with pytest.raises(ConfigError, match=r"install it on h1 \(pip install torch==2\.9\)"):
        prepared(members)


def test_a_node_that_never_answers_is_not_reached_by_ssh(members: list[Member]) -> None:
    """--connect_timeout_s and ssh are for hosts that the launcher reaches itself."""
    members.append(opened("node 1 (h2)", [sys.executable, "-c", "import sys; sys.exit('No module named whet')"]))
    members[0].by_hand = True
    with pytest.raises(ConfigError) as refused:
        prepared(members)
    (problem,) = refused.value.problems
    assert problem.what == "node 1 (h2) does not answer"
    assert "what its launcher prints" in problem.fix


def test_a_machine_under_two_names_is_refused(members: list[Member]) -> None:
    here = {"10.0.0.1": "eth0", "172.17.0.1": "docker0"}
    there = {"10.0.0.2": "eth0", "172.17.0.1": "docker0"}
    for name, addresses in (("a", here), ("b", there), ("c", here)):
        members.append(answering(name))
        members[-1].facts = Facts.of({"name": name, "whet": __version__, "addresses": addresses})
    assert [problem.what for problem in checks.problems(members)] == ["c is the same machine as a"]


@pytest.mark.parametrize(
    ("own", "name", "same"),
    [
        ("node1.cluster.invalid", "node1", True),
        ("node1", "node1.cluster.invalid", True),
        ("Node1.cluster.invalid", "node1", True),
        ("node1.cluster.invalid", "node1.other.invalid", False),
        ("node1", "node11", False),
        ("node1.cluster.invalid", "node", False),
    ],
)
def test_the_machine_of_the_launcher_is_known_with_and_without_its_domain(
    own: str, name: str, same: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((uname[0], own, *uname[2:])))
    (tmp_path / "config").touch()
    assert ssh.is_this_machine(name, f"ssh -F {tmp_path / 'config'}") is same


def test_ssh_waits_as_long_as_the_launcher() -> None:
    words = ssh.agent_command("no-such-host.invalid", "ssh", "python3", 60.0)
    assert "-oConnectTimeout=59" in words


def test_another_version_of_transformers_is_named(members: list[Member]) -> None:
    members += [answering("h1", transformers="5.2.0"), answering("h2", transformers="5.1.0")]
    with pytest.raises(ConfigError) as refused:
        prepared(members)
    fixes = {problem.what: problem.fix for problem in refused.value.problems}
    assert "install it on h2 (pip install transformers==5.2.0)" in fixes["h2: another version of transformers"]


@pytest.mark.parametrize(
    ("named_gbit", "gbit_per_s", "reported"),
    [
        ((10.0, 10.0), (9.0, 8.0), []),
        ((10.0, 10.0), (0.9, 8.0), ["h1"]),
        ((10.0, 1.0), (0.9, 0.9), []),
        ((100.0, 100.0), (6.0, 7.0), []),
        ((None, None), (0.9, 0.1), ["h2"]),
        ((None, 10.0), (0.9, 0.9), ["h1", "h2"]),
    ],
)
def test_slow_link_between_two_hosts_is_reported_with_what_it_costs(
    members: list[Member],
    named_gbit: Sequence[float | None],
    gbit_per_s: Sequence[float],
    reported: Sequence[str],
) -> None:
    """Two hosts have no third to be compared with: the speed that their interfaces name counts, if they name one."""
    for n, named in enumerate(named_gbit, start=1):
        members.append(answering(f"h{n}"))
        members[-1].interface = "eth0"
        bits = {"eth0": 1e9 * named} if named else {}
        members[-1].facts = Facts.of({"name": f"h{n}", "whet": __version__, "bits_per_s": bits})
    lines = checks.remarks(members, {f"h{n}": 1e9 / 8 * speed for n, speed in enumerate(gbit_per_s, start=1)})
    assert [line.partition(":")[0] for line in lines] == reported
    for line in lines:
        assert "each step of a model with 100 million weights waits up to" in line


def test_speed_of_interfaces_is_read_where_it_is_a_devices_own(tmp_path: Path) -> None:
    for name, speed, device in (("eth0", "25000", True), ("eth1", "-1", True), ("veth0", "10000", False)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
        if device:
            (tmp_path / name / "device").mkdir()
    (tmp_path / "down" / "device").mkdir(parents=True)
    assert nominal_speeds(tmp_path) == {"eth0": 25e9}


@pytest.mark.parametrize(
    ("gbit_per_s", "reported"),
    [
        ((9.0, 0.05, 9.0), "h2"),
        ((0.3, 0.05, 9.0), "h2"),
        ((0.05, 0.05, 9.0), "h2"),
        ((9.0, 0.05, 0.05, 9.0, 8.0), "h3"),
        ((1.0, 1.0, 20.0, 1.0), ""),
        ((9.0, 4.0, 9.0), ""),
        ((9.0, 9.0, 0.0), "h3"),
    ],
    ids=[
        "sends slowly",
        "its answers slow its sender",
        "both ways",
        "both ways of five",
        "two on one machine",
        "busy",
        "dead",
    ],
)
def test_the_host_with_the_slow_link_is_named_and_not_its_neighbour(
    members: list[Member], gbit_per_s: Sequence[float], reported: str
) -> None:
    """Speeds are those from each host to the next, the last one's to the first."""
    members += [answering(f"h{n + 1}") for n in range(len(gbit_per_s))]
    speeds = {member.name: 1e9 / 8 * speed for member, speed in zip(members, gbit_per_s, strict=True)}
    lines = checks.remarks(members, speeds)
    assert [line.partition(":")[0] for line in lines] == [reported] * bool(reported)
