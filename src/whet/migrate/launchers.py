"""What stands before the script in a command line: prefixes, Python, and the launchers that start ranks.

A launcher's table says how many words each option takes and what becomes of it. `whet launch` takes the place of a
launcher; one whose ranks only it can count (elastic torchrun, Slurm) stays, and starts whet as it did the script.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from whet.config import secrets
from whet.config.settings import nearest
from whet.errors import MASK, ConfigError
from whet.migrate import accelerate, variables
from whet.migrate.draft import Draft, Ranks, Status, shown
from whet.migrate.programs import NOT_TAKEN, program_of, why_not
from whet.migrate.shell import ASKS, PREPARES, RUNS, TRACE, Live, Script, Simple, Word, is_of_intel, read, sourced

Act = Callable[[Draft, "Given"], None]


@dataclass(frozen=True, slots=True)
class Given:
    """An option of a launcher with its values."""

    name: str
    text: str
    """As it was written."""
    values: Sequence[Word]

    @property
    def value(self) -> Word:
        """Its first value."""
        return self.values[0] if self.values else Word()


class Option(NamedTuple):
    """An option that a launcher knows."""

    takes: int
    """How many words follow it."""
    act: Act


def _says(status: Status, why: str, takes: int = 0) -> Option:
    return Option(takes, lambda draft, given: draft.say(given.text, status, why))


def _sets(name: str, why: str = "", takes: int = 1, value: str | None = None) -> Option:
    """Return an option that becomes one of whet launch, with its own value or this one."""

    def act(draft: Draft, given: Given) -> None:
        draft.ranks.options[name] = given.value if value is None else Word.of(value)
        draft.say(given.text, "translated", why, f"whet launch --{name} {draft.ranks.options[name].text}")

    return Option(takes, act)


def _total(draft: Draft, given: Given) -> None:
    draft.ranks.total = given.value
    draft.say(given.text, "translated", "ranks in all; whet launch counts those of a host", "whet launch")


def _per_host(draft: Draft, given: Given) -> None:
    value = given.value
    if value.text in ("gpu", "cpu", "auto"):
        value, why = Word.of("auto"), "one rank for each NUMA node"
    else:
        why = "ranks of a host"
    draft.ranks.per_host = value
    draft.say(given.text, "translated", why, f"whet launch --nproc_per_node {value.text}")


def _n_hosts(draft: Draft, given: Given) -> None:
    draft.ranks.n_hosts = given.value
    if given.value.text == "1" and not draft.ranks.several_hosts:
        draft.say(given.text, "done", "one machine")
    else:
        draft.say(given.text, "translated", "the first hosts of the file", "whet launch")


def _hosts(draft: Draft, given: Given) -> None:
    draft.ranks.hosts += [host for host in given.value.text.split(",") if host]
    draft.say(given.text, "translated", "over ssh", f"whet launch --hosts {','.join(draft.ranks.hosts)}")


def _variable(draft: Draft, given: Given) -> None:
    """Read `-genv NAME VALUE`, `-genv NAME=VALUE` and `-x NAME`."""
    pair = given.value.cut("=")
    name, value = (pair[0].text, pair[1]) if pair else (given.value.text, given.values[1] if given.values[1:] else None)
    if value is None:
        _named(draft, given)
    else:
        draft.given_variables[name] = value


def _named(draft: Draft, given: Given) -> None:
    """Pass the variables NAME,NAME of the environment that the launcher is started in."""
    draft.ranks.env += [name for name in given.value.text.split(",") if name not in draft.given_variables]
    draft.say(given.text, "done", "ranks get the variables of the launcher")


def _all_variables(draft: Draft, given: Given) -> None:
    draft.ranks.passes_all = given.text


def _map_by(draft: Draft, given: Given) -> None:
    if match := re.match(r"ppr:(\d+):node", given.value.text):
        _per_host(draft, Given(given.name, given.text, [Word.of(match[1])]))
    else:
        draft.say(given.text, "done", "whet launch gives each rank the cores and the memory of a NUMA node")


_BOUND = "whet launch binds each rank to the cores of its part of the machine"
_OVER_SSH = "whet launch starts ranks over ssh"
_OWN_LOG = "rank 0 writes to the terminal, the others to files in --log_dir"
_AGENT = "whet has its own way"
_MPI: Mapping[str, Option] = {
    **dict.fromkeys(("n", "np"), Option(1, _total)),
    **dict.fromkeys(("ppn", "perhost", "npernode", "N", "ranks_per_proc"), Option(1, _per_host)),
    **dict.fromkeys(("f", "hostfile", "machinefile", "machine"), _sets("hostfile", "over ssh")),
    **dict.fromkeys(("hosts", "host", "H"), Option(1, _hosts)),
    **dict.fromkeys(("genv", "env"), Option(2, _variable)),
    "x": Option(1, _variable),
    **dict.fromkeys(("genvall", "envall"), Option(0, _all_variables)),
    **dict.fromkeys(("genvlist", "envlist"), Option(1, _named)),
    **dict.fromkeys(("mca", "gmca", "prtemca", "pmixmca"), _says("no effect", "whet starts ranks without MPI", 2)),
    **dict.fromkeys(("bind_to", "rank_by", "cpu_set", "cpu_list", "binding"), _says("done", _BOUND, 1)),
    "map_by": Option(1, _map_by),
    **dict.fromkeys(("bootstrap", "launcher", "rmk"), _says("done", _OVER_SSH, 1)),
    **dict.fromkeys(("bootstrap_exec", "launcher_exec"), _sets("ssh_command")),
    **dict.fromkeys(("wdir", "wd"), _sets("working_dir")),
    **dict.fromkeys(("iface",), _says("done", "whet launch finds the interface that leads to the other ranks", 1)),
    **dict.fromkeys(("output_filename", "outfile_pattern", "errfile_pattern"), _says("done", _OWN_LOG, 1)),
    **dict.fromkeys(
        ("tag_output", "timestamp_output", "l", "prepend_rank", "report_bindings", "print_rank_map", "v", "verbose"),
        _says("no effect", _OWN_LOG),
    ),
    **dict.fromkeys(
        ("allow_run_as_root", "oversubscribe", "use_hwthread_cpus", "nolocal", "display_map", "mpi_params"),
        _says("no effect", "whet starts ranks without MPI"),
    ),
    "prefix": _says("no effect", "whet starts ranks without MPI", 1),
    "pernode": Option(0, lambda draft, given: _per_host(draft, Given(given.name, given.text, [Word.of(1)]))),
    "configfile": _says("refused", "write what it says into the command line", 1),
}
"""Options of Intel MPI, MPICH and Open MPI, with one dash or two."""
_TORCHRUN: Mapping[str, Option] = {
    "nproc_per_node": Option(1, _per_host),
    "nnodes": _sets("nnodes", "start whet launch on each node"),
    "node_rank": _sets("node_rank"),
    "master_addr": _sets("master_addr"),
    "master_port": _sets("master_port"),
    "rdzv_endpoint": Option(1, lambda draft, given: _endpoint(draft, given)),
    "max_restarts": _sets("max_restarts"),
    "log_dir": _sets("log_dir"),
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_id", "rdzv_conf", "local_addr", "role", "monitor_interval", "start_method",
         "event_log_handler", "logs_specs", "signals_to_handle", "shutdown_timeout"),
        _says("done", f"{_AGENT} of meeting, watching and ending ranks", 1),
    ),
    "standalone": _says("done", "ranks of one machine meet on 127.0.0.1"),
    **dict.fromkeys(("use_env", "virtual_local_rank"), _says("done", "whet reads the rank from variables")),
    **dict.fromkeys(("redirects", "r", "tee", "t", "local_ranks_filter"), _says("done", _OWN_LOG, 1)),
    "numa_binding": _says("done", _BOUND, 1),
    "no_python": _says("no effect", "whet launch tells a program from a script by itself"),
}  # fmt: skip
_DEEPSPEED: Mapping[str, Option] = {
    **dict.fromkeys(("num_gpus", "num_accelerators"), Option(1, _per_host)),
    "hostfile": _sets("hostfile", "over ssh"),
    "num_nodes": Option(1, _n_hosts),
    "include": Option(1, lambda draft, given: _included(draft, given)),
    **dict.fromkeys(("master_addr", "master_port"), _says("done", "ranks meet on the first host, at a free port", 1)),
    "bind_cores_to_rank": _says("done", _BOUND),
    "bind_core_list": _says("refused", "put numactl -C or taskset -c before whet launch", 1),
    "launcher": _says("done", _OVER_SSH, 1),
    "launcher_args": _says("no effect", _OVER_SSH, 1),
    "ssh_port": _says("refused", "name it in ~/.ssh/config, or in --ssh_command 'ssh -p PORT'", 1),
    **dict.fromkeys(("no_local_rank", "no_python", "force_multi"), _says("no effect", "whet reads variables")),
    "module": _says("no effect", "whet's commands are modules"),
    "autotuning": _says("refused", "use --auto_find_batch_size", 1),
}
_NO_INSTANCES = "whet starts ranks of one run, not several runs: start whet launch once for each"
_IPEXRUN: Mapping[str, Option] = {
    **dict.fromkeys(("nprocs_per_node", "nproc_per_node"), Option(1, _per_host)),
    "nnodes": Option(1, lambda draft, given: _nodes(draft, given)),
    "hostfile": _sets("hostfile", "over ssh"),
    "nodes_list": _says("done", "numactl --cpunodebind keeps a run on some NUMA nodes", 1),
    "ccl_worker_count": _sets("kept_free_cores", "cores of each rank that are left for the exchange"),
    "logical_cores_for_ccl": _says("done", "whet launch leaves cores free for the exchange"),
    "logical_core_for_ccl": _says("done", "whet launch leaves cores free for the exchange"),
    "master_addr": _says("done", "ranks meet on the first host", 1),
    "master_port": _says("done", "ranks meet on the first host", 1),
    "memory_allocator": _sets("memory_allocator"),
    "omp_runtime": _sets("openmp"),
    "enable_tcmalloc": _sets("memory_allocator", takes=0, value="tcmalloc"),
    "enable_jemalloc": _sets("memory_allocator", takes=0, value="jemalloc"),
    "use_default_allocator": _sets("memory_allocator", takes=0, value="default"),
    "disable_iomp": _sets("openmp", takes=0, value="default"),
    "enable_iomp": _sets("openmp", takes=0, value="intel"),
    "distributed": Option(0, lambda draft, given: _distributed(draft, given)),
    "throughput_mode": Option(0, lambda draft, given: _distributed(draft, given)),
    "latency_mode": _says("refused", _NO_INSTANCES),
    "ninstances": Option(1, lambda draft, given: _instances(draft, given)),
    **dict.fromkeys(("instance_idx", "rank"), _says("refused", _NO_INSTANCES, 1)),
    **dict.fromkeys(
        ("ncores_per_instance", "ncore_per_instance", "core_list", "cores_list", "node_id"),
        _says("refused", "put numactl -C or taskset -c with these cores before whet launch, which uses what it may", 1),
    ),
    **dict.fromkeys(
        ("use_logical_core", "use_logical_cores", "use_e_cores"),
        _says("no effect", "whet launch gives a rank physical cores, one thread each"),
    ),
    **dict.fromkeys(
        ("skip_cross_node_cores", "disable_numactl", "disable_taskset", "bind_numa_node", "benchmark"),
        _says("done", _BOUND),
    ),
    **dict.fromkeys(("multi_task_manager", "strategy"), _says("done", _BOUND, 1)),
    **dict.fromkeys(("log_path", "log_dir"), _sets("log_dir")),
    "log_file_prefix": _says("no effect", _OWN_LOG, 1),
    **dict.fromkeys(("extra_mpi_params", "more_mpi_params", "mpi_args"), _says("no effect", _OVER_SSH, 1)),
    **dict.fromkeys(("auto_ipex", "auto_ipex_verbose", "disable_ipex_graph_mode", "verbose"),
                    _says("no effect", "Intel's extension for PyTorch is archived; whet has its own CPU path")),
    "dtype": Option(1, lambda draft, given: _dtype(draft, given)),
    "no_python": _says("no effect", "whet launch tells a program from a script by itself"),
}  # fmt: skip
"""Options of ipexrun and of torch.backends.xeon.run_cpu, in their older and newer spellings."""


def _endpoint(draft: Draft, given: Given) -> None:
    host, _, port = given.value.text.rpartition(":")
    draft.ranks.options["master_addr"] = Word.of(host or port)
    if host:
        draft.ranks.options["master_port"] = Word.of(port)
    draft.say(given.text, "translated", "", f"whet launch --master_addr {host or port}")


def _included(draft: Draft, given: Given) -> None:
    """Read node1:0,1@node2:0: the devices of each host become its ranks."""
    hosts = [part.partition(":") for part in given.value.text.split("@")]
    counted = [f"{name}:{len(slots.split(','))}" if slots else name for name, _, slots in hosts]
    if [name for name, _, _ in hosts] == ["localhost"]:
        draft.ranks.per_host = Word.of(counted[0].rpartition(":")[2])
        draft.say(given.text, "translated", "", f"whet launch --nproc_per_node {draft.ranks.per_host.text}")
    else:
        draft.ranks.hosts += counted
        draft.say(given.text, "translated", "over ssh", f"whet launch --hosts {','.join(counted)}")


def _distributed(draft: Draft, given: Given) -> None:
    draft.ranks.binds = False
    draft.say(given.text, "translated", "one rank for each NUMA node, unless a number is given", "whet launch")


def _nodes(draft: Draft, given: Given) -> None:
    draft.ranks.binds = False
    _n_hosts(draft, given)


def _instances(draft: Draft, given: Given) -> None:
    if given.value.text == "1":
        draft.say(given.text, "done", "one process")
    else:
        draft.say(given.text, "refused", _NO_INSTANCES)


def _dtype(draft: Draft, given: Given) -> None:
    name = {"bfloat16": "bf16", "float32": "fp32"}.get(given.value.text)
    if name is None:
        draft.say(given.text, "refused", "use --precision bf16 or fp32")
    else:
        draft.say(given.text, "translated", "", draft.put("precision", name))


def _taken(
    words: Sequence[Word], table: Mapping[str, Option], draft: Draft, ends: Callable[[Word], bool]
) -> tuple[list[Given], list[Word]]:
    """Return the options at the beginning of the words, and the words after them; unknown ones are refused."""
    found: list[Given] = []
    at = 0
    while at < len(words) and words[at].text.startswith("-") and not _names_module(words[at]):
        pair = words[at].cut("=") if words[at].text.startswith("--") else None
        name = (pair[0] if pair else words[at]).text.lstrip("-").replace("-", "_")
        option = table.get(name)
        after = words[at + 1 : at + 2]
        n_more = (
            option.takes if option else int(bool(after) and not after[0].text.startswith("-") and not ends(after[0]))
        )
        if name in ("genv", "env") and after and "=" in after[0].text:
            n_more = 1
        values = [pair[1]] if pair else [*words[at + 1 : at + 1 + n_more]]
        text = " ".join(word.spelled for word in words[at : at + 1 + (0 if pair else n_more)])
        at += 1 + (0 if pair else n_more)
        if option is None:
            like = nearest(name, [*table])
            meant = f"did you mean --{like}? " if like else ""
            draft.say(text, "refused", f"{meant}whet launch --help has its options; or keep your launcher: it starts "
                      "python -m whet as it did the script")  # fmt: skip
        else:
            found.append(Given(name, text, values))
    return found, [*words[at:]]


def _names_module(word: Word) -> bool:
    """Return whether a module follows, as after python -m."""
    return word.text.lstrip("-") in ("m", "module")


def _applied(draft: Draft, found: Sequence[Given], table: Mapping[str, Option]) -> None:
    for given in found:
        table[given.name].act(draft, given)


_PYTHON = re.compile(r"python[\d.]*$")


def _begins(word: Word) -> bool:
    """Return whether the program of a launcher begins with this word."""
    name = word.text.rsplit("/", 1)[-1]
    is_known = name in _LAUNCHERS or name in _WITH_COMMANDS or name in ("bash", "sh", "env")
    return bool(_PYTHON.match(name)) or name.endswith(".py") or is_known


_WITH_COMMANDS = {"accelerate": ("launch",), "trl": ("sft", "dpo")}
"""Programs that start a training by one of these commands."""


def _mpi(draft: Draft, name: str, words: list[Word]) -> list[Word]:
    draft.ranks.launched = True
    n_rows = len(draft.rows)
    found, rest = _taken(words, _MPI, draft, _begins)
    _applied(draft, found, _MPI)
    ranks = draft.ranks
    if ranks.total is None and ranks.per_host is None and not ranks.several_hosts:
        draft.say(name, "translated", "one rank for each NUMA node", "whet launch")
    place_ranks(draft)
    if not ranks.over_ssh:
        _stay_without_ssh(draft)
    if ranks.passes_all and ranks.several_hosts:
        why = "over ssh, ranks get the variables that are named: whet launch --env NAME, once for each"
        draft.say(ranks.passes_all, "refused", why)
    elif ranks.passes_all:
        draft.say(ranks.passes_all, "done", "ranks get the variables of the launcher")
    if any(word.text == ":" for word in rest):
        draft.say(":", "refused", "whet launch starts one command: write one line for it")
    if n_rows == len(draft.rows):
        draft.say(name, "translated", _OVER_SSH, "whet launch")
    return rest


def _stay_without_ssh(draft: Draft) -> None:
    """Leave out the options that `whet launch` has for other hosts, and say what they are on one machine."""
    if draft.ranks.options.pop("ssh_command", None) is not None:
        draft.correct("ssh_command", "no effect", why="the ranks of one machine need no ssh")
    if draft.ranks.options.pop("working_dir", None) is not None:
        why = "the ranks of one machine start in the folder of whet launch: change to this one with cd before it"
        draft.correct("working_dir", "refused", why=why)


def place_ranks(draft: Draft) -> None:
    """Give each host the ranks that the launcher gives it: of as many hosts as it takes, in their order."""
    ranks = draft.ranks
    total, per_host, n_hosts = _number(ranks.total), _number(ranks.per_host), _number(ranks.n_hosts)
    hosts = _named_hosts(ranks)
    if ranks.n_hosts is not None and ranks.total is None:
        _take_first(draft, hosts, n_hosts)
    elif ranks.total is None:
        return
    elif not ranks.several_hosts:
        _stay_here(draft, total, per_host)
    elif not hosts:
        _leave_to_the_file(draft, ranks.total)
    elif total is not None:
        _divide(draft, hosts, total, per_host)


def _leave_to_the_file(draft: Draft, total: Word) -> None:
    """Say what a file that is not here decides; what is wrong with names in the line, whet launch says."""
    file, per_host = draft.ranks.options.get("hostfile"), draft.ranks.per_host
    given = "" if file is None else f"{total.text} ranks on the hosts of {file.text}"
    if given and per_host is None:
        why = "say how many ranks each host gets: whet launch --nproc_per_node N, or slots=N in the file"
        draft.say(given, "refused", why)
    elif given and per_host is not None:
        why = "the file is not here: whet launch takes all of its hosts, and not the first for so many ranks"
        draft.say(given, "translated", why, f"whet launch --nproc_per_node {per_host.text}")


def _number(word: Word | None) -> int | None:
    return int(word.text) if word is not None and word.text.isdecimal() else None


def _stay_here(draft: Draft, total: int | None, per_host: int | None) -> None:
    """Start all ranks on this machine, unless it is not said where the others are."""
    ranks = draft.ranks
    if ranks.per_host is None or ranks.per_host == ranks.total or ranks.per_host.text == "auto":
        return
    if total is not None and per_host is not None and total <= per_host:
        ranks.per_host = ranks.total
    elif ranks.total is not None:
        given = f"{ranks.total.text} ranks, {ranks.per_host.text} on each host"
        draft.say(given, "refused", "name the hosts: whet launch --hosts node1,node2, or --hostfile FILE")


def _divide(draft: Draft, hosts: Sequence[tuple[str, int | None]], total: int, per_host: int | None) -> None:
    ranks = draft.ranks
    wanted = _wanted(hosts, total, per_host)
    if wanted is None:
        names = ", ".join(name for name, _ in hosts)
        why = f"whet launch takes --hosts name:ranks: divide them among {names}"
        draft.say(f"{total} ranks on {len(hosts)} hosts", "refused", why)
    elif wanted != [(name, per_host or slots) for name, slots in hosts]:
        ranks.options.pop("hostfile", None)
        equal = {n for _, n in wanted}
        ranks.per_host = Word.of(equal.pop()) if len(equal) == 1 else None
        ranks.hosts = [name if ranks.per_host else f"{name}:{n}" for name, n in wanted]
    elif per_host is None and "hostfile" not in ranks.options:
        ranks.hosts = [f"{name}:{n}" for name, n in wanted]


def _take_first(draft: Draft, hosts: Sequence[tuple[str, int | None]], n_hosts: int | None) -> None:
    """Name the first hosts, if a launcher takes no more of them."""
    ranks = draft.ranks
    if n_hosts == 1 and not ranks.several_hosts:
        return
    if n_hosts is None or n_hosts > len(hosts):
        text = ranks.n_hosts.text if ranks.n_hosts else ""
        where = "the file is not here: " if "hostfile" in ranks.options and not hosts else ""
        draft.say(f"{text} hosts", "refused", f"{where}name these hosts: whet launch --hosts node1,node2")
    elif n_hosts < len(hosts):
        ranks.options.pop("hostfile", None)
        chosen = hosts[:n_hosts]
        ranks.hosts = [name if ranks.per_host or slots is None else f"{name}:{slots}" for name, slots in chosen]


def _named_hosts(ranks: Ranks) -> list[tuple[str, int | None]]:
    """Return the hosts and their slots that the line or a file on this machine names."""
    from whet.launch.over_ssh import hosts_of_file, hosts_of_option

    if ranks.hosts:
        with suppress(ConfigError):  # whet launch says what is wrong with them
            return [(host.name, host.slots) for host in hosts_of_option(",".join(ranks.hosts))]
    elif "hostfile" in ranks.options:
        path = Path(ranks.options["hostfile"].text).expanduser()
        try:
            return [(host.name, host.slots) for host in hosts_of_file(path)]
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
    return []


def _wanted(hosts: Sequence[tuple[str, int | None]], total: int, per_host: int | None) -> list[tuple[str, int]] | None:
    """Return the ranks of each host that has any; None if the numbers do not say it."""
    if per_host is None and any(slots is None for _, slots in hosts):
        per_host = total // len(hosts) if total % len(hosts) == 0 else None
        if per_host is None:
            return None
    found: list[tuple[str, int]] = []
    for name, slots in hosts:
        n = min(per_host or slots or 1, total - sum(count for _, count in found))
        found += [(name, n)] if n else []
    return found if sum(count for _, count in found) == total else None


def _torchrun(draft: Draft, name: str, words: list[Word]) -> list[Word]:
    draft.ranks.launched = True
    found, rest = _taken(words, _TORCHRUN, draft, _begins)
    given = {one.name: one.value.text for one in found}
    if draft.cluster_name:  # whet k8s starts torchrun in the pods
        draft.ranks.stays = [Word.of(name)]
        if "standalone" in given:
            draft.ranks.options["nnodes"] = Word.of(1)
        _applied(draft, found, _TORCHRUN)
        return rest
    nnodes = given.get("nnodes", "1")
    by_rendezvous = nnodes != "1" and "node_rank" not in given
    if not {"nproc_per_node", "nnodes", "standalone"} & given.keys() or ":" in nnodes or by_rendezvous:
        n_own = len(words) - len(rest)
        draft.ranks.stays = [Word.of("torchrun"), *words[:n_own], Word.of("-m")]
        why = (
            "it counts nodes that come and go, and starts whet as it did the script"
            if by_rendezvous or ":" in nnodes
            else "Kubeflow sets its options by variables; on a machine without them whet alone does the same"
        )
        draft.say(" ".join([name, *(one.text for one in found)]), "kept", why)
        return rest
    one_node = [one for one in found if not (nnodes == "1" and one.name in _OF_NODES)]
    for one in found:
        if one not in one_node:
            draft.say(one.text, "done", "there is one node, and its ranks meet on 127.0.0.1")
    _applied(draft, one_node, _TORCHRUN)
    if "nproc_per_node" not in given:
        draft.ranks.per_host = Word.of(1)
    return rest


_OF_NODES = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")


def _deepspeed(draft: Draft, name: str, words: list[Word]) -> list[Word]:
    draft.ranks.launched = True
    found, rest = _taken(words, _DEEPSPEED, draft, _begins)
    _applied(draft, found, _DEEPSPEED)
    place_ranks(draft)
    if not found:
        draft.say(name, "translated", "one rank for each NUMA node; deepspeed starts one for each GPU", "whet launch")
    return rest


def _ipexrun(draft: Draft, name: str, words: list[Word]) -> list[Word]:
    draft.ranks.launched = draft.ranks.binds = True
    found, rest = _taken(words, _IPEXRUN, draft, _begins)
    why = "it binds to physical cores, and preloads an allocator and Intel's OpenMP library where they are installed"
    draft.say(name, "translated", why, "whet launch")
    _applied(draft, found, _IPEXRUN)
    place_ranks(draft)
    return rest[1:] if rest and rest[0].text == "xpu" else rest


def _accelerate(draft: Draft, name: str, words: list[Word]) -> list[Word]:
    found, rest = _taken(words, _of_accelerate(), draft, _begins)
    items = [(one.name, one.text, one.value if one.values else Word.of("true")) for one in found]
    is_nested = draft.ranks.launched
    accelerate.translate_flags(draft, items, nested=is_nested)
    if not is_nested and "hostfile" in draft.ranks.options:
        place_ranks(draft)
    return rest


def _of_accelerate() -> dict[str, Option]:
    def nothing(draft: Draft, given: Given) -> None:
        """Its value is read with all others."""

    return {name: Option(takes, nothing) for name, takes in accelerate.FLAGS.items()}


def _stays(draft: Draft, name: str, words: list[Word]) -> list[Word]:
    """Keep a launcher whose ranks whet knows by their variables, and which may start another launcher."""
    n_own = next((number for number in range(len(words)) if _begins_at(words, number)), len(words))
    own = [Word.of(name), *words[:n_own]]
    text = " ".join(word.text for word in own)
    if draft.cluster_name:
        draft.say(text, "refused", "pods start their ranks themselves: say how many a pod has, --nproc_per_node N")
    elif draft.ranks.launched or draft.ranks.outer:
        draft.say(
            text, "refused", "whet launch takes the place of both launchers: name the hosts, whet launch --hosts a,b"
        )
    else:
        draft.ranks.outer = name
        draft.prefix += own
        draft.say(text, "kept", "it starts whet as it did the script")
    return words[n_own:]


def _begins_at(words: Sequence[Word], at: int) -> bool:
    commands = _WITH_COMMANDS.get(words[at].text.rsplit("/", 1)[-1])
    has_command = commands is None or (at + 1 < len(words) and words[at + 1].text in commands)
    return _begins(words[at]) and has_command


Peel = Callable[[Draft, str, list[Word]], list[Word]]
_LAUNCHERS: Mapping[str, Peel] = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "mpirun.real", "orterun", "prterun"), _mpi),
    "torchrun": _torchrun,
    "deepspeed": _deepspeed,
    **dict.fromkeys(("ipexrun", "ipexrun.py"), _ipexrun),
    "accelerate-launch": _accelerate,
    **dict.fromkeys(("srun", "flux", "jsrun", "aprun"), _stays),
}
_MODULES: Mapping[str, str] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torch.distributed.elastic.run": "torchrun",
    "accelerate.commands.launch": "accelerate-launch",
    "intel_extension_for_pytorch.cpu.launch": "ipexrun",
    "intel_pytorch_extension.launch": "ipexrun",
    "torch.backends.xeon.run_cpu": "ipexrun",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Modules that python -m runs -> the launcher that they are."""


