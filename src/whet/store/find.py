"""Which checkpoints a folder holds, which of them belong to a run, and which one a run resumes from.

`checkpoint-1234/` is a checkpoint, `abandoned-ID/` holds those that a run left when it went back to an older one. The
newest checkpoint is the intact one with the highest step; time stamps, links and clocks do not matter.

A run that resumes from an older checkpoint begins a new lineage, with a random id. Every manifest holds that id and the
parents, and a run uses only checkpoints of its own lineage. The later ones of a lineage that a run has left are only
used if the user names them.

A command that names its checkpoint and may be started again begins a new lineage there even if it is the newest one: a
restart can then tell what the command has saved since from what was there before. A lineage holds the ids of the jobs
and launchers that have trained it, so that what another job has saved since it began at the same checkpoint does not
count.

A script may train several times in one folder, and leave out what it has done when it is started again. So a lineage
holds what its training is: a checksum of its settings, model and data. A script that is started again continues each
training with what that one has saved. One that was changed in between, or whose data are others each time, is known by
its number in its process, as long as it has not ended.
"""

from __future__ import annotations

import re
import shlex
import uuid
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from whet.config.ranks import may_be_another_pod, may_start_again, own_launches, resumes_unasked
from whet.config.upload import ADAPTER
from whet.errors import ConfigError, StorageError
from whet.log import logger
from whet.store import manifest, schema

NAME = re.compile(r"checkpoint-(\d{1,18})")
HIDDEN = re.compile(r"\.(checkpoint-\d{1,18})\.(partial|replaced|removed)")
ASIDE = "abandoned"
"""Prefix of the folders for checkpoints that a run abandoned when it went back to an older one."""
STATE, TRAINER_STATE = "state.json", "trainer_state.json"
"""The parts of a run's state, and the counters and the log as transformers writes them."""
_CONFIG = "config.json"
FACTS = ("run", "parents", "launch", "training", "identity")
"""What a manifest says of the lineage."""
_ID = re.compile(r"[0-9a-f]{32}")
_SHOWN, _MOST_NAMED = 8, 3
_NEW_RUN = "start a new run: leave --resume_from_checkpoint out and use another --output_dir"


# ---- names ----


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"checkpoint-{step}"


def step_of(folder: Path) -> int:
    """Return the optimizer step in a checkpoint folder's name."""
    match = NAME.fullmatch(folder.name)
    assert match is not None
    return int(match.group(1))


def hidden(folder: Path, state: str) -> Path:
    """Return the hidden name of a checkpoint folder that is partial, replaced or removed."""
    return folder.with_name(f".{folder.name}.{state}")


def list_all(output_dir: Path) -> list[Path]:
    """Return the checkpoint folders, oldest step first, complete or not."""
    if not output_dir.is_dir():
        return []
    found = [path for path in output_dir.iterdir() if NAME.fullmatch(path.name) and not path.is_symlink()]
    return sorted((path for path in found if path.is_dir()), key=step_of)


def aside_folders(output_dir: Path) -> list[Path]:
    """Return the folders that hold abandoned checkpoints."""
    found = [path for path in output_dir.glob(f"{ASIDE}-*") if path.is_dir() and not path.is_symlink()]
    return sorted(found)


def problems_of(folder: Path, *, light: bool = False) -> list[str]:
    """Return what is wrong with a checkpoint folder, one line each; empty if every byte is as written.

    `light` compares the sizes of large files, not their content.
    """
    if not folder.is_dir():
        return ["there is no such folder"]
    return manifest.problems_of(folder, step_of(folder) if NAME.fullmatch(folder.name) else None, light=light)


# ---- lineages ----


