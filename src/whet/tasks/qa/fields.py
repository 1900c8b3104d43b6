"""The fields of `QaArguments` and `AskArguments`, with names and defaults of the guides and a help text each."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from whet.jobs.fields import JobFields


@dataclass(frozen=True, kw_only=True, slots=True)
class QaFields(JobFields):
    """The settings of a question answering run before validation."""

    train_file: str | None = None
    """File with the questions to train on: SQuAD's JSON, or one row a question as JSON lines, CSV or Parquet."""
    validation_file: str | None = None
    """File with the questions to evaluate on, in any format of train_file."""
    test_file: str | None = None
    """File with the questions to predict answers for, in any format of train_file."""
    max_seq_length: int = 384
    """Longest row in tokens, question and context together. Longer contexts are cut into overlapping windows."""
    doc_stride: int = 128
    """Tokens that two neighbouring windows share. An answer no longer than this lies completely in one of them."""
    pad_to_max_length: bool = True
    """The padded length that padding_in_loss and the printed figures assume. true: max_seq_length. false: the longest
    row of a batch. whet itself packs rows without padding."""

    version_2_with_negative: bool = False
    """Some questions have no answer in their context, as in SQuAD v2.0."""
    null_score_diff_threshold: float = 0.0
    """Give no answer if "no answer" scores higher than the best answer by more than this. A higher value answers more
    often. Needs version_2_with_negative."""
    n_best_size: int = 20
    """Number of candidate starts and ends in each window, and of answers kept for each question."""
    max_answer_length: int = 30
    """Longest answer in tokens. The model predicts start and end separately; this limits their distance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskFields:
    """The settings of `whet ask` before validation."""

    model: str = field(default="", metadata={"required": True})
    """Model that was trained for question answering: a folder, with all weights or an adapter, or a name on the hub.
    Comes first, with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    context: str = field(default="", metadata={"required": True})
    """UTF-8 text file that contains the answer. - reads standard input."""
    question: Sequence[str] | str = field(default=(), metadata={"required": True, "kind": tuple[str, ...]})
    """The question. Repeat the flag to ask more questions about the same text."""
    max_seq_length: int = 384
    """Longest row in tokens, question and text together. Longer texts are cut into overlapping windows."""
    doc_stride: int = 128
    """Tokens that two neighbouring windows share."""

    version_2_with_negative: bool = False
    """Allow "no answer" as the answer. For models trained with such questions, as in SQuAD v2.0."""
    null_score_diff_threshold: float = 0.0
    """Answer nothing if "no answer" scores higher than the best answer by more than this. Higher answers more often.
    Needs version_2_with_negative."""
    n_best: int = 3
    """Answers to show for each question, best first."""
    max_answer_length: int = 30
    """Longest answer in tokens."""
