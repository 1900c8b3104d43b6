"""`--profile`: how the time of a training step is spent, shown once, early in the run."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback

from whet.config.arguments import TrainingArguments
from whet.models.packed import graphs_in, without_graphs

_LEAST_WARM_UP, WARM_UP_STEPS = 2, 12
"""Steps before the profiled ones: the first steps allocate memory and start threads, so they are slower. A short run
has fewer."""
PROFILED_STEPS = 5


def build(args: TrainingArguments) -> list[StepProfile]:
    """Return the callback if it is asked for."""
    return [StepProfile()] if args.profile else []


class StepProfile(TrainerCallback):
    """Profiles a few steps after the warm-up and prints the table; the rest of the run is not affected.

    In a short run fewer steps are profiled; `times` holds the sums. Only the time from on_step_begin to on_step_end
    counts, without evaluations and checkpoints.
    """

    def __init__(self) -> None:
        self.times: StepTimes | None = None
        self.first_step = self.last_step = 0
        self.pauses_graphs = False
        """Whether the profiled steps are launched kernel by kernel, and the others by CUDA graphs."""
        self._running: _StepProfiler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        n_left = state.max_steps - state.global_step
        n_warm = min(max(n_left - PROFILED_STEPS, _LEAST_WARM_UP), WARM_UP_STEPS, max(n_left - 1, 0))
        self.first_step = state.global_step + n_warm + 1
        self.last_step = min(self.first_step + PROFILED_STEPS - 1, state.max_steps)
        self.n_warm = n_warm
        self.times = StepTimes(on_gpu=any(parameter.is_cuda for parameter in model.parameters()))
        self.pauses_graphs = bool(graphs_in(model))

    def on_step_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        if self.times is not None and self.first_step <= state.global_step + 1 <= self.last_step:
            self._running = _StepProfiler(model, on_gpu=self.times.on_gpu)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running is not None and self.times is not None:
            running, self._running = self._running, None
            self.times.add(running.stop())
            if state.global_step == self.last_step:
                self._show()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._running is not None:  # the step failed
            self._running.stop()
            self._running = None
        if self.times is not None and 0 < self.times.n_steps <= self.last_step - self.first_step:  # stopped early
            self._show()

    def _show(self) -> None:
        assert self.times is not None
        seen = (self.first_step, self.first_step + self.times.n_steps - 1)
        if sys.stdout.isatty():
            _print_table(self.times, seen, self.n_warm, pauses_graphs=self.pauses_graphs)
        else:
            facts = {"steps": seen, "warm_up_steps": self.n_warm} | as_json(self.times)
            facts |= {"cuda_graphs": "paused"} if self.pauses_graphs else {}
            sys.stdout.write(json.dumps({"profile": facts}) + "\n")
            sys.stdout.flush()


def as_json(times: StepTimes) -> dict[str, Any]:
    """Return the times of a step as JSON values."""
    return {
        "step_ms": round(times.step_ms, 3),
        "groups": {
            group.replace(" ", "_"): {
                "ms": round(times.ms(group), 3),
                "share": round(times.frac(group), 4),
                "largest": times.largest(group),
            }
            for group in GROUPS
        },
    }


def _print_table(times: StepTimes, seen: tuple[int, int], n_warm: int, *, pauses_graphs: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    steps = f"step {seen[0]}" if seen[0] == seen[1] else f"steps {seen[0]} to {seen[1]}"
    title = f"Where a step's time goes: {steps}, after {n_warm} of warm-up, {times.step_ms:,.1f} ms each"
    if pauses_graphs:
        title += " without CUDA graphs, which hide what they launch: other steps take less"
    table = Table(title=title, title_justify="left")
    table.add_column("part")
    table.add_column("ms a step", justify="right")
    table.add_column("share", justify="right")
    table.add_column("most of it")
    for group in sorted(GROUPS, key=lambda one: (one == "other", -times.ms(one))):
        row = (group, f"{times.ms(group):,.1f}", f"{times.frac(group):.1%}", ", ".join(times.largest(group)))
        table.add_row(*row)
    Console().print(table)


class _StepProfiler:
    """Profiles one step, with a range around the step and around each module whose class has a group."""

    def __init__(self, model: nn.Module, *, on_gpu: bool) -> None:
        self._open: list[record_function] = []
        self._launching = ExitStack()  # the modules of a pass by a graph are not called
        self._launching.enter_context(without_graphs(model))
        self._hooks = [hook for name, module in _annotated(model) for hook in self._hook(name, module)]
        self._on_gpu = on_gpu
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._profiler = profile(activities=activities, acc_events=True)
        with _quiet():
            self._profiler.start()
        self._enter(STEP)

    def stop(self) -> Any:
        """Return the events since the beginning."""
        if self._on_gpu:
            torch.cuda.synchronize()
        while self._open:
            self._leave()
        for hook in self._hooks:
            hook.remove()
        self._launching.close()
        self._profiler.stop()
        return self._profiler.events()

    def _hook(self, name: str, module: nn.Module) -> list[Any]:
        before = module.register_forward_pre_hook(lambda *_: self._enter(name))
        return [before, module.register_forward_hook(lambda *_: self._leave(), always_call=True)]

    def _enter(self, name: str) -> None:
        span = record_function(name)
        span.__enter__()
        self._open.append(span)

    def _leave(self) -> None:
        self._open.pop().__exit__(None, None, None)


def _annotated(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name of the range, module) for modules whose class has a group; of nested attentions only the inner."""
    for module in model.modules():
        group = group_of_class(type(module).__name__)
        inner = (group_of_class(type(child).__name__) for child in module.modules() if child is not module)
        if group is not None and not (group == "attention" and "attention" in inner):
            yield f"whet::{group}", module


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the profiler's own messages; it reads this variable when it starts."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]


