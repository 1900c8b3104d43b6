"""`whet export`: the rows that an export is made and checked with, the order of the work, and what the folder holds.

The folder appears complete or not at all: everything is written next to it, and renamed at the end. It holds the graph,
the tokenizer, `export.json` with all that was measured, a model card, and a script that serves the graph without whet.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet import console, log, tasks
from whet.config.arguments import TrainingArguments
from whet.config.settings import draft, options_of
from whet.data.columns import read_by
from whet.data.store import RowStore
from whet.engine.collate import default_collator
from whet.engine.engine import Engine
from whet.errors import ConfigError, WhetError, escape_controls
from whet.export import check, graph
from whet.export.arguments import ExportArguments
from whet.hardware import cpu
from whet.jobs.fields import JobFields
from whet.jobs.lora.merge import write_merged
from whet.jobs.predict.trained import NAME, read_reading
from whet.jobs.task import Task
from whet.jobs.task_run import TaskRun
from whet.jobs.tokenising.words import with_spaces
from whet.models.loading import exported, heads
from whet.models.loading.adapter import is_adapter, trained_head
from whet.models.loading.load import ModelSource, load_config, load_model, load_tokenizer, positions_of
from whet.report import runs
from whet.store.manifest import fsync
from whet.store.weights import save_processing
from whet.tasks.tag.job import row_length
from whet.version import __version__
from whet.watch import files as output_files
from whet.watch import lock, printing, progress

_TITLES = {"onnx": "ONNX", "openvino": "OpenVINO"}
_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
_OF_DATA = (
    *("dataset_name", "dataset_config_name", "train_split_name", "validation_split_name", "cache_dir"),
    *("train_file", "validation_file"),
)
"""Settings of a run that say where its data is."""
_OF_TRAINING = ("ignore_mismatched_sizes", "do_regression", "problem_type", "metric_name", "shuffle_train_dataset",
                "shuffle_seed", "label_all_tokens", "return_entity_level_metrics")  # fmt: skip
"""Settings of tasks that say nothing about how a trained model reads its input."""
_SPEED_ROWS = 64
_BY_TOKEN = (heads.QUESTION_ANSWERING, heads.TOKEN_CLASSIFICATION)
_SERVED = {
    heads.QUESTION_ANSWERING.auto: "question_answering.py.txt",
    heads.SEQUENCE_CLASSIFICATION.auto: "classification.py.txt",
    heads.TOKEN_CLASSIFICATION.auto: "tags.py.txt",
}


def run_export(asked: ExportArguments) -> int:
    """Run the command; return its exit code."""
    log.set_up(logging.WARNING)
    began_s = time.perf_counter()
    if exported.about_folder(asked.model) is not None:
        raise ConfigError(
            what="the model is an export already",
            got=asked.model,
            why="a graph is made from the weights that a training wrote",
            fix="name the folder that it was exported from",
        )
    task = _task_of(asked)
    graph.require_packages(asked.to, int8=asked.int8)
    output = _output_of(asked)
    with _published(output) as work:
        lines = _export(asked, task, work, output)
    print("\n".join([*lines, f"{'time':<11}{console.duration(time.perf_counter() - began_s)}"]))
    return 0


def _task_of(asked: ExportArguments) -> Task:
    """Return the task that the model was trained for; ConfigError if whet exports no such model to this format."""
    model = asked.model
    head, named = trained_head(model, [task.head for task in tasks.tasks()])
    found = next((task for task in tasks.tasks() if task.head is head), None)
    if found is not None and found.head.auto in exported.HEADS and asked.to != "gguf":
        return found
    if head is heads.CAUSAL_LM and asked.to == "gguf":
        merged = "the folder of whet merge" if is_adapter(model) else model
        raise ConfigError(
            what="whet does not write gguf itself",
            got=f"--to gguf for {model}",
            why="the converter that knows each family's names and tokenizers is a script of llama.cpp, in no package",
            fix=f"get {_LLAMA_CPP}, and run its convert_hf_to_gguf.py on {merged}",
        )
    if found is not None and asked.to == "gguf":
        raise ConfigError(
            what="gguf holds language models",
            got=f"{model}: {named}",
            why=f"llama.cpp has no head for {found.head.task}",
            fix=f"whet export {model} --to onnx, or --to openvino",
        )
    if head is heads.CAUSAL_LM:
        raise ConfigError(
            what="language models are not exported to this format",
            got=f"{model}: {named}",
            why="they write token by token with a cache, and one graph of all tokens would be slower than torch",
            fix=f"whet export {model} --to gguf names the way to llama.cpp; OnnxExporter().export_for_generation of "
            "transformers.exporters makes a graph for each stage",
        )
    raise ConfigError(
        what="the model has no head that whet exports",
        got=f"{model}: {named}",
        why="the architecture says which outputs are compared, and how the export is served",
        fix=f"name a model for {', '.join(one.task for one in heads.OF_ENCODERS)}",
    )


def _output_of(asked: ExportArguments) -> Path:
    """Return the folder of the export; ConfigError if something else than an export is there."""
    suffix = f"-{asked.to}" + ("-int8" if asked.int8 else "")
    model = Path(asked.model)
    beside = model if model.is_dir() else Path(model.name)  # a name on the hub
    beside = beside if beside.name not in ("", "..") else beside.resolve()
    output = Path(asked.output_dir) if asked.output_dir else beside.with_name(beside.name + suffix)
    own = output.is_dir() and (not any(output.iterdir()) or exported.about_folder(str(output)) is not None)
    if output.is_symlink() or (output.exists() and not own):
        raise ConfigError(
            what="the folder of the export holds something else",
            got=str(output),
            why="the export would replace it; only an empty folder or an earlier export is replaced",
            fix="name a new folder in --output_dir",
        )
    return output


@contextmanager
def _published(output: Path) -> Iterator[Path]:
    """Yield a hidden folder next to the output; what is in its folder `export` at the end becomes the output.

    Of two exports to one folder at a time the second is refused. What a killed one has left is removed or put back.
    """
    work, replaced = (output.with_name(f".{output.name}.{word}") for word in ("partial", "replaced"))
    lock.refuse_taken(work)
    with output_files.stored(f"the export cannot be written to {output}", output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        if replaced.is_dir() and not output.exists():
            replaced.rename(output)
        for left in (work, replaced):
            shutil.rmtree(left, ignore_errors=True)
        (work / "export").mkdir(parents=True)
    try:
        with lock.locked(work):
            yield work
            with output_files.stored(f"the export cannot be written to {output}", output.parent):
                for path in (work / "export").iterdir():
                    fsync(path)
                if output.exists():
                    output.rename(replaced)
                (work / "export").rename(output)
                fsync(output.parent.resolve())
    finally:
        for left in (work, replaced):
            shutil.rmtree(left, ignore_errors=True)


# ---- the work ----


def _export(asked: ExportArguments, task: Task, work: Path, output: Path) -> list[str]:
    """Fill the folder `export` of `work`; return the lines that say what was measured."""
    folder = asked.model
    if is_adapter(asked.model):
        folder = str(work / "merged")
        write_merged(
            Path(asked.model), Path(folder), asked.base_model_name_or_path, [one.head for one in tasks.tasks()]
        )
    elif asked.base_model_name_or_path is not None:
        raise ConfigError(
            what="base_model_name_or_path would change nothing",
            got=asked.base_model_name_or_path,
            why=f"{asked.model} is no adapter: it holds all of its weights",
            fix="leave --base_model_name_or_path out",
        )
    source = ModelSource(model=folder, flag="--model")
    tokenizer = load_tokenizer(source)
    _require_padding(tokenizer, asked.model)
    data = Data.of(asked, task, folder)
    judged = data.prepared(asked, task, folder, work / "judged")
    calibration = _calibration(asked, data, judged)
    model = load_model(source, task.head, trained=True).eval()
    length = row_length(data.settings.max_seq_length, tokenizer, model)
    names = _inputs(model, tokenizer)
    rows = Rows(tokenizer, names, length)
    checked = rows.chosen(judged, task.head, check.N_ROWS)
    if checked is None:
        data.notes.append("made-up texts were compared, as none of the training are at hand")
        checked = rows.made_up(model, task.head, check.N_ROWS)
    timed = [rows.batch(part) for part in _parts(rows.again(checked, _SPEED_ROWS), asked.per_device_eval_batch_size)]
    plain = partial(_outputs, model)
    torch_s = check.rows_per_s(timed, plain)

    made = graph.traced(model, rows.sample(checked), asked.to)
    folder_of_graph = work / "export"
    _save(made, folder_of_graph, output)
    about = {"format": asked.to, "precision": "fp32", "head": task.head.auto, "inputs": names, "task": task.name}
    facts: dict[str, Any] = {}
    opened = _opened(model, about, folder_of_graph)
    compared = partial(check.compared, checked, rows.batch, length, plain, by_token=task.head in _BY_TOKEN)
    logits = compared(partial(_outputs, opened))
    logits.require_close(asked.max_difference)
    facts["logits_fp32"] = asdict(logits) | {"allowed": asked.max_difference}
    if asked.int8:
        about["precision"] = "int8"
        facts["int8"] = _int8_facts(calibration, data)
        batches = None if calibration is None else [rows.batch([calibration[n]]) for n in range(len(calibration))]
        made = graph.quantised(made, asked.to, rows.sample(checked), batches)
        _save(made, folder_of_graph, output)
        opened = _opened(model, about, folder_of_graph)
        facts["logits_int8"] = asdict(compared(partial(_outputs, opened)))
    facts["speed"] = check.speed(timed, torch_s, partial(_outputs, opened))
    metric = _metric(task, judged, opened, data, work / "judged")
    if metric is not None and asked.int8:
        other = "dynamic" if asked.int8_activations == "static" else "static"
        hint = f"try --int8_activations {other}" if asked.to == "onnx" else "export more --calibration_samples"
        metric.require_kept(asked.max_metric_drop, hint)
    facts["metric"] = metric
    facts["bytes"] = {"weights": _n_bytes(folder, "*.safetensors"), "export": _graph_bytes(folder_of_graph)}
    facts["notes"] = data.notes
    _write(work / "export", about, facts, data, tokenizer, model, length, asked)
    return _lines(type(model).__name__, about, facts, output)


def _save(made: Any, folder: Path, output: Path) -> None:
    with output_files.stored(f"the export cannot be written to {output}", output.parent):
        graph.save(made, folder)


def _opened(model: Any, about: Mapping[str, Any], folder: Path) -> exported.ExportedModel:
    return exported.ExportedModel(model.config, dict(about), exported.runtime(folder, about["format"]))


def _outputs(model: Any, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    with torch.inference_mode():
        found = model(**columns)
    return {name: value for name, value in found.items() if name.endswith("logits")}


def _calibration(asked: ExportArguments, data: Data, judged: TaskRun | None) -> RowStore | None:
    """Return the texts that ranges of activations are measured on; None if products find them themselves."""
    if not _needs_texts(asked):
        return None
    if judged is not None and "test" in judged.parts:
        return judged.parts["test"].rows
    raise ConfigError(
        what="there are no texts to calibrate int8 on",
        got=data.why_no_texts,
        why="the ranges of activations are measured on texts like those that the model will read",
        fix="name a file in --train_file" + (", or use --int8_activations dynamic" * (asked.to == "onnx")),
    )


def _needs_texts(asked: ExportArguments) -> bool:
    return asked.int8 and (asked.int8_activations == "static" or asked.to == "openvino")


def _int8_facts(texts: RowStore | None, data: Data) -> dict[str, Any]:
    """Return how the int8 form is made, for export.json."""
    has_vnni = bool({"avx512_vnni", "avx_vnni", "asimddp"} & cpu.features())
    if not has_vnni:
        data.notes.append("this processor has no VNNI: int8 products are not fast here, and may overflow")
    facts: dict[str, Any] = {"activations": "dynamic" if texts is None else "static", "vnni": has_vnni}
    if texts is not None:
        facts |= {"calibration_rows": len(texts), "calibration_file": Path(data.train or "").name}
    return facts


def _require_padding(tokenizer: Any, model: str) -> None:
    """Refuse a tokenizer that cannot pad: an exported graph reads padded batches."""
    if tokenizer.pad_token is None:
        raise ConfigError(
            what="the tokenizer has no padding token",
            got=model,
            why="rows of several lengths are one batch of the graph once they are padded",
            fix="set pad_token in tokenizer_config.json, and pad_token_id in config.json",
        )


def _metric(task: Task, judged: TaskRun | None, opened: Any, data: Data, folder: Path) -> check.Metric | None:
    """Return the metric of both on the validation examples; None if there are none."""
    if judged is None or "validation" not in judged.parts:
        return None
    part = judged.parts["validation"]
    engines = (judged.engine, Engine(_spec_of(judged.engine, opened)))
    for engine in engines:
        shown = engine.events.callbacks  # the lines at the end show the metrics
        engine.events.callbacks = [one for one in shown if not isinstance(one, progress.SHOWS)]
    values = [dict(part.judge.judge(engine, "eval").metrics) for engine in engines]
    name, more_is_better = task.best_by(values[0], judged.args)
    points = 1 if task.head is heads.QUESTION_ANSWERING else 100  # whose metrics are in percent already
    drop = points * (values[0][name] - values[1][name]) * (1 if more_is_better else -1)
    of = (name.removeprefix("eval_"), part.n_samples, Path(data.validation or "").name)
    return check.Metric(*of, values[0][name], values[1][name], drop)


def _spec_of(engine: Engine, model: Any) -> Any:
    """Return what an engine of the exported model is given: all but the model as for the one that was judged."""
    given = {one.name: getattr(engine.spec, one.name) for one in fields(engine.spec)}
    return type(engine.spec)(**(given | {"model": model, "objective": None}))


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
    def of(cls, asked: ExportArguments, task: Task, folder: str) -> Data:
        """Return the data that is named, or else that of the training as its record has it."""
        kind = tasks.command(task.name).parts[0]
        known = {one.name for one in fields(kind)}
        own = known - {one.name for one in fields(JobFields)} - {*_OF_TRAINING}
        recorded = _recorded(asked.model)
        reading = {name: value for name, value in read_reading(Path(asked.model)).items() if value is not None}
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
                notes += [why] if name == "validation_file" else []
                del values[name]
        data = values.get("dataset_name")
        train, validation = values.pop("train_file", None), values.get("validation_file")
        if validation is None and data is None:
            notes.append("no metric was compared: --validation_file names examples with answers")
        usual = options_of(kind)["max_seq_length"].default
        positions = positions_of(load_config(ModelSource(model=folder, flag="--model")))
        if usual is not None and positions is not None:
            values.setdefault("max_seq_length", min(usual, positions))
        settings = draft(kind, {**values, "model_name_or_path": folder})
        return cls(settings, values, validation or data, train or data, notes, why)

    def prepared(self, asked: ExportArguments, task: Task, folder: str, output: Path) -> TaskRun | None:
        """Return the run of the task over this data, whose engine has the model; None without any data.

        Its `validation` has the examples that are judged, its `test` texts of the training.
        """
        wants_texts = self.train is not None and (_needs_texts(asked) or self.validation is None)
        splits = [*(["validation"] if self.validation else []), *(["test"] if wants_texts else [])]
        if not splits:
            return None
        more: dict[str, Any] = {"max_predict_samples": asked.calibration_samples, "skip_bad": asked.skip_bad}
        more["max_eval_samples"] = asked.max_eval_samples
        if wants_texts and "dataset_name" in self.values:
            more["test_split_name"] = self.values.get("train_split_name", "train")
        elif wants_texts:
            more["test_file"] = self.train
        kind = type(self.settings)
        args = TrainingArguments(
            output_dir=str(output), do_eval=True, use_cpu=True, precision="fp32", report_to=("none",),
            per_device_eval_batch_size=asked.per_device_eval_batch_size, disable_tqdm=True, log_level="warning",
        )  # fmt: skip
        printing.configure(args)  # before the readers say what they found
        try:
            job = kind(**{**self.values, **more, "model_name_or_path": folder})
            examples = {split: task.examples(job, split) for split in splits}
        except WhetError as error:
            if "dataset_name" not in self.values:
                raise
            self.notes.append(f"the data set of the training cannot be read: {error.problems[0].what}")
            return None
        output.mkdir()
        return task.prepare(job, args, examples)


def _recorded(folder: str) -> dict[str, Any]:
    """Return the settings of the run that wrote the folder; nothing if it has left no record."""
    with suppress(WhetError):
        return {name: entry.get("value") for name, entry in runs.read(folder).settings.items()}
    return {}


def _given(asked: ExportArguments, known: set[str]) -> dict[str, Any]:
    """Return the settings of the task that the command line gives; ConfigError for one that the task has not."""
    usual = draft(ExportArguments, {})
    names = ("validation_file", "train_file", "text_column_names", "text_pair_column_names", "label_column_name",
             "max_seq_length", "doc_stride", "version_2_with_negative")  # fmt: skip
    given = {name: value for name in names if (value := getattr(asked, name)) != getattr(usual, name)}
    if "text_column_names" in given and "text_column_names" not in known and "text_column_name" in known:
        given["text_column_name"] = given.pop("text_column_names")
    odd = [name for name in given if name not in known]
    if odd:
        raise ConfigError(
            what=f"{' and '.join(odd)} would change nothing here",
            got={name: given[name] for name in odd},
            why="models of this task do not read it",
            fix=f"leave {' and '.join(f'--{name}' for name in odd)} out",
        )
    return given


@dataclass(frozen=True)
class Rows:
    """Makes the batches that a graph is traced, calibrated, compared and timed with."""

    tokenizer: Any
    names: Sequence[str]
    """The columns that the graph takes."""
    length: int
    """Tokens of the longest row."""

    def batch(self, rows: Sequence[Mapping[str, Any]], full: int | None = None) -> dict[str, Tensor]:
        """Return these rows (B, T), padded to the longest of them, or to `full` tokens."""
        kept = [{name: row[name] for name in self.names if name in row} for row in rows]
        if full is None:
            columns = default_collator(self.tokenizer)(kept)
        else:
            columns = self.tokenizer.pad(kept, padding="max_length", max_length=full, return_tensors="pt")
        return {name: columns[name] for name in self.names}

    def sample(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return a batch to trace with: of three rows, and of another number of tokens."""
        chosen = self.batch(sorted(rows, key=lambda row: len(row["input_ids"]))[-3:])
        return chosen if chosen["input_ids"].shape[1] > len(chosen["input_ids"]) else self.batch(rows[:3], full=8)

    def chosen(self, judged: TaskRun | None, head: heads.Head, n: int) -> list[Any] | None:
        """Return so many rows of the data, the longest among them; None without any."""
        part = None if judged is None else judged.parts.get("validation") or judged.parts.get("test")
        if part is None or not len(part.rows):
            return None
        return [part.rows[place] for place in check.spread(len(part.rows), n, int(part.rows.lengths.argmax()))]

    def again(self, rows: list[Any], n: int) -> list[Any]:
        """Return so many rows, some again if there are fewer."""
        return [rows[place % len(rows)] for place in range(n)]

    def made_up(self, model: Any, head: heads.Head, n: int) -> list[Any]:
        """Return rows of texts of random tokens, from a single one to the longest."""
        seed = torch.Generator().manual_seed(0)
        n_known = min(len(self.tokenizer), model.get_input_embeddings().weight.shape[0])
        lengths = torch.linspace(1, self.length, n).int().tolist()
        pair = head is heads.QUESTION_ANSWERING
        found = []
        for length in lengths:
            ids = torch.randint(n_known, (length,), generator=seed)
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            found.append(self.tokenizer(text[:50], text, truncation="only_second", max_length=self.length) if pair
                         else self.tokenizer(text, truncation=True, max_length=self.length))  # fmt: skip
        return [dict(row) for row in found]


