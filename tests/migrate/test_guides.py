"""Every command of the guides becomes the command of whet that does the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrations import migrate

_QA = (
    "--model_name_or_path bert-base-uncased --dataset_name squad --do_train --do_eval --per_device_train_batch_size 12 "
    "--learning_rate 3e-5 --num_train_epochs 2 --max_seq_length 384 --doc_stride 128 --output_dir debug_squad/"
)
_CLUSTER = (
    "--model_name_or_path distilbert-base-uncased --dataset_name squad --do_train --do_eval "
    "--per_device_train_batch_size 32 --num_train_epochs 1 --output_dir debug_squad/ --overwrite_output_dir"
)


def test_one_cpu_of_the_older_guide() -> None:
    found = migrate(f"python run_qa.py {_QA} --use_ipex --bf16 --no_cuda")
    assert (found.code, found.command) == (0, f"whet qa {_QA} --bf16 --use_cpu")
    assert found.said("--no_cuda") == ("translated", "--use_cpu")
    assert found.said("--use_ipex")[0] == "no effect"
    assert "archived" in found.said("--use_ipex")[1]


def test_one_cpu_of_the_newer_guide() -> None:
    found = migrate(f"python run_qa.py {_QA} --bf16 --use_cpu")
    assert (found.code, found.command) == (0, f"whet qa {_QA} --bf16 --use_cpu")
    assert found.rows().keys() == found.rows("kept").keys()


def test_two_processes_of_one_machine() -> None:
    found = migrate(
        "export CCL_WORKER_COUNT=1\nexport MASTER_ADDR=127.0.0.1\n"
        f"mpirun -n 2 -genv OMP_NUM_THREADS=23 \\\npython3 run_qa.py \\\n {_QA} --no_cuda --xpu_backend ccl --use_ipex"
    )
    start = "whet launch --nproc_per_node 2 --kept_free_cores 1 -- qa"
    assert (found.code, found.command) == (0, f"{start} {_QA} --use_cpu --ddp_backend gloo")
    assert found.said("MASTER_ADDR=127.0.0.1") == ("done", "ranks of one machine meet on 127.0.0.1, at a free port")
    assert found.said("OMP_NUM_THREADS=23")[0] == "done"


def test_four_processes_of_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = Path("train.sh")
    script.write_text(
        "#!/bin/bash\nexport CCL_WORKER_COUNT=1\nexport MASTER_ADDR=xxx.xxx.xxx.xxx #node0 ip\n"
        "mpirun -f hostfile -n 4 -ppn 2 \\\n -genv OMP_NUM_THREADS=23 \\\n python3 run_qa.py \\\n"
        f" {_QA} --no_cuda --xpu_backend ccl --use_ipex --bf16\n"
    )
    found = migrate("train.sh")
    assert found.code == 0
    assert found.command.startswith(
        "whet launch --nproc_per_node 2 --hostfile hostfile --kept_free_cores 1 --master_addr xxx.xxx.xxx.xxx -- qa"
    )


_SAPPHIRE_RAPIDS = f"""
oneccl_bindings_for_pytorch_path=$(python -c "from oneccl_bindings_for_pytorch import cwd; print(cwd)")
source $oneccl_bindings_for_pytorch_path/env/setvars.sh

export MASTER_ADDR=172.31.3.190
export NUM_PROCESSES=8
export NUM_PROCESSES_PER_NODE=2
export CCL_WORKER_COUNT=2
export CCL_WORKER_AFFINITY=auto
export KMP_HW_SUBSET=1T
mpirun -f ~/hosts \\
 -n $NUM_PROCESSES -ppn $NUM_PROCESSES_PER_NODE  \\
 -genv OMP_NUM_THREADS=24 \\
 -genv LD_PRELOAD="/usr/lib/x86_64-linux-gnu/libtcmalloc.so" \\
 python3 run_qa.py {_CLUSTER} --no_cuda --xpu_backend ccl --bf16
