"""A run of `whet embed` or `whet rerank`: sentence-transformers' trainer over `whet.Trainer`, judged by its evaluators.

`_TrainerOfCommand` inherits from `whet.Trainer` and a trainer of the library: the loop, losses, samplers, model card
and folder are the library's; padding, checkpoints, signals and guards are whet's.
"""

from __future__ import annotations

import json
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from torch import Tensor
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from whet import console
from whet.config.arguments import TrainingArguments
from whet.config.fields import UPLOAD
from whet.config.rules.schedule import BY_METRIC
from whet.errors import ConfigError, DataError
from whet.hf.arguments import TrainingArguments as TrainerArguments
from whet.hf.record import RecordCallback
from whet.hf.trainer import Trainer
from whet.jobs import hub_upload
from whet.jobs.judging import write
from whet.jobs.predict.trained import write_reading
from whet.jobs.splits import SPLITS
from whet.jobs.task_run import settings_with_sources
from whet.jobs.used_again import UsedAgain
from whet.kernels.random import generators_kept
from whet.log import logger
from whet.models.loading.quiet import quiet
from whet.own_loop.changes import changes
from whet.precision import compare as formats
from whet.precision.device import has_bf16
from whet.store import compare, find
from whet.store.optimizer import OptimizerPart, SchedulePart
from whet.store.state import State
from whet.store.weights import count_weights
from whet.store.write import remove_all
from whet.tasks.embed.arguments import (
    CACHED,
    HONOURED,
    IN_BATCH,
    MAY_CHANGE,
    PRIMARY,
    EmbedArguments,
    PairFields,
    RerankArguments,
)
from whet.tasks.embed.batches import DistinctTexts
from whet.tasks.embed.folders import class_of_folder
from whet.tasks.embed.judging import PairJudge, judge_embedder, judge_reranker
from whet.tasks.embed.models import (
    library,
    load,
    optimized,
    prompts_of,
    require_one_score,
    set_document_prompt,
    set_length,
)
from whet.tasks.embed.pairs import Pairs
from whet.watch import files as output_files
from whet.watch import printing, progress, record, results, run_log, stop
from whet.watch.events import FirstStep

_IDENTITY = "pairs.json"
"""The file of a checkpoint with the settings and the data of its run."""
_CURVE = (
    "loss", "batch_sampler", "mini_batch_size", "mini_batch_num_tokens", "max_seq_length", "matryoshka_dims",
    "pooling_mode", "query_prompt", "document_prompt", "num_hard_negatives", "hard_negatives_model",
    "hard_negatives_margin", "num_negatives", "model_name_or_path",
)  # fmt: skip
"""Settings of the task that change the loss curve."""
_NAMED_ELSEWHERE = {
    "overwrite_output_dir", "do_train", "do_eval", "resume_from_checkpoint", "resume_allow_changes", "warmup_ratio",
    "bf16", "precision", "eval_on_start", "enable_jit_checkpoint", "report_to", "disable_tqdm", "metric_for_best_model",
}  # fmt: skip
"""Settings that the command itself carries out, or hands to the trainer under another name."""
_FIRST = ("anchor", "sentence_A")
"""The columns of a pair's first text."""
_MEASURED = 2000
"""Texts of a column whose lengths are measured."""
_LINE_EVERY_S = 20.0
_SHOWN = {
    "ndcg@10": "NDCG@10", "mrr@10": "MRR@10", "map@100": "MAP@100", "map": "MAP", "recall@1": "recall@1",
    "recall@5": "recall@5", "recall@10": "recall@10", "accuracy": "triplets in order",
    "spearman": "Spearman's correlation", "pearson": "Pearson's correlation",
}  # fmt: skip
"""The metrics that the table at the end shows, if they are there, with their words; the files have all of them."""


def prepare_embed(job: EmbedArguments, args: TrainingArguments, examples: Mapping[str, Pairs]) -> PairRun:
    """Return the run that trains an embedding model on these pairs."""
    losses = library("sentence_transformer.losses")
    name = job.loss or ("CoSENTLoss" if _any(examples).scores is not None else IN_BATCH[0])
    train = examples.get("train")
    if train is not None:
        _require_fitting(name, train, args)
    if name == "CoSENTLoss":
        _require_no_sides(job)
    model = _embedder(job, args)
    if train is not None and name == "CoSENTLoss":
        _encode_alike(model)
    if train is not None and job.num_hard_negatives is not None:
        train = _with_hard_negatives(train, job, args, model)
        examples = {**examples, "train": train}
    query, document = _prompts(model)
    options: dict[str, Any] = {}
    if name == CACHED:
        options = {"mini_batch_size": job.mini_batch_size, "mini_batch_num_tokens": job.mini_batch_num_tokens}
    loss = getattr(losses, name)(model, **options)
    if job.matryoshka_dims is not None:
        loss = losses.MatryoshkaLoss(model, loss, _dims(job.matryoshka_dims, model))
    columns = None if train is None else train.columns()
    prompts = {one: query if one in _FIRST else document for one in columns or {}} if query or document else {}
    judged = examples.get("validation")
    judge = None if judged is None else judge_embedder(judged, model, args.per_device_eval_batch_size)
    plan = _Plan("embed", model, columns, loss, name, judge, prompts)
    return _run(job, args, examples, plan)


