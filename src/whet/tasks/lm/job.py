"""A run of causal language modelling over examples that have been read: rows, model, training, files.

With --loss dpo the rows are pairs of completions, with the log-probabilities of the model before training.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from whet.config.arguments import TrainingArguments
from whet.data.store import RowStore
from whet.engine.engine import Engine
from whet.engine.prepare import Ready
from whet.jobs.job import Job, Part, engine_of, model_card
from whet.jobs.lora.adapt import prepared
from whet.jobs.sources import source_of
from whet.jobs.teacher import require_reads, taught
from whet.jobs.tokenising.cache import Cache
from whet.jobs.tokenising.encode import check_max_length
from whet.log import logger
from whet.models import adapters
from whet.models.loading.heads import CAUSAL_LM
from whet.models.loading.load import load_model, load_tokenizer, max_positions
from whet.objectives.base import IGNORED, Objective
from whet.objectives.own_loss import OwnLoss
from whet.objectives.preferences import Preference, preferences
from whet.store import compare
from whet.tasks.lm.arguments import LmArguments
from whet.tasks.lm.examples import Examples
from whet.tasks.lm.judge import LmJudge
from whet.tasks.lm.rows import RowMaker, collate

LENGTH = "length"


class PairRows:
    """A data set of pairs: two rows of tokens each, the chosen completion first."""

    column_names = (LENGTH,)

    def __init__(self, rows: RowStore) -> None:
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


_USUAL_LENGTH = 1024


def prepare(job: LmArguments, args: TrainingArguments, examples: Mapping[str, Examples]) -> Job:
    """Tokenise, load the model and build its engine; raises whatever cannot work, before any training."""
    source = source_of(job)
    tokenizer = load_tokenizer(source, resize=job.resize_token_embeddings if args.do_train else False)
    model = load_model(source, CAUSAL_LM, trained=not args.do_train)
    length = row_length(job.max_length, tokenizer, model)
    require_reads(job, tokenizer, length, flag="max_length")
    completion_only, cache = job.completion_only_loss is not False, Cache(rows="rows", overwrite=job.overwrite_cache)
    by_preference = job.loss == "dpo"
    maker = RowMaker(tokenizer, length, cache, job.packing, completion_only, group=2 if by_preference else 1)
    parts = {}
    for name, found in examples.items():
        rows = pair_rows(maker, name, found) if by_preference else maker.rows(name, found)
        parts[name] = Part(rows, LmJudge(rows), len(rows), found.left_out)
    model = prepared(model, job, args, CAUSAL_LM, tokenizer)
    made = collate_pairs if by_preference else collate
    data = [part.rows for part in parts.values()]

    def objective(ready: Ready) -> Objective:
        own = taught(ready, job, CAUSAL_LM)
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
    reading: dict[str, Any] = {"task": "lm", "max_length": length}
    card = model_card(job, "text-generation")
    return Job(engine, args, parts, card=card, reading=reading, asked=job, compares_with_start=by_preference)


def _add_references(data: Sequence[PairRows], engine: Engine) -> None:
    """Give each pair the log-probabilities of the model as it is before the first step."""
    for rows in data:
        add_reference(engine, rows)
    objective: Any = engine.objective
    objective.preference = replace(objective.preference, reference=weights_of_reference(engine.model))


def row_length(asked: int | None, tokenizer: Any, model: Any) -> int:
    """Return the longest row in tokens: what was asked for, else what model and tokenizer allow, 1024 at most."""
    limits = [tokenizer.model_max_length, max_positions(model) or _USUAL_LENGTH, _USUAL_LENGTH]
    length = asked or min(limits)
    check_max_length(length, tokenizer, max_positions(model), flag="max_length")
    return length
