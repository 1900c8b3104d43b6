"""`whet tag`: the command of token classification, and what its run consists of."""

import json

from whet.jobs.command import training_command
from whet.jobs.task import HONOURED_BY_CALLS, IN_WINDOWS, Task, lazily, words
from whet.models.loading.heads import TOKEN_CLASSIFICATION
from whet.tasks.tag.arguments import METRICS, TagArguments

_USUAL_LENGTH = 512


def _sample(job: TagArguments, n_rows: int) -> tuple[str, str]:
    length = job.max_seq_length or _USUAL_LENGTH
    text, tags = job.text_column_name or "tokens", job.label_column_name or f"{job.task_name}_tags"
    row = json.dumps({text: words(length).split(), tags: ["O", "B-A"] * (length // 2) + ["O"] * (length % 2)})
    return ".jsonl", "\n".join([row] * n_rows)


_PREDICT_TAKES = {
    **dict.fromkeys(("base_model_name_or_path", "text_column_names", "csv_delimiter", "max_seq_length")),
    **IN_WINDOWS,
}
TASK = Task(
    name="tag",
    head=TOKEN_CLASSIFICATION,
    read=lazily(__name__, "read", "read_split"),
    prepare=lazily(__name__, "job", "prepare"),
    sample=_sample,
    takes=(*HONOURED_BY_CALLS, "label_smoothing_factor"),
    predict=lazily(__name__, "job", "predict"),
    predict_takes=_PREDICT_TAKES,
    metrics=lambda _: METRICS,
    shown={
        "train_samples_per_second": ("sentences a second", "{:,.2f}"),
        "eval_loss": ("loss", "{:.4f}"),
        "eval_accuracy": ("accuracy of words", "{:.2%}"),
        "eval_precision": ("precision of entities", "{:.4f}"),
        "eval_recall": ("recall of entities", "{:.4f}"),
        "eval_f1": ("F1 of entities", "{:.4f}"),
        "eval_f1_macro": ("F1 of tags, macro", "{:.4f}"),
        "predict_accuracy": ("accuracy, test", "{:.2%}"),
        "predict_f1": ("F1 of entities, test", "{:.4f}"),
    },
    judged_by=("f1", "accuracy"),
)
TAG = training_command(
    TASK,
    TagArguments,
    main=("text_column_name", "label_column_name"),
    summary=(
        "Fine-tune a model that gives each word a tag: names of entities, parts of speech, chunks; evaluate it and"
        " predict. The options are those of transformers' run_ner.py and TrainingArguments; their older names work too."
    ),
    examples=(
        "whet tag --model_name_or_path distilbert-base-uncased --train_file train.conll --do_train --output_dir out",
        "whet tag run.yaml --task_name pos --label_all_tokens --output_dir out",
    ),
)
COMMANDS = (TAG,)
