"""Which cores each rank gets, on machines of many kinds, and which rank is blamed if they end."""

from __future__ import annotations

from pathlib import Path

import pytest

import whet
from machines import MACHINES
from whet.cli.commands import COMMANDS, RANKED
from whet.hardware import cpu, topology
from whet.hardware.rank_plan import RankPlan, plan_ranks
from whet.launch.arguments import HostsArguments, LaunchArguments
from whet.launch.picture import drawn
from whet.launch.rank import Ended, first_failure
from whet.launch.run import run_launch

AUTO = {
    "laptop, hybrid": (1, 14),
    "one socket": (1, 28),
    "two sockets": (2, 55),
    "two sockets, hyper-threads off": (2, 19),
    "two sockets, hyper-threads switched off": (2, 4),
    "sub-NUMA clusters": (8, 13),
    "HBM as nodes without CPUs": (4, 13),
    "AMD, one node a socket": (2, 63),
    "AMD, four nodes a socket": (4, 7),
    "Arm server": (1, 64),
    "virtual machine without nodes": (1, 2),
    "container with a quota of 6.5 cores": (1, 6),
    "container of cgroup v1, 4 cores": (1, 4),
    "pod with a set of CPUs": (1, 4),
}
"""Machine -> ranks and threads of each, with nothing asked for."""


def usable(name: str, root: Path) -> topology.Topology:
    if not (root / "sys").exists():  # thousands of files
        MACHINES[name]().write(root)
    machine = topology.read(root)
    allowed = (
        cpu.cpu_list((root / "sys/fs/cgroup/kubepods.slice/pod1/cpuset.cpus").read_text().split())
        if "pod with" in name
        else None
    )
    return machine if allowed is None else machine.within(allowed)


def plan(name: str, root: Path, n_ranks: int | None = None, kept_free: int | None = None) -> tuple[RankPlan, ...]:
    own = usable(name, root)
    return plan_ranks(own, quota_cores=cpu.quota_cores(root), n_ranks=n_ranks, kept_free=kept_free)


@pytest.mark.parametrize("name", MACHINES)
def test_one_rank_for_each_node_with_a_thread_for_each_core(name: str, tmp_path: Path) -> None:
    ranks = plan(name, tmp_path)
    assert (len(ranks), {rank.n_threads for rank in ranks}) == (AUTO[name][0], {AUTO[name][1]})
    assert all(len(rank.nodes) == 1 for rank in ranks) or len(ranks) == 1
    assert [rank.local_rank for rank in ranks] == list(range(len(ranks)))


@pytest.mark.parametrize("name", MACHINES)
def test_ranks_share_no_core_and_no_core_twice(name: str, tmp_path: Path) -> None:
    own = usable(name, tmp_path)
    for n_ranks in (1, 2, 3, 4, 5, 8):
        _require_cores_of_their_own(own, name, n_ranks, tmp_path)


def _require_cores_of_their_own(own: topology.Topology, name: str, n_ranks: int, tmp_path: Path) -> None:
    if n_ranks > AUTO[name][0] * AUTO[name][1]:
        with pytest.raises(whet.WhetError, match="do not fit on this machine"):
            plan(name, tmp_path, n_ranks)
        return
    ranks = plan(name, tmp_path, n_ranks, kept_free=0)
    used = [cpu for rank in ranks for cpu in rank.cpus]
    assert len(ranks) == n_ranks
    assert len(used) == len(set(used))
    first = {core.cpus[0] for core in own.cores}
    assert set(used) <= first  # one thread of a core: its second would share the product units
    threads = [rank.n_threads for rank in ranks]
    assert all(1 <= rank.n_threads <= len(rank.cpus) for rank in ranks)
    quota = cpu.quota_cores(tmp_path)
    assert quota is None or sum(threads) <= quota


def test_ranks_do_not_cross_nodes_where_there_are_enough(tmp_path: Path) -> None:
    ranks = plan("two sockets", tmp_path, 3, kept_free=0)
    assert [rank.nodes for rank in ranks] == [(0,), (0,), (1,)]
    assert [len(rank.cores) for rank in ranks] == [28, 28, 56]
    assert [rank.n_threads for rank in ranks] == [28, 28, 37]


def test_a_single_rank_takes_all_nodes_and_keeps_no_core_free(tmp_path: Path) -> None:
    (rank,) = plan("two sockets", tmp_path, 1)
    assert (rank.nodes, rank.n_threads, rank.kept_free) == ((0, 1), 112, 0)