@dataclass(frozen=True)
class Lineage:
    """`run` is the id; `parents` are the checkpoints that it resumed from, as (run, step), the nearest first.

    Checkpoints whose manifest names no run share the lineage without an id.
    """

    run: str | None
    parents: tuple[tuple[str | None, int], ...] = ()
    launches: frozenset[str] = frozenset()
    """The ids of the jobs and launchers that have trained it."""
    training: int = 1
    """Of the trainings of one process in the output folder, the number of the one that has it."""
    identity: str | None = None
    """That of this training; see `Training`."""

    @property
    def name(self) -> str:
        """A short name for folders and messages."""
        return "unnamed" if self.run is None else self.run[:_SHOWN]

    def facts(self) -> dict[str, Any]:
        """Return the lineage as a manifest holds it."""
        launch = {"launch": sorted(self.launches)} if self.launches else {}
        training = {} if self.training == 1 else {"training": self.training}
        identity = {} if self.identity is None else {"identity": self.identity}
        return {"run": self.run, "parents": [list(parent) for parent in self.parents], **launch, **training, **identity}

    def includes(self, run: str | None, step: int) -> bool:
        """Return whether the checkpoint of that run and step belongs to this lineage or to its ancestors."""
        return run == self.run or any(run == parent and step <= last for parent, last in self.parents)

    def rewound_past(self, run: str | None, step: int) -> bool:
        """Return whether this lineage began by going back to before that checkpoint."""
        return any(run == parent and step > last for parent, last in self.parents) and not self.includes(run, step)

    def shares_steps_with(self, other: Lineage) -> bool:
        """Return whether one went back to a checkpoint of the other, or both to one of the same run."""
        return bool({self.run, *dict(self.parents)} & {other.run, *dict(other.parents)})

    def branched(self, step: int, training: Training) -> Lineage:
        """Return a new lineage of this training that begins at a checkpoint of this one."""
        return replace(new_lineage(training), parents=((self.run, step), *self.parents))


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder, with the step and the lineage in its manifest."""

    folder: Path
    step: int
    lineage: Lineage


def new_lineage(training: Training) -> Lineage:
    """Return the lineage of a training that starts at its first step."""
    return Lineage(uuid.uuid4().hex, (), training.launches, training.number, training.identity)


def lineage_in(facts: Mapping[str, Any]) -> Lineage:
    """Return the lineage that a manifest holds; the unnamed one if it is not in the form of `facts`."""
    run, parents, launch, training, identity = (facts.get(name) for name in FACTS)
    if not isinstance(run, str) or not _ID.fullmatch(run) or not isinstance(parents, list):
        return Lineage(None)
    pairs = [parent for parent in parents if isinstance(parent, list) and len(parent) == 2]
    known = [(old, step) for old, step in pairs if isinstance(step, int) and (old is None or isinstance(old, str))]
    number = training if type(training) is int and training > 0 else 1
    ids = [one for one in (launch if isinstance(launch, list) else [launch]) if isinstance(one, str)]
    return Lineage(run, tuple(known), frozenset(ids), number, identity if isinstance(identity, str) else None)


def read_checkpoints(folders: Sequence[Path]) -> list[Checkpoint]:
    """Return the checkpoints in these folders; those whose manifest cannot be read are left out."""
    found = ((folder, manifest.facts_of(folder)) for folder in folders)
    return [Checkpoint(folder, facts["step"], lineage_in(facts)) for folder, facts in found if facts is not None]


def of_lineage(folders: Sequence[Path], lineage: Lineage) -> list[Path]:
    """Return those of these folders whose checkpoint belongs to the lineage or to its ancestors."""
    return [one.folder for one in read_checkpoints(folders) if lineage.includes(one.lineage.run, one.step)]


def by_name(name: str, lineage: Lineage, *places: Path) -> Path | None:
    """Return the checkpoint of this name and lineage in the first of these folders, or in its abandoned ones."""
    if not NAME.fullmatch(name):
        return None
    folders = [folder / name for place in places for folder in (place, *aside_folders(place))]
    there = [folder for folder in folders if folder.is_dir() and not folder.is_symlink()]
    return next(iter(of_lineage(there, lineage)), None)


def lineage_after_resume(folder: Path, output_dir: Path, training: Training, *, named: bool = False) -> Lineage:
    """Return the lineage of a training that resumes from this checkpoint and saves to `output_dir`.

    It is that of the checkpoint if that is the newest one there, and a new one otherwise, or if the user has `named` it
    in a command that may be started again. Of the later ones, damaged ones do not count, nor those of models alone that
    were passed over.
    """
    found = read_checkpoints([folder])
    step = step_of(folder) if NAME.fullmatch(folder.name) else 0
    own = found[0] if found else Checkpoint(folder, step, Lineage(None))
    later = [path for path in _not_left(list_all(output_dir)) if step_of(path) > own.step]
    counting = (path for path in later if named or not manifest.holds_only_model(path))
    newest_there = folder.resolve().parent == output_dir.resolve() and all(map(problems_of, counting))
    stays = newest_there and not (named and may_start_again())
    if not stays or own.lineage.run is None:
        return own.lineage.branched(own.step, training)
    launches = own.lineage.launches | training.launches
    return replace(own.lineage, launches=launches, training=training.number, identity=training.identity)


def _not_left(folders: Sequence[Path]) -> list[Path]:
    """Return the folders, the newest first, without those that the run of another one went back to before."""
    found = read_checkpoints(folders)
    left = {
        one.folder for one in found if any(other.lineage.rewound_past(one.lineage.run, one.step) for other in found)
    }
    return [folder for folder in reversed(folders) if folder not in left]


# ---- the checkpoint to resume from ----

_n_begun: Counter[tuple[Path, str | None]] = Counter()
"""How many trainings of this process have begun in an output folder, and how many of each identity."""


@dataclass(frozen=True)
class Training:
    """What tells a training from the others in its output folder, in this process and in one that is started again."""

    number: int = 1
    """Its number among the trainings of its process in that folder."""
    identity: str | None = None
    """A checksum of its settings, model and data, and of how many like it came before; None: unknown."""
    is_sure: bool = True
    """Whether the rows are a part of its identity; else it also has to have the same number."""
    launches: frozenset[str] = field(default_factory=own_launches)
    """The ids of the job or launchers that train it: one, or one of each machine; none: no launcher has an id."""
    is_again: bool = field(default_factory=resumes_unasked)
    """Whether a launcher says that it may have been started before. torchrun does not if a machine has joined."""

    @classmethod
    def begins(
        cls, output_dir: Path, seen: Sequence[Sequence[Any]], identity: str | None = None, *, is_sure: bool = True
    ) -> Training:
        """Return the training that begins now, and count it; `seen` is what each rank has of `seen_here`.

        `identity`: a checksum of its settings, model and rows.
        """
        place = output_dir.absolute()
        _n_begun[place, None] += 1
        if identity is not None:
            _n_begun[place, identity] += 1
            if (n_alike := _n_begun[place, identity]) > 1:
                identity = manifest.digest_of({"identity": identity, "number": n_alike})
        launches = frozenset(one for of_rank, _ in seen for one in of_rank)
        return cls(_n_begun[place, None], identity, is_sure, launches, any(is_again for _, is_again in seen))

    def saved(self, found: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return those of these checkpoints that are this training's, or of those that it began at."""
        alike = [one.lineage for one in found if self.identity is not None and one.lineage.identity == self.identity]
        own = [one for one in alike if self.is_sure or one.training == self.number]
        ended = {one.lineage.run for one in found if _has_ended(one.folder)} if len(own) < len(found) else set()
        if not own and len(running := {one.run for one in alike} - ended) == 1:
            own = [one for one in alike if one.run in running]
        if not own:  # one of another kind that has ended is not this one
            numbered = (one.lineage for one in found if one.lineage.training == self.number)
            own = [one for one in numbered if None in (self.identity, one.identity) or one.run not in ended]
        return [one for one in found if any(each.includes(one.lineage.run, one.step) for each in own)]

    def may_continue(self, folder: Path) -> bool:
        """Return whether it may resume unasked from this checkpoint, as far as that is a matter of jobs.

        It continues what its own launcher has begun; a new pod what any job has, as WHET_RESUME=auto asks for it. A
        checkpoint whose manifest cannot be read may be anybody's: it is named as damaged.
        """
        if may_be_another_pod() or not self.launches or (facts := manifest.facts_of(folder)) is None:
            return self.is_again
        return _are_of_one(self.launches, lineage_in(facts).launches)

    @property
    def may_be_again(self) -> bool:
        """Whether it may have been started before, as a launcher says, or as its checkpoints may show."""
        return self.is_again or bool(self.launches)


