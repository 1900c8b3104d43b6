"""`whet embed`, `whet rerank` and `whet search`: their options, and what their runs consist of."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whet.config.command_line import Command
from whet.config.rules.schedule import BY_METRIC, WITHOUT_WARMUP
from whet.jobs.command import training_command
from whet.jobs.task import Needs, Task, lazily
from whet.models.loading.heads import EMBEDDING, SEQUENCE_CLASSIFICATION
from whet.tasks.embed.arguments import (
    MAY_CHANGE,
    PRIMARY,
    RUN_RULES,
    SIMILARITIES,
    EmbedArguments,
    RerankArguments,
    SearchArguments,
    metrics_of,
    rerank_metrics_of,
)


def _usual(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """In-batch negatives want batches of some size; a short run has ten lines of its log."""
    usual: dict[str, Any] = {
        "per_device_train_batch_size": 32, "per_device_eval_batch_size": 32, "warmup_ratio": 0.1, "logging_steps": 0.1
    }  # fmt: skip
    schedule = given.get("lr_scheduler_type")
    if given.get("warmup_steps") is not None or schedule in WITHOUT_WARMUP:
        del usual["warmup_ratio"]
    if given.get("load_best_model_at_end") or given.get("save_strategy") == "best" or schedule in BY_METRIC:
        usual["metric_for_best_model"] = PRIMARY
    found = {name: value for name, value in usual.items() if given.get(name) is None}
    if schedule in BY_METRIC:  # of each metric here more is better
        found["lr_scheduler_kwargs"] = {"mode": "max", **(given.get("lr_scheduler_kwargs") or {})}
    return found


def _is_of(kind: str) -> Any:
    """Return whether a folder is of this class of sentence-transformers."""

    def knows(folder: Path) -> bool:
        from whet.tasks.embed.folders import kind_of_folder

        return kind_of_folder(folder) == kind

    return knows


_SHARED: dict[str, Any] = {
    "rules": RUN_RULES,
    "read": lazily(__name__, "pairs", "read_split"),
    "tables": lazily(__name__, "job", "tables"),
    "shown": {"train_samples_per_second": ("pairs a second", "{:,.2f}")},
    "by_engine": False,
    "may_change": MAY_CHANGE,
    "predict_takes": {
        **dict.fromkeys(("text_column_names", "text_pair_column_names", "csv_delimiter")),
        **dict.fromkeys(("corpus_file", "max_seq_length")),
        "top_k": Needs("corpus_file", "it counts texts of a corpus; without one a row has a vector or a score"),
    },
}
EMBED_TASK = Task(
    name="embed",
    head=EMBEDDING,
    prepare=lazily(__name__, "job", "prepare_embed"),
    predict=lazily(__name__, "search", "predict_embed"),
    metrics=metrics_of,
    judged_by=(
        PRIMARY,
        *(f"{one}_ndcg@10" for one in SIMILARITIES),
        *(f"spearman_{one}" for one in SIMILARITIES),
        *(f"{one}_accuracy" for one in SIMILARITIES),
    ),
    knows=_is_of("SentenceTransformer"),
    **_SHARED,
)
RERANK_TASK = Task(
    name="rerank",
    head=SEQUENCE_CLASSIFICATION,
    prepare=lazily(__name__, "job", "prepare_rerank"),
    predict=lazily(__name__, "search", "predict_rerank"),
    metrics=rerank_metrics_of,
    judged_by=(PRIMARY, "ndcg@10", "spearman"),
    knows=_is_of("CrossEncoder"),
    **_SHARED,
)
TASKS = (EMBED_TASK, RERANK_TASK)
EMBED = training_command(
    EMBED_TASK,
    EmbedArguments,
    main=("loss", "anchor_column_name", "positive_column_name", "validation_split_percentage", "max_seq_length"),
    summary=(
        "Train a model that turns texts into vectors, near each other if the texts belong together, from pairs, pairs"
        " with scores or triplets. The result is a folder of sentence-transformers. The options are those of its"
        " training arguments."
    ),
    examples=(
        "whet embed --model_name_or_path MODEL --train_file pairs.csv --validation_split_percentage 10 --do_train"
        " --do_eval --output_dir out",
        "whet search out --corpus documents.csv --query 'Who found it?'",
    ),
    usual=_usual,
)
RERANK = training_command(
    RERANK_TASK,
    RerankArguments,
    main=("loss", "anchor_column_name", "positive_column_name", "num_hard_negatives", "hard_negatives_model"),
    summary=(
        "Train a model that scores how well a text fits a query (a CrossEncoder), from pairs with scores, triplets, or"
        " pairs with negatives that an embedding model mines."
    ),
    examples=(
        "whet rerank --model_name_or_path MODEL --train_file scored.csv --do_train --output_dir out",
        "whet rerank --model_name_or_path MODEL --train_file pairs.csv --num_hard_negatives 4"
        " --hard_negatives_model EMBEDDER --do_train --output_dir out",
    ),
    usual=_usual,
)
SEARCH = Command(
    name="whet search",
    summary="Show the texts of a file that fit a query best, with a model that whet embed trained.",
    usage="MODEL --corpus FILE --query TEXT [--OPTION VALUE ...]",
    examples=(
        "whet search out --corpus documents.csv --query 'Who found it?' --top_k 3",
        "whet search out --reranker reranker --corpus notes.txt --query 'Who found it?' --query 'When?'",
    ),
    parts=(SearchArguments,),
    lone="model",
    run=lazily(__name__, "search", "run_search"),
)
COMMANDS = (EMBED, RERANK, SEARCH)
