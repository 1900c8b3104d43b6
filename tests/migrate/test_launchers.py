"""What starts a run: launchers, prefixes, variables of the environment."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrations import migrate

from whet.cli.main import run

_RUN = "run_qa.py --model_name_or_path m --dataset_name squad --do_train --output_dir o"
_END = _RUN.removeprefix("run_qa.py ")


@pytest.mark.parametrize(
    ("line", "start"),
    [
        ("python", "whet qa"),
        ("python3.11 -u -W ignore", "whet qa"),
        ("env TOKENIZERS_PARALLELISM=false python", "TOKENIZERS_PARALLELISM=false whet qa"),
        ("CUDA_VISIBLE_DEVICES=0 python", "CUDA_VISIBLE_DEVICES=0 whet qa"),
        ("numactl -C 0-31 -m 0 python", "numactl -C 0-31 -m 0 whet qa"),
        ("numactl --cpunodebind=0 --membind=0 python", "numactl --cpunodebind=0 --membind=0 whet qa"),
        ("taskset -c 0-31 nohup python", "taskset -c 0-31 nohup whet qa"),
        ("bash -c 'python {}'", "whet qa"),
        ("uv run python", "uv run whet qa"),
        ("uv run --with x -- python", "uv run --with x -- whet qa"),
        ("conda run --no-capture-output -n env python", "conda run --no-capture-output -n env whet qa"),
        ("numactl --cpunodebind 0 --membind 0 python", "numactl --cpunodebind 0 --membind 0 whet qa"),
        ("timeout -k 5 12h python", "timeout -k 5 12h whet qa"),
        ("nice -n 5 ionice -c 3 python", "nice -n 5 ionice -c 3 whet qa"),
        ("sudo -E -u me A=1 python", "sudo -E -u me A=1 whet qa"),
        ("apptainer exec --nv -B /x:/y image.sif python", "apptainer exec --nv -B /x:/y image.sif whet qa"),
        ("env -i -u B A=1 python", "A=1 whet qa"),
        # torch
        ("torchrun --nproc_per_node 4", "whet launch --nproc_per_node 4 -- qa"),
        ("torchrun --standalone --nproc-per-node=4", "whet launch --nproc_per_node 4 -- qa"),
        ("torchrun --nproc_per_node 1", "whet qa"),
        ("torchrun --nproc_per_node auto", "whet launch --nproc_per_node auto -- qa"),
        ("torchrun", "torchrun -m whet qa"),
        ("python -m torch.distributed.run --nproc_per_node 2 --max_restarts 3",
         "whet launch --nproc_per_node 2 --max_restarts 3 -- qa"),
        ("python -m torch.distributed.launch --nproc_per_node=2 --use_env", "whet launch --nproc_per_node 2 -- qa"),
        ("torchrun --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29400 --nproc_per_node 2",
         "whet launch --nproc_per_node 2 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29400 -- qa"),
        ("torchrun --nnodes 1:4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint a:1",
         "torchrun --nnodes 1:4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint a:1 -m whet qa"),
        # MPI
        ("mpirun -np 2 python", "whet launch --nproc_per_node 2 -- qa"),
        ("mpirun -n 1 python", "whet qa"),
        ("mpirun -n 2 -ppn 4 python", "whet launch --nproc_per_node 2 -- qa"),
        ("mpirun -n 2 bash -c 'set -e; export HF_HOME=/x; python {}'",
         "HF_HOME=/x whet launch --nproc_per_node 2 -- qa"),
        ("mpiexec.hydra -n 4 -ppn 2 -hosts a,b python", "whet launch --nproc_per_node 2 --hosts a,b -- qa"),
        ("mpirun -n 4 -hosts a,b python", "whet launch --nproc_per_node 2 --hosts a,b -- qa"),
        ("mpirun -n 2 -ppn 1 -hosts a,b,c python", "whet launch --nproc_per_node 1 --hosts a,b -- qa"),
        ("mpirun -np 6 -H a:4,b:4 python", "whet launch --hosts a:4,b:2 -- qa"),
        ("mpirun -H a:2,b:2 -np 4 --bind-to none --mca btl tcp,self -x OMP_NUM_THREADS=24 python",
         "whet launch --hosts a:2,b:2 -- qa"),
        ("mpirun --hostfile h --map-by ppr:2:node -x HF_HOME=/d -x NAME=v python",
         "HF_HOME=/d NAME=v whet launch --nproc_per_node 2 --hostfile h --env NAME -- qa"),
        ("mpirun -n 2 -genv I_MPI_PIN_DOMAIN=socket -genv KMP_BLOCKTIME 1 -bootstrap ssh python -u",
         "KMP_BLOCKTIME=1 whet launch --nproc_per_node 2 -- qa"),
        ("mpirun -n 4 -ppn 4 accelerate launch", "whet launch --nproc_per_node 4 -- qa"),
        ("mpirun -n 2 numactl -N 0 python", "whet launch --nproc_per_node 2 -- qa"),
        ("mpirun -n 4 -genvlist LD_LIBRARY_PATH,FOO python", "whet launch --nproc_per_node 4 -- qa"),
        ("mpirun -np 4 -x PATH -x LD_LIBRARY_PATH python", "whet launch --nproc_per_node 4 -- qa"),
        ("mpirun -n 2 -bootstrap-exec ssh python", "whet launch --nproc_per_node 2 -- qa"),
        ("mpirun -n 2 -H a:2 -x OWN -bootstrap-exec rsh python",
         "whet launch --hosts a:2 --ssh_command rsh --env OWN -- qa"),
        # others
        ("ipexrun", "whet launch --nproc_per_node 1 -- qa"),
        ("ipexrun --nprocs-per-node 2 --hostfile h --ccl-worker-count 2 --memory-allocator jemalloc",
         "whet launch --nproc_per_node 2 --hostfile h --kept_free_cores 2 --memory_allocator jemalloc -- qa"),
        ("python -m intel_extension_for_pytorch.cpu.launch --distributed --nproc_per_node=2 --enable_tcmalloc",
         "whet launch --nproc_per_node 2 --memory_allocator tcmalloc -- qa"),
        ("python -m torch.backends.xeon.run_cpu --throughput-mode", "whet launch -- qa"),
        ("accelerate launch", "whet qa"),
        ("accelerate launch --num_processes 4", "whet launch --nproc_per_node 4 -- qa"),
        ("accelerate launch --num_machines 2 --num_processes 4 --machine_rank 1 --main_process_ip 10.0.0.1",
         "whet launch --nproc_per_node 2 --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 -- qa"),
        ("python -m accelerate.commands.launch --multi_gpu --num_processes=2", "whet launch --nproc_per_node 2 -- qa"),
        ("accelerate launch --multi_gpu", "whet launch --nproc_per_node auto -- qa"),
        ("deepspeed --num_nodes 1 --num_gpus 2", "whet launch --nproc_per_node 2 -- qa"),
        ("deepspeed --num_gpus 2", "whet launch --nproc_per_node 2 -- qa"),
        ("deepspeed --include localhost:0,1 --master_port 9901", "whet launch --nproc_per_node 2 -- qa"),
        ("deepspeed --bind_cores_to_rank", "whet launch -- qa"),
        ("srun -N 2 --ntasks-per-node=2 python", "srun -N 2 --ntasks-per-node=2 python -m whet qa"),
        # a launcher that another one starts
        ("srun torchrun --nnodes 4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint a:1",
         "srun torchrun --nnodes 4 --nproc_per_node 1 --rdzv_backend c10d --rdzv_endpoint a:1 -m whet qa"),
        ("srun torchrun --nproc_per_node 4", "srun whet launch --nproc_per_node 4 -- qa"),
        ("srun -N 1 accelerate launch --num_processes 8", "srun -N 1 whet launch --nproc_per_node 8 -- qa"),
        ("srun -J accelerate deepspeed --num_gpus 2", "srun -J accelerate whet launch --nproc_per_node 2 -- qa"),
        ("flux run -n 2 bash -c 'numactl -N 0 python {}'", "flux run -n 2 numactl -N 0 python -m whet qa"),
        ("LD_PRELOAD=libtcmalloc.so nohup srun numactl -l python",
         "LD_PRELOAD=libtcmalloc.so nohup srun numactl -l python -m whet qa"),
    ],
)  # fmt: skip
def test_start_of_a_line(line: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))  # where accelerate keeps a configuration of its own
    found = migrate(line.format(_RUN) if "{}" in line else f"{line} {_RUN}")
    assert (found.code, found.command) == (0, f"{start} {_END}")


@pytest.mark.parametrize(
    ("line", "given", "why"),
    [
        ("mpirun -n 4 --frobnicate python", "--frobnicate", "keep your launcher"),
        ("mpirun -n 4 --hostfil h python", "--hostfil h", "did you mean --hostfile?"),
        ("torchrun --nproc_per_nod 2", "--nproc_per_nod 2", "did you mean --nproc_per_node?"),
        ("ipexrun --ncores-per-instance 8 --ninstances 1", "--ncores-per-instance 8", "numactl -C"),
        ("ipexrun --ninstances 4", "--ninstances 4", "several runs"),
        ("accelerate launch --tpu", "--tpu", "whet runs on CPUs and NVIDIA's GPUs"),
        ("accelerate launch --config_file gone.yaml", "--config_file gone.yaml", "the file is not here"),
        ("accelerate launch --mixed_precision fp8", "--mixed_precision fp8", "--precision"),
        ("mpirun -f hosts -n 4 python", "4 ranks on the hosts of hosts", "--nproc_per_node N"),
        ("mpirun -n 8 -ppn 2 python", "8 ranks, 2 on each host", "name the hosts"),
        ("mpirun -n 16 -ppn 1 python", "16 ranks, 1 on each host", "name the hosts"),
        ("mpirun -n 2 -wdir /x python", "-wdir /x", "cd before it"),
        ("deepspeed --num_nodes 2 --hostfile gone", "2 hosts", "the file is not here"),
        ("ipexrun --nnodes 2 --hostfile gone", "2 hosts", "the file is not here"),
        ("deepspeed --num_nodes 2", "2 hosts", "--hosts"),
        ("mpirun -n 2 srun -n 4 python", "srun -n 4", "--hosts a,b"),
        (
            "srun bash -c 'torchrun --nnodes 2 --node_rank $SLURM_PROCID --master_addr a {}'",
            "$SLURM_PROCID",
            "each task of srun computes it",
        ),
    ],
)
def test_option_of_a_launcher_that_is_not_carried_out(
    line: str, given: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = migrate(line.format(_RUN) if "{}" in line else f"{line} {_RUN}")
    assert found.code == 78
    status, said = found.said(given)
    assert status == "refused"
    assert why in said


@pytest.mark.parametrize(
    ("hosts", "options", "start"),
    [
        ("node1\nnode2\n", "-n 4", "--nproc_per_node 2 --hosts node1,node2"),
        ("node1\nnode2\n", "-n 4 -ppn 2", "--nproc_per_node 2 --hostfile {hosts}"),
        ("node1\nnode2\nnode3\n", "-n 4 -ppn 2", "--nproc_per_node 2 --hosts node1,node2"),
        ("node1 slots=3\nnode2 slots=1\n", "-n 4", "--hostfile {hosts}"),
        ("node1 slots=3\nnode2 slots=3\n", "-n 4", "--hosts node1:3,node2:1"),
    ],
)
def test_ranks_of_a_hostfile_that_is_here(hosts: str, options: str, start: str, tmp_path: Path) -> None:
    """MPI takes as many hosts of it as there are ranks for, and whet launch takes every one."""
    path = tmp_path / "hosts"
    path.write_text(hosts)
    found = migrate(f"mpirun -f {path} {options} python {_RUN}")
    assert (found.code, found.command) == (0, f"whet launch {start.format(hosts=path)} -- qa {_END}")


@pytest.mark.parametrize(
    ("hosts", "line", "start"),
    [
        ("a slots=2\nb slots=2\nc slots=2\n", "deepspeed --num_nodes 2 --hostfile {}", "--hosts a:2,b:2"),
        ("a slots=2\nb slots=2\nc slots=2\n", "deepspeed --num_nodes 2 --num_gpus 1 --hostfile {}",
         "--nproc_per_node 1 --hosts a,b"),
        ("a slots=2\nb slots=2\n", "deepspeed --num_nodes 2 --hostfile {}", "--hostfile {}"),
        ("a\nb\nc\n", "ipexrun --nnodes 2 --nprocs_per_node 2 --hostfile {}", "--nproc_per_node 2 --hosts a,b"),
        ("a\nb\nc\n", "accelerate launch --num_processes 4 --num_machines 2 --main_process_ip 10.0.0.1 "
         "--machine_rank 0 --mpirun_hostfile {}", "--nproc_per_node 2 --hosts a,b --master_addr 10.0.0.1"),
    ],
)  # fmt: skip
def test_first_hosts_of_a_file(
    hosts: str, line: str, start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    path = tmp_path / "hosts"
    path.write_text(hosts)
    found = migrate(f"{line.format(path)} {_RUN}")
    assert (found.code, found.command) == (0, f"whet launch {start.format(path)} -- qa {_END}")


def test_hosts_of_a_file_that_is_gone_are_named() -> None:
    found = migrate(f"mpirun -f gone -n 8 -ppn 2 python {_RUN}")
    assert found.code == 0
    assert "whet launch takes all of its hosts" in found.rows()["8 ranks on the hosts of gone"]["why"]


def test_variables_of_mpi_reach_other_hosts_by_name() -> None:
    found = migrate(f"mpirun -hosts a,b -ppn 1 -genvlist A,HF_HOME python {_RUN}")
    launch = "whet launch --nproc_per_node 1 --hosts a,b"
    assert (found.code, found.command) == (0, f"{launch} --env A --env HF_HOME -- qa {_END}")
    found = migrate(f"mpirun -genvall -hosts a,b -ppn 1 python {_RUN}")
    assert (found.code, found.command) == (78, f"{launch} -- qa {_END}")
    assert "--env NAME" in found.said("-genvall")[1]
    assert migrate(f"mpirun -genvall -n 2 python {_RUN}").code == 0, "of one machine, ranks have them all"


def test_hostfile_that_whet_refuses_is_not_said_to_be_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "hosts"
    path.write_text("node1 slots=two\n")
    assert run(["migrate", f"mpirun -f {path} -n 4 -ppn 2 python {_RUN}"]) == 78
    shown = capsys.readouterr()
    assert (shown.out, "not here" in shown.err) == ("", False)
    assert f"{path}, line 1" in shown.err


def test_text_of_a_shell_says_what_stands_before_the_script() -> None:
    found = migrate(
        f'mpirun -n 2 bash -c "source env.sh; export HF_HOME=/x; BS=4; python {_RUN} --seed $BS; echo done"'
    )
    assert (found.code, found.command) == (0, f"HF_HOME=/x whet launch --nproc_per_node 2 -- qa {_END} --seed 4")
    assert found.said("source env.sh") == ("kept", "run it before, as now")


@pytest.mark.parametrize("file", ["vars.sh", "./train_vars.sh", "env_vars.sh"])
def test_file_of_its_user_runs_before_and_may_change_every_value(file: str) -> None:
    found = migrate(f"BATCH=16; source {file}; python {_RUN} --per_device_train_batch_size $BATCH")
    assert (found.code, found.command) == (78, f'whet qa {_END} --per_device_train_batch_size "$BATCH"')
    assert found.said(f"source {file}") == ("kept", "run it before, as now")


@pytest.mark.parametrize(
    ("variables", "launched", "alone"),
    [
        ("OMP_NUM_THREADS=24", "", "OMP_NUM_THREADS=24 "),
        ("KMP_AFFINITY=granularity=fine,compact,1,0", "", "KMP_AFFINITY=granularity=fine,compact,1,0 "),
        ("CCL_ATL_TRANSPORT=ofi FI_PROVIDER=tcp I_MPI_DEBUG=4 UCX_TLS=tcp", "", ""),
        ("MASTER_ADDR=127.0.0.1 MASTER_PORT=29500", "", "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 "),
        ("HF_DATASETS_OFFLINE=1 OWN_VARIABLE='a b'", "HF_DATASETS_OFFLINE=1 OWN_VARIABLE='a b' ",
         "HF_DATASETS_OFFLINE=1 OWN_VARIABLE='a b' "),
        ("TRANSFORMERS_CACHE=/c WANDB_DISABLED=true", "HF_HUB_CACHE=/c ", "HF_HUB_CACHE=/c "),
        ("GLOO_SOCKET_IFNAME=eth0", "", "GLOO_SOCKET_IFNAME=eth0 "),
        ("HF_TOKEN=hf_abcdefghijklmnopqrst", "", ""),
        ("IPEX_VERBOSE=1 ACCELERATE_LOG_LEVEL=info", "", ""),
    ],
)  # fmt: skip
def test_variables_with_a_launcher_and_without(variables: str, launched: str, alone: str) -> None:
    found = migrate(f"{variables} mpirun -n 2 python {_RUN}")
    assert (found.code, found.command) == (0, f"{launched}whet launch --nproc_per_node 2 -- qa {_END}")
    found = migrate(f"{variables} python {_RUN}")
    assert (found.code, found.command) == (0, f"{alone}whet qa {_END}")
    assert len(found.rows()) == variables.count("=") - variables.count("=fine") + 4


def test_variables_that_are_options_of_whet() -> None:
    found = migrate(f"CUDA_VISIBLE_DEVICES= ACCELERATE_MIXED_PRECISION=bf16 python {_RUN}")
    assert found.command == f"whet qa {_END} --use_cpu --precision bf16"
    found = migrate(f"ACCELERATE_USE_CPU=true NCCL_DEBUG=INFO CUDA_VISIBLE_DEVICES=0 python {_RUN}")
    assert found.command == f"whet qa {_END} --use_cpu"
    found = migrate(f"MASTER_ADDR=10.0.0.1 mpirun -hosts a,b -ppn 1 python {_RUN}")
    assert found.command == f"whet launch --nproc_per_node 1 --hosts a,b --master_addr 10.0.0.1 -- qa {_END}"


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ("/usr/lib/libjemalloc.so.2", "whet launch --nproc_per_node 1 --memory_allocator jemalloc"),
        ("$CONDA_PREFIX/lib/libiomp5.so:$LD_PRELOAD", "whet launch --nproc_per_node 1 --openmp intel"),
        ("/usr/lib/libown.so:/usr/lib/libtcmalloc.so",
         "LD_PRELOAD=/usr/lib/libown.so whet launch --nproc_per_node 1 --memory_allocator tcmalloc"),
    ],
)  # fmt: skip
def test_preloaded_libraries(value: str, start: str) -> None:
    assert migrate(f"LD_PRELOAD={value} python {_RUN}").command == f"{start} -- qa {_END}"
    assert migrate(f"LD_PRELOAD=/x.so python {_RUN}").command == f"LD_PRELOAD=/x.so whet qa {_END}"


def test_values_that_only_the_shell_knows_stay() -> None:
    line = 'mpirun -np $N python run_qa.py --model_name_or_path $MODEL --train_file "$DATA/a b.json" --do_train'
    found = migrate(f"{line} --output_dir ~/out --num_train_epochs $EPOCHS --bf16 $MORE")
    assert (found.code, found.command) == (
        0,
        'whet launch --nproc_per_node "$N" -- qa --model_name_or_path "$MODEL" --train_file "$DATA"\'/a b.json\' '
        '--do_train --output_dir ~/out --num_train_epochs "$EPOCHS" --bf16 $MORE',
    )


def test_exported_variable_that_is_used_too_counts_for_both() -> None:
    lines = f"OMP_NUM_THREADS=8\nexport OMP_NUM_THREADS\nexport SEED=3\npython {_RUN} --seed $SEED"
    found = migrate(f"{lines} --dataloader_num_workers $OMP_NUM_THREADS")
    assert (found.code, found.command) == (
        0, f"OMP_NUM_THREADS=8 whet qa {_END} --seed 3 --dataloader_num_workers 8",
    )  # fmt: skip
    found = migrate(f"export OMP_NUM_THREADS=8\nmpirun -n 2 -genv OMP_NUM_THREADS=$OMP_NUM_THREADS python {_RUN}")
    assert found.said("OMP_NUM_THREADS=8")[0] == "done"


def test_values_that_a_shell_computes_of_known_ones(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "MODEL=org/bert-base\nBS=16\npython run_qa.py --model_name_or_path $MODEL --dataset_name squad --do_train "
        "--output_dir out/${MODEL##*/}/$(basename $MODEL -base) --gradient_accumulation_steps $((64/BS)) "
        "--num_train_epochs ${EPOCHS:-3} --per_device_train_batch_size ${BS:-8} --seed ${#MODEL}\n"
    )
    found = migrate(str(script))
    assert (found.code, found.command) == (
        78, "whet qa --model_name_or_path org/bert-base --dataset_name squad --do_train --output_dir "
        'out/bert-base/bert --gradient_accumulation_steps 4 --num_train_epochs "${EPOCHS:-3}" '
        '--per_device_train_batch_size 16 --seed "${#MODEL}"',
    )  # fmt: skip
    status, why = found.said("${#MODEL}")
    assert (status, why.startswith("the text sets MODEL: write the value in its place")) == ("refused", True)


@pytest.mark.parametrize(
    "branch", ['if [ -n "$BIG" ]; then\n  BS=64\nfi', '[ -n "$BIG" ] && BS=64', "case $1 in\n b) BS=64 ;;\nesac"]
)
def test_value_that_a_branch_changes_is_not_known(branch: str) -> None:
    found = migrate(f"BS=8\n{branch}\npython {_RUN} --per_device_train_batch_size $BS")
    assert (found.code, found.command) == (78, f'whet qa {_END} --per_device_train_batch_size "$BS"')
    assert found.said("$BS")[0] == "refused"
    assert "bash -x" in found.said("$BS")[1]


@pytest.mark.parametrize(
    ("before", "option"),
    [
        ('if [ -n "$DEBUG" ]; then EXTRA="--max_train_samples 100"; fi', "$EXTRA"),
        ('EXTRA="--seed 3"; [ -n "$BIG" ] && { EXTRA="--seed 4"; }', "$EXTRA"),
        ("ARGS=(--seed 3)\nwhile [[ $# -gt 0 ]]; do ARGS+=($1); shift; done", '"${ARGS[@]}"'),
        ("shift", '"$@"'),
    ],
)
def test_words_that_only_a_branch_or_a_loop_adds_are_refused(
    before: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["migrate", f"{before}\npython {_RUN} {option}"]) == 78
    refused = capsys.readouterr().err.partition("not translated:\n")[2].split("\n")
    assert (refused[0].strip(), refused[1].strip().startswith("the text sets ")) == (option.strip('"'), True)


def test_values_are_those_at_the_command() -> None:
    found = migrate(f"A=1; export B=1; python {_RUN} --seed $A; A=2; export B=2; python {_RUN} --seed $A")
    assert found.code == 0
    assert found.command.split("\n") == [f"B=1 whet qa {_END} --seed 1", f"B=2 whet qa {_END} --seed 2"]
    found = migrate(f'declare -a A=(--seed 3); export HF_HOME=/x; unset HF_HOME; python {_RUN} "${{A[@]}}"')
    assert (found.code, found.command) == (0, f"whet qa {_END} --seed 3")


def test_default_that_a_text_sets_stays_one() -> None:
    found = migrate(f": ${{BS:=8}}\npython {_RUN} --per_device_train_batch_size $BS")
    assert (found.code, found.command) == (0, f'whet qa {_END} --per_device_train_batch_size "${{BS:-8}}"')


@pytest.mark.parametrize("text", ["{}", "mpirun -n 1 bash -c '{}'"])
def test_other_commands_that_may_train_are_named(text: str) -> None:
    others = ["python run_mlm.py --do_train", "python make_data.py", "bash eval.sh", "foo python x.py", "./go.sh 1"]
    lines = f"pip install x; {'; '.join(others[:3])}; mkdir o; python {_RUN}; {'; '.join(others[3:])}; echo python"
    found = migrate(text.format(lines))
    assert (found.code, found.command) == (78, f"whet qa {_END}")
    assert found.rows("refused").keys() == {*others}
    assert "masked language models" in found.said(others[0])[1]
    assert "whet migrate FILE" in found.said(others[2])[1]
    assert "whet does not know foo" in found.said(others[3])[1]


def test_training_that_a_branch_decides_is_named_next_to_another() -> None:
    found = migrate(f"if [ $1 ]; then python run_clm.py --x y; fi; python {_RUN}; OUT=$(python run_ner.py | tail -1)")
    assert (found.code, found.command) == (78, f"whet qa {_END}")
    assert found.rows("refused").keys() == {"python run_clm.py --x y", "python run_ner.py"}
    assert all("bash -x" in row["why"] for row in found.rows("refused").values())


def test_task_is_that_of_a_script_and_of_no_other_command() -> None:
    found = migrate(f"echo a; mkdir b; python train.py {_END} --seed 3; python make_data.py", "--task", "qa")
    assert (found.code, found.command) == (78, f"whet qa {_END} --seed 3")
    assert found.rows("refused").keys() == {"python make_data.py"}


def test_program_before_the_script_that_is_not_known_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", f"nohup foo --bar python {_RUN}"]) == 78
    shown = capsys.readouterr()
    assert (shown.out, "got: foo\n" in shown.err) == ("", True)
    assert "give whet migrate the line without it" in shown.err


def test_variable_that_a_branch_exports_is_refused() -> None:
    found = migrate(f"export HF_HOME=/a\nif [ $1 ]; then export HF_HOME=/b; fi\npython {_RUN}")
    assert (found.code, found.command) == (78, f"whet qa {_END}")
    assert any(given.startswith("HF_HOME=") for given in found.rows("refused"))


def test_options_in_a_variable_with_an_unknown_one(tmp_path: Path) -> None:
    words = "--dataset_name squad --do_train --output_dir o"
    found = migrate(f'ARGS="--model_name_or_path $MODEL {words}"\npython run_qa.py $ARGS')
    assert (found.code, found.command) == (0, f'whet qa --model_name_or_path "$MODEL" {words}')
    evaluated = migrate(f"SEED=3\nCMD='python {_RUN} --seed $SEED'\neval $CMD")
    assert (evaluated.code, evaluated.command) == (0, f"whet qa {_END} --seed 3")


def test_script_with_several_runs(tmp_path: Path) -> None:
    script = tmp_path / "glue.sh"
    script.write_text(
        "set -e\ncd examples\nsource env/bin/activate\npip install -r requirements.txt\nMODEL=bert-base-cased\n"
        "ARGS=(--do_train --do_eval)\nCUDA_VISIBLE_DEVICES=0\n"
        "python run_glue.py --model_name_or_path $MODEL --task_name mrpc "
        '"${ARGS[@]}" --output_dir out/$TASK/ 2>&1 | tee log.$TASK\n'
        "cd .. && python run_qa.py --model_name_or_path $MODEL --dataset_name squad --do_eval --output_dir qa && "
        "echo done\n"
    )
    found = migrate(str(script))
    assert found.code == 0
    first, second = (one["command"].replace(" \\\n    ", " ") for one in found.found["runs"])
    assert first.endswith('--do_train --do_eval --output_dir out/"$TASK"/')
    assert second == "whet qa --model_name_or_path bert-base-cased --dataset_name squad --do_eval --output_dir qa"
    assert found.said("cd examples") == ("kept", "run it before, as now")
    assert found.said("cd ..") == ("kept", "run it before, as now")
    assert "not exported" in found.said("CUDA_VISIBLE_DEVICES=0")[1]
