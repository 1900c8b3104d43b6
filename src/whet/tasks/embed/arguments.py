"""The options of `whet embed`, `whet rerank` and `whet search`, and which options of a training they honour.

The trainers are those of sentence-transformers (`whet.tasks.embed.job`), which take some of the settings that the
engine of the other commands takes. `HONOURED` names them; any other that is set is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whet.config.arguments import TrainingArguments
from whet.config.fields import UPLOAD
from whet.config.ranks import here
from whet.config.rules.ranges import Rule, at_least, broken_if, excludes, is_given, is_set, only_with, within
from whet.config.settings import checked, options_of
from whet.errors import ConfigError, Problem
from whet.jobs.fields import JobFields
from whet.jobs.rules import delimiter_is_a_character
from whet.optional import extra, is_installed

PACKAGE = "sentence_transformers"
INSTALL = extra("embed")

HONOURED = frozenset({
    "output_dir", "overwrite_output_dir", "do_train", "do_eval", "resume_from_checkpoint", "resume_allow_changes",
    "seed", "use_cpu", "precision", "bf16", "per_device_train_batch_size", "gradient_accumulation_steps",
    "num_train_epochs", "max_steps", "dataloader_drop_last", "learning_rate", "lr_scheduler_type",
    "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "optim_args", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_epsilon", "max_grad_norm", "max_nonfinite_steps", "memory_limit_gb", "eval_strategy",
    "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size", "save_strategy", "save_steps",
    "save_only_model", "save_error_policy", "save_total_limit", "enable_jit_checkpoint", "load_best_model_at_end",
    "metric_for_best_model", "greater_is_better", "logging_strategy", "logging_steps", "logging_first_step",
    "log_level", "report_to", "run_name", "logging_dir", "disable_tqdm", *UPLOAD,
})  # fmt: skip
"""Settings of a training that these commands carry out."""
MAY_CHANGE = (
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "precision", "data",
)  # fmt: skip
"""What may be another in a resumed run, by `resume_allow_changes`: `_TrainerOfCommand` gives these their effect."""
PRIMARY = "primary_metric"
"""The metric that sentence-transformers judges a model by: NDCG@10 of a search, Spearman's correlation of scores."""
SEARCH_METRICS = (
    "ndcg@10",
    "mrr@10",
    "map@100",
    *(f"{name}@{k}" for name in ("recall", "accuracy") for k in (1, 5, 10)),
)
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

EmbedLoss = Literal["MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss", "CoSENTLoss", "TripletLoss"]
RerankLoss = Literal[
    "BinaryCrossEntropyLoss", "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
]  # fmt: skip
CACHED = "CachedMultipleNegativesRankingLoss"
IN_BATCH = ("MultipleNegativesRankingLoss", CACHED)
"""Losses for which the other rows of a batch are wrong answers."""


def metrics_of(_: Any) -> tuple[str, ...]:
    """Return the metrics that evaluations of `whet embed` may compute; the data decides which."""
    of_search = (f"{one}_{metric}" for one in SIMILARITIES for metric in SEARCH_METRICS)
    of_scores = (f"{name}_{one}" for one in SIMILARITIES for name in ("spearman", "pearson"))
    return (PRIMARY, *of_search, *of_scores, *(f"{one}_accuracy" for one in SIMILARITIES))


def rerank_metrics_of(_: Any) -> tuple[str, ...]:
    """Return the metrics that evaluations of `whet rerank` may compute."""
    return (PRIMARY, "ndcg@10", "mrr@10", "map", "spearman", "pearson")


def _is_honoured(job: Any, args: TrainingArguments) -> Problem | None:
    """Refuse each setting of the training that sentence-transformers' trainer would not carry out."""
    options = options_of(TrainingArguments)
    given = {
        name: options[name].shown(getattr(args, name))
        for name in options
        if name not in HONOURED and is_set(name, args)
    }
    return _not_honoured(
        given, "its trainer is that of sentence-transformers, and not the engine of the other commands"
    )


def _job_is_honoured(job: Any, args: TrainingArguments) -> Problem | None:
    """Refuse settings of a task that need the engine of the other commands."""
    given = {name: getattr(job, name) for name in _OF_ENGINE if is_set(name, job)}
    return _not_honoured(given, "it runs sentence-transformers, which loads the model and reads its texts itself")


