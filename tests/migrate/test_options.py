"""Options of transformers' scripts and of TRL: kept, translated, without effect, or refused with a way to continue."""

from __future__ import annotations

import shlex

import pytest
from migrations import Migrated, migrate

from whet.cli.commands import command
from whet.config.aliases import ALIASES, REFUSED
from whet.config.settings import Names

_DATA = "--model_name_or_path m --dataset_name squad --do_train --output_dir o"


def _qa(words: str) -> Migrated:
    return migrate(f"python run_qa.py {_DATA} {words}")


_SCRIPTS = {"run_qa.py": "qa", "run_classification.py": "classify", "run_ner.py": "tag", "run_clm.py": "lm"}


@pytest.mark.parametrize("script", _SCRIPTS)
def test_every_option_of_a_task_is_kept_or_refused_with_a_reason(script: str) -> None:
    """One at a time, with its default: an option that whet has is never unknown to its own migration."""
    names = Names.of(command(_SCRIPTS[script]).parts)
    for name, option in names.options.items():
        if name in _DATA or name == "token" or option.default in (None, (), ""):
            continue
        text = ",".join(option.default) if isinstance(option.default, tuple) else str(option.default).lower()
        found = migrate("--", "python", script, *_DATA.split(), f"--{name}", text)
        row = next(row for given, row in found.rows().items() if given.split()[0] == f"--{name}")
        assert row["status"] == "kept" or row["why"], name
        assert (row["status"] == "kept") == (f"--{name}" in found.command), name


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_every_older_name_says_what_it_is(name: str) -> None:
    alias = ALIASES[name]
    value = {"evaluation_strategy": "epoch", "xpu_backend": "ccl", "torchdynamo": "inductor"}.get(name)
    value = value or ("true" if bool in (alias.kind, *getattr(alias.kind, "__args__", ())) else "3")
    value = "{}" if name.endswith("kwargs") else value
    found = _qa(f"--gradient_checkpointing --{name} {value}")
    status, said = found.said(f"--{name} {value}")
    if alias.to is None:
        assert (status, said) == ("no effect", alias.note)
    else:
        assert status in ("translated", "refused"), said
        assert f"--{alias.to}" in said


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_every_refused_name_says_what_to_do(name: str) -> None:
    one = REFUSED[name]
    value = "false" if True in one.off else "true"
    status, said = _qa(f"--{name} {value}").said(f"--{name} {value}")
    assert (status in ("refused", "done"), said) == (True, one.instead)


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("--overwrite_output_dir True", "--overwrite_output_dir"),
        ("--dataloader_pin_memory false", "--dataloader_pin_memory false"),
        ("--evaluation_strategy steps", "--eval_strategy steps"),
        ("--per-device-train-batch-size=4", "--per_device_train_batch_size 4"),
        ("--per_gpu_train_batch_size 3", "--per_device_train_batch_size 3"),
        ("--per_device_train_batch 4", "--per_device_train_batch_size 4"),
        ("--report_to tensorboard wandb", "--report_to tensorboard,wandb"),
        ("--label_names a b", "--label_names a --label_names b"),
        ("--run_name=--x --report_to wandb", "--run_name=--x --report_to wandb"),
        ("--resume_from_checkpoint", "--resume_from_checkpoint auto"),
        ("--fp16 --half_precision_backend cpu_amp", "--fp16"),
        ("--pad_to_max_length False", "--pad_to_max_length false"),
        ("--lr_scheduler_type cosine --warmup_ratio 0.1", "--lr_scheduler_type cosine --warmup_ratio 0.1"),
        ("--seed 1 --seed 2", "--seed 2"),
        ("--no_pad_to_max_length", "--pad_to_max_length false"),
        ("--no-gradient-checkpointing", "--gradient_checkpointing false"),
        (
            "--no_remove_unused_columns --no_dataloader_pin_memory",
            "--remove_unused_columns false --dataloader_pin_memory false",
        ),
        ("--no_use_cache", ""),
        ("--label_names null", "--label_names null"),
    ],
)
def test_value_is_written_as_whet_reads_it(given: str, becomes: str) -> None:
    found = _qa(given)
    assert (found.code, found.command) == (0, f"whet qa {_DATA} {becomes}".rstrip())


