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
    "a token under another name": (QA, {"env": f"MODEL_ACCESS={SECRET}"}),
    "a key": (QA, {"env": "WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567"}),
    "a password": (QA, {"env": "DB_PASSWORD=hunter2"}),
    "a URL with a password": (QA, {"env": "HTTPS_PROXY=http://me:hunter2@proxy.example.org"}),
    "a flag": ((*QA, "--hub_token", "secret-of-mine"), {}),
    "a flag with =": ((*QA, "--token=secret-of-mine"), {}),
    "a flag with dashes": ((*QA, "--hub-token", "secret-of-mine"), {}),
    "a token anywhere": (("train.py", SECRET), {}),
    "a token in a script's flag": (("train.py", "--access", SECRET), {}),
    "a token as a Secret's name": (QA, {"env_from_secret": f"HF_TOKEN={SECRET.lower()}"}),
    "a cloud's key": (("train.py", "--id", "AKIA" + "ABCD" * 4), {}),
    "a label": (QA, {"label": f"t={SECRET}"}),
    "a node's label": (QA, {"node_selector": f"t={SECRET}"}),
    "an interface": (QA, {"network_interface": SECRET}),
    "a claim, which is also a wrong name": (QA, {"data_claim": SECRET}),
    "the name of a variable": (QA, {"env": f"{SECRET}=1"}),
    "a variable without its =": (QA, {"env": "PASSWORD:hunter2"}),
    "a label that is none": (QA, {"label": "password=hunter2/x y"}),
    "a webhook of Slack": (QA, {"env": f"ALERTS=https://hooks.slack.com/services/T0AB12CD3/B0AB12CD3/{HOOK}"}),
    "a webhook in a command": (("train.py", "--notify", f"https://discord.com/api/webhooks/1/{HOOK}"), {}),
    "a webhook of Teams": (QA, {"env": f"CHAT=https://acme.webhook.office.com/webhookb2/IncomingWebhook/{HOOK}"}),
    "a webhook of a host of one's own": (QA, {"env": f"CHAT=https://chat.example.org/hooks/{HOOK}"}),
    "a webhook by its name": (QA, {"env": "SLACK_WEBHOOK_URL=https://proxy.example.org/a1B2c3D4"}),
    "a bot of Telegram": (("train.py", "--bot", f"123456789:AA{HOOK}{HOOK}"), {}),
    "a database": (QA, {"env": "DATABASE_URL=postgres://me:hunter2@db.example.org/runs"}),
    "a database in a flag": (("train.py", "--study", "postgresql+psycopg2://me:hunter2@db/runs"), {}),
    "a database of pairs": (QA, {"env": "DB=host=db user=me password=hunter2"}),
    "a DSN of Sentry": (QA, {"env": f"SENTRY_DSN={SENTRY}"}),
    "a DSN under another name": (QA, {"env": f"ERRORS={SENTRY}"}),
    "text of a netrc": (QA, {"env": "LOGIN=machine api.wandb.ai login user password hunter2"}),
    "lines of a netrc": (("train.py", "machine api.wandb.ai\n  login user\n  password hunter2\n"), {}),
    "a netrc by its name": (QA, {"env": "NETRC=hunter2 hunter2"}),
    "a token in the query of a URL": (("train.py", "--data", "https://host/x?access_token=hunter2&b=1"), {}),
    "a signed URL": (("train.py", "--data", "https://a.blob.core.windows.net/x?sv=1&sig=hunter2%2Fa1B2c3D4%3D"), {}),
    "an annotation": (QA, {"annotation": "notify=https://me:hunter2@host/"}),
    "a toleration": (QA, {"toleration": SECRET}),
    "a web token": (("train.py", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc"), {}),
}


@pytest.mark.parametrize("case", IN_CLEAR)
def test_a_secret_in_clear_is_refused_and_not_repeated(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    command, options = IN_CLEAR[case]
    said = refused(capfd, *command, **options)
    assert "--env_from_secret" in said
    shown = ("hunter2", "secret-of-mine", "0123456789abcdef", "AKIAABCD", "eyJhbGci", "a1B2c3D4")
    for secret in (SECRET, SECRET.lower(), *shown):
        assert secret not in said


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


@pytest.mark.parametrize("flags", ORDINARY, ids=" ".join)
def test_tokens_of_a_tokenizer_and_names_of_columns_pass(
    flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    rendered(capfd, "train.py", *flags)


@pytest.mark.parametrize(
    "flags",
    [("--wandb_key", "0123456789abcdef0123456789abcdef"), ("--comet_token", "aB3xZ9qLmN0pR7tY"), ("--api_key", "word"),
     ("--token", "word"), ("--hf_token", "word")],
    ids=" ".join,
)  # fmt: skip
def test_keys_and_tokens_of_services_stay_refused(flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    assert "--env_from_secret" in refused(capfd, "train.py", *flags)


VALUE = "hunter2xSECRETpart"
NAMED = (
    f"PGPASSWORD={VALUE}", f"MYSQL_PWD={VALUE}", f"DB_PASS={VALUE}", f"SMTP_PASS={VALUE}", f"APIKEY={VALUE}",
    f"WANDBKEY={VALUE}", f"REDIS_URL=redis://:{VALUE}@host:6379/0", f"HF_TOKEN_2={VALUE}", f"GH_PAT={VALUE}",
    f"STORE=DefaultEndpointsProtocol=https;AccountName=x;AccountKey={VALUE}==", f"AUTH_HEADER=Basic {VALUE}",
    f"HTTP_AUTHORIZATION=Bearer {VALUE}", f'JSON={{"api_key": "{VALUE}"}}', f"SIGNING_SECRET_V2={VALUE}",
    f'DOCKER_AUTH_CONFIG={{"auths":{{"r":{{"auth":"{VALUE}"}}}}}}', f"OPENAI_KEY={VALUE}", f"clientSecret={VALUE}",
    f"LINK=https://example.org/x?sv=1&sig={VALUE}", f"PASSPHRASE={VALUE}",
)  # fmt: skip


@pytest.mark.parametrize("pair", NAMED, ids=lambda pair: pair.partition("=")[0])
def test_a_variable_that_holds_a_secret_is_refused(pair: str, capfd: pytest.CaptureFixture[str]) -> None:
    said = refused(capfd, env=pair)
    assert f"--env {pair.partition('=')[0]} ***" in said
    assert "--env_from_secret HF_TOKEN=hub/HF_TOKEN" in " ".join(said.split())
    assert VALUE not in said


def test_plain_words_are_secrets_where_the_name_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    for pair in ("OPENAI_KEY=abcdef", "NGC_CLI_API_KEY=abc", "DB_PASS=word", "HF_TOKEN_2=word", "GH_PAT=word"):
        assert "in clear" in refused(capfd, env=pair)


WORDS = (
    (f"api_key={VALUE}",), (f"wandb.api_key={VALUE}",), ("--set", f"password={VALUE}"), ("--db-pass", VALUE),
    ("--apikey", VALUE), ("--header", f"Authorization: Bearer {VALUE}"), (f"redis://:{VALUE}@h",),
    (f"--header=Authorization: Basic {VALUE}",), (f"+logger={{api_key: {VALUE}}}",), (f"--hf_{'a1B2' * 8}{VALUE}",),
)  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_words_of_a_command_that_hold_a_secret_are_refused(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    said = refused(capfd, "train.py", *words)
    assert "--env_from_secret" in said
    assert VALUE not in said


@pytest.mark.parametrize(
    "pair",
    ["GOOGLE_APPLICATION_CREDENTIALS=/var/secrets/key.json", "SORT_KEY=col_1", "CACHE_KEY=v1", "PRIMARY_KEY=user_id",
     "EOS_TOKEN=<|eot_id|>", "MAX_TOKEN=4096", "SECRET=false", "LOW_PASS=7", "N_PASS=2",
     "DATABASE=postgres://me:$(PGPASSWORD)@host/db", "TITLE=Basic understanding of words"],
)  # fmt: skip
def test_variables_that_only_sound_like_secrets_pass(pair: str, capfd: pytest.CaptureFixture[str]) -> None:
    rendered(capfd, env=pair)


def test_a_script_takes_a_variable_of_a_secret_in_its_words(capfd: pytest.CaptureFixture[str]) -> None:
    rendered(
        capfd, "train.py", "--api_key", "$(KEY)", "--header", "Authorization: Bearer $(KEY)", env_from_secret="KEY=hub"
    )


def test_an_image_may_have_any_name(capfd: pytest.CaptureFixture[str]) -> None:
    rendered(capfd, image="registry.example.org/team/secret:word", env_from_secret="PASSWORD=password/secret")
