"""Models of a user's own that hold encoders, or only borrow their configuration: what the modules are decides."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertLMHeadModel,
    BertModel,
    BertPreTrainedModel,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.bert.modeling_bert import BertEmbeddings

import engine
import whet
from tiny import arguments, losses, tiny_config
from tiny_decoders import tiny_decoder

LENGTHS = (5, 20, 9, 30, 3, 12)


def config() -> Any:
    return tiny_config("bert", num_labels=2)


def answer(logits: Tensor, labels: Tensor | None) -> SequenceClassifierOutput:
    loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
    return SequenceClassifierOutput(loss=loss, logits=logits)  # type: ignore[arg-type]


class Held(PreTrainedModel):
    """The pattern of many repositories: BERT's configuration, and an encoder under a name of one's own."""

    config_class = BertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder = self.make(config)
        self.head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    def make(self, config: Any) -> nn.Module:
        return BertModel(config)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        states = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        return answer(self.head(states[:, 0]), labels)


class Renamed(BertPreTrainedModel):
    """BERT's own base class, and another attribute than its `bert`."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.encoder, self.head = BertModel(config), nn.Linear(config.hidden_size, 2)
        self.post_init()

    forward = Held.forward


class Around(nn.Module):
    """Somebody's module around an encoder."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Any:
        return self.inner(*args, **options)


class Wrapped(Held):
    def make(self, config: Any) -> nn.Module:
        return Around(BertModel(config))


class Two(PreTrainedModel):
    """A bi-encoder; the first encoder has the name that transformers looks for."""

    config_class, base_model_prefix = BertConfig, "bert"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.other = BertModel(config), BertModel(config)
        self.head = nn.Linear(2 * config.hidden_size, 2)
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        real = attention_mask[..., None]
        found = [one(input_ids, attention_mask=attention_mask).last_hidden_state for one in (self.bert, self.other)]
        mean = (found[1] * real).sum(1) / real.sum(1)
        return answer(self.head(torch.cat([found[0][:, 0], mean], -1)), labels)


class Tied(Two):
    """A siamese model whose encoders have one stack of blocks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.other.encoder = self.bert.encoder


