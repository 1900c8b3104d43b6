"""What a prepared run will take: its sizes, the work of this rank, and its memory at the peak.

The step with the heaviest micro-batch is rehearsed (`plan/rehearsal.py`): nothing is computed, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from whet.config.rules.sharing import stage_of_run
from whet.data.batch import Batch, filled_length
from whet.data.store import RowStore
from whet.engine import description
from whet.engine.batches import BatchLoader, micro_batches_of
from whet.engine.evaluate import logits_if
from whet.engine.run import Run
from whet.engine.trials.precision import Passes, are_worth_timing, preserving_state, timed_passes
from whet.log import logger
from whet.models import adapters
from whet.models.fused.layers import GRADIENT
from whet.objectives.base import Objective, teacher_of
from whet.plan import anatomy
from whet.plan import memory as parts_of_memory
from whet.plan.allocator import Pass, heap_bytes
from whet.plan.anatomy import Anatomy, MicroBatch, Reading, Workload
from whet.plan.memory import MemoryForecast
from whet.plan.rehearsal import Memory, Rehearsal, Trace
from whet.precision import policy

_REPLAYED = 24
"""Steps whose memory is taken from the allocator one after the other."""
_SAMPLED = 8
"""Steps whose batches are made, to count their targets."""
_EPOCHS_LOOKED_AT = 4
_CUT = 64
"""Steps of an epoch whose micro-batches are cut in search of the heaviest, those that may have it first."""
_COUNTED = 1024
"""Steps of an epoch whose numbers of tokens are counted."""
_READ = 32
"""Steps whose rows are read in search of the heaviest, of a data set that does not say how long its rows are."""
_KERNEL_BYTES, _MOST_KERNELS = 600_000, 1024
"""What oneDNN keeps for a product with a number of rows, and of how many of them, unless the environment says so."""
_SHARES_WEIGHTS = 2
"""The first stage of ZeRO in which ranks share the weights."""
_GIVEN = 0.58
"""Of the trained weights, what ranks that share the optimizer's state alone hold for a while to update them and to give
them to each other, with the gaps that it leaves: measured with two ranks of MiniLM's size in fp32, 0.58, and of BERT's
base size in bf16, 0.54 (`benchmarks/plan/run.py --only "2 ranks"`)."""
_UNSURE = "summed gradients may fill the place of activations or not"
STEP, UPDATE, EVALUATION = "in a training step", "in an update of the weights", "in an evaluation"
PREDICTION, REFERENCE = "in the prediction of the test split", "in the passes of the reference before the first step"
COMPLETE = "when the model is complete, to be saved"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run will take."""

    anatomy: Anatomy
    workload: Workload
    memory: MemoryForecast
    """In the number format that takes the most, of those that the run may take."""
    by_format: Mapping[str, MemoryForecast]
    """In each of them: in one, or in both that `auto` chooses from before the first step."""
    held_bytes: int
    """What this process held once the run was prepared, without its weights."""


def of_run(
    run: Run,
    precision: str,
    optimizer: Optimizer,
    held_bytes: int,
    rehearsal: Rehearsal,
    free_bytes: int | None = None,
    tested: Any = None,
) -> Forecast:
    """Return the forecast of a run on a CPU in products of this precision.

    `held_bytes` is what the run's process holds at its first step without weights, state of the optimizer and
    gradients, `free_bytes` what it may hold. `rehearsal` is that in which the model was made, or a new one. `tested`
    are the rows that the model predicts after the training.
    """
    heaviest, sizes = _heaviest(run), anatomy.of_model(run.model, run.args, precision)
    if (teacher := teacher_of(run.objective)) is not None:
        theirs = anatomy.of_model(teacher, run.args, precision)
        sizes = replace(sizes, teacher=replace(theirs, checkpointing=None))
    readings = [*_readings(run, tested)]
    work = _workload(run, heaviest, readings)
    once = _update(run, optimizer, rehearsal), _trial(run, rehearsal)
    of_auto = ("fp32", "bf16") if are_worth_timing(run.model) else ("fp32",)
    found = {
        name: _Memory(
            run, name, heaviest, sizes, work, readings, rehearsal, held_bytes, free_bytes, *once
        ).forecast(optimizer)
        for name in (of_auto if precision == "auto" else (precision,))
    }  # fmt: skip
    work = replace(work, save_bytes=_saved_bytes(run, optimizer))
    peak = max(found.values(), key=lambda one: one.peak_bytes)
    return Forecast(anatomy=sizes, workload=work, memory=peak, by_format=found, held_bytes=held_bytes)


