"""`whet classify`: the command of text classification, and what its run consists of."""

import json
from collections.abc import Mapping
from typing import Any

from whet.jobs.command import least_is_best, training_command
from whet.jobs.task import HONOURED_BY_CALLS, IN_WINDOWS, Task, lazily, words
from whet.models.loading.heads import SEQUENCE_CLASSIFICATION
from whet.tasks.classify.arguments import LOWER_IS_BETTER, ClassifyArguments, metrics_of


def _usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """metric_name is what the best model is judged by, unless metric_for_best_model says so."""
    name = given.get("metric_for_best_model") or given.get("metric_name")
    by = {} if name is None else {"metric_for_best_model": name}
    return by | least_is_best(*LOWER_IS_BETTER)({**given, **by})


def _sample(job: ClassifyArguments, n_rows: int) -> tuple[str, str]:
    text, label = (job.text_column_names or "text").split(",")[0], job.label_column_name or "label"
    labels = ("0.5", "1.5") if "regression" in (job.problem_type, job.do_regression and "regression") else ("a", "b")
    rows = (json.dumps({text: words(job.max_seq_length), label: labels[n % 2]}) for n in range(n_rows))
    return ".jsonl", "\n".join(rows)


_PREDICT_TAKES = {
    **dict.fromkeys(("base_model_name_or_path", "text_column_names", "text_pair_column_names", "csv_delimiter")),
    **dict.fromkeys(("top_k", "max_seq_length")),
    **IN_WINDOWS,
}
TASK = Task(
    name="classify",
    head=SEQUENCE_CLASSIFICATION,
    read=lazily(__name__, "examples", "read_split"),
    prepare=lazily(__name__, "job", "prepare"),
    sample=_sample,
    takes=(*HONOURED_BY_CALLS, "label_smoothing_factor"),
    predict=lazily(__name__, "job", "predict"),
    predict_takes=_PREDICT_TAKES,
    tables=lazily(__name__, "job", "tables"),
    metrics=metrics_of,
    shown={
        "eval_loss": ("loss", "{:.4f}"),
        "eval_accuracy": ("accuracy", "{:.2%}"),
        "eval_f1_micro": ("F1, micro", "{:.4f}"),
        "eval_f1_macro": ("F1, macro", "{:.4f}"),
        "eval_matthews_correlation": ("Matthews' correlation", "{:.4f}"),
        "eval_pearson": ("Pearson's correlation", "{:.4f}"),
        "eval_spearmanr": ("Spearman's correlation", "{:.4f}"),
        "eval_mse": ("mean squared error", "{:.4f}"),
        "predict_accuracy": ("accuracy, test", "{:.2%}"),
        "predict_pearson": ("Pearson's, test", "{:.4f}"),
    },
    judged_by=("f1_micro", "accuracy", "pearson"),
)
CLASSIFY = training_command(
    TASK,
    ClassifyArguments,
    main=("text_column_names", "label_column_name"),
    summary=(
        "Fine-tune a model that gives texts, or pairs of texts, one label, several labels or a number; evaluate it and"
        " predict. The options are those of transformers' run_classification.py and TrainingArguments; their older"
        " names work too."
    ),
    examples=(
        "whet classify --model_name_or_path distilbert-base-uncased --train_file train.csv --do_train --output_dir out",
        "whet classify run.yaml --metric_name accuracy --load_best_model_at_end --output_dir out",
    ),
    usual=_usual,
)
COMMANDS = (CLASSIFY,)
