"""`whet export`: the order of the work, and what the folder holds.

The folder appears complete or not at all: everything is written next to it, and renamed at the end. It holds the graph,
the tokenizer, `export.json` with all that was measured, a model card, and a script that serves the graph without whet.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet import console, json_output, log, tasks
from whet.errors import ConfigError, escape_controls
from whet.export import check, graph, int8
from whet.export.arguments import ExportArguments, needs_texts
from whet.export.head_model import HeadModel
from whet.export.subject import Arrays, Subject
from whet.hardware import cpu
from whet.jobs.predict.trained import folder_of
from whet.jobs.task import Task
from whet.models.loading import exported, heads
from whet.models.loading.adapter import is_adapter, trained_head
from whet.store import find
from whet.store.write import Renames
from whet.system import fsync, rename
from whet.version import __version__
from whet.watch import files as output_files
from whet.watch import lock

_TITLES = {"onnx": "ONNX", "openvino": "OpenVINO"}
_LLAMA_CPP = "https://github.com/ggml-org/llama.cpp"
_SPEED_ROWS = 64
_MOST_NAMED = 4
"""Layers in fp32 that a line names; export.json has all."""
_MEASURED_ROWS = 16
"""Rows on which the error of each int8 product is measured."""


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
    _require_vectors(asked, task)
    graph.require_packages(asked.to, int8=asked.int8)
    output = _output_of(asked)
    json_output.add_outputs(folder=output, measurements=output / "export.json", server=output / "serve.py")
    with _published(output) as work:
        lines = _export(asked, task, work, output)
    print("\n".join([*lines, f"{'time':<11}{console.duration(time.perf_counter() - began_s)}"]))
    return 0


def _task_of(asked: ExportArguments) -> Task:
    """Return the task that the model was trained for; ConfigError if whet exports no such model to this format."""
    model = asked.model
    folder = folder_of(model)
    found = next((task for task in tasks.tasks() if task.knows(folder)), None)
    if found is None:
        head, named = trained_head(model, [task.head for task in tasks.tasks()])
        found = next((task for task in tasks.tasks() if task.by_engine and task.head is head), None)
    else:
        head, named = found.head, f"a model that whet {found.name} would train"
    if found is not None and (found.head.auto in exported.HEADS or not found.by_engine) and asked.to != "gguf":
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
        fix=f"name a model for {', '.join(one.task for one in (*heads.OF_ENCODERS, heads.EMBEDDING))}; of a plain "
        "encoder whet embed, or sentence-transformers, makes an embedding model",
    )


def _require_vectors(asked: ExportArguments, task: Task) -> None:
    """Raise ConfigError for a length of vectors, if the model gives none."""
    if asked.truncate_dim is not None and task.head is not heads.EMBEDDING:
        raise ConfigError(
            what="truncate_dim would change nothing here",
            got=asked.truncate_dim,
            why=f"a model that whet {task.name} trains gives no vectors",
            fix="leave --truncate_dim out",
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
    work, replaced = (find.hidden(output, state) for state in ("partial", "replaced"))
    lock.refuse_taken(work)
    with output_files.stored(f"the export cannot be written to {output}", output.parent):
        output.parent.mkdir(parents=True, exist_ok=True)
        if replaced.is_dir() and not output.exists():
            rename(replaced, output)
        for left in (work, replaced):
            shutil.rmtree(left, ignore_errors=True)
        (work / "export").mkdir(parents=True)
    renames = Renames()
    try:
        with lock.locked(work):
            yield work
            with output_files.stored(f"the export cannot be written to {output}", output.parent):
                for place, _, names in os.walk(work / "export"):
                    for name in (*names, "."):
                        fsync(Path(place, name))
                renames.put_in_place(work / "export", output, replaced)
                renames.keep()
    finally:
        renames.undo()
        for left in (work, replaced):
            shutil.rmtree(left, ignore_errors=True)


# ---- the work ----


def _export(asked: ExportArguments, task: Task, work: Path, output: Path) -> list[str]:
    """Fill the folder `export` of `work`; return the lines that say what was measured."""
    _say("reads the model and the rows to check it with")
    subject = _subject(asked, task, work)
    data = subject.data
    used = data.validation or data.train, data.train if needs_texts(asked) else None
    for path in dict.fromkeys(one for one in used if one is not None):
        shown = str(Path(path).absolute()) if Path(path).exists() else path  # or the name of a data set of the hub
        _say(f"takes examples from {escape_controls(shown)}")
    rows, checked = subject.rows, subject.checked
    timed = rows.batches(checked, _SPEED_ROWS, asked.per_device_eval_batch_size)
    plain = partial(_outputs, subject)
    torch_s = check.rows_per_s(timed, plain)

    _say("traces the graph")
    made = graph.traced(subject.module, rows.sample(checked), asked.to)
    folder = work / "export"
    _save(made, folder, output)
    about = {"format": asked.to, "precision": "fp32", **subject.about}
    facts: dict[str, Any] = {}
    compute = exported.runtime(folder, asked.to, subject.compared)
    compared = partial(check.compared, checked, rows.batch, rows.length, plain, kind=subject.kind)
    outputs = compared(other=partial(_computed, compute))
    outputs.require_close(asked.max_difference)
    facts["outputs_fp32"] = asdict(outputs) | {"allowed": asked.max_difference}
    _say(f"measures the metric{' of int8, and keeps layers in fp32 if it needs them' if asked.int8 else ''}")
    if asked.int8:
        about["precision"] = "int8"
        compute, metric, facts["int8"] = _in_int8(asked, subject, made, about, plain, folder, output)
        facts["outputs_int8"] = asdict(compared(other=partial(_computed, compute)))
    else:
        metric = subject.metric(compute, about)
    _say("measures the speed")
    facts["speed"] = check.speed(timed, torch_s, partial(_computed, compute))
    facts["metric"] = metric
    facts["bytes"] = {"weights": _n_bytes(subject.folder, "*.safetensors"), "export": _graph_bytes(folder)}
    facts["notes"] = subject.notes
    json_output.add(export=about | _measurements(facts))
    _write(folder, about, facts, subject, asked)
    return _lines(subject.name, about, facts, output)


def _say(stage: str) -> None:
    """Tell what the command does next: it takes a minute, and more for large models."""
    print(f"whet: {stage}", file=sys.stderr, flush=True)


def _in_int8(
    asked: ExportArguments,
    subject: Subject,
    made: Any,
    about: Mapping[str, Any],
    plain: check.Forward,
    folder: Path,
    output: Path,
) -> tuple[Callable[[Arrays], Arrays], check.Metric | None, dict[str, Any]]:
    """Write the graph with int8 products; return what computes it, the metric, and how it was made, for export.json.

    Layers stay in fp32 if the metric needs it. Raises ConfigError if it loses too much all the same.
    """
    texts, rows = subject.calibration, subject.rows
    has_vnni = bool({"avx512_vnni", "avx_vnni", "asimddp"} & cpu.features())
    if not has_vnni:
        subject.notes.append("this processor has no VNNI: int8 products are not fast here, and may overflow")
    facts: dict[str, Any] = {"activations": "dynamic" if texts is None else "static", "vnni": has_vnni}
    facts |= {} if texts is None else {"calibration_rows": len(texts)}
    batches = None if texts is None else [rows.batch([row]) for row in texts]
    quantise = partial(int8.quantised, made, asked.to, rows.sample(subject.checked), batches)

    def opened(graph: Any) -> tuple[Callable[[Arrays], Arrays], check.Metric | None]:
        _save(graph, folder, output)
        compute = exported.runtime(folder, asked.to, subject.compared)
        return compute, subject.metric(compute, about)

    def keeps(compute: Callable[[Arrays], Arrays]) -> bool:
        found = subject.metric(compute, about)
        return found is not None and found.drop_points <= asked.max_metric_drop

    in_int8 = quantise()
    compute, metric = opened(in_int8)
    if metric is not None and not metric.drop_points <= asked.max_metric_drop and asked.to == "onnx" and texts is None:
        some = rows.batches(subject.checked, _MEASURED_ROWS, asked.per_device_eval_batch_size)
        least = int8.least_in_fp32(made, in_int8, subject.compared, some, plain, keeps)
        if least is not None:
            layers = int8.parts(made)
            facts |= {
                "layers": len(layers),
                "fp32": {layers[name]: share for name, share in least.items()},
                "without_fp32": {"metric": metric.exported, "drop_points": metric.drop_points},
            }
            compute, metric = opened(quantise(fp32=[*least]))
    if metric is not None:
        metric.require_kept(asked.max_metric_drop, _other_int8(asked))
    return compute, metric, facts


def _subject(asked: ExportArguments, task: Task, work: Path) -> Subject:
    """Load what is exported."""
    if task.by_engine:
        return HeadModel.prepared(asked, task, work)
    from whet.export.sentence_model import SentenceModel

    return SentenceModel.prepared(asked, task, work)


def _save(made: Any, folder: Path, output: Path) -> None:
    with output_files.stored(f"the export cannot be written to {output}", output.parent):
        graph.save(made, folder)


def _outputs(subject: Subject, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what torch computes."""
    with torch.inference_mode():
        found = subject.module(**columns)
    return {name: found[name] for name in subject.compared}


