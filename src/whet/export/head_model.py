"""A model with a head of transformers, as what is exported: questions, labels and tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from whet import tasks
from whet.engine.engine import Engine
from whet.errors import ConfigError, WhetError
from whet.export import check
from whet.export.arguments import ExportArguments, needs_texts
from whet.export.subject import Arrays, Data, Row, Rows, inputs_of, padding_of, require_padding, require_same_rows
from whet.jobs.lora.merge import write_merged
from whet.jobs.predict.trained import NAME
from whet.jobs.task import Task
from whet.jobs.task_run import Part, TaskRun
from whet.jobs.tokenising import rows as text_rows
from whet.jobs.tokenising import words as word_rows
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import row_length
from whet.models.loading import exported, heads
from whet.models.loading.adapter import is_adapter
from whet.models.loading.load import ModelSource, load_config, load_model, load_tokenizer, positions_of
from whet.models.loading.special_tokens import set_padding
from whet.store.weights import save_processing
from whet.tasks.qa.decode import DecodeOptions
from whet.tasks.qa.types import Answers, Questions
from whet.tasks.qa.windows import WindowOptions, make_windows
from whet.watch import files as output_files
from whet.watch import progress

_SCRIPTS = {
    heads.QUESTION_ANSWERING.auto: "question_answering.py.txt",
    heads.SEQUENCE_CLASSIFICATION.auto: "classification.py.txt",
    heads.TOKEN_CLASSIFICATION.auto: "tags.py.txt",
}
_OUTPUTS = {heads.QUESTION_ANSWERING.auto: ("start_logits", "end_logits")}


@dataclass
class HeadModel:
    """A `Subject` whose head transformers knows, and the run of its task over the data that is at hand."""

    task: Task
    folder: str
    module: Any
    tokenizer: Any
    rows: Rows
    checked: Sequence[Row]
    calibration: Sequence[Row] | None
    data: Data
    judged: TaskRun | None
    """Its `validation` has the examples that are judged."""
    _of_torch: Mapping[str, float] | None = None
    """The metrics of torch, once they are computed."""

    @classmethod
    def prepared(cls, asked: ExportArguments, task: Task, work: Path) -> HeadModel:
        """Load the model, and the data that it is checked with; an adapter is merged into a folder in `work`."""
        folder = _merged(asked, work)
        source = ModelSource(model=folder, flag="--model")
        tokenizer = load_tokenizer(source)
        require_padding(tokenizer, asked.model)
        data = Data.of(asked, task, positions_of(load_config(source)))
        judged = _judged(asked, task, data, folder, work / "judged")
        calibration = _calibration(asked, data, judged)
        model = load_model(source, task.head, trained=True).eval()
        set_padding(model, tokenizer, task.head)
        names = inputs_of(model, tokenizer)
        rows = Rows(tokenizer, names, row_length(data.settings.max_seq_length, tokenizer, model))
        checked = _chosen(judged, check.N_ROWS)
        if checked is None:
            data.notes.append("made-up texts were compared, as none of the training are at hand")
            texts = rows.made_up_texts(model.get_input_embeddings().weight.shape[0], check.N_ROWS)
            short = max(1, rows.length // 8)  # characters of a question, which is never cut
            given = [(text[:short], text) if task.head is heads.QUESTION_ANSWERING else (text,) for text in texts]
            cut = "only_second" if task.head is heads.QUESTION_ANSWERING else True
            checked = [dict(tokenizer(*one, truncation=cut, max_length=rows.length)) for one in given]
        return cls(task, folder, model, tokenizer, rows, checked, calibration, data, judged)

    @property
    def name(self) -> str:
        """The class of transformers."""
        return type(self.module).__name__

    @property
    def config(self) -> Any:
        """The configuration of transformers."""
        return self.module.config

    @property
    def compared(self) -> Sequence[str]:
        """Logits."""
        return _OUTPUTS.get(self.task.head.auto, ("logits",))

    @property
    def kind(self) -> check.Kind:
        """Answers and tags have logits for each token."""
        return "rows" if self.task.head is heads.SEQUENCE_CLASSIFICATION else "tokens"

    @property
    def notes(self) -> list[str]:
        """What is not measured, and why."""
        return self.data.notes

    @property
    def about(self) -> Mapping[str, Any]:
        """Head, task and columns."""
        return {"head": self.task.head.auto, "inputs": [*self.rows.names], "task": self.task.name}

    @property
    def script(self) -> str:
        """That of the head."""
        return _SCRIPTS[self.task.head.auto]

    def metric(self, compute: Callable[[Arrays], Arrays], about: Mapping[str, Any]) -> check.Metric | None:
        """Return the metric of both on the validation examples; None if there are none."""
        if self.judged is None or "validation" not in self.judged.parts:
            return None
        part = self.judged.parts["validation"]
        if self._of_torch is None:
            self._of_torch = _metrics(part, self.judged.engine)
        opened = exported.ExportedModel(self.config, about, compute)
        values = self._of_torch, _metrics(part, Engine(_spec_of(self.judged.engine, opened)))
        name, more_is_better = self.task.best_by(values[0], self.judged.args)
        points = 1 if self.task.head is heads.QUESTION_ANSWERING else 100  # whose metrics are in percent already
        drop = points * (values[0][name] - values[1][name]) * (1 if more_is_better else -1)
        of = (name.removeprefix("eval_"), part.n_samples, Path(self.data.validation or "").name)
        return check.Metric(*of, values[0][name], values[1][name], drop)

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write the tokenizer and how `whet predict` reads texts; return what the script reads.

        Raises ConfigError if the rows of the script would not be those of `whet predict`.
        """
        save_processing(self.tokenizer, folder)
        if self.task.head is heads.TOKEN_CLASSIFICATION:
            file = folder / "tokenizer.json"
            output_files.write_text(file, word_rows.with_spaces(self.tokenizer.backend_tokenizer).to_str(pretty=True))
        reading = _reading(self.task.name, self.data.settings, self.rows.length)
        output_files.write_json(folder / NAME, reading, indent=2, on_error="stop")
        serving = _serving(self.task.head.auto, reading, self.tokenizer, self.config) | {"outputs": [*self.compared]}
        texts = self.rows.made_up_texts(self.module.get_input_embeddings().weight.shape[0], check.N_ROWS)
        texts += [" ".join(texts), " ".join(self.tokenizer.all_special_tokens)]
        read = _read_by_whet(self.task.head.auto, reading, self.tokenizer, texts, folder.parent / "rows")
        require_same_rows(read, folder, serving, by="whet predict")
        return serving


