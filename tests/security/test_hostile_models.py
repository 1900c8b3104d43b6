"""A model folder that brings code, leads elsewhere or lies about its size is refused before transformers reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from hostile_models import KINDS, make_all
from tiny_qa import trained_tokenizer

from hub_cache import cached
from tiny import FAMILIES, tiny_model
from whet.errors import EXIT_BAD_CONFIG, ConfigError
from whet.models.loading.load import ModelSource, load_qa_model, load_tokenizer

pytestmark = pytest.mark.reliability
N_LISTED = 20
"""Variants that the plan of the tests asks for; there are more here."""


def test_every_hostile_folder_is_refused(encoder: Path, tmp_path: Path, watched) -> None:
    messages = make_all(encoder, tmp_path / "cases", tmp_path / "outside")
    report = watched("load_models", encoder, tmp_path / "cases")
    results = {one["name"]: one for one in report["result"]}
    assert results.keys() == messages.keys()
    refused = [name for name, one in results.items() if one["code"] == EXIT_BAD_CONFIG]
    print(f"\nhostile model folders refused: {len(refused)}/{len(KINDS)}")
    assert len(refused) == len(KINDS) >= N_LISTED, {n: results[n] for n in results.keys() - set(refused)}
    for name, one in results.items():
        assert re.search(messages[name], one["error"], re.DOTALL), (name, one["error"])
        assert one["got"], name
        assert "  why: " in one["error"], name
        assert "  fix: " in one["error"], name
    ran = sorted(path.name for path in (tmp_path / "outside").glob("sprung-*"))
    opened = {name: one["outside"] for name, one in results.items() if one["outside"]}
    slow = {name: one["seconds"] for name, one in results.items() if one["seconds"] > 5}
    large = {name: one["mib"] for name, one in results.items() if one["mib"] > 500}
    print(
        f"code run: {len(ran)}, files opened outside: {len(opened)}, over 5 s: {len(slow)}, over 500 MB: {len(large)}"
    )
    print(f"slowest: {max(one['seconds'] for one in results.values()):.2f} s, "
          f"largest: {max(one['mib'] for one in results.values()):.0f} MiB more than before")  # fmt: skip
    assert (ran, opened, slow, large) == ([], {}, {}, {})
    assert report["seen"] == {"pickle": [], "commands": [], "connections": []}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_whole_and_in_shards(family: str, tmp_path: Path) -> None:
    tokenizer = trained_tokenizer()
    model = tiny_model(family, vocab_size=len(tokenizer))
    for name, size in (("whole", "1GB"), ("shards", "20KB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        tokenizer.save_pretrained(tmp_path / name)
        source = ModelSource(model=str(tmp_path / name))
        assert load_tokenizer(source).get_vocab() == tokenizer.get_vocab()
        loaded = load_qa_model(source, trained=True)
        weights = loaded.state_dict()
        assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
        before, after = model.config.to_dict(), loaded.config.to_dict()
        known = before.keys() - {"_name_or_path", "dtype", "intermediate_size" if family == "distilbert" else ""}
        assert {key: after.get(key) for key in known} == {key: before[key] for key in known}
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2


def test_the_real_encoder_loads(minilm_dir: Path) -> None:
    source = ModelSource(model=str(minilm_dir))
    assert len(load_tokenizer(source)) == 30522
    assert load_qa_model(source).config.num_hidden_layers == 6


def test_a_name_on_the_hub_is_loaded_from_its_cache_and_checked_the_same(encoder: Path, tmp_path: Path) -> None:
    """Without a network: HF_HUB_OFFLINE is set for all tests."""
    snapshot = cached(encoder, tmp_path, "some/model")
    for revision in ("main", "0" * 40):
        source = ModelSource(model="some/model", cache_dir=str(tmp_path), revision=revision)
        assert load_qa_model(source).config._name_or_path == "some/model"
        assert load_tokenizer(source).vocab_size > 100
    load_qa_model(ModelSource(model=str(snapshot)))  # the snapshot's own folder, full of links
    config = tmp_path / "models--some--model" / "blobs" / "blob-config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"auto_map": {"AutoConfig": "a.B"}}), "utf-8")
    with pytest.raises(ConfigError, match="auto_map is not read"):
        load_qa_model(ModelSource(model="some/model", cache_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_qa_model(ModelSource(model="some/model", cache_dir=str(tmp_path), revision="1" * 40))


def test_a_link_through_the_store_of_a_false_snapshot_leaves_too(encoder: Path, tmp_path: Path) -> None:
    """The store beside the snapshot is itself a link: what lies in it is elsewhere."""
    snapshot = cached(encoder, tmp_path, "some/model")
    store = snapshot.parents[1] / "blobs"
    store.rename(tmp_path / "elsewhere")
    store.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="this link leaves the folder"):
        load_qa_model(ModelSource(model=str(snapshot)))


def test_only_files_without_code_are_downloaded(monkeypatch: pytest.MonkeyPatch, encoder: Path) -> None:
    """What is asked of the hub's client, part by part; it is the client that filters."""
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    repository = ["config.json", "model.safetensors", "pytorch_model.bin", "own.py", "vocab.txt", "tokenizer.json",
                  "onnx/model.onnx", "onnx/config.json", "fp16/model.safetensors", "training_args.bin", "x.pkl",
                  "model.safetensors.index.json", "README.md", "tf_model.h5", "spiece.model", "chat_template.jinja",
                  "additional_chat_templates/tools.jinja", "additional_chat_templates/own.py",
                  "original/tokenizer.model", "onnx/chat_template.jinja"]  # fmt: skip
    taken: list[set[str]] = []

    def download(name: str, **options: object) -> str:
        assert options["revision"] == "abc"
        patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
        taken.append(set(filter_repo_objects(repository, **patterns)))  # type: ignore[arg-type]
        return str(encoder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr("whet.models.loading.load.hub_problem", lambda *_: None)  # as if the hub could be reached
    source = ModelSource(model="some/model", revision="abc", token="hf_secret")
    load_tokenizer(source)
    load_qa_model(source)
    jsons = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    templates = {"chat_template.jinja", "additional_chat_templates/tools.jinja"}
    assert taken[0] == jsons | {"vocab.txt", "spiece.model"} | templates
    assert taken[1:] == [{"config.json"}, jsons | {"model.safetensors"}]
    assert "hf_secret" not in repr(source)
