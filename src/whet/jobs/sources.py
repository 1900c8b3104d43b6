"""The model that a run names on its command line, as the loaders take it."""

from __future__ import annotations

from whet.jobs.fields import JobFields
from whet.models.loading.load import ModelSource


def source_of(job: JobFields) -> ModelSource:
    """Return where the run's model comes from."""
    return ModelSource(
        model=job.model_name_or_path,
        config=job.config_name,
        tokenizer=job.tokenizer_name,
        cache_dir=job.cache_dir,
        revision=job.model_revision,
        token=job.token,
    )
