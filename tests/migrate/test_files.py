"""Configurations of other programs, and scripts: the options and the launcher's arguments that say the same."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from migrations import Migrated, migrate

from whet.cli.main import run

_ACCELERATE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "MULTI_CPU", "downcast_bf16": "no",
    "enable_cpu_affinity": False, "ipex_config": {"ipex": True},
    "machine_rank": 0, "main_process_ip": "127.0.0.1", "main_process_port": 29500, "main_training_function": "main",
    "mixed_precision": "bf16", "num_machines": 1, "num_processes": 4, "rdzv_backend": "static", "same_network": True,
    "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": True,
}  # fmt: skip
_FSDP = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
    "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": False, "fsdp_sharding_strategy": "SHARD_GRAD_OP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
    "fsdp_activation_checkpointing": True,
}  # fmt: skip
_ZERO = {
    "gradient_accumulation_steps": 4, "gradient_clipping": 1.0, "offload_optimizer_device": "cpu",
    "offload_param_device": "none", "zero3_init_flag": True, "zero3_save_16bit_model": True, "zero_stage": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "command"),
    [
        ({}, "whet launch --nproc_per_node 4 -- qa --use_cpu --precision bf16"),
        ({"distributed_type": "NO", "num_processes": 1, "mixed_precision": "no"}, "whet qa --use_cpu"),
        ({"distributed_type": "FSDP", "fsdp_config": _FSDP},
         "whet launch --nproc_per_node 4 -- qa --use_cpu --fsdp shard_grad_op --gradient_checkpointing "
         "--precision bf16"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": _ZERO},
         "whet launch --nproc_per_node 4 -- qa --use_cpu --gradient_accumulation_steps 4 --max_grad_norm 1.0 "
         "--zero_stage 3 --precision bf16"),
        ({"num_machines": 2, "machine_rank": 1, "main_process_ip": "10.0.0.1"},
         "whet launch --nproc_per_node 2 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 -- qa "
         "--use_cpu --precision bf16"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default", "dynamo_use_dynamic": False}},
         "whet launch --nproc_per_node 4 -- qa --use_cpu --torch_compile_backend inductor "
         "--torch_compile_mode default --precision bf16"),
        ({"mpirun_config": {"mpirun_ccl": "1", "mpirun_hostfile": "/h"}, "num_processes": 2},
         "whet launch --nproc_per_node 2 --hostfile /h -- qa --use_cpu --precision bf16"),
        ({"mpirun_config": {"mpirun_hostfile": "/h"}, "num_machines": 2, "machine_rank": 0, "num_processes": 8,
          "main_process_ip": "10.0.0.1"},
         "whet launch --nproc_per_node 4 --hostfile /h --master_addr 10.0.0.1 -- qa --use_cpu --precision bf16"),
    ],
)  # fmt: skip
def test_configuration_of_accelerate(changed: dict[str, Any], command: str, tmp_path: Path) -> None:
    path = tmp_path / "default_config.yaml"
    path.write_text(yaml.safe_dump(_ACCELERATE | changed))
    found = migrate(str(path), "--task", "qa")
    words = sorted(found.command.split())
    assert (found.code, words) == (0, sorted(command.split()))
    assert found.said("ipex: true")[0] == "no effect"


def test_configuration_without_a_task_is_a_part_of_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(_ACCELERATE))
    assert run(["migrate", str(path)]) == 0
    shown = capsys.readouterr()
    assert shown.out == "whet launch --nproc_per_node 4 -- TASK --use_cpu --precision bf16\n"
    assert "in place of TASK put qa, classify, tag or lm" in shown.err


def test_accelerate_launch_reads_the_file_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text(yaml.safe_dump(_ACCELERATE))
    words = "run_qa.py --model_name_or_path m --dataset_name squad --do_train --output_dir o"
    end = words.removeprefix("run_qa.py ")
    wanted = {f"whet launch --nproc_per_node {n} -- qa --use_cpu --precision bf16 {end}" for n in (4, 2)}
    named = migrate(f"accelerate launch --config_file {path} {words}").command
    over = migrate(f"accelerate launch --config_file {path} --num_processes 2 {words}").command
    assert {named, over} == wanted
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    own = migrate(f"accelerate launch {words}")
    assert own.command == named
    assert str(path) in own.rows("translated")


_DEEPSPEED: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                                                 "warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True,
                          "allgather_bucket_size": 2e8},
    "gradient_accumulation_steps": 2, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": 4,
}  # fmt: skip


def test_configuration_of_deepspeed_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(_DEEPSPEED))
    found = migrate(str(path), "--task", "lm")
    assert (found.code, found.command) == (0, f"whet launch -- lm --deepspeed {path}")
    assert found.said("gradient_clipping: auto") == ("done", "it takes the value of whet's option")
    assert found.rows()["zero_optimization.stage: 2"]["status"] == "kept"


def test_configuration_of_deepspeed_that_whet_refuses_becomes_options(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    other = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}
    path.write_text(json.dumps(_DEEPSPEED | other | {"curriculum_learning": {"enabled": True}}))
    found = migrate(str(path), "--task", "lm")
    assert found.code == 78
    options = {"--zero_stage 3", "--per_device_train_batch_size 4", "--gradient_accumulation_steps 2"}
    assert all(option in found.command for option in options)
    assert "--deepspeed" not in found.command
    assert "memory of a cpu alone" in found.said("zero_optimization.offload_param.device: nvme")[1]
    assert any(given.startswith("curriculum_learning") for given in found.rows("refused"))


def test_line_with_a_configuration_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(_DEEPSPEED))
    words = "--model_name_or_path m --dataset_name d --do_train --output_dir o"
    found = migrate(f"deepspeed --num_gpus 2 run_clm.py {words} --deepspeed {path}")
    assert (found.code, found.command) == (
        0, f"whet launch --nproc_per_node 2 -- lm {words} --deepspeed {path} --packing",
    )  # fmt: skip
    path.write_text(json.dumps(_DEEPSPEED | {"amp": {"enabled": True}}))
    refused = migrate(f"deepspeed --num_gpus 2 run_clm.py {words} --deepspeed {path}")
    assert (refused.code, "--deepspeed" in refused.command) == (78, False)
    gone = migrate(f"deepspeed run_clm.py {words} --deepspeed gone.json")
    assert (gone.code, "--deepspeed gone.json" in gone.command) == (0, True)
    assert "its keys were not checked" in gone.said("gone.json")[1]


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_options_in_a_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"args.{suffix}"
    values = {"model_name_or_path": "m", "dataset_name": "squad", "do_train": True, "output_dir": "o", "no_cuda": True,
              "evaluation_strategy": "epoch", "learning_rate": 3e-5, "report_to": ["none"]}  # fmt: skip
    path.write_text(json.dumps(values) if suffix == "json" else yaml.safe_dump(values))
    words = {"--model_name_or_path m", "--dataset_name squad", "--do_train", "--output_dir o", "--use_cpu",
             "--eval_strategy epoch", "--learning_rate 3e-05", "--report_to none"}  # fmt: skip
    for found in (migrate(str(path), "--task", "qa"), migrate(f"python run_qa.py {path}")):
        assert found.code == 0
        assert found.command.startswith("whet qa ")
        assert all(word in found.command for word in words)


def test_settings_that_transformers_has_written(tmp_path: Path) -> None:
    from transformers import TrainingArguments

    path = tmp_path / "args.json"
    args = TrainingArguments("out", use_cpu=True, num_train_epochs=2, hub_token="hf_abcdefghijklmnopqrst")
    path.write_text(args.to_json_string())
    found = migrate(str(path), "--task", "qa")
    assert (found.code, "--num_train_epochs 2" in found.command) == (0, True)
    assert "null" not in found.command
    assert "--deepspeed" not in found.command
    assert found.said("hub_token: ***")[0] == "no effect"
    assert found.said("deepspeed: null") == ("no effect", "it asks for nothing")
    changed = json.loads(path.read_text())
    changed["accelerator_config"]["split_batches"] = True
    path.write_text(json.dumps(changed))
    assert migrate(str(path), "--task", "qa").code == 78, "it changes the batches"


def test_masks_of_tokens_in_a_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    values = {"eos_token": "<EOS_TOKEN>", "token": "***", "per_gpu_train_batch_size": None, "debug": []}
    path.write_text(json.dumps({"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o"} | values))
    found = migrate(f"trl sft --config {path}")
    assert found.code == 0
    assert {"eos_token: <EOS_TOKEN>", "token: ***", "per_gpu_train_batch_size: null", "debug: []"} <= (
        found.rows("no effect").keys()
    )
    path.write_text(json.dumps({"push_to_hub_token": "hf_abcdefghijklmnopqrst"}))
    assert "hf_" not in str(migrate(str(path), "--task", "qa").found)


def test_configuration_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    values = {"model_name_or_path": "m", "dataset_name": "d", "max_length": 512, "learning_rate": 1e-4,
              "env": {"HF_HUB_OFFLINE": 1}}  # fmt: skip
    path.write_text(yaml.safe_dump(values))
    found = migrate(f"trl sft --config {path} --learning_rate 2e-4 --num_processes 2")
    assert found.code == 0
    assert found.command.startswith("HF_HUB_OFFLINE=1 whet launch --nproc_per_node 2 -- lm ")
    assert "--learning_rate 2e-4" in found.command
    assert migrate("trl sft --config gone.yaml").code == 78


_SCRIPT = """
import os
from transformers import AutoModelForQuestionAnswering, Trainer, TrainingArguments
NAME = "distilbert-base-uncased"
model = AutoModelForQuestionAnswering.from_pretrained(NAME)
data = load_dataset("json", data_files={"train": "t.json", "validation": "v.json"})
args = TrainingArguments("out", num_train_epochs=2, evaluation_strategy="epoch", no_cuda=True,
                         run_name=os.environ["NAME"])
