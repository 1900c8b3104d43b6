"""The skill for coding agents: its page follows the convention, and each of its scripts does what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_qa import save_encoder as save_qa_encoder
from tiny_qa import squad

from skill_scripts import SCRIPTS, SKILL, TRAINING, Agent, warm_programs
from text_tasks import TAGS, save_encoder, topic_rows, write_csv, write_lines

_OF_LIBRARIES = {"embed_and_search", "export_and_serve"}
"""Scripts that `tests/libraries/test_skill_scripts.py` runs."""
_SHARED = "whet_json"
_PAGE = (SKILL / "SKILL.md").read_text("utf-8")


def test_the_page_follows_the_convention() -> None:
    """The fields and limits of the Agent Skills specification: agentskills.io/specification."""
    _, front, body = _PAGE.split("---\n", 2)
    about = yaml.safe_load(front)
    assert about.keys() <= {"name", "description", "license", "compatibility", "metadata", "allowed-tools"}
    assert about["name"] == SKILL.name
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", about["name"])
    assert len(about["name"]) <= 64
    assert 0 < len(about["description"]) <= 1024
    assert len(about["compatibility"]) <= 500
    assert len(body.splitlines()) < 500, "the convention keeps what an agent always reads below it"


def test_the_page_lists_every_script_and_every_script_is_run() -> None:
    scripts = {path.stem for path in SCRIPTS.glob("*.py")}
    assert set(re.findall(r"\(scripts/(\w+)\.py\)", _PAGE)) == scripts
    libraries = (SKILL.parents[1] / "tests" / "libraries" / "test_skill_scripts.py").read_text("utf-8")
    own = Path(__file__).read_text("utf-8")
    run = set(re.findall(r'agent\.(?:run|start)\(\s*"(\w+)"', own + libraries))
    assert run == scripts - {_SHARED}
    assert set(re.findall(r'agent\.(?:run|start)\(\s*"(\w+)"', libraries)) == _OF_LIBRARIES


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_programs(tmp_path_factory.mktemp("programs")) as folder:
        yield folder


@pytest.fixture
def agent(tmp_path: Path, programs: Path) -> Agent:
    save_encoder(tmp_path / "model")
    return Agent(tmp_path, programs)


@pytest.mark.slow
def test_a_plan_says_what_makes_a_training_fit(agent: Agent) -> None:
    write_csv(agent.folder / "rows.csv", topic_rows())
    words = ("classify", "--model_name_or_path", "model", "--train_file", "rows.csv", "--no_time", *TRAINING)
    fits = agent.run("plan_what_fits", *words)
    assert fits["fits"] is True
    assert sum(fits["parts"].values()) == fits["peak_bytes"]
    tight = agent.run("plan_what_fits", *words, "--memory", f"{fits['peak_bytes'] // 10**6 + 1}MB")
    assert tight["free_bytes"] < fits["free_bytes"]
    assert list(agent.folder.glob("planned")) == [], "a plan writes nothing"


@pytest.mark.slow
def test_questions_are_learnt_from_csv_without_positions(tmp_path: Path, programs: Path) -> None:
    save_qa_encoder(tmp_path / "model")
    rows = [
        {"question": question["question"], "context": paragraph["context"], "answer": question["answers"][0]["text"]}
        for paragraph in squad()["data"][0]["paragraphs"]
        for question in paragraph["qas"]
    ]
    rows.append(rows[0] | {"answer": "an answer that is not in its context"})
    write_csv(tmp_path / "rows.csv", rows)
    agent = Agent(tmp_path, programs)
    size = ("--max_seq_length", "40", "--doc_stride", "12", "--num_train_epochs", "1")
    found = agent.run("train_qa", "model", "rows.csv", "out", *TRAINING, *size)
    assert found["rows_without_their_answer"] == [len(rows)]
    assert found["scores"].keys() == {"exact_match", "f1"}
    assert (Path(found["model"]) / "model.safetensors").exists()
    (tmp_path / "squad.json").write_text(json.dumps(squad(version_2=True)), "utf-8")
    again = agent.run("train_qa", "model", "squad.json", "with-none", *TRAINING, *size)
    assert again["scores"].keys() == {"exact", "f1"}, "questions without an answer are judged as such"


@pytest.mark.slow
def test_rare_labels_are_repeated_in_the_training_alone(agent: Agent) -> None:
    rows = [row for row in topic_rows() for _ in range(1 if row["label"] == "garden" else 4)]
    write_csv(agent.folder / "rows.csv", rows)
    found = agent.run("classify_imbalanced", "model", "rows.csv", "out", *TRAINING, "--num_train_epochs", "2")
    assert found["rows"]["garden"] == {"given": 4, "trained": 6}
    assert found["rows"]["sailing"] == {"given": 16, "trained": 12}
    assert 0 <= found["f1_macro"] <= 1
    report = agent.run("read_report", "out", "2")
    assert report["status"] == "finished"
    assert report["metrics"]["eval_f1_macro"] == found["f1_macro"]
    assert 0 < len(report["worst"]) <= 2
    assert sum(one["times"] for one in report["confused"]) <= sum(one["expected"] != one["predicted"]
                                                                  for one in _errors(agent.folder / "out"))  # fmt: skip
    assert Path(report["report"]).exists()


def _errors(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "errors.jsonl").read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_words_are_tagged(agent: Agent) -> None:
    write_lines(agent.folder / "train.jsonl", TAGS)
    write_lines(agent.folder / "new.jsonl", [{"tokens": ["the", "boat"]}])
    found = agent.run("tag_words", "model", "train.jsonl", "train.jsonl", "new.jsonl", "out", *TRAINING,
                      "--num_train_epochs", "1")  # fmt: skip
    assert "eval_f1" in found["scores"]
    assert len(Path(found["predictions"]).read_text("utf-8").splitlines()) == 1
    assert len(found["first"]["tags"]) == 2


@pytest.mark.slow
def test_a_training_that_stops_itself_is_run_to_its_end(agent: Agent) -> None:
    """A wrapper around whet kills the first start after its first checkpoint, and ends the second by SIGTERM."""
    write_csv(agent.folder / "rows.csv", topic_rows())
    _break_starts(agent)
    words = ("classify", "--model_name_or_path", "model", "--train_file", "rows.csv", "--do_train", *TRAINING,
             "--output_dir", "out", "--save_steps", "5", "--max_steps", "300", "--save_total_limit", "2")  # fmt: skip
    found = agent.run("keep_running", *words)
    assert (found["starts"], found["status"]) == (3, "ok")
    assert json.loads((agent.folder / "out" / "trainer_state.json").read_text())["global_step"] == 300
    refused = agent.start("keep_running", "classify", "--no_such_option", "3")
    assert refused.returncode == 78
    assert json.loads(refused.stdout)["error"]["what"]


def _break_starts(agent: Agent) -> None:
    """Put a program `whet` before the real one, which ends the training of its first and of its second start."""
    folder = agent.folder / "bin"
    folder.mkdir()
    (folder / "whet").write_text(_BREAKS.format(real=agent.program), "utf-8")
    (folder / "whet").chmod(0o755)
    agent.put_first(folder)


_BREAKS = """#!/bin/bash
newest() {{ grep -o '"pid": [0-9]*' out/run.jsonl | tail -n 1 | tr -dc 0-9; }}
n=$(cat starts 2>/dev/null || echo 0); echo $(( n + 1 )) >starts
if (( n < 2 )); then
    {{
        until compgen -G "out/checkpoint-*[0-9]"; do sleep 0.05; done
        until process=$(newest) && [[ -n $process && $process != "$(cat killed)" ]]; do sleep 0.05; done
        echo "$process" >killed
        if (( n == 0 )); then kill -KILL "$process"; else kill -TERM "$process"; fi
    }} >/dev/null 2>&1 &
fi
exec {real} "$@"
"""


@pytest.mark.slow
def test_a_command_of_transformers_is_translated_and_run(agent: Agent) -> None:
    write_csv(agent.folder / "rows.csv", topic_rows())
    given = "python run_classification.py --model_name_or_path model --train_file rows.csv --do_train --no_cuda"
    size = "--max_seq_length 32 --max_steps 2 --output_dir out --report_to none"
    found = agent.run("migrate_script", f"{given} {size}", "--run")
    assert found["complete"] is True
    assert found["command"].startswith("whet classify ")
    assert [one["becomes"] for one in found["changed"] if one["given"].startswith("--no_cuda")] == ["--use_cpu"]
    assert (Path(found["runs"][0]["outputs"]["folder"]) / "model.safetensors").exists()
    refused = agent.start("migrate_script", "python run_classification.py --do_train --output_dir out")
    assert refused.returncode == 78
    assert json.loads(refused.stdout)["error"]["fix"]