class Prefix(NamedTuple):
    """A program that runs the rest of a line."""

    takes: str = ""
    """Its options that a value follows, without their dashes."""
    n_words: int = 0
    """Its words before the command that are no options."""


_PREFIXES: Mapping[str, Prefix] = {
    **dict.fromkeys(("nohup", "setsid", "command", "unbuffer"), Prefix()),
    "exec": Prefix("a"),
    "caffeinate": Prefix("t w"),
    "stdbuf": Prefix("o e i output error input"),
    "nice": Prefix("n adjustment"),
    "ionice": Prefix("c n p class classdata"),
    "time": Prefix("o f output format"),
    "timeout": Prefix("k s kill-after signal", 1),
    "numactl": Prefix(
        "C N m i p P w physcpubind cpunodebind membind interleave preferred preferred-many weighted-interleave"
    ),
    "taskset": Prefix("", 1),
    "sudo": Prefix("u g h p C D R r t T U user group host prompt chdir chroot role type"),
    **dict.fromkeys(
        ("uv run", "poetry run", "pipenv run", "pdm run"),
        Prefix(
            "p with with-requirements with-editable extra group only-group no-group python project "
            "directory env-file index index-url default-index extra-index-url find-links package C P"
        ),
    ),
    **dict.fromkeys(("conda run", "mamba run", "micromamba run"), Prefix("n p r name prefix cwd root-prefix")),
    **dict.fromkeys(
        ("apptainer exec", "singularity exec"),
        Prefix(
            "B H o S W app bind cwd env env-file fusemount home mount network network-args "
            "overlay pwd scratch security workdir cpus memory",
            1,
        ),
    ),
}
"""Program, or program and command -> how the line that it runs is found."""
_DROPPED = {"exec", "command", "time"}
"""Prefixes that say nothing about the run."""


