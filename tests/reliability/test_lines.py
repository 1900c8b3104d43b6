"""A7 and A8: a run takes only its own checkpoints; one that goes back to an older checkpoint begins a new line."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_runs import Corpus, corpus, finish, hook, qa
from safetensors.torch import load_file
from test_signals import go_on, said
from tiny_runs import Recorder, Toy, assert_same_weights, losing_metrics, toy_trainer, weights_of

from whet.errors import StorageError
from whet.store import find
from whet.store.manifest import digest_of

__all__ = ["corpus"]  # a fixture

pytestmark = pytest.mark.reliability


def _train(folder: Path, asked: Any = None, **changes: Any) -> Any:
    """Train the toy in the folder, saving every second step."""
    usual = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant"}
    made = toy_trainer(folder, model=Toy(dropout=0.1), **(usual | changes))
    made.train(resume_from_checkpoint=asked)
    return made


def _steps(folder: Path) -> list[int]:
    return [find.step_of(path) for path in find.list_all(folder)]


def _step(folder: Path, step: int) -> Path:
    return folder / find.folder_name(step)


def _aside(folder: Path) -> dict[int, Path]:
    """Step -> where the abandoned checkpoint of it is."""
    return {find.step_of(path): path for place in folder.glob("abandoned-*") for path in find.list_all(place)}


def _facts(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "MANIFEST.json").read_text("utf-8"))


def _without_ids(folder: Path) -> None:
    """Make the checkpoint one of before there were ids, with the best checkpoint by its path, as then."""
    facts = {name: value for name, value in _facts(folder).items() if name not in ("run", "parents", "checksum")}
    (folder / "MANIFEST.json").write_text(json.dumps(facts | {"checksum": digest_of(facts)}), "utf-8")


def test_command_after_going_back_resumes_the_new_line(corpus: Corpus, tmp_path: Path) -> None:
    """The case of the issue: back from 24 to 8, stopped in between, and the command that was printed."""
    out = tmp_path / "out"
    finish(corpus.words(out), tmp_path / "log0")
    old = (_step(out, 24) / "model.safetensors").read_bytes()
    back = [*corpus.words(out, learning_rate=1e-3), "--resume_from_checkpoint", str(_step(out, 8))]
    back += ["--resume_allow_changes", "learning_rate"]
    child = qa(back, tmp_path / "log1", hook("whet.objectives.span", "PackedSpans.loss_sum", 9))
    assert child.until_told()
    child.kill(signal.SIGTERM)
    assert child.wait() == 75, child.text()
    done = int(said(child).partition("after step ")[2].partition(":")[0])
    assert 8 < done < 24
    finish(go_on(child), tmp_path / "log2")
    assert f"resumes    after step {done} of " in (tmp_path / "log2").read_text("utf-8")
    aside = _aside(out)
    assert set(aside) == {16, 24}
    assert (aside[24] / "model.safetensors").read_bytes() == old
    assert str(aside[24]) in child.text(), "what is kept is named"
    assert (_step(out, 24) / "model.safetensors").read_bytes() != old


def test_line_is_continued_by_auto_and_by_naming_the_newest(tmp_path: Path) -> None:
    _train(tmp_path, max_steps=2)
    first = _facts(_step(tmp_path, 2))
    _train(tmp_path, "auto", max_steps=4)
    _train(tmp_path, str(_step(tmp_path, 4)))
    assert {_facts(path)["run"] for path in find.list_all(tmp_path)} == {first["run"]}
    assert _aside(tmp_path) == {}


def test_going_back_names_the_parent_and_keeps_what_it_leaves(tmp_path: Path) -> None:
    _train(tmp_path)
    old = {step: (_step(tmp_path, step) / "model.safetensors").read_bytes() for step in (4, 6)}
    run = _facts(_step(tmp_path, 2))["run"]
    _train(tmp_path, str(_step(tmp_path, 2)), max_steps=4, learning_rate=0.5, resume_allow_changes=("learning_rate",))
    assert _steps(tmp_path) == [2, 4]
    facts = _facts(_step(tmp_path, 4))
    assert facts["run"] != run
    assert facts["parents"] == [[run, 2]]
    assert {step: (path / "model.safetensors").read_bytes() for step, path in _aside(tmp_path).items()} == old
    assert find.newest(tmp_path) == _step(tmp_path, 4)


def test_same_step_on_every_line_is_kept_apart(tmp_path: Path) -> None:
    """Back from the end three times: the names of the steps collide, and nothing is lost."""
    _train(tmp_path)
    for _ in range(3):
        _train(tmp_path, str(_step(tmp_path, 2)))
    kept = [path.name for place in tmp_path.glob("abandoned-*") for path in find.list_all(place)]
    assert sorted(kept) == sorted(3 * [find.folder_name(4), find.folder_name(6)])
    assert all(find.problems_of(path) == [] for path in _aside(tmp_path).values())


def test_until_the_new_line_has_saved_nothing_is_moved(tmp_path: Path) -> None:
    """A run that went back and was killed before its first save has left nothing: auto takes the old line's newest."""
    _train(tmp_path)

    class Dies(Recorder):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise KeyboardInterrupt

    stopped = toy_trainer(
        tmp_path, model=Toy(dropout=0.1), callbacks=[Dies()], max_steps=6, save_strategy="steps", save_steps=2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        stopped.train(resume_from_checkpoint=str(_step(tmp_path, 2)))
    assert _steps(tmp_path) == [2, 4, 6]
    assert _aside(tmp_path) == {}


def test_limit_neither_counts_nor_deletes_what_was_left(tmp_path: Path) -> None:
    _train(tmp_path)
    _train(tmp_path, str(_step(tmp_path, 2)), max_steps=12, save_total_limit=2)
    assert _steps(tmp_path) == [10, 12]
    assert set(_aside(tmp_path)) == {4, 6}


def test_abandoned_checkpoint_is_resumed_when_it_is_named(tmp_path: Path) -> None:
    _train(tmp_path)
    _train(tmp_path, str(_step(tmp_path, 2)), max_steps=4)
    wanted = _aside(tmp_path)[6]
    again = _train(tmp_path, str(wanted), max_steps=8)
    assert again.state.global_step == 8
    assert _steps(tmp_path) == [2, 8], "the line through 6 is the current one, and the other is kept apart"
    assert set(_aside(tmp_path)) == {4, 6}
    assert len(list(tmp_path.glob("abandoned-*/*"))) == 3


def test_abandoned_checkpoint_that_was_put_back_is_not_taken_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a killed move would leave it, too: auto follows the line that went back."""
    _train(tmp_path)
    _train(tmp_path, str(_step(tmp_path, 2)), max_steps=4)
    _aside(tmp_path)[6].rename(_step(tmp_path, 6))
    assert find.newest(tmp_path) == _step(tmp_path, 4)
    assert "went back to before it" in caplog.text


def test_library_run_from_the_first_step_sets_an_earlier_run_aside(tmp_path: Path) -> None:
    """A second train() into the same folder without resuming: auto afterwards follows the second."""
    _train(tmp_path)
    _train(tmp_path, max_steps=4, seed=7)
    assert _steps(tmp_path) == [2, 4]
    assert set(_aside(tmp_path)) == {6}, "the last holds the steps before it"


@pytest.mark.parametrize("cell", ["everything", "train"])
def test_cell_that_runs_again_leaves_nothing_aside(tmp_path: Path, cell: str) -> None:
    """A notebook's cell builds model and trainer again, and the run is bitwise the same; or it only trains on."""
    trainer = _train(tmp_path)
    for _ in range(3):
        if cell == "everything":
            _train(tmp_path)
        else:
            trainer.train()
        assert _aside(tmp_path) == {}
        assert _steps(tmp_path) == [2, 4, 6]


def test_stopped_run_is_kept_when_its_cell_runs_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It has steps to go, and the second run holds its weights but not its optimizer's state; its size is said."""

    class Dies(Recorder):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            if state.global_step == 5:
                raise KeyboardInterrupt

    callback = Dies()
    stopped = toy_trainer(
        tmp_path, model=Toy(dropout=0.1), callbacks=[callback], max_steps=6, save_strategy="steps", save_steps=2,
        lr_scheduler_type="constant",
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    stopped.remove_callback(callback)
    stopped.train()
    (kept,) = _aside(tmp_path).values()
    assert kept.name == find.folder_name(4)
    assert f"delete those that you do not need: {kept} (" in caplog.text
    assert caplog.text.count(" kB)") == 1


def test_best_of_an_abandoned_run_stays_with_its_last(tmp_path: Path) -> None:
    """So that the last can be resumed by name, and end with the best."""
    usual: dict[str, Any] = {
        "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "constant",
        "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score", "load_best_model_at_end": True,
    }  # fmt: skip
    toy_trainer(tmp_path, compute_metrics=losing_metrics([3, 1, 2]), **usual).train()
    _train(tmp_path, seed=7)
    assert set(_aside(tmp_path)) == {2, 6}


def test_overwriting_removes_abandoned_lines_too(tmp_path: Path) -> None:
    _train(tmp_path)
    _train(tmp_path, str(_step(tmp_path, 2)))
    _train(tmp_path, overwrite_output_dir=True, max_steps=2)
    assert _steps(tmp_path) == [2]
    assert list(tmp_path.glob("abandoned-*")) == []


def test_finished_run_resumed_changes_nothing(tmp_path: Path) -> None:
    _train(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert _train(tmp_path, "auto").state.global_step == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_two_runs_from_one_parent_keep_to_their_own(tmp_path: Path) -> None:
    _train(tmp_path / "a", max_steps=2)
    for name in ("b", "c"):
        _train(tmp_path / name, str(_step(tmp_path / "a", 2)), max_steps=4)
    facts = [_facts(_step(tmp_path / name, 4)) for name in ("b", "c")]
    assert facts[0]["run"] != facts[1]["run"]
    assert facts[0]["parents"] == facts[1]["parents"] == [[_facts(_step(tmp_path / "a", 2))["run"], 2]]
    assert _steps(tmp_path / "a") == [2]


def test_checkpoints_without_ids_still_resume(tmp_path: Path) -> None:
    _train(tmp_path)
    for path in find.list_all(tmp_path):
        _without_ids(path)
    assert _train(tmp_path, "auto", max_steps=8).state.global_step == 8
    assert _steps(tmp_path) == [2, 4, 6, 8]
    _train(tmp_path, str(_step(tmp_path, 4)), max_steps=6)
    assert _steps(tmp_path) == [2, 4, 6]
    assert set(_aside(tmp_path)) == {6, 8}


@pytest.mark.parametrize(
    "facts",
    [{"run": "../../outside", "parents": []}, {"run": 3, "parents": "x"}, {"run": "a" * 32, "parents": [[1], [None]]}],
)
def test_strange_ids_lead_nowhere(tmp_path: Path, facts: dict[str, Any]) -> None:
    _train(tmp_path / "out")
    newest = _step(tmp_path / "out", 6)
    forged = {name: value for name, value in _facts(newest).items() if name != "checksum"} | facts
    (newest / "MANIFEST.json").write_text(json.dumps(forged | {"checksum": digest_of(forged)}), "utf-8")
    _train(tmp_path / "out", str(_step(tmp_path / "out", 2)), max_steps=4)
    assert find.newest(tmp_path / "out") is not None
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert set(_aside(tmp_path / "out")) == {4, 6}


# A7: the best checkpoint


def _best_run(
    folder: Path, scores: list[float], asked: Any = None, epochs: int | None = None, **changes: Any
) -> tuple[Any, list[Any]]:
    """A run of one step an epoch that ends with its best weights; also the weights after each step."""
    seen = Recorder(weights_of)
    usual = {
        "per_device_train_batch_size": 12, "num_train_epochs": epochs or len(scores), "eval_strategy": "epoch",
        "save_strategy": "epoch", "metric_for_best_model": "score", "lr_scheduler_type": "constant",
        "load_best_model_at_end": True,
    }  # fmt: skip
    trainer = toy_trainer(folder, callbacks=[seen], compute_metrics=losing_metrics(scores), **(usual | changes))
    trainer.train(resume_from_checkpoint=asked)
    return trainer, seen.kept


def _spoil_weights(folder: Path) -> None:
    """Put the weights of an entirely different run into the folder's checkpoints, correctly sealed."""
    _best_run(folder, [9, 1], seed=3, learning_rate=0.9)


def test_moved_run_ends_with_its_own_best(tmp_path: Path) -> None:
    """The case of the issue: the folder is moved, and another run is at the place where it was."""
    _, kept = _best_run(tmp_path / "old", [9, 1, 2])
    (tmp_path / "old").rename(tmp_path / "new")
    _spoil_weights(tmp_path / "old")
    again, _ = _best_run(tmp_path / "new", [3], "auto", 4)
    assert_same_weights(again.model, kept[0])
    assert again.state.best_model_checkpoint == str(_step(tmp_path / "new", 1))


def test_copied_run_does_not_look_at_the_original(tmp_path: Path) -> None:
    _, kept = _best_run(tmp_path / "a", [9, 1, 2])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.rmtree(tmp_path / "a")
    assert_same_weights(_best_run(tmp_path / "b", [3], "auto", 4)[0].model, kept[0])


def test_no_file_of_a_run_names_a_place(tmp_path: Path) -> None:
    """Neither where it was, nor the folder that it runs in: everything may be moved and given away.

    run.log is for people alone: nothing reads it, and it is not uploaded.
    """
    trainer, _ = _best_run(tmp_path / "secret-place", [9, 1], logging_dir=None)
    trainer.save_state()
    trainer.save_model()
    for path in (tmp_path / "secret-place").rglob("*"):
        if path.is_file() and path.name != "run.log":
            assert b"secret-place" not in path.read_bytes(), path
    state = json.loads((tmp_path / "secret-place" / "trainer_state.json").read_text("utf-8"))
    assert state["best_model_checkpoint"] == find.folder_name(1)


def test_foreign_checkpoint_in_the_place_of_the_best_is_refused(tmp_path: Path) -> None:
    _best_run(tmp_path / "run", [9, 1, 2])
    _spoil_weights(tmp_path / "other")
    shutil.rmtree(_step(tmp_path / "run", 1))
    shutil.copytree(_step(tmp_path / "other", 1), _step(tmp_path / "run", 1))
    with pytest.raises(StorageError, match="best checkpoint of this run is not there"):
        _best_run(tmp_path / "run", [3], "auto", 4)


@pytest.mark.parametrize("path", ["../other/checkpoint-1", "/etc", "", "checkpoint-9", "x\0y"])
def test_path_in_the_state_is_not_trusted(tmp_path: Path, path: str) -> None:
    """Also the absolute path of a state from before there were names, whose run is still found by its name."""
    _best_run(tmp_path / "run", [9, 1, 2])
    _spoil_weights(tmp_path / "other")
    before = (_step(tmp_path / "run", 1) / "model.safetensors").read_bytes()
    newest = _step(tmp_path / "run", 3)
    state = json.loads((newest / "trainer_state.json").read_text("utf-8"))
    (newest / "trainer_state.json").write_text(json.dumps(state | {"best_model_checkpoint": path}), "utf-8")
    _reseal(newest)
    if path.endswith("1"):  # the name counts, and is found in the folder itself
        ended, _ = _best_run(tmp_path / "run", [3], "auto", 4)
        assert_same_weights(ended.model, load_file(_step(tmp_path / "run", 1) / "model.safetensors"))
    elif path:
        with pytest.raises(StorageError, match="best checkpoint"):
            _best_run(tmp_path / "run", [3], "auto", 4)
    else:
        assert _best_run(tmp_path / "run", [3], "auto", 4)[0].state.best_model_checkpoint is None
    assert (_step(tmp_path / "run", 1) / "model.safetensors").read_bytes() == before


def _reseal(folder: Path) -> None:
    import xxhash

    facts = {name: value for name, value in _facts(folder).items() if name != "checksum"}
    raw = (folder / "trainer_state.json").read_bytes()
    facts["files"]["trainer_state.json"] = {"bytes": len(raw), "xxh3_128": xxhash.xxh3_128(raw).hexdigest()}
    (folder / "MANIFEST.json").write_text(json.dumps(facts | {"checksum": digest_of(facts)}), "utf-8")


def test_best_of_a_run_resumed_in_another_folder_comes_along(tmp_path: Path) -> None:
    _, kept = _best_run(tmp_path / "a", [9, 1, 2])
    ended, _ = _best_run(tmp_path / "b", [3], str(_step(tmp_path / "a", 3)), 4)
    assert_same_weights(ended.model, kept[0])
    shutil.rmtree(tmp_path / "a")
    assert ended.state.best_model_checkpoint == str(_step(tmp_path / "b", 1))
    assert_same_weights(_best_run(tmp_path / "b", [3], "auto", 5)[0].model, kept[0])


def test_best_that_was_left_does_not_count_for_the_new_line(tmp_path: Path) -> None:
    """The best was step 3; going back to 1 leaves it, and the new line ends with the best of 1 and its own."""
    _best_run(tmp_path, [2, 1, 9])
    ended, kept = _best_run(tmp_path, [5, 3], str(_step(tmp_path, 1)), 3, learning_rate=0.3,
                            resume_allow_changes=("learning_rate",))  # fmt: skip
    assert ended.state.best_global_step == 2
    assert_same_weights(ended.model, kept[0])


def test_best_in_an_abandoned_line_is_found_when_that_is_resumed(tmp_path: Path) -> None:
    _, kept = _best_run(tmp_path, [1, 9, 2])
    _best_run(tmp_path, [1], str(_step(tmp_path, 1)), 2)
    ended, _ = _best_run(tmp_path, [3], str(_aside(tmp_path)[3]), 4)
    assert_same_weights(ended.model, kept[1])


_WAYS: dict[str, Callable[[Path], Any]] = {
    "newest named": lambda folder: str(_step(folder, 6)),
    "auto": lambda _: "auto",
    "relative": lambda folder: f"{folder}/../{folder.name}/{find.folder_name(6)}",
}


@pytest.mark.parametrize("way", _WAYS)
def test_resuming_the_newest_is_no_new_line(tmp_path: Path, way: str) -> None:
    _train(tmp_path / "out")
    _train(tmp_path / "out", _WAYS[way](tmp_path / "out"), max_steps=8)
    assert len({_facts(path)["run"] for path in find.list_all(tmp_path / "out")}) == 1