def prepare_rerank(job: RerankArguments, args: TrainingArguments, examples: Mapping[str, Pairs]) -> PairRun:
    """Return the run that trains a reranker on these pairs."""
    losses = library("cross_encoder.losses")
    first = _any(examples)
    mined = job.num_hard_negatives is not None
    labelled = first.scores is not None or first.negatives or mined
    name = job.loss or ("BinaryCrossEntropyLoss" if labelled else IN_BATCH[0])
    train = examples.get("train")
    if train is not None:
        if name in IN_BATCH:
            _require_fitting(name, train, args)
        elif not labelled:
            raise _mismatch(train, name, "pairs that do not fit, with a score of 0 or as negatives",
                            "use --loss MultipleNegativesRankingLoss, or mine some: --num_hard_negatives 4 "
                            "--hard_negatives_model MODEL")  # fmt: skip
    model = load("CrossEncoder", job.model_name_or_path, "--model_name_or_path", job=job, trains=args.do_train,
                 use_cpu=args.use_cpu)  # fmt: skip
    require_one_score(model, job.model_name_or_path, "--model_name_or_path")
    set_length(model, job.max_seq_length)
    if train is not None and mined:
        miner = load("SentenceTransformer", str(job.hard_negatives_model), "--hard_negatives_model",
                     use_cpu=args.use_cpu)  # fmt: skip
        train = _with_hard_negatives(train, job, args, miner)
        examples = {**examples, "train": train}
    options: dict[str, Any] = {"num_negatives": job.num_negatives} if name in IN_BATCH else {}
    options |= {"mini_batch_size": job.mini_batch_size} if name == CACHED else {}
    loss = getattr(losses, name)(model, **options)
    columns = None if train is None else train.columns() if name in IN_BATCH else _labelled(train)
    judged = examples.get("validation")
    judge = None if judged is None else judge_reranker(judged, args.per_device_eval_batch_size)
    _, _, prompt = prompts_of(model)  # the model's predictions have it, too
    return _run(job, args, examples, _Plan("rerank", model, columns, loss, name, judge, prompt))


def tables(run: PairRun) -> list[str]:
    """Return the lines with the metrics of the evaluation, before the training and after it."""
    if not run.after:
        return []
    heads = ["before", "after"] if run.before else [""]
    judged_on = run.judge.judged_on if run.judge else ""
    lines = [f"  {f'validation: {judged_on}':<40}" + "".join(f"{head:>9}" for head in heads)]
    before = _shown(run.before)
    for words, value in _shown(run.after).items():
        values = [before[words], value] if before else [value]
        lines.append(f"  {words:<40}" + "".join(f"{one:9.4f}" for one in values))
    return lines


