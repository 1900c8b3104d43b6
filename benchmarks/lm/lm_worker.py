"""A worker that trains a decoder with transformers' Trainer, TRL's or whet's, a step each time it is asked.

The rows are given in a file, in the order in which they are trained; TRL packs them into blocks itself, so its worker
says how many real tokens each step had.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))
from gate import Gate
from protocol import Channel

SEED, LONGEST = 42, 1024
SIDES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "best_fp32": {"optim": "adamw_torch_fused"},
    "best_bf16": {"optim": "adamw_torch_fused", "bf16": True},
    "trl_fp32": {"optim": "adamw_torch_fused", "packing": True, "max_length": LONGEST, "bf16": False},
    "trl_bf16": {"optim": "adamw_torch_fused", "packing": True, "max_length": LONGEST, "bf16": True},
    "whet_fp32": {"precision": "fp32"},
    "whet_auto": {"precision": "auto"},
    "whet_lora": {"precision": "auto"},
}
"""What each side's settings have besides those that all have."""


def padded(batch: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest row."""
    lengths = [len(row["input_ids"]) for row in batch]
    longest = max(lengths)

    def filled(name: str, filler: int) -> torch.Tensor:
        return torch.tensor([[*row[name], *[filler] * (longest - len(row[name]))] for row in batch])

    mask = torch.tensor([[1] * length + [0] * (longest - length) for length in lengths])
    return {"input_ids": filled("input_ids", 0), "labels": filled("labels", -100), "attention_mask": mask}


def build(options: argparse.Namespace, rows: list[Any]) -> Any:
    """Return the side's Trainer."""
    transformers.set_seed(SEED)
    usual: dict[str, Any] = {
        "output_dir": options.folder, "per_device_train_batch_size": options.batch, "learning_rate": 3e-5, "seed": SEED,
        "max_steps": len(rows) // options.batch, "save_strategy": "no", "logging_strategy": "no", "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "train_sampling_strategy": "sequential",
    }  # fmt: skip
    settings = usual | SIDES[options.side]
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    if options.side.startswith("trl"):
        return _trl(model, settings, rows, options.batch)
    if options.side.startswith("whet"):
        import whet

        library: Any = whet
        if options.side == "whet_lora":
            model = _with_lora(model)
    else:
        library = transformers
    return library.Trainer(
        model=model, args=library.TrainingArguments(**settings), train_dataset=rows, data_collator=padded
    )


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))


def _trl(model: Any, settings: dict[str, Any], rows: list[Any], batch: int) -> Any:
    """Return TRL's trainer, with as many blocks in a step as make about as many tokens as the others' rows."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    data = Dataset.from_list([{"input_ids": row["input_ids"]} for row in rows])
    settings = settings | {"per_device_train_batch_size": max(1, batch // 2)}
    return trl.SFTTrainer(model=model, args=trl.SFTConfig(**settings), train_dataset=data, processing_class=tokenizer)


def count_trl(trainer: Any, n_tokens: list[int]) -> None:
    """Note the tokens of each batch that TRL makes."""
    made = trainer.data_collator

    def collate(batch: Any) -> Any:
        found = made(batch)
        ids = found["input_ids"]
        mask = found.get("attention_mask")
        n_tokens.append(int(ids.numel() if mask is None else mask.sum()))
        return found

    trainer.data_collator = collate


def about(trainer: Any) -> dict[str, Any]:
    """Return what the benchmark should know of this process."""
    known = {"n_threads": torch.get_num_threads(), "attention": trainer.model.config._attn_implementation,
             "n_parameters": sum(one.numel() for one in trainer.model.parameters())}  # fmt: skip
    if (whet := sys.modules.get("whet")) is not None:
        known["changes"] = str(whet.changes(trainer.model))
    return known


def main() -> None:
    """Take a step for each request, until the request to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--folder", required=True)
    options, channel = parser.parse_args(), Channel()
    trainer = build(options, json.loads(options.rows.read_text("utf-8")))
    made: list[int] = []
    if options.side.startswith("trl"):
        count_trl(trainer, made)
    step = iter(range(10**9))
    trainer.add_callback(
        Gate(channel, lambda: about(trainer), lambda _: None, lambda _: {"step": next(step), "made": made})
    )
    trainer.train()


if __name__ == "__main__":
    main()