def peeled(draft: Draft, words: Sequence[Word]) -> tuple[str, list[Word]]:
    """Return the script, or the module after a dot, and its words; what stands before them goes into the draft."""
    rest, module = [*words], False
    while rest:
        word, name = rest[0], rest[0].text.rsplit("/", 1)[-1]
        pair = word.cut("=")
        if pair and re.fullmatch(r"[A-Za-z_]\w*", pair[0].text):
            draft.given_variables[pair[0].text] = pair[1]
            rest = rest[1:]
        elif name == "env":
            rest = _after_env(draft, rest[1:])
        elif name == "command" and rest[1:2] and rest[1].text in ("-v", "-V"):
            return name, rest[1:]
        elif name in _PREFIXES:
            rest = _after_prefix(draft, name, rest, 1)
        elif rest[1:] and f"{name} {rest[1].text}" in _PREFIXES:
            rest = _after_prefix(draft, f"{name} {rest[1].text}", rest, 2)
        elif name == "accelerate" and rest[1:2] and rest[1].text == "launch":
            rest = _accelerate(draft, "accelerate launch", rest[2:])
        elif name in _LAUNCHERS:
            rest = _LAUNCHERS[name](draft, name, rest[1:])
        elif name in ("bash", "sh") and (text := _text_of_shell(rest[1:])) is not None:
            draft.refuse_unknown(rest)
            rest = _in_shell(draft, text)
        elif _PYTHON.match(name):
            rest, module = _after_python(rest[1:])
            continue
        elif _names_module(word):
            rest, module = rest[1:], True
            continue
        elif module and word.text in _MODULES:
            rest = [Word.of(_MODULES[word.text]), *rest[1:]]
        else:
            return (f".{word.text}" if module else word.text), rest[1:]
        module = False
    return "", []


