"""What the commands that train have in common."""

from whet.config.arguments import TrainingArguments
from whet.errors import Problem
from whet.jobs.fields import JobFields

USAGE = "[FILE.yaml | FILE.json] [--OPTION VALUE ...]"
MAIN_OPTIONS = (
    "model_name_or_path", "dataset_name", "train_file", "validation_file", "output_dir", "do_train", "do_eval",
    "resume_from_checkpoint", "precision", "per_device_train_batch_size", "learning_rate", "num_train_epochs",
)  # fmt: skip
"""What the help text of each shows, next to options of its own."""


def missing_places(job: JobFields, args: TrainingArguments) -> list[Problem]:
    """Return what is missing of model, files and folders; only then are the modules imported that look."""
    from whet.jobs.places import check_places

    return check_places(job, args)
