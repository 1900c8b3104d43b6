"""Rules about CPUs, memory and time: what a pod asks for must fit what its ranks do."""

import re
from decimal import Decimal

from whet.config.rules.ranges import Rule, at_least
from whet.errors import Problem
from whet.kubernetes import quantity
from whet.kubernetes.fields import KubernetesFields

_LEAST = {"memory": 2**28, "shared_memory": 2**20, "ephemeral_storage": 2**26}
"""Bytes below which an amount is a mistake: no run fits, or /dev/shm and the disk hold nothing."""
_USUAL_MOST = 2**42
"""Bytes up to which a number without a unit may be meant with one."""
_MOST_MEMORY = 2**50
"""Bytes that no pod has: the cluster would accept the job, and no node would ever take it."""
_MOST_CPUS = 2**16
_SPELLED = re.compile(r"0*(\d+(?:\.\d+)?)\s*(?:([kmgt])i?b?)?", re.IGNORECASE)
"""How amounts are written elsewhere: 64, 64 GB, 1.5gib."""
_EXAMPLES = {"memory": "64Gi", "shared_memory": "1Gi", "ephemeral_storage": "20Gi"}
_LEAST_GRACE_S = 30
"""Seconds: a step and a save of a small model, on a network volume."""


def cpus_are_whole(asked: KubernetesFields) -> Problem | None:
    """A pod asks for a whole number of CPUs: the kubelet gives a pod CPUs of its own only then."""
    amount = _amount(asked.cpus)
    if asked.cpus is None or (amount is not None and 1 <= amount <= _MOST_CPUS and amount == int(amount)):
        return None
    near = max(1, int(amount)) if amount is not None and amount <= _MOST_CPUS else 16
    return Problem(
        what="cpus is not a whole number of CPUs",
        got=asked.cpus,
        why="a thread on a part of a CPU waits for the scheduler in every step, and all other threads wait for it; "
        "the kubelet gives CPUs of its own only to pods that ask for a whole number, which some node must have",
        fix=f"use --cpus {near}",
    )


def every_rank_has_a_thread(asked: KubernetesFields) -> Problem | None:
    """The CPUs are enough for the ranks."""
    amount = _amount(asked.cpus)
    if amount is None or min(asked.nproc_per_node, asked.cpus_per_core) < 1:
        return None
    if amount >= asked.nproc_per_node * asked.cpus_per_core:
        return None
    return Problem(
        what=f"{asked.nproc_per_node} ranks do not fit on {asked.cpus} CPUs",
        got=f"--cpus {asked.cpus} --nproc_per_node {asked.nproc_per_node} --cpus_per_core {asked.cpus_per_core}",
        why="each rank needs a core of its own: two ranks on one core take its time from each other",
        fix=f"use --cpus {asked.nproc_per_node * asked.cpus_per_core} or more, or fewer ranks",
    )


def memory_is_an_amount(asked: KubernetesFields) -> Problem | None:
    """Memory, shared memory and storage are quantities of Kubernetes: bytes, unless a unit follows."""
    for name in _LEAST:
        text = getattr(asked, name)
        amount = _amount(text)
        if text is not None and not _is_enough(name, amount):
            return Problem(
                what=f"{name} is no amount" if amount is None else f"{name} is too {_size(name, amount)}",
                got=text if amount is None else f"{text}, which is {int(amount)} bytes",
                why="Kubernetes counts bytes unless a unit follows, without a space: Mi, Gi, Ti, or M, G, T; a pod "
                f"needs at least {_LEAST[name] >> 20}Mi of it, and no node has more than 1024Ti",
                fix=f"use {' or '.join(f'--{name} {one}' for one in _meant(name, text))}",
            )
    return None


def _size(name: str, amount: Decimal) -> str:
    return "small" if amount < _LEAST[name] else "large"


def shared_memory_is_a_part(asked: KubernetesFields) -> Problem | None:
    """What lies in /dev/shm counts as memory of the pod."""
    memory, shared = _amount(asked.memory), _amount(asked.shared_memory)
    if memory is None or shared is None or memory < _LEAST["memory"] or shared <= memory / 2:
        return None
    return Problem(
        what="shared_memory is more than half of memory",
        got=f"--shared_memory {asked.shared_memory} --memory {asked.memory}",
        why="shared memory is part of the pod's memory: if both are used in full, the kernel ends the pod",
        fix=f"use a --shared_memory of at most half of {asked.memory}, or more --memory",
    )


def the_grace_period_is_long_enough(asked: KubernetesFields) -> Problem | None:
    """A run that is evicted has the time to finish its step and to save."""
    if asked.grace_period_s >= _LEAST_GRACE_S:
        return None
    return Problem(
        what=f"grace_period_s is below {_LEAST_GRACE_S}",
        got=asked.grace_period_s,
        why="an evicted run finishes its step and saves a checkpoint before the kubelet kills it; what it cannot save "
        "is trained again",
        fix=f"use --grace_period_s {_LEAST_GRACE_S} or more",
    )


def _amount(text: str | None) -> Decimal | None:
    return None if text is None else quantity.read(text)


def _is_enough(name: str, amount: Decimal | None) -> bool:
    return amount is not None and _LEAST[name] <= amount <= _MOST_MEMORY


def _meant(name: str, text: str) -> list[str]:
    """Return the amounts that may be meant, as Kubernetes writes them; an example if there is none."""
    found = _SPELLED.fullmatch(text.strip())
    units = found[2].upper() if found and found[2] else "GM"
    tried = [f"{found[1]}{unit}i" for unit in units] if found else []
    return [one for one in tried if _LEAST[name] <= (_amount(one) or 0) <= _USUAL_MOST] or [_EXAMPLES[name]]


AMOUNT_RULES: tuple[Rule, ...] = (
    cpus_are_whole,
    at_least("cpus_per_core", 1, "a thread needs at least one CPU"),
    at_least("kept_free_cores", 0, "it is a count"),
    every_rank_has_a_thread,
    memory_is_an_amount,
    shared_memory_is_a_part,
    the_grace_period_is_long_enough,
)