def left_of(run: Run, work: Workload, first: int) -> Workload:
    """Return what is left of a training after `first` of its steps, without what its command does after the last."""
    n_left, (n_evaluations, n_saves) = work.n_steps - first, _times_left(run, first)
    n_tokens = None if work.n_tokens is None else work.n_tokens * n_left / max(work.n_steps, 1)
    return replace(
        work, n_steps=n_left, n_tokens=n_tokens, n_evaluations=n_evaluations, n_saves=n_saves, readings=(), n_seeds=1
    )


# ---- memory ----


@dataclass(frozen=True)
class _Memory:
    """What a forecast of memory is made from."""

    run: Run
    precision: str
    heaviest: Sequence[Batch]
    sizes: Anatomy
    work: Workload
    readings: Sequence[_Reading]
    rehearsal: Rehearsal
    held_bytes: int
    free_bytes: int | None
    update: Trace
    """What the first update of the weights takes; what it leaves is the optimizer's state."""
    trial: Sequence[Pass]
    """The passes that compare two formats before the first step."""

    def forecast(self, optimizer: Optimizer) -> MemoryForecast:
        """Return the memory at the moment when it is most."""
        run, args, model = self.run, self.run.args, self.run.model
        planned = description.planned_bytes(model, args, optimizer, run.place)
        alone = description.planned_bytes(model, args, optimizer, replace(run.place, rank=0, n_ranks=1))
        tables = sum(getattr(one, GRADIENT).buffer.nbytes for one in model.modules() if hasattr(one, GRADIENT))
        held = planned.gradients if self._sums_gradients else tables
        gathered, unsure = self._gathered_bytes()
        trained, saves_aside = _bytes(_trained(model)), args.save_async and args.save_strategy != "no"
        data = sum(_bytes_of_rows(rows) for rows in self._data)
        teacher = teacher_of(run.objective)
        there = {
            "program": max(self.held_bytes - data, 0),
            "data": data,
            "weights": planned.weights + _bytes(model.buffers()) + (0 if teacher is None else _held_by(teacher)),
            "average": 0 if args.weight_averaging_start is None else trained,
            "gradients": held,
            "optimizer": planned.state or 0,
            "saving": _saved_weights(model) + (alone.state or 0) if saves_aside else 0,
        }
        step, passes = self._step()
        update = self.update
        if planned.gradients < trained:  # shared by ranks, or freed in backward
            step["gradients"] = min(step["gradients"], planned.gradients or step["gradients"])
        step["workspace"] += gathered
        passes[0] = replace(passes[0], update=update)
        moments = [(STEP, step)]
        if update.peak()[0] > update.left_bytes:  # what the update takes for a while, with all gradients there
            working = update.peak()[0] - update.left_bytes
            moments.append((UPDATE, {"gradients": max(planned.gradients - held, 0), "workspace": working}))
        others = alone.weights - planned.weights
        if others:
            moments.append((COMPLETE, {"saving": others}))
        before, after = [], []
        for one in self.readings:
            reading, read = self._read(one)
            if one.moment == REFERENCE:  # there is no optimizer's state yet
                moments.append((one.moment, {**reading, "optimizer": -(planned.state or 0)}))
                before.append(read)
            else:
                moments.append((one.moment, {**reading, "saving": others}))  # by the complete model, on each rank
                after.append(read)
        there["workspace"] = self._kernel_bytes(passes[0], [*before, *after])
        heap = heap_bytes([*self.trial, *before, *passes, *after])
        moment, most = parts_of_memory.highest(moments)
        replayed = sum(most.values()) - (gathered if moment == STEP else 0)
        parts = _sum(there, most, {"allocator": max(heap - update.left_bytes - replayed, 0)})
        parts = {name: parts[name] for name in parts_of_memory.PARTS if parts.get(name)}
        low = {} if moment != STEP or not unsure else {"low_bytes": sum(parts.values()) - unsure - held, "why": _UNSURE}
        return MemoryForecast(
            parts=parts,
            moment=moment,
            **low,
            free_bytes=self.free_bytes,
            micro_batch_tokens=max(batch.n_computed for batch in self.heaviest),
        )

    def _gathered_bytes(self) -> tuple[int, int]:
        """Return what ranks that share weights or their update hold for a while, and what of it may lie in gaps."""
        stage = stage_of_run(self.run.args)
        if self.run.place.n_ranks == 1 or not stage:
            return 0, 0
        if stage < _SHARES_WEIGHTS:
            return int(_GIVEN * _bytes(_trained(self.run.model))), 0
        from whet.engine.zero import gathered_bytes

        return gathered_bytes(self.run.model, stage)

    @property
    def _sums_gradients(self) -> bool:
        """Whether gradients are summed over ranks, in memory of their own: they do not take the place of activations.

        The buckets of torch's DistributedDataParallel even last from step to step.
        """
        return self.run.place.n_ranks > 1

    @property
    def _data(self) -> list[Any]:
        """Each data set that the run holds, once."""
        rows = (self.run.train_dataset, self.run.eval_dataset, *(one.rows for one in self.readings))
        return [*{id(one): one for one in rows}.values()]

    def _kernel_bytes(self, step: Pass, read: Sequence[Pass]) -> int:
        """Return the code that oneDNN keeps: some for each product and number of rows, and not of too many.

        A packed batch has one of many numbers of rows, so that it comes together over the run.
        """
        known = _computed_tokens(self.run) or {batch.n_computed for each in self.work.steps for batch in each}
        n_kept = _n_kernels(step, len(known))
        for reading, one in zip(self.readings, read, strict=True):
            n_kept += _n_kernels(one, len(reading.sizes - known))
            known |= reading.sizes
        return _KERNEL_BYTES * min(n_kept, _MOST_KERNELS)

    def _step(self) -> tuple[dict[str, int], list[Pass]]:
        """Return what the heaviest step has at its peak, by part, and the run's steps up to it as passes.

        Of several micro-batches, one runs with the gradients of another there.
        """
        run, rehearsal = self.run, self.rehearsal
        largest = max(self.heaviest, key=lambda batch: batch.n_computed)
        gradients: dict[int, int] = {}

        def note(weight: Any) -> None:
            if weight.grad is not None and (number := rehearsal.number_of(weight.grad)) is not None:
                gradients[number] = id(weight)
            if run.args.optimizer_in_backward:
                weight.grad = None

        with rehearsal, preserving_state(run.model):
            passes = Passes(run, [largest] * min(len(self.heaviest), 2))
            for weight in passes.weights:
                weight.register_post_accumulate_grad_hook(note)
            rehearsal.restart()
            passes.run(policy.make(self.precision, run.device))
        there_before = {id(one) for one in (passes.weights if self._sums_gradients else passes.tables)}
        trace = rehearsal.restart().without({number for number, one in gradients.items() if one in there_before})
        own = {number for number, one in gradients.items() if one not in there_before}
        parts = parts_of_memory.of_trace(trace, own, self.sizes.vocabulary)
        factors = [n / largest.n_computed for n in (*_tokens_of_steps(run, self.work), largest.n_computed)]
        kept = frozenset() if run.args.optimizer_in_backward else frozenset(own)
        return parts, [Pass(trace, factor, largest.n_computed, kept) for factor in factors]

    def _read(self, reading: _Reading) -> tuple[dict[str, int], Pass]:
        """Return what the largest batch of such passes allocates, by part and as it does."""
        run, objective, rehearsal, batch = self.run, self.run.objective, self.rehearsal, reading.heaviest
        rehearsal.restart()
        with rehearsal, preserving_state(run.model), torch.no_grad(), logits_if(objective, wanted=False):
            run.model.eval()
            with policy.make(self.precision, run.device).forward():
                output = objective.forward(batch, seed=0, step=0)
            if _n_targets(objective, batch) and reading.moment != REFERENCE:
                objective.loss_sum(output, batch)
            del output
        trace = rehearsal.restart()
        return parts_of_memory.of_trace(trace, set(), self.sizes.vocabulary), Pass(trace, n_tokens=batch.n_computed)