def _merged(asked: ExportArguments, work: Path) -> str:
    """Return the folder of the complete model: that of an adapter is made in `work`."""
    if is_adapter(asked.model):
        folder, known = work / "merged", [one.head for one in tasks.tasks()]
        write_merged(Path(asked.model), folder, asked.base_model_name_or_path, known)
        return str(folder)
    if asked.base_model_name_or_path is not None:
        raise ConfigError(
            what="base_model_name_or_path would change nothing",
            got=asked.base_model_name_or_path,
            why=f"{asked.model} is no adapter: it holds all of its weights",
            fix="leave --base_model_name_or_path out",
        )
    return asked.model


def _judged(asked: ExportArguments, task: Task, data: Data, folder: str, output: Path) -> TaskRun | None:
    """Return the run of the task over the data, whose engine has the model; None without any data.

    Its `validation` has the examples that are judged, its `test` texts of the training.
    """
    splits: dict[str, Mapping[str, Any]] = {"validation": {}} if data.validation else {}
    if data.train is not None and (needs_texts(asked) or data.validation is None):
        of_hub = "dataset_name" in data.values
        where = (
            {"test_split_name": data.values.get("train_split_name", "train")} if of_hub else {"test_file": data.train}
        )
        splits["test"] = where | {"max_predict_samples": asked.calibration_samples}
    found = data.examples(asked, task, folder, splits, output)
    if found is None:
        return None
    output.mkdir()
    return task.prepare(*found)


def _calibration(asked: ExportArguments, data: Data, judged: TaskRun | None) -> Sequence[Row] | None:
    """Return the texts that ranges of activations are measured on; None if products find them themselves."""
    if not needs_texts(asked):
        return None
    if judged is None or "test" not in judged.parts:
        raise data.no_texts(asked)
    rows = judged.parts["test"].rows
    return [rows[n] for n in range(len(rows))]


def _chosen(judged: TaskRun | None, n: int) -> list[Row] | None:
    """Return so many rows of the data, the longest among them; None without any."""
    part = None if judged is None else judged.parts.get("validation") or judged.parts.get("test")
    if part is None or not len(part.rows):
        return None
    return [part.rows[place] for place in check.spread(len(part.rows), n, int(part.rows.lengths.argmax()))]


def _metrics(part: Part, engine: Engine) -> dict[str, float]:
    """Return the metrics of the model in the engine; the lines at the end show them, and none before."""
    shown = engine.events.callbacks
    engine.events.callbacks = [one for one in shown if not isinstance(one, progress.SHOWS)]
    return dict(part.judge.judge(engine, "eval").metrics)


