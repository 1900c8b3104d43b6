"""The fields of `QaArguments` and `AskArguments`: the guides' names and defaults, and a text for each."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class QaFields:
    """What a question answering run is asked for, unchecked."""

    model_name_or_path: str = field(default="", metadata={"required": True})
    """Pretrained model: a folder, or a name on the hub. Weights are read from safetensors files only."""
    config_name: str | None = None
    """Take the model's configuration from this folder or hub name instead."""
    tokenizer_name: str | None = None
    """Take the tokenizer from this folder or hub name instead."""
    cache_dir: str | None = None
    """Folder in which downloaded models and datasets are kept. null: the usual cache of the hub."""
    model_revision: str = "main"
    """Branch, tag or commit of the model on the hub. A commit makes the run repeatable."""
    token: str | None = field(default=None, repr=False, metadata={"secret": True})
    """Access token for private models and datasets. null: the environment's HF_TOKEN, or the login kept by the hub's
    own tool. Other users of the machine can read flags, so prefer those two."""
    trust_remote_code: bool = False
    """Must stay false: whet never runs code that comes with a model or a dataset."""

    dataset_name: str | None = None
    """Dataset of the hub, such as squad or squad_v2. Use this or files, not both."""
    dataset_config_name: str | None = None
    """Which configuration of that dataset, where it has several."""
    train_file: str | None = None
    """File with the questions to train on: SQuAD's JSON, or one row a question as JSON lines, CSV or Parquet."""
    validation_file: str | None = None
    """File with the questions to evaluate on, in any format of train_file."""
    test_file: str | None = None
    """File with the questions to predict answers for, in any format of train_file."""
    skip_bad: bool = False
    """Leave bad questions out instead of ending the run at them. They are counted in the results; the log names
    the first, train_left_out.json (eval, predict) each with its reason. A file that cannot be read ends the run."""
    max_train_samples: int | None = None
    """Use only this many of the first questions for training. null: all."""
    max_eval_samples: int | None = None
    """Use only this many of the first questions for evaluation. null: all."""
    max_predict_samples: int | None = None
    """Use only this many of the first questions for prediction. null: all."""
    overwrite_cache: bool = False
    """Tokenize again even if the tokens of this data are cached."""
    preprocessing_num_workers: int | None = None
    """Threads that tokenize. null: one for each core that this process may use."""
    max_seq_length: int = 384
    """Longest row in tokens, question and context together. Longer contexts are cut into overlapping windows."""
    doc_stride: int = 128
    """Tokens that two neighbouring windows share. An answer no longer than this is whole in one of them."""
    pad_to_max_length: bool = True
    """Which padding the loss counts with padding_in_loss, and the log compares with: rows padded to max_seq_length, or
    with false to the longest of their batch. whet itself packs rows end to end."""

    version_2_with_negative: bool = False
    """Some questions have no answer in their context, as in SQuAD v2.0."""
    null_score_diff_threshold: float = 0.0
    """Answer nothing where "no answer" scores higher than the best answer by more than this. Higher answers more often.
    Needs version_2_with_negative."""
    n_best_size: int = 20
    """Starts and ends looked at in each window, and answers kept for each question."""
    max_answer_length: int = 30
    """Longest answer in tokens. Start and end are predicted apart, so nothing else keeps them near each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AskFields:
    """What `whet ask` is asked for, unchecked."""

    model: str = field(default="", metadata={"required": True})
    """Model that was trained for question answering: a folder, or a name on the hub. Comes first, with or without its
    flag."""
    context: str = field(default="", metadata={"required": True})
    """UTF-8 text file in which the answer stands. - reads standard input."""
    question: Sequence[str] | str = field(default=(), metadata={"required": True, "kind": tuple[str, ...]})
    """What to ask. Repeat the flag to ask more about the same text."""
    max_seq_length: int = 384
    """Longest row in tokens, question and text together. Longer texts are cut into overlapping windows."""
    doc_stride: int = 128
    """Tokens that two neighbouring windows share."""

    version_2_with_negative: bool = False
    """Allow "no answer" as the answer. For models that were trained so, as on SQuAD v2.0."""
    null_score_diff_threshold: float = 0.0
    """Answer nothing where "no answer" scores higher than the best answer by more than this. Higher answers more often.
    Needs version_2_with_negative."""
    n_best: int = 3
    """Answers to show for each question, best first."""
    max_answer_length: int = 30
    """Longest answer in tokens."""
