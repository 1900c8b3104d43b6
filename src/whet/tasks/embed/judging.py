"""How embedding models and rerankers are judged: sentence-transformers' evaluators, and what they found of each query.

A search, or an order of texts, is judged by query: right is one whose first text is among those that belong to it.
Pairs with scores are judged by how far their places, ordered by the data's scores and by the model's, lie apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from whet import console
from whet.errors import DataError
from whet.jobs.judging import Judged
from whet.jobs.metrics import ranks
from whet.tasks.embed.models import library
from whet.tasks.embed.pairs import Pairs

_CANDIDATES = 20
"""Texts that a reranker orders for each query of the evaluation, if the data names none that do not fit."""
_NOT_FOUND = 1000
"""The place of a text that is not among the first hundred."""


@dataclass(frozen=True)
class PairJudge:
    """An evaluator of the library, and what its last call found."""

    evaluator: Any
    primary: str
    """The metric that the evaluator judges a model by."""
    unit: str
    """The word for several examples."""
    judged_on: str
    """The examples, for people."""
    examples: Callable[[Any], list[Judged]]
    """Returns the examples of the evaluator's last call, of this model, in the order of the data."""
    n_left_out: int = 0
    """Queries that cannot be judged: they have no text that fits, or none that does not."""
    note: str = ""
    """What people should know of the choice."""


def judge_embedder(pairs: Pairs, model: Any, batch: int) -> PairJudge:
    """Return a judge by these pairs: of a search, or of the order of scores; DataError if it would tell nothing."""
    evaluation, shown = library("sentence_transformer.evaluation"), {"write_csv": False}
    similarity = str(model.similarity_fn_name)
    if pairs.scores is not None:
        _require_two_scores(pairs)
        of_scores = _similarity_kind(evaluation)(
            pairs.anchors, pairs.positives, pairs.scores, batch_size=batch, **shown
        )

        def scored(model: Any) -> list[Judged]:
            return [*_by_place(pairs, np.asarray(model.similarity_pairwise(*of_scores.vectors)))]

        return PairJudge(of_scores, f"spearman_{similarity}", "pairs", _pairs_with_scores(pairs), scored)
    queries, corpus, relevant = search_task(pairs)
    if len(corpus) < 2:
        raise _nothing_to_tell_apart(pairs, "a single text is searched", "a search would find it for each query")
    search = _search_kind(evaluation)(
        queries, corpus, relevant, precision_recall_at_k=[1, 5, 10], accuracy_at_k=[1, 5, 10], batch_size=batch,
        truncate_dim=None, **shown,
    )  # fmt: skip

    def found(_: Any) -> list[Judged]:
        by_query = dict(zip(search.queries_ids, search.hits, strict=True))
        return [
            _by_rank(
                n, query, [(corpus[hit["corpus_id"]], hit["score"], hit["corpus_id"] in relevant[name])
                           for hit in by_query[name]],
                corpus[min(relevant[name], key=_number)],
            )
            for n, (name, query) in enumerate(queries.items())
        ]  # fmt: skip

    judge: Any = search
    if len(pairs.negatives) == 1:
        order = evaluation.TripletEvaluator(
            pairs.anchors, pairs.positives, pairs.negatives[0], batch_size=batch, **shown
        )
        judge = evaluation.SequentialEvaluator([order, search])
    judged_on = f"{_n_queries(len(queries))}, {console.plural(len(corpus), 'text')}"
    return PairJudge(judge, f"{similarity}_ndcg@10", "queries", judged_on, found)