def _text_of_shell(words: Sequence[Word]) -> str | None:
    """Return the text that bash -c runs; None if it runs a file."""
    at = 0
    while at < len(words) and words[at].text[:1] in ("-", "+"):
        letters = words[at].text[1:]
        if not letters.startswith("-") and "c" in letters:
            return words[at + 1].text if words[at + 1 :] else None
        at += 2 if letters.endswith(("o", "O")) else 1
    return None


def _in_shell(draft: Draft, text: str) -> list[Word]:
    """Return the words of the command that trains in the text of a shell; what stands around it goes into the draft."""
    script = read(text, {name: value for name, value in draft.given_variables.items() if not value.live})
    found = [*started(script, draft.given_variables)]
    sure = [one for one in found if one.found.sure]
    known = [one for one in sure if trains(one.found)]
    scripts = [one for one in sure if may_train(one.found)]
    if not found:
        return []
    if not scripts and (hidden := [one.found for one in found if may_train(one.found)]):
        raise not_decided(hidden[0])
    chosen = (known or scripts or found)[-1]
    say_before(draft, [one.found for one in found[: found.index(chosen)]])
    say_left(draft, [one.found for one in found[found.index(chosen) + 1 :]])
    if draft.ranks.outer:
        new = (word for name, word in chosen.variables.items() if draft.given_variables.get(name) != word)
        _refuse_live(draft, [*chosen.found.words, *new])
    draft.given_variables = chosen.variables
    say_values(draft, script, chosen.found)
    return chosen.found.words


