"""An encoder that whet does not know: BERT's modules under other names, with positions that start elsewhere.

As a plugin of pytest (`-p nord_model`) it makes transformers know the model, and whet the folder of its family.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.models.bert import modeling_bert as bert
from transformers.models.bert.configuration_bert import BertConfig


class NordConfig(BertConfig):
    model_type = "nord"
    first_position: int = 3


class NordEmbeddings(bert.BertEmbeddings):
    def forward(
        self, input_ids: Any = None, token_type_ids: Any = None, position_ids: Any = None, *given: Any, **named: Any
    ) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None] + self.first_position
        return super().forward(input_ids, token_type_ids, position_ids, *given, **named)


class NordSelfAttention(bert.BertSelfAttention):
    pass


class NordSelfOutput(bert.BertSelfOutput):
    pass


class NordIntermediate(bert.BertIntermediate):
    pass


class NordOutput(bert.BertOutput):
    pass


class NordLayer(bert.BertLayer):
    pass


_OWN = {
    one.__bases__[0]: one
    for one in (NordEmbeddings, NordSelfAttention, NordSelfOutput, NordIntermediate, NordOutput, NordLayer)
}


class _Nord:
    """Gives the modules of a model of BERT their names here."""

    config_class = NordConfig

    def __init__(self, config: NordConfig, **options: Any) -> None:
        super().__init__(config, **options)  # pyright: ignore[reportCallIssue]
        for module in self.modules():  # type: ignore[attr-defined]
            module.__class__ = _OWN.get(type(module), type(module))
            if isinstance(module, NordEmbeddings):
                module.first_position = config.first_position


class NordModel(_Nord, bert.BertModel):
    pass


class NordForQuestionAnswering(_Nord, bert.BertForQuestionAnswering):
    pass


class NordForSequenceClassification(_Nord, bert.BertForSequenceClassification):
    pass


class NordForTokenClassification(_Nord, bert.BertForTokenClassification):
    pass


class NordForMultipleChoice(_Nord, bert.BertForMultipleChoice):
    pass


class NordForMaskedLM(_Nord, bert.BertForMaskedLM):
    pass


def register() -> None:
    """Make transformers' Auto classes know the model."""
    AutoConfig.register("nord", NordConfig)
    AutoModel.register(NordConfig, NordModel)
    AutoModelForQuestionAnswering.register(NordConfig, NordForQuestionAnswering)
    AutoModelForSequenceClassification.register(NordConfig, NordForSequenceClassification)
    AutoModelForTokenClassification.register(NordConfig, NordForTokenClassification)
    AutoModelForMultipleChoice.register(NordConfig, NordForMultipleChoice)
    AutoModelForMaskedLM.register(NordConfig, NordForMaskedLM)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Add the folder before any test asks for the families."""
    from whet.models import families

    register()
    families.__path__.append(os.environ["NORD_FAMILY"])