def _shown(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of the table under the words for them; their names begin or end with the similarity."""
    parts = {name: {name, name.partition("_")[2], name.rpartition("_")[0]} for name in metrics}
    return {words: metrics[name] for metric, words in _SHOWN.items() for name in metrics if metric in parts[name]}


def words_of(metric: str) -> str:
    """Return the words for a metric of an evaluator."""
    return next(iter(_shown({metric: 0.0})), metric)


# ---- what is trained ----


@dataclass(frozen=True)
class _Plan:
    """What a run trains with what, in sentence-transformers' objects."""

    task: Literal["embed", "rerank"]
    model: Any
    columns: dict[str, list[Any]] | None
    """None: nothing is trained."""
    loss: Any
    loss_name: str
    judge: PairJudge | None
    """None: nothing is judged."""
    prompts: dict[str, str] | str = field(default_factory=dict)
    """Column -> the text before each of its texts; of a reranker, the text before each pair."""


def _any(examples: Mapping[str, Pairs]) -> Pairs:
    return next(iter(examples.values()))


def _require_fitting(loss: str, pairs: Pairs, args: TrainingArguments) -> None:
    """Raise DataError if the loss cannot learn from these pairs, or ConfigError for a batch without negatives."""
    if (pairs.scores is not None) != (loss == "CoSENTLoss"):
        wants = "pairs with scores" if loss == "CoSENTLoss" else "pairs that belong together, without scores"
        raise _mismatch(pairs, loss, wants, "leave --loss out, or name columns that fit it")
    if loss == "TripletLoss" and len(pairs.negatives) != 1:
        raise _mismatch(pairs, loss, "one negative a row", "add a column with it, or leave --loss out")
    if loss not in IN_BATCH:
        return
    if args.per_device_train_batch_size < 2:
        raise ConfigError(
            what="a batch of one row has no negatives",
            got=f"per_device_train_batch_size={args.per_device_train_batch_size}",
            why=f"{loss} compares a pair with the other rows of its batch",
            fix="use a larger --per_device_train_batch_size, such as 32",
        )
    if len(set(pairs.anchors)) < 2 or len(set(pairs.positives)) < 2:
        raise DataError(
            what=f"{pairs.source}: there is nothing to tell apart",
            got=console.plural(len(pairs), "pair") + ", all with the same first or second text",
            why=f"{loss} learns that a text fits its own query better than others do",
            fix="add pairs with other texts",
        )


def _mismatch(pairs: Pairs, loss: str, wants: str, fix: str) -> DataError:
    has = "scores" if pairs.scores is not None else console.plural(len(pairs.negatives), "negative") + " a row"
    return DataError(what=f"{pairs.source} does not fit the loss", got=f"pairs with {has}",
                     why=f"{loss} needs {wants}", fix=fix)  # fmt: skip


def _embedder(job: EmbedArguments, args: TrainingArguments) -> Any:
    """Return the SentenceTransformer of the run; a plain encoder gets a pooling, and the run says so."""
    name = job.model_name_or_path
    is_plain = Path(name).is_dir() and class_of_folder(Path(name)) is None
    if job.pooling_mode is not None and not is_plain:
        raise ConfigError(
            what="pooling_mode would change nothing here",
            got=job.pooling_mode,
            why="the model is a SentenceTransformer, which has its own pooling, or comes from the hub",
            fix="leave --pooling_mode out, or name the folder of a plain encoder",
        )
    model = load("SentenceTransformer", name, "--model_name_or_path", job=job, trains=args.do_train,
                 use_cpu=args.use_cpu)  # fmt: skip
    if is_plain and job.pooling_mode not in (None, "mean"):
        pooling = library("sentence_transformer.modules").Pooling(model[0].get_embedding_dimension(), job.pooling_mode)
        model = library().SentenceTransformer(modules=[model[0], pooling], device=str(model.device))
    if is_plain:
        printing.show_wrapped(f"{name} is a plain encoder: its vectors are {job.pooling_mode or 'mean'} pooled")
    if job.query_prompt is not None:
        model.prompts["query"] = job.query_prompt
    if job.document_prompt is not None:
        set_document_prompt(model, job.document_prompt)
    set_length(model, job.max_seq_length)
    return model


def _prompts(model: Any) -> tuple[str, str]:
    """Return what comes before queries and before documents; prints it."""
    query, document, _ = prompts_of(model)
    shown = {"query": query, "document": document}
    if query or document:
        printing.show_wrapped("; ".join(f"before each {one}: {text!r}" for one, text in shown.items() if text))
    return query, document


def _require_no_sides(job: EmbedArguments) -> None:
    """Raise ConfigError for prompts of queries and documents, if pairs with scores have neither."""
    given = {name: text for name in ("query_prompt", "document_prompt") if (text := getattr(job, name)) is not None}
    if given:
        raise ConfigError(
            what=f"{' and '.join(given)} would change nothing for pairs with scores",
            got=given,
            why="the texts of a pair with a score are alike: neither is a query, and both are encoded in the same way",
            fix=f"leave {' and '.join(f'--{name}' for name in given)} out, or train queries with their texts, without "
            "a score",
        )


def _encode_alike(model: Any) -> None:
    """Let queries, documents and all other texts begin with the same prompt; prints which prompts that replaces."""
    query, document, other = prompts_of(model)
    if (query, document) != (other, other):
        printing.show_wrapped(
            "both texts of a pair with a score are encoded in the same way, in training and afterwards: "
            + (f"{other!r} comes before queries and documents" if other else "queries and documents have no prompt")
            + f" ({model.prompts} before)"
        )
    model.prompts["query"] = other
    set_document_prompt(model, other)


def _dims(text: str, model: Any) -> list[int]:
    """Return the lengths of vectors, the longest first; raises ConfigError for one that is longer than the model's."""
    found = sorted({int(one) for one in text.split(",")}, reverse=True)
    length = model.get_embedding_dimension()
    if found[0] > length:
        raise ConfigError(
            what="matryoshka_dims are longer than the vectors",
            got=text,
            why=f"the model's vectors have {length} numbers",
            fix=f"use --matryoshka_dims of {length} or less",
        )
    return found


def _with_hard_negatives(pairs: Pairs, job: PairFields, args: TrainingArguments, miner: Any) -> Pairs:
    """Return the pairs with texts that look like an answer, mined by sentence-transformers; prints how many stay."""
    if pairs.scores is not None or pairs.negatives:
        raise ConfigError(
            what="num_hard_negatives would change nothing here",
            got=job.num_hard_negatives,
            why=f"the pairs have {'scores' if pairs.scores is not None else 'negatives'} already",
            fix="leave --num_hard_negatives out",
        )
    from datasets import Dataset

    mine = library("util").mine_hard_negatives
    rows = Dataset.from_dict({"anchor": [*pairs.anchors], "positive": [*pairs.positives]})
    n_wanted = job.num_hard_negatives
    query, document, _ = prompts_of(miner)
    with quiet():
        found = mine(
            rows, optimized(miner), num_negatives=n_wanted, relative_margin=job.hard_negatives_margin,
            output_format="n-tuple", batch_size=args.per_device_eval_batch_size, verbose=False,
            query_prompt=query or None, corpus_prompt=document or None,
        )  # fmt: skip
    names = [name for name in found.column_names if name.startswith("negative")]
    if not len(found):
        raise DataError(
            what=f"{pairs.source}: no pair has so many hard negatives",
            got=f"--num_hard_negatives {n_wanted}, --hard_negatives_margin {job.hard_negatives_margin:g}",
            why="a negative is a second text of another pair whose score is below that of the right one by the margin",
            fix="use fewer, or a smaller margin, or more pairs",
        )
    printing.show_wrapped(
        f"hard negatives: {n_wanted} for each of {len(found):,} pairs; {len(pairs) - len(found):,} pairs without as "
        "many are left out"
    )
    return replace(pairs, anchors=found["anchor"][:], positives=found["positive"][:],
                   negatives=[found[name][:] for name in names])  # fmt: skip


def _labelled(pairs: Pairs) -> dict[str, list[Any]]:
    """Return pairs with labels: those with scores as they are, else 1 for each right text and 0 for each negative."""
    if pairs.scores is not None:
        return {"sentence_A": [*pairs.anchors], "sentence_B": [*pairs.positives], "label": [*pairs.scores]}
    label: dict[tuple[str, str], float] = {}
    for negatives in pairs.negatives:
        label |= dict.fromkeys(zip(pairs.anchors, negatives, strict=True), 0.0)
    label |= dict.fromkeys(zip(pairs.anchors, pairs.positives, strict=True), 1.0)
    return {
        "sentence_A": [anchor for anchor, _ in label],
        "sentence_B": [text for _, text in label],
        "label": [*label.values()],
    }


# ---- the trainer ----


class _TrainerOfCommand(Trainer):
    """whet.Trainer, whose checkpoints also keep what the command was asked for, so that a resume can compare it.

    The encoder's products may run in bf16; losses, and all of an evaluation, stay in float32.
    """

    asked: TrainingArguments
    identity: Mapping[str, Any]
    products = "fp32"
    batches: DistinctTexts | None = None
    """The batches of the training; None: any rows may share one."""
    n_rows = 0
    """Rows that were trained in this process."""
    changed: Mapping[str, str] = types.MappingProxyType({})
    """The settings that are other ones than the checkpoint's, and were allowed to be."""

    def get_batch_sampler(self, *given: Any, **named: Any) -> Any:
        """Return what deals out the batches of the training: in an epoch all of them, whatever texts repeat."""
        library_trainer: Any = super()
        return library_trainer.get_batch_sampler(*given, **named) if self.batches is None else self.batches

    def training_step(self, model: Any, inputs: Any, *given: Any, **named: Any) -> Any:
        """Compute the gradient of a batch as whet.Trainer does, and count its rows."""
        self.n_rows += next(len(one) for one in inputs.values() if isinstance(one, list | Tensor))
        return super().training_step(model, inputs, *given, **named)

    def log(self, logs: dict[str, float], *given: Any, **named: Any) -> None:
        """Log as sentence-transformers does; the speed is that of the rows, and not of batches of full size."""
        if "train_samples_per_second" in logs:
            logs["train_samples_per_second"] = round(self.n_rows / logs["train_runtime"], 3)
        super().log(logs, *given, **named)

    def choose_products(self) -> str:
        """Choose the format of the products in training, and return what people should know of it."""
        asked, said = self.asked.precision, ""
        if asked == "auto":
            asked, said = self._kept_products() or "", " (auto: as in the checkpoint)"
            if not asked:
                asked, said = self._faster_products()
        self.products = asked
        self._compute_in(asked)
        return f"precision: {asked}{said}"

    def _kept_products(self) -> str | None:
        folder = _to_resume(self.asked)
        path = None if folder is None else folder / compare.ARGUMENTS
        found = json.loads(path.read_text("utf-8")).get("precision") if path is not None and path.is_file() else None
        return found if found in ("fp32", "bf16") else None

    def _faster_products(self) -> tuple[str, str]:
        """Return bf16 if it is clearly faster here on the first rows, and what was measured."""
        encoder = self.model.transformers_model
        if self.asked.bf16 is False:
            return "fp32", ""
        if not has_bf16(self.args.device):
            return "fp32", " (auto: this GPU has no bf16)"
        if changes(self.model) is None:
            return "fp32", " (auto: whet does not change this model)"
        if not formats.is_worth_timing(encoder.num_parameters(exclude_embeddings=True)):
            return "fp32", " (auto: the model is too small to gain)"
        rows: Any = self.train_dataset

        def timed(n_rows: int, *, fp32: bool) -> formats.Times:
            batch = self.data_collator([rows[n] for n in range(n_rows)])
            plain, half = (partial(self._pass_in, products, batch) for products in ("fp32", "bf16"))
            return formats.alternate(plain if fp32 else None, half, time.perf_counter, self.args.device)

        self.model.train()
        times = formats.with_rows_that_fit(min(self.args.train_batch_size, len(rows)), timed)
        return times.chosen, f" (auto: {times.in_short})"

    def _pass_in(self, products: str, batch: Any) -> None:
        """Run a forward and a backward pass in this format, which leaves no gradient."""
        self._compute_in(products)
        try:
            with generators_kept():
                self.compute_loss(self.model, dict(self._prepare_inputs(batch))).backward()
        finally:
            self.model.zero_grad(set_to_none=True)

    def _compute_in(self, products: str) -> None:
        optimized(self.model, products)
        self._encoders = None

    def evaluation_loop(self, *given: Any, **named: Any) -> Any:
        """Evaluate as sentence-transformers does, in float32."""
        if self.products == "fp32":
            return super().evaluation_loop(*given, **named)
        self._compute_in("fp32")
        try:
            return super().evaluation_loop(*given, **named)
        finally:
            self._compute_in(self.products)

    def _compare_with(self, facts: Mapping[str, Any], name: str) -> None:
        """Compare the settings of the command, and refuse changes that were not allowed, when the states are loaded."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore both from the checkpoint; settings that may change keep the values of this run."""
        folder = None if checkpoint is None else Path(checkpoint)
        self.changed = {} if folder is None else compare.require_same_settings(self.asked, folder, MAY_CHANGE)
        for text in self.changed.values():
            logger.warning("resuming from %s with a change that was allowed: %s", Path(str(checkpoint)).name, text)
        super()._load_optimizer_and_scheduler(checkpoint)

    def _load_states(self, optimizer: State, scheduler: State) -> None:
        if not self.changed:
            super()._load_states(optimizer, scheduler)
            return
        inner, changed = getattr(self.optimizer, "optimizer", self.optimizer), self.changed.keys()
        OptimizerPart(inner, self.model, changed).load_state(optimizer)
        SchedulePart(inner, self.lr_scheduler, changed).load_state(scheduler)

    def _write_model(self, state_dict: Any, folder: Path) -> None:
        super()._write_model(state_dict, folder)
        if self._saving_to is not None and self.args.should_save:
            asked = replace(self.asked, precision=self.products)
            (folder / compare.ARGUMENTS).write_text(asked.to_json_string() + "\n", "utf-8")
            (folder / _IDENTITY).write_text(json.dumps(self.identity, indent=2) + "\n", "utf-8")


class _Lines(TrainerCallback):
    """A line for each entry of the log, and one every twenty seconds; notes for signals that steps are worth saving."""

    def __init__(self) -> None:
        self._began_s = self._last_s = time.perf_counter()
        self._first = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began_s = self._last_s = time.perf_counter()
        self._first = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        stop.mark_step_done()
        if time.perf_counter() - self._last_s >= _LINE_EVERY_S:
            self._show(state, {"epoch": state.epoch})

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **_: Any) -> None:
        if "loss" in logs:
            self._show(state, logs)

    def on_evaluate(self, args: Any, state: Any, control: Any, *, metrics: Mapping[str, Any], **_: Any) -> None:
        found = {name.removeprefix("eval_"): value for name, value in metrics.items()}
        if 0 < state.global_step < state.max_steps and (shown := [*_shown(found).items()][:3]):
            figures = ", ".join(f"{words} {value:.4f}" for words, value in shown)
            printing.show([f"step {state.global_step}/{state.max_steps}  {figures}"])

    def _show(self, state: Any, logs: Mapping[str, Any]) -> None:
        self._last_s = time.perf_counter()
        done = state.global_step - self._first
        left_s = (self._last_s - self._began_s) / max(done, 1) * (state.max_steps - state.global_step)
        known = {name: logs[name] for name in ("epoch", "loss", "learning_rate") if logs.get(name) is not None}
        printing.show(progress.step_line(state, known | {"eta_s": left_s}, console.width()).splitlines())


