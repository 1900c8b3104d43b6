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


_POD = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: transformers-pvc}
---
apiVersion: "kubeflow.org/v1"
kind: PyTorchJob
metadata: {name: transformers-pytorchjob, namespace: kubeflow}
spec:
  elasticPolicy: {rdzvBackend: c10d, minReplicas: 1, maxReplicas: 4, maxRestarts: 10}
  pytorchReplicaSpecs:
    Worker:
      replicas: 4
      restartPolicy: OnFailure
      template:
        spec:
          containers:
          - name: pytorch
            image: <image name>:<tag>
            imagePullPolicy: IfNotPresent
            COMMAND
            env:
            - {name: LD_PRELOAD, value: "/usr/lib/x86_64-linux-gnu/libtcmalloc.so.4.5.9:/usr/local/lib/libiomp5.so"}
            - {name: TRANSFORMERS_CACHE, value: /data/pvc-mount/hub_cache}
            - {name: HF_DATASETS_CACHE, value: /data/pvc-mount/hf_datasets_cache}
            - {name: LOGLEVEL, value: INFO}
            - {name: CCL_WORKER_COUNT, value: "1"}
            - {name: OMP_NUM_THREADS, value: "240"}
            - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hub, key: token}}}
            resources:
              limits: {cpu: 240, memory: 128Gi}
              requests: {cpu: 240, memory: 128Gi}
            volumeMounts:
            - {name: pvc-volume, mountPath: /data/pvc-mount}
            - {name: dshm, mountPath: /dev/shm}
          restartPolicy: Never
          nodeSelector: {node-type: gnr}
          volumes:
          - {name: pvc-volume, persistentVolumeClaim: {claimName: transformers-pvc}}
          - {name: dshm, emptyDir: {medium: Memory}}
"""
_IN_SHELL = """command: ["/bin/bash", "-c"]
            args:
            - >-
              cd /workspace/transformers;
              pip install -r requirements.txt;
              torchrun /workspace/transformers/examples/pytorch/question-answering/run_qa.py \\
                QA --output_dir /data/pvc-mount/output_$(date +%Y%m%d) --bf16;"""
_AS_WORDS = "command: [torchrun, run_qa.py, WORDS, --output_dir, /data/pvc-mount/output, --bf16]"
_K8S = (
    "whet k8s render transformers-pytorchjob --kind pytorchjob --image registry.example.org/whet:1 --nodes 4 "
    "--namespace kubeflow --min_nodes 1 --max_nodes 4 --max_restarts 10 --rdzv_backend c10d "
    "--image_pull_policy IfNotPresent --node_selector node-type=gnr --cpus 240 --memory 128Gi "
    "--output_claim transformers-pvc --env HF_HUB_CACHE=/output/hub_cache "
    "--env HF_DATASETS_CACHE=/output/hf_datasets_cache --kept_free_cores 1 --env_from_secret HF_TOKEN=hub/token -- qa"
)


@pytest.mark.parametrize(
    ("command", "output"),
    [(_IN_SHELL, '/output/output_"$(date +%Y%m%d)"'), (_AS_WORDS, "/output/output")],
    ids=["shell", "words"],
)
def test_manifest_of_a_pytorch_job(command: str, output: str, tmp_path: Path) -> None:
    own = _QA.rpartition(" --output_dir")[0]
    words = ", ".join(f'"{word}"' for word in own.split())
    path = tmp_path / "pytorchjob.yaml"
    path.write_text(_POD.replace("COMMAND", command.replace("QA", own, 1).replace("WORDS", words)))
    found = migrate(str(path))
    options = found.command.partition(" -- qa ")
    assert (found.code, options[2]) == (0, f"{own} --output_dir {output} --bf16")
    assert sorted(options[0].split(" --")) == sorted(_K8S.partition(" -- qa")[0].split(" --"))
    assert found.said("OMP_NUM_THREADS=240")[0] == "done"
    assert found.said("/dev/shm") == ("done", "--shared_memory is its size, 1Gi")


def test_what_stands_around_the_training_of_a_manifest_is_named(tmp_path: Path) -> None:
    text = "pip install x; wget y; python make_data.py; BS=4; torchrun run_qa.py WORDS --seed $BS; python evaluate.py"
    own = _QA.rpartition(" --output_dir")[0]
    path = tmp_path / "pytorchjob.yaml"
    command = f"command: [bash, -c, '{text.replace('WORDS', f'{own} --output_dir /data/pvc-mount/o')}']"
    path.write_text(_POD.replace("COMMAND", command))
    found = migrate(str(path))
    assert found.code == 78
    assert found.command.endswith(f" -- qa {own} --output_dir /output/o --seed 4")
    assert found.rows("refused").keys() == {"wget y", "python make_data.py", "python evaluate.py"}
    assert found.said("pip install x") == ("done", "whet's image has what a run needs")


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


def test_backend_of_an_older_guide() -> None:
    found = migrate(f"mpirun -n 2 python3 run_qa.py {_QA} --no_cuda --ddp_backend ccl --use_ipex")
    assert found.command.endswith(f" -- qa {_QA} --use_cpu --ddp_backend gloo")
    assert "archived" in found.rows("translated")["--ddp_backend ccl"]["why"]


@pytest.mark.parametrize("backend", ["ipex", "nvfuser", "onnxrt", "aot_cudagraphs"])
def test_compilers_of_the_gpu_guide_that_are_gone(backend: str) -> None:
    found = migrate(f"python run_qa.py {_QA} --torch_compile --torch_compile_backend {backend}")
    assert (found.code, found.command) == (78, f"whet qa {_QA} --torch_compile")
    assert "inductor" in found.rows("refused")[f"--torch_compile_backend {backend}"]["why"]
