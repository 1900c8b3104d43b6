"""Command lines as they stand in public scripts and READMEs, with their own mistakes and additions."""

from __future__ import annotations

from pathlib import Path

import pytest
from migrations import Migrated, migrate

from whet.cli.main import run


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "run.sh"


def _read(script: Path, text: str, *words: str) -> Migrated:
    script.write_text(text)
    return migrate(str(script), *words)


def test_search_over_two_sockets(script: Path) -> None:
    found = _read(
        script,
        "source ./VARS-CCL.sh\n"
        "time(mpirun --bootstrap ssh -np 2 -ppn 2 -genv CCL_WORKER_COUNT=1 -genv I_MPI_PIN_DOMAIN=socket "
        "-genv OMP_NUM_THREADS=24 -genv HF_DATASETS_OFFLINE=1 python run_glue.py --model_name_or_path bert-base-cased "
        "--task_name mrpc --do_train --do_eval --max_seq_length 128 --output_dir mrpc --overwrite_output_dir True "
        "--xpu_backend ccl --no_cuda True)\n",
    )
    assert (found.code, found.command) == (
        0, "HF_DATASETS_OFFLINE=1 whet launch --nproc_per_node 2 --kept_free_cores 1 -- classify --model_name_or_path "
        "bert-base-cased --dataset_name nyu-mll/glue --dataset_config_name mrpc --text_column_names sentence1 "
        "--text_pair_column_names sentence2 --do_train --do_eval --max_seq_length 128 --output_dir mrpc "
        "--overwrite_output_dir --ddp_backend gloo --use_cpu",
    )  # fmt: skip
    assert found.said("I_MPI_PIN_DOMAIN=socket")[0] == "done"


def test_model_card_of_an_older_script() -> None:
    found = migrate(
        "BASE_MODEL=albert-xlarge-v2\npython run_squad.py --version_2_with_negative --model_type albert "
        "--model_name_or_path $BASE_MODEL --output_dir $OUTPUT_MODEL --do_eval --do_lower_case "
        "--train_file $SQUAD_DIR/train-v2.0.json --predict_file $SQUAD_DIR/dev-v2.0.json "
        "--per_gpu_train_batch_size 3 --threads 24 --warmup_steps 814 --fp16 --do_train"
    )
    assert (found.code, found.command) == (
        0, 'whet qa --version_2_with_negative --model_name_or_path albert-xlarge-v2 --output_dir "$OUTPUT_MODEL" '
        '--do_eval --train_file "$SQUAD_DIR"/train-v2.0.json --validation_file "$SQUAD_DIR"/dev-v2.0.json '
        "--per_device_train_batch_size 3 --preprocessing_num_workers 24 --warmup_steps 814 --fp16 --do_train",
    )  # fmt: skip


def test_background_job_with_the_options_of_a_fork(script: Path) -> None:
    found = _read(
        script,
        "nohup python3.7 -m torch.distributed.launch --nproc_per_node 8 run_qa.py \\\n --model_name_or_path ./${name} "
        "--dataset_name squad --do_train --pad_to_max_length --fp16 --fp16_opt_level O2 --use_combine_grad "
        "--optim adamw_apex_fused_npu --dataloader_drop_last true --warmup_ratio ${ratio} --output_dir ./output "
        "> ${log}/train.log 2>&1 &\nwait\n",
    )
    assert found.found["command"].replace(" \\\n    ", " ") == (
        'nohup whet launch --nproc_per_node 8 -- qa --model_name_or_path ./"${name}" --dataset_name squad --do_train '
        '--pad_to_max_length --fp16 --dataloader_drop_last --warmup_ratio "${ratio}" --output_dir ./output'
    )
    assert {"--fp16_opt_level O2", "--use_combine_grad", "--optim adamw_apex_fused_npu"} == found.rows("refused").keys()


def test_command_in_a_variable(script: Path) -> None:
    found = _read(
        script,
        'SUFFIX=".lower"\nrun_cmd="python run_ner.py --model_name_or_path KB/bert \\\n '
        "--train_file ./train$SUFFIX.jsonl \\\n --do_train --return_entity_level_metrics 0 "
        '--skip_memory_metrics --output_dir o"\n'
        "echo $run_cmd\neval $run_cmd\n",
    )
    assert (found.code, found.command) == (
        0, "whet tag --model_name_or_path KB/bert --train_file ./train.lower.jsonl --do_train "
        "--return_entity_level_metrics false --output_dir o",
    )  # fmt: skip