def _refuse_live(draft: Draft, words: Sequence[Word]) -> None:
    """Refuse what the shell of each task computes: the shell that starts the launcher would compute it once."""
    outer = draft.ranks.outer
    why = f"each task of {outer} computes it: write its value, or the command of whet into the text of bash -c"
    parts = (part.raw for word in words for part in word.parts if isinstance(part, Live))
    for raw in dict.fromkeys(parts):
        if raw.startswith(("$", "`")):
            draft.say(raw, "refused", why)


class Started(NamedTuple):
    """A command of a shell text."""

    found: Simple
    variables: dict[str, Word]
    """Those that it is started with."""


def started(script: Script, given: Mapping[str, Word] | None = None) -> Iterator[Started]:
    """Yield the commands of a text, with the variables that were given to it or exported before."""
    outer = {name: value for name, value in (given or {}).items() if value.live}
    for found in script.commands:
        yield Started(found, {**outer, **found.variables})


def trains(found: Simple) -> bool:
    """Return whether a command starts a program that whet knows."""
    with suppress(ConfigError):
        return program_of(*peeled(Draft(), found.words))[0] is not None
    return False


def is_harmless(found: Simple) -> bool:
    """Return whether a command is one that whet knows, and that trains nothing."""
    with suppress(ConfigError):
        name = peeled(Draft(), found.words)[0].rsplit("/", 1)[-1] or found.name
        return name in PREPARES | ASKS or [word.text for word in found.words[1:]] in (["--version"], ["-V"])
    return False


