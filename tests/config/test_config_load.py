"""Defaults, config files and flags: which wins, and what each kind of mistake says."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from whet.config.arguments import TrainingArguments
from whet.config.command_line import load
from whet.errors import ConfigError
from whet.tasks.qa.arguments import QaArguments
from whet.tasks.qa.task import ASK, QA

_WORK = ["--model_name_or_path", "m", "--dataset_name", "squad", "--do_train"]


def _load(*argv: str) -> tuple[QaArguments, TrainingArguments]:
    qa, args = load(QA, argv).settings
    return qa, args


def _problems(*argv: str, command: Any = QA) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(command, argv)
    assert caught.value.exit_code == 78
    return [str(problem) for problem in caught.value.problems]


def _write(path: Path, **values: object) -> str:
    path.write_text(json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values))
    return str(path)


def test_command_of_the_old_guides_is_accepted() -> None:
    words = (
        "--model_name_or_path bert-base-uncased --dataset_name squad --do_train --do_eval"
        " --per_device_train_batch_size 12 --learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384"
        " --doc_stride 128 --output_dir OUT --use_ipex --bf16 --no_cuda --xpu_backend ccl"
    )
    loaded = load(QA, words.split())
    qa, args = loaded.settings
    assert (qa.model_name_or_path, qa.dataset_name, qa.max_seq_length) == ("bert-base-uncased", "squad", 384)
    assert (args.learning_rate, args.per_device_train_batch_size, args.num_train_epochs) == (3e-5, 12, 2.0)
    assert args.do_train and args.do_eval and args.bf16 and args.use_cpu  # noqa: PT018 - four switches of one command
    assert [note.split()[0].rstrip(":") for note in loaded.notes] == ["--use_ipex", "--no_cuda", "--xpu_backend"]


def test_command_line_and_python_give_equal_settings() -> None:
    _, args = _load(*_WORK, "--bf16", "--warmup_steps", "0.1", "--report_to", "wandb", "--report_to", "mlflow")
    assert args == TrainingArguments(do_train=True, bf16=True, warmup_steps=0.1, report_to=["wandb", "mlflow"])


def test_later_files_override_earlier_ones_and_flags_override_files(tmp_path: Path) -> None:
    one = _write(tmp_path / "one.yaml", seed=1, learning_rate=1e-5, weight_decay=0.1)
    two = _write(tmp_path / "two.json", seed=2, learning_rate=2e-5)
    _, args = _load("--seed", "3", "--config", one, "--config", two, *_WORK)
    assert (args.seed, args.learning_rate, args.weight_decay) == (3, 2e-5, 0.1)


def test_older_name_in_a_file_is_overridden_by_the_flag(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.yaml", no_cuda=True)
    assert _load("--config", path, *_WORK)[1].use_cpu
    assert not _load("--config", path, "--no_use_cpu", *_WORK)[1].use_cpu


def test_lone_json_file_works_as_in_run_qa(tmp_path: Path) -> None:
    path = _write(
        tmp_path / "run.json", model_name_or_path="m", dataset_name="squad", do_train=True, learning_rate=3e-5, seed=9
    )
    qa, args = _load(path)
    assert (qa.model_name_or_path, args.do_train, args.seed) == ("m", True, 9)
    assert _load("--do_eval", path, "--seed", "10")[1].seed == 10


def test_yaml_is_accepted_in_usual_spellings(tmp_path: Path) -> None:
    path = tmp_path / "run.yml"
    path.write_text(
        "model_name_or_path: m\ndataset_name: squad\ndo_train: yes\nlearning_rate: 3e-5\neval_strategy: no\n"
        "report_to:\n  - tensorboard\nlr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 2}\nrun_name:\n"
    )
    _, args = _load("--config", str(path))
    assert (args.do_train, args.learning_rate, args.eval_strategy, args.run_name) == (True, 3e-5, "no", None)
    assert (args.report_to, args.lr_scheduler_kwargs) == (("tensorboard",), {"num_cycles": 2})


def test_empty_config_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert _load("--config", str(tmp_path / "run.yaml"), *_WORK) == _load(*_WORK)


def test_problems_of_files_and_flags_are_reported_together(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.yaml", learning_rat=1, seed="abc", bf16_full_eval=True)
    missing = str(tmp_path / "missing.yaml")
    said = _problems(
        "--config", path, "--config", missing, "--epochs", "3", "--doc_strid", "3", "--bf16", "--max_steps"
    )
    text = "\n".join(said)
    assert len(said) == 10
    assert [one.split("\n")[0] for one in said[7:]] == [
        "no model is named",
        "no data is named",
        "there is nothing to do",
    ]
    assert f"learning_rat in {path} is unknown" in text
    assert f"seed in {path} does not fit" in text
    assert f"whet does not honour bf16_full_eval in {path}" in text
    assert missing in text
    assert "--epochs is unknown" in text
    assert "did you mean --doc_stride?" in text
    assert "--max_steps has no value" in text


def test_broken_rules_of_task_and_training_are_reported_together() -> None:
    said = _problems("--per_device_train_batch_size", "0", "--doc_stride", "500")
    assert [text.split("\n")[0] for text in said] == [
        "no model is named",
        "no data is named",
        "doc_stride is not below max_seq_length",
        "per_device_train_batch_size is below 1",
        "there is nothing to do",
    ]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("run.yaml", "seed: 1\nseed: 2\n", "seed more than once"),
        ("run.json", '{"seed": 1, "seed": 2}', "'seed' more than once"),
        ("run.yaml", "seed: [1\n", "line 2"),
        ("run.json", '{"seed": }', "line 1"),
        ("run.yaml", "- seed\n", "it holds a list"),
        ("run.json", "3", "it holds a int"),
        ("run.toml", "seed = 1\n", "does not end in .json, .yaml, .yml"),
        ("run.yaml", "seed: !!python/object/apply:os.getcwd []\n", "could not determine a constructor"),
    ],
)
def test_damaged_config_files_are_refused(tmp_path: Path, name: str, text: str, why: str) -> None:
    (tmp_path / name).write_text(text)
    (said,) = _problems("--config", str(tmp_path / name), *_WORK)
    assert why in said


def test_binary_config_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in _problems(str(tmp_path / "run.yaml"))[0]


def test_print_config_can_be_fed_back(tmp_path: Path) -> None:
    words = [*_WORK, "--no_cuda", "--eval_strategy", "steps", "--report_to", "wandb,mlflow", "--adam_epsilon", "1e-9"]
    words += ["--lr_scheduler_type", "cosine", "--lr_scheduler_kwargs", '{"num_cycles": 2}', "--logging_steps", "0.1"]
    printed = load(QA, [*words, "--print_config"]).text
    assert printed
    (tmp_path / "run.yaml").write_text(printed)
    assert _load(str(tmp_path / "run.yaml")) == _load(*words)


def test_print_config_alone_is_a_template_with_every_option() -> None:
    printed = load(QA, ["--print_config"]).text
    assert printed
    fields = [*QaArguments.__dataclass_fields__, *TrainingArguments.__dataclass_fields__]
    assert list(yaml.safe_load(printed)) == fields


def test_token_is_used_but_never_printed(tmp_path: Path) -> None:
    printed = load(QA, [*_WORK, "--token", "hf_secret", "--print_config"]).text
    assert printed
    assert "hf_secret" not in printed
    assert yaml.safe_load(printed)["token"] == "***"
    qa, _ = _load(*_WORK, "--token", "hf_secret")
    assert qa.token == "hf_secret"
    assert "hf_secret" not in repr(qa) + str(qa.to_dict())
    (tmp_path / "run.yaml").write_text(printed)
    assert "the token is masked" in _problems(str(tmp_path / "run.yaml"))[0]
    assert _load(str(tmp_path / "run.yaml"), "--token", "hf_new")[0].token == "hf_new"


def test_mask_of_the_hub_token_is_refused(tmp_path: Path) -> None:
    printed = load(QA, [*_WORK, "--push_to_hub", "--hub_token", "hf_secret", "--print_config"]).text
    assert printed
    (tmp_path / "run.yaml").write_text(printed)
    assert "the hub_token is masked" in _problems(str(tmp_path / "run.yaml"))[0]
    assert _load(str(tmp_path / "run.yaml"), "--hub_token", "hf_new")[1].hub_token == "hf_new"


def test_null_of_an_option_with_several_values_is_none() -> None:
    assert _load(*_WORK, "--label_names", "a", "--label_names", "b")[1].label_names == ("a", "b")
    assert _load(*_WORK, "--label_names", "null")[1].label_names is None


def test_configuration_of_deepspeed_as_text_is_an_object() -> None:
    _, args = _load(*_WORK, "--precision", "fp32", "--deepspeed", '{"zero_optimization": {"stage": 1}}')
    assert args.deepspeed == {"zero_optimization": {"stage": 1}}


def test_token_of_the_wrong_type_is_not_shown(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.yaml", token=123456)
    assert "123456" not in _problems(path, *_WORK)[0]


def test_ask_takes_the_model_first_and_many_questions() -> None:
    (asked,) = load(ASK, ["out", "--context", "-", "--question", "Who, when?", "--question", "Why?"]).settings
    assert (asked.model, asked.context, asked.question, asked.n_best) == ("out", "-", ("Who, when?", "Why?"), 3)


def test_ask_has_no_config_files() -> None:
    said = _problems("out", "--config", "f.yaml", "--print_config", command=ASK)
    assert sorted(text.split("\n")[0] for text in said) == ["--config is unknown", "--print_config is unknown"]


def test_ask_reports_everything_that_is_missing() -> None:
    assert [text.split("\n")[0] for text in _problems(command=ASK)] == [
        "no model is named",
        "no context is given",
        "no question is asked",
    ]


def test_refused_fields_can_be_switched_off_in_every_form(tmp_path: Path) -> None:
    path = _write(tmp_path / "run.yaml", past_index=-1, eval_delay=0, neftune_noise_alpha=None)
    flags = ["--no_use_cache", "--save_safetensors", "--fp16_full_eval", "false"]
    loaded = load(QA, ["--config", path, *flags, "--eval_delay", "0", *_WORK])
    assert loaded.settings == load(QA, _WORK).settings
    assert not loaded.notes


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--batch_eval_metrics"], "batch_eval_metrics"),
        (["--batch_eval_metrics", "true"], "batch_eval_metrics"),
        (["--past_index", "2"], "past_index"),
        (["--push_to_hub_organization", "me"], "push_to_hub_organization"),
    ],
)
def test_refused_fields_stay_refused_when_switched_on(words: list[str], name: str) -> None:
    (said,) = _problems(*_WORK, *words)
    assert said.startswith(f"whet does not honour --{name}\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--eval_steps 50", "eval_steps=50 has no effect with eval_strategy no: set eval_strategy steps to use it"),
        (
            "--save_strategy no --save_steps 50 --save_total_limit 2",
            "save_steps=50 has no effect with save_strategy no: set save_strategy steps to use it; "
            "save_total_limit=2 counts only checkpoints that a signal or a callback asks for: save_strategy is no",
        ),
        (
            "--save_interval_s 60",
            "save_interval_s=60.0 has no effect with save_strategy steps: set save_strategy time to use it",
        ),
        (
            "--logging_strategy epoch --logging_steps 5",
            "logging_steps=5 has no effect with logging_strategy epoch: set logging_strategy steps to use it",
        ),
        (
            "--length_column_name size",
            "length_column_name=size has no effect: it is for train_sampling_strategy group_by_length and "
            "batch_rebalance, and train_sampling_strategy is random",
        ),
        (
            "--train_sampling_strategy batch_rebalance --seed 1",
            "seed=1 has no effect on the order of rows: batch_rebalance shuffles with seed 42, as in transformers; "
            "data_seed changes it",
        ),
        ("--logging_strategy epoch --logging_steps 5 --eval_strategy steps", ""),  # then evaluations come so often
        ("--eval_strategy steps --eval_steps 50 --save_strategy time --save_interval_s 60 --save_total_limit 2", ""),
    ],
)
def test_setting_without_effect_under_its_strategy_is_logged(
    words: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load(QA, [*_WORK, *words.split()])
    assert "; ".join(loaded.notes) == said
    given = dict(zip(*[iter(word.removeprefix("--") for word in words.split())] * 2, strict=True))
    TrainingArguments(**given)
    assert "; ".join(caplog.messages) == said


def test_printed_config_causes_no_notes(tmp_path: Path) -> None:
    """It names every field; those at their defaults were not chosen."""
    path = tmp_path / "run.yaml"
    path.write_text(str(load(QA, [*_WORK, "--save_strategy", "no", "--print_config"]).text))
    assert not load(QA, ["--config", str(path)]).notes


@pytest.mark.parametrize(
    ("name", "meant"),
    [("batch_size", "per_device_train_batch_size"), ("lr", "learning_rate"), ("epochs", "num_train_epochs")],
)
def test_name_of_another_program_suggests_whets(name: str, meant: str) -> None:
    (said,) = _problems(*_WORK, f"--{name}", "8")
    assert f"did you mean --{meant}?" in said


def test_refused_name_consumes_its_value() -> None:
    """`simple` is no config file."""
    (said,) = _problems(*_WORK, "--sharded_ddp", "simple")
    assert "does not honour --sharded_ddp" in said


@pytest.mark.parametrize("words", [("--optim", "adamw_torch_fusd"), ("--max_train_samples", "0")])
def test_print_config_refuses_what_a_run_would_refuse(words: tuple[str, ...]) -> None:
    """But not what is still open, as in a template."""
    (said,) = _problems(*words, "--print_config")
    assert words[0].removeprefix("--") in said


@pytest.mark.parametrize(
    ("words", "meant"), [([], "auto"), (["true"], "auto"), (["out/checkpoint-2"], "out/checkpoint-2")]
)
def test_resume_takes_a_path_or_nothing(words: list[str], meant: str) -> None:
    assert _load(*_WORK, "--resume_from_checkpoint", *words)[1].resume_from_checkpoint == meant


def test_resume_takes_what_transformers_takes() -> None:
    assert TrainingArguments(resume_from_checkpoint=True).resume_from_checkpoint == "auto"
    assert TrainingArguments(resume_from_checkpoint=False).resume_from_checkpoint is None
