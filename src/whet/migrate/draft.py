"""What has been read so far of a run in the words of another program, and the command of whet that it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.errors import MASK, Problem
from whet.migrate.shell import TRACE, Live, Word

Status = Literal["kept", "translated", "done", "no effect", "refused"]
STATUSES: dict[Status, str] = {
    "kept": "kept",
    "translated": "translated",
    "done": "done by whet itself",
    "no effect": "without effect here",
    "refused": "not translated",
}
"""Status of a row -> its heading in the table."""
_WIDTH = 100
"""Columns of a line of the command."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """What became of one thing that was given."""

    given: str
    """As it was written: `--no_cuda`, `-ppn 2`, `CCL_WORKER_COUNT=2`."""
    status: Status
    becomes: str = ""
    """What stands for it in the command of whet."""
    why: str = ""
    """Why, and for what is refused the way to continue."""


@dataclass
class Ranks:
    """How the processes of the run are started."""

    launched: bool = False
    """Whether a launcher stands in the line, or what only a launcher does is asked for."""
    binds: bool = False
    """Whether even one process is bound to cores, or has libraries preloaded."""
    total: Word | None = None
    per_host: Word | None = None
    n_hosts: Word | None = None
    """The number of hosts, counted from the first, that a launcher takes."""
    hosts: list[str] = field(default_factory=list)
    """name or name:ranks."""
    options: dict[str, Word] = field(default_factory=dict)
    """Options of `whet launch` that were named: hostfile, nnodes, master_addr ..."""
    env: list[str] = field(default_factory=list)
    """Variables that ranks on other hosts do not get unless they are named."""
    passes_all: str = ""
    """The option of MPI that gives ranks all variables of the launcher; empty if it is not given."""
    stays: list[Word] = field(default_factory=list)
    """The words of a launcher that starts whet as it did the script; empty if whet launch takes its place."""
    outer: str = ""
    """The launcher, such as srun, that starts whet or another launcher; its words stand in the prefix."""

    @property
    def several_hosts(self) -> bool:
        """Whether ranks run on other machines too."""
        return bool(self.hosts) or "hostfile" in self.options or "nnodes" in self.options

    @property
    def over_ssh(self) -> bool:
        """Whether whet launch starts ranks over ssh, with `env` alone of what it does not know."""
        return bool(self.hosts) or "hostfile" in self.options

    def passed(self) -> list[str]:
        """Return the variables of `whet launch --env`: other ranks have all of the launcher's."""
        return self.env if self.over_ssh else []

    def flags(self) -> dict[str, Word]:
        """Return the options of `whet launch`."""
        found, per_host = dict(self.options), self.per_host
        if self.hosts:
            found = {"hosts": Word.of(",".join(self.hosts)), **found}
            per_host = per_host or _share(self.total, len(self.hosts))
        elif not self.several_hosts:
            per_host = per_host or self.total
        if per_host is not None and not all(":" in host for host in self.hosts or [""]):
            found = {"nproc_per_node": per_host, **found}
        elif self.binds and not self.several_hosts:
            found = {"nproc_per_node": Word.of(1), **found}
        return found

    @property
    def through_whet(self) -> bool:
        """Whether the command begins with `whet launch`: one process without a wish of its own does not need it."""
        if self.stays or not self.launched:
            return False
        flags = self.flags()
        return self.binds or self.several_hosts or flags.get("nproc_per_node", Word.of("auto")).text != "1"

    @property
    def n_ranks(self) -> int:
        """The number of ranks if it is known, else 1."""
        n_hosts = len(self.hosts) or 1
        nnodes = self.options.get("nnodes", Word.of(1)).text
        per_host = self.flags().get("nproc_per_node", Word.of(1)).text
        if self.total is not None and self.total.text.isdigit():
            return int(self.total.text)
        return int(per_host) * max(n_hosts, int(nnodes) if nnodes.isdigit() else 1) if per_host.isdigit() else 1


