"""`--auto`: real trials in processes of their own, and a run that ends as it would have without them."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from safetensors.torch import load_file
from transformers import BertTokenizer

from forked_starts import STARTS
from stop_at import stop_at
from text_tasks import examples, load_lines, topic_rows, vocabulary, words, write_csv
from whet.cli.commands import command
from whet.cli.main import run
from whet.config.command_line import load as load_settings
from whet.errors import EXIT_STOPPED_AND_SAVED
from whet.hardware import cpu
from whet.jobs import model_card
from whet.jobs.trial_processes import started_by, without_auto
from whet.plan import choose
from whet.plan.choose import Candidate, Choice, Forecast, Result
from whet.watch import stop

ROUNDING = 1e-6
"""Of a weight after a few steps, whose gradients are summed in another order."""
_TRIES = {"auto": "true", "auto_again": "true", "auto_budget_s": 30, "auto_ranks": 1}


def asked(task: str, model: Path, out: Path, *flags: str, **options: Any) -> list[str]:
    """The words of a short training whose steps have six rows in micro-batches of two."""
    usual = {"train_file": out.parent / "rows.csv", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    more = {"max_steps": 4, "optim": "sgd", "max_grad_norm": 0} | ({"doc_stride": 8} if task == "qa" else {})
    return words(task, model, out, "--do_train", *flags, **(usual | more | options))


def weights(folder: Path) -> dict[str, Any]:
    return load_file(folder / "model.safetensors")


def furthest(one: Path, other: Path) -> float:
    """How far the weights of two trained models are apart, at most."""
    found, wanted = weights(one), weights(other)
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def begins(folder: Path) -> list[dict[str, Any]]:
    return [line for line in load_lines(folder / "run.jsonl") if line["event"] == "begin"]


def keep(candidate: Candidate, given: list[str], **more: Any) -> None:
    """Have a choice kept, as an earlier run of these words would have left it."""
    job, args = load_settings(command(given[0]), given[1:]).settings
    choose.keep(Choice(candidate=candidate, step_s=0.5, **more), choose.key_of(given[0], job, args))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "rows.csv", topic_rows())


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["classify", "lm", *(pytest.param(name, marks=pytest.mark.night) for name in ("qa", "tag"))]
)
def test_every_task_ends_with_the_weights_that_it_has_without_auto(
    task: str, encoder: Path, decoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    model, file = decoder if task == "lm" else encoder, examples(task, tmp_path)
    assert run(asked(task, model, tmp_path / "plain", train_file=file)) == 0
    capsys.readouterr()
    assert run(asked(task, model, tmp_path / "auto", train_file=file, **_TRIES)) == 0
    out = capsys.readouterr().out
    assert "settings tried" in out
    assert max(map(len, out.partition("\nmodel ")[0].splitlines())) <= 80
    assert furthest(tmp_path / "auto", tmp_path / "plain") <= ROUNDING
    begin = begins(tmp_path / "auto")[0]
    tried = [one for one in begin["auto"]["tried"] if one["step_s"] is not None]
    assert {"6 x 1", "2 x 3"} <= {one["setting"] for one in tried}
    assert all(one["peak_bytes"] > 100e6 for one in tried)
    taken = next(one for one in tried if one["setting"] == begin["auto"]["setting"])
    assert taken["step_s"] <= 1.02 * min(one["step_s"] for one in tried), "times within 1.5 % are the same"
    settings = {name: one["value"] for name, one in begin["settings"].items()}
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 6
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.slow
def test_a_second_start_takes_the_choice_of_the_first(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "is_busy", lambda: False)  # other tests may run next to this one, or not any more
    assert run(asked("classify", encoder, tmp_path / "first", **_TRIES, dry_run="true")) == 0
    given = asked("classify", encoder, tmp_path / "second", auto="true", auto_ranks=1, learning_rate=1e-3)
    capsys.readouterr()
    before = STARTS.n_forked
    assert run(given) == 0
    assert STARTS.n_forked == before, "a choice that is kept starts no process"
    assert "as tried" in capsys.readouterr().out
    assert begins(tmp_path / "second")[0]["auto"]["setting"]
    text = rows.read_text()
    first, *others = text.splitlines(keepends=True)
    rows.write_text("".join([first, others[0].replace(" ", "-"), *others[1:]]))  # as many bytes, and a longer row
    assert rows.stat().st_size == len(text.encode())
    assert run(asked("classify", encoder, tmp_path / "third", **_TRIES, dry_run="true")) == 0
    assert STARTS.n_forked > before


def kept(given: list[str]) -> Choice | None:
    """The choice that a run of these words would find."""
    job, args = load_settings(command(given[0]), given[1:]).settings
    return choose.kept(choose.key_of(given[0], job, args))


def test_a_choice_is_not_that_of_other_data_in_the_same_folder(encoder: Path, tmp_path: Path) -> None:
    file, rows = tmp_path / "data" / "train.parquet", topic_rows()
    file.parent.mkdir()
    Dataset.from_list(rows).to_parquet(file)
    given = asked("classify", encoder, tmp_path / "out", auto="true", dataset_name=file.parent)
    at = given.index("--train_file")
    del given[at : at + 2]
    keep(Candidate(rows=3, batches=2), given)
    assert kept(given) is not None
    Dataset.from_list([row | {"text": " ".join([row["text"]] * 9)} for row in rows]).to_parquet(file)
    assert kept(given) is None
    keep(Candidate(rows=3, batches=2), given)
    file.rename(file.with_name("validation.parquet"))
    assert kept(given) is None, "names say which file is trained on"


@pytest.mark.parametrize("option", ["model_name_or_path", "tokenizer_name"])
def test_a_choice_is_not_that_of_another_tokenizer(option: str, encoder: Path, rows: Path, tmp_path: Path) -> None:
    """Texts that a tokenizer cuts into single letters are longer, and its folder has the same config.json."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        shutil.copytree(encoder, folder)

    def given(folder: Path) -> list[str]:
        return asked("classify", encoder, tmp_path / "out", auto="true", **{option: folder})

    keep(Candidate(rows=3, batches=2), given(one))
    assert kept(given(other)) is not None, "the same files in another folder"
    config = (other / "config.json").read_bytes()
    letters = sorted({letter for row in topic_rows() for letter in row["text"]})
    BertTokenizer(vocab=vocabulary(letters), model_max_length=64).save_pretrained(other)
    assert (other / "config.json").read_bytes() == config
    assert kept(given(other)) is None
    assert kept(given(one)) is not None