def _parts(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[begin : begin + size] for begin in range(0, len(rows) - size + 1, size)] or [rows]


def _inputs(model: Any, tokenizer: Any) -> list[str]:
    """Return the columns that the tokenizer makes and the model reads."""
    read = read_by(model) or frozenset()
    wanted = ("input_ids", "attention_mask", "token_type_ids")
    return [name for name in wanted if name in read and name in {"attention_mask", *tokenizer.model_input_names}]


# ---- the folder ----


def _write(
    folder: Path, about: dict[str, Any], facts: dict[str, Any], data: Data, tokenizer: Any, model: Any, length: int,
    asked: ExportArguments,
) -> None:  # fmt: skip
    """Write the tokenizer, how texts are read, export.json, the model card and the script that serves the graph."""
    with output_files.stored(f"the export cannot be written to {folder}", folder):
        save_processing(tokenizer, folder)
        if about["head"] == heads.TOKEN_CLASSIFICATION.auto:
            file = folder / "tokenizer.json"
            output_files.write_text(file, with_spaces(tokenizer.backend_tokenizer).to_str(pretty=True))
        reading = _reading(about["task"], data.settings, length)
        output_files.write_json(folder / NAME, reading, indent=2, on_error="stop")
        path = folder / exported.MANIFEST
        manifest = json.loads(path.read_text("utf-8"))
        measured = {name: value for name, value in facts.items() if value is not None}
        measured["speed"] = facts["speed"].as_json()
        if facts["metric"] is not None:
            measured["metric"] = asdict(facts["metric"])
        manifest[exported.SECTION] = about | {
            "serve": _serving(about["head"], reading, tokenizer, model.config),
            "check": measured,
            "from": Path(asked.model).name,
            "versions": _versions(asked.to),
            "processor": cpu.model_name(),
        }
        output_files.write_json(path, manifest, indent=2, on_error="stop")
        output_files.write_text(folder / "README.md", _card(asked, about, facts))
        output_files.write_text(folder / "serve.py", _script(about))


