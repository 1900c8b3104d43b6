"""No pickle is read, whatever carries it and wherever it lies: model folder, output folder, checkpoint, data."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from carriers import CARRIERS, write, write_script
from tiny_qa import command, squad, write_json

from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA

pytestmark = pytest.mark.reliability


def test_the_carriers_are_loaded(tmp_path: Path) -> None:
    """The test can fail: those who unpickle these files do set the marker."""
    for name, unpickle in {"model.pkl": pickle.loads, "object.npy": None}.items():
        marker = tmp_path / f"sprung-{name}"
        write(name, tmp_path / name, marker)
        if unpickle is None:
            np.load(tmp_path / name, allow_pickle=True)
        else:
            unpickle((tmp_path / name).read_bytes())
        assert marker.exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_no_carrier_takes_the_place_of_the_weights(encoder: Path, tmp_path: Path, watched) -> None:
    """Each lies in a model folder as its only weights, under its own name and as pytorch_model.bin."""
    for name in CARRIERS:
        for way in ("own name", "as weights", "as safetensors"):
            folder = tmp_path / "cases" / f"{name} {way}"
            shutil.copytree(encoder, folder)
            (folder / "model.safetensors").unlink()
            file = {"as weights": "pytorch_model.bin", "as safetensors": "model.safetensors"}.get(way, name)
            write(name, folder / file, tmp_path / f"sprung {name} {way}")
    script = tmp_path / "cases" / "TorchScript"
    shutil.copytree(encoder, script)
    (script / "model.safetensors").unlink()
    write_script(script / "pytorch_model.bin", tmp_path / "sprung script")
    report = watched("load_models", encoder, tmp_path / "cases")
    results = report["result"]
    refused = sum(one["code"] == EXIT_BAD_CONFIG for one in results)
    sprung = sorted(path.name for path in tmp_path.glob("sprung*"))
    print(f"\npickle carriers: {len(sprung)}/{len(CARRIERS)} unpickled; {refused}/{len(results)} folders refused")
    assert (sprung, refused) == ([], 3 * len(CARRIERS) + 1)
    assert len(CARRIERS) == 14
    assert report["seen"]["pickle"] == []


def _command(path: Path, model: Path, out: Path, *words: Any, **options: Any) -> Path:
    return write_json(path, command(model, out, *words, **options))


def test_a_whole_run_and_its_resumption_unpickle_nothing(encoder: Path, tmp_path: Path, watched) -> None:
    """With all carriers in the model folder, the output folder and the checkpoint that is resumed."""
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(encoder, model)
    out.mkdir()
    for folder in (model, out):
        for name in set(CARRIERS) - {"model.pt"}:
            write(name, folder / name, tmp_path / f"sprung {folder.name} {name}")
    data = write_json(tmp_path / "train.json", squad())
    usual = {"train_file": data, "validation_file": data, "save_strategy": "steps", "save_steps": 2}
    words = ["--do_train", "--do_eval", "--overwrite_output_dir"]
    first = _command(tmp_path / "1.json", model, out, *words, **usual, max_steps=2)
    again = {**usual, "resume_from_checkpoint": "auto", "max_steps": 4}
    second = _command(tmp_path / "2.json", model, out, *words, **again)
    report = watched("qa_runs", first, second)
    assert report["result"] == [0, 0]
    resumed = json.loads((out / "trainer_state.json").read_text("utf-8"))
    assert resumed["global_step"] == 4
    print(f"\npickle.find_class in a run and its resumption: {len(report['seen']['pickle'])}")
    assert report["seen"]["pickle"] == []
    assert sorted(path.name for path in tmp_path.glob("sprung*")) == []


@pytest.mark.parametrize("name", sorted(CARRIERS))
def test_a_carrier_as_data_or_as_settings(name: str, encoder: Path, tmp_path: Path) -> None:
    good = write_json(tmp_path / "good.json", squad())
    for file in ("data.json", "data.csv", "data.parquet"):
        write(name, tmp_path / file, tmp_path / "sprung")
        code = run(command(encoder, tmp_path / "out", "--do_train", train_file=tmp_path / file))
        assert (file, code) == (file, EXIT_BAD_DATA)
    for file in ("run.json", "run.yaml"):
        write(name, tmp_path / file, tmp_path / "sprung")
        code = run(command(encoder, tmp_path / "out", "--do_train", train_file=good, config=tmp_path / file))
        assert (file, code) == (file, EXIT_BAD_CONFIG)
    assert not (tmp_path / "sprung").exists()
