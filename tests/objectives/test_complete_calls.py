"""What the user passed is what is called: parts of a model stand for it only if nothing else is around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.loss.loss_utils import ForCausalLMLoss

import engine
from tiny import arguments, losses, tiny_model, tiny_rows
from tiny_decoders import collate, tiny_decoder, token_rows

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
INVOCATION = [7, 8]
N_STEPS = 4
TARGETS = ["q_proj", "v_proj"]
_RUN: dict[str, Any] = {"max_steps": N_STEPS, "learning_rate": 5e-3, "warmup_steps": 0, "remove_unused_columns": False}


def rows() -> list[dict[str, Any]]:
    """Return rows in whose middle the tokens stand that activated LoRA looks for."""
    found = token_rows(16, lengths=(6, 30), labelled=1.0)
    for row in found:
        middle = len(row["input_ids"]) // 2
        row["input_ids"][middle : middle + 2] = INVOCATION
    return found


def by_transformers(model: Any, folder: Path) -> list[float]:
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, per_device_train_batch_size=4, logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, **_RUN,
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collate)  # type: ignore[arg-type]
    trainer.train()
    return losses(trainer)


def adapted(config: Any, model: Any = None) -> Any:
    import peft

    model = model or tiny_decoder("llama")
    torch.manual_seed(1)
    return peft.get_peft_model(model, config)


def adalora(_: Path) -> Any:
    import peft

    sizes: dict[str, Any] = {"init_r": 4, "target_r": 2, "total_step": 100, "tinit": 1, "tfinal": 1}
    return adapted(peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, **sizes))


def lora(**changes: Any) -> Any:
    import peft

    return peft.LoraConfig(task_type="CAUSAL_LM", target_modules=TARGETS, r=4, init_lora_weights=False, **changes)


def activated(_: Path) -> Any:
    return adapted(lora(alora_invocation_tokens=INVOCATION))


def mixture(folder: Path) -> Any:
    import peft

    adapters = {str(n): str(folder / f"adapter-{n}") for n in range(2)}
    for place in adapters.values():
        adapted(lora()).save_pretrained(place)
    model = tiny_decoder("llama", use_cache=False)
    return adapted(peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters=adapters), model)


def hooked(_: Path) -> Any:
    model = tiny_decoder("llama")

    def more(_: Any, __: Any, output: Any) -> Any:
        output.loss = output.loss * 1.5
        return output

    model.register_forward_hook(more)
    return model


def with_other_loss(_: Path) -> Any:
    model = tiny_decoder("llama")
    model.loss_function = lambda *args, **options: 2 * ForCausalLMLoss(*args, **options)
    return model


AROUND: dict[str, Callable[[Path], Any]] = {
    "AdaLoRA": adalora,
    "activated LoRA": activated,
    "X-LoRA": mixture,
    "a hook": hooked,
    "a loss function": with_other_loss,
}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.filterwarnings("ignore:The attention layers in this model:FutureWarning")
@pytest.mark.parametrize("attention", [None, "sdpa"])
@pytest.mark.parametrize("what", AROUND)
def test_what_is_around_a_language_model_takes_part(what: str, attention: Any, tmp_path: Path) -> None:
    if what in ("AdaLoRA", "activated LoRA", "X-LoRA"):
        pytest.importorskip("peft")
    wanted = by_transformers(AROUND[what](tmp_path), tmp_path / "theirs")
    args = {"attn_implementation": attention} if attention else {}
    found = by_whet(AROUND[what](tmp_path), tmp_path / "ours", **args)
    assert found == pytest.approx(wanted, rel=1e-5)  # fp32 sums in another order; what is left out moves more than 1e-3


def by_whet(model: Any, folder: Path, **changes: Any) -> list[float]:
    args = arguments(folder, precision="fp32", per_device_train_batch_size=4, **_RUN, **changes)
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collate)  # type: ignore[arg-type]
    trainer.train()
    return losses(trainer)


def test_a_hook_that_comes_later_takes_part(tmp_path: Path) -> None:
    model = tiny_decoder("llama")
    args = arguments(tmp_path, precision="fp32", per_device_train_batch_size=4, **_RUN)
    trainer = engine.Trainer(model=model, args=args, train_dataset=rows(), data_collator=collate)  # type: ignore[arg-type]
    assert type(trainer.objective).__name__ == "PackedNextTokens"
    seen: list[Tensor] = []
    model.register_forward_hook(lambda _, __, output: seen.append(output.loss))
    trainer.train()
    assert len(seen) == N_STEPS


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it
def test_adalora_of_answers_has_its_own_loss(tmp_path: Path) -> None:
    """whet's span loss would leave out what the adapter adds to the model's."""
    peft = pytest.importorskip("peft")
    sizes: dict[str, Any] = {
        "init_r": 4,
        "target_r": 2,
        "total_step": 100,
        "tinit": 1,
        "tfinal": 1,
        "orth_reg_weight": 5.0,
    }
    config = peft.AdaLoraConfig(task_type="QUESTION_ANS", target_modules=["query", "value"], **sizes)
    found = []
    for weight in (5.0, 0.0):
        config.orth_reg_weight = weight
        args = arguments(tmp_path / str(weight), precision="fp32", max_steps=1)
        model = adapted(config, tiny_model("bert"))
        trainer = engine.Trainer(model=model, args=args, train_dataset=tiny_rows(8, "bert", lengths=(20, 20)))
        trainer.train()
        found.append(losses(trainer)[0])
    assert found[0] > found[1] + 1