trainer = Trainer(model=model, args=args, train_dataset=data["train"])
trainer.train(resume_from_checkpoint=True)
trainer.evaluate()
"""


def test_script_with_training_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(_SCRIPT)
    found = migrate(str(path))
    assert (found.code, found.command) == (
        78, "whet qa --model_name_or_path distilbert-base-uncased --train_file t.json --validation_file v.json "
        "--output_dir out --num_train_epochs 2 --eval_strategy epoch --use_cpu --do_train "
        "--resume_from_checkpoint auto --do_eval",
    )  # fmt: skip
    assert found.said("run_name=os.environ['NAME']")[0] == "refused"
    assert "whet.Trainer" in found.said(str(path))[1]


def test_script_with_the_arguments_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "sft.py"
    path.write_text(
        "from trl import SFTConfig, SFTTrainer\nargs = SFTConfig(output_dir='o', max_length=256, packing=True)\n"
        "trainer = SFTTrainer(model='m', args=args, train_dataset=load_dataset('d', split='train'))\ntrainer.train()\n"
    )
    found = migrate(str(path))
    assert (found.code, found.command) == (
        0, "whet lm --output_dir o --max_length 256 --packing false --model_name_or_path m --dataset_name d --do_train "
        "--learning_rate 2e-5",
    )  # fmt: skip


_CLASSIFY = """
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
{before}
model = AutoModelForSequenceClassification.from_pretrained("m")
args = TrainingArguments("out", num_train_epochs={epochs})
trainer = Trainer(model=model, args=args{more})
trainer.train()
"""


def _classify(folder: Path, before: str = "data = load_dataset('imdb')", epochs: str = "2", more: str = "") -> Migrated:
    path = folder / "train.py"
    path.write_text(_CLASSIFY.format(before=before, epochs=epochs, more=more and f", {more}"))
    return migrate(str(path))


@pytest.mark.parametrize(
    ("before", "more", "options"),
    [
        ("def tokens(rows):\n    return tokenizer(rows['sentence1'], rows['sentence2'], max_length=256)\n"
         "data = load_dataset('glue', name='mrpc')", "train_dataset=data['train'].map(tokens, batched=True)",
         "--dataset_name glue --dataset_config_name mrpc --max_seq_length 256"),
        ("LENGTH = 200\ntok = AutoTokenizer.from_pretrained('m')\ndata = load_dataset('imdb', split='train[:1000]')\n"
         "data = data.map(lambda row: tok(row['text'], truncation=True, max_length=LENGTH, stride=20))",
         "train_dataset=data",
         "--dataset_name imdb --train_split_name 'train[:1000]' --max_seq_length 200 --doc_stride 20"),
        ("set_seed(7)\ndata = load_dataset('imdb')", "train_dataset=data['train']", "--seed 7 --dataset_name imdb"),
        ("train = load_dataset('imdb', split='train')\ntest = load_dataset('imdb', split='test')",
         "train_dataset=train, eval_dataset=test", "--dataset_name imdb --validation_split_name test"),
        ("data = load_dataset('json', data_files={'train': 'a.json', 'dev': ['b.json']})",
         "train_dataset=data['train'], eval_dataset=data['dev']", "--train_file a.json --validation_file b.json"),
        ("data = load_dataset('imdb')\nconfig = LoraConfig(r=16, target_modules=['query', 'value'], bias='none')",
         "train_dataset=data['train'], peft_config=config",
         "--dataset_name imdb --lora_r 16 --lora_alpha 8 --lora_dropout 0.0 --lora_target_modules query,value"),
    ],
)  # fmt: skip
def test_data_and_adapter_of_a_script(before: str, more: str, options: str, tmp_path: Path) -> None:
    found = _classify(tmp_path, before, more=more)
    words = f"classify --model_name_or_path m {options} --output_dir out --num_train_epochs 2 --do_train"
    assert (found.code, sorted(shlex.split(found.command)[1:])) == (0, sorted(shlex.split(words)))


def test_adapter_of_a_script_of_trl(tmp_path: Path) -> None:
    path = tmp_path / "sft.py"
    path.write_text(
        "args = SFTConfig('o', eval_strategy='epoch')\ndata = load_dataset('d')\n"
        "SFTTrainer('m', args, train_dataset=data['train'], eval_dataset=data['validation'],\n"
        "           peft_config=LoraConfig(r=16, lora_alpha=32)).train()\n"
    )
    found = migrate(str(path))
    assert found.code == 0
    assert "--lora_r 16 --lora_alpha 32 --lora_dropout 0.0" in found.command
    assert "--validation_split_name validation" in found.command, "trl sft itself evaluates on test"


@pytest.mark.parametrize(
    ("before", "more", "given"),
    [
        ("data = load_dataset('json', data_files=['a.json', 'b.json'])", "", "data_files=['a.json', 'b.json']"),
        ("data = load_dataset('json', data_files=ROOT + '/a.json')", "", "data_files=ROOT + '/a.json'"),
        ("data = load_dataset('json', data_files='a.json', split='train[:9]')", "", "split train[:9]"),
        ("data = load_dataset('imdb', data_dir='old')", "", "data_dir='old'"),
        ("data = load_dataset('imdb', split=PART)", "", "split=PART"),
        ("data = load_dataset('imdb')\nmore = load_dataset('squad')", "", "load_dataset('squad')"),
        ("data = load_dataset('imdb')['train'].select(range(9))", "", ".select(range(9))"),
        ("data = load_dataset('imdb')\nteacher = AutoModelForSequenceClassification.from_pretrained('large')", "",
         "the model 'm'"),
        ("data = load_dataset('imdb')\nclass Mine(Trainer): pass", "", "class Mine(Trainer)"),
        ("data = load_dataset('imdb')\nother = TrainingArguments(num_train_epochs=9)", "", "num_train_epochs=2"),
        ("data = load_dataset('imdb')", "callbacks=[EarlyStoppingCallback()]", "callbacks=[EarlyStoppingCallback()]"),
        ("data = load_dataset('imdb')", "eval_dataset=rows()", "eval_dataset=rows()"),
        ("data = load_dataset('imdb')", "peft_config=LoraConfig(r=RANK)", "LoraConfig(r=RANK)"),
        ("data = load_dataset('imdb')", "peft_config=IA3Config()", "peft_config=IA3Config()"),
        ("data = load_dataset('imdb').map(tokens)", "", ".map(tokens)"),
        ("data = load_dataset('imdb').map(lambda row: {'text': row['text'].lower()})", "",
         ".map(lambda row: {'text': row['text'].lower()})"),
        ("def tokens(rows):\n    rows['text'] = clean(rows['text'])\n    return tokenizer(rows['text'])\n"
         "data = load_dataset('imdb').map(tokens)", "", ".map(tokens)"),
        ("def tokens(rows):\n    return tokenizer('about: ' + rows['text'], max_length=99)\n"
         "data = load_dataset('imdb').map(tokens)", "", ".map(tokens)"),
        ("data = load_dataset('imdb').map(lambda row: tokenizer(row['text'], truncation=True))", "",
         "(no max_length of the tokenizer)"),
        ("data = load_dataset('imdb').map(lambda row: tokenizer(row['text'], max_length=LONGEST))", "",
         "max_seq_length=LONGEST"),
        ("data = load_dataset('imdb').map(lambda row: tokenizer(row['text'], add_special_tokens=False))", "",
         "add_special_tokens=False"),
        ("data = load_dataset('imdb')\nset_seed(SEED)", "", "seed=SEED"),
        ("data = load_dataset('imdb')", "train_dataset=data['train'])\nfor one in model.parameters():\n"
         "    one.requires_grad = False\nprint(0", "one.requires_grad"),
        ("data = load_dataset('imdb')", "train_dataset=data['train'])\nmodel.resize_token_embeddings(len(tokenizer)",
         "model.resize_token_embeddings(len(tokenizer))"),
        ("data = load_dataset('imdb')\ntokenizer.add_tokens(['[X]'])", "", "tokenizer.add_tokens(['[X]'])"),
        ("data = load_dataset('imdb')", "train_dataset=data['train'])\n"
         "trainer.train(resume_from_checkpoint=NEWEST", "resume_from_checkpoint=NEWEST"),
    ],
)  # fmt: skip
def test_what_a_command_cannot_say_of_a_script_is_refused(before: str, more: str, given: str, tmp_path: Path) -> None:
    found = _classify(tmp_path, before, more=more)
    assert found.code == 78
    assert found.said(given)[0] == "refused"


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("AutoModelForMaskedLM.from_pretrained('m')", "masked language models"),
        ("AutoModelForSeq2SeqLM.from_pretrained('m')", "encoders and decoders"),
        ("AutoModelForImageClassification.from_pretrained('m')", "whet has no command for such models"),
        ("BertForSequenceClassification(config)", "begins with pretrained weights"),
    ],
)
def test_model_without_a_command_is_refused(model: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"model = {model}\nTrainer(model=model, args=TrainingArguments('out')).train()\n")
    found = migrate(str(path))
    assert found.code == 78
    assert why in found.said(model)[1]
    assert "whet.Trainer" in found.said(model)[1]


def test_blocks_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "block_size = 128\nmodel = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "def tokens(rows):\n    return tokenizer(rows['text'])\n"
        "def group_texts(rows):\n    return {name: sum(rows[name], []) for name in rows}\n"
        "data = load_dataset('d').map(tokens, batched=True).map(group_texts, batched=True)\n"
        "Trainer(model=model, args=TrainingArguments('out'), train_dataset=data['train']).train()\n"
    )
    found = migrate(str(path))
    assert found.code == 0
    assert "--packing --max_length 128" in found.command


@pytest.mark.parametrize(
    "again",
    ["if DEBUG:\n    EPOCHS = 3", "EPOCHS += 1", "EPOCHS: int = 3", "for EPOCHS in (3, 4): pass", "print(EPOCHS := 3)",
     "with started() as EPOCHS: pass", "def train(EPOCHS): pass", "from settings import EPOCHS",
     "from settings import epochs as EPOCHS"],
)  # fmt: skip
def test_name_that_is_bound_twice_has_no_value(again: str, tmp_path: Path) -> None:
    found = _classify(tmp_path, f"data = load_dataset('imdb')\nEPOCHS = 2\n{again}", "EPOCHS")
    assert found.code == 78
    assert "--num_train_epochs" not in found.command
    assert found.said("num_train_epochs=EPOCHS")[0] == "refused"
    once = _classify(tmp_path, "data = load_dataset('imdb')\nEPOCHS: int = 2", "EPOCHS")
    assert (once.code, "--num_train_epochs 2" in once.command) == (0, True)


def test_arguments_that_change_later_are_refused(tmp_path: Path) -> None:
    more = "train_dataset=data['train'])\nargs.num_train_epochs = 9\nprint(0"
    found = _classify(tmp_path, more=more)
    assert (found.code, found.said("args.num_train_epochs")[0]) == (78, "refused")
    settings = "data = load_dataset('imdb')\nSETTINGS = {'seed': 1}\nSETTINGS['seed'] = 2"
    changed = _classify(tmp_path, settings, "2, **SETTINGS")
    assert (changed.code, "--seed" in changed.command) == (78, False)


_JOB = """
apiVersion: batch/v1
kind: Job
metadata: {name: tags}
spec:
  template:
    spec:
      hostNetwork: true
      containers:
      - image: x
        command: [torchrun, --nproc_per_node=2, run_ner.py]
        args: [--model_name_or_path, m, --dataset_name, d, --do_train, --output_dir, /output/o]
        env: [{name: API_KEY, value: abcdefgh12345678}]
        resources: {limits: {cpu: 8, memory: 16Gi, nvidia.com/gpu: 1}}
        volumeMounts: [{name: runs, mountPath: /output}, {name: other, mountPath: /other}]
      volumes:
      - {name: runs, persistentVolumeClaim: {claimName: runs}}
      - {name: other, persistentVolumeClaim: {claimName: other}}
