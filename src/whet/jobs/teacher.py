"""The teacher of a run: another model, trained for the same task, whose probabilities the run's model learns too."""

from __future__ import annotations

from typing import Any

import xxhash
from torch import nn

from whet.config.methods import MethodSettings
from whet.engine.prepare import Ready
from whet.engine.run import device_of
from whet.errors import ConfigError
from whet.jobs.fields import JobFields
from whet.log import logger
from whet.methods import order
from whet.models.adapters import unwrapped
from whet.models.loading.heads import SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION, Head
from whet.models.loading.load import ModelSource, load_config, load_model, load_tokenizer, positions_of
from whet.models.packable import why_padded
from whet.models.proof import prove
from whet.models.view import ModelView
from whet.objectives.base import Objective
from whet.objectives.choose import choose
from whet.objectives.distilled import Distillation, distilled
from whet.objectives.packed_head import PackedHead

_SAMPLED = 256
_HARD_ALONE = ("regression", "multi_label_classification")


def require_reads(job: JobFields, tokenizer: Any, length: int, *, flag: str = "max_seq_length") -> None:
    """Raise ConfigError if the teacher cannot read the run's rows of up to `length` tokens.

    Needs its tokenizer and its configuration alone: it is called before anything is tokenised.
    """
    source = _source(job)
    _require_same_words(load_tokenizer(source), tokenizer, job)
    positions = positions_of(load_config(source))
    if positions is not None and length > positions:
        raise ConfigError(
            what="the teacher has fewer positions than the rows may have tokens",
            got=f"rows of up to {length} tokens ({flag}), {positions} positions in {job.teacher_model}",
            why="both models read the same rows, and the teacher has learnt nothing behind its last position",
            fix=f"--{flag} {positions} or less, or a --teacher_model with more positions",
        )


def taught(ready: Ready, job: JobFields, head: Head, *, pairs: bool = False) -> Objective:
    """Return the objective by which a model learns from the teacher that the run names.

    `pairs`: rows hold two texts, which models with token types tell apart.
    """
    teacher = load_model(_source(job), head, trained=True).to(device_of(ready.model)).eval().requires_grad_(False)
    student = unwrapped(ready.model)
    _require_same_labels(teacher, student, job, head)
    _require_types(teacher, student, job, pairs)
    prove.ensure(teacher)
    theirs = choose(teacher, None, ready.collate, ready.objective.padding)
    if isinstance(theirs, PackedHead):
        theirs.needs_logits = False  # only those of targets
    order.apply(ModelView(teacher), MethodSettings(operators="auto"))
    how = Distillation(
        temperature=job.distillation_temperature, alpha=job.distillation_alpha, teacher=_checksum(teacher)
    )  # fmt: skip
    found = distilled(ready.objective, ready.model, theirs, how)
    if found is None:
        raise _not_alike(teacher, student, job)
    share = f"{how.alpha:.0%} of the loss, at temperature {how.temperature:g}"
    logger.info("teacher: %s of %s, %s", type(teacher).__name__, job.teacher_model, share)
    return found


def _source(job: JobFields) -> ModelSource:
    assert job.teacher_model is not None
    return ModelSource(model=job.teacher_model, cache_dir=job.cache_dir, token=job.token, flag="--teacher_model")


def _checksum(model: nn.Module) -> str:
    """Return a checksum of the first weights of each tensor."""
    digest = xxhash.xxh3_128()
    for name, value in model.named_parameters():
        digest.update(name.encode())
        digest.update(value.detach().flatten()[:_SAMPLED].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _require_same_words(theirs: Any, ours: Any, job: JobFields) -> None:
    if theirs.get_vocab() == ours.get_vocab():
        return
    odd = dict(sorted({*theirs.get_vocab().items()} ^ {*ours.get_vocab().items()})[:3])
    raise ConfigError(
        what="the teacher reads another vocabulary",
        got=f"{len(theirs):,} and {len(ours):,} tokens; they differ in {odd}",
        why="both models read the same tokens of each row",
        fix=f"use a --teacher_model with the tokenizer of {job.model_name_or_path}, or begin with a model that has the"
        " teacher's",
    )


def _require_same_labels(teacher: Any, student: Any, job: JobFields, head: Head) -> None:
    kind = getattr(student.config, "problem_type", None)
    if kind in _HARD_ALONE:
        raise ConfigError(
            what=f"a teacher does not go with {kind}",
            got=f"teacher_model {job.teacher_model}",
            why="it teaches by its probabilities of labels of which one is right",
            fix="leave --teacher_model out, or train with one label for each text",
        )
    theirs, ours = (list(model.config.id2label.values()) for model in (teacher, student))
    if theirs == ours or head not in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        return
    raise ConfigError(
        what="the teacher knows other labels, or has them in another order",
        got=f"teacher {theirs[:6]}, here {ours[:6]}",
        why="each of its logits is a target for the same logit of the model",
        fix="train the teacher with the same command on data with the same labels",
    )


def _require_types(teacher: Any, student: Any, job: JobFields, pairs: bool) -> None:
    reads = [getattr(model.config, "type_vocab_size", 0) > 1 for model in (teacher, student)]
    if not pairs or reads[0] <= reads[1]:
        return
    raise ConfigError(
        what="the teacher tells the two texts of a row apart by token types, and the model does not",
        got=f"{type(teacher).__name__} and {type(student).__name__}",
        why="the rows are made for the model, and without token types the teacher's logits are not its own",
        fix=f"use a --teacher_model of the architecture of {job.model_name_or_path}",
    )


def _not_alike(teacher: nn.Module, student: nn.Module, job: JobFields) -> ConfigError:
    reasons = [f"{type(one).__name__}: {why}" for one in (teacher, student) if (why := why_padded(one)) is not None]
    return ConfigError(
        what="the teacher and the model do not run in the same way",
        got="; ".join(reasons) or f"{type(teacher).__name__} and {type(student).__name__}",
        why="both compute the same packed rows, so that each target has two logits",
        fix=f"leave --attn_implementation out, and use a --teacher_model of the family of {job.model_name_or_path}, "
        "one that whet packs (docs/families.md)",
    )
