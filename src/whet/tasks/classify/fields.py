"""The fields of `ClassifyArguments`: the names and defaults of transformers' run_classification.py, and a text each."""

from dataclasses import dataclass
from typing import Literal

from whet.jobs.fields import JobFields, Pooling

ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassifyFields(JobFields):
    """What a run of text classification is asked for, unchecked."""

    text_column_names: str | None = None
    """Columns that hold the text, separated by commas; several are joined. null: text, sentence or another usual name,
    or the only column besides the label. The log names the choice."""
    text_pair_column_names: str | None = None
    """Columns that hold the second text of a pair, such as the answer to a question. null: sentence2, hypothesis or
    another usual name, if the first text has its counterpart; else one text a row."""
    text_column_delimiter: str = " "
    """What stands between the columns of a text that are joined."""
    label_column_name: str | None = None
    """Column that holds the label. null: label, labels, category or another usual name."""
    csv_delimiter: str | None = None
    """Character between the columns of CSV files. null: the one that cuts the header into most columns."""
    shuffle_train_dataset: bool = False
    """Shuffle the training examples before max_train_samples cuts them. Training takes them in random order anyway."""
    shuffle_seed: int = 42
    """Random seed of that shuffling."""

    do_regression: bool | None = None
    """true: labels are numbers to predict. false: labels are classes. null: regression if the labels are numbers with a
    decimal point."""
    problem_type: ProblemType | None = None
    """What labels are. null: lists are several labels a row, numbers with a decimal point are regression, anything else
    is one label a row. The log names the choice."""
    metric_name: str | None = None
    """Metric that load_best_model_at_end and early stopping judge by, such as accuracy or f1_macro. null: the loss. All
    metrics are computed anyway."""
    ignore_mismatched_sizes: bool = False
    """Replace the head of a model that was trained with another number of labels by a new one."""
    threshold: float = 0.5
    """With several labels a row: the probability from which a label is predicted."""

    max_seq_length: int = 128
    """Longest row in tokens, a pair's two texts together. Longer texts are cut there, unless doc_stride is given."""
    doc_stride: int | None = None
    """Cut long texts into windows of max_seq_length that share this many tokens, and predict from all of them
    (window_pooling). null: cut the text after max_seq_length; the log counts such texts."""
    window_pooling: Pooling = "mean"
    """With doc_stride: mean predicts from the mean of the windows' logits, max from the largest of each label, so that
    one window suffices for it."""
    pad_to_max_length: bool = True
    """What the log compares packing with: rows padded to max_seq_length, or with false to the longest of their batch.
    whet itself pads nothing if the model allows it."""
