"""The options of `whet export`: which model becomes which files, and what these are checked with."""

import os
from dataclasses import dataclass, field
from typing import Literal

from whet.config.aliases import Alias
from whet.config.rules.ranges import Rule, above, at_least, broken_if, is_given, only_with
from whet.config.settings import checked


def needs_texts(asked: "ExportArguments") -> bool:
    """Return whether int8 is calibrated on texts."""
    return asked.int8 and (asked.int8_activations == "static" or asked.to == "openvino")


RULES: tuple[Rule, ...] = (
    is_given(
        "names_a_model",
        "model",
        what="no model is named",
        why="a trained model is exported",
        fix="name the output folder of a training: whet export out --to onnx",
    ),
    broken_if(
        "output_is_another_folder",
        ("output_dir",),
        lambda asked: bool(asked.output_dir) and os.path.realpath(asked.output_dir) == os.path.realpath(asked.model),
        what="output_dir is the folder of the model",
        why="the model would be replaced by its export",
        fix="name another folder in --output_dir",
    ),
    only_with(
        "activations_are_of_int8",
        "int8",
        ("int8_activations",),
        is_on=lambda asked: asked.int8,
        why="it says how int8 products get their activations",
        fix="add --int8, or leave --int8_activations out",
    ),
    only_with(
        "a_drop_is_of_int8",
        "int8",
        ("max_metric_drop",),
        is_on=lambda asked: asked.int8,
        why="the outputs of an fp32 export are compared themselves",
        fix="add --int8, or leave --max_metric_drop out",
    ),
    only_with(
        "calibration_is_of_static_int8",
        "int8_activations",
        ("calibration_samples",),
        is_on=needs_texts,
        why="it is how many texts the ranges of activations are measured on; fp32 and dynamic int8 need none",
        fix="add --int8 --int8_activations static, or leave --calibration_samples out",
    ),
    above("max_difference", 0, "two programs round differently"),
    at_least("max_metric_drop", 0, "it is how many points a metric may lose"),
    at_least("max_eval_samples", 1, "a metric needs an example"),
    at_least("calibration_samples", 1, "ranges of activations are measured on texts"),
    at_least("per_device_eval_batch_size", 1, "a batch has a row"),
    at_least("max_seq_length", 3, "a row holds a word and special tokens"),
    at_least("truncate_dim", 1, "a vector has a number"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
)
_ALIASES = {
    "text_column_name": Alias(to="text_column_names", kind=str | None, name="the name of whet tag"),
}


@checked(headings={"model": "Export", "validation_file": "Check", "max_seq_length": "Rows"}, rules=RULES,
         aliases=_ALIASES)  # fmt: skip
@dataclass(frozen=True, kw_only=True, slots=True)
class ExportArguments:
    """Which model is exported, to what, and how it is checked."""

    model: str = field(default="", metadata={"required": True})
    """Trained model: the output folder of a training, with all weights or an adapter, which is merged first, or a name
    on the hub. Comes first, with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    to: Literal["onnx", "openvino", "gguf"] = "onnx"
    """Format: onnx for ONNX Runtime, openvino for OpenVINO; gguf names the tool that writes it."""
    int8: bool = False
    """Multiply in 8 bits. Faster on processors with VNNI; the check measures by how much, and what it costs."""
    int8_activations: Literal["dynamic", "static"] = "dynamic"
    """With int8 and onnx: dynamic finds the range of activations in each product, static once, on training texts."""
    output_dir: str | None = None
    """Folder for the export. An earlier export there is replaced, any other folder refused. null: next to the model,
    such as out-onnx-int8."""

    validation_file: str | None = None
    """File with examples whose metric is compared. null: that of the training, if it is still there."""
    train_file: str | None = None
    """File with texts to calibrate static int8 on. null: that of the training, if it is still there."""
    calibration_samples: int = 300
    """Use this many of its first examples."""
    max_eval_samples: int | None = None
    """Judge only this many of the first examples of validation_file. null: all."""
    max_difference: float = 1e-4
    """Largest difference of an fp32 export's logits, vectors or scores from torch's: absolute, or a share of the
    largest if that is above 1. The export fails above it, and if the cosine of two vectors is below 1 by more."""
    max_metric_drop: float = 0.5
    """With int8: points of 100 by which the task's metric may be below torch's. Dynamic int8 leaves the layers with the
    largest error in fp32 to stay above that. The export fails if it loses more all the same."""
    per_device_eval_batch_size: int = 8
    """Rows at once, for metrics and speed."""
    text_column_names: str | None = None
    """Columns of validation_file that hold the text, or the words to tag. null: those of the training, else usual."""
    text_pair_column_names: str | None = None
    """Columns of validation_file that hold the second text of a pair. null: those of the training, else usual."""
    label_column_name: str | None = None
    """Column of validation_file that holds the labels or tags. null: that of the training, else a usual name."""
    skip_bad: bool = False
    """Leave bad rows of these files out instead of ending at them."""

    max_seq_length: int | None = None
    """Longest row in tokens. null: as in the training, else 384 for questions and 128 for texts."""
    truncate_dim: int | None = None
    """Embedding models: keep this many of the first numbers of each vector. null: all, or as the folder says."""
    doc_stride: int | None = None
    """Tokens that two windows of a long text share. null: as in the training, else 128 for questions."""
    version_2_with_negative: bool | None = None
    """Question answering: allow "no answer" as the answer. null: as in the training, else false."""
