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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.fields import UPLOAD
from whet.config.settings import options_of
from whet.config.upload import ADAPTER, EARLIER_MODEL, MODEL_FILES, before_upload, upload_command
from whet.errors import ConfigError, StorageError, hide_secrets
from whet.jobs.fields import JobFields
from whet.jobs.model_card import published_base
from whet.log import logger
from whet.models.loading.hub import unreachable
from whet.store import manifest
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
        except (OSError, ValueError) as error:  # the checkpoint itself is complete
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
            trained = Path(self._args.output_dir)
            is_adapter = (trained / ADAPTER).is_file()
            self._push(self._link(trained, MODEL_FILES) if is_adapter else trained, "End of training")
        except Exception as error:  # what the client and the network raise, of any type
            folder = self._args.output_dir
            raise StorageError(
                what="the trained model is not on the hub",
                got=hide_secrets(f"{self.repository}: {_said(error)}"),
                why=f"the upload failed; the model and all results are complete in {folder}",
                fix=f"{before_upload(folder) or 'run: '}{self.command}",
            ) from error
        finally:
            self.close()
        return f"  {'uploaded to':<24}{self.url}"

    def close(self) -> None:
        """Remove what was prepared for an upload; one that is still on its way is lost."""
        self._is_closed = True
        remove_staged(self._staging.parent)

    def _link(self, folder: Path, patterns: Sequence[str] = ("**/*",)) -> Path:
        """Return a folder with these files of the other as the hub gets them.

        They are kept when the other folder, a checkpoint, is deleted.
        """
        remove_staged(self._staging.parent)
        staged = self._staging / folder.absolute().name
        staged.mkdir(parents=True)
        for path in {path for one in patterns for path in folder.glob(one)}:
            if path.is_file() and not path.is_symlink():
                target = staged / path.relative_to(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(path, target)
                except OSError:  # a file system without links
                    shutil.copyfile(path, target)
        _publish_adapter(staged)
        return staged

    def _push_checkpoint(self, staged: Path, name: str, strategy: str) -> None:
        try:
            self._push(staged, f"Training in progress, {name}")
            if strategy in ("checkpoint", "all_checkpoints"):
                inside = _NEWEST if strategy == "checkpoint" else name
                self._push(staged, f"Training in progress, {name}, to resume from", into=inside)
        except Exception as error:
            self._say_failed(name, error)

    def _say_failed(self, name: str, error: Exception) -> None:
        if not self._is_closed:
            logger.warning("%s is not on the hub (%s); the next save is uploaded again", name, _said(error))

    def _push(self, folder: Path, message: str, *, into: str | None = None) -> None:
        """Upload the model of the folder in the place of the repository's, or all files into a folder of it."""
        of_checkpoint = ["*"] if into == _NEWEST else None
        with _without_bars():
            self._api.upload_folder(
                repo_id=self.repository, folder_path=folder, path_in_repo=into, commit_message=message,
                revision=self._args.hub_revision, allow_patterns=[*MODEL_FILES] if into is None else None,
                delete_patterns=[*EARLIER_MODEL] if into is None else of_checkpoint,
            )  # fmt: skip


def _publish_adapter(staged: Path) -> None:
    """Let the settings of an adapter in a folder of links name its model without a path of this machine."""
    path = staged / ADAPTER
    if not path.is_file():
        return
    settings = json.loads(path.read_text("utf-8"))
    settings["base_model_name_or_path"] = published_base(settings["base_model_name_or_path"])
    path.unlink()  # the file of the run keeps the path
    path.write_text(json.dumps(settings, indent=2, sort_keys=True), "utf-8")
    if (staged / manifest.MANIFEST).exists():
        manifest.relist(staged, ADAPTER)


def remove_staged(folder: str | Path) -> None:
    """Remove what a run in this folder had prepared to upload: links, which keep deleted checkpoints on the disk."""
    shutil.rmtree(Path(folder) / _STAGING, ignore_errors=True)


def switched_off(args: TrainingArguments) -> dict[str, Any]:
    """Return the settings of an upload that are set, as a run has them that uploads nothing."""
    usual = {name: options_of(type(args))[name].default for name in UPLOAD}
    return {name: value for name, value in usual.items() if getattr(args, name) != value}


def trained_in(folder: str, upload: Upload | None) -> str:
    """Return where the trained model is, and how to upload it from there, for a run that stops before its upload."""
    later = "" if upload is None else f", and not on the hub: {before_upload(folder)}{upload.command}"
    return f"the trained model is in {folder}{later}"


def begin(args: TrainingArguments, job: JobFields) -> Upload | None:
    """Return the upload of a run that asks for one, its repository made; ConfigError if the hub refuses it."""
    if not args.push_to_hub or not args.should_save:
        return None
    from huggingface_hub import HfApi, constants

    name = args.hub_model_id or Path(args.output_dir).absolute().name
    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else unreachable()
    if reason is not None:
        raise _refused(args, job, name, reason, "connect to the network (a mirror: HF_ENDPOINT)")
    api = HfApi(token=args.hub_token or job.token, library_name="whet")
    try:
        made = api.create_repo(name, private=args.hub_private_repo, exist_ok=True)
        if args.hub_revision is not None:
            api.create_branch(made.repo_id, branch=args.hub_revision, exist_ok=True)
    except Exception as error:  # what the client and the network raise, of any type
        fix = "log in by `hf auth login`, or set HF_TOKEN to a token that may write; check --hub_model_id"
        raise _refused(args, job, name, _said(error), fix) from error
    return Upload(api, made.repo_id, str(made.url), args)


def _refused(args: TrainingArguments, job: JobFields, name: str, reason: str, fix: str) -> ConfigError:
    later = upload_command(args.output_dir, args.hub_model_id, args.hub_revision)
    if job.lora_r is not None and Path(job.model_name_or_path).is_dir():
        later = before_upload(args.output_dir, str(Path(job.model_name_or_path).absolute())) + later
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
