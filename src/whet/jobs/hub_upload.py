"""`--push_to_hub`: the trained model, and its checkpoints if asked for, in a repository of the hub.

What is uploaded is listed here: files that hold texts of the data (predictions, errors, the report) or paths of this
machine (logs, settings) stay in the output folder. The repository is made before the run reads anything, so that a
wrong name or token costs no training. Checkpoints are uploaded in the background, from links that outlive their
rotation. An upload that fails while the run trains is named in the log and made up for by the next one; the last one
fails the command, after all files are written.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.errors import ConfigError, StorageError, hide_secrets
from whet.jobs.fields import JobFields
from whet.log import logger
from whet.models.loading.hub import CHAT_TEMPLATES, unreachable
from whet.watch import stop

MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_model.safetensors", "adapter_config.json",
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "spiece.model", "sentencepiece.bpe.model", *CHAT_TEMPLATES, "preprocessor_config.json",
    "processor_config.json", "whet_task.json", "README.md",
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]*_*/*.json",
    "[0-9]*_*/model.safetensors",
)  # fmt: skip
"""Of an output folder, what transformers, sentence-transformers and `whet predict` read."""
_NEWEST = "last-checkpoint"
"""The folder that transformers gives the newest checkpoint with hub_strategy checkpoint."""
_STAGING = ".hub-upload"


class Upload:
    """The repository of one run. A callback of the engine: at each save it uploads what `hub_strategy` asks for."""

    def __init__(self, api: Any, repository: str, url: str, args: TrainingArguments) -> None:
        self._api, self.repository, self.url, self._args = api, repository, url, args
        self._staging = Path(args.output_dir).absolute() / _STAGING
        self._running: threading.Thread | None = None

    def on_save(self, args: Any, state: Any, control: Any, *, folder: Path, **_: Any) -> None:
        strategy = self._args.hub_strategy
        if strategy == "end" or not self._args.should_save:
            return
        if self._running is not None and self._running.is_alive():
            if not self._args.hub_always_push:
                return  # the next save has newer weights
            self._running.join()
        staged = self._link(Path(folder))
        self._running = threading.Thread(
            target=self._push_checkpoint, args=(staged, Path(folder).name, strategy), name="hub upload", daemon=True
        )
        self._running.start()

    def finish(self) -> str:
        """Upload the trained model, after what is still on its way; return a line with its address.

        Ctrl-C ends it from here on: all files are written. Raises StorageError.
        """
        stop.restore()
        try:
            if self._running is not None:
                self._running.join()
            self._push(Path(self._args.output_dir), "End of training", patterns=MODEL_FILES)
        except Exception as error:  # what the client and the network raise, of any type
            folder = self._args.output_dir
            raise StorageError(
                what="the trained model is not on the hub",
                got=hide_secrets(f"{self.repository}: {_said(error)}"),
                why=f"the upload failed; the model and all results are complete in {folder}",
                fix="run: hf upload --include '*.safetensors' --include '*.json' --include README.md "
                f"{self.repository} {folder} .",
            ) from error
        finally:
            shutil.rmtree(self._staging, ignore_errors=True)
        return f"  {'uploaded to':<24}{self.url}"

    def _link(self, folder: Path) -> Path:
        """Return a folder with the files of a checkpoint, which are kept when the checkpoint is deleted."""
        shutil.rmtree(self._staging, ignore_errors=True)
        staged = self._staging / folder.name
        staged.mkdir(parents=True)
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                target = staged / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # a file system without links
                    shutil.copyfile(path, target)
        return staged

    def _push_checkpoint(self, staged: Path, name: str, strategy: str) -> None:
        try:
            self._push(staged, f"Training in progress, {name}", patterns=MODEL_FILES)
            if strategy in ("checkpoint", "all_checkpoints"):
                inside = _NEWEST if strategy == "checkpoint" else name
                self._push(staged, f"Training in progress, {name}, to resume from", into=inside)
        except Exception as error:
            logger.warning("%s is not on the hub (%s); the next save is uploaded again", name, _said(error))

    def _push(self, folder: Path, message: str, *, patterns: Any = None, into: str | None = None) -> None:
        with _without_bars():
            self._api.upload_folder(
                repo_id=self.repository, folder_path=folder, path_in_repo=into, commit_message=message,
                revision=self._args.hub_revision, allow_patterns=None if patterns is None else list(patterns),
                delete_patterns=["*"] if into == _NEWEST else None,
            )  # fmt: skip


def begin(args: TrainingArguments, job: JobFields) -> Upload | None:
    """Return the upload of a run that asks for one, its repository made; ConfigError if the hub refuses it."""
    if not args.push_to_hub or not args.should_save:
        return None
    from huggingface_hub import HfApi, constants

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()
    if reason is not None:
        raise _refused(name, reason, "connect to the network (a mirror: HF_ENDPOINT)")
    api = HfApi(token=args.hub_token or job.token, library_name="whet")
    try:
        made = api.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        if args.hub_revision is not None:
            api.create_branch(made.repo_id, branch=args.hub_revision, exist_ok=True)
    except Exception as error:  # what the client and the network raise, of any type
        fix = "log in by `hf auth login`, or set HF_TOKEN to a token that may write; check --hub_model_id"
        raise _refused(name, _said(error), fix) from error
    return Upload(api, made.repo_id, str(made.url), args)


def _refused(name: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(
        what="push_to_hub cannot make its repository on the hub",
        got=f"{name}: {hide_secrets(reason)}",
        why="the trained model would have nowhere to go, so nothing was begun",
        fix=f"{fix}; or train without --push_to_hub, and upload the folder later by `hf upload`",
    )


def _said(error: BaseException) -> str:
    """Return the error in one line, with what caused it: the client's own says only which file it was."""
    said = " ".join(hide_secrets(str(error)).split())[:300] or type(error).__name__
    return said if error.__cause__ is None else f"{said} {_said(error.__cause__)}"


@contextmanager
def _without_bars() -> Iterator[None]:
    """Run the block without the client's progress bars, which would be drawn over the run's."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