def _has_ended(folder: Path) -> bool:
    facts = manifest.facts_of(folder) or {}
    return facts.get(manifest.FINISHED) is True or manifest.ENDED in facts


def seen_here() -> list[Any]:
    """Return what this rank sees of who starts the training: the ids of its launchers, and whether it is a restart."""
    return [sorted(own_launches()), resumes_unasked()]


def is_seen(value: Any) -> bool:
    """Return whether this is what `seen_here` returns."""
    return isinstance(value, list) and len(value) == 2 and schema.list_of(schema.text)(value[0]) and value[1] in (0, 1)


def _are_of_one(launches: Collection[str], others: Collection[str]) -> bool:
    return bool({*launches} & {*others}) or not (launches or others)


Asked = str | bool | None
"""What a training resumes from: a path, "auto" or True (the newest), or nothing."""


def resumes_from(asked: Asked, output_dir: Path) -> Asked:
    """Return what a command resumes from: as asked, or what continues it if it may have been started before.

    That is "auto" if nothing was asked for, unless no run can resume from any checkpoint there, or another job has
    saved them before this one began. It takes the place of a checkpoint that was named, too, once `output_dir` has
    later ones of a lineage that this job or launcher began there.
    """
    command = Training()
    if not command.may_be_again or asked is True or asked in ("auto", "no"):
        return asked
    if not asked:
        folders = list_all(output_dir)
        continues = command.is_again if not folders else any(map(command.may_continue, _complete_ones(folders)))
        return "auto" if continues else None
    later = would_resume(output_dir)
    return "auto" if later is not None and _began_at(Path(asked), later, command.launches) else asked