def _reading(task: str, settings: Any, length: int) -> dict[str, Any]:
    """Return how the model reads its input, for `whet predict` of the export."""
    names = ("text_column_names", "text_pair_column_names", "text_column_delimiter", "text_column_name", "doc_stride",
             "window_pooling", "threshold", "version_2_with_negative")  # fmt: skip
    return {"task": task, "max_seq_length": length} | {
        name: getattr(settings, name) for name in names if hasattr(settings, name)
    }


def _serving(head: str, reading: Mapping[str, Any], tokenizer: Any, config: Any) -> dict[str, Any]:
    """Return what the script reads: arguments of the tokenizer, and how logits become answers."""
    from_left = tokenizer.padding_side == "left"  # whet qa then puts the context first
    second = "only_first" if from_left else "only_second"
    return {
        "padding": {
            "direction": tokenizer.padding_side, "pad_id": tokenizer.pad_token_id or 0,
            "pad_type_id": tokenizer.pad_token_type_id, "pad_token": tokenizer.pad_token or "",
        },
        "truncation": {
            "max_length": reading["max_seq_length"], "stride": reading.get("doc_stride") or 0,
            "strategy": second if head == heads.QUESTION_ANSWERING.auto else "longest_first",
            "direction": tokenizer.truncation_side,
        },
        "context_first": from_left,
        "windows": reading.get("doc_stride") is not None,
        "pooling": reading.get("window_pooling", "mean"),
        "threshold": reading.get("threshold", 0.5),
        "no_answer": bool(reading.get("version_2_with_negative", False)),
        "labels": [str(config.id2label[n]) for n in range(config.num_labels)],
        "kind": config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification"),
    }  # fmt: skip


