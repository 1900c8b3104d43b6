"""Commands in a row in one output folder: what it says is of the model that it has, and of the data judged last."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from text_tasks import examples, load, load_lines, save_encoder, topic_rows, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG

_LABELLED = (
    "errors.jsonl", "eval_confusion.csv", "eval_results.json", "eval_predictions.jsonl", "predict_errors.jsonl",
    "predict_confusion.csv", "predict_results.json", "predict_predictions.jsonl", "predict_results.txt",
)  # fmt: skip
"""What a run of classification writes of the examples of both splits."""
Do = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, data, and `first`: the output of a run that trained, evaluated and predicted."""
    place = tmp_path_factory.mktemp("used_again")
    save_encoder(place / "model")
    write_csv(place / "topics.csv", topic_rows())
    write_csv(place / "few.csv", topic_rows()[:5])
    write_csv(place / "texts.csv", [{"text": row["text"]} for row in topic_rows()[:2]])
    numbers = [row | {"label": len(row["text"]) / 10} for row in topic_rows()]
    write_lines(place / "numbers.jsonl", numbers)
    files = dict.fromkeys(("train_file", "validation_file", "test_file"), place / "topics.csv")
    line = words("classify", place / "model", place / "first", "--do_train", "--do_eval", "--do_predict", **files,
                 max_steps=4, save_strategy="steps", save_steps=2)  # fmt: skip
    assert run(line) == 0
    assert {*_LABELLED, "all_results.json", "report.html"} <= {path.name for path in (place / "first").iterdir()}
    return place


@pytest.fixture
def out(place: Path, tmp_path: Path) -> Path:
    """A copy of the first run's output."""
    return Path(shutil.copytree(place / "first", tmp_path / "out"))