def test_cores_kept_free_are_those_asked_for(tmp_path: Path) -> None:
    assert {rank.n_threads for rank in plan("two sockets", tmp_path, kept_free=4)} == {52}
    (small,) = plan("virtual machine without nodes", tmp_path / "vm", kept_free=9)
    assert (small.n_threads, small.kept_free) == (1, 1)  # one thread always computes


def test_a_quota_is_rounded_down_and_binds_to_no_single_cores(tmp_path: Path) -> None:
    """Another container on the machine may have the same cores: with a quota, any core may be the free one."""
    (rank,) = plan("container with a quota of 6.5 cores", tmp_path)
    assert rank.n_threads == 6
    assert len(rank.cpus) == 56


def test_too_many_ranks_are_refused_with_the_number_that_fits(tmp_path: Path) -> None:
    with pytest.raises(whet.WhetError, match=r"(?s)64 ranks do not fit.*28 physical cores.*from 1 to 28"):
        plan("one socket", tmp_path, 64)
    with pytest.raises(whet.WhetError, match=r"a quota of 4 cores(?s:.*)from 1 to 4"):
        plan("container of cgroup v1, 4 cores", tmp_path / "v1", 5)


def test_the_picture_shows_nodes_with_their_ranks(tmp_path: Path) -> None:
    own = usable("two sockets", tmp_path)
    assert drawn("a", own, plan_ranks(own)) == [
        "a: 2 sockets, 2 NUMA nodes, 112 cores usable",
        "  socket 0, node 0, 549.8 GB  CPUs 0-55    rank 0: 55 threads, 1 core kept free",
        "  socket 1, node 1, 549.8 GB  CPUs 56-111  rank 1: 55 threads, 1 core kept free",
    ]


@pytest.mark.parametrize(
    ("name", "options", "command", "said"),
    [
        ("two sockets", {}, ("qa", "--do_train"), "a step has 2 times the rows of one process"),
        ("sub-NUMA clusters", {}, ("lm",), "a step has 8 times the rows of one process"),
        ("two sockets", {"nproc_per_node": "2"}, ("qa", "--do_train"), None),
        ("two sockets", {}, ("predict",), None),
        ("two sockets", {}, (), None),
        ("one socket", {}, ("qa", "--do_train"), None),
    ],
)
def test_the_plan_says_that_ranks_which_nobody_asked_for_make_a_step_larger(
    name: str, options: dict[str, str], command: tuple[str, ...], said: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    own = usable(name, tmp_path)
    monkeypatch.setattr(topology, "read", lambda cpus: own)
    monkeypatch.setattr(cpu, "usable_cpus", lambda: {one for core in own.cores for one in core.cpus})
    monkeypatch.setattr(cpu, "quota_cores", lambda: None)
    asked = LaunchArguments(command=command, dry_run=True, **options)
    assert run_launch(asked, HostsArguments(), COMMANDS, RANKED) == 0
    told = capsys.readouterr().err
    assert ("a step has" in told) == (said is not None)
    assert (said or "") in told
    assert max(map(len, told.splitlines()[1:])) <= 80


@pytest.mark.parametrize("name", MACHINES)
def test_the_picture_fits_80_columns(name: str, tmp_path: Path) -> None:
    own = usable(name, tmp_path)
    for n_ranks in (None, 1, 2, 3):
        if n_ranks is None or n_ranks <= AUTO[name][1]:
            assert max(map(len, drawn("node-17", own, plan_ranks(own, n_ranks=n_ranks)))) <= 80


def test_a_killed_rank_is_blamed_and_not_those_that_lost_it() -> None:
    """Which host hears of the end first is chance; an error or an abort in the same moment may follow from a kill."""

    def ended(rank: int, code: int, at: float, *, by_itself: bool = True) -> Ended:
        return Ended(rank, code, at, by_itself, "")

    asked, aborted = ended(3, 137, 4.0, by_itself=False), ended(2, 134, 4.9)
    lost, killed = ended(0, 1, 5.0), ended(1, 137, 5.1)
    assert first_failure([asked, aborted, lost, killed]) == killed
    assert first_failure([asked, lost, aborted]) == aborted
    assert first_failure([asked, ended(1, 0, 3.0)]) == asked
    assert first_failure([ended(1, 0, 3.0)]) is None