def may_train(found: Simple) -> bool:
    """Return whether a command may train: it runs Python, a launcher or a script, or only the shell knows what."""
    if is_harmless(found):
        return False
    text = " ".join(word.text for word in found.words)
    is_output = found.text.startswith(("$(", "`"))
    is_live = found.words[0].live or (not found.sure and found.text.lstrip('"').startswith("$"))
    return (is_live and not is_output) or any(RUNS.search(one) for one in (text, found.text))


def wraps(name: str, words: Sequence[Word]) -> bool:
    """Return whether a program that whet does not know starts Python, a launcher or a script."""
    is_script = name.endswith(".py") or name.startswith(".") or RUNS.search(name) is not None
    return not is_script and RUNS.search(" ".join(word.text for word in words)) is not None


def why_left(found: Simple) -> str:
    """Return how to continue with a command that may train, and that whet does not translate."""
    if not found.sure:
        return f"a branch, a loop, a function or another command decides about it: {TRACE}"
    name, words = peeled(Draft(), found.words)
    if name.startswith(("$", "`")):
        return f"only the shell knows what it runs: {TRACE}"
    if trains(found):
        return "it trains, too: give whet migrate its line alone"
    if wraps(name, words):
        return f"whet does not know {name}: give whet migrate the line without it, and start whet's command with it"
    is_known = name.rsplit("/", 1)[-1] in NOT_TAKEN
    return why_not(name) if is_known else f"run it as now if it trains nothing; {why_not(name)}"


