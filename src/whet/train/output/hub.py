"""Model cards, and the upload of a trained model to the Hub."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import HfApi, ModelCard
from transformers.trainer_utils import SchedulerType

from whet.errors import StorageError
from whet.train.compat import overrides
from whet.train.compat.public import PublicTrainer
from whet.train.output import files as output_files

_NOT_UPLOADED = ["_*", "checkpoint-*", ".*", "runs/*", "run.log*"]


def write_card(trainer: PublicTrainer, facts: dict[str, Any]) -> None:
    """Write README.md to the output folder: a draft of a model card with what the Trainer knows."""
    from transformers.modelcard import TrainingSummary

    path = Path(trainer.args.output_dir) / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    tags = facts.get("tags")
    facts = facts | {"tags": [tags] if isinstance(tags, str) else list(tags) if tags else None}
    if path.exists() and facts["tags"]:
        earlier = ModelCard.load(path).data.get("tags") or []
        facts["tags"] += [tag for tag in earlier if tag not in facts["tags"]]
    summary = TrainingSummary.from_trainer(_as_transformers_has_it(trainer), **facts)
    with output_files.stored(f"{path.name} cannot be written", path.parent, on_error=trainer.args.save_error_policy):
        card = summary.to_model_card()  # names of folders may hold bytes that are no UTF-8
        output_files.write_text(path, card.encode("utf-8", "backslashreplace").decode("utf-8"))


def create_repo(trainer: PublicTrainer, token: str | None, private: bool | None) -> str:
    """Return the name of the repository of the trained model, which is created if there is none."""
    name = (
        trainer.hub_model_id
        or getattr(trainer.args, "hub_model_id", None)
        or Path(trainer.args.output_dir).absolute().name
    )
    private = getattr(trainer.args, "hub_private_repo", None) if private is None else private
    try:
        return HfApi().create_repo(name, token=_token(trainer, token), private=private, exist_ok=True).repo_id
    except Exception as error:  # of the client, of its transport or of the Hub: no common base
        raise _refused(f"the repository {name} cannot be created on the Hub", error) from error


def push(
    trainer: PublicTrainer,
    message: str | None,
    blocking: bool,
    token: str | None,
    revision: str | None,
    facts: dict[str, Any],
) -> Any:
    """Save the model with its card and upload the output folder; return the Hub's description of the commit."""
    trainer.events.send("on_push_begin", trainer.state)
    trainer.init_hf_repo(token=token, private=facts.pop("private", None))
    facts.setdefault("model_name", str(trainer.hub_model_id).split("/")[-1])
    tags = facts.get("tags") or []
    tags = [tags] if isinstance(tags, str) else list(tags)
    facts["tags"] = tags + [tag for tag in getattr(trainer.model, "model_tags", None) or () if tag not in tags]
    trainer.save_model(**overrides.accepted(trainer.save_model, _internal_call=True))
    trainer.create_model_card(**facts)
    try:
        return HfApi().upload_folder(
            repo_id=str(trainer.hub_model_id),
            folder_path=trainer.args.output_dir,
            commit_message=message,
            token=_token(trainer, token),
            run_as_future=not blocking,
            ignore_patterns=_NOT_UPLOADED,
            revision=revision or getattr(trainer.args, "hub_revision", None),
        )
    except Exception as error:  # of the client, of its transport or of the Hub: no common base
        raise _refused(f"the model cannot be uploaded to {trainer.hub_model_id}", error) from error


def _token(trainer: PublicTrainer, token: str | None) -> str | None:
    return token if token is not None else getattr(trainer.args, "hub_token", None)


def _as_transformers_has_it(trainer: PublicTrainer) -> Any:
    """Return an object with the attributes of a Trainer that TrainingSummary reads."""
    args = trainer.args
    values = {name: getattr(args, name) for name in args.to_dict()}
    schedule = args.lr_scheduler_type
    facts = {
        "parallel_mode": args.parallel_mode,
        "world_size": args.world_size,
        "train_batch_size": args.per_device_train_batch_size,
        "eval_batch_size": args.per_device_eval_batch_size,
        "lr_scheduler_type": SchedulerType(getattr(schedule, "value", schedule)),
        "label_smoothing_factor": args.label_smoothing_factor,
        "fp16": trainer.precision.name == "fp16",
    }
    return SimpleNamespace(
        args=SimpleNamespace(**(values | facts)),
        model=trainer.model if hasattr(trainer.model, "config") else _with_config(trainer.model),
        state=trainer.state,
        train_dataset=trainer.train_dataset,
        eval_dataset=trainer.eval_dataset,
    )


def _with_config(model: Any) -> Any:
    """Return an object that looks like the model with an empty configuration."""
    return type(type(model).__name__, (), {"config": SimpleNamespace(_name_or_path="")})()


def _refused(what: str, error: BaseException) -> StorageError:
    return StorageError(
        what=what,
        got=str(error),
        why="the Hub did not take it; the files in the output folder are complete",
        fix="check the network and the token (hf auth login), then call push_to_hub again",
    )