def _trial(run: Run, rehearsal: Rehearsal) -> list[Pass]:
    """Return the passes that compare two formats before the first step."""
    if run.args.precision == "fp32" or not are_worth_timing(run.model):
        return []
    found: list[Pass] = []
    with rehearsal, preserving_state(run.model):
        for name in ("fp32", "bf16" if run.args.precision == "auto" else run.args.precision):
            rehearsal.restart()
            passes = timed_passes(run, run.plan.order.rows(0))
            passes.run(policy.make(name, run.device))
            del passes
            found.append(Pass(rehearsal.restart()))
    return found * 2


def _update(run: Run, optimizer: Optimizer, rehearsal: Rehearsal) -> Trace:
    """Return what the first update of the weights takes; what it leaves is the optimizer's state.

    Of an optimizer that does not run without numbers, and of several ranks, the state alone.
    """
    trained = _trained(run.model)
    if run.place.n_ranks == 1:
        try:
            with rehearsal:
                for one in trained:
                    one.grad = torch.empty_like(one)
                rehearsal.restart()
                optimizer.step()
                found = rehearsal.restart()
        except Exception as error:
            logger.info("the update is not rehearsed: %s", error)
        else:
            return found
        finally:
            for one in trained:
                one.grad = None
    sizes = _state_tensors(trained, description.planned_bytes(run.model, run.args, optimizer, run.place).state or 0)
    return Trace([Memory(n_bytes, (n_bytes,), in_backward=False) for n_bytes in sizes], [*range(len(sizes))])


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def _state_tensors(trained: Sequence[torch.nn.Parameter], state_bytes: int) -> list[int]:
    """Return the sizes of the optimizer's tensors: two moments of each weight, or one where it keeps less."""
    total = max(_bytes(trained), 1)
    n_moments = 2 if state_bytes > 1.5 * total else 1
    return [int(state_bytes / n_moments * one.nbytes / total) for one in trained for _ in range(n_moments)]


