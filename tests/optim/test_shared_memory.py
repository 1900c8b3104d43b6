"""Parameters over the same memory, each with a gradient and a state of its own, are trained as torch trains them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import BertConfig, BertForMaskedLM, default_data_collator

import engine
import whet
from tiny_decoders import tiny_decoder
from whet.errors import ConfigError
from whet.kernels import shared_memory
from whet.optim import registry
from whet.optim.optimizers.native import WhetAdamW, WhetAdamW8bit
from whet.precision.formats import raise_to_float32

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),  # peft asks for it
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),  # peft's, of such pairs
]
_WIDTH = 40
_VIEWS: Mapping[str, Callable[[Tensor], list[Tensor]]] = {
    "transposed": lambda memory: [_square(memory), _square(memory).t()],
    "the same": lambda memory: [_square(memory), _square(memory)],
    "rows": lambda memory: [_square(memory), _square(memory)[8:30]],
    "columns": lambda memory: [_square(memory), _square(memory)[:, 8:30]],
    "every other": lambda memory: [_square(memory)[:, ::2], _square(memory)[::3]],
    "in part": lambda memory: [memory[:1000], memory[900:]],
    "in a chain": lambda memory: [memory[:700], memory[600:1200], memory[1100:], _square(memory)[-9:].t()],
    "side by side": lambda memory: [_square(memory)[:, :20], _square(memory)[:, 20:]],
}
"""How parameters lie in one memory."""
_ROUNDING = 1e-5
"""Of steps of 0.1 in float32: torch and whet round in another order, with separate memory as well."""


def _square(memory: Tensor) -> Tensor:
    return memory.view(_WIDTH, _WIDTH)


def _trained(views: str, make: Callable[[list[dict[str, Any]]], list[Optimizer]]) -> list[Tensor]:
    """Four steps over two groups; the second parameter has no gradient in one of them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(one) for one in _VIEWS[views](torch.randn(_WIDTH * _WIDTH))]
    groups = [{"params": parameters[::2], "weight_decay": 0.1}, {"params": parameters[1::2], "weight_decay": 0.0}]
    optimizers = make(groups)
    for step in range(4):
        for number, one in enumerate(parameters):
            gradient = (one.detach() * (1.3 + number)).cos()
            one.grad = None if (step, number) == (1, 1) else gradient
        for optimizer in optimizers:
            optimizer.step()
    return [one.detach().clone() for one in parameters]