def _trainer(job: PairFields, args: TrainingArguments, plan: _Plan, identity: Mapping[str, Any]) -> Any:
    """Return the trainer of sentence-transformers over whet.Trainer, with these settings."""
    from datasets import Dataset

    one, folder = (
        ("SentenceTransformer", "sentence_transformer") if plan.task == "embed" else ("CrossEncoder", "cross_encoder")
    )
    own_args = getattr(library(f"{folder}.training_args"), f"{one}TrainingArguments")
    kind: Any = types.new_class(
        f"{one}Trainer", (_TrainerOfCommand, getattr(library(f"{folder}.trainer"), f"{one}Trainer"))
    )
    args_kind: Any = dataclass(types.new_class(f"{one}TrainingArguments", (TrainerArguments, own_args)))
    names = HONOURED - _NAMED_ELSEWHERE - {*UPLOAD}  # an unknown one is refused by name
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    asked = args.metric_for_best_model
    best = (plan.judge.primary if plan.judge else "") if asked in (None, PRIMARY) else str(asked).removeprefix("eval_")
    is_followed = args.load_best_model_at_end or args.save_strategy == "best" or args.lr_scheduler_type in BY_METRIC
    sampler = job.batch_sampler or ("no_duplicates" if plan.loss_name in IN_BATCH else "batch_sampler")
    given |= {
        "batch_sampler": sampler,
        "prompts": plan.prompts or None,
        "report_to": [*args.report_to] or "none",
        "disable_tqdm": True,
        "precision": "fp32",  # of what autocast reaches: the encoder's products are changed in the model
        "warmup_steps": args.warmup_steps or args.warmup_ratio,
        "save_on_signal": args.enable_jit_checkpoint is not False,
        "metric_for_best_model": f"eval_{best}" if is_followed else None,
        "greater_is_better": True,
        "eval_strategy": args.eval_strategy if args.do_train else "no",
    }
    trainer = kind(
        model=plan.model,
        args=args_kind(**given),
        train_dataset=None if plan.columns is None else Dataset.from_dict(plan.columns),
        loss=plan.loss,
        evaluator=plan.judge and plan.judge.evaluator,
        callbacks=[_Lines()],
    )
    for shown in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(shown)
    trainer.asked, trainer.identity = args, identity
    return trainer


