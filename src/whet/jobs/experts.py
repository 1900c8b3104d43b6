"""The experts of a run: `--moe_experts` makes every n-th feed-forward part of the model sparse before it is trained."""

from __future__ import annotations

from typing import Any

from whet.config.arguments import TrainingArguments
from whet.jobs.fields import JobFields
from whet.models.experts.settings import ExpertSettings


def with_experts(model: Any, job: JobFields, args: TrainingArguments) -> Any:
    """Return the model with the experts that the run asks for; without moe_experts, the model as it is."""
    if job.moe_experts is None:
        return model
    from whet.models.experts.upcycle import upcycle

    return upcycle(model, settings_of_run(job), seed=args.seed)


def settings_of_run(job: JobFields) -> ExpertSettings:
    """Return the settings of the experts."""
    assert job.moe_experts is not None
    return ExpertSettings(
        experts=job.moe_experts,
        top_k=job.moe_top_k,
        every=job.moe_every,
        capacity_factor=job.moe_capacity_factor,
        aux_loss_coef=job.moe_aux_loss_coef,
        z_loss_coef=job.moe_z_loss_coef,
    )