@pytest.mark.parametrize("views", _VIEWS)
@pytest.mark.parametrize("kind", [WhetAdamW, WhetAdamW8bit])
def test_update_of_overlapping_parameters_equals_theirs_one_by_one(
    views: str, kind: type[WhetAdamW | WhetAdamW8bit], operators: str
) -> None:
    def one_by_one(groups: list[dict[str, Any]]) -> list[Optimizer]:
        return [kind([{**group, "params": [one]}], lr=0.1) for group in groups for one in group["params"]]

    expected = _trained(views, one_by_one)
    for one, other in zip(_trained(views, lambda groups: [kind(groups, lr=0.1)]), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("views", _VIEWS)
@pytest.mark.parametrize("name", ["adamw_whet", "adamw_torch_fused"])
def test_update_of_overlapping_parameters_is_that_of_torch(views: str, name: str) -> None:
    def made(groups: list[dict[str, Any]]) -> list[Optimizer]:
        """The optimizer that the registry makes for these parameters."""
        model = nn.ParameterList([one for group in groups for one in group["params"]])
        built = registry.build(model, engine.TrainingArguments(optim=name, learning_rate=0.1))
        settings = {key: value for key, value in built.param_groups[0].items() if key not in ("params", "weight_decay")}
        built.param_groups.clear()
        for group in groups:
            built.add_param_group({**settings, **group})
        return [built]

    expected = _trained(views, lambda groups: [torch.optim.AdamW(groups, lr=0.1, foreach=False, fused=False)])
    for one, other in zip(_trained(views, made), expected, strict=True):
        assert (one - other).abs().max() < _ROUNDING


def test_views_made_after_the_optimizer_count() -> None:
    found = []
    for kind in (WhetAdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        one, other = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.randn(6, 6))
        optimizer = kind([{"params": [one, other], "weight_decay": 0.1}], lr=0.1)
        other.data = one.data.t()
        one.grad, other.grad = torch.ones(6, 6), torch.full((6, 6), -3.0)
        optimizer.step()
        found.append(one.detach().clone())
    assert (found[0] - found[1]).abs().max() < _ROUNDING


def test_narrow_parameters_over_the_same_memory_are_refused() -> None:
    one = nn.Parameter(torch.randn(4, 4).bfloat16())
    other = nn.Parameter(one.data.t())
    one.grad = other.grad = torch.ones_like(one)
    before = one.detach().clone()
    with pytest.raises(ConfigError, match="over the same memory"):
        WhetAdamW([one, other], lr=0.1).step()
    assert torch.equal(one, before)


def test_who_overlaps_is_found_by_elements_and_not_by_spans() -> None:
    memory = torch.zeros(64)
    square = memory.view(8, 8)
    several = [square[:, :3], torch.zeros(3), square[:, 2:], square.t(), memory[:0], torch.zeros(4, device="meta")]
    assert shared_memory.overlapping(several) == [[0, 2, 3]]
    assert shared_memory.overlapping([square[:, :3], square[:, 3:], memory[3:8]]) == [[1, 2]]
    assert shared_memory.overlapping([memory, memory.view(torch.int16)[5:7], torch.zeros(9)]) == [[0, 1]]
    assert shared_memory.overlapping([]) == []


class Overlapping(nn.Module):
    """Learns y = sum(x) through a matrix, its transpose and some of its rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.third, self.last = nn.Linear(8, 4), nn.Linear(4, 1)
        self.second.weight = nn.Parameter(self.first.weight.data.t())
        self.third.weight = nn.Parameter(self.first.weight.data[2:6])

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))
        return {"loss": (self.last(hidden).squeeze(-1) - labels).square().mean()}

    @property
    def is_one(self) -> bool:
        """Whether the three matrices are one still."""
        matrix, rows = self.first.weight, self.third.weight
        return torch.equal(matrix, self.second.weight.t()) and rows.data_ptr() == matrix[2:].data_ptr()


def _masked_words() -> BertForMaskedLM:
    """A model whose head is another parameter over the memory of its table, which is tracked by rows."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    model.cls.predictions.decoder.weight = nn.Parameter(model.bert.embeddings.word_embeddings.weight.data)
    return model


def _tied_adapter() -> Any:
    """A model with the pairs that peft ties: those of the head are transposed views of the table's."""
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4, target_modules=["embed_tokens", "q_proj"], ensure_weight_tying=True, task_type="CAUSAL_LM",
        init_lora_weights=False, lora_dropout=0.0,
    )  # fmt: skip
    return get_peft_model(tiny_decoder("llama", tie_word_embeddings=True), settings)


def _sums() -> list[dict[str, Any]]:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(7))
    return [{"x": row, "labels": row.sum()} for row in x]


def _words() -> list[dict[str, Any]]:
    numbers = torch.Generator().manual_seed(7)
    ids = [torch.randint(5, 40, (6,), generator=numbers).tolist() for _ in range(16)]
    return [{"input_ids": one, "labels": one, "attention_mask": [1] * 6} for one in ids]


_MODELS: Mapping[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Any]]]]] = {
    "matrix": (Overlapping, _sums), "table": (_masked_words, _words), "adapter": (_tied_adapter, _words),
}  # fmt: skip


def _run(folder: Path, model: nn.Module, rows: list[dict[str, Any]], resume: Any = None, **changes: Any) -> Any:
    usual = {"use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-3, "save_strategy": "no",
             "max_steps": 6, "weight_decay": 0.1, "precision": "fp32", "report_to": "none"}  # fmt: skip
    args = engine.TrainingArguments(output_dir=str(folder), **(usual | changes))
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator)
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


@pytest.mark.each_value
@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.0, "optimizer_in_backward": True},
                                     {"max_grad_norm": 0.05}], ids=str)  # fmt: skip