def _sum(*parts: Mapping[str, int]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in parts:
        for name, n_bytes in one.items():
            found[name] = found.get(name, 0) + n_bytes
    return found


def _bytes(tensors: Any) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)


def _bytes_of_rows(rows: Any) -> int:
    """Return the memory of rows that lie end to end; that of others is part of the program's."""
    return sum(array.nbytes for array in rows.arrays().values()) if isinstance(rows, RowStore) else 0


def _held_by(model: torch.nn.Module) -> int:
    return _bytes(model.parameters()) + _bytes(model.buffers())


# ---- work ----


@dataclass(frozen=True)
class _Reading:
    """Rows that a run computes without gradients, in batches of the evaluation's size."""

    moment: str
    rows: Any
    heaviest: Batch
    sizes: set[int]
    """Tokens of its batches."""
    in_numbers: Reading


def _readings(run: Run, tested: Any) -> Iterator[_Reading]:
    """Yield what the run computes without gradients: for a reference before its steps, then to evaluate and predict.

    That is their order in the run.
    """
    evaluated = run.eval_dataset if run.args.do_eval else None
    splits = [(EVALUATION, evaluated), (PREDICTION, tested)]
    if getattr(run.objective, "reads_rows_first", False):
        every = [one for one in (run.train_dataset, run.eval_dataset, tested) if one is not None]
        splits = [*((REFERENCE, one) for one in every), *splits]
    for moment, rows in splits:
        if rows is not None and len(rows):
            yield _reading(run, moment, rows)


