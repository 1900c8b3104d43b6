"""The manifests of a plan, in the order in which they are created, and their text."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from whet.kubernetes.manifests.job import job
from whet.kubernetes.manifests.pod import Manifest
from whet.kubernetes.manifests.pytorchjob import pytorchjob
from whet.kubernetes.manifests.trainjob import trainjob
from whet.kubernetes.plan import JobPlan

_KINDS = {"trainjob": trainjob, "pytorchjob": pytorchjob, "job": job}
_CLEAR_WORD = re.compile(r"[A-Za-z/].+", re.DOTALL)
"""Texts that all readers of YAML agree on, except for the words that PyYAML quotes itself (true, no, null). kubectl
reads 3e-5 and 0o17 as numbers and may read y as true, which PyYAML would leave without quotes."""


def manifests(plan: JobPlan) -> list[Manifest]:
    """Return the objects of the job."""
    return _KINDS[plan.kind](plan)


def as_yaml(objects: Sequence[Manifest]) -> str:
    """Return the objects as one YAML text that kubectl reads."""
    return yaml.dump_all(objects, Dumper=_Plain, sort_keys=False, explicit_start=True, width=10**6)


class _Plain(yaml.SafeDumper):
    """Writes equal parts twice, where YAML would refer to the first, and quotes all strings but clear words."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _CLEAR_WORD.fullmatch(text) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Plain.add_representer(str, _string)
