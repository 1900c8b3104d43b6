"""`whet.optimize` inside Lightning, SetFit, accelerate and transformers' pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_encoders import sentences
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, pipeline

import whet

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
N_STEPS = 50
CURVE_TOLERANCE = 1e-4
"""Relative, of the losses of 50 optimizer steps: sums run in another order without padding."""


def batches(folder: Path) -> list[dict[str, Tensor]]:
    """Return 50 padded batches of labelled sentences."""
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), sentences(200, 1)
    found = []
    for start in range(0, 200, 4):
        inputs = dict(tokenizer(texts[start : start + 4], padding=True, truncation=True, return_tensors="pt"))
        found.append(inputs | {"labels": torch.tensor([n % 2 for n in range(4)])})
    return found


def test_lightning_module_has_the_same_curve(encoder_folder: Path, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="needs lightning: make test-libraries installs it")

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.encoder = AutoModel.from_pretrained(encoder_folder)
            self.head = nn.Linear(32, 2)
            self.curve: list[float] = []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            states = self.encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
            loss = nn.functional.cross_entropy(self.head(states[:, 0]), batch["labels"])
            self.curve.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def curve(module: Any) -> list[float]:
        options: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        fit = lightning.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, enable_model_summary=False, **options
        )
        fit.fit(module, torch.utils.data.DataLoader(batches(encoder_folder), batch_size=None))
        return module.curve

    plain, optimized = curve(Classifier()), whet.optimize(Classifier())
    found = whet.changes(optimized)
    assert found is not None
    assert found.encoders == ("encoder",)
    np.testing.assert_allclose(curve(optimized), plain, rtol=CURVE_TOLERANCE)


def test_accelerate_loop_has_the_same_curve(encoder_folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def curve(*, optimized: bool) -> list[float]:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(encoder_folder)
        if optimized:
            whet.optimize(model)
        loader = torch.utils.data.DataLoader(batches(encoder_folder), batch_size=None)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        found = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(loss.item())
        return found

    np.testing.assert_allclose(curve(optimized=True), curve(optimized=False), rtol=CURVE_TOLERANCE)


def test_pipeline_keeps_its_scores(encoder_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(encoder_folder)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(encoder_folder).eval()
    classify, texts = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu"), sentences(12)
    before = [row["score"] for row in classify(texts, batch_size=4, truncation=True)]
    assert whet.optimize(classify) is classify
    found = whet.changes(classify)
    assert found is not None
    assert found.encoders == ("model",)
    after = [row["score"] for row in classify(texts, batch_size=4, truncation=True)]
    np.testing.assert_allclose(after, before, atol=1e-6)


def test_setfit_has_the_same_curve(encoder_folder: Path, tmp_path: Path) -> None:
    """Its 50 steps of contrastive pairs, and the predictions of the classifier that it fits on their embeddings."""
    setfit = pytest.importorskip("setfit", reason="needs setfit: make test-libraries installs it", exc_type=ImportError)
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer

    texts = sentences(32)
    rows = Dataset.from_dict({"text": texts, "label": [n % 2 for n in range(32)]})
    SentenceTransformer(str(encoder_folder), device="cpu").save(str(tmp_path / "body"))

    def trained(*, optimized: bool) -> tuple[list[float], np.ndarray]:
        torch.manual_seed(0)
        model = setfit.SetFitModel.from_pretrained(str(tmp_path / "body"), device="cpu")
        if optimized:
            whet.optimize(model)
            found = whet.changes(model)
            assert found is not None
            assert found.encoders[0].startswith("model_body")
        args = setfit.TrainingArguments(
            str(tmp_path / str(optimized)), batch_size=8, max_steps=N_STEPS, report_to="none", seed=1, logging_steps=1,
            body_learning_rate=1e-3, show_progress_bar=False,
        )  # fmt: skip
        trainer = setfit.Trainer(model=model, args=args, train_dataset=rows)
        trainer.train()
        curve = [entry["embedding_loss"] for entry in trainer.st_trainer.state.log_history if "embedding_loss" in entry]
        return curve, np.asarray(model.predict(texts))

    (plain, labels), (curve, found) = trained(optimized=False), trained(optimized=True)
    assert len(curve) == N_STEPS
    assert curve[0] != curve[-1]
    np.testing.assert_allclose(curve, plain, rtol=CURVE_TOLERANCE)
    np.testing.assert_array_equal(found, labels)


def test_module_with_two_encoders_has_both_changed(encoder_folder: Path) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.passage = (AutoModel.from_pretrained(encoder_folder) for _ in range(2))
            self.shared = self.passage

    model = Towers()
    whet.optimize(model)
    found = whet.changes(model)
    assert found is not None
    assert found.encoders == ("query", "passage")
    one = whet.changes(model.query)
    assert one is not None
    assert found.dropouts == 2 * one.dropouts
    whet.restore(model)
    assert whet.changes(model) is None
    assert whet.changes(model.query) is None
