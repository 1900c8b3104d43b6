"""Model cards and uploads, against a server on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import hub_server
import pytest
from override_runs import Smoothed, class_rows, ours, pad, token_rows
from tiny_runs import tiny_bert
from transformers import BertForSequenceClassification

import engine

_HERE = Path(__file__).parent


def _push(folder: Path, endpoint: str) -> str:
    environment = os.environ | {
        "HF_ENDPOINT": endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "*",
    }
    environment["PYTHONPATH"] = os.pathsep.join([str(_HERE), str(_HERE.parent)])
    run = [sys.executable, str(_HERE / "hub_run.py"), str(folder)]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gate
@pytest.mark.slow
def test_a_trained_model_is_pushed_with_its_card(tmp_path: Path) -> None:
    with hub_server.running() as hub:
        shown = _push(tmp_path / "rivers", hub.address)
    assert "PUSHED" in shown, shown
    assert [repo["name"] for repo in hub.repos] == ["rivers"]
    assert {"model.safetensors", "config.json", "training_args.json", "README.md"} <= hub.files.keys()
    assert not [name for name in hub.files if name.startswith("checkpoint")]
    assert hub.files["model.safetensors"] == (tmp_path / "rivers" / "model.safetensors").read_bytes()
    assert "river" in hub.files["README.md"].decode()
    assert hub.messages == ["a message"]
    assert "Bearer hf_token_of_the_test" in hub.tokens


@pytest.mark.gate
@pytest.mark.slow
def test_a_hub_that_is_not_there_is_reported_and_the_model_is_kept(tmp_path: Path) -> None:
    with hub_server.running() as hub:
        address = hub.address  # nobody listens there afterwards
    shown = _push(tmp_path / "rivers", address)
    assert "REFUSED the repository rivers cannot be created on the Hub" in shown
    assert "fix: check the network" in shown


def test_a_model_card_says_how_the_model_was_trained(tmp_path: Path) -> None:
    model = tiny_bert(BertForSequenceClassification, num_labels=3)
    trainer = engine.Trainer(model, ours(tmp_path, eval_strategy="epoch"), pad, token_rows(), token_rows(5))
    trainer.train()
    trainer.create_model_card(language="en", license="apache-2.0", tags=["towns"], finetuned_from="bert-base-uncased")
    trainer.create_model_card(tags="rivers")
    card = (tmp_path / "README.md").read_text()
    assert "learning_rate: 0.01" in card
    assert {"- towns", "- rivers"} <= set(card.splitlines())
    assert "Training Loss" in card


def test_a_model_card_of_a_plain_module(tmp_path: Path) -> None:
    trainer = engine.Trainer(Smoothed(), ours(tmp_path), train_dataset=class_rows())
    trainer.create_model_card(model_name="mine")
    assert "mine" in (tmp_path / "README.md").read_text()
