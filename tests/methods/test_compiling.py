"""torch.compile by blocks: the same losses, few graphs, masks that are new at each step, and what is refused."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import SqueezeBertConfig, SqueezeBertForQuestionAnswering

import engine
import whet
from tiny import DECODERS, FAMILIES, Pad, arguments, losses, tiny_model, tiny_rows, weights_of
from tiny_decoders import tiny_decoder, token_rows, trainer_of
from whet.config.methods import CompileSettings, MethodSettings
from whet.config.rules.computing import GONE
from whet.data.batch import Batch
from whet.kernels.library import library
from whet.methods import compile_blocks, fuse, order
from whet.models.view import ModelView
from whet.objectives.choose import choose
from whet.store import find

EAGER = MethodSettings(compile=CompileSettings(backend="eager"))
native = pytest.mark.skipif(library() is None, reason="the native library is not built here (no compiler)")

pytestmark = [
    # torch's own look at a block's input while it makes a graph; pytest makes an error of it inside of torch.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def _fresh_graphs() -> None:
    torch._dynamo.reset()
    counters.clear()


def n_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def squeezebert() -> Any:
    """A model that whet does not know: it runs padded."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return SqueezeBertForQuestionAnswering(
        SqueezeBertConfig(**sizes, intermediate_size=64, embedding_size=32, max_position_embeddings=80)
    )


def trained(folder: Path, model: Any, family: str = "bert", **changes: Any) -> engine.Trainer:
    rows = tiny_rows(24, family)
    args = arguments(folder, **({"max_steps": 3} | changes))
    collate = Pad(1) if isinstance(model, SqueezeBertForQuestionAnswering) else None
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, data_collator=collate)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(
    ("family", "bf16"),
    [
        ("bert", False),
        ("albert", True),
        *(pytest.param(family, False, marks=pytest.mark.night) for family in ("distilbert", "deberta-v2")),
    ],
)
def test_the_losses_are_those_without(tmp_path: Path, family: str, bf16: bool) -> None:
    """Dropout is on. The graph holds the operators that plain code runs, in torch's plain versions too: to rounding of
    float32 over three steps, or of bfloat16, which the order of sums may move by one digit."""
    plain = trained(tmp_path, tiny_model(family, dropout=0.1), family, bf16=bf16)
    found = trained(tmp_path, tiny_model(family, dropout=0.1), family, bf16=bf16, torch_compile_backend="aot_eager")
    assert n_graphs() > 0
    assert losses(found) == pytest.approx(losses(plain), rel=1e-2 if bf16 else 1e-5)