def test_unknown_option_is_named_with_the_nearest() -> None:
    found = _qa("--learning_rte 3e-5")
    assert (found.code, found.command) == (78, f"whet qa {_DATA}")
    assert "did you mean --learning_rate?" in found.said("--learning_rte 3e-5")[1]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--learning_rate much", "learning_rate takes a number"),
        ("--learning_rate", "give it"),
        ("--trust_remote_code True", "whet never runs code that comes with a model"),
        ("--optim adamw_hfx", "did you mean --optim"),
        ("--evaluation_strategy steps epoch", "takes one value"),
        ("--dtype float32 bfloat16", "takes one value"),
        ("--no_use_fast_tokenizer", "fast ones"),
        ("--use_fast_tokenizer False", "fast ones"),
        ("--push_to_hub_organization me", "name it in --hub_model_id"),
        ("stray words", "put its flag before it"),
    ],
)
def test_refused_value_leaves_a_command_that_whet_takes(given: str, why: str) -> None:
    found = _qa(given) if given.startswith("--") else migrate(f"python run_qa.py {given} {_DATA}")
    assert (found.code, found.command) == (78, f"whet qa {_DATA}")
    assert any(why in row["why"] for row in found.rows("refused").values())


def test_options_that_contradict_each_other_are_left_to_the_user() -> None:
    found = _qa("--bf16 --fp16")
    assert (found.code, found.found["command"]) == (78, None)
    assert [one["what"] for one in found.found["runs"][0]["problems"]] == ["bf16 and fp16 are both asked for"]


def test_secrets_are_not_repeated() -> None:
    found = _qa("--token hf_abcdefghijklmnopqrst --hub_token hf_bcdefghijklmnopqrstu")
    assert "hf_" not in str(found.found)
    for name in ("token", "hub_token"):
        assert found.said(f"--{name} ***") == ("translated", "HF_TOKEN")
        assert f"--{name}" not in found.command


@pytest.mark.parametrize(
    ("task", "becomes"),
    [
        ("mrpc", "mrpc --text_column_names sentence1 --text_pair_column_names sentence2"),
        ("SST-2", "sst2 --text_column_names sentence"),
        ("stsb", "stsb --text_column_names sentence1 --text_pair_column_names sentence2 --do_regression"),
        ("mnli", "mnli --text_column_names premise --text_pair_column_names hypothesis "
         "--validation_split_name validation_matched"),
    ],
)  # fmt: skip
def test_task_of_glue(task: str, becomes: str) -> None:
    found = migrate(f"python run_glue.py --model_name_or_path m --task_name {task} --do_train --output_dir o")
    assert found.code == 0
    assert f" --dataset_name nyu-mll/glue --dataset_config_name {becomes} --do_train" in found.command


def test_task_of_tags_is_kept() -> None:
    found = migrate(
        "python run_ner.py --task_name pos --model_name_or_path m --dataset_name d --do_train --output_dir o"
    )
    assert " --task_name pos " in found.command


def test_folder_of_older_scripts() -> None:
    words = (
        "--data_dir data --labels l.txt --model_type bert --model_name_or_path m --output_dir o --do_train --do_eval"
    )
    found = migrate(f"python3 run_ner.py {words}")
    assert (found.code, found.command) == (
        0, "whet tag --train_file data/train.txt --validation_file data/dev.txt --model_name_or_path m --output_dir o "
        "--do_train --do_eval",
    )  # fmt: skip


def test_blocks_of_run_clm() -> None:
    words = "--model_name_or_path gpt2 --do_train --do_eval --output_dir o --block_size 512 --torch_dtype bfloat16"
    found = migrate(f"python run_clm.py {words} --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1")
    assert found.code == 0
    assert found.command.endswith("--max_length 512 --precision bf16 --dataset_name wikitext "
                                  "--dataset_config_name wikitext-2-raw-v1 --packing")  # fmt: skip
    text = migrate(f"python run_clm.py {words} --train_file a.txt --validation_file b.txt")
    assert "--packing" not in text.command, "whet joins the lines of plain text by itself"
    part = migrate(f"python run_clm.py {words} --dataset_name d --validation_split_percentage 10")
    assert "--train_split_name 'train[10%:]' --validation_split_name 'train[:10%]'" in part.command


_SFT = "--model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --output_dir o"


def test_defaults_of_trl() -> None:
    found = migrate(f"trl sft {_SFT}")
    assert (found.code, found.command) == (0, f"whet lm {_SFT} --do_train --learning_rate 2e-5")
    assert found.said("(default of TRL: bf16)")[0] == "done"
    assert "--assistant_only_loss false" in found.said("(default of TRL: all turns of messages)")[1]
    assert "several rows" in found.said("(default of TRL: texts end at max_length)")[1]
    dpo = migrate(f"trl dpo {_SFT} --beta 0.2 --learning_rate 5e-7 --loss_type sigmoid --max_length 512")
    options = "--beta 0.2 --learning_rate 5e-7 --max_length 512 --loss dpo --do_train"
    assert (dpo.code, dpo.command) == (0, f"whet lm {_SFT} {options}")