def _share(total: Word | None, n_hosts: int) -> Word | None:
    if total is None or not total.text.isdigit() or int(total.text) % n_hosts:
        return None
    return Word.of(int(total.text) // n_hosts)


@dataclass
class Draft:
    """The run, as far as it has been read."""

    task: str | None = None
    """The command of whet; None while it is not known."""
    program: str = ""
    """What ran it: run_qa.py, trl sft."""
    partial: bool = False
    """Whether it is a configuration, which names no model and no data."""
    options: dict[str, list[Word]] = field(default_factory=dict)
    """Option of whet -> its values."""
    trailing: list[Word] = field(default_factory=list)
    """Words that only the shell knows, such as "$@"."""
    ranks: Ranks = field(default_factory=Ranks)
    cluster_name: str = ""
    """Name of a job on Kubernetes; empty if the run is none."""
    cluster: dict[str, list[Word]] = field(default_factory=dict)
    """Option of `whet k8s` -> its values."""
    prefix: list[Word] = field(default_factory=list)
    """What runs the command: numactl, nohup."""
    given_variables: dict[str, Word] = field(default_factory=dict)
    """Variables of the environment that the run was started with."""
    variables: dict[str, Word] = field(default_factory=dict)
    """Those that the command of whet is started with."""
    rows: list[Row] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    """What whet says about the command, if it does not accept it."""

    def say(self, given: str, status: Status, why: str = "", becomes: str = "") -> None:
        """Add a row."""
        self.rows.append(Row(given=given, status=status, becomes=becomes, why=why))

    def refuse_unknown(self, words: Iterable[Word]) -> None:
        """Name the parts of words that a shell can compute only with variables of the text that was read."""
        parts = (part for word in words for part in word.parts if isinstance(part, Live))
        refused = {row.given for row in self.rows if row.status == "refused"}
        for raw, needs in {part.raw: part.needs for part in parts if part.needs}.items():
            if raw not in refused:
                why = f"the text sets {' and '.join(sorted(needs))}: write the value in its place, or {TRACE}"
                self.say(raw, "refused", why)

    def correct(self, name: str, status: Status, becomes: str = "", why: str = "") -> None:
        """Change the row of an option of whet, or add one."""
        for number, row in enumerate(self.rows):
            words = {word.partition("=")[0] for word in f"{row.given} {row.becomes}".split()}
            if f"--{name}" in words or row.given.startswith(f"{name}:"):
                self.rows[number] = Row(given=row.given, status=status, becomes=becomes, why=why)
                return
        self.say(f"--{name}", status, why, becomes)

    def put(self, name: str, *values: object) -> str:
        """Set an option of whet, over an earlier value; return it as it stands in the command."""
        self.options.pop(name, None)
        self.options[name] = [value if isinstance(value, Word) else Word.of(value) for value in values]
        return option_text(name, self.options[name])

    def usual(self, name: str, value: object, why: str) -> None:
        """Set an option that was not given to the value that the program has and whet does not."""
        if name not in self.options:
            self.say(f"(default of {self.program})", "translated", why, self.put(name, value))

    def value(self, name: str) -> str | None:
        """Return the text of an option of whet that was set."""
        return self.options[name][-1].text if name in self.options else None

    @property
    def on_cpu(self) -> bool:
        """Whether the run is asked to stay on CPUs."""
        return self.value("use_cpu") == "true"

    @property
    def complete(self) -> bool:
        """Whether everything that was given is carried out, and whet accepts the command."""
        return not self.problems and all(row.status != "refused" for row in self.rows)

    def parts(self) -> Iterator[Word]:
        """Yield the words of the command that were given, with the names of no option."""
        for values in (self.variables, self.ranks.flags()):
            yield from values.values()
        for words in (*self.options.values(), *self.cluster.values()):
            yield from words
        yield from (*self.prefix, *self.ranks.stays, *self.trailing)

    def words(self) -> list[str]:
        """Return the words of the command as a shell reads them, each option with its values as one."""
        start = [f"{name}={value.shell()}" for name, value in self.variables.items()]
        start += [word.shell() for word in self.prefix]
        task = self.task or "TASK"
        if self.cluster_name:
            cluster = [option_text(name, values) for name, values in self.cluster.items()]
            start += ["whet k8s render", self.cluster_name, *cluster, "--", task]
        elif self.ranks.stays:
            start += [word.shell() for word in self.ranks.stays] + ["whet", task]
        elif self.ranks.through_whet:
            launch = [option_text(name, [value]) for name, value in self.ranks.flags().items()]
            launch += [f"--env {name}" for name in self.ranks.passed()]
            start += ["whet launch", *launch, "--", task]
        else:
            start += ["python", "-m", "whet", task] if self.ranks.outer else ["whet", task]
        options = [option_text(name, values) for name, values in self.options.items()]
        return [*start, *options, *(word.text if not word.quoted else word.shell() for word in self.trailing)]

    def command(self) -> str:
        """Return the command in lines that a shell joins when they are copied."""
        first, *others = self.words()
        lines = [first]
        for word in others:
            if len(lines[-1]) + len(word) + 3 > _WIDTH:
                lines[-1] += " \\"
                lines.append(f"    {word}")
            else:
                lines[-1] += f" {word}"
        return "\n".join(lines)


def option_text(name: str, values: Sequence[Word]) -> str:
    """Return an option of whet as it stands in a command: a switch that is on alone, several values one by one."""
    if [value.text for value in values] == ["true"] and name not in _TEXTS:
        return f"--{name}"
    return " ".join(f"--{name}{'=' if value.text.startswith('--') else ' '}{value.shell()}" for value in values)


_TEXTS = {"resume_from_checkpoint", "fsdp"}
"""Options that take a text, and true among others."""


def plain_words(draft: Draft, sample: Any) -> Iterator[str]:
    """Yield the options as whet's parser gets them; `sample(name)` stands for values that only the shell knows."""
    for name, values in draft.options.items():
        for value in values:
            yield f"--{name}={sample(name) if value.live else value.text}"


def shown(given: str, *, secret: bool = False) -> str:
    """Return what was given on one line, as it may be printed."""
    return f"{given.replace('=', ' ').partition(' ')[0]} {MASK}" if secret else given