STEP = "whet::step"
"""Name of the profiler's range around a complete step."""
BETWEEN = "Python between the operators"


class StepTimes:
    """Sums of the profiled steps. Every operator counts with its own time, without that of operators inside it.

    On a CPU the sum of all groups is the time of the steps. `on_gpu`: the times are those of the kernels that an
    operator started; the rest of the step counts as "other".
    """

    def __init__(self, *, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        self.n_steps = 0
        self.total_us = 0.0
        self.by_operator: dict[Group, dict[str, float]] = {group: defaultdict(float) for group in GROUPS}

    def add(self, events: Iterable[Any]) -> None:
        """Add the events of one profiled step, in the order of their beginnings; one of them is the range STEP."""
        events = list(events)
        step = next(event for event in events if event.name == STEP)
        places = _Attribution()
        before_us = self._sum_us()
        for event in events:
            inside, group = places.of(event)
            if inside or (self.on_gpu and event is not step):
                name = BETWEEN if event is step else event.name
                self.by_operator[group or "other"][name] += self._own_us(event)
        self.n_steps += 1
        self.total_us += step.cpu_time_total
        if self.on_gpu:
            self.by_operator["other"]["the GPU waits"] += max(step.cpu_time_total - (self._sum_us() - before_us), 0.0)

    @property
    def step_ms(self) -> float:
        """The mean time of a step."""
        return self.total_us / max(self.n_steps, 1) / 1000

    def ms(self, group: Group) -> float:
        """Return the group's mean time a step."""
        return sum(self.by_operator[group].values()) / max(self.n_steps, 1) / 1000

    def frac(self, group: Group) -> float:
        """Return the group's share of the steps' time."""
        return sum(self.by_operator[group].values()) / max(self.total_us, 1e-9)

    def largest(self, group: Group, n: int = 2) -> list[str]:
        """Return the names of the operators that took most of the group's time, the largest first."""
        spent_us = self.by_operator[group]
        return [name.removeprefix(NODE) for name in sorted(spent_us, key=lambda one: -spent_us[one])[:n]]

    def _own_us(self, event: Any) -> float:
        return event.self_device_time_total if self.on_gpu else event.self_cpu_time_total

    def _sum_us(self) -> float:
        return sum(sum(counted.values()) for counted in self.by_operator.values())


class _Attribution:
    """Assigns the events of one profile to groups, parents before their children."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[bool, Group | None]] = {}
        self._forward: dict[int, Group] = {}
        """Number of an operator in the graph -> its group; its backward node has the same number."""

    def of(self, event: Any) -> tuple[bool, Group | None]:
        """Return whether the event is part of the step, on the step's own thread, and its group."""
        if id(event) not in self._known:
            self._known[id(event)] = self._look(event)
        return self._known[id(event)]

    def _look(self, event: Any) -> tuple[bool, Group | None]:
        parent = event.cpu_parent
        inside, around = (event.name == STEP, None) if parent is None else self.of(parent)
        if parent is not None and parent.name.startswith(NODE) and event.name.startswith("aten::add"):
            # two gradients of one tensor are summed, most often a residual's, before the node itself runs
            around = around if around in EXCLUSIVE else None
        own = group_of(event.name)
        backward = is_backward(event.name)
        if own is None and backward:
            own = self._forward.get(event.sequence_nr)
        group = around if around in EXCLUSIVE else own or around or default_group(event.name)
        if group is not None and not backward and event.sequence_nr >= 0:
            self._forward[event.sequence_nr] = group  # the last one before the graph's node was made
        return inside, group


Group = Literal[
    "matrix products", "attention", "norms", "activations", "embedding", "loss", "optimizer", "data", "other"
]
GROUPS: tuple[Group, ...] = get_args(Group)
EXCLUSIVE: frozenset[Group] = frozenset(("optimizer", "data"))
"""Groups that include everything that runs inside them: a product in the optimizer counts as optimizer."""
NODE = "autograd::engine::evaluate_function: "
"""What the profiler puts before the name of a backward node."""

_PRODUCT = r"(^|_)(mm|bmm|addmm|baddbmm|addbmm|matmul|linear|einsum|addmv|mv)(_|$)|convolution|mkldnn|onednn|quant|int8"
_BY_NAME: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("optimizer", re.compile(r"^optimizer|accumulate_?grad|adam|grad_norm|zero_grad|foreach")),
    ("data", re.compile(r"^data$")),
    ("loss", re.compile(r"loss|cross_entropy|log_softmax")),
    ("attention", re.compile(r"attention|attend|softmax")),
    ("matrix products", re.compile(_PRODUCT)),
    ("activations", re.compile(r"activation|gelu|silu|relu|tanh|sigmoid|swish|mish|(bias|gated)_act")),
    ("norms", re.compile(r"norm(?!al)")),
    ("embedding", re.compile(r"embed")),
)
_BY_DEFAULT = re.compile(r"^(add|sub|rsub|(native_|feature_)?dropout|bernoulli|mean|var|pow|rsqrt)_?$")
"""Residuals, dropout and the pieces of a norm, unless the operator around them belongs to another group."""
_BY_CLASS: tuple[tuple[Group, re.Pattern[str]], ...] = (
    ("attention", re.compile(r"attention|rotary")),
    ("norms", re.compile(r"norm")),
    ("embedding", re.compile(r"embedding")),
    ("loss", re.compile(r"loss")),
    ("activations", re.compile(r"activation|gelu|silu|relu|mlp|feedforward|ffn")),
)


