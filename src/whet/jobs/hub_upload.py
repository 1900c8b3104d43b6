"""`--push_to_hub`: the trained model, and its checkpoints if asked for, in a repository of the hub.

`MODEL_FILES` lists what is uploaded: files that hold texts of the data (predictions, errors, the report) or paths of
this machine (logs, settings) stay in the output folder. The repository is made before the run reads anything, so that a
wrong name or token costs no training. Checkpoints are uploaded in the background, from links that outlive their
rotation. An upload that fails while the run trains is named in the log and made up for by the next one; the last one
fails the command, after all files are written.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.fields import UPLOAD
from whet.config.settings import options_of
from whet.config.upload import MODEL_FILES, upload_command
from whet.errors import ConfigError, StorageError, hide_secrets
from whet.jobs.fields import JobFields
from whet.jobs.model_card import published_base
from whet.log import logger
from whet.models.loading.folder_check import ADAPTER
from whet.models.loading.hub import unreachable
from whet.watch import stop

_NEWEST = "last-checkpoint"
"""The folder that transformers gives the newest checkpoint with hub_strategy checkpoint."""
_STAGING = ".hub-upload"


class Upload:
    """The repository of one run. A callback of the engine: at each save it uploads what `hub_strategy` asks for."""

    def __init__(self, api: Any, repository: str, url: str, args: TrainingArguments) -> None:
        self._api, self.repository, self.url, self._args = api, repository, url, args
        self._staging = Path(args.output_dir).absolute() / _STAGING
        self._running: threading.Thread | None = None
        self._is_closed = False
        stop.before_exit(self.close)

    @property
    def command(self) -> str:
        """The command that uploads the trained model by hand."""
        return upload_command(self._args.output_dir, self.repository, self._args.hub_revision)

    def on_save(self, args: Any, state: Any, control: Any, *, folder: Path, **_: Any) -> None:
        strategy = self._args.hub_strategy
        if strategy == "end" or not self._args.should_save:
            return
        if self._running is not None and self._running.is_alive():
            if not self._args.hub_always_push:
                return  # the next save has newer weights
            self._running.join()
        try:
            staged = self._link(Path(folder))
        except OSError as error:  # the checkpoint itself is complete
            remove_staged(self._staging.parent)
            self._say_failed(Path(folder).name, error)
            return
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
                fix=f"run: {self.command}",
            ) from error
        finally:
            self.close()
        return f"  {'uploaded to':<24}{self.url}"

    def close(self) -> None:
        """Remove what was prepared for an upload; one that is still on its way is lost."""
        self._is_closed = True
        remove_staged(self._staging.parent)

    def _link(self, folder: Path) -> Path:
        """Return a folder with the files of a checkpoint, which are kept when the checkpoint is deleted."""
        remove_staged(self._staging.parent)
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
            self._say_failed(name, error)

    def _say_failed(self, name: str, error: Exception) -> None:
        if not self._is_closed:
            logger.warning("%s is not on the hub (%s); the next save is uploaded again", name, _said(error))

    def _push(self, folder: Path, message: str, *, patterns: Any = None, into: str | None = None) -> None:
        adapter = None if patterns is None else _adapter_to_publish(folder)
        with _without_bars():
            self._api.upload_folder(
                repo_id=self.repository, folder_path=folder, path_in_repo=into, commit_message=message,
                revision=self._args.hub_revision, allow_patterns=None if patterns is None else list(patterns),
                delete_patterns=["*"] if into == _NEWEST else None,
                ignore_patterns=None if adapter is None else [ADAPTER],
            )  # fmt: skip
            if adapter is not None:
                self._api.upload_file(
                    repo_id=self.repository, path_or_fileobj=adapter, path_in_repo=ADAPTER, commit_message=message,
                    revision=self._args.hub_revision,
                )  # fmt: skip


def _adapter_to_publish(folder: Path) -> bytes | None:
    """Return the settings of the adapter in the folder without paths of this machine; None: there is no adapter."""
    path = folder / ADAPTER
    if not path.is_file():
        return None
    settings = json.loads(path.read_text("utf-8"))
    settings["base_model_name_or_path"] = published_base(settings["base_model_name_or_path"])
    return json.dumps(settings, indent=2, sort_keys=True).encode("utf-8")


def remove_staged(folder: str | Path) -> None:
    """Remove what a run in this folder had prepared to upload: links, which keep deleted checkpoints on the disk."""
    shutil.rmtree(Path(folder) / _STAGING, ignore_errors=True)


def switched_off(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings of an upload that are set, as a run has them that uploads nothing."""
    usual = {name: options_of(type(args))[name].default for name in UPLOAD}
    return {name: value for name, value in usual.items() if getattr(args, name) != value}


def trained_in(folder: str, upload: Upload | None) -> str:
    """Return where the trained model is, and how to upload it from there, for a run that stops before its upload."""
    return f"the trained model is in {folder}" + ("" if upload is None else f", and not on the hub: {upload.command}")


def begin(args: TrainingArguments, job: JobFields) -> Upload | None:
    """Return the upload of a run that asks for one, its repository made; ConfigError if the hub refuses it."""
    if not args.push_to_hub or not args.should_save:
        return None
    from huggingface_hub import HfApi, constants

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()
    if reason is not None:
        raise _refused(args, name, reason, "connect to the network (a mirror: HF_ENDPOINT)")
    api = HfApi(token=args.hub_token or job.token, library_name="whet")
    try:
        made = api.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        if args.hub_revision is not None:
            api.create_branch(made.repo_id, branch=args.hub_revision, exist_ok=True)
    except Exception as error:  # what the client and the network raise, of any type
        fix = "log in by `hf auth login`, or set HF_TOKEN to a token that may write; check --hub_model_id"
        raise _refused(args, name, _said(error), fix) from error
    return Upload(api, made.repo_id, str(made.url), args)


def _refused(args: TrainingArguments, name: str, reason: str, fix: str) -> ConfigError:
    later = upload_command(args.output_dir, args.hub_model_id, args.hub_revision)
    return ConfigError(
        what="push_to_hub cannot make its repository on the hub",
        got=f"{name}: {hide_secrets(reason)}",
        why="the trained model would have nowhere to go, so nothing was begun",
        fix=f"{fix}; or train without --push_to_hub, and upload the model later: {later}",
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
