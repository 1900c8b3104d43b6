"""Heads that read places of padding, under `whet.optimize`: against the untouched model on the same padded batches."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)
from transformers.models.bert.modeling_bert import BertPooler

import whet
from tiny import FAMILIES, padded, tiny_config, tiny_model, tiny_rows
from tiny_decoders import collate, tiny_decoder, token_rows
from whet.errors import ConfigError

EXACT = 1e-5  # relative: sums of some hundred float32 terms
SAMPLED = 5e-3  # new tables of positions, made smooth: trained models are within 1e-3 (benchmarks/xquad/padding.py)


def smooth(model: Any) -> Any:
    """Return the model with positions that vary slowly, as those of trained models do."""
    with torch.no_grad():
        for name, table in model.named_parameters():
            if "position_emb" in name:
                waves = torch.arange(table.shape[0])[:, None] / torch.linspace(20, 60, table.shape[1])
                table.copy_(0.2 * waves.sin())
    return model


def qa_batch(family: str, pad_id: int) -> dict[str, Tensor]:
    return padded(list(tiny_rows(6, family)), pad_id, 64)


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("padding", "tolerance"), [("all", EXACT), ("sampled", SAMPLED)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_of_a_question_answering_head(family: str, padding: Any, tolerance: float) -> None:
    untouched = smooth(tiny_model(family)).train()
    batch = qa_batch(family, untouched.config.pad_token_id)
    model = whet.optimize(deepcopy(untouched), padding=padding)
    wanted, found = untouched(**batch), model(**batch)
    assert float(found.loss.detach()) == pytest.approx(float(wanted.loss.detach()), rel=tolerance)
    wanted.loss.backward()
    found.loss.backward()
    if padding == "all":
        exact = gradients(untouched)
        assert float((gradients(model) - exact).norm() / exact.norm()) < EXACT


def test_the_loss_of_a_batch_when_all_rows_wiggle_alike() -> None:
    """Logits that rise and fall with the position in all rows: the errors of the rows cancel, as they differ."""
    rows, gaps = list(tiny_rows(48, "bert")), []
    for period in range(9, 14):
        untouched = tiny_model("bert").train()
        with torch.no_grad():
            table = untouched.bert.embeddings.position_embeddings.weight
            table.copy_(
                0.5 * (torch.arange(len(table))[:, None] * 2 * torch.pi / period + torch.arange(table.shape[1])).sin()
            )
            model, batch = whet.optimize(deepcopy(untouched), padding="sampled"), padded(rows, 0, 64)
            gaps.append(float(model(**batch).loss / untouched(**batch).loss) - 1)
    assert torch.tensor(gaps).square().mean().sqrt() < 5e-3  # 0.0034; with the same place in each row 0.0091


def conv(states: Tensor) -> Tensor:
    weight = torch.randn(3, states.shape[2], 5, generator=torch.Generator().manual_seed(1))
    return nn.functional.conv1d(states.transpose(1, 2), weight).amax(2)


HEADS = {"mean": lambda states: states.mean(1), "max": lambda states: states.amax(1), "convolution": conv}


@pytest.mark.each_value
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_a_user_on_all_places(family: str, head: str) -> None:
    """Exact with padding="all"; near it otherwise, where zeros are far from it."""
    untouched = smooth(AutoModel.from_config(tiny_model(family).config)).eval()
    batch = {name: value for name, value in qa_batch(family, 1).items() if not name.endswith("positions")}
    batch["input_ids"][batch["attention_mask"] == 0] = untouched.config.pad_token_id
    wanted = HEADS[head](untouched(**batch).last_hidden_state)

    def gap(padding: Any) -> float:
        found = HEADS[head](whet.optimize(deepcopy(untouched), padding=padding)(**batch).last_hidden_state)
        return float(((found - wanted).norm() / wanted.norm()).detach())

    assert gap("all") < EXACT
    assert gap("sampled") < 0.1
    assert gap("sampled") < 0.6 * gap("none")


class Mean(nn.Module):
    """What a user may put in the place of a pooler or a classifier: it averages all places of a row."""

    def __init__(self, width: int, n_out: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, n_out)

    def forward(self, states: Tensor, **_: Any) -> Tensor:
        return self.out(states.mean(1))


class OwnPooler(BertPooler):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.mean(1, keepdim=True))


def _flat(config: Any) -> nn.Module:
    pooled = nn.Sequential(nn.Unflatten(1, (1, 64)), nn.AvgPool3d((1, 64, 1)), nn.Flatten())
    return nn.Sequential(pooled, nn.Linear(config.hidden_size, config.num_labels))


def _patched(module: Any) -> None:
    run = module.forward
    module.forward = lambda states, **given: run(states.mean(1, keepdim=True).expand_as(states), **given)


READERS: dict[str, tuple[str, Any]] = {
    "pooler": ("bert", lambda model: setattr(model.bert, "pooler", Mean(32, 32))),
    "pooler of a subclass": ("bert", lambda model: setattr(model.bert, "pooler", OwnPooler(model.config))),
    "pooler with a forward": ("bert", lambda model: _patched(model.bert.pooler)),
    "classifier": ("roberta", lambda model: setattr(model, "classifier", Mean(32, 2))),
    "classifier of layers": ("roberta", lambda model: setattr(model, "classifier", _flat(model.config))),
    "classifier with a forward": ("roberta", lambda model: _patched(model.classifier)),
    "classifier of ELECTRA": ("electra", lambda model: setattr(model, "classifier", Mean(32, 2))),
    "classifier of MPNet": ("mpnet", lambda model: setattr(model, "classifier", Mean(32, 2))),
    "pooler of DeBERTa": ("deberta", lambda model: setattr(model, "pooler", Mean(32, 32))),
}


@pytest.mark.each_value
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_of_the_users_own_inside_a_classifier(reader: str, late: bool) -> None:
    """It may read any place, whatever the class around it is called, and however late it comes."""
    family, put = READERS[reader]
    untouched = AutoModelForSequenceClassification.from_config(tiny_config(family)).eval()
    batch = {name: value for name, value in qa_batch(family, 1).items() if not name.endswith("positions")}
    batch["input_ids"][batch["attention_mask"] == 0] = untouched.config.pad_token_id
    model = deepcopy(untouched)
    if late:
        whet.optimize(model, padding="all")
    for one in (untouched, model):
        torch.manual_seed(0)
        put(one)
    if not late:
        whet.optimize(model, padding="all")
    wanted = untouched(**batch).logits
    torch.testing.assert_close(model(**batch).logits, wanted, rtol=EXACT, atol=EXACT)


def test_all_padding_of_a_language_model() -> None:
    untouched = tiny_decoder("llama").train()
    batch = collate(token_rows(4, seed=1))
    padding = batch["attention_mask"] == 0
    model = whet.optimize(deepcopy(untouched), padding="all")
    assert whet.changes(model).padding == "all"
    wanted, found = untouched(**batch), model(**batch)
    assert float(wanted.logits[padding].detach().std()) > 0
    torch.testing.assert_close(found.logits + 0, wanted.logits, rtol=EXACT, atol=EXACT)


def test_padding_between_tokens_is_computed_too() -> None:
    untouched = tiny_model("bert").eval()
    batch = qa_batch("bert", 0)
    batch["attention_mask"][:, 2:4] = 0
    found = whet.optimize(deepcopy(untouched), padding="all")(**batch)
    wanted = untouched(**batch)
    torch.testing.assert_close(found.start_logits, wanted.start_logits, rtol=0, atol=1e-5)


def test_a_classifier_goes_without_unless_somebody_reads_its_encoder() -> None:
    config = tiny_model("bert").config
    model = whet.optimize(AutoModelForSequenceClassification.from_config(config).eval())
    batch = {name: value for name, value in qa_batch("bert", 0).items() if not name.endswith("positions")}
    padding, seen = batch["attention_mask"] == 0, []
    assert (model.bert(**batch).last_hidden_state[padding] != 0).any(-1).all()
    with_states = model(**batch).logits
    handle = model.bert.register_forward_hook(lambda module, inputs, out: seen.append(out.last_hidden_state))
    torch.testing.assert_close(model(**batch).logits, with_states, rtol=0, atol=1e-6)
    assert (seen[0][padding] != 0).any(-1).all()
    handle.remove()
    whet.restore(model)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_an_unknown_padding_is_refused() -> None:
    with pytest.raises(ConfigError, match="sampled"):
        whet.optimize(tiny_model("bert"), padding="some")


@pytest.mark.parametrize("padding", ["auto", "all"])
@pytest.mark.parametrize("summary", ["first", "last", "mean"])
def test_a_summary_of_other_tokens_than_the_first(summary: str, padding: Any) -> None:
    """ELECTRA's multiple choice may read the last place of each row, which is padding, or the mean of all places."""
    torch.manual_seed(0)
    config = tiny_config("electra", summary_type=summary)
    untouched = smooth(AutoModelForMultipleChoice.from_config(config)).eval()  # its summary has a dropout
    model = whet.optimize(deepcopy(untouched), padding=padding)
    rows = [{"input_ids": row["input_ids"]} for row in tiny_rows(6, "electra")]
    batch = {name: column.view(3, 2, -1) for name, column in padded(rows, 0).items()}
    batch["labels"] = torch.tensor([0, 1, 1])
    wanted, found = untouched(**batch), model(**batch)
    within = EXACT if padding == "all" or summary == "first" else 4 * SAMPLED  # one place of the last stretch
    exact_logits, logits = wanted.logits.detach(), found.logits.detach()
    assert float((logits - exact_logits).norm() / exact_logits.norm()) < within
    wanted.loss.backward()
    found.loss.backward()
    if within == EXACT:
        exact = gradients(untouched)
        assert float((gradients(model) - exact).norm() / exact.norm()) < EXACT


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_padding_beyond_a_local_window(attention: str) -> None:
    """A padding token that sees no real one gets zeros from SDPA, and the mean of all values from eager attention."""
    config = tiny_config("modernbert", local_attention=4, global_attn_every_n_layers=2)
    torch.manual_seed(0)
    untouched = AutoModelForQuestionAnswering.from_config(config, attn_implementation=attention).eval()
    model = whet.optimize(deepcopy(untouched), padding="all")
    batch = qa_batch("modernbert", config.pad_token_id)
    with torch.no_grad():
        wanted, found = untouched(**batch), model(**batch)
    assert float((found.start_logits - wanted.start_logits).abs().max()) < EXACT
    assert float(found.loss) == pytest.approx(float(wanted.loss), rel=EXACT)


def test_interrupted_call_leaves_nothing_behind() -> None:
    """Ctrl-C in a notebook: torch runs no hook then, and the next call may be one of the encoder alone."""
    model = AutoModelForSequenceClassification.from_config(tiny_model("bert").config).eval()
    batch = {name: value for name, value in qa_batch("bert", 0).items() if not name.endswith("positions")}
    real, wanted = batch["attention_mask"].bool(), model.bert(**batch).last_hidden_state
    whet.optimize(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = model.classifier.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(**batch)
    handle.remove()
    found = model.bert(**batch).last_hidden_state
    torch.testing.assert_close(found[real], wanted[real], rtol=0, atol=1e-5)
    alive = ref(model)
    del model, handle
    gc.collect()
    assert alive() is None
