"""Tags as numbers, for the first piece of each word or for all pieces."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from whet.data.files.bad_rows import MAX_SHOWN
from whet.errors import DataError, Problem
from whet.jobs.tokenising.words import NO_WORD, WordRows
from whet.tasks.tag.sentences import ENTITY, IGNORED, Sentences

_ALMOST = re.compile(r"[bi][-_].+|[BI]_.+|.+[-_][BIbi]", re.DOTALL)
_SHOWN_TAGS = 12


@dataclass(frozen=True)
class Tags:
    """The tags in the order of the model's logits."""

    names: tuple[str, ...]

    @property
    def are_entities(self) -> bool:
        """Whether they mark entities (B-PER, I-PER, O); else each word has a plain tag, such as its part of speech."""
        return all(ENTITY.fullmatch(name) for name in self.names) and any(name != "O" for name in self.names)

    def almost_entity(self) -> str | None:
        """Return a tag that marks an entity in another way than `are_entities` knows; None if there is none."""
        names = [name for name in self.names if name not in ("O", "o")]
        is_almost = not self.are_entities and all(_ALMOST.fullmatch(name) for name in names)
        return names[0] if names and is_almost else None

    def encode(self, sentences: Sentences) -> list[np.ndarray]:
        """Return the number of each word's tag; raises DataError that names unknown tags with line and word."""
        assert sentences.tags is not None
        index = {name: n for n, name in enumerate(self.names)}
        unknown = [
            (row, n, tag) for row, tags in enumerate(sentences.tags) for n, tag in enumerate(tags) if tag not in index
        ]
        if unknown:
            raise DataError.of([self._problem(sentences, *one, n=n) for n, one in enumerate(unknown[:MAX_SHOWN])])
        return [np.asarray([index[tag] for tag in tags], dtype=np.int64) for tags in sentences.tags]

    def knows_all(self, sentences: Sentences) -> bool:
        """Return whether every word has a tag of these."""
        known = set(self.names)
        return sentences.tags is not None and all(tag in known for tags in sentences.tags for tag in tags)

    def inside(self) -> np.ndarray:
        """Return for each tag what the later pieces of its word have: I-PER for B-PER, if there is such a tag."""
        index = {name: n for n, name in enumerate(self.names)}
        later = [re.sub("^B-", "I-", name) for name in self.names]
        return np.asarray([index.get(name, n) for n, name in enumerate(later)], dtype=np.int64)

    def _problem(self, sentences: Sentences, row: int, word: int, tag: str, *, n: int) -> Problem:
        shown = ", ".join(self.names[:_SHOWN_TAGS]) + (", ..." if len(self.names) > _SHOWN_TAGS else "")
        return Problem(
            what=f"{sentences.source}: {sentences.places[row]}, word {word + 1} ({sentences.words[row][word]!r}): "
            f"{sentences.tag_column} has a tag that the model does not know",
            got=tag,
            why=f"the model knows {len(self.names)} tags" + (f": {shown}" if n == 0 else ""),
            fix="correct the tag, or train with it",
        )


def tags_of(sentences: Sentences) -> Tags:
    """Return the tags of the training data, sorted as run_ner.py sorts them, or in the data set's own order."""
    assert sentences.tags is not None
    found = {tag for tags in (*sentences.tags, *sentences.every_tags) for tag in tags}
    ordered = sentences.tag_order if found <= set(sentences.tag_order) else sorted(found)
    return Tags(tuple(ordered))


def require_several(sentences: Sentences, tags: Tags) -> None:
    """Raise DataError if all words have the same tag: any model would be right, and none would learn."""
    several = tags.names if sentences.tag_order else sorted({tag for one in sentences.tags or () for tag in one})
    if len(several) > 1:
        return
    raise DataError(
        what=f"{sentences.source}: all words have the same tag",
        got=f"{sentences.tag_column}: {several[0]}" if several else "no tag",
        why="a tagger learns to tell words apart",
        fix="add sentences with other tags, or name another column: --label_column_name NAME",
    )


def tags_of_config(config: Any) -> Tags:
    """Return the tags that a trained model's configuration names."""
    return Tags(tuple(str(config.id2label[n]) for n in range(config.num_labels)))


def token_labels(rows: WordRows, numbers: list[np.ndarray], tags: Tags, *, all_pieces: bool) -> np.ndarray:
    """Return the label of each token (tokens,) int64: its word's tag at first pieces, -100 elsewhere.

    With `all_pieces` later pieces have a label too, I- in place of B-.
    """
    flat = np.concatenate(numbers)
    begins = np.concatenate([[0], np.cumsum([len(one) for one in numbers])])[:-1]
    text_of = np.repeat(rows.text_of, rows.rows.lengths)
    of_word = flat[np.minimum(begins[text_of] + np.maximum(rows.word_of, 0), len(flat) - 1)]
    first = rows.is_first
    labels = np.where(first, of_word, IGNORED)
    if all_pieces:
        labels = np.where((rows.word_of != NO_WORD) & ~first, tags.inside()[of_word], labels)
    return labels
