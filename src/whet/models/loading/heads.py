"""The heads that models are loaded with, and what messages say of each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Head:
    """A head of transformers."""

    auto: str
    """The class of transformers that loads a model with it."""
    mapping: str
    """The name of the architectures that have it."""
    task: str
    """What the head is for, in words."""
    gives: str
    """What it computes."""
    learns: str
    """What a model without it has not learnt to do."""
    command: str
    """What trains it."""
    peft: str
    """What peft calls the task of an adapter for it."""
    causal: bool = False
    """Whether decoders have it, and not encoders."""

    @property
    def ending(self) -> str:
        """What the names of the model classes with this head have after the name of the architecture.

        Empty for the encoder itself, which no name tells.
        """
        return self.auto.removeprefix("AutoModel")


QUESTION_ANSWERING = Head(
    auto="AutoModelForQuestionAnswering",
    mapping="MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    task="extractive question answering",
    gives="an answer is found by a start and an end score for each token",
    learns="answer questions",
    command="whet qa",
    peft="QUESTION_ANS",
)
SEQUENCE_CLASSIFICATION = Head(
    auto="AutoModelForSequenceClassification",
    mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
    task="text classification",
    gives="a label is found by a score for each label",
    learns="classify texts",
    command="whet classify",
    peft="SEQ_CLS",
)
TOKEN_CLASSIFICATION = Head(
    auto="AutoModelForTokenClassification",
    mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
    task="token classification",
    gives="the tag of a word is found by a score for each tag",
    learns="tag words",
    command="whet tag",
    peft="TOKEN_CLS",
)
CAUSAL_LM = Head(
    auto="AutoModelForCausalLM",
    mapping="MODEL_FOR_CAUSAL_LM_MAPPING",
    task="next tokens",
    gives="a text is continued by a score for each token of the vocabulary",
    learns="continue texts",
    command="whet lm",
    peft="CAUSAL_LM",
    causal=True,
)
EMBEDDING = Head(
    auto="AutoModel",
    mapping="MODEL_MAPPING",
    task="sentence embeddings",
    gives="a text becomes a vector, pooled from the hidden states of its tokens",
    learns="place texts near those that fit them",
    command="whet embed",
    peft="FEATURE_EXTRACTION",
)
_OLDER = re.compile("(?<!With)LMHeadModel$")
"""The ending in older families, such as GPT-2; a FlaubertWithLMHeadModel fills in masked words."""
OF_ENCODERS = (QUESTION_ANSWERING, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION)


def head_named(architectures: object, known: Iterable[Head] = OF_ENCODERS) -> Head | None:
    """Return which of these heads a configuration's `architectures` names; None for any other."""
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    names = [name.removesuffix("Simple") for name in names]  # FlaubertForQuestionAnsweringSimple, next to its beam head
    names = [_OLDER.sub(CAUSAL_LM.ending, name) for name in names]
    return next((head for head in known for name in names if head.ending and name.endswith(head.ending)), None)
