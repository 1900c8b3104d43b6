"""Settings of `whet lm` and `whet generate` that would change nothing are refused, with the way to go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from text_tasks import SAILING, words, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

TEXT, BOOK = "text.jsonl", "book.txt"


@pytest.mark.parametrize(
    ("file", "flags", "said"),
    [
        (BOOK, ["--dataset_text_field", "body"], "plain text has none"),
        (BOOK, ["--completion_only_loss", "true"], "with prompt and completion"),
        (TEXT, ["--completion_only_loss", "true"], "with prompt and completion"),
        (TEXT, ["--assistant_only_loss", "true"], "with prompt and completion"),
    ],
)
def test_setting_without_effect_on_texts_is_refused(
    decoder: Path, tmp_path: Path, file: str, flags: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    write_lines(tmp_path / TEXT, [{"text": text} for text in SAILING])
    (tmp_path / BOOK).write_text("\n".join(SAILING), "utf-8")
    options = {"train_file": tmp_path / file, "max_seq_length": 48, "max_steps": 1}
    assert run([*words("lm", decoder, tmp_path / "out", "--do_train", **options), *flags]) == EXIT_BAD_CONFIG
    assert said in " ".join(capfd.readouterr().err.split())


@pytest.mark.parametrize("flag", [("temperature", "0.5"), ("top_k", "3"), ("top_p", "0.5"), ("seed", "7")])
def test_setting_of_draws_is_refused_without_do_sample(
    decoder: Path, flag: tuple[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    name, value = flag
    given = ["generate", str(decoder), "--prompt", "the boat", "--max_new_tokens", "2", f"--{name}", value]
    assert run(given) == EXIT_BAD_CONFIG
    assert "add --do_sample" in capfd.readouterr().err
    assert run([*given, "--do_sample"]) == 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--validation_split_percentage", "5"], "--train_split_name 'train[5%:]'"),
        (["--streaming"], "whet.Trainer takes iterable data sets"),
        (["--torch_dtype", "bfloat16"], "--precision bf16"),
        (["--model_type", "gpt2"], "save_pretrained"),
        (["--precompute_ref_log_probs"], "add --loss dpo"),
        (["--precompute_ref_log_probs", "true"], "leave --precompute_ref_log_probs out"),
    ],
)
def test_flags_of_run_clm_that_are_refused_name_the_way_on(
    decoder: Path, tmp_path: Path, flags: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / TEXT, [{"text": text} for text in SAILING])
    asked = words("lm", decoder, tmp_path / "out", "--do_train", train_file=file)
    assert run([*asked, *flags]) == EXIT_BAD_CONFIG
    assert said in " ".join(capfd.readouterr().err.split())