def _versions(to: str) -> dict[str, str]:
    names = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "nncf")}[to]
    found = {"whet": __version__}
    for name in (*names, "torch", "transformers", "tokenizers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _script(about: Mapping[str, Any]) -> str:
    """Return the text of the script for this head and this runtime."""
    text = (Path(__file__).parent / "served" / _SERVED[about["head"]]).read_text("utf-8")
    if about["format"] == "openvino":
        for found, wanted in _OPENVINO_LINES:
            assert found in text
            text = text.replace(found, wanted)
    return text


_OPENVINO_LINES = (
    ("onnxruntime and tokenizers", "openvino and tokenizers"),
    ("import onnxruntime\n", "import openvino\n"),
    (
        'onnxruntime.InferenceSession(FOLDER / "model.onnx")',
        'openvino.Core().compile_model(FOLDER / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})',
    ),
    ("[one.name for one in GRAPH.get_inputs()]", "[one.get_any_name() for one in GRAPH.inputs]"),
    ("GRAPH.run(None, feed)", "[*GRAPH(feed).values()]"),
)
"""What differs where OpenVINO runs the graph."""


def _n_bytes(folder: str, pattern: str) -> int | None:
    """Return the size of these files; None for a name on the hub."""
    return sum(path.stat().st_size for path in Path(folder).glob(pattern)) if Path(folder).is_dir() else None


def _graph_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".onnx", ".data", ".xml", ".bin"))