class Taught(BertForSequenceClassification):
    """A classifier with its teacher inside."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.teacher = BertForSequenceClassification(config)

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:  # type: ignore[override]
        found: Any = super().forward(input_ids, attention_mask=attention_mask, labels=labels)
        wanted = self.teacher(input_ids, attention_mask=attention_mask).logits
        if found.loss is not None:
            found.loss = found.loss + (found.logits - wanted).square().mean()
        return found


HOLDERS: dict[type, tuple[str, ...]] = {
    Held: ("encoder",),
    Renamed: ("encoder",),
    Wrapped: ("encoder.inner",),
    Two: ("bert", "other"),
    Tied: ("bert", "other"),
    Taught: ("bert", "teacher"),
}


class Centred(BertModel):
    """An encoder whose forward reads all tokens of a row at once: packed rows would see each other."""

    def forward(self, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        found: Any = super().forward(*args, **options)
        found.last_hidden_state = found.last_hidden_state - found.last_hidden_state.mean(1, keepdim=True)
        return found


class Overriding(Held):
    def make(self, config: Any) -> nn.Module:
        return Centred(config)


class Borrowing(PreTrainedModel):
    """Own modules, and nothing that says which of them is the table of words."""

    config_class = BertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.words, self.head = nn.Embedding(config.vocab_size, 8), nn.Linear(8, 2)
        self.post_init()

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        return answer(self.head((self.words(input_ids) * attention_mask[..., None]).sum(1)), labels)


class Failing(Borrowing):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        raise RuntimeError("the user's own error")


class FailingLater(Held):
    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        super().forward(input_ids, attention_mask, labels)
        raise RuntimeError("the user's own error")


def made(cls: Any) -> Any:
    torch.manual_seed(0)
    return cls(config())


def rows() -> list[dict[str, Any]]:
    numbers = torch.Generator().manual_seed(1)
    ids = [torch.randint(10, 190, (n,), generator=numbers).tolist() for n in LENGTHS]
    return [{"input_ids": one, "attention_mask": [1] * len(one), "labels": n % 2} for n, one in enumerate(ids)]


def collate(rows: Any) -> dict[str, Tensor]:
    longest = max(len(row["input_ids"]) for row in rows)
    found = {
        name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**found, "labels": torch.tensor([row["labels"] for row in rows])}


def trained(model: Any, folder: Path, **changes: Any) -> Any:
    given = {"max_steps": 2, "per_device_train_batch_size": 6, "precision": "fp32", "remove_unused_columns": False}
    args = arguments(folder, **(given | changes))
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collate)  # type: ignore[arg-type]
    trainer.train()
    return trainer


@pytest.mark.parametrize("cls", HOLDERS)
def test_encoders_that_a_model_holds_run_without_padding(cls: Any) -> None:
    plain, model = made(cls).eval(), whet.optimize(made(cls).eval())
    assert whet.changes(model).encoders == HOLDERS[cls]  # type: ignore[union-attr]
    found, wanted = (one(**collate(rows())) for one in (model, plain))
    torch.testing.assert_close(found.logits, wanted.logits, rtol=0, atol=1e-6)  # fp32 sums in another order
    for one in (found, wanted):
        one.loss.backward()
    for weight, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-4, atol=1e-6)
    assert whet.changes(whet.restore(model)) is None


@pytest.mark.parametrize("cls", HOLDERS)
def test_a_trainer_trains_models_that_hold_encoders(cls: Any, tmp_path: Path) -> None:
    wanted, model = made(cls)(**collate(rows())).loss.item(), made(cls)
    args = whet.TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=2, per_device_train_batch_size=6, precision="fp32", logging_steps=1,
        save_strategy="no", report_to="none", disable_tqdm=True, remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = whet.Trainer(model, args, collate, rows())
    trainer.train()
    assert whet.changes(model).encoders == HOLDERS[cls]  # type: ignore[union-attr]
    (first, _) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert first == pytest.approx(wanted, rel=1e-5)  # fp32 sums in another order


@pytest.mark.parametrize("cls", [Overriding, Borrowing])
def test_other_modules_with_a_known_configuration_run_padded(
    cls: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(whet.ConfigError, match="finds no encoder here") as caught:
        whet.optimize(made(cls))
    why = "its Centred has a forward of its own" if cls is Overriding else "its forward takes no position_ids"
    assert why in str(caught.value)
    wanted = made(cls)(**collate(rows())).loss.item()
    with caplog.at_level(logging.INFO):
        trainer = trained(made(cls), tmp_path)
    assert trainer.objective.packed_model is None
    assert "batches run padded" in caplog.text
    assert losses(trainer)[0] == pytest.approx(wanted, rel=1e-6)


class Later(BertEmbeddings):
    """Numbers positions from three on, if nobody gives any."""

    def forward(self, input_ids: Any = None, token_type_ids: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(3, 3 + input_ids.shape[1])[None]
        return super().forward(input_ids, token_type_ids, position_ids, **more)


@pytest.mark.parametrize("how", ["class", "object"])
def test_embeddings_of_ones_own_keep_their_positions(how: str) -> None:
    """A packed pass gives positions itself."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(config())
    later = Later(model.config)
    if how == "class":
        later.load_state_dict(model.bert.embeddings.state_dict())
        model.bert.embeddings = later
    else:
        model.bert.embeddings.forward = MethodType(Later.forward, later)
    with pytest.raises(whet.ConfigError, match="may number the positions in another way"):
        whet.optimize(model)


@pytest.mark.parametrize("cls", [Failing, FailingLater])
def test_an_error_of_the_models_own_shows_through(cls: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the user's own error"):
        trained(made(cls), tmp_path)


def test_an_error_shows_through_an_optimised_model() -> None:
    with pytest.raises(RuntimeError, match="the user's own error"):
        whet.optimize(made(FailingLater))(**collate(rows()))


def test_a_decoder_by_configuration_is_named_as_one() -> None:
    model = BertLMHeadModel(tiny_config("bert", is_decoder=True))
    with pytest.raises(whet.ConfigError, match="makes it a decoder"):
        whet.optimize(model)


class Own(type(tiny_decoder("llama"))):  # type: ignore[misc]
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


@pytest.mark.parametrize("how", ["of the class", "of the object", "of the decoder"])
def test_a_decoder_whose_forward_was_replaced_is_named_as_such(how: str) -> None:
    model = tiny_decoder("llama")
    if how == "of the class":
        model.__class__ = Own
    else:
        module = model if how == "of the object" else model.model
        module.forward = lambda *args, **options: type(module).forward(module, *args, **options)
    why = "forward of its LlamaModel was replaced" if how == "of the decoder" else "has a forward of its own"
    with pytest.raises(whet.ConfigError, match=why):
        whet.optimize(model)


_SECOND_IMPORT = """
import sys
from transformers import BertConfig, BertForSequenceClassification
from transformers.utils.import_utils import direct_transformers_import
direct_transformers_import(sys.argv[1])
import whet
sizes = dict(vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
print(whet.changes(whet.optimize(BertForSequenceClassification(BertConfig(**sizes)))))
"""


@pytest.mark.slow
def test_a_second_import_of_transformers_changes_nothing(tmp_path: Path) -> None:
    """transformers' own tests import it again from the path of their checkout."""
    (tmp_path / "transformers").symlink_to(Path(str(transformers.__file__)).parent)
    command = [sys.executable, "-c", _SECOND_IMPORT, str(tmp_path / "transformers")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "no padding" in done.stdout, done.stderr[-2000:]