def _spec_of(engine: Engine, model: Any) -> Any:
    """Return what an engine of the exported model is given: all but the model as for the one that was judged."""
    given = {one.name: getattr(engine.spec, one.name) for one in fields(engine.spec)}
    return type(engine.spec)(**(given | {"model": model, "objective": None}))


def _reading(task: str, settings: Any, length: int) -> dict[str, Any]:
    """Return how the model reads its input, for `whet predict` of the export."""
    names = ("text_column_names", "text_pair_column_names", "text_column_delimiter", "text_column_name", "doc_stride",
             "window_pooling", "threshold", *DecodeOptions.__dataclass_fields__)  # fmt: skip
    return {"task": task, "max_seq_length": length} | {
        name: getattr(settings, name) for name in names if hasattr(settings, name)
    }


def _serving(head: str, reading: Mapping[str, Any], tokenizer: Any, config: Any) -> dict[str, Any]:
    """Return what the script reads: arguments of the tokenizer, and how logits become answers."""
    length, stride = reading["max_seq_length"], reading.get("doc_stride")
    from_left = tokenizer.padding_side == "left"  # whet qa then puts the context first
    options = text_rows.RowOptions(max_seq_length=length, doc_stride=stride)
    cut, cut_pair = (text_rows.truncation(options, tokenizer, pairs=pairs) for pairs in (False, True))
    if head == heads.QUESTION_ANSWERING.auto:
        cut_pair |= {"strategy": "only_first" if from_left else "only_second"}
    elif head == heads.TOKEN_CLASSIFICATION.auto:
        cut = word_rows.truncation(tokenizer, length, stride)
    decode = {name: reading.get(name, usual) for name, usual in asdict(DecodeOptions()).items()}
    return {
        "padding": padding_of(tokenizer),
        "truncation": cut,
        "pair_truncation": cut_pair,
        "context_first": from_left,
        "windows": stride is not None,
        "pooling": reading.get("window_pooling", "mean"),
        "threshold": reading.get("threshold", 0.5),
        "no_answer": decode.pop("version_2_with_negative"),
        **decode,
        "labels": [str(config.id2label[n]) for n in range(config.num_labels)],
        "kind": config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification"),
    }  # fmt: skip


def _read_by_whet(
    head: str, reading: Mapping[str, Any], tokenizer: Any, texts: Sequence[str], cache: Path
) -> Iterator[tuple[tuple[Any, ...], list[Row]]]:
    """Yield these texts, alone or after a short one, with the rows that `whet predict` makes of each.

    Lengths that it refuses have no rows.
    """
    length, stride, first = reading["max_seq_length"], reading.get("doc_stride"), ["a"] * len(texts)
    given: list[tuple[Any, ...]] = [*zip(first, texts, strict=True)]
    if head == heads.TOKEN_CLASSIFICATION.auto:
        sentences = [words for text in texts if (words := text.split())]
        found = word_rows.WordRowMaker(tokenizer, length, Cache(rows="rows", folder=cache), stride).rows(sentences)
        yield from _of_texts([(words,) for words in sentences], found.rows, found.text_of)
    elif head == heads.QUESTION_ANSWERING.auto:
        asked = Questions(first, first, [Answers()] * len(texts), np.arange(len(texts)), texts)
        with suppress(WhetError):
            options = WindowOptions(max_seq_length=length, doc_stride=reading["doc_stride"], with_labels=False)
            windows = make_windows(asked, tokenizer, options)
            from_left = tokenizer.padding_side == "left"
            given = [pair[::-1] for pair in given] if from_left else given
            yield from _of_texts(given, windows.rows, windows.question_of)
    else:
        options = text_rows.RowOptions(max_seq_length=length, doc_stride=stride)
        alone = text_rows.make_rows(texts, None, tokenizer, options)
        yield from _of_texts([(text,) for text in texts], alone.rows, alone.text_of)
        with suppress(WhetError):
            pairs = text_rows.make_rows(first, texts, tokenizer, options)
            yield from _of_texts(given, pairs.rows, pairs.text_of)


def _of_texts(given: Sequence[tuple[Any, ...]], rows: Any, text_of: np.ndarray) -> Iterator[tuple[Any, list[Row]]]:
    """Yield each text with its rows."""
    for n, one in enumerate(given):
        yield one, [rows[place] for place in np.flatnonzero(text_of == n).tolist()]