def _lines(model: str, about: Mapping[str, Any], facts: Mapping[str, Any], output: Path) -> list[str]:
    """Return what was measured, a line each."""
    place = escape_controls(str(output))
    rows = [("exported", f"{model} to {place} ({_TITLES[about['format']]}, {about['precision']})"), *_measured(facts)]
    rows += [("note", note) for note in facts["notes"]]
    rows.append(("serve", f"python {place}/serve.py, or whet predict {place}"))
    return [f"{name:<11}{text}" for name, text in rows]


def _measured(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was measured, in words."""
    fp32, int8, speed, metric = (facts.get(name) for name in ("logits_fp32", "logits_int8", "speed", "metric"))
    assert fp32 is not None
    assert isinstance(speed, check.Speed)
    off, n_rows, n_batches = f"{fp32['largest_difference']:.1e}", fp32["rows"], fp32["batches"]
    lengths = f"{fp32['shortest_tokens']} to {fp32['longest_tokens']} tokens"
    rows = [("logits", f"fp32 within {off} of torch's ({n_rows} rows, {n_batches} batches of {lengths})")]
    if int8 is not None:
        same = f"{int8['same_choice_frac']:.1%} of the largest logits are the same"
        rows.append(("", f"int8 within {int8['largest_difference']:.2g}, {same}"))
    if isinstance(metric, check.Metric):
        of = f"{metric.examples:,} examples of {escape_controls(metric.file)}"
        rows.append((metric.name, f"{metric.exported:.4f} exported, {metric.torch:.4f} torch ({of})"))
    mine, theirs = speed.exported_rows_per_s[0], speed.torch_rows_per_s[0]
    how = f"{console.plural(speed.threads, 'thread')}, batches of {speed.batch_rows}"
    rows.append(("rows/s", f"{mine:,.1f} exported, {theirs:,.1f} torch fp32: {speed.times_torch:.2f} times ({how})"))
    weights = facts["bytes"]["weights"]
    before = f", the weights {console.amount(weights)}" if weights else ""
    rows.append(("size", f"{console.amount(facts['bytes']['export'])}{before}"))
    return rows


def _card(asked: ExportArguments, about: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    """Return the model card: that of the trained model, if it has one, and a part about the export."""
    card = Path(asked.model) / "README.md"
    before = card.read_text("utf-8", errors="replace").rstrip() if card.is_file() else f"# {Path(asked.model).name}"
    table = [f"| {name} | {text} |" for name, text in _measured(facts)]
    notes = [f"- {note}" for note in facts["notes"]]
    title = f"## Export to {_TITLES[about['format']]}, {about['precision']}"
    text = (
        f"Made by `whet export` {__version__}. All that was measured is in `export.json`. `serve.py` answers JSON "
        f"lines without whet; `whet predict` and `transformers.exporters.ExportedModel` read the folder too."
    )
    return "\n".join([before, "", title, "", text, "", "| | |", "|---|---|", *table, "", *notes, ""]).rstrip() + "\n"