def _computed(compute: Callable[[Arrays], Arrays], columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what the runtime computes."""
    found = compute({name: value.numpy() for name, value in columns.items()})
    return {name: torch.from_numpy(value) for name, value in found.items()}


def _other_int8(asked: ExportArguments) -> str:
    """Return what else may lose less of the metric, for a message."""
    if asked.to == "openvino":
        return "export more --calibration_samples"
    return "try --int8_activations dynamic" if asked.int8_activations == "static" else "try --int8_activations static"


# ---- the folder ----


def _write(
    folder: Path, about: Mapping[str, Any], facts: Mapping[str, Any], subject: Subject, asked: ExportArguments
) -> None:
    """Write the tokenizer, how texts are read, export.json, the model card and the script that serves the graph."""
    with output_files.stored(f"the export cannot be written to {folder}", folder):
        serving = subject.write(folder)
        path = folder / exported.MANIFEST
        manifest = json.loads(path.read_text("utf-8"))
        manifest[exported.SECTION] = {
            **about,
            "serve": serving,
            "check": _measurements(facts),
            "from": Path(asked.model).name,
            "versions": _versions(asked.to),
            "processor": cpu.model_name(),
        }
        output_files.write_json(path, manifest, indent=2, on_error="stop")
        script = _script(subject.script, asked.to)
        output_files.write_text(folder / "README.md", _card(asked, about, facts, script))
        output_files.write_text(folder / "serve.py", script)


def _measurements(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was measured, as JSON holds it."""
    measured = {name: value for name, value in facts.items() if value is not None}
    metric = {} if facts["metric"] is None else {"metric": asdict(facts["metric"])}
    return measured | {"speed": facts["speed"].as_json()} | metric


def _versions(to: str) -> dict[str, str]:
    names = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "nncf")}[to]
    found = {"whet": __version__}
    for name in (*names, "torch", "transformers", "tokenizers"):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _script(name: str, to: str) -> str:
    """Return the text of the script for this head and this runtime."""
    served = Path(__file__).parent / "served"
    opening, own, ending = ((served / one).read_text("utf-8") for one in ("opening.py.txt", name, "ending.py.txt"))
    title, _, answer = own.partition("\n")
    text = f"{title}\n\n{opening.rstrip()}\n\n\n{answer.strip()}\n\n\n{ending}"
    for found, wanted in _OPENVINO_LINES if to == "openvino" else ():
        assert found in text
        text = text.replace(found, wanted)
    return text