@cache
def group_of(name: str) -> Group | None:
    """Return the group of an operator by its name alone; None if it depends on what is around it.

    Knows torch's operators, its backward nodes (`AddmmBackward0`) and optimizers, and whet's own ranges (`whet::...`).
    """
    if name == "whet::scatter":  # the rows of the word table's gradient
        return "embedding"
    plain = _plain(name)
    return next((group for group, pattern in _BY_NAME if pattern.search(plain)), None)


@cache
def default_group(name: str) -> Group | None:
    """Return the group of an operator, such as an addition, if nothing around it decides."""
    return "norms" if _BY_DEFAULT.match(_plain(name)) else None


def group_of_class(name: str) -> Group | None:
    """Return the group of what a module of this class computes besides matrix products; None for containers."""
    return next((group for group, pattern in _BY_CLASS if pattern.search(name.lower())), None)


def is_backward(name: str) -> bool:
    """Return whether this is a node of the backward graph, which carries the number of its forward operator."""
    return name.startswith(NODE) or re.search(r"Backward\d*$", name) is not None


def _plain(name: str) -> str:
    """Return `AddmmBackward0` as `addmm`, `aten::add_` as `add_`; what belongs to oneDNN keeps its namespace."""
    space, _, last = name.removeprefix(NODE).rpartition("::")
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"_?[Bb]ackward\d*$", "", last)).lower()
    return f"{space}_{words}" if space in ("mkldnn", "onednn") else words
