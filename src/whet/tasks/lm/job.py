"""A run of causal language modelling over examples that have been read: rows, model, training, perplexity.

Texts become rows of tokens with labels, -100 for what is not learnt.
With --loss dpo the rows are pairs of completions, with the log-probabilities of the model before training.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from tokenizers import Encoding
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from whet.config.arguments import TrainingArguments
from whet.console import plural
from whet.data.batch import Batch
from whet.data.store import RowStore
from whet.engine.engine import Engine
from whet.engine.evaluate import Evaluation
from whet.engine.prepare import Ready
from whet.errors import DataError
from whet.hardware import memory
from whet.jobs.judging import Judged, Judgement
from whet.jobs.left_out import LeftOut
from whet.jobs.task_run import (
    Part,
    TaskRun,
    as_trained,
    engine_of,
    require_teacher_reads,
    source_of,
    taught_by,
)
from whet.jobs.tokenising import progress
from whet.jobs.tokenising.cache import Cache, Key
from whet.jobs.tokenising.encode import each, require_memory, row_length, rust_tokenizer, text_batches
from whet.log import logger
from whet.models import adapters
from whet.models.loading.heads import CAUSAL_LM
from whet.models.loading.load import load_model, load_tokenizer
from whet.models.loading.tokenizer_check import rust_errors
from whet.objectives.base import IGNORED, Objective
from whet.objectives.own_loss import OwnLoss
from whet.objectives.preferences import Preference, preferences
from whet.store import compare
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.examples import Examples, is_chat
from whet.tasks.lm.messages import Spans
from whet.tasks.lm.render import DAY, Rendered, reads_clock, rendered

LENGTH = "length"


@dataclass(frozen=True)
class TextRows(RowStore):
    """Rows of tokens that know their texts: one row a text, several of a long one, or blocks of several texts."""

    text_of: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """(rows,) int64: the text, or the block, that each row is of; it does not decrease."""
    texts: Sequence[str] | None = None
    """None: the rows are blocks, or nobody reads their texts."""
    places: Sequence[str] = ()
    begins: Sequence[int] = ()
    """Where in each text its completion begins, in characters."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """The examples that none of the rows is of: `skip_bad` has left them out."""


class PairRows:
    """A data set of pairs: two rows of tokens each, the chosen completion first."""

    column_names = (LENGTH,)

    def __init__(self, rows: TextRows) -> None:
        self.rows = rows
        self.reference: np.ndarray | None = None
        """Log-probabilities of the completions by the reference model, (pairs, 2) float64."""

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, pair: int | str) -> Any:
        """Return the two rows of a pair; by the name of the column, how many tokens each pair has."""
        if isinstance(pair, str):
            return self.rows.lengths.reshape(-1, 2).sum(1)
        if not 0 <= pair < len(self):
            raise IndexError(pair)
        both = [self.rows[2 * pair], self.rows[2 * pair + 1]]
        return {name: [row[name] for row in both] for name in both[0]}

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the tokens as named arrays; the reference follows from them."""
        return self.rows.arrays()


def pair_rows(maker: RowMaker, name: str, found: Examples) -> PairRows:
    """Return the pairs of a split as rows of tokens; a prompt stands in both rows of its pair."""
    values = [(prompt, one) for prompt, chosen, rejected in found.values for one in (chosen, rejected)]
    places = [place for place in found.places for _ in range(2)]
    inputs = [one for one in found.inputs for _ in range(2)]
    return PairRows(maker.rows(name, Examples(found.source, "completion", values, places, found.left_out, inputs)))


