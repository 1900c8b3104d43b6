"""Graphs with int8 products, by the runtimes' own quantisers; and which products stay in fp32 for the task's metric.

A product in int8 rounds its inputs to 256 steps between the smallest and the largest of a batch. A few large values,
as the hidden states of trained encoders have, leave the others few of these steps, and in some layers that costs more
than in others. So the error of each layer is measured, and the worst ones stay as they are: as few as keep the metric.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from whet.export.check import Columns, Forward
from whet.export.graph import exporters, silent
from whet.models.loading.exported import Arrays, session
from whet.optional import extra, require

_MOST_BYTES = 1 << 31
"""Of a graph that is opened from memory: protobuf holds no larger one."""


def quantised(
    graph: Any, to: str, columns: Columns, calibration: Sequence[Columns] | None, fp32: Sequence[str] = ()
) -> Any:
    """Return the graph with int8 products. `calibration` are the batches for the ranges of activations.

    None: each product finds the range of its activations itself, and those in `fp32` (`parts`) stay as they are.
    """
    package = exporters()
    with silent():
        if to == "openvino":
            quantiser = package.NNCFOpenVINOQuantizer(calibration_dataset=calibration)
        elif calibration is None:
            dynamic = package.OnnxRuntimeDynamicConfig(
                per_channel=True, op_types_to_quantize=["MatMul", "Gather"],
                nodes_to_exclude=[*fp32, *(f"{name}_MatMul" for name in fp32)],  # of a Gemm it makes a product first
            )  # fmt: skip
            quantiser = package.OnnxRuntimeQuantizer(dynamic)
        else:
            kinds = require("onnxruntime.quantization", needed_for="--int8", install=extra("onnx")).QuantType
            static = package.OnnxRuntimeStaticConfig(
                per_channel=True, op_types_to_quantize=["MatMul", "Gemm"],
                activation_type=kinds.QUInt8, weight_type=kinds.QInt8,  # the pair that ONNX Runtime multiplies as bytes
            )  # fmt: skip
            quantiser = package.OnnxRuntimeQuantizer(static, calibration_dataset=calibration)
        part = graph.components["model"]
        program = quantiser.quantize(part.program, dict(columns), graph.export_format)
    made = copy.copy(graph)
    made.components = {"model": replace(part, program=program)}
    return made


def parts(graph: Any) -> dict[str, str]:
    """Return what a dynamic int8 form of an ONNX graph has in int8: the name of a node -> its layer, for people.

    These are products with weights, and lookups in tables.
    """
    found = {}
    for node in graph.components["model"].program.graph:
        place = {"MatMul": 1, "Gemm": 1, "Gather": 0}.get(node.op_type)
        value = None if place is None else node.inputs[place]
        weight = None if value is None else value.const_value
        if weight is not None and weight.dtype.name == "FLOAT":
            found[node.name] = _layer(node)
    return found


def _layer(node: Any) -> str:
    """Return the name of the module that a node was traced from, if it is known."""
    scopes = ast.literal_eval(node.metadata_props.get("pkg.torch.onnx.name_scopes", "[]"))
    return next((scope for scope in reversed(scopes[:-1]) if scope), node.name)


def least_in_fp32(
    graph: Any,
    in_int8: Any,
    outputs: Sequence[str],
    batches: Sequence[Columns],
    plain: Forward,
    keeps: Callable[[Callable[[Arrays], Arrays]], bool],
) -> dict[str, float] | None:
    """Return the fewest parts of the graph that have to stay in fp32, each with its share of the error of int8.

    The parts are taken in the order of how much of the error on these batches goes if one of them alone is in fp32.
    `keeps` says whether what computes the outputs keeps the metric. None: no choice does, or the graph is too large.
    """
    names = [*parts(graph)]
    choice = _Choice.of(graph, in_int8, names, outputs)
    if choice is None:
        return None
    wanted = [plain(columns) for columns in batches]

    def error(fp32: Sequence[str]) -> float:
        compute = choice.compute(fp32)
        return sum(_error(columns, one, compute) for columns, one in zip(batches, wanted, strict=True))

    whole = error([])
    share = {name: (whole - error([name])) / max(whole, 1e-30) for name in names}
    order = sorted(names, key=lambda name: share[name], reverse=True)
    fails, holds, most = 0, 1, len(order) - 1  # with none in int8 it would be no int8 graph
    while holds > most or not keeps(choice.compute(order[:holds])):
        if holds >= most:
            return None
        fails, holds = holds, min(2 * holds, most)
    while holds - fails > 1:
        middle = (fails + holds) // 2
        fails, holds = (fails, middle) if keeps(choice.compute(order[:middle])) else (middle, holds)
    return {name: share[name] for name in order[:holds]}


def _error(columns: Columns, wanted: Mapping[str, Tensor], compute: Callable[[Arrays], Arrays]) -> float:
    """Return the sum of squared differences; of outputs for each token, padding tokens do not count."""
    found = compute({name: value.numpy() for name, value in columns.items()})
    real = columns["attention_mask"].numpy().astype(bool)
    total = 0.0
    for name, value in wanted.items():
        off = value.numpy().astype(float) - found[name]
        total += float((off[real] if off.shape[:2] == real.shape else off).__pow__(2).sum())
    return total


class _Choice:
    """A graph that holds each part twice, in fp32 and in int8: which of them counts, each call says.

    So no graph is quantised and opened for each choice.
    """

    def __init__(self, opened: Any, names: Sequence[str], outputs: Sequence[str]) -> None:
        self._session = opened
        self._names = [*names]
        self._outputs = [*outputs]

    @classmethod
    def of(cls, graph: Any, in_int8: Any, names: Sequence[str], outputs: Sequence[str]) -> _Choice | None:
        """Return the choice between these two forms of a model; None if they are too large for it."""
        to_proto = require("onnx_ir", needed_for="--int8", install=extra("onnx")).to_proto
        programs = [one.components["model"].program for one in (graph, in_int8)]
        n_bytes = sum(value.const_value.nbytes for one in programs for value in one.graph.initializers.values())
        if n_bytes >= _MOST_BYTES:
            return None
        joined = _joined(to_proto(programs[0]), to_proto(programs[1]), names)
        return cls(session(joined.SerializeToString()), names, outputs)

    def compute(self, fp32: Sequence[str]) -> Callable[[Arrays], Arrays]:
        """Return what computes the outputs by name, with these parts in fp32."""
        chosen = {_flag(name): np.array(name in fp32) for name in self._names}
        return lambda feed: dict(zip(self._outputs, self._session.run(self._outputs, {**feed, **chosen}), strict=True))


def _flag(name: str) -> str:
    return f"{name}.is_fp32"


def _joined(plain: Any, in_int8: Any, names: Sequence[str]) -> Any:
    """Return the int8 model, changed: it also computes these nodes of the plain one, and an input chooses each."""
    onnx = require("onnx", needed_for="--int8", install=extra("onnx"))
    graph = in_int8.graph
    own = {node.output[0]: node for node in plain.graph.node if node.name in names}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        for place, name in enumerate(node.output):
            if name in own:
                again = onnx.NodeProto()
                again.CopyFrom(own[name])
                again.name = again.output[0] = f"{name}.fp32"
                node.output[place] = f"{name}.int8"
                chosen = onnx.helper.make_node("Where", [_flag(own[name].name), f"{name}.fp32", f"{name}.int8"], [name])
                nodes += [again, chosen]
    held, read = {one.name for one in graph.initializer}, {name for node in own.values() for name in node.input}
    graph.initializer.extend(one for one in plain.graph.initializer if one.name in read - held)
    graph.input.extend(onnx.helper.make_tensor_value_info(_flag(name), onnx.TensorProto.BOOL, []) for name in names)
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return in_int8
