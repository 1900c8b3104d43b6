"""What a run may begin with: every weight comes from the model's files, but for those of a new head."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoTokenizer,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GemmaForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)  # fmt: skip

from saved_decoder import save_decoder
from text_tasks import examples, save_encoder, words
from tiny import FAMILIES, tiny_config
from whet.cli.main import run
from whet.errors import EXIT_BAD_CONFIG, ConfigError
from whet.models.loading.heads import CAUSAL_LM, QUESTION_ANSWERING, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from whet.models.loading.load import Labels, ModelSource, load_model

WEIGHTS = "model.safetensors"
LABELS = Labels(names=["a", "b"])
TASKS: dict[str, tuple[Any, Labels | None]] = {
    "qa": (QUESTION_ANSWERING, None),
    "classify": (SEQUENCE_CLASSIFICATION, LABELS),
    "tag": (TOKEN_CLASSIFICATION, LABELS),
    "lm": (CAUSAL_LM, None),
}


def saved(folder: Path, cls: Any, family: str = "bert", **changes: Any) -> Path:
    """Write a model of this class with three blocks, the same each time."""
    torch.manual_seed(0)
    cls(tiny_config(family, num_hidden_layers=3, **changes)).save_pretrained(folder)
    return folder


def renamed(folder: Path, name_of: Callable[[str], str | None]) -> Path:
    """Give the weights of the folder other names; those named None are left out."""
    tensors = load_file(folder / WEIGHTS)
    named = {new: tensor for name, tensor in tensors.items() if (new := name_of(name)) is not None}
    save_file(named, folder / WEIGHTS, {"format": "pt"})
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    return folder


def without(*parts: str) -> Callable[[str], str | None]:
    return lambda name: None if any(part in name for part in parts) else name


def loaded(folder: Path, task: str) -> Any:
    head, labels = TASKS[task]
    return load_model(ModelSource(model=str(folder)), head, labels=labels)


def _bert(folder: Path) -> Path:
    return saved(folder, BertForMaskedLM)


def _llama(folder: Path) -> Path:
    return saved(folder, LlamaForCausalLM, "llama")


def _unlisted_shard(folder: Path) -> Path:
    BertForMaskedLM(tiny_config("bert")).save_pretrained(folder, max_shard_size="40KB")
    path = folder / f"{WEIGHTS}.index.json"
    index = json.loads(path.read_text("utf-8"))
    last = max(index["weight_map"].values())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last}
    path.write_text(json.dumps(index), "utf-8")
    return folder


def _of_peft(folder: Path) -> Path:
    return renamed(_llama(folder), lambda name: f"base_model.model.{name}")


CHANGED: dict[str, tuple[str, Callable[[Path], Path], str]] = {
    "DDP's prefix": ("qa", lambda f: renamed(_bert(f), lambda name: f"module.{name}"), "'module.', which Distrib"),
    "DDP's prefix before an encoder": (
        "tag",
        lambda f: renamed(_bert(f), lambda name: f"module.{name.removeprefix('bert.')}"),
        r"name.removeprefix\('module.'\)",
    ),
    "torch.compile's prefix": (
        "lm",
        lambda f: renamed(_llama(f), lambda name: f"_orig_mod.{name}"),
        "'_orig_mod.', which torch.compile adds",
    ),
    "torch.compile's name inside": (
        "qa",
        lambda f: renamed(_bert(f), lambda name: name.replace("bert.", "bert._orig_mod.", 1)),
        r"name.replace\('_orig_mod.', ''\)",
    ),
    "Lightning's prefix": ("classify", lambda f: renamed(_bert(f), lambda name: f"model.{name}"), "Lightning"),
    "two prefixes": (
        "lm",
        lambda f: renamed(_llama(f), lambda name: f"module._orig_mod.{name}"),
        "'module._orig_mod.'",
    ),
    "any prefix": ("qa", lambda f: renamed(_bert(f), lambda name: f"net.inner.{name}"), "the names hold 'net.inner.'"),
    "peft's prefix": ("lm", _of_peft, "merge_and_unload"),
    "one query projection": ("qa", lambda f: renamed(_bert(f), without("layer.1.attention.self.query.weight")), "1 of"),
    "one q_proj": (
        "lm",
        lambda f: renamed(_llama(f), without("layers.1.self_attn.q_proj")),
        "layers.1.self_attn.q_proj",
    ),
    "one bias": ("tag", lambda f: renamed(_bert(f), without("layer.2.output.dense.bias")), "copy the model again"),
    "one block": ("classify", lambda f: renamed(_bert(f), without("layer.1.")), "missing 16 of"),
    "fewer blocks than config.json": ("qa", lambda f: configured(_bert(f), num_hidden_layers=5), "_layers to 3"),
    "more blocks than config.json": ("lm", lambda f: configured(_llama(f), num_hidden_layers=2), "_layers to 3"),
    "a shard that the index does not name": ("qa", _unlisted_shard, "does not name model-0000"),
    "half a head": (
        "qa",
        lambda f: renamed(saved(f, BertForQuestionAnswering), without("qa_outputs.bias")),
        "missing 1 of 55: qa_outputs.bias",
    ),
    "no language head": ("lm", lambda f: renamed(_llama(f), without("lm_head")), "tie_word_embeddings"),
    "BERT as RoBERTa": (
        "qa",
        lambda f: configured(_bert(f), model_type="roberta", architectures=None),
        "set model_type to 'bert'",
    ),
    "Gemma as Llama": (
        "lm",
        lambda f: configured(saved(f, GemmaForCausalLM, "gemma"), model_type="llama"),
        "set model_type to gemma",
    ),
    "Qwen2 as Llama": (
        "lm",
        lambda f: configured(saved(f, Qwen2ForCausalLM, "qwen2"), model_type="llama", architectures=None),
        "unexpected 9: model.layers.*.self_attn.k_proj.bias",
    ),
    "Qwen3 as Llama": (
        "lm",
        lambda f: configured(saved(f, Qwen3ForCausalLM, "qwen3"), model_type="llama", architectures=None),
        "k_norm.weight",
    ),
    "another width under --ignore_mismatched_sizes": (
        "replaced",
        lambda f: configured(_bert(f), hidden_size=64),
        "copy config.json again",
    ),
}
"""Kind of folder -> the task that loads it, how it is written, and what the error says."""
TASKS["replaced"] = (SEQUENCE_CLASSIFICATION, Labels(names=["a", "b"], may_replace=True))


@pytest.mark.parametrize("kind", CHANGED)
def test_weights_that_are_not_in_the_files_are_refused(kind: str, tmp_path: Path) -> None:
    task, write, said = CHANGED[kind]
    with pytest.raises(ConfigError, match=said):
        loaded(write(tmp_path / "model"), task)


def test_renaming_as_the_fix_says_makes_the_model_load(tmp_path: Path) -> None:
    folder = renamed(_bert(tmp_path / "model"), lambda name: f"module.{name}")
    with pytest.raises(ConfigError) as refused:
        loaded(folder, "qa")
    code = refused.value.problems[0].fix.partition("in Python: ")[2]
    exec(code, {})  # what the user would paste
    assert torch.equal(
        loaded(folder, "qa").bert.embeddings.word_embeddings.weight,
        BertForMaskedLM.from_pretrained(_bert(tmp_path / "good")).bert.embeddings.word_embeddings.weight,
    )


@pytest.mark.every_family
@pytest.mark.parametrize("family", FAMILIES)
def test_every_pretrained_form_of_an_encoder_loads(family: str, tmp_path: Path) -> None:
    """With and without a pooler, with the heads of pretraining, with the head of another task."""
    names = ("Model", "ModelForMaskedLM", "ModelForPreTraining", "ModelForSequenceClassification")
    for auto in (getattr(transformers, f"Auto{name}") for name in names):
        if type(tiny_config(family)) not in auto._model_mapping:
            continue
        folder = tmp_path / auto.__name__
        auto.from_config(tiny_config(family)).save_pretrained(folder)
        for task in ("qa", "classify", "tag"):
            loaded(folder, task)


def _gammas(folder: Path) -> Path:
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def name_of(name: str) -> str:
        for new, one in old.items():
            name = name.replace(new, one)
        return name

    return renamed(saved(folder, BertForPreTraining), name_of)


def _masks(folder: Path) -> Path:
    """GPT-2 as it was published: without a prefix, with its causal masks and their constant."""
    renamed(saved(folder, GPT2LMHeadModel, "gpt2"), lambda name: name.removeprefix("transformer."))
    mask = torch.ones(1, 1, 80, 80)
    more = {"h.0.attn.bias": mask, "h.0.attn.masked_bias": torch.tensor(-1e4), "h.1.attn.bias": mask.to(torch.uint8)}
    save_file(load_file(folder / WEIGHTS) | more, folder / WEIGHTS, {"format": "pt"})
    return folder


def _position_ids(folder: Path) -> Path:
    more = {"bert.embeddings.position_ids": torch.arange(80)[None]}
    save_file(load_file(saved(folder, BertForPreTraining) / WEIGHTS) | more, folder / WEIGHTS, {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("task", "write"),
    [
        ("qa", _gammas),
        ("classify", _position_ids),
        ("lm", _masks),
        ("lm", lambda folder: saved(folder, LlamaForCausalLM, "llama", tie_word_embeddings=True)),
        ("lm", lambda folder: saved(folder, LlamaModel, "llama", tie_word_embeddings=True)),
        ("tag", lambda folder: saved(folder, BertForSequenceClassification, num_labels=2)),
    ],
    ids=["gamma and beta", "position ids", "masks of GPT-2", "tied", "tied, without a head", "another head"],
)
def test_old_and_tied_files_load(task: str, write: Callable[[Path], Path], tmp_path: Path) -> None:
    loaded(write(tmp_path / "model"), task)


def test_output_table_in_the_files_is_kept_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """config.json says that the tables are tied, and the files hold two: saved as tied, others would read one."""
    folder = saved(tmp_path / "model", LlamaForCausalLM, "llama", tie_word_embeddings=False)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}), "utf-8")
    model = loaded(folder, "lm")
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert not model.config.tie_word_embeddings
    assert "tie_word_embeddings" in caplog.text


@pytest.mark.slow
def test_real_encoder_of_sentence_transformers_loads_for_every_task(minilm_dir: Path) -> None:
    for task in ("qa", "classify", "tag"):
        loaded(minilm_dir, task)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An encoder and a decoder, each without one projection, and an adapter of peft on the latter."""
    folder = tmp_path_factory.mktemp("spoilt")
    save_encoder(folder / "encoder")
    save_decoder(folder / "decoder")
    peft = pytest.importorskip("peft")
    with pytest.warns(FutureWarning, match="is_gradient_checkpointing"):
        adapter = peft.get_peft_model(
            LlamaForCausalLM.from_pretrained(folder / "decoder"), peft.LoraConfig(task_type="CAUSAL_LM")
        )
    adapter.save_pretrained(folder / "adapter")
    renamed(folder / "encoder", without("layer.0.attention.self.query.weight"))
    renamed(folder / "decoder", without("layers.0.self_attn.q_proj"))
    head = BertForQuestionAnswering.from_pretrained(folder / "encoder")
    head.save_pretrained(folder / "reader")
    AutoTokenizer.from_pretrained(folder / "encoder").save_pretrained(folder / "reader")
    renamed(folder / "reader", without("layer.0.attention.self.query.weight"))
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("command", ["qa", "classify", "tag", "lm", "generate", "predict", "ask", "merge", "teacher"])
def test_every_command_refuses_a_model_without_a_projection(
    command: str, spoilt: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, out = examples(command if command in ("classify", "tag", "lm") else "qa", tmp_path), tmp_path / "out"
    training = {
        one: words(one, spoilt["decoder" if one == "lm" else "encoder"], out, "--do_train", train_file=file)
        for one in ("qa", "classify", "tag", "lm")
    }
    if command == "teacher":
        save_encoder(tmp_path / "good")
        training["teacher"] = words(
            "qa", tmp_path / "good", out, "--do_train", train_file=file, doc_stride=8, teacher_model=spoilt["reader"]
        )
    line = (
        training.get(command)
        or {
            "generate": ["generate", str(spoilt["decoder"]), "--prompt", "the boat"],
            "predict": ["predict", str(spoilt["reader"]), "--file", str(file), "--output", str(tmp_path / "x.jsonl")],
            "ask": ["ask", str(spoilt["reader"]), "--question", "who?", "--context", str(file)],
            "merge": ["merge", str(spoilt["adapter"]), "--output_dir", str(out)],
        }[command]
    )
    assert run([*line, "--doc_stride", "8"] if command == "qa" else line) == EXIT_BAD_CONFIG
    shown = capfd.readouterr().err
    assert "weights of the model are not in" in shown
    assert ("self_attn.q_proj" if command in ("lm", "generate", "merge") else "attention.self.query") in shown


def test_model_of_the_hubs_cache_is_held_to_the_same(tmp_path: Path) -> None:
    snapshot = tmp_path / "cache" / "models--some--model" / "snapshots" / ("0" * 40)
    renamed(_bert(tmp_path / "model"), without("layer.1.attention.self.query.weight"))
    shutil.copytree(tmp_path / "model", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40, "utf-8")
    source = ModelSource(model="some/model", cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=r"layer\.1\.attention\.self\.query"):
        load_model(source, QUESTION_ANSWERING)


def test_evaluation_alone_needs_a_trained_head(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save_encoder(tmp_path / "model")
    file = examples("qa", tmp_path)
    line = words("qa", tmp_path / "model", tmp_path / "out", "--do_eval", validation_file=file, doc_stride=8)
    assert run(line) == EXIT_BAD_CONFIG
    assert "the model has not learnt to answer questions" in capfd.readouterr().err


def test_new_pooler_is_trained_next_to_an_adapter(tmp_path: Path) -> None:
    """Pretraining by masked words saves none; frozen, it would stay random."""
    pytest.importorskip("peft")
    save_encoder(tmp_path / "model")
    renamed(tmp_path / "model", without("pooler"))
    line = words(
        "classify", tmp_path / "model", tmp_path / "out", "--do_train", train_file=examples("classify", tmp_path),
        max_steps=1, lora_r=2,
    )  # fmt: skip
    assert run(line) == 0
    names = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {"base_model.model.bert.pooler.dense.weight", "base_model.model.classifier.weight"} <= names.keys()


def test_size_of_a_small_model_is_no_rounded_zero(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_decoder(tmp_path)
    with caplog.at_level("INFO", logger="whet"):
        model = load_model(ModelSource(model=str(tmp_path)), CAUSAL_LM)
    n_weights = sum(one.numel() for one in model.parameters())
    assert n_weights < 50_000
    assert f"{n_weights:,} weights" in caplog.text
