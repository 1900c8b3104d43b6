"""What is exported: a trained model, the rows that its graph is made and checked with, and where its examples are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from whet import tasks
from whet.config.arguments import TrainingArguments
from whet.config.rules.training import RECORD_NAME
from whet.config.settings import draft, options_of
from whet.data.columns import read_by
from whet.engine.collate import default_collator
from whet.errors import ConfigError, WhetError
from whet.export import check
from whet.export.arguments import ExportArguments
from whet.jobs.fields import JobFields
from whet.jobs.predict.trained import folder_of, read_reading
from whet.jobs.task import Task
from whet.models.loading.folder_check import file_of_run
from whet.models.loading.special_tokens import no_padding_token
from whet.models.loading.tokenizer_check import rust_errors
from whet.report import runs
from whet.watch import printing

Row = Mapping[str, Any]
Arrays = Mapping[str, Any]
_OF_DATA = (
    *("dataset_name", "dataset_config_name", "train_split_name", "validation_split_name", "cache_dir"),
    *("train_file", "validation_file"),
)
"""Settings of a run that say where its data is."""
_PATHS = ("train_file", "validation_file", "cache_dir")
"""Those of them that are paths."""
_OF_TRAINING = ("ignore_mismatched_sizes", "do_regression", "problem_type", "metric_name", "shuffle_train_dataset",
                "shuffle_seed", "label_all_tokens", "return_entity_level_metrics", "loss", "batch_sampler",
                "mini_batch_size", "mini_batch_num_tokens", "matryoshka_dims", "pooling_mode", "query_prompt",
                "document_prompt", "num_hard_negatives", "hard_negatives_model", "hard_negatives_margin",
                "num_negatives")  # fmt: skip
"""Settings of tasks that say nothing about how a trained model reads its input."""
_GIVEN = ("validation_file", "train_file", "text_column_names", "text_pair_column_names", "label_column_name",
          "max_seq_length", "doc_stride", "version_2_with_negative")  # fmt: skip
"""Options of the command that are settings of a task."""
_ALSO_NAMED = {
    "text_column_names": ("text_column_name", "anchor_column_name"),
    "text_pair_column_names": ("positive_column_name",),
    "label_column_name": ("score_column_name",),
}
"""What other tasks call them."""


class Subject(Protocol):
    """A trained model as the work on its export sees it: one with a head of transformers, or of sentence-transformers.

    The two differ in what is named here, and in nothing else.
    """

    @property
    def name(self) -> str:
        """That of its class, for people."""
        ...

    @property
    def folder(self) -> str:
        """The folder of all of its weights, or a name on the hub."""
        ...

    @property
    def module(self) -> nn.Module:
        """What a graph is made of: columns (B, T) to outputs by name. Has the `config` of transformers."""
        ...

    @property
    def rows(self) -> Rows:
        """What makes batches."""
        ...

    @property
    def checked(self) -> Sequence[Row]:
        """The rows that both are compared on, the longest among them."""
        ...

    @property
    def calibration(self) -> Sequence[Row] | None:
        """Texts of the training, for the ranges of activations; None if products find them themselves."""
        ...

    @property
    def compared(self) -> Sequence[str]:
        """The outputs that are compared."""
        ...

    @property
    def kind(self) -> check.Kind:
        """What these are."""
        ...

    @property
    def data(self) -> Data:
        """Where the examples are."""
        ...

    @property
    def notes(self) -> list[str]:
        """What is not measured, and why."""
        ...

    @property
    def about(self) -> Mapping[str, Any]:
        """What the manifest says so that the folder can be opened: the head, the task, the columns of the graph."""
        ...

    @property
    def script(self) -> str:
        """The file of `served/` that answers."""
        ...

    def metric(self, compute: Callable[[Arrays], Arrays], about: Mapping[str, Any]) -> check.Metric | None:
        """Return the task's metric of both, on the same examples; None without any."""
        ...

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write what the folder holds next to the graph; return what the script that serves it reads."""
        ...


@dataclass(frozen=True)
class Rows:
    """Makes the batches that a graph is traced, calibrated, compared and timed with."""

    tokenizer: Any
    names: Sequence[str]
    """The columns that the graph takes."""
    length: int
    """Tokens of the longest row."""

    def batch(self, rows: Sequence[Row], full: int | None = None) -> dict[str, Tensor]:
        """Return these rows (B, T), padded to the longest of them, or to `full` tokens."""
        kept = [{name: row[name] for name in self.names if name in row} for row in rows]
        if full is None:
            columns = default_collator(self.tokenizer)(kept)
        else:
            columns = self.tokenizer.pad(kept, padding="max_length", max_length=full, return_tensors="pt")
        return {name: columns[name] for name in self.names}

    def sample(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return a batch to trace with: of three rows, and of another number of tokens."""
        chosen = self.batch(sorted(rows, key=lambda row: len(row["input_ids"]))[-3:])
        return chosen if chosen["input_ids"].shape[1] > len(chosen["input_ids"]) else self.batch(rows[:3], full=8)

    def batches(self, rows: Sequence[Row], n: int, size: int) -> list[dict[str, Tensor]]:
        """Return n rows in batches of `size`, some rows again if there are fewer."""
        again = [rows[place % len(rows)] for place in range(n)]
        parts = [again[begin : begin + size] for begin in range(0, n - size + 1, size)] or [again]
        return [self.batch(part) for part in parts]

    def made_up_texts(self, n_known: int, n: int) -> list[str]:
        """Return texts of random tokens below `n_known`, from a single one to the longest row."""
        seed = torch.Generator().manual_seed(0)
        n_known = min(len(self.tokenizer), n_known)
        lengths = torch.linspace(1, self.length, n).int().tolist()
        drawn = [torch.randint(n_known, (length,), generator=seed) for length in lengths]
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]