def is_named(asked: Asked) -> bool:
    """Return whether one checkpoint is asked for by its path."""
    return isinstance(asked, str) and asked not in ("", "auto", "no")


def _began_at(named: Path, later: Path, launches: Collection[str]) -> bool:
    """Return whether a run can resume from the later checkpoint, and this job began its lineage at the named one.

    Of one that was rotated away after later ones were saved, only the step is known.
    """
    found, known = read_checkpoints([later]), read_checkpoints([named])
    if not found or manifest.holds_only_model(later) or not _are_of_one(launches, found[0].lineage.launches):
        return False
    parents = found[0].lineage.parents
    if known:
        return (known[0].lineage.run, known[0].step) in parents
    was_there = not named.exists() and named.absolute().parent == later.absolute().parent
    return was_there and NAME.fullmatch(named.name) is not None and step_of(named) in {step for _, step in parents}


def to_resume(asked: Asked, output_dir: Path, training: Training | None) -> Path | None:
    """Return the checkpoint that a training resumes from; None: it begins at its first step.

    That is what is asked for: the newest of `output_dir`, or the one that is named. Where the `training` may have been
    started before, it is its own newest one if nothing is asked for, and if it has saved any since the named one.
    """
    if asked == "no":
        return None
    if training is not None and training.may_be_again and (not asked or is_named(asked)):
        since = Path(str(asked)) if asked else None
        own = _saved_by(training, output_dir, since)
        if training.is_again or own:
            _say_what_is_left(output_dir, ())
        if (found := _newest_intact(own)) is not None:
            return require_complete(found)
        if own and since is None:
            raise _none_is_intact(own, output_dir)
        if since is None and training.is_again:
            _say_that_it_begins(training, output_dir)
    if not asked:
        return None
    if isinstance(asked, str) and asked != "auto":
        return require_complete(require_intact(Path(asked)))
    found = newest(output_dir)
    if found is None:
        logger.info("there is no checkpoint in %s: the run starts at its first step", output_dir)
        return None
    return require_complete(found)


def require_nothing_of_others(output_dir: Path, training: Training) -> None:
    """Raise ConfigError if checkpoints of another job are where a restart has found none of its own."""
    others = _complete_ones(list_all(output_dir)) if training.may_be_again and not may_be_another_pod() else []
    if others:
        raise ConfigError(
            what="output_dir holds checkpoints of another job",
            got=f"{others[-1]}, and this command is a restart that has saved none",
            why="nobody has asked to continue them, and a new run would take their place",
            fix="use another --output_dir, or continue them: --resume_from_checkpoint auto",
        )


def _saved_by(training: Training, output_dir: Path, since: Path | None) -> list[Path]:
    """Return the checkpoints that this training has saved, the oldest first; of `since`, those that began there.

    What another training of the same job has set aside counts if there are no others.
    """
    there = [path for path in _complete_ones(list_all(output_dir)) if training.may_continue(path)]
    aside = [path for place in aside_folders(output_dir) for path in _complete_ones(list_all(place))]
    moved = [one for one in read_checkpoints(aside) if {*training.launches} & one.lineage.launches]
    for found in ([Checkpoint(path, step_of(path), _lineage_of(path)) for path in there], moved):
        own = sorted(training.saved(found), key=lambda one: one.step)
        folders = [one.folder for one in own if since is None or _began_at(since, one.folder, training.launches)]
        if folders:
            return folders
    return []