"""


@pytest.mark.parametrize("shell", ["[bash, -c,", "[/bin/sh, -e, -lc,"])
def test_manifest_with_the_text_of_a_shell(shell: str, tmp_path: Path) -> None:
    text = (
        "cd /work && source env.sh; source vars.sh; export HF_DATASETS_CACHE=/data/hf OWN=$NAME && "
        "HF_HUB_OFFLINE=1 numactl -N 0 "
        "python run_ner.py "
        "--model_name_or_path m --dataset_name d --do_train --output_dir /output/o-$(date +%Y) --seed $SEED $MORE; "
        "echo done"
    )
    job = _JOB.replace("[torchrun, --nproc_per_node=2, run_ner.py]", f'{shell} "{text}"]')
    path = tmp_path / "job.yaml"
    path.write_text("\n".join(line for line in job.split("\n") if "args:" not in line))
    found = migrate(str(path))
    assert "--env HF_DATASETS_CACHE=/data/hf --env HF_HUB_OFFLINE=1" in found.command
    assert found.command.endswith('--do_train --output_dir /output/o-"$(date +%Y)"')
    assert found.said("cd /work")[0] == "done"
    assert {"$MORE", "--seed $SEED", "OWN=$NAME"} < found.rows("refused").keys(), (
        "this shell would compute another value"
    )
    assert found.said("$(date +%Y)")[0] == "kept"
    assert "--env OWN=VALUE" in found.said("OWN=$NAME")[1]
    assert (found.command.split()[0], found.said("numactl -N 0")[0]) == ("whet", "done")
    assert all("--env NAME=VALUE" in found.said(f"source {file}.sh")[1] for file in ("env", "vars"))


def test_manifest_of_a_job_with_more_than_whet_renders(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(_JOB)
    found = migrate(str(path))
    assert found.code == 78
    assert found.command == (
        "whet k8s render tags --kind job --image registry.example.org/whet:1 --nodes 1 --nproc_per_node 2 --cpus 8 "
        "--memory 16Gi --output_claim runs -- tag --model_name_or_path m --dataset_name d --do_train "
        "--output_dir /output/o"
    )
    assert found.rows("refused").keys() == {"hostNetwork", "API_KEY ***", "nvidia.com/gpu: 1", "mount /other"}


def _pods(path: Path, command: list[str], kind: str = "PyTorchJob", **given: Any) -> Migrated:
    """Migrate the manifest of a job of two pods, of which this is given: parts of the job, the pod, the container."""
    container = {
        "name": "pytorch", "image": "x", "command": command, "resources": {"limits": {"cpu": 8, "memory": "16Gi"}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "runs", "mountPath": "/runs/"}],
        **given.get("container", {}),
    }  # fmt: skip
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in ("data", "runs")]
    template = {"spec": {"containers": [container], "volumes": claims, **given.get("pod", {})}}
    pods = (
        {"pytorchReplicaSpecs": {"Master": {"template": template}, "Worker": {"template": template}}}
        if kind == "PyTorchJob" else {"completions": 2, "template": template}
    )  # fmt: skip
    job = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "tags"}, "spec": {**pods, **given.get("job", {})}}
    path.write_text(yaml.safe_dump(job))
    return migrate(str(path))


_TAG = ["run_ner.py", "--model_name_or_path", "m", "--dataset_name", "d", "--do_train", "--output_dir", "/runs/o"]
_ENDPOINT = "--rdzv_endpoint=$(MASTER_ADDR):29400"


@pytest.mark.parametrize(
    ("kind", "words", "job", "options"),
    [
        ("PyTorchJob", "torchrun", {}, ""),
        ("PyTorchJob", "torchrun", {"nprocPerNode": "4"}, "--nproc_per_node 4 "),
        ("PyTorchJob", f"torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d {_ENDPOINT}", {},
         "--nproc_per_node 4 "),
        ("PyTorchJob", "torchrun --nproc_per_node=3 --nnodes=$(WORLD_SIZE) --node_rank=$(RANK) --max_restarts 2",
         {"nprocPerNode": "4"}, "--nproc_per_node 3 --max_restarts 2 "),
        ("PyTorchJob", "torchrun --nnodes=1:4", {"nprocPerNode": "2"},
         "--nproc_per_node 2 --min_nodes 1 --max_nodes 4 "),
        ("PyTorchJob", "torchrun", {"runPolicy": {"backoffLimit": 6, "cleanPodPolicy": "None", "suspend": False}},
         "--max_restarts 3 "),
        ("PyTorchJob", "python", {"nprocPerNode": "4"}, ""),
        ("PyTorchJob", "accelerate launch --num_processes 4 --num_machines $(WORLD_SIZE) --machine_rank $(RANK)", {},
         "--nproc_per_node 2 "),
        ("Job", "torchrun --nnodes 2 --nproc-per-node 4 --node_rank $(RANK) --master_addr tags-0.tags",
         {"parallelism": 2, "completionMode": "Indexed", "backoffLimit": 4}, "--nproc_per_node 4 --max_restarts 2 "),
        ("Job", "mpirun -n 4", {"completions": 1}, "--nproc_per_node 4 "),
    ],
)  # fmt: skip
def test_ranks_of_pods(
    kind: str, words: str, job: dict[str, Any], options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = _pods(tmp_path / "job.yaml", [*words.split(), *_TAG], kind, job=job)
    assert found.rows("refused").keys() == {"mount /data"}
    begin = f"--nodes {job.get('completions', 2)} "
    assert found.command.partition(begin)[2].partition("--cpus")[0] == options


@pytest.mark.parametrize(
    ("kind", "words", "given"),
    [
        ("PyTorchJob", "torchrun --nproc_per_node=auto", "--nproc_per_node=auto"),
        ("PyTorchJob", "torchrun --nproc_per_node=$(CPUS)", "--nproc_per_node=$(CPUS)"),
        ("PyTorchJob", "torchrun --nnodes 4", "--nnodes 4"),
        ("PyTorchJob", "torchrun --standalone --nproc_per_node 2", "2 pods"),
        ("PyTorchJob", "accelerate launch --num_processes 4", "2 pods"),
        ("PyTorchJob", "deepspeed", "deepspeed"),
        ("PyTorchJob", "deepspeed --hostfile /h --num_gpus 1", "--hostfile /h"),
        ("PyTorchJob", "srun -n 2 python", "srun -n 2"),
        ("Job", "torchrun --nproc_per_node 2", "2 pods"),
        ("Job", "python", "2 pods"),
    ],
)  # fmt: skip
def test_ranks_that_pods_do_not_have_are_refused(
    kind: str, words: str, given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = _pods(tmp_path / "job.yaml", [*words.split(), *_TAG], kind)
    assert given in found.rows("refused")


def test_what_a_manifest_says_and_whet_does_not_render_is_named(tmp_path: Path) -> None:
    container = {
        "workingDir": "/work", "tty": True,
        "env": [
            {"name": "FROM_MAP", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "b"}}},
            {"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
    }  # fmt: skip
    job = {
        "elasticPolicy": {"minReplicas": 2, "maxReplicas": 2, "maxRestarts": 3, "rdzvId": "a", "metrics": [{}]},
        "runPolicy": {"backoffLimit": 3, "ttlSecondsAfterFinished": 0},
    }
    found = _pods(tmp_path / "job.yaml", ["torchrun", *_TAG], container=container, job=job)
    assert found.rows("refused").keys() == {
        "elasticPolicy.metrics", "runPolicy.ttlSecondsAfterFinished", "backoffLimit: 3", "tty", "mount /data",
        "FROM_MAP of configMapKeyRef",
    }  # fmt: skip
    assert found.said("workingDir: /work")[0] == "no effect"
    assert found.said("RANK of fieldRef")[0] == "done"
    assert "--env" not in found.command
    pod = {"containers": [{"name": "other", "image": "y"}, {"name": "pytorch", "command": ["python", *_TAG[:-1], "o"],
                                                           "workingDir": "/work"}]}  # fmt: skip
    found = _pods(tmp_path / "job.yaml", [], pod=pod, job={"activeDeadlineSeconds": 9})
    assert {"container other", "activeDeadlineSeconds", "workingDir: /work"} <= found.rows("refused").keys()


def test_output_is_on_the_claim_that_holds_it(tmp_path: Path) -> None:
    found = _pods(tmp_path / "job.yaml", ["torchrun", *_TAG])
    assert "--output_claim runs " in found.command
    assert found.command.endswith("--output_dir /output/o")
    mounts = [
        {"name": "runs", "mountPath": "/x", "subPath": "in"}, {"name": "runs", "mountPath": "/runs", "subPath": "a/b"},
    ]  # fmt: skip
    words = [*_TAG, "--tokenizer_name", "/x/tokenizer"]
    found = _pods(tmp_path / "job.yaml", ["torchrun", *words], container={"volumeMounts": mounts})
    assert found.code == 0
    assert found.command.endswith("--output_dir /output/a/b/o --tokenizer_name /output/in/tokenizer")


def test_variables_of_a_container_stand_in_its_command(tmp_path: Path) -> None:
    """The kubelet writes $(NAME), and the shell in the container $NAME; the shell that renders has other variables."""
    env = [
        {"name": "RUN", "value": "a b"}, {"name": "SEED", "value": "3"}, {"name": "OUT", "value": "/runs/$(RUN)"},
        {"name": "API_KEY", "value": "abcdefgh12345678"},
    ]  # fmt: skip
    text = f'torchrun {" ".join(_TAG[:-1])} "$OUT/${{RUN}}" --seed $(SEED) --run_name $SEED-$API_KEY-$(hostname)'
    found = _pods(tmp_path / "job.yaml", ["bash", "-c", text], container={"env": env})
    assert found.rows("refused").keys() == {"mount /data", "API_KEY ***", "--run_name 3-$API_KEY-$(hostname)"}
    assert "abcdefgh" not in json.dumps(found.found)
    assert found.command.endswith("--output_dir '/output/a b/a b' --seed 3")
    assert "--env 'RUN=a b' --env SEED=3 --env 'OUT=/output/a b' -- tag" in found.command
    words = [*_TAG[:-1], "$(OUT)", "--seed", "$(SEED)", "--run_name", "$(HOSTNAME)"]
    found = _pods(tmp_path / "job.yaml", ["torchrun", *words], container={"env": env[:3]})
    assert found.rows("refused").keys() == {"mount /data", "--run_name $(HOSTNAME)"}
    assert found.command.endswith("--output_dir '/output/a b' --seed 3")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "apiVersion: v1\nkind: Pod\n", "no object of the manifest is a job"),
        ("a.yaml", "apiVersion: batch/v1\nkind: Job\nspec: {}\n", "no pods that whet can read"),
        ("a.yaml", _JOB.replace("run_ner.py", "train.py"), "no script in the manifest is one that whet knows"),
        ("a.py", "print(1)\n", "makes no arguments of a training"),
        ("a.py", "print(\n", "cannot be read"),
        ("a.json", "{", "cannot be read"),
        ("a.sh", "echo nothing\n", "no script in it is one that whet knows"),
        ("a.sh", "python run_mlm.py --do_train\n", "whet has no command for masked language models"),
        ("a.sh", "python run_glue_no_trainer.py --lr 1\n", "use run_glue.py"),
        ("a.sh", b"\xff\xfe", "not UTF-8"),
    ],
)  # fmt: skip
def test_file_that_holds_nothing_to_migrate(
    name: str, text: str | bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    assert run(["migrate", str(path)]) == 78
    shown = capsys.readouterr()
    assert said in shown.err
    assert not shown.out
