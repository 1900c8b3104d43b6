"""Resumes a run from a checkpoint: bitwise as if it had not stopped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerState

from whet.config.arguments import TrainingArguments
from whet.config.ranks import here
from whet.config.rules.training import METRIC_FIELDS
from whet.errors import ConfigError, StorageError
from whet.log import logger
from whet.precision import policy
from whet.store import best, compare, find, manifest, schema, weights, write
from whet.store.find import TRAINER_STATE, Lineage
from whet.store.save import Ranks
from whet.store.snapshot import RunState
from whet.store.state import Stateful, load_states, read_parts

_ALONE = Ranks()
_AFTER_WEIGHTS = ("average", "optimizer", "schedule")
_COUNTERS = (
    "global_step", "epoch", "log_history", "total_flos", "best_metric", "best_global_step",
)  # fmt: skip


def agreed_folder(
    asked: find.Asked, output_dir: Path, training: find.Training, sync: Ranks, *, overwrites: bool
) -> Path | None:
    """Return the checkpoint that all ranks resume from, as rank 0 finds it; what a kill left behind is cleaned up.

    Raises ConfigError if a rank cannot read it, or if a restart that nobody asked to resume, and that `overwrites`
    nothing, has saved none and finds those of another job.
    """
    found = None
    if sync.place.is_first:
        write.clean_up(output_dir)
        found = find.to_resume(asked, output_dir, training)
        if found is None and not asked and not overwrites:
            find.require_nothing_of_others(output_dir, training)
    if sync.n_ranks == 1:
        return found
    sync.wait()  # rank 0 may read large files
    name = sync.of_first(None if found is None else str(found.absolute()), schema.optional(schema.text))
    folder = None if name is None else Path(name)
    facts = None if folder is None else manifest.facts_of(folder)
    seen = sync.gather(facts, schema.optional(schema.json_object))
    if folder is not None and (seen[0] is None or any(one != seen[0] for one in seen)):
        raise ConfigError(
            what="not all ranks can read the checkpoint",
            got=str(folder),
            why="every rank resumes from the same files",
            fix="put --output_dir on storage that all machines share, under the same path",
        )
    return folder


def check_early(args: TrainingArguments, allowable: Collection[str] | None = None) -> None:
    """Refuse settings that a resumed run must not change, before the model and the data are loaded.

    `allowable` as in `compare.require_same_settings`. Large files of the checkpoint are not read here, so damage in
    them is reported later.
    """
    asked = args.resume_from_checkpoint
    if not args.do_train or not asked:
        return
    folder = find.would_resume(Path(args.output_dir)) if asked == "auto" else Path(str(asked))
    if folder is not None and not find.problems_of(folder, light=True):
        find.require_complete(folder)
        with _refusing_unreadable(folder):
            compare.require_same_settings(compare.with_step_of(folder, args, here().n_ranks), folder, allowable)


def precision_of(folder: Path) -> str:
    """Return the precision of the checkpoint's run; for `auto`, the one that it chose."""
    with _refusing_unreadable(folder):
        return policy.in_checkpoint(_read(folder / compare.ARGUMENTS))


def micro_rows_of(folder: Path) -> int | None:
    """Return the rows of a micro-batch that the checkpoint's run has found to fit; None if it did not search."""
    with _refusing_unreadable(folder):
        if not _read(folder / compare.ARGUMENTS).get("auto_find_batch_size"):
            return None
        return _trainer_state(folder).train_batch_size


def restore(
    state: RunState,
    folder: Path,
    lineage: Lineage,
    parts: Callable[[Set[str]], Mapping[str, Stateful]],
    sync: Ranks = _ALONE,
) -> None:
    """Restore what was saved; raises ConfigError if model, data or settings would change the loss curve.

    `parts` returns the parts of the run, given the settings that differ from the checkpoint.
    """
    run, counters = state.run, state.counters
    with _refusing_unreadable(folder):
        compare.continue_with_inferred(state.identity, run.model, folder)
        changed = compare.require_same(run.args, state.identity, folder)
        part_of = parts(changed)
        saved = read_parts(folder)
        trainer_state = _trainer_state(folder)
        load_states({name: part for name, part in part_of.items() if name not in _AFTER_WEIGHTS}, saved)
        weights.load_weights(run.model, folder)
        load_states({name: part_of[name] for name in _AFTER_WEIGHTS}, saved)
        for name in _COUNTERS:
            setattr(counters, name, getattr(trainer_state, name))
        if counters.global_step > run.plan.n_steps:
            logger.warning(
                "%s is of step %d, and this run ends after step %d: nothing is trained, and the model stays that of the"
                " longer training", folder.name, counters.global_step, run.plan.n_steps,
            )  # fmt: skip
        best_folder = trainer_state.best_model_checkpoint
        if changed & {*METRIC_FIELDS}:  # values of another metric cannot be compared
            counters.best_metric, counters.best_global_step, best_folder = None, None, None
        found = best.restored_folder(run.args, lineage, best_folder, folder) if sync.place.is_first else None
        sync.wait()  # for a slow disk
        counters.best_model_checkpoint = sync.of_first(str(found) if found else None, schema.optional(schema.text))
    logger.info("resuming after step %d from %s", counters.global_step, folder)
    if run.args.ddp_comm_hook == "powersgd" and sync.n_ranks > 1:
        logger.warning(
            "ddp_comm_hook powersgd keeps what it has not sent yet in no checkpoint: it begins with complete gradients "
            "again, so the curve is near that of a run without a stop, and not bitwise the same"
        )


def _trainer_state(folder: Path) -> TrainerState:
    """Return the counters; raises ValueError for values that no run writes, or of another step."""
    state = _read(folder / TRAINER_STATE)
    schema.require_types(state, schema.TRAINER_STATE, TRAINER_STATE)
    step = (manifest.facts_of(folder) or {}).get("step")
    schema.require_step(state.get("global_step"), step, TRAINER_STATE)
    found = TrainerState.load_from_json(str(folder / TRAINER_STATE))
    if found.best_metric is not None and math.isinf(found.best_metric):  # the best for earlier versions
        found.best_metric, found.best_global_step, found.best_model_checkpoint = None, None, None
    return found


@contextmanager
def _refusing_unreadable(folder: Path) -> Iterator[None]:
    """Raise StorageError for a folder that is intact but does not hold what whet writes."""
    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise StorageError(
            what=f"{folder} does not fit this run",
            got=f"{type(error).__name__}: {error}",
            why="the files are intact, but belong to a different model or optimizer, or another program changed them",
            fix="name another checkpoint in --resume_from_checkpoint; or start a new run: leave "
            "--resume_from_checkpoint out and use another --output_dir",
        ) from error


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