def test_an_unknown_family_is_compiled_by_blocks_too(tmp_path: Path) -> None:
    """Its masks come from torch's generator, in the same order."""
    plain, found = (trained(tmp_path, squeezebert(), "roberta", torch_compile_backend=name) for name in (None, "eager"))
    assert n_graphs() > 0
    assert losses(found) == pytest.approx(losses(plain), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("operators", ["native", pytest.param("plain-torch", marks=pytest.mark.night)], indirect=True)
@pytest.mark.usefixtures("operators")
def test_twenty_steps_of_other_lengths_need_few_graphs(tmp_path: Path) -> None:
    """Six layers, twenty numbers of tokens, batches of three rows and of one: one graph to train, one to evaluate."""
    model, rows = tiny_model("bert", dropout=0.1, num_hidden_layers=6), tiny_rows(58, lengths=(6, 60))
    args = arguments(tmp_path, per_device_train_batch_size=3, num_train_epochs=1, torch_compile_backend="eager")
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.state.global_step == 20
    assert n_graphs() <= 2
    trainer.evaluate()
    assert n_graphs() <= 4
    assert not counters["graph_break"]


@native
def test_the_graph_holds_native_operators(tmp_path: Path) -> None:
    seen: set[str] = set()

    def backend(module: Any, _: Any) -> Any:
        seen.update(str(node.target) for node in module.graph.nodes if "whet." in str(node.target))
        return module.forward

    from torch._dynamo.backends.registry import _BACKENDS, register_backend

    register_backend(backend, name="whet_test_looks_on")
    try:
        trained(tmp_path, tiny_model("bert", dropout=0.1), torch_compile_backend="whet_test_looks_on", max_steps=1)
    finally:
        _BACKENDS.pop("whet_test_looks_on")
    assert {name.split(".")[1] for name in seen} == {"attention", "add_norm", "bias_act"}


@pytest.mark.usefixtures("operators")
def test_each_step_has_masks_of_its_own() -> None:
    """The step's number is no part of the graph: other steps drop other channels, and the same step the same."""
    model = tiny_model("bert", dropout=0.3).train()
    spans = choose(model, None, lambda rows: {})
    view = ModelView(model)
    fuse.apply(view, MethodSettings(operators="auto", row_gradients=True))
    batch: Batch = spans.batch(tiny_rows(4), range(4), 0)

    def logits() -> list[torch.Tensor]:
        with torch.no_grad():
            return [spans.forward(batch, seed=seed, step=step).start_logits for seed, step in ((1, 1), (1, 2), (2, 1))]

    plain = logits()
    compile_blocks.apply(view, EAGER)
    found, again = logits(), logits()
    assert n_graphs() == 1
    assert not torch.allclose(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    for one, same, wanted in zip(found, again, plain, strict=True):
        assert torch.equal(one, same)
        torch.testing.assert_close(one, wanted)
    order.restore(model)


@pytest.mark.slow
def test_checkpoints_have_the_usual_names_and_resume(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "torch_compile_backend": "eager"}
    whole = trained(tmp_path / "a", tiny_model("bert", dropout=0.1), **saved)
    assert not [name for name in whole.model.state_dict() if "_orig_mod" in name]
    assert weights_of(whole.model).keys() == weights_of(tiny_model("bert")).keys()
    args = arguments(tmp_path / "b", **saved)
    later = engine.Trainer(model=tiny_model("bert", dropout=0.1), args=args, train_dataset=tiny_rows(24))
    later.train(resume_from_checkpoint=str(tmp_path / "a" / find.folder_name(2)))
    assert later.state.global_step == 4
    assert [n for n, w in weights_of(whole.model).items() if not torch.equal(w, later.model.state_dict()[n])] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "bert",
        "squeezebert",
        *(pytest.param(family, marks=pytest.mark.night) for family in ("distilbert", "deberta-v2")),
    ],
)
def test_blocks_are_computed_again_compiled(tmp_path: Path, family: str) -> None:
    """Checkpointing goes around compiled blocks: the masks of the first pass, the losses of a run without either."""

    def run(**changes: Any) -> list[float]:
        model = squeezebert() if family == "squeezebert" else tiny_model(family, dropout=0.1)
        return losses(trained(tmp_path, model, "roberta" if family == "squeezebert" else family, **changes))

    asked = {"gradient_checkpointing": True, "torch_compile_backend": "aot_eager"}
    assert run(**asked) == pytest.approx(run(), rel=1e-5)


def test_restoring_leaves_no_trace() -> None:
    model = tiny_model("bert")
    assert choose(model, None, lambda rows: {}).packed
    view = ModelView(model)
    before = [dict(module.__dict__) for module in model.modules()]
    compile_blocks.apply(view, EAGER)
    assert [dict(module.__dict__) for module in model.modules()] != before
    compile_blocks.restore(view)
    assert [dict(module.__dict__) for module in model.modules()] == before


def test_a_model_without_blocks_is_compiled_as_a_whole(tmp_path: Path) -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.line(x).square().mean()}

    rows = [{"x": torch.ones(4) * n} for n in range(8)]
    curves = []
    for backend in (None, "eager"):
        torch.manual_seed(0)
        args = arguments(tmp_path, max_steps=3, torch_compile_backend=backend)
        trainer = engine.Trainer(model=Line(), args=args, train_dataset=rows)
        trainer.train()
        curves.append(losses(trainer))
    assert n_graphs() > 0
    assert curves[0] == pytest.approx(curves[1], rel=1e-6)