def inputs_of(model: Any, tokenizer: Any) -> list[str]:
    """Return the columns that the tokenizer makes and the model reads."""
    read = read_by(model) or frozenset()
    wanted = ("input_ids", "attention_mask", "token_type_ids")
    return [name for name in wanted if name in read and name in {"attention_mask", *tokenizer.model_input_names}]


def require_padding(tokenizer: Any, model: str) -> None:
    """Refuse a tokenizer that cannot pad: an exported graph reads padded batches."""
    if tokenizer.pad_token is None:
        raise no_padding_token(model)


def padding_of(tokenizer: Any) -> dict[str, Any]:
    """Return how the tokenizer pads, as arguments of `tokenizers.Tokenizer.enable_padding`."""
    return {
        "direction": tokenizer.padding_side, "pad_id": tokenizer.pad_token_id or 0,
        "pad_type_id": tokenizer.pad_token_type_id, "pad_token": tokenizer.pad_token or "",
    }  # fmt: skip


def require_same_rows(
    read: Iterable[tuple[tuple[Any, ...], Sequence[Row]]], folder: Path, serving: Mapping[str, Any], by: str
) -> None:
    """Raise ConfigError if the script in the folder would make other rows of texts than these.

    `read` has a text, or a text and its pair, each with its rows as `by` has made them; `serving` is what the script
    reads, whose function `windows_of` does the same.
    """
    tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.no_padding()
    for given, rows in read:
        shown = f"{given[0]!r:.60}"
        tokens.enable_truncation(**serving["pair_truncation" if given[1:] not in ((), (None,)) else "truncation"])
        with rust_errors(shown):
            first = tokens.encode(*given, is_pretokenized=not isinstance(given[0], str))
        windows = [first, *first.overflowing] if serving["windows"] else [first]
        found = [(one.ids, one.type_ids) for one in windows]
        wanted = [[*row["input_ids"]] for row in rows]
        types = [[*row["token_type_ids"]] for row in rows if "token_type_ids" in row]
        if [ids for ids, _ in found] != wanted or (types and [of for _, of in found] != types):
            raise ConfigError(
                what="the script of the export would read texts otherwise than the model",
                got=f"{shown}: {[*map(len, (ids for ids, _ in found))]} tokens, the model's are {[*map(len, wanted)]}",
                why=f"{by} does more to them here than the tokenizer's own file says",
                fix=f"serve the folder of the model with {by}",
            )


# ---- the data ----