def judge_reranker(pairs: Pairs, batch: int) -> PairJudge:
    """Return a judge of a reranker by these pairs: of an order of texts, or of that of scores.

    Texts are ordered if most queries have some that fit and some that do not. Raises DataError if both would tell
    nothing.
    """
    evaluation = library("cross_encoder.evaluation")
    samples, n_queries = rank_task(pairs), len({*pairs.anchors})
    n_left_out = n_queries - len(samples)
    if pairs.scores is not None and len(samples) <= n_left_out:
        _require_two_scores(pairs)
        both = [*zip(pairs.anchors, pairs.positives, strict=True)]
        of_scores = _correlation_kind(evaluation)(
            both, [*pairs.scores], batch_size=batch, show_progress_bar=False, write_csv=False
        )
        note = f"{len(samples):,} of {_n_queries(n_queries)} have a text that fits and one that does not, which is "
        note += "too few to judge the order of texts: the scores of all pairs are judged"
        return PairJudge(
            of_scores, "spearman", "pairs", _pairs_with_scores(pairs),
            lambda _: [*_by_place(pairs, of_scores.predicted)], note=note if _are_labels(pairs.scores) else "",
        )  # fmt: skip
    if not samples:
        raise _nothing_to_tell_apart(
            pairs, "no query has a text that does not fit", "the texts of a query are ordered by how well they fit"
        )
    order = _order_kind(evaluation)(samples, batch_size=batch, write_csv=False)

    def found(_: Any) -> list[Judged]:
        return [
            _by_rank(n, one["query"], _ordered(one, scores), one["positive"][0])
            for n, (one, scores) in enumerate(zip(samples, order.scores, strict=True))
        ]

    judged_on = _n_queries(n_queries) if not n_left_out else f"{len(samples):,} of {_n_queries(n_queries)}"
    note = f"{judged_on} are judged: the others have no text that fits, or none that does not" if n_left_out else ""
    return PairJudge(order, "ndcg@10", "queries", judged_on, found, n_left_out, note)


def _n_queries(n: int) -> str:
    return f"{n:,} {'query' if n == 1 else 'queries'}"


def _pairs_with_scores(pairs: Pairs) -> str:
    return f"{console.plural(len(pairs), 'pair')} with scores"


def _require_two_scores(pairs: Pairs) -> None:
    """Raise DataError if all pairs have one score: the order of the model's scores would then say nothing."""
    if len({*(pairs.scores or ())}) < 2:
        raise _nothing_to_tell_apart(
            pairs, f"{_pairs_with_scores(pairs)}, no two of which differ",
            "the order of the model's scores is compared with that of the data's",
        )  # fmt: skip


def _nothing_to_tell_apart(pairs: Pairs, got: str, why: str) -> DataError:
    return DataError(
        what=f"{pairs.source}: the evaluation has nothing to tell apart",
        got=got,
        why=why,
        fix="evaluate on more pairs: a larger --validation_split_percentage or --max_eval_samples, or another "
        "--validation_file; or leave --do_eval out",
    )


def _are_labels(scores: Sequence[float]) -> bool:
    """Return whether each pair fits or does not, and nothing between."""
    return {*scores} <= {0.0, 1.0}


def search_task(pairs: Pairs) -> tuple[dict[str, str], dict[str, str], dict[str, set[str]]]:
    """Return queries, corpus and relevant texts by id: each text once, a query with all of its right texts."""
    texts = dict.fromkeys([*pairs.positives, *(text for column in pairs.negatives for text in column)])
    id_of = {text: f"d{n}" for n, text in enumerate(texts)}
    query_of = {text: f"q{n}" for n, text in enumerate(dict.fromkeys(pairs.anchors))}
    relevant: dict[str, set[str]] = {name: set() for name in query_of.values()}
    for anchor, positive in zip(pairs.anchors, pairs.positives, strict=True):
        relevant[query_of[anchor]].add(id_of[positive])
    return {name: text for text, name in query_of.items()}, {name: text for text, name in id_of.items()}, relevant


def rank_task(pairs: Pairs) -> list[dict[str, Any]]:
    """Return the queries with texts that fit and texts that do not; empty for scores between 0 and 1.

    Without texts that do not fit, others of the data are drawn, the same in each run.
    """
    right: dict[str, dict[str, None]] = {}
    wrong: dict[str, dict[str, None]] = {}
    if pairs.scores is not None:
        if not _are_labels(pairs.scores):
            return []
        for anchor, text, score in zip(pairs.anchors, pairs.positives, pairs.scores, strict=True):
            (right if score else wrong).setdefault(anchor, {})[text] = None
    else:
        for n, anchor in enumerate(pairs.anchors):
            right.setdefault(anchor, {})[pairs.positives[n]] = None
            wrong.setdefault(anchor, {}).update(dict.fromkeys(column[n] for column in pairs.negatives))
        if not pairs.negatives:
            every, draw = list(dict.fromkeys(pairs.positives)), random.Random(0)  # noqa: S311
            for anchor, texts in right.items():
                drawn = draw.sample(every, min(len(every), _CANDIDATES + len(texts)))
                wrong[anchor] = dict.fromkeys([one for one in drawn if one not in texts][:_CANDIDATES])
    return [
        {"query": anchor, "positive": [*texts], "negative": negatives}
        for anchor, texts in right.items()
        if (negatives := [one for one in wrong.get(anchor, {}) if one not in texts])
    ]


