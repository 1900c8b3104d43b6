"""The techniques of the table: the settings each changes, what the guides say about it, what its loss must equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.method_names import names_to_ask_for
from whet.config.optimizer_names import DEFAULT, Row, rows
from whet.optional import extra

PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One row of the table."""

    name: str
    changes: Callable[[Base], Mapping[str, Any]]
    """The fields that differ from the plain run's; empty if the technique does not apply to it."""
    claim: str = ""
    """What the guides say about speed and memory, in our words."""
    equal_to: str | None = None
    """The technique whose losses these must equal, to rounding."""
    package: str | None = None
    """The package that must be installed; also the name of whet's extra."""


@dataclass(frozen=True)
class Base:
    """The plain run."""

    settings: Mapping[str, Any]
    """Every field of `TrainingArguments`."""
    row_tokens: int
    """The longest row."""

    @property
    def batch_rows(self) -> int:
        """Rows in a forward pass."""
        return self.settings["per_device_train_batch_size"]


def _set(**changes: Any) -> Callable[[Base], Mapping[str, Any]]:
    return lambda _: changes


def _smaller_batches(base: Base) -> Mapping[str, Any]:
    """Return the same rows in four batches each, or in three or two, or one row each."""
    parts = next((n for n in (4, 3, 2) if base.batch_rows % n == 0), base.batch_rows)
    if parts == 1:
        return {}
    return {
        "per_device_train_batch_size": base.batch_rows // parts,
        "gradient_accumulation_steps": base.settings["gradient_accumulation_steps"] * parts,
    }


def _token_budget(base: Base) -> Mapping[str, Any]:
    """Return a quarter of the padded batch's tokens, but at least one row."""
    return {"max_tokens_per_batch": max(base.row_tokens, base.batch_rows * base.row_tokens // 4)}


def _optim(row: Row) -> Technique:
    return Technique(name=row.name, changes=_set(optim=row.name), claim=row.claim, package=row.installed_by or None)


TECHNIQUES: tuple[Technique, ...] = (
    Technique(name=PLAIN, changes=_set(), claim="the run that the others are compared with"),
    Technique(name="fp32", changes=_set(precision="fp32", bf16=None, fp16=None)),
    Technique(
        name="bf16",
        changes=_set(precision="bf16", bf16=None, fp16=None),
        claim="faster; on a CPU with AVX-512, bf16 instructions or AMX",
    ),
    Technique(
        name="fp16",
        changes=_set(precision="fp16", bf16=None, fp16=None),
        claim="faster on a GPU; saves no memory by itself",
    ),
    Technique(name="int8", changes=_set(precision="int8", bf16=None, fp16=None)),
    Technique(name="tf32", changes=_set(tf32=True), claim="up to 3x faster, on a GPU since Ampere"),
    Technique(
        name="accumulation", changes=_smaller_batches, claim="less memory; larger steps than fit", equal_to=PLAIN
    ),
    Technique(name="token_budget", changes=_token_budget, equal_to=PLAIN),
    Technique(
        name="checkpointing_blocks",
        changes=_set(gradient_checkpointing=True, checkpointing_policy="blocks"),
        claim="about 20 % slower; less memory",
        equal_to=PLAIN,
    ),
    Technique(
        name="checkpointing_selective",
        changes=_set(gradient_checkpointing=True, checkpointing_policy="selective"),
        equal_to=PLAIN,
    ),
    *(_optim(row) for row in rows() if row.name != DEFAULT),
    Technique(name="no_clipping", changes=_set(max_grad_norm=0.0)),
    Technique(
        name="optimizer_in_backward",
        changes=_set(optimizer_in_backward=True, max_grad_norm=0.0),
        equal_to="no_clipping",
    ),
    Technique(
        name="attention_sdpa",
        changes=_set(attn_implementation="sdpa"),
        claim="faster, less memory (than eager); here padded",
    ),
    Technique(name="attention_eager", changes=_set(attn_implementation="eager"), claim="the plain one; here padded"),
    Technique(
        name="attention_flash",
        changes=_set(attn_implementation="flash_attention_2", precision="bf16", bf16=None, fp16=None),
        claim="faster, less memory, on a GPU in half precision; here padded and in bf16",
    ),
    Technique(
        name="auto_batch_size",
        changes=_set(auto_find_batch_size=True),
        claim="never out of memory; as many rows as fit",
        equal_to=PLAIN,
    ),
    Technique(
        name="activation_offload",
        changes=_set(activation_offload=True),
        claim="less memory of a GPU; slower",
        equal_to=PLAIN,
    ),
    Technique(
        name="empty_cache",
        changes=_set(torch_empty_cache_steps=4),
        claim="about 10 % slower; avoids running out of memory",
        equal_to=PLAIN,
    ),
    Technique(
        name="dataloader_workers",
        changes=_set(dataloader_num_workers=2),
        claim="faster: batches are ready in time",
        equal_to=PLAIN,
    ),
    Technique(
        name="pin_memory",
        changes=_set(dataloader_pin_memory=True),
        claim="faster copies to a GPU; nothing to do on a CPU",
        equal_to=PLAIN,
    ),
    Technique(name="torch_compile", changes=_set(torch_compile=True), claim="faster", equal_to=PLAIN),
    *(Technique(name=name, changes=_set(methods=[name])) for name in names_to_ask_for()),
)


def choose(only: Sequence[str], skip: Sequence[str]) -> list[Technique]:
    """Return the selected techniques, plain first, with those that they must be equal to."""
    named = {one.name: one for one in TECHNIQUES}
    wanted = {name for name in (only or named) if name not in skip}
    wanted |= {one.equal_to for name in wanted if (one := named[name]).equal_to is not None}
    return [one for one in TECHNIQUES if one.name in wanted | {PLAIN}]


def why_not(technique: Technique, base: Base) -> str | None:
    """Return why the technique cannot be measured here; None if it can be tried."""
    changes = technique.changes(base)
    unknown = changes.keys() - {one.name for one in dataclasses.fields(TrainingArguments)}
    if unknown:
        return f"this version of whet has no {', '.join(sorted(unknown))}"
    if not changes and technique.name != PLAIN:
        return "nothing to split: the batch has one row"
    if technique.name != PLAIN and all(base.settings[name] == value for name, value in changes.items()):
        return "the plain run has this setting already"
    if technique.package is not None and find_spec(technique.package) is None:
        return f"{technique.package} is not installed: pip install {extra(technique.package)}"
    return None