def written(found: Simple) -> str:
    """Return a command as it is shown in a row."""
    if secrets.in_command(found.text.split()):
        return f"{found.name} {MASK}"
    return found.text if len(found.text) <= _MOST else f"{found.text[:_MOST].rstrip()} ..."


_MOST = 72
"""Characters of a command that a row shows."""


def not_decided(found: Simple) -> ConfigError:
    """Return the error for a text whose only training stands where the shell decides whether it runs."""
    return ConfigError(
        what="a branch, a loop, a function or another command decides what trains",
        got=written(found),
        why="whet migrate reads commands that run one after the other, whatever the shell finds",
        fix=TRACE,
    )


_SETUP = ("source", ".", "conda", "module", "cd", "ulimit", "micromamba", "export")
"""Commands that change the shell which runs the script."""
_CHANGES_FILES = {
    "cp", "curl", "gunzip", "gzip", "hf", "huggingface-cli", "ln", "mv", "rm", "rsync", "scp", "sed", "tar", "unzip",
    "wget",
}  # fmt: skip
"""Commands after which a run may find other files."""


def say_left(draft: Draft, left: Sequence[Simple]) -> None:
    """Refuse the commands that may train and that this run is not."""
    for found in left:
        if may_train(found):
            draft.say(written(found), "refused", why_left(found))