_OF_ENGINE = ("config_name", "tokenizer_name", "overwrite_cache", "seeds", "auto", "dry_run", "test_file")
"""Settings of all tasks that need the engine."""


def _not_honoured(given: dict[str, object], why: str) -> Problem | None:
    if not given:
        return None
    flags = " and ".join(f"--{name}" for name in given)
    return Problem(
        what=f"{' and '.join(given)} would change nothing here", got=given, why=why, fix=f"leave {flags} out"
    )


def _one_process_trains(*_: Any) -> Problem | None:
    n_ranks = here().n_ranks
    if n_ranks == 1:
        return None
    return Problem(
        what="several ranks cannot train this model together",
        got=f"{n_ranks} ranks",
        why="negatives come from the batch of one process",
        fix="start one process; --loss CachedMultipleNegativesRankingLoss allows batches of any size",
    )


def require_package() -> None:
    """Raise ConfigError with what installs sentence-transformers, if it is missing; does not import it."""
    if not is_installed(PACKAGE):
        raise ConfigError(
            what=f"the package {PACKAGE!r} is missing",
            got="no sentence-transformers in this environment",
            why="its models, losses and evaluators are what whet embed, rerank and search work with",
            fix=f"run: pip install {INSTALL}",
        )


def _columns_go_together(job: Any) -> Problem | None:
    named = {name: getattr(job, name) for name in ("anchor_column_name", "positive_column_name")}
    missing = [name for name, value in named.items() if not value]
    if len(missing) != 1:
        return None
    return Problem(
        what="one column of a pair is named, and not the other",
        got={name: value for name, value in named.items() if value},
        why="a pair has two texts",
        fix=f"add --{missing[0]} NAME, or leave both out if the data has usual names",
    )


_RULES: tuple[Rule, ...] = (
    _columns_go_together,
    excludes(
        "scores_or_negatives",
        "score_column_name",
        ("negative_column_names",),
        why="a row is a pair with a score, or a pair with texts that do not fit",
    ),
    within("validation_split_percentage", "(0, 100)", "both parts have rows", 10),
    excludes(
        "validation_comes_from_one_place",
        "validation_split_percentage",
        ("validation_file", "dataset_name"),
        why="it takes the rows for the evaluation out of train_file",
    ),
    at_least("max_seq_length", 3, "a row holds a word and special tokens"),
    at_least("mini_batch_size", 1, "a mini-batch has a text"),
    at_least("num_hard_negatives", 1, "mining finds one text at least"),
    only_with(
        "negatives_are_mined",
        "num_hard_negatives",
        ("hard_negatives_model", "hard_negatives_margin"),
        why="they say how negatives are mined",
        fix="add --num_hard_negatives 1, or leave them out",
    ),
    within("hard_negatives_margin", "[0, 1)", "it is a share of the score of the right text", 0.05),
    delimiter_is_a_character,
)
RUN_RULES: tuple[Rule, ...] = (
    _is_honoured,
    _job_is_honoured,
    _one_process_trains,
    broken_if(
        "products_have_a_format_of_vectors",
        ("precision",),
        lambda _, args: args.precision in ("fp16", "int8"),
        what="precision is a format that these models do not train in",
        why="their encoder's products run in fp32 or bf16",
        fix="use --precision bf16, or auto, which measures it",
    ),
    broken_if(
        "more_is_better",
        ("greater_is_better",),
        lambda _, args: args.greater_is_better is False,
        what="greater_is_better is false, and the worst model would be taken for the best",
        why="of each metric that these commands compute, more is better",
        fix="leave --greater_is_better out",
    ),
    broken_if(
        "a_batch_has_negatives",
        ("loss", "per_device_train_batch_size"),
        lambda job, args: job.loss in IN_BATCH and args.do_train and args.per_device_train_batch_size < 2,
        what="a batch of one row has no negatives",
        why="the other rows of the batch are what this loss compares with",
        fix="use a larger --per_device_train_batch_size, such as 32",
    ),
)


_MINI_BATCH = 32
_SIZES: Mapping[str, Any] = {"mini_batch_size": _MINI_BATCH, "mini_batch_num_tokens": None}
"""Settings of mini-batches, with their defaults; rerankers have the first alone."""