@pytest.fixture
def do(place: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Do:
    """Run `whet classify` with `--json` in the folder; return its object, with what people read under `said`."""

    def ask(*flags: str, model: Path = place / "model", code: int = 0, **options: Any) -> dict[str, Any]:
        capsys.readouterr()
        assert run(words("classify", model, out, *flags, "--json", **options)) == code
        found = capsys.readouterr()
        return json.loads(found.out) | {"said": found.err}

    return ask


def _kept(out: Path, *prefixes: str) -> dict[str, Any]:
    return {name: value for name, value in load(out, "all_results.json").items() if name.startswith(prefixes)}


def _are_there(out: Path, *names: str) -> list[str]:
    return [name for name in names if (out / name).exists()]


def _page(out: Path) -> str:
    """The report, which a reader may also ask for later: it says the same then."""
    again = out.parent / "again.html"
    assert run(["report", str(out), "--output", str(again)]) == 0
    both = [path.read_text("utf-8") for path in (out / "report.html", again)]
    assert all(("Confused labels" in one) == ("Confused labels" in both[0]) for one in both)
    return both[0]


def test_training_again_leaves_nothing_that_an_earlier_model_reached(place: Path, out: Path, do: Do) -> None:
    for name in ("notes.txt", "../elsewhere"):
        (out / name).write_text("mine", "utf-8")
    (out / "eval_nbest_predictions.json").symlink_to(out.parent / "elsewhere")
    found = do("--do_train", "--overwrite_output_dir", train_file=place / "topics.csv", max_steps=2)
    assert load(out, "all_results.json") == found["metrics"] == load(out, "train_results.json")
    assert not _kept(out, "eval_", "predict_")
    assert not _are_there(out, *_LABELLED)
    assert "errors" not in found["outputs"]
    assert all(name in " ".join(found["said"].split()) for name in _LABELLED), "the log names what was removed"
    page = _page(out)
    assert "accuracy" not in page
    assert "Confused labels" not in page
    assert (out / "notes.txt").read_text("utf-8") == (out.parent / "elsewhere").read_text("utf-8") == "mine"
    assert (out / "eval_nbest_predictions.json").is_symlink()


def test_other_kind_of_labels_replaces_all_metrics(place: Path, out: Path, do: Do) -> None:
    files = dict.fromkeys(("train_file", "validation_file"), place / "numbers.jsonl")
    found = do("--do_train", "--do_eval", "--overwrite_output_dir", **files, max_steps=2)
    assert load(out, "all_results.json") == found["metrics"]
    assert "eval_mse" in found["metrics"]
    assert not _kept(out, "predict_", "eval_accuracy", "eval_f1", "eval_matthews", "eval_examples_wrong")
    assert not _are_there(out, "eval_confusion.csv", "predict_results.txt", "predict_errors.jsonl")
    assert "errors" in found["outputs"]
    page = _page(out)
    assert "Confused labels" not in page
    assert "accuracy" not in page
    assert "wrong, " not in page


def test_resuming_with_more_steps_drops_the_results_of_fewer(place: Path, out: Path, do: Do) -> None:
    again = {"train_file": place / "topics.csv", "save_strategy": "steps", "save_steps": 2,
             "resume_from_checkpoint": "auto"}  # fmt: skip
    before = load(out, "all_results.json")
    found = do("--do_train", **again, max_steps=4)
    assert "removed" not in found["said"]
    assert _kept(out, "eval_", "predict_") == {
        name: value for name, value in before.items() if name.startswith(("eval_", "predict_"))
    }, "the training took no step: the model is the one that was judged"
    assert _are_there(out, *_LABELLED) == [*_LABELLED]
    assert "accuracy" in _page(out)

    do("--do_train", **again, max_steps=6)
    assert not _kept(out, "eval_", "predict_")
    assert not _are_there(out, *_LABELLED)
    assert "accuracy" not in _page(out)

    do("--do_train", "--do_eval", **again, max_steps=6, validation_file=place / "topics.csv")
    assert _kept(out, "eval_accuracy")
    older = {"resume_from_checkpoint": out / "checkpoint-4", "max_steps": 4}
    assert "removed" in do("--do_train", **again | older)["said"]
    assert not _kept(out, "eval_"), "no step was taken, but from an older checkpoint"


def test_judging_a_split_again_replaces_what_was_said_of_it(place: Path, out: Path, do: Do) -> None:
    before = load(out, "all_results.json")
    do("--do_predict", model=out, test_file=place / "texts.csv")
    speeds = {f"predict_{name}" for name in ("runtime", "samples_per_second", "steps_per_second")}
    assert _kept(out, "predict_").keys() == speeds | {"predict_samples"}
    assert load(out, "all_results.json")["predict_samples"] == 2
    assert _kept(out, "eval_", "train_") == {
        name: one for name, one in before.items() if name[:5] in ("eval_", "train")
    }
    assert not _are_there(out, "predict_errors.jsonl", "predict_confusion.csv")
    assert len((out / "predict_results.txt").read_text("utf-8").splitlines()) == 3
    page = _page(out)
    assert "accuracy, test" not in page
    assert "accuracy, validation" in page

    found = do("--do_eval", model=out, validation_file=place / "few.csv")
    assert found["metrics"]["eval_samples"] == load(out, "all_results.json")["eval_samples"] == 5
    assert _kept(out, "train_loss", "predict_samples").items() >= {
        "train_loss": before["train_loss"], "predict_samples": 2,
    }.items()  # fmt: skip
    page = _page(out)
    assert f"of {found['metrics']['eval_examples_judged']}" in page
    assert "Evaluations while training" not in page, "the trained model was judged again, not that of step 0"


def test_another_model_judged_in_the_folder_speaks_for_itself(place: Path, out: Path, do: Do) -> None:
    other = out.parent / "other"
    line = words("classify", place / "model", other, "--do_train", train_file=place / "topics.csv", max_steps=3)
    assert run(line) == 0
    found = do("--do_eval", model=other, validation_file=place / "topics.csv")
    assert load(out, "all_results.json") == found["metrics"]
    assert not _are_there(out, "predict_errors.jsonl", "predict_results.txt")
    assert "Training" not in _page(out), "the curve is that of the folder's own model"
    do("--do_predict", model=other, test_file=place / "topics.csv")
    assert {name[:4] for name in _kept(out, "eval_accuracy", "predict_accuracy")} == {"eval", "pred"}
    do("--do_eval", model=out, validation_file=place / "topics.csv")
    assert not _kept(out, "predict_")


def test_another_revision_of_a_model_of_the_hub_is_another_model(place: Path, out: Path, do: Do) -> None:
    other = out.parent / "other"
    line = words("classify", place / "model", other, "--do_train", train_file=place / "topics.csv", max_steps=3)
    assert run(line) == 0
    cache = out.parent / "cache" / "models--some--topics"
    (cache / "refs").mkdir(parents=True)
    for name, commit, model in (("main", "1" * 40, out), ("old", "2" * 40, other), ("same", "3" * 40, out)):
        shutil.copytree(model, cache / "snapshots" / commit, ignore=shutil.ignore_patterns("checkpoint-*"))
        (cache / "refs" / name).write_text(commit, "utf-8")
    named = {"model": Path("some/topics"), "cache_dir": out.parent / "cache"}
    do("--do_eval", **named, validation_file=place / "topics.csv")
    do("--do_predict", **named, model_revision="same", test_file=place / "topics.csv")
    assert _kept(out, "eval_accuracy", "predict_accuracy").keys() == {"eval_accuracy", "predict_accuracy"}
    found = do("--do_predict", **named, model_revision="old", test_file=place / "topics.csv")
    assert load(out, "all_results.json") == found["metrics"]
    assert not _kept(out, "eval_"), "they are of another revision"


def test_run_that_fails_after_a_step_leaves_no_old_results(place: Path, out: Path, do: Do) -> None:
    bad = write_csv(out.parent / "bad.csv", [{"text": "no label", "label": ""}])
    refused = do("--do_train", "--overwrite_output_dir", train_file=bad, code=65)
    assert refused["outputs"].keys() == {"folder"}, "the files that are there are of the run before"
    assert _are_there(out, *_LABELLED) == [*_LABELLED]
    options = {"learning_rate": 1e30, "max_steps": 50, "weight_decay": 0.1, "logging_steps": 1}
    failed = do("--do_train", "--overwrite_output_dir", train_file=place / "topics.csv", code=70, **options)
    assert failed["outputs"].keys() <= {"folder", "record", "report"}
    assert not _are_there(out, "all_results.json", *_LABELLED)
    if _are_there(out, "report.html"):
        assert "accuracy" not in _page(out)


def test_checkpoints_stay_until_a_training_has_taken_a_step(place: Path, out: Path, do: Do) -> None:
    asked, saved = {"train_file": place / "topics.csv", "max_steps": 1}, ("checkpoint-2", "checkpoint-4")
    flags = ("--do_train", "--overwrite_output_dir", "--auto_find_batch_size")
    refused = do(*flags, **asked, memory_limit_gb=0.01, code=78)
    assert "finds no batch that fits" in " ".join(refused["said"].split())
    assert _are_there(out, *saved) == [*saved]
    do(*flags, **asked)
    assert not _are_there(out, *saved)


def test_answers_of_the_other_squad_do_not_stay(place: Path, tmp_path: Path) -> None:
    file, out = examples("qa", tmp_path), tmp_path / "out"
    files = dict.fromkeys(("train_file", "validation_file"), file) | {"doc_stride": 8}
    both = ("--do_train", "--do_eval", "--version_2_with_negative")
    assert run(words("qa", place / "model", out, *both, **files, max_steps=1)) == 0
    assert _are_there(out, "eval_null_odds.json", "eval_predictions.json")
    assert run(words("qa", out, out, "--do_eval", **files)) == 0
    assert _are_there(out, "eval_null_odds.json", "eval_predictions.json") == ["eval_predictions.json"]
    assert not _kept(out, "eval_best_f1", "eval_HasAns")
    assert _kept(out, "eval_f1", "train_loss").keys() == {"eval_f1", "train_loss"}


def test_answers_before_the_first_step_are_not_of_an_earlier_model(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = examples("qa", tmp_path), tmp_path / "out"
    line = words("qa", place / "model", out, "--do_train", "--eval_on_start", "--overwrite_output_dir",
                 train_file=file, validation_file=file, doc_stride=8, max_steps=1)  # fmt: skip
    assert run(line) == 0
    assert "of an earlier model" not in capsys.readouterr().out
    assert _are_there(out, "eval_predictions.json")
    assert run(line) == 0
    said = capsys.readouterr().out.partition("of an earlier model: ")[2]
    assert "eval_predictions.json" in said


def test_errors_that_cannot_be_written_do_not_leave_old_ones(place: Path, out: Path, do: Do) -> None:
    (out / ".errors.jsonl.partial").mkdir()
    found = do("--do_eval", model=out, validation_file=place / "few.csv", save_error_policy="continue")
    assert "errors.jsonl cannot be written" in " ".join(found["said"].split())
    assert "errors" not in found["outputs"]
    assert not _are_there(out, "errors.jsonl")
    assert load(out, "all_results.json")["eval_samples"] == 5


def test_seeds_and_a_single_run_do_not_mix(place: Path, out: Path, do: Do) -> None:
    files = dict.fromkeys(("train_file", "validation_file"), place / "topics.csv")
    both = ("--do_train", "--do_eval", "--overwrite_output_dir")
    do(*both, **files, max_steps=2, seeds=3)
    assert not _kept(out, "predict_")
    assert not _are_there(out, "predict_errors.jsonl", "predict_results.txt")
    do(*both, **files, max_steps=2, seeds=2)
    page = (out / "report.html").read_text("utf-8")
    assert "seed-43" in page
    assert "seed-44" not in page, "the third seed is of the run before"
    found = do(*both, **files, max_steps=2)
    assert load(out, "all_results.json") == found["metrics"]
    assert not _are_there(out, "seeds.json")
    assert "seed-42" not in (out / "report.html").read_text("utf-8")


def test_a_checkpoint_alone_is_read_as_its_training_read(place: Path, tmp_path: Path) -> None:
    """One of a run that was killed has no finished model around it, and one may be copied elsewhere."""
    many = [{"text": row["text"], "label": [row["label"]]} for row in topic_rows()]
    data = write_lines(tmp_path / "many.jsonl", many)
    texts = write_csv(tmp_path / "long.csv", [{"text": " ".join(row["text"] for row in topic_rows()[:9])}])
    line = words("classify", place / "model", tmp_path / "out", "--do_train", train_file=data, max_steps=4,
                 save_strategy="steps", save_steps=2, max_seq_length=16, doc_stride=4, window_pooling="max",
                 threshold=0.45)  # fmt: skip
    assert run(line) == 0
    alone = Path(shutil.copytree(tmp_path / "out" / "checkpoint-4", tmp_path / "alone"))
    found = []
    for model in (tmp_path / "out", alone):
        output = tmp_path / f"{model.name}.jsonl"
        assert run(["predict", str(model), "--file", str(texts), "--output", str(output)]) == 0
        found.append(output.read_text("utf-8"))
    assert found[0] == found[1]
    assert load(alone, "whet_task.json") == load(tmp_path / "out", "whet_task.json")


def _predicted(model: Path, folder: Path) -> list[Any]:
    output = folder / f"{model.name}.jsonl"
    assert run(["predict", str(model), "--file", str(folder / "texts.csv"), "--output", str(output)]) == 0
    return load_lines(output)


def test_model_that_was_trained_last_is_the_one_that_is_read(place: Path, tmp_path: Path) -> None:
    """An adapter and all weights in turn, in one folder: nothing of the model before is taken for the new one's."""
    pytest.importorskip("peft")
    write_csv(tmp_path / "texts.csv", topic_rows())
    kinds: dict[str, dict[str, Any]] = {"adapter": {"lora_r": 4, "learning_rate": 3e-2}, "full": {}}
    wanted = {}
    for name, options in kinds.items():
        line = words("classify", place / "model", tmp_path / name, "--do_train", train_file=place / "topics.csv",
                     max_steps=6, **options)  # fmt: skip
        assert run(line) == 0
        wanted[name] = _predicted(tmp_path / name, tmp_path)
    assert wanted["adapter"] != wanted["full"]
    files = {name: {path.name for path in (tmp_path / name).iterdir()} for name in kinds}
    out = tmp_path / "out"
    for name in ("adapter", "full", "adapter"):
        line = words("classify", place / "model", out, "--do_train", "--overwrite_output_dir",
                     train_file=place / "topics.csv", max_steps=6, **kinds[name])  # fmt: skip
        assert run(line) == 0
        assert _predicted(out, tmp_path) == wanted[name]
        assert {path.name for path in out.iterdir()} == files[name]


def test_files_of_another_kind_of_model_do_not_stay(place: Path, tmp_path: Path) -> None:
    """Of sentence-transformers, an export, and a tokenizer of chats; files of the user's own do."""
    out = tmp_path / "out"
    foreign = {
        "modules.json": '[{"idx": 1, "path": "1_Pooling", "type": "Pooling"}, {"idx": 2, "path": "notes"}]',
        "1_Pooling/config.json": "{}", "config_sentence_transformers.json": '{"model_type": "SentenceTransformer"}',
        "export.json": '{"whet": {"format": "onnx"}}', "model.onnx": "", "generation_config.json": "{}",
        "chat_template.jinja": "of a chat", "additional_chat_templates/tools.jinja": "of a chat",
    }  # fmt: skip
    own = {"1_Pooling/notes.txt": "mine", "notes/config.json": "{}", "adapter.txt": "mine", "mine.safetensors": "mine"}
    for name, text in {**foreign, **own}.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(text, "utf-8")
    line = words("classify", place / "model", out, "--do_train", "--overwrite_output_dir",
                 train_file=place / "topics.csv", max_steps=1)  # fmt: skip
    assert run(line) == 0
    assert not _are_there(out, *foreign)
    assert _are_there(out, *own) == [*own]


def test_export_of_another_program_stays(place: Path, tmp_path: Path) -> None:
    own = {"export.json": '{"of": "my program"}', "model.onnx": "mine", "tokenizer.json.txt": "mine"}
    for name, text in own.items():
        (tmp_path / name).write_text(text, "utf-8")
    line = words("classify", place / "model", tmp_path, "--do_train", "--overwrite_output_dir",
                 train_file=place / "topics.csv", max_steps=1)  # fmt: skip
    assert run(line) == 0
    assert {name: (tmp_path / name).read_text("utf-8") for name in own} == own


def test_adapter_does_not_replace_the_model_that_it_needs(
    place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    model = Path(shutil.copytree(place / "model", tmp_path / "model"))
    line = words("classify", model, model, "--do_train", "--overwrite_output_dir", train_file=place / "topics.csv",
                 max_steps=1, lora_r=2)  # fmt: skip
    assert run(line) == EXIT_BAD_CONFIG
    assert "lora_r would replace the model that it needs" in capfd.readouterr().err
    assert (model / "model.safetensors").is_file()
