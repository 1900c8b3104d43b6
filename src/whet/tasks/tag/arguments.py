"""The options of token classification, under the names of transformers' run_ner.py, and their rules."""

from dataclasses import dataclass

from whet.config.rules.ranges import Rule, at_least
from whet.config.settings import checked
from whet.jobs.fields import JobFields, Pooling
from whet.jobs.rules import windows_are_joined, windows_move_on

OF_ENTITIES = ("f1", "precision", "recall")
"""Metrics of entities, which seqeval computes."""
METRICS = ("f1", "accuracy", "precision", "recall", "f1_macro", "loss")
"""Metrics of an evaluation: f1, precision and recall are those of entities, f1_macro is that of plain tags."""


TAG_RULES: tuple[Rule, ...] = (
    at_least("max_seq_length", 3, "a row holds a word and special tokens"),
    at_least("doc_stride", 0, "windows cannot share fewer than no tokens"),
    windows_move_on,
    windows_are_joined,
)


@checked(headings={"max_seq_length": "Length and labels"}, rules=TAG_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class TagArguments(JobFields):
    """Which model learns which tags, from which sentences."""

    task_name: str = "ner"
    """What the tags are, such as ner, pos or chunk. Chooses the columns {task_name}_tags and {task_name}."""
    train_file: str | None = None
    """File with the sentences to train on: columns as in CoNLL or CSV (a word a line, sentences apart by a blank line),
    or one sentence a row as JSON lines, JSON, Parquet or CSV, with a list of words and a list of tags."""
    validation_file: str | None = None
    """File with the sentences to evaluate on, in any format of train_file."""
    test_file: str | None = None
    """File with the sentences to predict tags for, in any format of train_file; it needs no tags."""
    text_column_name: str | None = None
    """Column that holds the words: a name, or for CoNLL files a number counted from 0. null: tokens, words or another
    usual name; the first column of CoNLL."""
    label_column_name: str | None = None
    """Column that holds the tags: a name, or for CoNLL files a number counted from 0. null: {task_name}_tags, tags or
    another usual name; the last column of CoNLL."""
    ignore_mismatched_sizes: bool = False
    """Replace the head of a model that was trained with another number of tags by a new one."""

    max_seq_length: int | None = None
    """Longest row in tokens. Longer sentences are cut unless doc_stride is given, and the log counts the words that are
    lost. null: what the model and its tokenizer allow."""
    doc_stride: int | None = None
    """Cut long sentences, or documents that are one sentence, into windows of max_seq_length that share this many
    tokens. A word in several windows gets its tag from all of them (window_pooling). null: cut after max_seq_length."""
    window_pooling: Pooling = "mean"
    """With doc_stride: mean takes the mean of the windows' logits, max the largest of each label."""
    pad_to_max_length: bool = False
    """What the log compares packing with: rows padded to max_seq_length, or with false to the longest of their batch.
    whet itself pads nothing if the model allows it."""
    label_all_tokens: bool = False
    """Give every piece of a word its tag (later pieces I- instead of B-). false: the first piece alone."""
    return_entity_level_metrics: bool = False
    """Report precision, recall and F1 of each kind of entity too."""