def _deal_out(trainer: Any, columns: Mapping[str, Sequence[Any]], loss: str) -> None:
    """Choose the batches of the training, and print what is unusual about them; ConfigError if there are none."""
    args, texts = trainer.args, [one for one in columns.values() if isinstance(one[0], str)]
    n_rows, size, apart = len(texts[0]), args.train_batch_size, args.batch_sampler == "no_duplicates"
    if apart:
        trainer.batches = DistinctTexts(texts, size, drop_last=args.dataloader_drop_last, seed=args.seed)
    if args.dataloader_drop_last and not (len(trainer.batches) if apart else n_rows // size):
        raise ConfigError(
            what="no batch is full, so that nothing would be trained",
            got=f"--dataloader_drop_last with batches of {size}, {console.plural(n_rows, 'row')}",
            why="it leaves out each batch with fewer rows" + "; rows with a text in common share no batch" * apart,
            fix="leave --dataloader_drop_last out, or use a smaller --per_device_train_batch_size",
        )
    if apart and (said := trainer.batches.notes(needs_others=loss in IN_BATCH and len(texts) == 2)):
        printing.show_wrapped("; ".join(said))


def _facts(job: PairFields, args: TrainingArguments, plan: _Plan) -> dict[str, Any]:
    """Return what the record of the run begins with, in the words of the command."""
    command = record.running_command()
    sources = {} if command is None else command.sources
    return {
        "command": None if command is None else command.text,
        "task": plan.task,
        "settings": settings_with_sources(job, args, sources),
        "machine": record.machine(),
        "model": {
            "name": job.model_name_or_path,
            "parameters": count_weights(plan.model),
            "trainable": count_weights(plan.model, trained=True),
        },
        "data": None if plan.columns is None else {"rows": len(next(iter(plan.columns.values()))), "tokens": None},
    }


# ---- the run ----


def _run(job: PairFields, args: TrainingArguments, examples: Mapping[str, Pairs], plan: _Plan) -> PairRun:
    train = examples.get("train")
    identity = {
        "settings": {name: getattr(job, name) for name in _CURVE if hasattr(job, name)} | {"loss": plan.loss_name},
        "data": None if train is None else _digest(train),
    }
    _require_same(args, identity)
    with _without_bars():
        trainer = _trainer(job, args, plan, identity)
    if plan.columns is not None:
        _deal_out(trainer, plan.columns, plan.loss_name)
    if plan.judge is not None and plan.judge.note:
        printing.show_wrapped(f"validation: {plan.judge.note}")
    _say_what_is_cut(plan)
    logger.info("loss %s, %s", plan.loss_name, plan.model)
    return PairRun(trainer, args, examples, job, plan.judge, facts=_facts(job, args, plan), reading=_reading(train))


def _reading(train: Pairs | None) -> dict[str, Any]:
    """Return which columns the model has learnt from, under the names of `whet predict`."""
    columns = None if train is None else train.read
    if columns is None:
        return {}
    return {"text_column_names": columns.anchor, "text_pair_column_names": columns.positive}


def _digest(pairs: Pairs) -> str:
    """Return a checksum of every text and score, in their order."""
    found = xxhash.xxh3_128()
    for texts in (pairs.anchors, pairs.positives, *pairs.negatives):
        for text in texts:
            found.update(text.encode("utf-8", "surrogatepass") + b"\0")
    found.update(np.asarray(pairs.scores or (), dtype=np.float64).tobytes())
    return found.hexdigest()


def _to_resume(args: TrainingArguments) -> Path | None:
    """Return the checkpoint that the training will resume from; None: it begins."""
    asked = args.resume_from_checkpoint
    if not args.do_train or not asked or asked == "no":
        return None
    return find.would_resume(Path(args.output_dir)) if asked == "auto" else Path(str(asked))


def _require_same(args: TrainingArguments, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError if the checkpoint to resume from is of other settings or other data."""
    folder = _to_resume(args)
    path = None if folder is None else folder / _IDENTITY
    if path is None or not path.is_file():
        return
    before, now = json.loads(path.read_text("utf-8")), json.loads(json.dumps(identity))
    old = before.get("settings", {})
    changed = [
        f"{name}: {old.get(name)} -> {value}" for name, value in now["settings"].items() if old.get(name) != value
    ]
    other_data = before.get("data") != now["data"] and "data" not in args.resume_allow_changes
    if changed or other_data:
        allow = ",".join([*args.resume_allow_changes, "data"])
        raise ConfigError(
            what=f"{path.parent} is a checkpoint of another run",
            got="; ".join([*changed, *(["the pairs of the training are others"] if other_data else [])]),
            why="a run resumes with the settings and the data that it began with: its loss curve would be neither's",
            fix="use those, or another --output_dir" + (f"; or --resume_allow_changes {allow}" if not changed else ""),
        )


def _say_what_is_cut(plan: _Plan) -> None:
    """Print how many texts are longer than the model reads, by column; of many, the first are measured."""
    model, columns = plan.model, plan.columns
    length = model.max_seq_length
    if columns is None or length is None or not hasattr(model.tokenizer, "_tokenizer"):
        return
    texts = {name: (values[:_MEASURED],) for name, values in columns.items() if isinstance(values[0], str)}
    if plan.task == "rerank":  # a row holds both texts
        first, *others = texts
        texts = {f"{first} and {name}": (*texts[first], *texts[name]) for name in others}
    cut = []
    for name, columns_of_row in texts.items():
        rows = model.tokenizer(*columns_of_row, truncation=False, padding=False, verbose=False)["input_ids"]
        if n_long := sum(len(row) > length for row in rows):
            cut.append(f"{n_long:,} of {len(rows):,} {name} texts")
    if cut:
        printing.show_wrapped(f"longer than {length} tokens, and cut there: {', '.join(cut)} (--max_seq_length)")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Run the block without the bars of the libraries, which would cut the lines of the run."""
    from datasets import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    card: Any = library("base.model_card")
    were_off, bar = are_progress_bars_disabled(), card.tqdm
    card.tqdm = partial(bar, disable=True)
    disable_progress_bars()
    try:
        with quiet():
            yield
    finally:
        card.tqdm = bar
        if not were_off:
            enable_progress_bars()


class _Uploads(TrainerCallback):
    """Hands each checkpoint to the upload of the run."""

    def __init__(self, upload: Any) -> None:
        self._upload = upload

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        self._upload.on_save(args, state, control, folder=folder)


@dataclass
class PairRun:
    """A run of one of the two commands, and what it has measured; `whet.jobs.run` shows it."""

    trainer: Any
    args: TrainingArguments
    examples: Mapping[str, Pairs]
    """By split."""
    asked: PairFields
    judge: PairJudge | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the record of the run begins with."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """How the trained model is used: kept next to it, for `whet predict`."""
    before: dict[str, float] = field(default_factory=dict)
    """Metrics of the model before the training, without a prefix."""
    after: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    worst: Sequence[str] = ()
    upload: hub_upload.Upload | None = None
    """What uploads its checkpoints, and the trained model after it."""
    _files: Sequence[str] = ()
    """What was written of the examples of the validation split."""

    def uploads_by(self, upload: hub_upload.Upload) -> None:
        """Have each checkpoint handed to this Upload."""
        self.upload = upload
        self.trainer.add_callback(_Uploads(upload))

    def run(self) -> dict[str, Any]:
        """Evaluate, train, evaluate again; write the model and every result; return all metrics."""
        stop.defer_signals()
        with run_log.written_to(self.args.output_dir), self._recorder.ends(self.metrics):
            return self._run()

    @cached_property
    def _before(self) -> UsedAgain:
        return UsedAgain(self.args.output_dir)

    @cached_property
    def _recorder(self) -> record.Recorder:
        is_other = not self.args.do_train and self._before.judging(self.asked)
        more = {record.OTHER_MODEL: True} if is_other else {}
        return record.Recorder(self.args.output_dir, {**self.facts, **more})

    def _run(self) -> dict[str, Any]:
        args = self.args
        with printing.before_a_table(), _without_bars():
            if args.do_eval and args.do_train:
                self.before = self._evaluate()
                self._require_metric()
                stop.check(lambda name: name)
            if args.do_train:
                printing.show_wrapped(self.trainer.choose_products())
                recording = RecordCallback(recorder=self._recorder)
                recording.count_rows = lambda: self.trainer.n_rows
                self.trainer.add_callback(recording)
                self.trainer.add_callback(self._before.after_first_step())
                if args.overwrite_output_dir and _to_resume(args) is None:  # until then the run could be refused
                    self.trainer.add_callback(FirstStep(partial(remove_all, Path(args.output_dir))))
                trained = self.trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
                self._save(dict(trained.metrics))
            if args.do_eval:
                self.after = self._evaluate()
                counts = self._list_worst()
                found = {f"eval_{name}": value for name, value in self.after.items()}
                found |= {f"start_{name}": value for name, value in self.before.items()}
                if not args.do_train:  # else its callback has recorded it
                    self._recorder.evaluation(0, found)
                self._record("validation", found | counts | {"eval_samples": len(self.examples["validation"])})
                if args.do_train:
                    with output_files.stored("README.md cannot be written", Path(args.output_dir)):
                        self.trainer.create_model_card()  # with the metrics of the trained model
        return self.metrics

    def _evaluate(self) -> dict[str, float]:
        """Return the metrics of the evaluator, without a prefix."""
        found = self.trainer.evaluate()
        names = ("runtime", "per_second", "preparation_time")
        return {
            name.removeprefix("eval_"): float(value)
            for name, value in found.items()
            if name.startswith("eval_") and not name.endswith(names)
        }

    def _require_metric(self) -> None:
        """Raise ConfigError if the evaluation lacks the metric that the training follows."""
        wanted = self.trainer.args.metric_for_best_model
        if wanted is not None and wanted.removeprefix("eval_") not in self.before:
            raise ConfigError(
                what="metric_for_best_model names no metric of this evaluation",
                got=self.args.metric_for_best_model,
                why=f"of these pairs and this model it computes {', '.join(self.before)}",
                fix="use one of these in --metric_for_best_model, or leave it out",
            )

    def _list_worst(self) -> dict[str, float]:
        """Write what the last evaluation found of each example, and the worst; return their numbers."""
        if self.judge is None:
            return {}
        folder, on_error = Path(self.args.output_dir), self.args.save_error_policy
        written = write(self.judge.examples(self.trainer.model), "eval", self.judge.unit, folder, on_error)
        self.worst, self._files = written.lines, written.files
        left_out = {f"eval_{self.judge.unit}_left_out": self.judge.n_left_out} if self.judge.n_left_out else {}
        return {**written.counts, **left_out}

    def _save(self, metrics: dict[str, Any]) -> None:
        with self._before.saving_model():
            self.trainer.save_model()
        if self._before.is_as_before:
            metrics |= results.read(Path(self.args.output_dir), "train")
        self._record("train", metrics | {"train_samples": len(self.examples["train"])})
        self.trainer.save_state()
        write_reading(Path(self.args.output_dir), self.reading, self.args.save_error_policy)
        folder = self.args.output_dir
        again = {"do_train": False, "model_name_or_path": folder, **hub_upload.switched_off(self.args)}
        stop.record_progress(hub_upload.trained_in(folder, self.upload), **(again if self.args.do_eval else {}))

    def _record(self, split: str, metrics: dict[str, Any]) -> None:
        prefix = SPLITS[split].prefix
        left_out = self.examples[split].left_out
        if left_out.n_rows:
            metrics[f"{prefix}_pairs_left_out"] = left_out.n_rows
        on_error = self.args.save_error_policy
        files = left_out.write(Path(self.args.output_dir) / f"{prefix}_left_out.json", on_error)
        files += self._files if split == "validation" else ()
        results.save(self.args.output_dir, prefix, metrics, files=files, on_error=on_error)
        self.metrics |= metrics