def test_evaluation_of_trl_reads_the_split_test() -> None:
    found = migrate(f"trl sft {_SFT} --eval_strategy steps --eval_steps 100 --learning_rate 1e-5")
    assert found.command.endswith("--eval_steps 100 --learning_rate 1e-5 --do_train --validation_split_name test")
    named = migrate(f"trl sft {_SFT} --eval_strategy steps --dataset_test_split dev")
    assert "--validation_split_name dev" in named.command


def test_adapter_of_trl() -> None:
    words = "--use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj v_proj --load_in_4bit"
    found = migrate(f"python trl/scripts/sft.py {_SFT} --learning_rate 2e-4 {words} --bnb_4bit_quant_type nf4")
    assert found.code == 0
    assert "--lora_r 32 --lora_alpha 16 --lora_target_modules q_proj,v_proj --load_in_4bit" in found.command
    assert found.said("--bnb_4bit_quant_type nf4")[0] == "no effect"
    default = migrate(f"trl sft {_SFT} --use_peft")
    assert "--lora_r 16" in default.command
    without = migrate(f"trl sft {_SFT} --lora_r 8")
    assert without.said("--lora_r 8") == ("no effect", "TRL reads it with use_peft alone")


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("--packing", "--packing false"),
        ("--packing --packing_strategy wrapped", "--packing"),
        ("--dataset_config c --dataset_train_split 'train[:9%]'",
         "--dataset_config_name c --train_split_name 'train[:9%]'"),
        ("--max_seq_length 512 --dataset_num_proc 4", "--max_length 512 --preprocessing_num_workers 4"),
        ("--assistant_only_loss true", "--assistant_only_loss"),
        ("--completion_only_loss true --assistant_only_loss false",
         "--completion_only_loss --assistant_only_loss false"),
        ("--dtype bfloat16", "--precision bf16"),
        ("--use_liger_kernel --padding_free --gradient_checkpointing", "--gradient_checkpointing"),
        ("--accelerate_config zero2", "--zero_stage 2"),
    ],
)  # fmt: skip
def test_option_of_trl(given: str, becomes: str) -> None:
    found = migrate(f"trl sft {_SFT} {given}")
    assert (found.code, found.command) == (0, f"whet lm {_SFT} {becomes} --do_train --learning_rate 2e-5")


@pytest.mark.parametrize(
    "given",
    ["--eos_token '<|im_end|>'", "--loss_type dft", "--loss_type nll dft",
     "--packing true false", "--chat_template_path t", "--dataset_streaming",
     "--lora_modules_to_save lm_head --use_peft", "--neftune_noise_alpha 5"],
)  # fmt: skip
def test_option_that_whet_lm_does_not_have(given: str) -> None:
    found = migrate(f"trl sft {_SFT} {given}")
    assert found.code == 78
    assert found.said(" ".join(shlex.split(given.replace(" --use_peft", ""))))[0] == "refused"


def test_several_losses_of_dpo_are_refused() -> None:
    found = migrate(f"trl dpo {_SFT} --loss_type sigmoid bco_pair sft")
    assert found.code == 78
    assert found.said("--loss_type sigmoid bco_pair sft")[0] == "refused"


def test_configuration_of_deepspeed_as_text() -> None:
    text = '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "steps_per_print": ' + "1" * 300 + "}"
    line = ["--", "python", "run_qa.py", *_DATA.split(), "--deepspeed"]
    assert migrate(*line, '{"zero_optimization": {"stage": 2}}').code == 0
    found = migrate(*line, text)
    assert (found.code, f"--deepspeed '{text}'" in found.command) == (0, True)
    refused = migrate(*line, '{"zero_optimization": {"stage": 2}, "amp": {"enabled": true}}')
    assert (refused.code, "--deepspeed" in refused.command) == (78, False)


def test_script_of_ones_own_is_read_as_the_task_that_is_named() -> None:
    found = migrate(
        "--task", "classify", "python my/train.py --model_name_or_path m --train_file t.csv --do_train --x 1"
    )
    assert (found.code, found.command) == (78, "whet classify --model_name_or_path m --train_file t.csv --do_train")
    assert "--x is unknown" in found.said("--x 1")[1]