def test_job_of_a_scheduler(script: Path) -> None:
    found = _read(
        script,
        "#!/bin/bash\n#SBATCH --ntasks=1\ntimestamp()\n{\n date +\"%T\"\n}\nPYTHON_VERSION=3.10\nmodule load gcc\n"
        "srun python$PYTHON_VERSION run_ner.py --model_name_or_path=$MODEL --dataset_name=d --output_dir=$OUT "
        "--do_train --num_train_epochs=$EPOCHS\n",
    )  # fmt: skip
    assert (found.code, found.command) == (
        0, 'srun python -m whet tag --model_name_or_path "$MODEL" --dataset_name d --output_dir "$OUT" --do_train '
        '--num_train_epochs "$EPOCHS"',
    )  # fmt: skip


def test_training_in_a_loop_is_refused_with_a_way_out(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text(
        "seed=1\nfor seed in 42 666\ndo\nfor (( n=3; n>=0; n-- ))\ndo\nif [ -e t.csv ]; then\n"
        "python utility/run_classification.py --model_name_or_path m --train_file t.csv --do_train --output_dir o "
        "--num_train_epochs ${n} --seed $seed\nfi\ndone\ndone\n",
    )
    assert run(["migrate", str(script)]) == 78
    shown = capsys.readouterr()
    assert not shown.out
    assert "got: python utility/run_classification.py --model_name_or_path m" in shown.err
    assert "run the script with bash -x" in shown.err
    line = "++ python run_classification.py --model_name_or_path m --train_file t.csv --do_train --output_dir 'o p'"
    assert migrate(line).command.startswith("whet classify --model_name_or_path m "), "a line that bash -x shows"


def test_recipe_of_trl_in_a_quoted_command(script: Path) -> None:
    found = _read(
        script,
        'EXTRA="""--use_peft \\\n    --load_in_4bit\n"""\nCMD="""\naccelerate launch --num_processes 2 \\\n'
        "    --mixed_precision 'fp16' \\\n    `pwd`/examples/scripts/sft.py \\\n    --model_name m --dataset_name d "
        '    --output_dir o --max_seq_length 128 \\\n    $EXTRA\n"""\n{ # try\n    echo $CMD\n    eval "$CMD"\n} || {\n'
        "    exit 1\n}\n",
    )
    assert (found.code, found.command) == (
        0, "whet launch --nproc_per_node 2 -- lm --precision fp16 --model_name_or_path m --dataset_name d "
        "--output_dir o --max_length 128 --lora_r 16 --load_in_4bit --do_train --learning_rate 2e-5",
    )  # fmt: skip


def test_one_rank_for_each_socket(script: Path) -> None:
    found = _read(
        script,
        'source $(python -c "import x as y;print(y.cwd)")/env/setvars.sh\n'
        "export FI_TCP_IFACE=\"$(ip -o -4 route show to default | awk '{print $5}')\"\n"
        "ipexrun --nnodes 1 run_qa.py --model_name_or_path m --dataset_name d --do_train --output_dir o --use_ipex\n",
    )
    wanted = "whet launch -- qa --model_name_or_path m --dataset_name d --do_train --output_dir o"
    assert (found.code, found.command) == (0, wanted)
    assert any(given.startswith("FI_TCP_IFACE=") for given in found.rows("no effect"))


def test_checkpoints_that_never_meet_an_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    """transformers refuses this, too."""
    line = (
        "python3 run_classification.py --model_name_or_path m --dataset_name d --output_dir o --evaluation_strategy "
        "steps --logging_steps 1000 --load_best_model_at_end --metric_for_best_model accuracy --do_train"
    )
    assert run(["migrate", line]) == 78
    shown = capsys.readouterr()
    assert not shown.out
    assert "whet does not accept this command yet:\n\nwhet classify " in shown.err
    assert "fix: use --save_steps 1000 or a multiple of it" in shown.err


def test_script_with_a_known_ending_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["migrate", "python ../bsc_run_ner.py --model_name_or_path m"]) == 78
    assert "--task tag" in capsys.readouterr().err
    assert run(["migrate", "bash train.sh"]) == 78
    assert "name the script that it runs: whet migrate FILE" in capsys.readouterr().err