"""


def test_cluster_of_sapphire_rapids_servers() -> None:
    found = migrate(_SAPPHIRE_RAPIDS)
    launch = (
        "whet launch --nproc_per_node 2 --hostfile ~/hosts --memory_allocator tcmalloc --master_addr 172.31.3.190 "
        "--kept_free_cores 2 -- qa"
    )
    assert (found.code, found.command) == (0, f"{launch} {_CLUSTER} --use_cpu --ddp_backend gloo --bf16")
    done, without = found.rows("done"), found.rows("no effect")
    assert {"CCL_WORKER_AFFINITY=auto", "KMP_HW_SUBSET=1T", "OMP_NUM_THREADS=24"} <= done.keys()
    assert any(given.startswith("source ") and "setvars.sh" in given for given in without)
    assert found.said("NUM_PROCESSES=8") == ("translated", "its value, where it is used")


def test_worker_of_a_pytorch_job() -> None:
    words = f"torchrun /workspace/transformers/examples/pytorch/question-answering/run_qa.py {_QA} --bf16"
    found = migrate(f"LOGLEVEL=INFO HF_HUB_CACHE=/data/hub_cache OMP_NUM_THREADS=240 {words}")
    assert (found.code, found.command) == (
        0, f"HF_HUB_CACHE=/data/hub_cache OMP_NUM_THREADS=240 torchrun -m whet qa {_QA} --bf16",
    )  # fmt: skip
    assert "Kubeflow" in found.said("torchrun")[1]
    assert found.said("LOGLEVEL=INFO")[0] == "no effect"


def test_single_process_with_preloaded_libraries() -> None:
    preload = "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4.5.9:/usr/local/lib/libiomp5.so"
    found = migrate(f"LD_PRELOAD={preload} OMP_NUM_THREADS=24 python run_qa.py {_QA} --bf16 --use_cpu")
    launch = "whet launch --nproc_per_node 1 --memory_allocator tcmalloc --openmp intel -- qa"
    assert (found.code, found.command) == (0, f"{launch} {_QA} --bf16 --use_cpu")


_ONE_GPU = """
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

default_args = {"output_dir": "tmp", "eval_strategy": "steps", "num_train_epochs": 1, "log_level": "error",
                "report_to": "none"}
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B", device_map="auto", attn_implementation="sdpa")
args = TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=16, gradient_checkpointing=True,
                         bf16=True, tf32=True, optim="adamw_bnb_8bit", dataloader_pin_memory=True,
                         dataloader_num_workers=4, torch_empty_cache_steps=4, torch_compile=True,
                         torch_compile_backend="inductor", **default_args)
trainer = Trainer(model=model, args=args, train_dataset=ds)
trainer.train()
"""


def test_settings_of_the_gpu_guide(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(_ONE_GPU.replace("train_dataset=ds", "train_dataset=load_dataset('imdb')"))
    found = migrate(str(script))
    assert (found.code, found.command) == (
        0,
        "whet lm --model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 4 "
        "--gradient_accumulation_steps 16 --gradient_checkpointing --bf16 --tf32 --optim adamw_bnb_8bit "
        "--dataloader_pin_memory --dataloader_num_workers 4 --torch_empty_cache_steps 4 --torch_compile "
        "--torch_compile_backend inductor --output_dir tmp --eval_strategy steps --num_train_epochs 1 "
        "--log_level error --report_to none --dataset_name imdb --do_train",
    )


@pytest.mark.parametrize("backend", ["ipex", "nvfuser", "onnxrt", "aot_cudagraphs"])
def test_compilers_of_the_gpu_guide_that_are_gone(backend: str) -> None:
    found = migrate(f"python run_qa.py {_QA} --torch_compile --torch_compile_backend {backend}")
    assert (found.code, found.command) == (78, f"whet qa {_QA} --torch_compile")
    assert "inductor" in found.rows("refused")[f"--torch_compile_backend {backend}"]["why"]