_OPENVINO_LINES = (
    ("onnxruntime and tokenizers", "openvino and tokenizers"),
    ("import onnxruntime\n", "import openvino\n"),
    (
        'onnxruntime.InferenceSession(FOLDER / "model.onnx")',
        'openvino.Core().compile_model(FOLDER / "openvino_model.xml", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})\n'
        "GRAPH_LOCK = Lock()",
    ),
    ("[one.name for one in GRAPH.get_inputs()]", "[one.get_any_name() for one in GRAPH.inputs]"),
    (
        'return GRAPH.run(HOW["outputs"], feed)',
        "with GRAPH_LOCK:  # it computes one feed at a time\n        found = GRAPH(feed)\n"
        '        return [found[name] for name in HOW["outputs"]]',
    ),
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
    return [f"{name:<10} {text}" for name, text in rows]


def _measured(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what was measured, in words."""
    fp32, in_int8, speed, metric = (facts.get(name) for name in ("outputs_fp32", "outputs_int8", "speed", "metric"))
    assert fp32 is not None
    assert isinstance(speed, check.Speed)
    off, n_rows, n_batches = f"{fp32['largest_difference']:.1e}", fp32["rows"], fp32["batches"]
    lengths = f"{fp32['shortest_tokens']} to {fp32['longest_tokens']} tokens"
    words = check.WORDS[fp32["kind"]]
    rows = [(words, f"fp32 within {off} of torch's ({n_rows} rows, {n_batches} batches of {lengths})")]
    if in_int8 is not None:
        more = ""
        if in_int8["same_choice_frac"] is not None:
            more = f", {in_int8['same_choice_frac']:.1%} of the largest logits are the same"
        elif in_int8["cosine"] is not None:
            more = f", a cosine of {in_int8['cosine'][0]:.4f} at least, {in_int8['cosine'][1]:.4f} in the mean"
        rows.append(("", f"int8 within {in_int8['largest_difference']:.2g}{more}"))
    if isinstance(metric, check.Metric):
        of = f"{metric.examples:,} {metric.unit} of {escape_controls(metric.file)}"
        rows.append((metric.name, f"{metric.exported:.4f} exported, {metric.torch:.4f} torch ({of})"))
    if kept := facts.get("int8", {}).get("fp32"):
        assert isinstance(metric, check.Metric)
        lost = f"with all in int8 {metric.name} loses {facts['int8']['without_fp32']['drop_points']:.2f} points"
        shown = ", ".join([*kept][:_MOST_NAMED]) + (" ..." if len(kept) > _MOST_NAMED else "")
        rows.append(("in fp32", f"{len(kept)} of {facts['int8']['layers']} layers ({lost}): {shown}"))
    mine, theirs = speed.exported_rows_per_s[0], speed.torch_rows_per_s[0]
    how = f"{console.plural(speed.threads, 'thread')}, batches of {speed.batch_rows}"
    rows.append(("rows/s", f"{mine:,.1f} exported, {theirs:,.1f} torch fp32: {speed.times_torch:.2f} times ({how})"))
    weights = facts["bytes"]["weights"]
    before = f", the weights {console.amount(weights)}" if weights else ""
    rows.append(("size", f"{console.amount(facts['bytes']['export'])}{before}"))
    return rows


def _card(asked: ExportArguments, about: Mapping[str, Any], facts: Mapping[str, Any], script: str) -> str:
    """Return the model card: that of the trained model, if it has one, and a part about the export."""
    card = Path(asked.model) / "README.md"
    before = card.read_text("utf-8", errors="replace").rstrip() if card.is_file() else f"# {Path(asked.model).name}"
    table = [f"| {name} | {text} |" for name, text in _measured(facts)]
    notes = [f"- {note}" for note in facts["notes"]]
    title = f"## Export to {_TITLES[about['format']]}, {about['precision']}"
    text = (
        f"Made by `whet export` {__version__}. All that was measured is in `export.json`. `serve.py` answers without "
        f"whet; `whet predict` and `transformers.exporters.ExportedModel` read the folder too."
    )
    question = re.findall(r"echo ('.*?') \|", script)[0]
    runtime = {"onnx": "onnxruntime", "openvino": "openvino"}[asked.to]
    serving = [
        "```bash", f"pip install {runtime} tokenizers", f"echo {question} | python serve.py",
        "python serve.py --port 8000 &", f"curl -d {question} http://127.0.0.1:8000", "```",
    ]  # fmt: skip
    lines = [before, "", title, "", text, "", *serving, "", "| | |", "|---|---|", *table, "", *notes, ""]
    return "\n".join(lines).rstrip() + "\n"
