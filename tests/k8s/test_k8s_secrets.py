"""Secrets in clear are refused wherever they are given, and never repeated; what only sounds like one passes."""

from __future__ import annotations

from typing import Any

import pytest
from plans import QA, refused, rendered

SECRET = "hf_" + "a1B2" * 8
HOOK = "a1B2c3D4e5F6g7H8i9"
SENTRY = "https://0123456789abcdef0123456789abcdef@o1.ingest.sentry.io/2"
IN_CLEAR: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "a token in env": (QA, {"env": f"HF_TOKEN={SECRET}"}),
    "a URL with a password": (QA, {"env": "HTTPS_PROXY=http://me:hunter2@proxy.example.org"}),
    "a flag with =": ((*QA, "--token=secret-of-mine"), {}),
    "a token in a script's flag": (("train.py", "--access", SECRET), {}),
    "a token as a Secret's name": (QA, {"env_from_secret": f"HF_TOKEN={SECRET.lower()}"}),
    "a label": (QA, {"label": f"t={SECRET}"}),
    "the name of a variable": (QA, {"env": f"{SECRET}=1"}),
    "a webhook in a command": (("train.py", "--notify", f"https://discord.com/api/webhooks/1/{HOOK}"), {}),
    "a database of pairs": (QA, {"env": "DB=host=db user=me password=hunter2"}),
    "lines of a netrc": (("train.py", "machine api.wandb.ai\n  login user\n  password hunter2\n"), {}),
    "a signed URL": (("train.py", "--data", "https://a.blob.core.windows.net/x?sv=1&sig=hunter2%2Fa1B2c3D4%3D"), {}),
    "a web token": (("train.py", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc"), {}),
}


def test_a_secret_in_clear_is_refused_and_not_repeated(capfd: pytest.CaptureFixture[str]) -> None:
    for case, (command, options) in IN_CLEAR.items():
        said = refused(capfd, *command, **options)
        assert "--env_from_secret" in said, case
        for secret in (SECRET, SECRET.lower(), "hunter2", "secret-of-mine", "eyJhbGci", "a1B2c3D4"):
            assert secret not in said, case


def test_a_secret_in_the_name_of_an_image_becomes_one_of_the_registry(capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, image=f"registry.example.org/{SECRET}/whet:1.0")
    assert "--image_pull_secrets" in said
    assert "--env_from_secret" not in said
    both = refused(capfd, image=f"registry.example.org/{SECRET}/whet:1.0", env=f"HF_TOKEN={SECRET}")
    assert "--image_pull_secrets" in both
    assert "--env_from_secret" in both
    assert SECRET not in said + both


def test_addresses_without_secrets_pass(capfd: pytest.CaptureFixture[str]) -> None:
    plain = (
        "MLFLOW_TRACKING_URI=http://mlflow.example.org:5000", "DATABASE_URL=postgres://db.example.org/runs",
        "STUDY_DSN=postgresql://db/runs", "HF_ENDPOINT=https://hub.example.org/mirror", "NETRC=/run/secrets/netrc",
        "DOCS=https://docs.example.org/webhooks/setup", "REPO=git@github.com:team/code.git", "NOTE=machine learning",
        "PASSWORD_FILE=/run/secrets/password",
    )  # fmt: skip
    rendered(capfd, *QA, env=plain)


def test_words_that_are_no_secrets_pass(capfd: pytest.CaptureFixture[str]) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    command = (*QA, "--model_revision", commit, "--tokenizer_name", "t")
    rendered(capfd, *command, env=("TOKENIZERS_PARALLELISM=false", "SSH_AUTH=false"))


ORDINARY = (
    ("--pad_token", "<pad>"), ("--eos-token", "</s>"), ("--unk_token=[UNK]",), ("--bos_token", "<|endoftext|>"),
    ("--sort_key", "length"), ("--text_key=body.text",), ("--group_key", "user_name"), ("--end_token", "."),
    ("--image_token", "32000"), ("--image_key", "image_1"), ("--label_key", "label_0"), ("--primary-key", "id1"),
    ("--id_key", "doc-id"), ("--prediction_key", "logits/1"), ("--text_key", "conversation_history_text_field"),
    ("--sep_token", "\\n\\n###\\n"), ("--pad_token", "<|finetune_right_pad_id|>"), ("--credentials", "/data/x.json"),
    ("--use-token", "true"), ("data.sort_key=col_1",), ("tokenizer.pad_token=<|pad_0|>",), ("--byte_token", "<0x0A>"),
    ("--response_token", "### Response:"),
)  # fmt: skip


def test_tokens_of_a_tokenizer_and_names_of_columns_pass(capfd: pytest.CaptureFixture[str]) -> None:
    rendered(capfd, "train.py", *(word for flags in ORDINARY for word in flags))


def test_keys_and_tokens_of_services_stay_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for flags in (("--wandb_key", "0123456789abcdef0123456789abcdef"), ("--api_key", "word"), ("--hf_token", "word")):
        assert "--env_from_secret" in refused(capfd, "train.py", *flags)


VALUE = "hunter2xSECRETpart"
NAMED = (
    f"PGPASSWORD={VALUE}", f"REDIS_URL=redis://:{VALUE}@host:6379/0", f"HF_TOKEN_2={VALUE}", f"clientSecret={VALUE}",
    f"HTTP_AUTHORIZATION=Bearer {VALUE}", f'JSON={{"api_key": "{VALUE}"}}',
)  # fmt: skip


def test_a_variable_that_holds_a_secret_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for pair in NAMED:
        said = refused(capfd, env=pair)
        assert f"--env {pair.partition('=')[0]} ***" in said
        assert "--env_from_secret HF_TOKEN=hub/HF_TOKEN" in " ".join(said.split())
        assert VALUE not in said


def test_plain_words_are_secrets_where_the_name_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    for pair in ("OPENAI_KEY=abcdef", "NGC_CLI_API_KEY=abc", "DB_PASS=word", "HF_TOKEN_2=word", "GH_PAT=word"):
        assert "in clear" in refused(capfd, env=pair)


WORDS = (
    (f"wandb.api_key={VALUE}",), ("--set", f"password={VALUE}"), ("--header", f"Authorization: Bearer {VALUE}"),
    (f"+logger={{api_key: {VALUE}}}",),
)  # fmt: skip


def test_words_of_a_command_that_hold_a_secret_are_refused(capfd: pytest.CaptureFixture[str]) -> None:
    for words in WORDS:
        said = refused(capfd, "train.py", *words)
        assert "--env_from_secret" in said
        assert VALUE not in said


def test_variables_that_only_sound_like_secrets_pass(capfd: pytest.CaptureFixture[str]) -> None:
    pairs = (
        "GOOGLE_APPLICATION_CREDENTIALS=/var/secrets/key.json", "SORT_KEY=col_1", "EOS_TOKEN=<|eot_id|>",
        "MAX_TOKEN=4096", "SECRET=false", "LOW_PASS=7", "DATABASE=postgres://me:$(PGPASSWORD)@host/db",
    )  # fmt: skip
    rendered(capfd, env=pairs)


def test_a_script_takes_a_variable_of_a_secret_in_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    rendered(
        capfd, "train.py", "--api_key", "$(KEY)", "--header", "Authorization: Bearer $(KEY)", env_from_secret="KEY=hub"
    )


def test_an_image_may_have_any_name(capfd: pytest.CaptureFixture[str]) -> None:
    rendered(capfd, image="registry.example.org/team/secret:word", env_from_secret="PASSWORD=password/secret")
