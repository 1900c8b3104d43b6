"""SQuAD's own form: articles, each with paragraphs, each with a context and its questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from whet.data.files.rejected import Rejected
from whet.data.files.row_fields import kind, text_field
from whet.tasks.qa.read.collect import Collector, not_an_object, title_field


def read_nested(articles: Iterable[tuple[str, Any]], collector: Collector) -> None:
    """Pass every question of these articles, SQuAD 1.1 or 2.0, to the collector; of each its position comes first.

    An article may be a paragraph that stands alone: a context with its `qas`.
    """
    for path, article in articles:
        if collector.full:
            return
        collector.see(article)
        try:
            inside = [(path, article)] if is_paragraph(article) else _paragraphs(path, article)
            title = title_field(article)
        except Rejected as problem:
            collector.bad.add(problem, partial(_article_place, path, article), _n_questions(article))
            continue
        for place, paragraph in inside:
            _read_paragraph(paragraph, place, title, collector)


def is_paragraph(value: Any) -> bool:
    """Return whether this is a context with its questions, and not an article of several."""
    return isinstance(value, Mapping) and "qas" in value and "paragraphs" not in value


def _paragraphs(path: str, article: Any) -> list[tuple[str, Any]]:
    return [(f"{path}.paragraphs[{n}]", one) for n, one in enumerate(_list_field(article, "paragraphs"))]


def _read_paragraph(paragraph: Any, path: str, title: str, collector: Collector) -> None:
    collector.see(paragraph)
    try:
        questions = _list_field(paragraph, "qas")
        if not questions:
            return None  # also without a context: annotation tools keep the paragraphs that nobody has asked about
        context = text_field(paragraph, "context")
    except Rejected as problem:
        return collector.bad.add(problem, partial(_paragraph_place, path, title), _n_questions(paragraph))
    for q, question in enumerate(questions):
        if collector.full:
            return None
        place = partial(_question_place, path, q, title, question)
        collector.add(question, context=context, title=title, place=place)
    return None


def _list_field(owner: Any, name: str) -> list[Any]:
    """Return this list of an article or a paragraph; null is an empty one."""
    if not isinstance(owner, Mapping):
        raise not_an_object(owner)
    value = owner.get(name)
    if value is None and name in owner:
        return []
    if not isinstance(value, list):
        raise Rejected(
            f"{name} is {kind(value)}, not a list" if name in owner else f"{name} is missing",
            got=value if name in owner else sorted(map(str, owner)),
            why="articles hold a list of paragraphs, and paragraphs a list of qas",
            fix=f"write {name} as a list",
        )
    return value


def _n_questions(part: Any) -> int:
    """Return the number of readable questions in an article or a paragraph."""
    if not isinstance(part, Mapping):
        return 0
    qas, paragraphs = part.get("qas"), part.get("paragraphs")
    if isinstance(qas, list):
        return len(qas)
    return sum(map(_n_questions, paragraphs)) if isinstance(paragraphs, list) else 0


def _article_place(path: str, article: Any) -> str:
    title = article.get("title") if isinstance(article, Mapping) else None
    return f"{path}{_named('article', title)}"


def _paragraph_place(path: str, title: str) -> str:
    return f"{path}{_named('article', title)}"


def _question_place(path: str, index: int, title: str, question: Any) -> str:
    name = question.get("id") if isinstance(question, Mapping) else None
    return f"{path}.qas[{index}]{_named('article', title)}{_named('question', name)}"


def _named(what: str, name: Any) -> str:
    return f", {what} {str(name)[:80]!r}" if isinstance(name, str | int) and name != "" else ""
