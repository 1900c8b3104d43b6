"""`ModelView` finds the parts of any model: known families, unknown models, and models in wrappers."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

import whet
from tiny import FAMILIES, lora_targets, need_head, qa_head, tiny_config, tiny_model
from whet.models.standard import LAYER_NORMS
from whet.models.view import ModelView, Named

families = pytest.mark.parametrize("family", FAMILIES)
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks
heads = {
    AutoModelForSequenceClassification: {"classifier", "pooler", "pre_classifier", "head"},
    AutoModelForTokenClassification: {"classifier", "head"},
    AutoModelForMultipleChoice: {"classifier", "pre_classifier", "pooler", "sequence_summary", "head"},
    AutoModelForMaskedLM: {
        *("head", "decoder"),  # ModernBERT
        *("cls", "lm_head", "predictions", "generator_predictions", "generator_lm_head"),
        *("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    },
}
VIEWS = ("blocks", "linears", "tables", "norms", "head")


def names(parts: list[Named]) -> list[str]:
    return [name for name, _ in parts]


def require_true_names(view: ModelView) -> None:
    """Every name leads to its module, no module comes twice, and the order is that of the model."""
    order = {id(module): number for number, module in enumerate(view.model.modules())}
    for one in VIEWS:
        parts: list[Named] = getattr(view, one)()
        assert all(view.model.get_submodule(name) is module for name, module in parts)
        numbers = [order[id(module)] for _, module in parts]
        assert numbers == sorted(set(numbers))


@families
def test_view_of_a_known_family_lists_its_parts(family: str) -> None:
    model = tiny_model(family)
    view = ModelView(model)
    require_true_names(view)
    assert len(view.blocks()) == (1 if family == "albert" else 2)
    assert names(view.head()) == qa_head(family)
    plain = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    assert names(view.linears()) == plain
    assert all(type(module) in LAYER_NORMS for _, module in view.norms())
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    assert names(view.tables()) == tables
    assert len(tables) in ((1,) if family == "modernbert" else (2, 3))


@families
@pytest.mark.parametrize("auto", heads, ids=lambda auto: auto.__name__)
def test_view_finds_the_head(family: str, auto: Any) -> None:
    need_head(auto, family)
    model = auto.from_config(tiny_config(family))
    view = ModelView(model)
    require_true_names(view)
    found = set(names(view.head()))
    assert found
    assert found <= heads[auto]


@families
def test_encoder_alone_has_no_head(family: str) -> None:
    view = ModelView(AutoModel.from_config(tiny_config(family)))
    require_true_names(view)
    assert view.head() == []
    assert view.blocks()


@families
def test_view_of_adapters_lists_the_layers_they_wrap(family: str) -> None:
    plain = ModelView(tiny_model(family))
    targets, head = lora_targets(family), qa_head(family)[-1]
    wrapped = get_peft_model(
        tiny_model(family), LoraConfig(task_type="QUESTION_ANS", target_modules=targets, modules_to_save=[head])
    )
    view = ModelView(wrapped)
    require_true_names(view)
    assert view.model is wrapped.get_base_model()
    assert names(view.blocks()) == names(plain.blocks())
    assert names(view.head()) == [*qa_head(family)[:-1], f"{head}.modules_to_save.default"]
    assert all(part.requires_grad for part in view.head()[-1].module.parameters())
    moved = dict.fromkeys(targets, ".base_layer") | {head: ".modules_to_save.default"}
    expected = [name + moved.get(name.rpartition(".")[2], "") for name in names(plain.linears())]
    assert names(view.linears()) == expected


def test_view_of_adapters_in_tables_and_of_prompts() -> None:
    inside = get_peft_model(tiny_model("bert"), LoraConfig(target_modules=["word_embeddings", "query"]))
    assert names(ModelView(inside).tables())[0] == "bert.embeddings.word_embeddings.base_layer"
    prompts = get_peft_model(tiny_model("bert"), PromptTuningConfig(task_type="QUESTION_ANS", num_virtual_tokens=3))
    assert names(ModelView(prompts).blocks()) == names(ModelView(tiny_model("bert")).blocks())
    assert names(ModelView(prompts).head()) == ["qa_outputs.modules_to_save.default"]  # peft puts every head there


def test_view_of_transformers_own_adapters() -> None:
    model = tiny_model("bert")
    try:
        model.add_adapter(LoraConfig(target_modules=["query"]))
    except ValueError as problem:
        pytest.skip(f"transformers {transformers.__version__} and peft {peft.__version__}: {problem}")
    view = ModelView(model)
    require_true_names(view)
    assert [name for name in names(view.linears()) if "query" in name] == [
        f"bert.encoder.layer.{number}.attention.self.query.base_layer" for number in (0, 1)
    ]


def test_view_removes_wrappers_of_torch() -> None:
    model = tiny_model("bert")
    wrappers = [torch.compile(model), nn.DataParallel(model), torch.compile(get_peft_model(model, LoraConfig()))]
    for wrapped in wrappers:
        assert ModelView(wrapped).model is model


def test_view_of_an_optimized_model_is_unchanged() -> None:
    model = tiny_model("roberta")
    before = [names(getattr(ModelView(model), one)()) for one in VIEWS]
    whet.optimize(model)
    assert [names(getattr(ModelView(model), one)()) for one in VIEWS] == before


def test_view_of_gpt2_counts_its_transposed_layers() -> None:
    sizes = {"n_embd": 32, "n_head": 4, "n_positions": 40, "vocab_size": 100}
    view = ModelView(GPT2LMHeadModel(GPT2Config(n_layer=3, **sizes)))
    require_true_names(view)
    assert names(view.blocks()) == ["transformer.h.0", "transformer.h.1", "transformer.h.2"]
    assert len(view.linears()) == 3 * 4 + 1  # four in each block, and lm_head
    assert names(view.tables()) == ["transformer.wte", "transformer.wpe"]
    assert len(view.norms()) == 3 * 2 + 1
    assert names(view.head()) == ["lm_head"]


def test_view_of_t5_has_both_stacks() -> None:
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "vocab_size": 100}
    view = ModelView(T5ForConditionalGeneration(T5Config(num_layers=2, num_decoder_layers=3, **sizes)))
    require_true_names(view)
    assert names(view.blocks()) == [f"encoder.block.{n}" for n in range(2)] + [f"decoder.block.{n}" for n in range(3)]
    assert names(view.head()) == ["lm_head"]
    relative = [name for name in names(view.tables()) if name.endswith("relative_attention_bias")]
    assert len(relative) == 2
    assert len(view.norms()) == 2 * 2 + 3 * 3 + 2  # T5LayerNorm, a class of its own


def test_view_of_vit() -> None:
    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=16, patch_size=8
    )
    view = ModelView(ViTForImageClassification(config))
    require_true_names(view)
    assert len(view.blocks()) == 2
    assert names(view.head()) == ["classifier"]
    assert view.tables() == []


def test_view_of_a_plain_module_knows_no_head() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(10, 8)
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8)) for _ in range(3)])
            self.shared = self.layers[0]
            self.out = nn.Linear(8, 2)

    view = ModelView(Plain())
    require_true_names(view)
    assert names(view.blocks()) == ["layers.0", "layers.1", "layers.2"]
    assert names(view.linears()) == ["layers.0.0", "layers.1.0", "layers.2.0", "out"]
    assert names(view.tables()) == ["words"]
    assert names(view.norms()) == ["layers.0.1", "layers.1.1", "layers.2.1"]
    assert view.head() == []


def test_view_of_a_known_family_with_blocks_of_another_class_is_generic() -> None:
    """A user may have put layers of their own in the place of the family's."""

    class Mine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Linear(32, 32)

    model = tiny_model("bert")
    model.bert.encoder.layer = nn.ModuleList([Mine(), Mine()])
    view = ModelView(model)
    assert names(view.blocks()) == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