def test_one_line_says_how_it_compares(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        trained(tmp_path, tiny_model("bert"), torch_compile_backend="eager", max_steps=1)
    assert [r for r in caplog.messages if "times the speed of plain code here" in r]


def test_a_backend_or_a_mode_turns_it_on(tmp_path: Path) -> None:
    assert arguments(tmp_path).torch_compile is False
    assert arguments(tmp_path, torch_compile=True).torch_compile_backend == "inductor"
    assert arguments(tmp_path, torch_compile_backend="eager").torch_compile is True
    asked = arguments(tmp_path, torch_compile_mode="max-autotune")
    assert (asked.torch_compile, asked.torch_compile_backend) == (True, "inductor")


@pytest.mark.parametrize("name", sorted(GONE))
def test_backends_that_are_gone_are_refused_by_name(tmp_path: Path, name: str) -> None:
    assert name not in torch._dynamo.list_backends(None)
    with pytest.raises(whet.ConfigError, match=f"no backend {name} any more") as caught:
        arguments(tmp_path, torch_compile_backend=name)
    assert "use" in caught.value.problems[0].fix


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"torch_compile_backend": "eager", "torch_compile_mode": "default"}, "goes with the backend inductor"),
        (
            {"torch_compile": True, "gradient_checkpointing": True, "checkpointing_policy": "selective"},
            "selective checkpointing does not go with torch_compile",
        ),
        ({"torch_compile": True, "activation_offload": True, "use_cpu": False}, "activation_offload does not go with"),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(whet.ConfigError, match=said):
        arguments(tmp_path, **asked)


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"torch_compile_backend": "inducktor"}, "this backend"), ({"torch_compile_mode": "fastest"}, "this mode")],
)
def test_what_torch_does_not_know_is_refused(tmp_path: Path, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(whet.ConfigError, match=f"torch.compile does not know {said}"):
        engine.Trainer(model=tiny_model("bert"), args=arguments(tmp_path, **asked))


@pytest.mark.parametrize(
    "asked", [{"torch_compile_backend": "cudagraphs"}, {"torch_compile": True, "torch_compile_mode": "reduce-overhead"}]
)
def test_cuda_graphs_are_refused_on_a_cpu(tmp_path: Path, asked: dict[str, Any]) -> None:
    """torch skips them there: the mode would do nothing, and the backend warn and do nothing."""
    with pytest.raises(whet.ConfigError, match="CUDA graphs are asked for on the CPU"):
        engine.Trainer(model=tiny_model("bert"), args=arguments(tmp_path, **asked))


@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition_with_mode", "dynamo_minifier_backend", "openxla"])
def test_a_backend_that_torch_lists_and_that_fails_is_told_in_four_parts(tmp_path: Path, backend: str) -> None:
    if backend == "openxla" and importlib.util.find_spec("torch_xla"):
        pytest.skip("torch_xla is installed")
    with pytest.raises(whet.ConfigError, match=f"the backend {backend} of torch.compile cannot compile") as caught:
        trained(tmp_path, tiny_model("bert"), torch_compile_backend=backend)
    assert "Error: " in str(caught.value.problems[0].got)  # what the backend said
    assert "--torch_compile_backend inductor" in caught.value.problems[0].fix


def test_inductor_without_a_compiler_is_refused(tmp_path: Path) -> None:
    from torch._inductor import config, cpp_builder

    cpp_builder.get_cpp_compiler.cache_clear() if hasattr(cpp_builder.get_cpp_compiler, "cache_clear") else None
    with (
        config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(whet.ConfigError, match="no C\\+\\+ compiler"),
    ):
        engine.Trainer(model=tiny_model("bert"), args=arguments(tmp_path, torch_compile=True))


@pytest.mark.gate
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("family", ["bert", "squeezebert"])
def test_inductor_gives_the_same_losses(tmp_path: Path, family: str) -> None:
    """Its sums run in another order: to rounding of float32 over three steps."""

    def run(**changes: Any) -> list[float]:
        model = squeezebert() if family == "squeezebert" else tiny_model(family, dropout=0.1)
        return losses(trained(tmp_path, model, "roberta" if family == "squeezebert" else family, **changes))

    assert run(torch_compile=True) == pytest.approx(run(), rel=1e-4)


_QUICK = ("llama", "modernbert")
"""One decoder and one encoder; the others run among the long tests."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [one if one in _QUICK else pytest.param(one, marks=pytest.mark.reliability) for one in (*FAMILIES, *DECODERS)],
)
def test_every_family_compiles_or_says_why_not(family: str, tmp_path: Path) -> None:
    """A graph breaks at nothing that whet does in a block: choosing a norm's operator, say."""
    settings: dict[str, Any] = {"max_steps": 2, "torch_compile": True, "torch_compile_backend": "eager"}
    if family in FAMILIES:
        assert len(losses(trained(tmp_path, tiny_model(family), family, **settings))) == 2
        return
    if family in ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe"):
        with pytest.raises(whet.ConfigError, match="torch_compile does not go with the experts of this model"):
            trainer_of(tmp_path, tiny_decoder(family), token_rows(8), **settings)
        return
    trainer = trainer_of(tmp_path, tiny_decoder(family), token_rows(8), **settings)
    trainer.train()
    assert len(losses(trainer)) == 2