def _say_that_it_begins(training: Training, output_dir: Path) -> None:
    """Log that a training that may have been started before begins, and whose checkpoints it does not continue."""
    others = _complete_ones(list_all(output_dir))
    if not others:
        logger.info("there is no checkpoint of this training in %s: it starts at its first step", output_dir)
        return
    logger.warning(
        "the checkpoints in %s, up to %s, are of another training, with other settings, model or data, or of another "
        "job: this one, number %d of its process, starts at its first step; to continue theirs, ask for it: "
        'resume_from_checkpoint="auto"', output_dir, others[-1].name, training.number,
    )  # fmt: skip


def newest(output_dir: Path) -> Path | None:
    """Return the intact checkpoint with the highest step; the log names each newer one that was skipped.

    None if there is no checkpoint at all. Raises StorageError if there are checkpoints, but none is intact.
    """
    folders = _to_choose_from(output_dir)
    _say_what_is_left(output_dir, folders)
    if not folders:
        _require_none_of_transformers(output_dir)
        return None
    found = _newest_intact(folders)
    if found is None:
        raise _none_is_intact(folders, output_dir)
    return found


def _newest_intact(folders: Sequence[Path]) -> Path | None:
    """Return the newest intact one of these checkpoints, the oldest of which is the first; None if none is."""
    usable = _not_left(folders)
    for folder in reversed(folders):
        if folder not in usable:
            logger.warning("%s was passed over: the run went back to before it; name it to resume from it", folder)
            continue
        problems = problems_of(folder)
        if not problems:
            return folder
        logger.warning(
            "%s is damaged and was passed over, the checkpoint before it is tried: %s", folder, "; ".join(problems[:3])
        )
    return None


def _none_is_intact(folders: Sequence[Path], output_dir: Path) -> StorageError:
    """Return the error for checkpoints none of which is intact; raises that for transformers', if there are any."""
    _require_none_of_transformers(output_dir)
    return StorageError(
        what=f"none of the {len(folders)} checkpoints in {output_dir} is complete",
        got=f"the newest {min(_MOST_NAMED, len(folders))}: "
        + "; ".join(f"{folder.name}: {_problem_of(folder)}" for folder in folders[: -_MOST_NAMED - 1 : -1]),
        why="a run that should resume never starts from the beginning by itself",
        fix="put a complete checkpoint back; or start a new run: leave --resume_from_checkpoint out and use another "
        "--output_dir (or, without --max_restarts, --overwrite_output_dir, which deletes these checkpoints)",
    )


def _problem_of(folder: Path) -> str:
    return next(iter(problems_of(folder)), "the run went back to before it")


def _to_choose_from(output_dir: Path) -> list[Path]:
    """Return the checkpoints of which "auto" takes the newest, the oldest first.

    Where a command may have been started again, those that no run can resume from are left out if there are others.
    """
    folders = list_all(output_dir)
    return (resumes_unasked() and _complete_ones(folders)) or folders


def _lineage_of(folder: Path) -> Lineage:
    return lineage_in(manifest.facts_of(folder) or {})


def _complete_ones(folders: Sequence[Path]) -> list[Path]:
    """Return these checkpoints without those of transformers and of the model alone."""
    return [path for path in folders if not (_is_of_transformers(path) or manifest.holds_only_model(path))]


def _say_what_is_left(output_dir: Path, chosen: Sequence[Path]) -> None:
    """Name the checkpoints that no run can resume from, if they are not among those to choose from."""
    folders = list_all(output_dir)
    left = {*folders} - {*chosen, *_complete_ones(folders)}
    if left:
        named = ", ".join(path.name for path in sorted(left, key=step_of)[-_MOST_NAMED:])
        logger.warning("%s: no run can resume from %s, of transformers or of the model alone", output_dir, named)


def would_resume(output_dir: Path) -> Path | None:
    """Return the checkpoint that "auto" would take, without reading large files; None if there is none."""
    folders = _not_left(_to_choose_from(output_dir))
    return next((path for path in folders if not problems_of(path, light=True)), None)


