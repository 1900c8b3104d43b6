"""What ranks that step alone do in the tests: each function gets its job and the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ends_of_ranks import AllDie
from tiny_runs import Toy, toy_rows

import engine
from tiny_decoders import collate, tiny_decoder, token_rows


class _Recorded(engine.Trainer):
    """Keeps the rows of each training step."""

    seen: list[dict[str, Any]]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if model.training:
            self.seen.append({name: one.tolist() for name, one in inputs.items()})
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def outer(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train a small module; return the rows that this rank had in each step, and the weights at the end."""
    trainer = _Recorded(Toy(), _arguments(job), train_dataset=toy_rows(48))  # pyright: ignore[reportArgumentType]
    trainer.seen = []
    if job.get("all_die_at") is not None:
        trainer.add_callback(AllDie(job["all_die_at"]))
    trainer.train(resume_from_checkpoint=job.get("resume"))
    held = {name: one.detach().flatten().tolist() for name, one in trainer.model.named_parameters()}
    return {"seen": trainer.seen, "weights": held}


def outer_adapter(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Train low-rank pairs of a decoder; return how far they and the frozen weights moved, as sums of magnitudes."""
    import peft

    wrapped: Any = peft.get_peft_model(tiny_decoder("llama"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    before = {name: one.detach().clone() for name, one in wrapped.named_parameters()}
    rows: Any = token_rows(24)
    trainer = engine.Trainer(wrapped, _arguments(job), collate, rows)
    trainer.train(resume_from_checkpoint=job.get("resume"))
    moved = {name: float((one.detach() - before[name]).abs().sum()) for name, one in wrapped.named_parameters()}
    return {
        "trained": {name: one for name, one in moved.items() if "lora" in name},
        "frozen": sum(one for name, one in moved.items() if "lora" not in name),
    }


def _arguments(job: dict[str, Any]) -> engine.TrainingArguments:
    usual: dict[str, Any] = {
        "output_dir": str(Path(job["folder"]).parent / "out"), "max_steps": 8, "logging_steps": 1,
        "per_device_train_batch_size": 12 // job["n_ranks"], "precision": "fp32", "learning_rate": 3e-2,
        "lr_scheduler_type": "constant", "max_grad_norm": 0.0, "report_to": [], "ddp_timeout": 20,
        "save_strategy": "no",
    }  # fmt: skip
    return engine.TrainingArguments(**(usual | job["args"]))
