"""What `whet predict` does for every task: run its rows, write the predictions."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from whet import console, json_output, system
from whet.config.arguments import TrainingArguments
from whet.engine.engine import Engine, RunSpec
from whet.errors import ConfigError, NonFiniteError, StorageError, escape_controls
from whet.jobs.predict.arguments import PredictArguments
from whet.models.loading.exported import ExportedModel, described, other_format
from whet.store.write import disk_fix
from whet.strict_json import with_plain_ends
from whet.watch import files as output_files

_MOST_LINKS = 40
"""Links that Linux follows one after the other."""


def setting_of(asked: Any, known: Mapping[str, Any], name: str, usual: Any = None) -> Any:
    """Return a setting: what the command is asked for, else that of the training (`known`), else the usual value."""
    value = getattr(asked, name)
    return known.get(name, usual) if value is None else value


def engine_of(asked: PredictArguments, model: Any, tokenizer: Any, **more: Any) -> Engine:
    """Return an engine that predicts with this model: without padding and with native operators if they can serve.

    `more` goes into its RunSpec. An exported model computes in its own number format; ConfigError if another is asked.
    """
    is_exported = isinstance(model, ExportedModel)
    if is_exported and asked.precision == "bf16":
        raise other_format(asked.precision, described(model.about))
    args = TrainingArguments(
        output_dir=str(Path(asked.output).parent),  # nothing is written there
        precision="fp32" if is_exported else asked.precision,
        per_device_eval_batch_size=asked.per_device_eval_batch_size,
        report_to=("none",),
        disable_tqdm=True,
        log_level="warning",
    )
    return Engine(RunSpec(model=model, args=args, processing_class=tokenizer, **more))


def write(asked: PredictArguments, engine: Engine, entries: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object a line, and print how many, where, and how the model ran."""
    padding = "with" if engine.objective.packed_model is None else "without"
    name = engine.evaluation_precision(()).name
    precision = "fp32" if name == "auto" else name  # auto without a measurement computes in fp32
    if isinstance(engine.model, ExportedModel):
        precision = described(engine.model.about)
    write_lines(asked, entries, precision=precision, padding=padding)


def say_read(asked: PredictArguments, file: str, columns: str) -> None:
    """Print which columns of the file are read."""
    text = escape_controls(f"{Path(file).name}: {columns}")
    print(console.paragraph(text, "  "), file=_for_people(asked), flush=True)


def _for_people(asked: PredictArguments) -> TextIO:
    """Return standard output, or standard error if the predictions go to standard output."""
    return sys.stderr if _own_descriptor(Path(asked.output)) == 1 else sys.stdout


def require_room_for_json(asked: PredictArguments) -> None:
    """Raise ConfigError if the predictions and the JSON object would both go to standard output."""
    if json_output.is_wanted() and _own_descriptor(Path(asked.output)) == 1:
        raise ConfigError(
            what="predictions on standard output leave no room for --json",
            got=f"--output {asked.output}",
            why="with --json the only line of standard output is one object about the command",
            fix="name a file in --output, or leave --json out",
        )


def write_lines(asked: PredictArguments, entries: Iterable[Mapping[str, Any]], *, precision: str, padding: str) -> None:
    """Write one JSON object a line, and print how many, where, and how the model ran: with or without padding.

    That is printed to standard error if the predictions go to standard output.
    """
    try:
        lines = [json.dumps(entry, ensure_ascii=False, allow_nan=False) for entry in entries]
    except ValueError as error:
        raise _not_finite() from error
    path = Path(asked.output)
    _write_named(path, with_plain_ends("".join(f"{line}\n" for line in lines)))
    count = f"{len(lines)} prediction{'' if len(lines) == 1 else 's'}"
    where = _for_people(asked)
    json_output.add(predictions=len(lines), precision=precision, padding=padding == "with")
    json_output.add_outputs(predictions=path)
    print(f"{count} in {escape_controls(str(path))} ({precision}, {padding} padding)", file=where)


def _not_finite() -> NonFiniteError:
    return NonFiniteError(
        what="the model's predictions are infinite or not numbers",
        why="nothing can be read from them, so none was written",
        fix="use an earlier checkpoint, or train again with a lower --learning_rate",
    )


def is_array(asked: PredictArguments) -> bool:
    """Return whether the file of the predictions is one of numpy, by its name."""
    return Path(asked.output).suffix.lower() == ".npy"


def write_array(asked: PredictArguments, vectors: Any) -> None:
    """Write vectors (rows, D) as a file of numpy, and print how many."""
    import io

    import numpy

    if not numpy.isfinite(vectors).all():
        raise _not_finite()
    target = io.BytesIO()
    numpy.save(target, vectors, allow_pickle=False)
    _write_named(Path(asked.output), target.getvalue())
    json_output.add(predictions=len(vectors), columns=int(vectors.shape[1]))
    json_output.add_outputs(predictions=asked.output)
    print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers in {escape_controls(asked.output)}")


def _write_named(path: Path, content: str | bytes) -> None:
    """Write the content to what the user named, or raise StorageError.

    A plain file, or the one that a link leads to, is replaced when its successor is complete. A device and a pipe are
    written to. So is an open file of this process, such as /dev/stdout: that keeps what a shell appends to with >>.
    """
    target, is_file = Path(os.path.realpath(path)), False
    try:
        descriptor = _own_descriptor(path)
        is_file = descriptor is None and (not path.exists() or path.is_file())
        if is_file:
            output_files.write_bytes(target, content.encode() if isinstance(content, str) else content)
            return
        sys.stdout.flush()
        with os.fdopen(
            os.open(path, os.O_WRONLY | system.BINARY) if descriptor is None else os.dup(descriptor), "wb"
        ) as stream:
            stream.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        ended = "let the program that reads it read to the end, or " if error.errno == errno.EPIPE else ""
        raise StorageError(
            what=f"{path} cannot be written",
            got=str(error),
            why="the predictions are complete once all of them are written; "
            + ("a file of this name is as it was" if is_file else "it may have received the first of them"),
            fix=disk_fix(error, target.parent, "--output") if is_file else f"{ended}name a file in --output",
        ) from error


def _own_descriptor(path: Path) -> int | None:
    """Return the number of the open file of this process that the path names, None if it names another file."""
    for _ in range(_MOST_LINKS):
        path = Path(os.path.realpath(path.parent)) / path.name
        if (found := system.own_descriptor(path)) is not None:
            return found
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None
