"""A folder that `whet export` wrote, as a model that is called like one of transformers: another runtime computes it.

Nothing of the folder runs as code: its graph is protobuf or XML, and its settings are JSON.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)

from whet.errors import ConfigError
from whet.models.loading import heads
from whet.models.loading.folder_check import read_object
from whet.models.loading.load import ModelSource, load_config
from whet.optional import extra, require

MANIFEST = "export.json"
SECTION = "whet"
"""The part of the manifest that is whet's; the rest is what `ExportedModel` of transformers reads."""
RUNTIMES = {"onnx": "ONNX Runtime", "openvino": "OpenVINO"}
GRAPHS = {"onnx": "model.onnx", "openvino": "openvino_model.xml"}
"""The file of each format that a runtime opens; weights lie next to it."""

Arrays = Mapping[str, np.ndarray]
_OUTPUTS = {
    heads.QUESTION_ANSWERING.auto: QuestionAnsweringModelOutput,
    heads.SEQUENCE_CLASSIFICATION.auto: SequenceClassifierOutput,
    heads.TOKEN_CLASSIFICATION.auto: TokenClassifierOutput,
}
HEADS = {head.auto: head for head in heads.OF_ENCODERS}
"""The heads of transformers that are exported, by the class that loads them."""


class ExportedModel(nn.Module):
    """A model whose logits a runtime computes from numpy arrays. It has no weights, and cannot be trained."""

    def __init__(self, config: Any, about: Mapping[str, Any], compute: Callable[[Arrays], Arrays]) -> None:
        """`about` is whet's section of the manifest, `compute` returns the outputs by name."""
        super().__init__()
        self.config = config
        self.about = about
        self.head = HEADS[about["head"]]
        self.compute = compute

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Any:
        """Return the output of transformers for these columns (B, T); with labels of a classifier, its loss too."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        columns = {"input_ids": input_ids, "attention_mask": mask, "token_type_ids": types}
        feed = {name: columns[name].to("cpu", torch.int64).contiguous().numpy() for name in self.about["inputs"]}
        found = {name: torch.from_numpy(array) for name, array in self.compute(feed).items()}
        if labels is not None:
            loss: Any = LOSS_MAPPING[self.head.ending]
            logits = found["logits"]
            found["loss"] = loss(labels=labels, logits=logits, pooled_logits=logits, config=self.config)
        return _OUTPUTS[self.head.auto](**found)  # pyright: ignore[reportArgumentType]


def described(about: Mapping[str, Any]) -> str:
    """Return the number format and the runtime, for people; `about` is whet's section of the manifest."""
    return f"{about['precision']} by {RUNTIMES[about['format']]}"


def other_format(asked: str, own: str) -> ConfigError:
    """Return the error for an export that is asked to compute in another number format than its own."""
    return ConfigError(
        what="the exported model computes in its own number format",
        got=f"--precision {asked}, and the graph computes {own}",
        why="the graph was written in it",
        fix="leave --precision out, or name the folder that it was exported from",
    )


def gives_spans(model: nn.Module) -> bool:
    """Return whether this is an exported model that answers questions."""
    return isinstance(model, ExportedModel) and model.head is heads.QUESTION_ANSWERING


def about_folder(name: str) -> Mapping[str, Any] | None:
    """Return what `whet export` has written about the folder; None for any other folder or name."""
    path = Path(name) / MANIFEST
    if not path.is_file():
        return None
    found = read_object(path).get(SECTION)
    if not isinstance(found, dict):
        return None
    known = {"head": {*HEADS, heads.EMBEDDING.auto}, "format": RUNTIMES}
    odd = [key for key, values in known.items() if found.get(key) not in values]
    inputs = found.get("inputs")
    if odd or not isinstance(inputs, list) or not set(inputs) <= {"input_ids", "attention_mask", "token_type_ids"}:
        raise ConfigError(
            what=f"{path} cannot be read",
            got=f"{', '.join(odd) or 'inputs'}: {found.get(odd[0]) if odd else inputs}",
            why="it says which head the model has, and which runtime computes it from which columns",
            fix="export the model again with this version of whet",
        )
    return found


def load_exported(name: str, head: heads.Head) -> ExportedModel:
    """Return the model in a folder of `whet export`; ConfigError if it has another head or cannot be opened."""
    about, folder = about_folder(name), Path(name)
    assert about is not None
    if about["head"] != head.auto or about.get("task") == "rerank":
        of = {**HEADS, heads.EMBEDDING.auto: heads.EMBEDDING}[about["head"]]
        raise ConfigError(
            what=f"the exported model has not learnt to {head.learns}",
            got=f"{folder / MANIFEST}: {about['head']}, of whet {about.get('task')}",
            why=f"it was exported from a model for {of.task}",
            fix=f"name an export of a model that {head.command} has trained",
        )
    config = load_config(ModelSource(model=name, flag="--model"))
    return ExportedModel(config, about, runtime(folder, about["format"]))


def runtime(folder: Path, to: str, outputs: Sequence[str] | None = None) -> Callable[[Arrays], Arrays]:
    """Return what computes the outputs of the graph in the folder, by name, with as many threads as torch has.

    `outputs` are the names of those that are wanted; None: all.
    """
    module = {"onnx": "onnxruntime", "openvino": "openvino"}[to]
    send_nothing()
    package = require(module, needed_for=f"an export to {to}", install=extra(to))
    open_graph = {"onnx": _onnx_runtime, "openvino": _openvino}[to]
    try:
        return open_graph(package, folder / GRAPHS[to], outputs)
    except Exception as error:  # what the runtimes raise for a damaged file, of any type
        raise ConfigError(
            what="the exported model cannot be opened",
            got=f"{folder / GRAPHS[to]}: {' '.join(str(error).split())[:300]}",
            why=f"{RUNTIMES[to]} {package.__version__} refuses it: the file is damaged, or of a later version",
            fix="export the model again, or install the version that export.json names",
        ) from error


def send_nothing() -> None:
    """Keep OpenVINO and NNCF from reporting their use to their makers, which they do by default when imported."""
    sys.modules.setdefault("openvino_telemetry", None)  # pyright: ignore[reportArgumentType] - as if not installed


def session(graph: str | bytes) -> Any:
    """Return a session of ONNX Runtime for a file, or for the bytes of one, with as many threads as torch has."""
    package = require("onnxruntime", needed_for="an export to onnx", install=extra("onnx"))
    options = package.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()  # its own choice is every core of the machine
    options.log_severity_level = 3
    return package.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def _onnx_runtime(_: Any, path: Path, outputs: Sequence[str] | None) -> Callable[[Arrays], Arrays]:
    opened = session(str(path))
    names = [one.name for one in opened.get_outputs()] if outputs is None else [*outputs]
    return lambda feed: dict(zip(names, opened.run(names, dict(feed)), strict=True))


def _openvino(package: Any, path: Path, outputs: Sequence[str] | None) -> Callable[[Arrays], Arrays]:
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    settings |= {"INFERENCE_PRECISION_HINT": "f32"}  # its own choice is bf16, where the processor has that
    compiled = package.Core().compile_model(str(path), "CPU", settings)

    ports = {port.get_any_name(): port for port in compiled.outputs}
    names = [*ports] if outputs is None else [*outputs]
    lock = Lock()

    def compute(feed: Arrays) -> Arrays:
        with lock:  # the compiled model has one request, and other threads would change its inputs
            found = compiled(dict(feed))
            return {name: found[ports[name]].copy() for name in names}

    return compute
