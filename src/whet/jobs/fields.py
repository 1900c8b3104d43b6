"""The fields that the commands of all tasks share, with their rules: which model, which data, how it is trained."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from whet.config.aliases import refused
from whet.config.settings import checked, printable
from whet.jobs.rules import JOB_RULES
from whet.jobs.splits import SPLITS

Pooling = Literal["mean", "max"]
"""How the logits of several windows become one."""


_NOT_HONOURED = {
    "use_fast_tokenizer": refused(
        "whet reads only tokenizers of the `tokenizers` library, which are the fast ones", True
    ),
    "use_auth_token": refused("set HF_TOKEN, or use --token", False, None),
}
"""Flags of transformers' scripts that whet does not honour."""


@checked(headings={"model_name_or_path": "Model", "dataset_name": "Data"}, rules=JOB_RULES, refused=_NOT_HONOURED)
@dataclass(frozen=True, kw_only=True, slots=True)
class JobFields:
    """What every task's run is asked for; a task adds its own fields and rules."""

    model_name_or_path: str = field(default="", metadata={"required": True})
    """Pretrained model: a folder, or a name on the hub. Weights are read from safetensors files only."""
    config_name: str | None = None
    """Take the model's configuration from this folder or hub name instead."""
    tokenizer_name: str | None = None
    """Take the tokenizer from this folder or hub name instead."""
    resize_token_embeddings: bool | None = None
    """Give the model rows for tokens of the tokenizer that its embedding tables have none for; they begin near the mean
    of the others and are trained, with lora_r too. null: for tokens that were added to the tokenizer. true: for any, as
    a new vocabulary has. false: such a tokenizer is refused."""
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
    """Dataset of the hub, such as squad or imdb. Use this or files, not both."""
    dataset_config_name: str | None = None
    """Configuration of that dataset, if it has several."""
    train_split_name: str = "train"
    """Split of the dataset to train on: its name, or a part of it such as train[:90%]."""
    validation_split_name: str = "validation"
    """Split of the dataset to evaluate on: its name, or a part of one such as train[90%:]."""
    test_split_name: str = "test"
    """Split of the dataset that do_predict reads."""
    train_file: str | None = None
    """File with the examples to train on: CSV, JSON lines, JSON or Parquet."""
    validation_file: str | None = None
    """File with the examples to evaluate on, in any format of train_file."""
    test_file: str | None = None
    """File with the examples to predict, in any format of train_file."""
    seeds: int = 1
    """Train this many models one after the other, with seed, seed + 1 and so on, each in seed-S of output_dir. The best
    one by metric_for_best_model (null: the task's own metric) is kept in output_dir; the results have mean and standard
    deviation. Needs do_eval."""
    report_html: bool = True
    """At the end, write report.html to output_dir: results, worst examples, curves and settings on one page."""
    skip_bad: bool = False
    """Leave bad examples out instead of ending the run. The results count them, the log names the first ones, and
    train_left_out.json (eval, predict) lists each with its reason. A file that cannot be read ends the run."""
    max_train_samples: int | None = None
    """Use only this many of the first examples for training. null: all."""
    max_eval_samples: int | None = None
    """Use only this many of the first examples for evaluation. null: all."""
    max_predict_samples: int | None = None
    """Use only this many of the first examples for prediction. null: all."""
    lora_r: int | None = None
    """Train low-rank pairs of this rank next to chosen layers, and a new head, instead of all weights (LoRA, through
    peft). The output folder then holds the adapter; whet merge folds it into the model. null: train all weights."""
    lora_alpha: int = 32
    """With lora_r: the pairs' results are multiplied by lora_alpha / lora_r."""
    lora_dropout: float = 0.05
    """With lora_r: dropout of what the pairs read."""
    lora_target_modules: str | None = None
    """With lora_r: names of the layers that get a pair, separated by commas, or all-linear. null: those that peft
    chooses for the model's family, mostly queries and values."""
    use_rslora: bool = False
    """With lora_r: multiply by lora_alpha / sqrt(lora_r) (Kalajdzievski 2023), for large ranks."""
    use_dora: bool = False
    """With lora_r: learn the length of each weight's columns apart (DoRA, Liu et al. 2024). Takes more time."""
    load_in_8bit: bool = False
    """With lora_r: keep the frozen weights of linear layers in 8 bits, a quarter of their memory, with a scale for each
    output channel. Their products and the pairs stay in the precision of the run. For CPUs."""
    load_in_4bit: bool = False
    """The same in 4 bits, an eighth of their memory, with a scale for each 64 numbers (NF4, Dettmers et al. 2023). Less
    exact, and slower."""
    moe_experts: int | None = None
    """Give every moe_every-th feed-forward part of the model this many experts before the training. Each begins as a
    copy of the part (upcycling), so that the model computes what it did. null: the model as it is."""
    moe_top_k: int | None = None
    """With moe_experts: experts that compute each token, 1 or 2. null, here and below: what the model has whose experts
    are trained further, and for new experts 1."""
    moe_every: int | None = None
    """With moe_experts: every so many blocks, the feed-forward part gets experts. null: 2."""
    moe_capacity_factor: float | None = None
    """With moe_experts: in training, an expert takes at most this many times its even share of the tokens of a
    sequence, such as 1.25. Tokens above it are dropped: they pass the layer unchanged, and the log counts them. null:
    no token is dropped."""
    moe_aux_loss_coef: float | None = None
    """With moe_experts: weight of the balance loss, which spreads tokens evenly over the experts. null: 0.01."""
    moe_z_loss_coef: float | None = None
    """With moe_experts: weight of the z loss, which keeps the routers' logits small. null: 0.001."""
    teacher_model: str | None = None
    """Model that was trained for the same task, with the same tokenizer and labels: a folder, or a name on the hub.
    The model learns its probabilities next to the labels (distillation, Hinton et al. 2015). null: labels alone."""
    distillation_temperature: float = 2.0
    """With teacher_model: what the logits of both models are divided by. Higher: more of what the teacher thinks of
    wrong answers."""
    distillation_alpha: float = 0.5
    """With teacher_model: its share of the loss, from above 0 to 1; the labels have the rest."""
    dry_run: bool = False
    """Print what the training would take, its memory by part, and end: no weights are read, and nothing is written but
    the cache of tokens. Needs do_train."""
    auto: bool = False
    """Find what makes this run fastest here without changing its result, and run it so: how a step is split into
    micro-batches, threads, cores, ranks on this machine, the allocator, and recomputation if the memory demands it. The
    best by forecast take real steps, one after the other. The choice is kept for runs of the same shape. For CPUs."""
    auto_budget_s: float = 60.0
    """With auto: seconds for the trials."""
    auto_ranks: int | None = None
    """With auto: the most ranks that may be started on this machine. 1: none are tried. null: as many as it has NUMA
    nodes, or two for each if they have many cores."""
    auto_again: bool = False
    """With auto: try again although the choice of an earlier run is kept, or although the run is a short one."""
    overwrite_cache: bool = False
    """Tokenize again even if the tokens of this data are cached."""
    preprocessing_num_workers: int | None = None
    """Threads that tokenize. null: one for each core that this process may use."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON, the token masked."""
        return printable(self)


def file_of(job: JobFields, split: str) -> Path | None:
    """Return the file of the split `train`, `validation` or `test`; None if it comes from a data set."""
    named = getattr(job, SPLITS[split].file)
    return None if named is None else Path(named)


def limit_of(job: JobFields, split: str) -> int | None:
    """Return how many of the split's first examples are read; None: all."""
    return getattr(job, SPLITS[split].limit)
