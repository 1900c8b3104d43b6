"""What the commands that train have in common."""

from whet.config.arguments import TrainingArguments
from whet.errors import Problem
from whet.jobs.fields import JobFields

USAGE = "[FILE.yaml | FILE.json] [--OPTION VALUE ...]"


def missing_places(job: JobFields, args: TrainingArguments) -> list[Problem]:
    """Return what is missing of model, files and folders; only then are the modules imported that look."""
    from whet.jobs.places import check_places

    return check_places(job, args)
