"""Sums the times of profiled training steps by group of operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from whet.train.callbacks.operator_groups import EXCLUSIVE, GROUPS, NODE, Group, default_group, group_of, is_backward

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