def _cached(loss: Callable[[Any], Any], *sizes: str) -> Sequence[Rule]:
    """Return the rules of these settings of mini-batches."""
    flags = " and ".join(f"--{name}" for name in sizes)

    def given(job: Any) -> list[str]:
        return [name for name in sizes if getattr(job, name) != _SIZES[name]]

    return (
        broken_if(
            "mini_batches_are_of_the_cached_loss",
            ("loss", *sizes),
            lambda job: loss(job) != CACHED and bool(given(job)),
            what="mini-batches are given to a loss without them",
            why=f"{CACHED} runs a large batch in small parts; other losses run it at once",
            fix=f"add --loss {CACHED}, or leave {flags} out",
        ),
        broken_if(
            "mini_batches_have_one_size",
            sizes,
            lambda job: len(given(job)) > 1,
            what="the size of a mini-batch is given twice",
            why="a mini-batch holds so many texts, or so many tokens",
            fix=f"keep one of {flags}",
        ),
    )


@checked(headings={"anchor_column_name": "Pairs", "loss": "Loss", "num_hard_negatives": "Negatives"}, rules=_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class PairFields(JobFields):
    """What both commands are asked for; each adds its losses."""

    train_file: str | None = None
    """File with the pairs to train on: CSV, JSON lines, JSON or Parquet, or a SQuAD file, whose questions are paired
    with their contexts. A row has two texts that belong together, and perhaps one that does not (a negative), or a
    score."""
    validation_file: str | None = None
    """File with the pairs to evaluate on, in any format of train_file."""
    validation_split_percentage: float | None = None
    """Take this share of train_file for the evaluation, drawn by seed 42: all rows of a text in the first column stay
    together. Needs do_eval."""
    anchor_column_name: str | None = None
    """Column with the first text of a pair: the query, or one of two texts with a score. null: a usual name, such as
    anchor, query, question or sentence1; or the first of two columns. The run prints the choice."""
    positive_column_name: str | None = None
    """Column with the second text. A list of texts gives several pairs. null: a usual name, or the second column."""
    negative_column_names: str | None = None
    """Columns with texts that do not fit the anchor, separated by commas. null: negative, negative_1 and so on, if the
    data has them."""
    score_column_name: str | None = None
    """Column with how well two texts fit: 0 to 1, or 0 to 5, which is divided by 5. null: a usual name, such as score,
    similarity, is_duplicate or label, or the only column of numbers next to two texts."""
    csv_delimiter: str | None = None
    """Character between the columns of CSV files. null: the one that cuts the header into most columns."""

    batch_sampler: Literal["no_duplicates", "batch_sampler"] | None = None
    """Which rows may share a batch. no_duplicates: those without a text in common, which would be taken for a negative
    of its own pair. batch_sampler: any. null: no_duplicates for losses that take negatives from the batch."""
    mini_batch_size: int = _MINI_BATCH
    """With CachedMultipleNegativesRankingLoss: texts that run at a time. The batch itself may then be as large as you
    like, with the same result and little memory."""
    max_seq_length: int | None = None
    """Longest text in tokens; longer ones are cut, and the run counts them. null: the model's own length."""

    num_hard_negatives: int | None = None
    """Mine this many texts for each pair of the training that look like an answer and are none
    (sentence_transformers.util.mine_hard_negatives). Pairs without enough of them are left out. null: none are
    mined."""
    hard_negatives_model: str | None = None
    """Embedding model that mines: a folder, or a name on the hub. null: the model that is trained; whet rerank needs
    one."""
    hard_negatives_margin: float = 0.05
    """A text is a negative if its score is this share below that of the right text: nearer ones may be right."""


@checked(
    headings={"pooling_mode": "Vectors"},
    rules=(
        *_cached(lambda job: job.loss, *_SIZES),
        at_least("mini_batch_num_tokens", 1, "a mini-batch has a token"),
        broken_if(
            "dimensions_fall",
            ("matryoshka_dims",),
            lambda job: any(
                not one.strip().isdecimal() or not int(one) for one in (job.matryoshka_dims or "1").split(",")
            ),
            what="matryoshka_dims are no lengths of vectors",
            why="the loss is computed for the first so many numbers of a vector",
            fix="write them as --matryoshka_dims 384,256,128,64",
        ),
    ),
)
@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedArguments(PairFields):
    """Which embedding model learns which pairs."""

    loss: EmbedLoss | None = None
    """Loss of sentence-transformers. null: CoSENTLoss for pairs with scores, else MultipleNegativesRankingLoss, for
    which the other rows of a batch are negatives."""
    mini_batch_num_tokens: int | None = None
    """With the cached loss: mini-batches hold as many texts as have this many tokens together. null:
    mini_batch_size."""
    matryoshka_dims: str | None = None
    """Train vectors whose first so many numbers are vectors, too (MatryoshkaLoss around the loss): lengths, separated
    by commas. null: the full length alone."""
    pooling_mode: Literal["mean", "cls", "max", "lasttoken"] | None = None
    """How the hidden states of a plain encoder become a vector. null: mean. A SentenceTransformer keeps its own."""
    query_prompt: str | None = None
    """Text that comes before each query, such as "query: "; the model's folder keeps it. Not for pairs with scores.
    null: the model's own."""
    document_prompt: str | None = None
    """Text that comes before each text that is searched, such as "passage: ". Not for pairs with scores. null: the
    model's own, which it may call document, passage or corpus."""


@checked(
    rules=(
        *_cached(lambda job: job.loss, "mini_batch_size"),
        at_least("num_negatives", 1, "a query is compared with one text at least"),
        broken_if(
            "something_mines",
            ("num_hard_negatives", "hard_negatives_model"),
            lambda job: job.num_hard_negatives is not None and not job.hard_negatives_model,
            what="hard negatives have no model that mines them",
            why="texts are found by their vectors, and a reranker has none",
            fix="add --hard_negatives_model MODEL, such as the output folder of whet embed",
        ),
    ),
)
@dataclass(frozen=True, kw_only=True, slots=True)
class RerankArguments(PairFields):
    """Which reranker learns which pairs."""

    loss: RerankLoss | None = None
    """Loss of sentence-transformers. null: BinaryCrossEntropyLoss for scores and for pairs with negatives, else
    MultipleNegativesRankingLoss, which takes negatives from the batch."""
    num_negatives: int | None = 4
    """With MultipleNegativesRankingLoss: texts of the batch, drawn at random, that each query is compared with. null:
    all."""


@checked(
    headings={"model": "Search"},
    rules=(
        is_given(
            "names_a_model", "model", what="no model is named", why="its vectors are compared",
            fix="name the output folder of whet embed: whet search out --corpus FILE --query TEXT",
        ),
        is_given(
            "names_a_corpus", "corpus", what="no file is named", why="its texts are searched",
            fix="name it: --corpus FILE",
        ),
        broken_if(
            "asks_something", ("query",), lambda asked: not [one for one in asked.query if one.strip()],
            what="there is no query", why="texts are ordered by how well they fit one", fix='add --query "TEXT"',
        ),
        at_least("top_k", 1, "at least one text is shown"),
        at_least("per_device_eval_batch_size", 1, "a batch has a text"),
    ),
)  # fmt: skip
@dataclass(frozen=True, kw_only=True, slots=True)
class SearchArguments:
    """Which texts are searched for what."""

    model: str = field(default="", metadata={"required": True})
    """Embedding model: the output folder of whet embed, another folder of sentence-transformers, or a name on the hub.
    Comes first, with or without its flag."""
    corpus: str = field(default="", metadata={"required": True})
    """File with the texts that are searched: plain text, a line each (.txt), CSV, JSON lines, JSON or Parquet."""
    query: Sequence[str] | str = field(default=(), metadata={"required": True, "kind": tuple[str, ...]})
    """What is searched for. Repeat the flag for several."""
    text_column_names: str | None = None
    """Column of the corpus with the text. null: a usual name, or the only column."""
    reranker: str | None = None
    """Reranker with one label that orders what was found: the output folder of whet rerank, another CrossEncoder, or a
    name on the hub. null: the order of the vectors."""
    top_k: int = 5
    """Texts to show for each query, best first."""
    per_device_eval_batch_size: int = 32
    """Texts at once. More take more memory."""
