"""Eight secrets go in by eight ways; none of them comes out anywhere."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny_qa import command, squad, write_json

from whet.errors import ConfigError, hide_secrets

pytestmark = pytest.mark.reliability
CANARIES = {
    "HF_TOKEN": "hf_CANARYaaaaaaaaaaaaaaaaaaaa1",
    "WANDB_API_KEY": "CANARYbbbbbbbbbbbbbbbbbbbbbb2",
    "AWS_SECRET_ACCESS_KEY": "CANARYcccccccccccccccccccc3",
    "MLFLOW_TRACKING_PASSWORD": "CANARYdddddddddddddddddd4",
    "KUBERNETES_SERVICE_ACCOUNT_TOKEN": "CANARYeeeeeeeeeeeeeeeeee5",
    "flag": "hf_CANARYffffffffffffffffffff6",
    "config file": "hf_CANARYgggggggggggggggggggg7",
    "address": "CANARYhhhhhhhhhhhhhhhhhhhhhh8",
}
_ENVIRONMENT = {name: secret for name, secret in CANARIES.items() if name.isupper()}
_ADDRESS = f"https://user:{CANARIES['address']}@example.invalid/model"


def _commands(folder: Path, encoder: Path) -> dict[str, list[str]]:
    """Runs that work, print their settings, or fail in the neighbourhood of a secret."""
    data = write_json(folder / "train.json", squad())
    out = folder / "out"
    usual: dict[str, Any] = {"train_file": data, "validation_file": data, "max_steps": 2, "save_strategy": "steps",
                             "save_steps": 1, "report_to": "tensorboard", "logging_steps": 1}  # fmt: skip
    (folder / "run.yaml").write_text(f"token: {CANARIES['config file']}\nseed: 3\n", "utf-8")
    (folder / "broken.yaml").write_text(f"seed: 3\ntoken: [{CANARIES['config file']}\nx: {{\n", "utf-8")
    (folder / "broken.json").write_text(f'{{"seed": 3, "token": "{CANARIES["config file"]}" "x": 1}}', "utf-8")
    (folder / "list.yaml").write_text(f"token: [{CANARIES['config file']}]\n", "utf-8")
    train = command(encoder, out, "--do_train", "--do_eval", **usual)
    flag = ["--token", CANARIES["flag"]]
    return {
        "flag": [*train, *flag, "--overwrite_output_dir"],
        "file": [*train, "--overwrite_output_dir", "--config", str(folder / "run.yaml")],
        "printed": [*train, *flag, "--print_config"],
        "printed file": [*train, "--config", str(folder / "run.yaml"), "--print_config"],
        "broken yaml": [*train, "--config", str(folder / "broken.yaml")],
        "broken json": [*train, "--config", str(folder / "broken.json")],
        "list": [*train, "--config", str(folder / "list.yaml")],
        "unknown": [*train, *flag, "--tokenn", CANARIES["flag"], "--doc_strid", "3"],
        "address": [*command(_ADDRESS, folder / "out2", "--do_train", train_file=data), *flag],
        "address printed": [*command(_ADDRESS, folder / "out2", "--do_train", train_file=data), "--print_config"],
        "address of data": command(encoder, folder / "out3", "--do_train", train_file=_ADDRESS),
    }


def test_no_secret_comes_out(encoder: Path, tmp_path: Path, watched) -> None:
    pytest.importorskip("tensorboard")
    commands = _commands(tmp_path, encoder)
    given = {write_json(tmp_path / f"{name}.command", words) for name, words in commands.items()}
    given |= {tmp_path / name for name in ("run.yaml", "broken.yaml", "broken.json", "list.yaml")}
    report = watched("qa_runs", *sorted(p for p in given if p.suffix == ".command"), env=_ENVIRONMENT)
    codes = dict(zip([p.stem for p in sorted(given) if p.suffix == ".command"], report["result"], strict=True))
    worked = {"flag", "file", "printed", "printed file", "address printed"}
    assert {name for name, code in codes.items() if code == 0} == worked, report["stderr"][-3000:]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path not in given]
    assert any("checkpoint-" in str(path) for path in written)
    assert any("tfevents" in path.name for path in written)
    texts = {str(path): path.read_bytes() for path in written}
    texts |= {stream: report[stream].encode() for stream in ("stdout", "stderr")}
    texts["commands"] = json.dumps(report["seen"]["commands"]).encode()
    found = [
        (way, place) for way, secret in CANARIES.items() for place, text in texts.items() if secret.encode() in text
    ]
    print(f"\nsecrets found: {len(found)}, of {len(CANARIES)}, in {len(texts)} files and streams")
    assert found == []
    assert "***" in report["stdout"]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text("utf-8"))
    assert (settings["cls_token"], settings["pad_token"]) == ("[CLS]", "[PAD]")


def test_a_traceback_in_the_log_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    from whet import log

    monkeypatch.setenv("HF_TOKEN", CANARIES["HF_TOKEN"])
    log.set_up()
    try:
        raise RuntimeError(f"refused: Bearer {CANARIES['HF_TOKEN']} at {_ADDRESS}")
    except RuntimeError as error:
        record = logging.LogRecord("whet", logging.ERROR, "", 0, "%s", (error,), (RuntimeError, error, None))
        wrapped = ConfigError(what="no model", got=error, why=str(error), fix="x")
    formatter = log.logger.handlers[0].formatter
    assert formatter is not None
    for text in (formatter.format(record), str(wrapped), str(wrapped.problems[0])):
        assert "CANARY" not in text
        assert "***" in text


def test_words_that_look_like_secrets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "short")
    text = "cls_token: [CLS], pad_token: [PAD], short, mail@example.org, https://example.org/a@b, hidden_size: 12345678"
    assert hide_secrets(text) == text


def test_a_user_is_hidden_wherever_an_address_begins_and_a_long_word_is_read_once() -> None:
    for before in ("", "1", "=", "see:", "x+", "."):
        assert "pw" not in hide_secrets(f"{before}http://me:pw@example.org/a")
    word = "a" * 5_000_000  # each of its letters may begin the name of a protocol
    assert hide_secrets(word) == word