# ---- evaluators that keep what they found ----


def _search_kind(evaluation: Any) -> Any:
    class Search(evaluation.InformationRetrievalEvaluator):
        def compute_metrics(self, queries_result_list: list[list[dict[str, Any]]]) -> Any:
            self.hits = queries_result_list  # by query, the best first
            return super().compute_metrics(queries_result_list)

    return Search


def _similarity_kind(evaluation: Any) -> Any:
    class Similarity(evaluation.EmbeddingSimilarityEvaluator):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.vectors: list[np.ndarray] = []  # of the first texts, and of the second
            return super().__call__(*args, **kwargs)

        def embed_inputs(self, model: Any, sentences: Any, **kwargs: Any) -> Any:
            """Return the vectors as `whet predict` computes them, with the prompts of the first and second texts."""
            encode = model.encode_document if self.vectors else model.encode_query
            named = SimpleNamespace(encode=encode)  # what the evaluator asks of a model
            self.vectors.append(super().embed_inputs(named, sentences, **kwargs))
            return self.vectors[-1]

    return Similarity


def _correlation_kind(evaluation: Any) -> Any:
    class Correlation(evaluation.CrossEncoderCorrelationEvaluator):
        predicted: np.ndarray

        def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            """Return the metrics, and keep the scores that they are of: a model in training may round others."""

            def predict(*given: Any, **named: Any) -> Any:
                self.predicted = model.predict(*given, **named)
                return self.predicted

            named = SimpleNamespace(predict=predict, model_card_data=model.model_card_data)
            return super().__call__(named, *args, **kwargs)

    return Correlation


def _order_kind(evaluation: Any) -> Any:
    class Order(evaluation.CrossEncoderRerankingEvaluator):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.scores: list[np.ndarray] = []  # by query: of its texts that fit, and of the others
            return super().__call__(*args, **kwargs)

        def compute_metrics(self, y_true: Any, y_pred: Any) -> Any:
            self.scores.append(y_pred)
            return super().compute_metrics(y_true, y_pred)

    return Order


# ---- what they found, by example ----


def _ordered(sample: dict[str, Any], scores: np.ndarray) -> list[tuple[str, float, bool]]:
    texts = [(text, True) for text in sample["positive"]] + [(text, False) for text in sample["negative"]]
    return [(texts[n][0], float(scores[n]), texts[n][1]) for n in np.argsort(scores)[::-1]]


def _by_rank(n: int, query: str, hits: Sequence[tuple[str, float, bool]], right: str) -> Judged:
    """Return what became of a query: the place of its first right text, and the text that came first."""
    place = next((at for at, (_, _, fits) in enumerate(hits, 1) if fits), None)
    other = next((score for _, score, fits in hits if not fits), None)
    own = None if place is None else hits[place - 1][1]
    gap = 0.0 if own is None or other is None else other - own
    scores = {"rank": place, "score_of_expected": own, "score_of_predicted": hits[0][1] if hits else None}
    return Judged(
        row=f"query {n + 1}",
        shown={"text": query},
        expected=right if place is None else hits[place - 1][0],
        predicted=hits[0][0] if hits else None,
        badness=(float(place or _NOT_FOUND), gap),
        wrong=place != 1,
        of_predictions=scores,
        of_errors=scores,
    )


def _by_place(pairs: Pairs, scores: np.ndarray) -> Iterator[Judged]:
    """Yield every pair with its score and the model's, and how far their places in the two orders lie apart."""
    places = [ranks(np.asarray(one)) for one in (pairs.scores, scores)]
    for n, (first, second) in enumerate(zip(pairs.anchors, pairs.positives, strict=True)):
        apart = float(places[1][n] - places[0][n]) / len(pairs)
        found = {"places_apart": round(apart, 4)}
        yield Judged(
            row=f"pair {n + 1}",
            shown={"text": first, "text_pair": second},
            expected=float((pairs.scores or ())[n]),
            predicted=float(scores[n]),
            badness=(abs(apart),),
            of_predictions=found,
            of_errors=found,
        )


def _number(name: str) -> int:
    """Return the place of a text, which its name in the corpus has after a letter."""
    return int(name[1:])