def test_a_choice_is_not_that_of_other_predictions(encoder: Path, rows: Path, tmp_path: Path) -> None:
    """Forecasts count them: the memory of a run that predicts may be that of its longest test row."""
    test = write_csv(tmp_path / "test.csv", topic_rows())
    given = asked("classify", encoder, tmp_path / "out", auto="true", test_file=test)
    keep(Candidate(rows=3, batches=2), given)
    assert kept(given) is not None
    assert kept([*given, "--do_predict"]) is None
    write_csv(test, [row | {"text": " ".join([row["text"]] * 9)} for row in topic_rows()])
    assert kept(given) is None


@pytest.mark.slow
def test_a_short_run_is_not_tried(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = STARTS.n_forked
    given = asked("classify", encoder, tmp_path / "out", auto="true", auto_budget_s=55, max_seq_length=24)
    assert run(given) == 0
    out = capsys.readouterr().out
    assert "nothing is tried, as the run takes about" in out
    assert STARTS.n_forked == before + 1, "one process has made the forecast"
    assert begins(tmp_path / "out")[0]["auto"] is None
    assert kept(given) is None, "a longer run with these settings is tried"


@pytest.mark.slow
def test_a_choice_of_a_run_that_read_fewer_rows_is_not_that_of_a_longer_one(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its forecast of memory is of the longest of these rows."""
    monkeypatch.setattr(choose, "is_busy", lambda: False)  # other tests may run next to this one, or not any more
    assert run(asked("classify", encoder, tmp_path / "trials", **_TRIES, dry_run="true", max_steps=1)) == 0
    capsys.readouterr()

    def said(name: str, n_steps: int) -> str:
        usual = {"auto": "true", "auto_ranks": 1, "auto_budget_s": 55}
        assert run(asked("classify", encoder, tmp_path / name, **usual, max_steps=n_steps)) == 0
        return " ".join(capsys.readouterr().out.split())

    before = STARTS.n_forked
    assert "as tried" in said("as-short", 1)
    assert STARTS.n_forked == before, "a choice that is kept starts no process"
    longer = said("longer", 4)
    assert "settings are tried again: the trials were of a run that reads fewer rows" in longer
    assert "the settings stay as they are" in longer, "it ends within the budget for trials"
    assert begins(tmp_path / "longer")[0]["auto"] is None


@pytest.mark.slow
def test_a_run_too_short_for_trials_takes_what_an_earlier_one_has_tried(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = asked("classify", encoder, tmp_path / "out", auto="true", auto_ranks=1, auto_budget_s=55)
    keep(Candidate(rows=3, batches=2), given, larger_bytes=1)  # a larger one would fit now
    assert run(given) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "settings are tried again: " in out
    assert "nothing is tried, as the run takes about" in out
    assert "(--auto_again tries): 3 x 2, 0.5" in out
    assert begins(tmp_path / "out")[0]["auto"]["setting"] == "3 x 2"


@pytest.mark.slow
def test_a_run_whose_trials_find_no_time_stays_as_it_is(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(asked("classify", encoder, tmp_path / "out", **(_TRIES | {"auto_budget_s": 0.01}))) == 0
    assert "no trial came to its steps (no time left): the settings stay" in " ".join(capsys.readouterr().out.split())
    assert begins(tmp_path / "out")[0]["settings"]["per_device_train_batch_size"]["value"] == 2


@pytest.mark.slow
def test_a_dry_run_tries_and_trains_nothing(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(asked("classify", encoder, tmp_path / "out", "--dry_run", **_TRIES)) == 0
    out = capsys.readouterr().out
    assert "settings tried" in out
    assert "run        whet classify ..." in out
    assert "memory of one rank" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.night
@pytest.mark.true_start
def test_what_does_not_fit_is_not_tried(encoder: Path, tmp_path: Path) -> None:
    long = [row | {"text": " ".join([row["text"]] * 4)} for row in topic_rows()]
    write_csv(tmp_path / "rows.csv", long * 171)
    usual = {"per_device_train_batch_size": 2048, "gradient_accumulation_steps": 1}
    given = asked("classify", encoder, tmp_path / "out", "--no_time", "--json", **usual)
    given.remove("--do_train")
    plan = [sys.executable, "-m", "whet", "plan", *given]
    found = json.loads(subprocess.run(plan, capture_output=True, check=True).stdout)["memory"]
    activations = found["parts"]["activations"]
    assert activations > 100e6
    limit_gb = (found["peak_bytes"] - 0.3 * activations) / choose.FITS_FRAC / 2**30
    given = asked("classify", encoder, tmp_path / "out", memory_limit_gb=limit_gb, **usual, **_TRIES)
    done = subprocess.run([sys.executable, "-m", "whet", *given], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    auto = begins(tmp_path / "out")[0]["auto"]
    by_setting = {one["setting"]: one for one in auto["tried"]}
    assert by_setting["2048 x 1"]["step_s"] is None
    assert "of what is free" in by_setting["2048 x 1"]["why"]
    assert all((one["peak_bytes"] or 0) < limit_gb * 2**30 for one in auto["tried"])
    assert auto["setting"] != "2048 x 1"


def test_a_run_that_fits_in_no_way_is_refused(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(asked("classify", encoder, tmp_path / "none", memory_limit_gb=0.05, **_TRIES)) == 78
    assert "no settings with the same result fit into memory" in capsys.readouterr().err


@pytest.mark.slow
def test_flags_that_may_cost_keep_their_word_and_get_a_price(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"precision": "fp16", "gradient_checkpointing": "true"}
    assert run(asked("classify", encoder, tmp_path / "out", **_TRIES, **flags)) == 0
    begin = begins(tmp_path / "out")[0]
    assert begin["settings"]["precision"]["value"] == "fp16"
    assert begin["settings"]["gradient_checkpointing"]["value"] is True
    said = " ".join(begin["auto"]["prices"])
    for flag in ("--fp16", "--gradient_checkpointing"):
        assert f"{flag} costs" in said
        assert f"without {flag}" in " ".join(one["setting"] for one in begin["auto"]["tried"])
    assert "a step with it" in " ".join(capsys.readouterr().out.split())


def test_a_resumed_run_is_split_as_the_one_that_stopped(encoder: Path, rows: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out", {"save_strategy": "steps", "save_steps": 2}
    given = asked("classify", encoder, out, auto="true", **options)
    keep(Candidate(rows=3, batches=2), given)
    assert run(given) == 0
    complete = weights(out)
    for name in ("model.safetensors", "checkpoint-4"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    keep(Candidate(rows=6, batches=1), given)  # what would be chosen now
    assert run([*given, "--resume_from_checkpoint", "auto"]) == 0
    first, second = begins(out)
    for begin in (first, second):
        assert begin["settings"]["per_device_train_batch_size"] == {"value": 3, "from": "--auto"}
    assert second["resumed_from"] == 2
    found = weights(out)
    assert all(bool((found[name] == complete[name]).all()) for name in complete)


def test_a_run_stopped_after_its_training_is_evaluated_without_trials(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, options = tmp_path / "out", {"validation_file": rows, "auto_ranks": 1, "auto_budget_s": 50}
    given = asked("classify", encoder, out, "--auto", "--do_eval", **options)
    keep(Candidate(rows=3, batches=2), given)
    with pytest.MonkeyPatch.context() as patched:
        stop_at(patched, model_card, "write", 1)
        assert run(given) == EXIT_STOPPED_AND_SAVED
    stop.restore()
    said = capsys.readouterr().err
    assert "--auto false" in said
    again = next(line for line in said.splitlines() if line.startswith("whet classify"))
    assert run(shlex.split(again)[1:]) == 0
    assert json.loads((out / "eval_results.json").read_text("utf-8"))["eval_samples"] == len(topic_rows())


@pytest.mark.slow
def test_another_allocator_takes_this_process_s_place(encoder: Path, rows: Path, tmp_path: Path) -> None:
    """A library without malloc stands for it: what counts is that it is loaded, and that the process stays the same."""
    a_library(tmp_path / "conda" / "lib", "libjemalloc.so.2")
    given = asked("classify", encoder, tmp_path / "out", auto="true")
    keep(Candidate(rows=3, batches=2, allocator="jemalloc"), given)
    process = subprocess.Popen(
        [sys.executable, "-m", "whet", *given], env=os.environ | {"CONDA_PREFIX": str(tmp_path / "conda")},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    begin = begins(tmp_path / "out")[0]
    assert begin["pid"] == process.pid
    assert begin["auto"]["allocator"] == "jemalloc"
    assert said.count("as tried") == 1
    log = (tmp_path / "out" / "run.log").read_text()
    assert "keeps the memory it frees" not in log, "only glibc's own allocator does"


@pytest.mark.slow
def test_a_signal_ends_the_trials(encoder: Path, rows: Path, tmp_path: Path) -> None:
    given = asked("classify", encoder, tmp_path / "out", **_TRIES)
    with tempfile.TemporaryDirectory() as folder:  # not below tmp_path, whose name may be too long for a socket
        process = subprocess.Popen(
            [sys.executable, "-m", "whet", *given], env=os.environ | {"TMPDIR": folder},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        give_up = time.monotonic() + 60
        while not list(Path(folder).glob("whet-auto-*/1.txt")):  # the first trial, after the forecast
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < give_up
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=30)
        assert process.returncode == 75, said
        assert "stopped by SIGTERM before the first step" in said
        assert not list(Path(folder).glob("whet-auto-*"))
    assert not (tmp_path / "out").exists()


@pytest.mark.night
@pytest.mark.skipif(cpu.usable_cores() < 2, reason="one core runs one rank")
def test_ranks_are_tried_and_taken(encoder: Path, rows: Path, tmp_path: Path) -> None:
    assert run(asked("classify", encoder, tmp_path / "plain")) == 0
    given = asked("classify", encoder, tmp_path / "out", **(_TRIES | {"auto_ranks": 2, "auto_budget_s": 90}))
    line = [sys.executable, "-m", "whet", *given]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    tried = begins(tmp_path / "out")[0]["auto"]["tried"]
    assert [one for one in tried if "2 ranks" in one["setting"] and one["step_s"]], tried
    keep(Candidate(rows=3, batches=1, ranks=2), given)
    plain = [word for word in given if word not in ("--auto_again", "true", "--auto")]
    again = [*plain, "--auto", "true", "--overwrite_output_dir", "true"]
    line = [sys.executable, "-m", "whet", *again, "--auto_again", "false"]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert begins(tmp_path / "out")[-1]["auto"]["ranks"] == 2
    assert furthest(tmp_path / "out", tmp_path / "plain") <= ROUNDING


@pytest.mark.slow
@pytest.mark.skipif(cpu.usable_cores() < 2, reason="one core runs one rank")
def test_ranks_write_into_the_output_folder_alone(encoder: Path, rows: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    given = asked("classify", encoder, tmp_path / "out", auto="true")
    keep(Candidate(rows=3, batches=1, ranks=2), given)
    line = [sys.executable, "-m", "whet", *given]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr
    assert begins(tmp_path / "out")[0]["auto"]["ranks"] == 2
    assert (tmp_path / "out" / "launch-logs" / "rank-1.log").is_file()
    assert not list(here.iterdir())


@pytest.mark.slow
def test_ranks_that_were_chosen_for_one_seed_are_not_taken_for_several(
    encoder: Path, rows: Path, tmp_path: Path
) -> None:
    given = asked("classify", encoder, tmp_path / "out", "--do_eval", auto="true", validation_file=rows)
    keep(Candidate(rows=3, batches=1, ranks=2), given)
    line = [sys.executable, "-m", "whet", *given, "--seeds", "2"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "seeds.json").exists()


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ({"auto_find_batch_size": "true"}, "auto does not go with auto_find_batch_size"),
        ({"auto": "false", "auto_ranks": 2}, "auto_ranks would change nothing without auto"),
        ({"do_train": "false", "do_eval": "true"}, "auto has nothing to train"),
        ({"auto_budget_s": 0}, "auto_budget_s is not above 0"),
    ],
)
def test_what_auto_cannot_honour_is_refused(
    flags: dict[str, Any], text: str, encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = asked("classify", encoder, tmp_path / "out", **({"auto": "true", "validation_file": rows} | flags))
    if "do_train" in flags:
        given.remove("--do_train")
    assert run(given) == 78
    assert text in capsys.readouterr().err


def test_one_of_several_ranks_is_refused(
    encoder: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert run(asked("classify", encoder, tmp_path / "out", auto="true")) == 78
    assert "start one process without a launcher" in capsys.readouterr().err


def test_a_plan_names_the_dry_run(
    encoder: Path, rows: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = asked("classify", encoder, tmp_path / "out", auto="true")
    given.remove("--do_train")
    assert run(["plan", *given]) == 78
    assert "--auto with --dry_run" in capsys.readouterr().err


# ---- what wins ----


def test_verdicts_follow_the_times_in_pairs() -> None:
    assert choose.verdict([1.5]) == "slower"
    assert choose.verdict([1.2]) is None
    assert choose.verdict([1.2, 1.1]) == "slower"
    assert choose.verdict([0.5, 0.5]) is None, "one busy moment is no proof"
    assert choose.verdict([0.8, 0.8, 0.8]) == "faster"
    assert choose.verdict([0.8, 0.8, 1.2]) is None
    assert choose.verdict([0.8, 0.8, 1.2], are_all=True) == "faster"
    assert choose.verdict([1.0, 1.0, 1.01, 1.0]) == "alike"
    assert choose.verdict([0.97, 0.98, 0.97, 0.98, 0.97, 0.98]) == "faster"
    assert choose.verdict([0.75], are_all=True) == "faster", "there was time for no more, and it is far ahead"
    assert choose.verdict([0.9, 0.9], are_all=True) == "faster"
    assert choose.verdict([0.9], are_all=True) is None
    assert choose.verdict([0.75, 0.95], are_all=True) is None


def test_what_was_not_compared_to_the_end_is_not_called_slower() -> None:
    best, other = (Candidate(rows=rows, batches=128 // rows) for rows in (32, 16))
    results = [Result(candidate=best, step_s=2.77), Result(candidate=other, step_s=2.2, why="no time left")]
    assert choose.why_the_next_lost(results, best) == "16 x 8 is not: no time left"


def test_a_step_is_split_in_halves_and_the_users_split_stays() -> None:
    assert choose.sizes(Candidate(rows=3, batches=8)) == ([(24, 1), (12, 2), (6, 4), (3, 8)], [(1, 24)])
    assert choose.sizes(Candidate(rows=45, batches=1)) == ([(45, 1), (15, 3), (5, 9)], [(1, 45)])
    assert choose.sizes(Candidate(rows=7, batches=1)) == ([(7, 1), (1, 7)], [])
    assert choose.sizes(Candidate(rows=2, batches=32)) == (
        [(64, 1), (32, 2), (16, 4), (8, 8), (4, 16), (2, 32)],
        [(1, 64)],
    )


@pytest.mark.parametrize("room", [100, 40, 13, 2, 1])
def test_the_largest_split_that_fits_is_found_by_few_forecasts(room: int) -> None:
    ways = [Candidate(rows=2**n, batches=2 ** (6 - n)) for n in range(6, -1, -1)]

    def look(one: Candidate) -> Forecast:
        return Forecast(candidate=one, step_s=1.0, fits=one.rows <= room, peak_bytes=one.rows)

    found = choose.largest_fitting(ways, look)
    assert max(one.candidate.rows for one in found if one.fits) == max(one.rows for one in ways if one.rows <= room)
    assert len(found) <= 4
    assert choose.largest_fitting(ways, lambda one: replace(look(one), fits=False))[-1].candidate.rows == 1


@pytest.mark.parametrize(("room", "found"), [(30, (15, 3)), (4, (1, 45)), (0, None)])
def test_smaller_parts_of_a_step_are_taken_if_no_larger_one_fits(room: int, found: tuple[int, int] | None) -> None:
    """A sixteenth of 45 rows is nearly 3; where nothing fits, all ways were looked at."""
    base = Candidate(rows=45, batches=1)

    def look(one: Candidate) -> Forecast:
        return Forecast(candidate=one, step_s=1.0, fits=one.rows <= room, peak_bytes=one.rows)

    def timed(one: Candidate) -> Forecast:
        return replace(look(one), peak_bytes=None)

    known = choose.forecasts(base, choose.sizes(base), (None, "selective"), look, timed)
    fitting = [(one.candidate.rows, one.candidate.batches) for one in known if one.fits]
    assert max(fitting, default=None) == found
    assert all(one.candidate.rows * one.candidate.batches == 45 for one in known)
    if found is None:
        assert {one.candidate.checkpointing for one in known if one.candidate.rows == 1} == {None, "selective"}


def test_a_choice_holds_as_long_as_the_memory_does() -> None:
    choice = Choice(candidate=Candidate(rows=4, batches=2), peak_bytes=1000, larger_bytes=4000)
    assert choice.why_again(2000) == ""
    assert "1 kB are free now" in choice.why_again(1000)
    assert choice.why_again(4500) == "", "what is free differs by as much from one minute to the next"
    assert choice.why_again(5000), "the larger one may fit now"
    assert choice.why_again(None) == ""
    near = replace(choice, larger_bytes=1100, free_bytes=1112, seen_bytes=1000)  # the libraries of a run hold 112
    assert near.why_again(1000) == "", "as much as then"
    assert near.why_again(980) == "", "what is free differs by as much"
    assert near.why_again(960), "it takes 94 % now"
    assert near.why_again(1200), "the larger one fits now"
    assert Choice.from_json(json.loads(json.dumps(asdict(choice)))) == choice


def test_a_choice_made_next_to_others_is_made_again_when_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = Choice(candidate=Candidate(rows=4, batches=2, threads=1), was_busy=True)
    for busy in (True, False):
        monkeypatch.setattr(cpu, "running_threads", lambda busy=busy: 1 + busy * cpu.usable_cores())
        assert bool(choice.why_again(None)) is not busy


def a_library(folder: Path, name: str) -> Path:
    """A library of this name that loads, and takes nobody's calls."""
    library = folder / name
    library.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(next(Path("/").glob("lib*/*linux-gnu/libm.so.6")), library)
    return library


_FACTS = (
    "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], open('/proc/self/maps').read())"
)


def test_the_command_does_the_same_without_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = a_library(tmp_path / "conda" / "lib", "libjemalloc.so.2")
    monkeypatch.setenv("CONDA_PREFIX", str(tmp_path / "conda"))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    given = asked("classify", tmp_path, tmp_path / "out")
    _, args = load_settings(command("classify"), [*given[1:]]).settings
    text = without_auto(Candidate(rows=6, batches=1), "classify", args)
    assert text == "whet classify ... --per_device_train_batch_size 6 --gradient_accumulation_steps 1"
    cpu_of_this = min(cpu.usable_cpus())
    alone = Candidate(rows=6, batches=1, threads=4, allocator="jemalloc", cpus=(cpu_of_this,))
    text = without_auto(alone, "classify", args)
    before, whet, options = text.partition("whet classify ...")
    assert whet
    assert options == " --per_device_train_batch_size 6 --gradient_accumulation_steps 1"
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(_FACTS)}"
    found = subprocess.run(["sh", "-c", before + program], capture_output=True, text=True, check=True).stdout
    assert found.startswith(f"[{cpu_of_this}] 4 "), "one process, its cores and threads"
    assert str(library) in found
    ranks = replace(alone, rows=3, ranks=2, cpus=())
    assert without_auto(ranks, "classify", args).startswith(
        "whet launch --nproc_per_node 2 --memory_allocator jemalloc --openmp default -- classify ..."
    )
    ranks = replace(ranks, allocator="default")
    words, _ = started_by(ranks, ["classify"], "logs")
    shown = "launch --nproc_per_node 2 --memory_allocator default --openmp default"
    assert f"whet {shown} --log_dir logs -- classify" in " ".join(words)
    assert without_auto(ranks, "classify", args).startswith(f"whet {shown} -- classify ...")


@pytest.mark.parametrize("name", ["libtcmalloc.so.4", "libiomp5.so"])
def test_ranks_keep_what_the_user_preloads(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = a_library(tmp_path, name)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    command, environment = started_by(Candidate(rows=3, batches=1, ranks=2), ["classify"], str(tmp_path))
    planned = [*command[: command.index("--")], "--dry_run"]
    found = subprocess.run(planned, env=environment, capture_output=True, text=True, check=True).stderr
    assert f"preloaded: {name}\n" in found, "this library, and no other"
    assert "gives way" not in found