@pytest.mark.parametrize("kind", _MODELS)
def test_trainer_with_overlapping_parameters_trains_as_torch_does(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    make, rows = _MODELS[kind]
    trained = [one for one in make().parameters() if one.requires_grad]
    assert len({one.data_ptr() for one in trained}) < len(trained), "nothing overlaps"
    without = {name: value for name, value in changes.items() if name != "optimizer_in_backward"}
    expected = _weights(_run(tmp_path, make(), rows(), optim="adamw_torch", **without))
    for name, one in _weights(_run(tmp_path, make(), rows(), optim="adamw_whet", **changes)).items():
        assert (one - expected[name]).abs().max() < _ROUNDING, name


@pytest.mark.each_value
@pytest.mark.parametrize("changes", [{}, {"save_async": True}, {"weight_averaging_start": 0.2}], ids=str)
@pytest.mark.parametrize("kind", _MODELS)
def test_checkpoints_of_overlapping_parameters_resume_bitwise(
    tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    make, rows = _MODELS[kind]
    saving = {"save_strategy": "steps", "save_steps": 3, **changes}
    expected = _run(tmp_path / "all", make(), rows(), **saving)
    (tmp_path / "rest").mkdir()
    (tmp_path / "all" / "checkpoint-3").rename(tmp_path / "rest" / "checkpoint-3")
    resumed = _run(tmp_path / "rest", make(), rows(), resume="auto", **saving)
    before = _weights(expected)
    assert all(torch.equal(one, before[name]) for name, one in _weights(resumed).items())
    if isinstance(resumed, Overlapping):
        assert resumed.is_one


def test_saved_model_has_every_overlapping_weight_by_name(tmp_path: Path) -> None:
    """So that it loads into a model without the overlap; one tensor under several names is written once, as before."""
    _run(tmp_path / "sums", Overlapping(), _sums(), save_strategy="steps", save_steps=6)
    written = load_file(tmp_path / "sums" / "checkpoint-6" / "model.safetensors")
    assert torch.equal(written["first.weight"].t(), written["second.weight"])
    assert torch.equal(written["first.weight"][2:6], written["third.weight"])
    model = _run(tmp_path / "words", _masked_words(), _words(), save_strategy="steps", save_steps=6)
    apart = BertForMaskedLM.from_pretrained(tmp_path / "words" / "checkpoint-6")
    assert all(torch.equal(one, _weights(model)[name]) for name, one in _weights(apart).items())
    tied = tiny_decoder("llama", tie_word_embeddings=True)
    _run(tmp_path / "tied", tied, _words(), save_strategy="steps", save_steps=6)
    with safe_open(tmp_path / "tied" / "checkpoint-6" / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (no dict)


class Parts(nn.Module):
    """Weights and a buffer that are each a part of a larger tensor, and do not overlap."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.q, self.k = (nn.Parameter(one) for one in torch.randn(8, 8).chunk(2))
        self.register_buffer("shift", torch.randn(12)[:4])

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = (x @ (self.q + self.k).t() + self.shift).sum(-1)
        return {"logits": found} if labels is None else {"loss": ((found - labels) ** 2).mean(), "logits": found}


def test_parts_of_larger_tensors_are_saved_and_resumed(tmp_path: Path) -> None:
    """safetensors refuses a tensor that is not all of its memory."""
    kwargs = {"save_strategy": "steps", "save_steps": 3}
    expected = _run(tmp_path / "all", Parts(), _sums(), **kwargs)
    (tmp_path / "rest").mkdir()
    (tmp_path / "all" / "checkpoint-3").rename(tmp_path / "rest" / "checkpoint-3")
    resumed = _run(tmp_path / "rest", Parts(), _sums(), resume="auto", **kwargs)
    assert all(torch.equal(one, _weights(expected)[name]) for name, one in _weights(resumed).items())


def test_weights_raised_to_float32_share_memory_as_before() -> None:
    model = Overlapping().bfloat16()
    model.second.weight, model.third.weight = (
        nn.Parameter(one) for one in (model.first.weight.data.t(), model.first.weight.data[2:6])
    )
    raise_to_float32(model)
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    assert model.is_one
    model.second.weight.data.fill_(3.0)
    assert torch.equal(model.first.weight, torch.full((8, 8), 3.0))


def test_saved_loop_of_overlapping_parameters_is_restored(tmp_path: Path) -> None:
    accelerator, model = whet.Accelerator(cpu=True), Overlapping()
    model = accelerator.prepare(model)
    accelerator.save_state(str(tmp_path / "state"))
    before = _weights(model)
    with torch.no_grad():
        for one in model.parameters():
            one.add_(1.0)
    accelerator.load_state(str(tmp_path / "state"))
    assert all(torch.equal(one, before[name]) for name, one in _weights(model).items())