@dataclass
class Data:
    """Where the examples are that an export is checked and calibrated with, and how the model reads them."""

    settings: Any
    """An instance of the task's settings, of which some may break a rule: without data they are not run."""
    values: Mapping[str, Any]
    validation: str | None
    train: str | None
    notes: list[str]
    """What is not measured, and why."""
    why_no_texts: str

    @classmethod
    def of(cls, asked: ExportArguments, task: Task, positions: int | None) -> Data:
        """Return the data that is named, or else that of the training as its record has it.

        `positions` are those of the model.
        """
        kind = tasks.command(task.name).parts[0]
        known = {one.name for one in fields(kind)}
        own = known - {one.name for one in fields(JobFields)} - {*_OF_TRAINING}
        recorded = _recorded(asked.model)
        reading = {name: value for name, value in read_reading(folder_of(asked.model)).items() if value is not None}
        values = {name: found[name] for found in (recorded, reading) for name in (*own, *_OF_DATA) if name in found}
        values = {name: value for name, value in values.items() if value is not None} | _given(asked, known)
        notes: list[str] = []
        why = f"{asked.model} records no train_file"
        from_files = asked.validation_file is not None or asked.train_file is not None
        if values.get("dataset_name") and from_files:
            values = {name: value for name, value in values.items() if name not in _OF_DATA[:4]}
        for name in ("validation_file", "train_file"):
            path = values.get(name)
            if path is not None and getattr(asked, name) is None and not Path(path).is_file():
                why = f"{name} {Path(path).name} of the training is not there any more"
                notes += [why] if name == "validation_file" or "validation_split_percentage" in values else []
                del values[name]
        data = values.get("dataset_name")
        train, validation = values.pop("train_file", None), values.get("validation_file")
        if validation is not None or from_files or train is None:
            values.pop("validation_split_percentage", None)
        elif "validation_split_percentage" in values:
            validation = values["train_file"] = train  # of which the training has left this part out
        if validation is None and data is None:
            notes.append("no metric was compared: --validation_file names examples with answers")
        usual = options_of(kind)["max_seq_length"].default
        if usual is not None and positions is not None:
            values.setdefault("max_seq_length", min(usual, positions))
        settings = draft(kind, {**values, "model_name_or_path": asked.model})
        return cls(settings, values, validation or data, train or data, notes, why)

    def examples(
        self, asked: ExportArguments, task: Task, folder: str, splits: Mapping[str, Mapping[str, Any]], output: Path
    ) -> tuple[Any, TrainingArguments, dict[str, Any]] | None:
        """Return the settings, and the examples of these splits, each with the settings that it needs.

        None if there are no splits, or if the data set of the training cannot be read: a note says so then.
        """
        more: dict[str, Any] = {"skip_bad": asked.skip_bad, "max_eval_samples": asked.max_eval_samples}
        for values in splits.values():
            more |= values
        args = TrainingArguments(
            output_dir=str(output), do_eval=True, use_cpu=True, precision="fp32", report_to=("none",),
            per_device_eval_batch_size=asked.per_device_eval_batch_size, disable_tqdm=True, log_level="warning",
        )  # fmt: skip
        printing.configure(args)  # before the readers say what they found
        if not splits:
            return None
        kind = type(self.settings)
        try:
            job = kind(**{**self.values, **more, "model_name_or_path": folder})
            return job, args, {split: task.examples(job, split) for split in splits}
        except WhetError as error:
            if "dataset_name" not in self.values:
                raise
            self.notes.append(f"the data set of the training cannot be read: {error.problems[0].what}")
            return None

    def no_texts(self, asked: ExportArguments) -> ConfigError:
        """Return the error for int8 that has no texts to be calibrated on."""
        return ConfigError(
            what="there are no texts to calibrate int8 on",
            got=self.why_no_texts,
            why="the ranges of activations are measured on texts like those that the model will read",
            fix="name a file in --train_file" + (", or use --int8_activations dynamic" * (asked.to == "onnx")),
        )


def _recorded(folder: str) -> dict[str, Any]:
    """Return the settings of the run that wrote the folder, or this checkpoint; nothing if it has left no record.

    Paths are relative to where the run was started, and not to where this command is; older records do not say that.
    """
    record = file_of_run(Path(folder), RECORD_NAME)
    of_run = folder if record is None else str(record.parent)
    with suppress(WhetError):
        run = runs.read(of_run)
        found = {name: entry.get("value") for name, entry in run.settings.items()}
        if isinstance(start := run.begin.get("working_dir"), str):
            for name in (*_PATHS, "dataset_name"):
                path = Path(start, value) if isinstance(value := found.get(name), str) else None
                if path is not None and (name in _PATHS or path.exists()):  # a data set may be a folder
                    found[name] = str(path)
        return found
    return {}


def _given(asked: ExportArguments, known: set[str]) -> dict[str, Any]:
    """Return the settings of the task that the command line gives; ConfigError for one that the task has not."""
    usual = draft(ExportArguments, {})
    given = {name: value for name in _GIVEN if (value := getattr(asked, name)) != getattr(usual, name)}
    for name, others in _ALSO_NAMED.items():
        other = next((one for one in others if one in known), None)
        if name in given and name not in known and other is not None:
            given[other] = given.pop(name)
    odd = [name for name in given if name not in known]
    if odd:
        raise ConfigError(
            what=f"{' and '.join(odd)} would change nothing here",
            got={name: given[name] for name in odd},
            why="models of this task do not read it",
            fix=f"leave {' and '.join(f'--{name}' for name in odd)} out",
        )
    return given
