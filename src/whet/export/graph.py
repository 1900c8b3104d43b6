"""From a model of torch to the graph of another runtime, by transformers' own exporters."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whet.errors import ConfigError, WhetError
from whet.hardware import memory
from whet.models.loading.exported import send_nothing
from whet.models.loading.quiet import quiet
from whet.optional import extra, is_installed, require

_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino",)}
_FOR_INT8 = {"onnx": (), "openvino": ("nncf",)}
Columns = Mapping[str, Tensor]


def require_packages(to: str, *, int8: bool) -> None:
    """Raise ConfigError for a package that is missing, before any work."""
    for name in (*_PACKAGES[to], *(_FOR_INT8[to] if int8 else ())):
        if not is_installed(name):
            require(name, needed_for=f"whet export --to {to}", install=extra(to))
    exporters()


def exporters() -> Any:
    """Return transformers' exporters."""
    with silent():
        return require("transformers.exporters", needed_for="whet export", install="'transformers>=5.24'")


def traced(model: Any, columns: Columns, to: str) -> Any:
    """Return the model's graph in the format, as transformers' ExportedModel; any batch and any length can be given.

    `columns` (B, T) are those that the graph takes. Raises ConfigError for a model that cannot be traced, or whose
    graph would hold for one size alone.
    """
    send_nothing()
    package = exporters()
    axes = {name: {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC} for name in columns}
    try:
        with silent(), torch.no_grad():
            if to == "onnx":
                settings = package.OnnxConfig(dynamic=True, dynamic_shapes=axes)
                return package.OnnxExporter().export(model, dict(columns), settings)
            settings = package.OpenVINOConfig(dynamic=True, dynamic_shapes=axes)
            return package.OpenVINOExporter().export(model, dict(columns), settings)
    except WhetError:
        raise
    except Exception as error:  # what torch, the exporters and the converters raise, of any type
        raise memory.lack(error) or ConfigError(
            what=f"{type(model).__name__} cannot be converted to {to}",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}",
            why="torch.export, or the converter behind it, does not know what this model does",
            fix=f"export it to {'openvino' if to == 'onnx' else 'onnx'}, or install newer versions of torch and "
            "transformers",
        ) from error


def save(graph: Any, folder: Path) -> None:
    """Write the graph, its weights, its manifest and the model's configuration to a folder."""
    with silent():
        graph.save_pretrained(folder)


@contextmanager
def silent() -> Iterator[None]:
    """Run the block without what torch, the converters and the quantisers print, log and warn about.

    What matters of it, that results are those of the model, the check measures.
    """
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with quiet(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