def _reading(run: Run, moment: str, rows: Any) -> _Reading:
    n_rows, objective, lengths = run.args.per_device_eval_batch_size, run.objective, _lengths(rows)
    n_batches = -(-len(rows) // n_rows)

    def batch(n: int) -> Batch:
        return objective.batch(rows, range(n * n_rows, min((n + 1) * n_rows, len(rows))), 0)

    made = {n: batch(n) for n in _spread(range(n_batches), _SAMPLED)}
    loads = {n: one.n_computed for n, one in made.items()}
    if lengths is not None:
        loads = dict(enumerate(_sizes_read(lengths, n_rows, packed=objective.packed).tolist()))
    at = max(loads, key=lambda n: loads[n])
    of_rank = -(-n_batches // run.place.n_ranks)
    in_numbers = tuple(_in_numbers(one, _n_targets(objective, one)) for one in made.values())
    return _Reading(
        moment, rows, made[at] if at in made else batch(at), {*loads.values()}, Reading(in_numbers, of_rank)
    )


def _heaviest(run: Run) -> list[Batch]:
    """Return the micro-batches of the step that has the one with the most tokens."""
    lengths = _lengths(run.train_dataset)
    if lengths is None:
        found = [_batches(run, step) for step in _spread(range(run.plan.n_steps), _READ)]
        return max(found, key=lambda batches: max(batch.n_computed for batch in batches))
    most, at = -1, 0
    for steps in _epochs(run):
        bounds = _bounds(run, lengths, steps)
        for place in np.argsort(-bounds, kind="stable")[:_CUT].tolist():
            if bounds[place] <= most:
                break
            if (n := max(_loads(run, lengths, steps[place]))) > most:
                most, at = n, steps[place]
    return _batches(run, at)


def _epochs(run: Run) -> Iterator[range]:
    """Yield the steps of each epoch that is looked at."""
    each, n_steps = run.plan.order.steps_per_epoch, run.plan.n_steps
    for epoch in range(min(run.plan.n_epochs, _EPOCHS_LOOKED_AT)):
        yield range(epoch * each, min((epoch + 1) * each, n_steps))


def _bounds(run: Run, lengths: np.ndarray, steps: range) -> np.ndarray:
    """Return how many tokens no micro-batch of each of these steps exceeds, (steps,): those of one epoch.

    Of one rank without a budget it is what the largest computes. All steps are looked at at once, which cuts none.
    """
    order, n_ranks, budget = run.plan.order, run.place.n_ranks, run.args.max_tokens_per_batch
    rows_per_step, most_rows = order.rows_per_batch * order.batches_per_step, run.args.per_device_train_batch_size
    n_kept = min(order.batches_per_epoch * order.rows_per_batch, len(steps) * rows_per_step)
    lengths = lengths[order.epochs(steps[0] // order.steps_per_epoch)[:n_kept]]
    starts = np.arange(0, len(lengths), most_rows * n_ranks)
    firsts = np.searchsorted(starts, np.arange(0, len(lengths), rows_per_step))
    longest, sums = np.maximum.reduceat(lengths, starts), np.add.reduceat(lengths, starts)
    n_rows = -(-np.diff(np.append(starts, len(lengths))) // n_ranks)
    if run.objective.packed:
        bounds = np.maximum.reduceat(sums if n_ranks == 1 else sums // n_ranks + longest, firsts)
    else:
        bounds = np.maximum.reduceat(longest * n_rows, firsts)
    if budget is not None:
        longest = np.maximum.reduceat(longest, firsts)
        cut = np.maximum(longest, budget) if run.objective.packed else longest * most_rows
        bounds = np.where(np.maximum.reduceat(sums, firsts) > budget * n_ranks, cut, bounds)
    sizes, places = np.unique(bounds, return_inverse=True)
    return np.asarray([_computed(n, packed=run.objective.packed) for n in sizes.tolist()])[places]


def _loads(run: Run, lengths: np.ndarray, step: int) -> list[int]:
    """Return the tokens that each of this rank's micro-batches of a step computes."""
    packed = run.objective.packed
    pieces = micro_batches_of(run, run.plan.order.rows(step), run.args.per_device_train_batch_size)
    each = (lengths[rows] for rows, *_ in pieces)
    return [_computed(int(one.sum() if packed else one.max() * len(one)), packed=packed) for one in each]


def _computed(n_tokens: int, *, packed: bool) -> int:
    return filled_length(n_tokens) if packed else n_tokens


def _tokens_of_steps(run: Run, work: Workload) -> list[int]:
    """Return the tokens of the largest micro-batch of steps that are spread over the run."""
    lengths = _lengths(run.train_dataset)
    if lengths is None:
        return [max(batch.n_computed for batch in step) for step in work.steps]
    return [max(_loads(run, lengths, step)) for step in _spread(range(run.plan.n_steps), _REPLAYED)]


def _spread(steps: range, most: int) -> list[int]:
    """Return some of these steps, spread evenly: all of them if they are few."""
    return [steps[n] for n in dict.fromkeys(np.linspace(0, len(steps) - 1, min(len(steps), most)).astype(int).tolist())]


def _n_kernels(one: Pass, n_sizes: int) -> int:
    """Return how many products a pass has in batches of so many sizes; those in which its tokens have no part, once."""
    products = one.trace.products
    of_tokens = sum(one.n_tokens in sizes for sizes in products)
    return of_tokens * n_sizes + len(products) - of_tokens


def _computed_tokens(run: Run) -> set[int]:
    """Return the numbers of tokens that the micro-batches of the run compute; empty if the rows do not say."""
    lengths = _lengths(run.train_dataset)
    if lengths is None:
        return set()
    some = (step for steps in _epochs(run) for step in _spread(steps, _COUNTED))
    return {n for step in some for n in _loads(run, lengths, step)}


def _sizes_read(lengths: np.ndarray, n_rows: int, *, packed: bool) -> np.ndarray:
    """Return the tokens that each batch of so many of these rows computes, in order."""
    starts = np.arange(0, len(lengths), n_rows)
    if packed:
        return np.asarray([filled_length(n) for n in np.add.reduceat(lengths, starts).tolist()])
    return np.maximum.reduceat(lengths, starts) * np.diff(np.append(starts, len(lengths)))


def _lengths(rows: Any) -> np.ndarray | None:
    return rows.lengths if isinstance(rows, RowStore) else None


def _batches(run: Run, step: int) -> list[Batch]:
    """Return this rank's micro-batches of a step."""
    pieces = micro_batches_of(run, run.plan.order.rows(step), run.args.per_device_train_batch_size)
    return [run.objective.batch(run.train_dataset, rows, first, padded) for rows, first, padded, _ in pieces]


def _saved_bytes(run: Run, optimizer: Optimizer) -> int:
    """Return the bytes of a checkpoint: of its weights, and of the optimizer's state."""
    state = description.planned_bytes(run.model, run.args, optimizer, run.place).state or 0
    return _saved_weights(run.model) + (0 if run.args.save_only_model else state)


def _saved_weights(model: torch.nn.Module) -> int:
    """Return the bytes of the weights in a checkpoint: what is trained of them with an adapter, else all of them."""
    if adapters.names_of(model):
        return _bytes(_trained(model))
    return _held_by(model)


def _workload(run: Run, heaviest: Sequence[Batch], readings: Sequence[_Reading]) -> Workload:
    plan, args, count = run.plan, run.args, partial(_n_logits, run.objective)
    n_first = min(plan.n_steps, plan.order.steps_per_epoch)
    steps = _spread(range(n_first), _SAMPLED)
    evaluated = next((one for one in readings if one.moment == EVALUATION), None)
    n_evaluations, n_saves = _times_left(run, 0)
    return Workload(
        n_steps=plan.n_steps,
        n_rows=len(run.train_dataset),
        sees_all_rows=plan.n_steps >= plan.order.steps_per_epoch,
        steps=tuple(tuple(_in_numbers(one, count(one)) for one in _batches(run, n)) for n in steps),
        heaviest=tuple(_in_numbers(one, count(one)) for one in heaviest),
        n_tokens=None if (tokens := BatchLoader(run).tokens_ahead(0)) is None else tokens / run.place.n_ranks,
        n_evaluations=0 if evaluated is None else n_evaluations + 1,
        evaluation=None if evaluated is None else evaluated.in_numbers,
        readings=tuple(one.in_numbers for one in readings if one is not evaluated),
        n_saves=n_saves,
        save_interval_s=args.save_interval_s if args.save_strategy == "time" else None,
        saves_best=args.save_strategy == "best",
        n_ranks=run.place.n_ranks,
        zero_stage=stage_of_run(args) if run.place.n_ranks > 1 else 0,
        sampled=len(steps) < n_first,
    )


def _times_left(run: Run, first: int) -> tuple[int, int]:
    """Return how often the training evaluates and saves after `first` of its steps.

    One that saves each new best saves as often as it evaluates, at most.
    """
    plan = run.plan
    n_evaluations, n_saves = (one.times_left(first + 1, plan.n_steps) for one in (plan.evaluate, plan.save))
    n_evaluations += run.args.eval_on_start and first == 0
    return n_evaluations, n_evaluations if plan.save.strategy == "best" else n_saves


def _in_numbers(batch: Batch, n_targets: int) -> MicroBatch:
    if batch.cu_seqlens is not None:
        lengths = np.diff(batch.cu_seqlens.numpy())
        return MicroBatch(lengths, batch.n_computed, n_targets)
    mask = batch.inputs.get("attention_mask")
    n_rows = max(batch.n_rows, 1)
    each = -(-batch.n_computed // n_rows)
    lengths = np.full(n_rows, batch.n_tokens // n_rows) if mask is None or mask.dim() != 2 else mask.sum(1).numpy()
    return MicroBatch(lengths, batch.n_computed, n_targets, padded_to=each)


def _n_targets(objective: Objective, batch: Batch) -> int:
    """Return how many places the loss of an evaluation reads; rows of questions have no labels there, and no loss."""
    return _n_logits(objective, batch) if batch.labels or "labels" in batch.inputs else 0


def _n_logits(objective: Any, batch: Batch) -> int:
    """Return how many places the loss reads the logits of: its targets, unless the objective has others."""
    return getattr(objective, "n_logits", objective.count)(batch)