def collate_pairs(pairs: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return pairs as tables (pairs, 2, places), padded on the right; padding is masked and has no label."""

    def table(name: str, fill: int) -> Tensor:
        rows = [torch.as_tensor(row) for pair in pairs for row in pair[name]]
        return pad_sequence(rows, batch_first=True, padding_value=fill).long().unflatten(0, (len(pairs), 2))

    ids = table("input_ids", 0)
    lengths = torch.tensor([[len(row) for row in pair["input_ids"]] for pair in pairs])
    mask = torch.arange(ids.shape[-1]) < lengths[..., None]
    return {"input_ids": ids, "labels": table("labels", IGNORED), "attention_mask": mask.long()}


def add_reference(engine: Engine, pairs: PairRows) -> None:
    """Compute the log-probabilities by the model as it is before training, without its new adapter.

    One pass over the pairs replaces a reference model in every step; ranks share it. It computes in the precision of
    the training, so that the rewards of the first step are 0.
    """
    started_s = time.perf_counter()
    wrapped = adapters.names_of(engine.model) and hasattr(engine.model, "disable_adapter")
    model: Any = engine.model
    with model.disable_adapter() if wrapped else nullcontext():
        found = [output["log_probs"].cpu().numpy() for _, output in engine.forward_batches(pairs)]
    pairs.reference = np.concatenate(engine.sync.in_order(found, lambda one: isinstance(one, np.ndarray)))
    seconds = time.perf_counter() - started_s
    logger.info("reference log-probabilities of %d pairs: %.1f s", len(pairs), seconds)


def weights_of_reference(model: nn.Module) -> str:
    """Return a checksum of the weights that the reference computes with: all of them, or those under an adapter."""
    return compare.frozen_under_adapters(model) or compare.digest_of_weights(model.named_parameters())


_LONGEST_UNASKED = 1024
"""Tokens of the longest row, if no max_length is asked for."""


def prepare(job: LmArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> TaskRun:
    """Tokenise, load the model and build its engine; raises whatever cannot work, before any training."""
    source = source_of(job)
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    model = load_model(source, CAUSAL_LM, trained=not args.do_train)
    length = row_length(job.max_length, tokenizer, model, most=_LONGEST_UNASKED, flag="max_length")
    require_teacher_reads(job, tokenizer, length, flag="max_length")
    completion_only, cache = job.completion_only_loss is not False, Cache(rows="rows", overwrite=job.overwrite_cache)
    by_preference = job.loss == "dpo"
    maker = RowMaker(
        tokenizer, length, cache, job.packing, completion_only, 2 if by_preference else 1,
        job.preprocessing_num_workers, job.assistant_only_loss, job.skip_bad,
    )  # fmt: skip
    if reads_clock(tokenizer) and any(is_chat(found.values[0]) for found in examples.values()):
        logger.info("the chat template prints today's date: rows have %s on every day, so that the run can resume", DAY)
    parts = {}
    for name, found in examples.items():
        rows = pair_rows(maker, name, found) if by_preference else maker.rows(name, found)
        left_out = rows.rows.left_out if isinstance(rows, PairRows) else rows.left_out
        parts[name] = Part(rows, LmJudge(rows, tokenizer), len(rows), left_out)
    model = as_trained(model, job, args, CAUSAL_LM, tokenizer)
    made = collate_pairs if by_preference else collate
    data = [part.rows for part in parts.values()]

    def objective(ready: Ready) -> Objective:
        own = taught_by(ready, job, CAUSAL_LM)
        if not by_preference:
            if isinstance(own, OwnLoss):
                own.counts_hits = True
            return own
        return preferences(own, Preference(beta=job.beta, label_smoothing=job.label_smoothing))

    engine = engine_of(
        model,
        args,
        parts,
        tokenizer,
        data_collator=made,
        objective=objective,
        before_steps=partial(_add_references, data) if by_preference else None,
    )
    reading = {"max_length": length}
    return TaskRun(
        engine,
        args,
        parts,
        pipeline_tag="text-generation",
        reading=reading,
        asked=job,
        compares_with_start=by_preference,
    )


def _add_references(data: Sequence[PairRows], engine: Engine) -> None:
    """Give each pair the log-probabilities of the model as it is before the first step."""
    for rows in data:
        add_reference(engine, rows)
    objective: Any = engine.objective
    objective.preference = replace(objective.preference, reference=weights_of_reference(engine.model))


_LAYOUT = 3
"""Raise this when the same input shall give other rows, or the file looks different."""

_Row = tuple[np.ndarray, np.ndarray]
"""Ids and labels."""
_SHORTER_TEXTS = 'write it as rows of a JSON lines file, a document each: {"text": "..."}'


@dataclass(frozen=True)
class RowMaker:
    """What makes the rows of a run, and where they are kept."""

    tokenizer: Any
    max_length: int
    cache: Cache
    packing: bool | None = None
    completion_only: bool = True
    group: int = 1
    """How many rows stay together: if one of them has no token to learn, all of them are left out."""
    n_threads: int | None = None
    """As in `encode.each`."""
    assistant_only: bool | None = None
    """For rows of messages, in place of `completion_only`; None: the same."""
    skip_bad: bool = False
    """Whether conversations that the chat template does not show are left out."""

    def rows(self, name: str, examples: Examples) -> TextRows:
        """Return the rows of the examples: from the cache if it has them. `name` is the split's, for the log.

        Those of `train` are without their texts, which nobody reads.
        """
        blocks = examples.form == "lines" if self.packing is None else self.packing
        shown = _as_one_text(examples, blocks)
        by_turn = self.assistant_only if examples.form == "messages" else None
        only = self.completion_only if by_turn is None else by_turn
        made = rendered(shown, self.tokenizer, completion_only=only, skip_bad=self.skip_bad, group=self.group)
        made.left_out.log(name, "conversation" if self.group == 1 else "pair")
        options = {"max_length": self.max_length, "blocks": blocks, "special": made.with_special, "end": made.with_end}
        options |= {} if self.group == 1 else {"group": self.group}
        key = Key(_LAYOUT, self.tokenizer, {"lm": True, "form": examples.form, **options})
        key.add_texts(made.texts)
        for span in made.spans:
            key.add_numbers([] if span is None else np.asarray(span).flatten())
        end = self._end()
        if end is None and made.with_end:
            logger.warning(
                "%s: the tokenizer has no eos_token, so the model does not learn where a text ends",
                name,
            )
        self._warn(name, made)
        key.add_numbers([-1 if end is None else end])
        arrays = self.cache.take(key.hex(), lambda: self._make(made, examples, blocks=blocks))
        found = TextRows.from_arrays(arrays)
        self._describe(name, found, dict(zip(("cut", "empty"), arrays["counts"].tolist(), strict=True)))
        if not len(found):
            raise _nothing_to_learn(name, examples, self.max_length)
        begins = [0 if not span else span[0][0] for span in made.spans]
        texts = None if blocks or name == "train" else made.texts
        return replace(
            found, text_of=arrays["text_of"], texts=texts, places=made.places, begins=begins,
            left_out=examples.left_out + made.left_out,
        )  # fmt: skip

    def _warn(self, name: str, made: Rendered) -> None:
        """Log what the chat template leaves out of the rows."""
        if made.endless:
            logger.warning(
                "%s: the chat template ends no turn of the assistant, so the model does not learn where an answer ends",
                name,
            )
        if made.not_shown:
            logger.warning(
                "%s: fields of messages that the chat template does not show: %s", name, ", ".join(made.not_shown)
            )

    def _end(self) -> int | None:
        return self.tokenizer.eos_token_id

    def _make(self, made: Rendered, examples: Examples, *, blocks: bool) -> Mapping[str, np.ndarray]:
        tokens = self._tokens(made)
        n_cut = 0
        if blocks:
            tokens = _cut(_joined(tokens), self.max_length)
            text_of = np.arange(len(tokens))
        elif examples.form in ("lines", "text"):
            parts = [_cut(one, self.max_length) for one in tokens]
            tokens = [part for of_text in parts for part in of_text]
            text_of = np.repeat(np.arange(len(parts)), [len(of_text) for of_text in parts])
        else:
            n_cut = sum(len(one[0]) > self.max_length for one in tokens)
            tokens = [(ids[: self.max_length], labels[: self.max_length]) for ids, labels in tokens]
            text_of = np.arange(len(tokens))
        rows = [n for group in _groups(tokens, self.group) if all(_is_learnt(tokens[n]) for n in group) for n in group]
        counts = np.asarray([n_cut, len(tokens) - len(rows)])
        return _store([tokens[n] for n in rows]).arrays() | {"counts": counts, "text_of": text_of[rows]}

    def _tokens(self, made: Rendered) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return ids and labels of each text."""
        rust, end = rust_tokenizer(self.tokenizer), self._end()
        require_memory(made.texts, memory.available_bytes(), fix=_SHORTER_TEXTS)
        spans = iter(made.spans)
        batches = [(batch, list(islice(spans, len(batch)))) for batch in text_batches(made.texts)]

        def encode(given: tuple[list[str], list[Spans | None]]) -> list[tuple[np.ndarray, np.ndarray]]:
            batch, of_batch = given
            with rust_errors(f"a text among these: {batch[0][:60]!r} ..."):
                encodings = rust.encode_batch(batch, add_special_tokens=made.with_special)
            count(sum(map(len, batch)))
            return [_labelled(one, span) for one, span in zip(encodings, of_batch, strict=True)]

        with progress.reported(sum(map(len, made.texts))) as count:
            found = list(chain.from_iterable(each(batches, encode, self.n_threads)))
        if end is not None and made.with_end:
            found = [_ended(ids, labels, end) for ids, labels in found]
        return found

    def _describe(self, name: str, rows: RowStore, counts: Mapping[str, int]) -> None:
        """Log what the split holds, and what of it is not learnt."""
        n_targets = int((rows.tokens["labels"] != IGNORED).sum()) if len(rows) else 0
        logger.info(
            "%s: %d rows of up to %d tokens, %d tokens, %d of them learnt",
            name, len(rows), self.max_length, int(rows.cu_seqlens[-1]), n_targets,
        )  # fmt: skip
        if counts["cut"]:
            logger.warning(
                "%s: %s longer than max_length %d, and cut", name, plural(counts["cut"], "row"), self.max_length
            )
        if counts["empty"]:
            logger.warning("%s: %s without a token to learn, left out", name, plural(counts["empty"], "row"))


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return rows below each other, padded on the right; padding is masked and has no label, so that any id will do."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    labels, mask = torch.full_like(ids, IGNORED), torch.zeros_like(ids)
    for n, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[n, :length] = torch.as_tensor(row["input_ids"])
        labels[n, :length] = torch.as_tensor(row["labels"])
        mask[n, :length] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def _as_one_text(examples: Examples, blocks: bool) -> Examples:
    """Return the examples; plain text is one text in blocks, and else each line that is not blank is a text.

    A tokenizer reads the lines of a block together: it may begin a text in a way of its own, or join line ends.
    """
    if examples.form != "lines":
        return examples
    if blocks:
        return Examples(examples.source, "text", ["".join(examples.values)], examples.places[:1])
    kept = [(line.strip("\r\n"), place) for line, place in zip(examples.values, examples.places, strict=True)
            if not line.isspace()]  # fmt: skip
    return Examples(examples.source, "text", [line for line, _ in kept], [place for _, place in kept])


def _labelled(encoding: Encoding, spans: Spans | None) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and labels: a token is learnt if one of its characters is.

    Some tokenizers cut spaces off the offsets: a token of spaces alone then stands empty at its own end.
    """
    ids = np.asarray(encoding.ids, dtype=np.int32)
    if spans is None:
        return ids, ids.astype(np.int64)
    begin, end = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    learnt = np.zeros(len(ids), dtype=bool)
    for first, last in spans:
        empty_inside = (begin == end) & (end <= last)
        learnt |= (end > first) & (((begin < last) & (end > begin)) | empty_inside)
    return ids, np.where(learnt, ids, IGNORED)


def _ended(ids: np.ndarray, labels: np.ndarray, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the row with the end-of-text token, which is learnt."""
    if len(ids) and ids[-1] == end:
        return ids, np.append(labels[:-1], end)
    return np.append(ids, np.int32(end)), np.append(labels, end)


def _groups(tokens: Sequence[_Row], size: int) -> Iterator[range]:
    """Yield which rows stay together."""
    return (range(first, min(first + size, len(tokens))) for first in range(0, len(tokens), size))


def _is_learnt(row: _Row) -> bool:
    return bool((row[1][1:] != IGNORED).any())


def _joined(tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    ids, labels = zip(*tokens, strict=True)
    return np.concatenate(ids), np.concatenate(labels)


def _cut(tokens: tuple[np.ndarray, np.ndarray], length: int) -> list[tuple[np.ndarray, np.ndarray]]:
    ids, labels = tokens
    return [(ids[first : first + length], labels[first : first + length]) for first in range(0, len(ids), length)]


def _store(tokens: Sequence[tuple[np.ndarray, np.ndarray]]) -> RowStore:
    lengths = [len(ids) for ids, _ in tokens]
    empty = np.empty(0, dtype=np.int64)
    return RowStore(
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        tokens={
            "input_ids": np.concatenate([ids for ids, _ in tokens] or [empty.astype(np.int32)]),
            "labels": np.concatenate([labels for _, labels in tokens] or [empty]),
        },
    )


def _nothing_to_learn(name: str, examples: Examples, max_length: int) -> DataError:
    return DataError(
        what=f"{examples.source}: no row has a token to learn",
        got=f"{len(examples)} examples, rows of up to {max_length} tokens",
        why=f"the loss of {name} is a mean over tokens that follow another one",
        fix="use longer texts, a larger --max_length if prompts fill it, or, without --loss dpo, "
        "--completion_only_loss false",
    )


_STRETCH = 16
"""Targets of the worst stretch of a text."""


@dataclass(frozen=True)
class LmJudge:
    """Judges a language model on one split, by the mean loss of its targets.

    Perplexity is that of the tokens alone, without smoothed labels and the routers' loss.

    Of each text it keeps the loss, and the stretch of tokens that the model expects least: what the text says there,
    and the tokens that the model finds most likely in their places. Of pairs: which completion it prefers.
    """

    rows: TextRows | PairRows
    tokenizer: Any

    def while_training(self) -> dict[str, Any]:
        """Leave evaluations in a training to the loss and the targets it finds: nobody reads all logits."""
        return {}

    def judge(self, engine: Engine, prefix: str) -> Judgement:
        """Return the metrics of the engine's model on the split, and its texts or pairs."""
        found: list[dict[str, np.ndarray]] = []

        def evaluation(engine: Engine) -> dict[str, float]:
            objective: Any = engine.objective
            of_each = objective.by_pair if isinstance(self.rows, PairRows) else objective.by_target

            def batches() -> Iterator[tuple[Batch, Any]]:
                for batch, output in engine.forward_batches(self.rows):
                    first, second = (one.detach().cpu().numpy() for one in of_each(output, batch))
                    found.append({"first": first, "second": second})
                    yield batch, output

            names = engine.args.label_names
            judged = Evaluation(objective=objective, sync=engine.sync, keeps=False, label_names=names).run(batches())
            return dict(judged.metrics or {})

        metrics = dict(engine.evaluate(self.rows, prefix, evaluation))
        of_all = engine.sync.in_order(found, _is_pair_of_arrays)
        first, second = (np.concatenate([one[name] for one in of_all]) for name in ("first", "second"))
        if isinstance(self.rows, PairRows):
            return Judgement(metrics, _judged_pairs(self.rows.rows, first, second))
        metrics |= {f"{prefix}_perplexity": perplexity(float(first.mean(dtype=np.float64)))}
        return Judgement(metrics, _judged_texts(self.rows, first, second, self.tokenizer))


def _is_pair_of_arrays(one: Any) -> bool:
    return isinstance(one, dict) and one.keys() == {"first", "second"} and all(
        isinstance(each, np.ndarray) for each in one.values()
    )  # fmt: skip


def _judged_texts(rows: TextRows, losses: np.ndarray, best: np.ndarray, tokenizer: Any) -> list[Judged]:
    """Return the texts of a split, or its blocks, from the losses and likeliest tokens of all targets in order."""
    labels = rows.tokens["labels"]
    is_target = labels != IGNORED
    is_target[rows.cu_seqlens[:-1]] = False
    (places,) = is_target.nonzero()
    assert len(places) == len(losses), "every target has a loss"
    text_of = np.repeat(rows.text_of, rows.lengths)[places]
    texts = range(len(rows.texts)) if rows.texts is not None else rows.text_of.tolist()
    judged = []
    for n, (begin, end) in zip(texts, np.searchsorted(text_of, [[n, n + 1] for n in texts]), strict=True):
        if rows.texts is not None:
            one = Judged(row=rows.places[n], shown={"text": rows.texts[n]})
        else:
            row = int(np.searchsorted(rows.text_of, n))
            ids = rows.tokens["input_ids"][rows.cu_seqlens[row] : rows.cu_seqlens[row + 1]]
            one = Judged(row=f"block {n + 1}", shown={"text": _text_of(tokenizer, ids)})
        judged.append(_with_loss(one, losses[begin:end], labels[places[begin:end]], best[begin:end], tokenizer))
    return judged


def _with_loss(one: Judged, losses: np.ndarray, labels: np.ndarray, best: np.ndarray, tokenizer: Any) -> Judged:
    """Return a text with what is known of its targets; as it is if it has none."""
    if not len(losses):
        return one
    width = min(_STRETCH, len(losses))
    sums = np.concatenate([[0.0], np.cumsum(np.nan_to_num(losses.astype(np.float64), nan=_HUGE, posinf=_HUGE))])
    first = int(np.argmax(sums[width:] - sums[:-width]))
    worst = slice(first, first + width)
    loss = float(losses.mean(dtype=np.float64))
    more = {"perplexity": perplexity(loss), "targets": len(losses)}
    return replace(
        one,
        expected=_text_of(tokenizer, labels[worst]),
        predicted=_text_of(tokenizer, best[worst]),
        loss=loss,
        badness=(loss,),
        of_predictions=more,
        of_errors=more,
    )


_HUGE = 1e6
"""The loss of a target whose loss is not finite, where the worst stretch is looked for."""


def _text_of(tokenizer: Any, ids: np.ndarray) -> str:
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _judged_pairs(rows: TextRows, losses: np.ndarray, margins: np.ndarray) -> list[Judged]:
    """Return the pairs of a split, from the loss of each that has rows and its margin of rewards."""
    assert rows.texts is not None
    row_of = {int(text) // 2: n for n, text in enumerate(rows.text_of[::2])}
    judged = []
    for pair in range(len(rows.texts) // 2):
        begin, both = rows.begins[2 * pair], rows.texts[2 * pair : 2 * pair + 2]
        chosen, rejected = (text[begin:] for text in both)
        one = Judged(row=rows.places[2 * pair], shown={"text": both[0][:begin]}, expected=chosen)
        if (n := row_of.get(pair)) is not None:
            margin, wrong = float(margins[n]), not margins[n] > 0
            more = {"rejected": rejected, "margin": margin}
            one = replace(
                one,
                predicted=rejected if wrong else chosen,
                probability=float(np.exp(-np.logaddexp(0.0, -margin))),
                loss=float(losses[n]),
                badness=(-margin,),
                wrong=wrong,
                of_predictions=more,
                of_errors=more,
            )
        judged.append(one)
    return judged


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss; infinity where a float ends, NaN of what is no number."""
    return math.inf if loss >= math.log(1e300) else math.exp(loss)