def newest_complete(output_dir: Path) -> Path | None:
    """Return what `would_resume` does if a run can resume from it; None if it holds the model alone."""
    folder = would_resume(output_dir)
    return None if folder is None or manifest.holds_only_model(folder) else folder


def require_intact(folder: Path, *, light: bool = False) -> Path:
    """Return the folder if it is intact; raises StorageError otherwise."""
    if problems := problems_of(folder, light=light):
        raise _not_complete(folder, problems)
    return folder


def require_complete(folder: Path) -> Path:
    """Return the folder if a run can resume from it; raises StorageError if it holds the model alone."""
    if not manifest.holds_only_model(folder):
        return folder
    other = _instead_of(folder)
    raise StorageError(
        what=f"{folder} holds only the model",
        got="a checkpoint that was written with save_only_model",
        why="a resumed run needs the state of the optimizer, which this checkpoint does not have",
        fix=(f"use {other}, which is complete; or " if other else "") + _from_weights(folder),
    )


def _instead_of(folder: Path) -> str | None:
    """Return the option that resumes from an intact checkpoint in the folder itself, or next to it."""
    there = [path for place in (folder, folder.parent) for path in reversed(list_all(place)) if path != folder]
    for path in reversed(_not_left(there)):
        if not manifest.holds_only_model(path) and not problems_of(path):
            return f"--resume_from_checkpoint {shlex.quote(str(path))}"
    return None


def _not_complete(folder: Path, problems: Sequence[str]) -> StorageError:
    """Return the error for a folder with these problems, with what to use instead."""
    other = _instead_of(folder)
    what = f"{folder} is not a complete checkpoint"
    if not folder.is_dir():
        return StorageError(
            what=what,
            got="it is a file" if folder.exists() else "there is no such folder",
            why="a checkpoint is a folder named checkpoint-STEP in the --output_dir of a run",
            fix=f"use {other}" if other else f"correct the path in --resume_from_checkpoint; or {_NEW_RUN}",
        )
    if (folder / manifest.MANIFEST).exists():
        return StorageError(
            what=what,
            got="; ".join(problems[:5]),
            why="every file must have the size and the checksum that its manifest names",
            fix=f"use {other}, which is intact" if other else f"copy it again from an intact copy; or {_NEW_RUN}",
        )
    if _is_of_transformers(folder):
        return _of_transformers(folder)
    is_model = (folder / _CONFIG).is_file() or (folder / ADAPTER).is_file()
    instead = _from_weights(folder) if is_model else f"name a folder checkpoint-STEP of a run; or {_NEW_RUN}"
    return StorageError(
        what=what,
        got=f"no {manifest.MANIFEST}",
        why=f"whet writes {manifest.MANIFEST} last: without it the folder is something else, or it was not finished",
        fix=f"use {other}" if other else instead,
    )


def _require_none_of_transformers(output_dir: Path) -> None:
    """Raise StorageError if the folder holds checkpoints of transformers, which "auto" would not resume from."""
    named = [path for path in output_dir.iterdir() if NAME.fullmatch(path.name)] if output_dir.is_dir() else []
    if found := [path for path in named if _is_of_transformers(path)]:
        raise _of_transformers(max(found, key=step_of))


def _is_of_transformers(folder: Path) -> bool:
    ours = any((folder / name).exists() for name in (manifest.MANIFEST, STATE))
    return (folder / TRAINER_STATE).is_file() and not ours


def _of_transformers(folder: Path) -> StorageError:
    return StorageError(
        what=f"{folder} is a checkpoint of transformers' Trainer",
        got=f"{TRAINER_STATE}, but no {manifest.MANIFEST}",
        why="whet can only resume its own checkpoints: those of transformers hold the optimizer as a pickle",
        fix=f"{_from_weights(folder)}; or resume with transformers' Trainer and whet.optimize(model)",
    )


def _from_weights(folder: Path) -> str:
    name, run = shlex.quote(str(folder)), "another --output_dir, no --resume_from_checkpoint"
    if (folder / ADAPTER).is_file():
        return f"merge its adapter, run: whet merge {name} --output_dir MERGED; then --model_name_or_path MERGED, {run}"
    return f"start from its weights: --model_name_or_path {name}, {run}"
