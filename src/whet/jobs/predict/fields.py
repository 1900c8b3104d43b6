"""The fields of `PredictArguments`: which model predicts what, and where the predictions go."""

from dataclasses import dataclass, field
from typing import Literal

from whet.jobs.fields import Pooling


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictFields:
    """What `whet predict` is asked for, unchecked."""

    model: str = field(default="", metadata={"required": True})
    """Trained model: the output folder of a training, with all weights or an adapter, or a name on the hub. Comes
    first, with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    file: str = field(default="", metadata={"required": True})
    """File to predict, in any format that the model's training takes. Labels are not needed and not read."""
    output: str = "predictions.jsonl"
    """File for the predictions, one JSON object a line. A file of this name is replaced; a pipe or a device, such as
    /dev/stdout, is written to."""
    text_column_names: str | None = None
    """Columns that hold the text, or the words to tag; several names are separated by commas. null: those of the
    training, else a usual name."""
    text_pair_column_names: str | None = None
    """Columns that hold the second text of a pair. null: those of the training, else a usual name."""
    csv_delimiter: str | None = None
    """Character between the columns of CSV files. null: the one that cuts the header into most columns."""
    skip_bad: bool = False
    """Leave bad rows out instead of ending at them; the log names the first."""
    max_predict_samples: int | None = None
    """Predict only this many of the first rows. null: all."""
    per_device_eval_batch_size: int = 8
    """Rows at once. More rows take more memory."""
    precision: Literal["auto", "fp32", "bf16"] = "fp32"
    """Number format of the matrix products. bf16 is faster on CPUs with AMX or AVX512-BF16, with 2 to 3 decimal digits.
    auto: the faster one, measured on the first rows."""
    top_k: int = 3
    """Labels or answers to write for each row, best first."""

    max_seq_length: int | None = None
    """Longest row in tokens. null: as in the training, else 384 for questions and 128 for texts."""
    doc_stride: int | None = None
    """Tokens that two windows of a long text share. null: as in the training, else 128 for questions."""
    window_pooling: Pooling | None = None
    """How the windows of a long text become one prediction: mean or max of their logits. null: as in the training,
    else mean."""
    version_2_with_negative: bool = False
    """Question answering: allow "no answer" as the answer. Models that whet qa trained so need no flag."""