def say_before(draft: Draft, before: Sequence[Simple]) -> None:
    """Say what became of the commands that stand before the one that trains."""
    for found in before:
        text = " ".join(word.text for word in found.words)
        if may_train(found):
            say_left(draft, [found])
        elif is_of_intel(sourced(found.words)):
            draft.say(text, "no effect", "it sets paths of oneCCL and Intel MPI, which whet does not use")
        elif draft.cluster_name and found.name in ("source", ".", "export"):
            draft.say(text, "refused", "pods run whet alone: name the variables that it sets in --env NAME=VALUE")
        elif draft.cluster_name and (found.name in _CHANGES_FILES or not is_harmless(found)):
            draft.say(written(found), "refused", "pods run whet alone: do it before, or build it into the image")
        elif draft.cluster_name:
            draft.say(text, "done", "whet's image has what a run needs")
        elif found.name in _SETUP:
            draft.say(text, "kept", "run it before, as now")
        elif found.sure and not is_harmless(found):
            draft.say(written(found), "kept", "whet does not know it: run it before, as now")


def say_values(draft: Draft, script: Script, found: Simple) -> None:
    """Say what became of variables that the text sets for itself."""
    for name in sorted(found.lost - draft.given_variables.keys()):
        if variables.fact_of(name).status != "no effect":
            why = "what only the shell decides sets it: set the value that counts before the command"
            draft.say(f"{name}=...", "refused", why)
    for name, value in found.values.items():
        given = shown(f"{name}={value.text}", secret=bool(secrets.in_variables([f"{name}={value.text}"])))
        if name in found.used and not (name in draft.given_variables and variables.is_read(name)):
            draft.given_variables.pop(name, None)
            draft.say(given, "translated", "its value, where it is used")
        elif name not in {*draft.given_variables, *found.variables, *script.used, *script.needed}:
            hint = ": export it if a library is to read it" if variables.is_read(name) else ""
            draft.say(given, "no effect", f"it is not exported, and nothing reads it{hint}")


def _after_env(draft: Draft, words: list[Word]) -> list[Word]:
    at = 0
    while at < len(words) and words[at].text.startswith("-"):
        option = words[at].text.lstrip("-")
        if option in ("", "i", "ignore-environment"):
            draft.given_variables.clear()
        elif option in ("u", "unset", "C", "chdir") and words[at + 1 :]:
            at += 1
            draft.given_variables.pop(words[at].text, None)
        elif option.startswith("u"):
            draft.given_variables.pop(option.removeprefix("unset=").removeprefix("u"), None)
        at += 1
    return words[at:]


def _after_python(words: list[Word]) -> tuple[list[Word], bool]:
    """Return the words after Python's own options, and whether the first is a module."""
    at = 0
    while at < len(words) and words[at].text.startswith("-"):
        if words[at].text == "-m":
            return words[at + 1 :], True
        at += 2 if words[at].text in ("-W", "-X") else 1
    return words[at:], False


def _after_prefix(draft: Draft, name: str, words: list[Word], at: int) -> list[Word]:
    """Return the words that a prefix runs; its own options begin at `at`."""
    takes, n_words = _PREFIXES[name]
    while at < len(words) and (option := words[at].text).startswith("-"):
        has_value = option.lstrip("-") in takes.split()
        if _names_module(words[at]) and not has_value:
            break
        at += 2 if has_value else 1
        if option == "--":
            break
    at += n_words
    while at < len(words) and (pair := words[at].cut("=")) and re.fullmatch(r"[A-Za-z_]\w*", pair[0].text):
        at += 1  # as after sudo
    text = " ".join(word.text for word in words[:at])
    if name in ("numactl", "taskset") and (draft.ranks.launched or draft.cluster_name):
        draft.say(text, "done", _BOUND)
    elif draft.cluster_name:
        draft.say(text, "no effect", "pods start whet themselves")
    elif name not in _DROPPED:
        draft.prefix += words[:at]
        why = "whet uses the cores that it may" if name in ("numactl", "taskset") else ""
        draft.say(text, "kept", why)
    return words[at:]
