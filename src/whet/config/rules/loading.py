"""The rules about batches: made ahead in threads, and as large as memory allows."""

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule, at_least
from whet.errors import Problem

PREFETCH_FACTOR = 2
"""Batches that a worker makes ahead where nobody says: as torch does."""


def workers_make_ahead(args: TrainingFields) -> Problem | None:
    """What steers workers does nothing without any."""
    given: dict[str, object] = {}
    if args.dataloader_prefetch_factor is not None:
        given["dataloader_prefetch_factor"] = args.dataloader_prefetch_factor
    if args.dataloader_persistent_workers:
        given["dataloader_persistent_workers"] = True
    if args.dataloader_num_workers or not given:
        return None
    return Problem(
        what=f"{' and '.join(given)} without dataloader_num_workers",
        got=given,
        why="it says how workers make batches ahead, and there is no worker",
        fix="add --dataloader_num_workers 2, or leave it out",
    )


def found_size_may_accumulate(args: TrainingFields) -> Problem | None:
    """A smaller batch than asked for means that gradients are summed."""
    if not (args.auto_find_batch_size and args.optimizer_in_backward):
        return None
    return Problem(
        what="auto_find_batch_size does not go with optimizer_in_backward",
        got="auto_find_batch_size=true, optimizer_in_backward=true",
        why="where fewer rows fit, the gradients of several batches are summed, and a step inside backward keeps none",
        fix="leave one of the two out; --per_device_train_batch_size sets the rows by hand",
    )


LOADING_RULES: tuple[Rule, ...] = (
    at_least("dataloader_num_workers", 0, "it is a number of threads; 0 makes batches in the main one"),
    at_least("dataloader_prefetch_factor", 1, "a worker that makes nothing ahead is none"),
    workers_make_ahead,
    found_size_may_accumulate,
)
