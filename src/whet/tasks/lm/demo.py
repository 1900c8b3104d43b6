"""`whet demo-lm`: a small decoder learns to write, from scratch and without a download."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from whet import console, log
from whet.config.arguments import TrainingArguments
from whet.jobs.demo_folder import DATA, continuing
from whet.jobs.run import show
from whet.jobs.task import begin
from whet.tasks.lm.arguments import SHOWN, DemoLmArguments, LmArguments
from whet.tasks.lm.splits import read_split
from whet.watch import files as output_files
from whet.watch import lock, run_log, stop

MARKER = "whet_demo_lm.json"
"""The file that marks the folder of this demo."""
_FIXED = ("per_device_train_batch_size", "learning_rate", "warmup_steps", "logging_steps")
"""Settings that every demo has."""
_VOCABULARY, _POSITIONS, _END = 768, 256, "<|endoftext|>"
_SIZES = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": _POSITIONS, "attention_dropout": 0.1,
}  # fmt: skip


def run_demo(demo: DemoLmArguments) -> int:
    """Make a tokenizer and a model, train it, and print the perplexity before and after and a sample."""
    log.set_up(logging.WARNING)
    started_s = time.perf_counter()
    with lock.output_folder(demo.output_dir, overwrite=True) as folder, run_log.buffered():
        job, args = settings(demo, folder)
        with continuing(folder, MARKER, args, _FIXED) as args:
            if args.resume_from_checkpoint is None:
                write_texts(folder)
                save_new_model(folder / "new", folder / "train.jsonl", demo.seed)
            _show_it(job, args, folder, started_s)
    return 0


def write_texts(folder: Path) -> None:
    """Write the texts that the demo trains on and is judged by."""
    for split in ("train", "validation"):
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts(split))
        output_files.write_text(folder / f"{split}.jsonl", "".join(lines))


def settings(demo: DemoLmArguments, folder: Path) -> tuple[LmArguments, TrainingArguments]:
    """Return the demo as the settings of `whet lm`, with its texts and its new model in the folder."""
    job = LmArguments(
        model_name_or_path=str(folder / "new"),
        train_file=str(folder / "train.jsonl"),
        validation_file=str(folder / "validation.jsonl"),
        max_length=_POSITIONS,
    )
    args = TrainingArguments(
        output_dir=demo.output_dir,
        overwrite_output_dir=True,
        do_train=True,
        do_eval=True,
        eval_on_start=True,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        max_steps=demo.max_steps,
        seed=demo.seed,
        logging_steps=25,
        save_strategy="time",
        save_interval_s=5,
        save_total_limit=1,
    )
    return job, args


def texts(split: str) -> list[str]:
    """Return the texts that the questions of the demo data are about, each once."""
    data = json.loads((DATA / f"{split}.json").read_text("utf-8"))["data"]
    return list(dict.fromkeys(part["context"] for article in data for part in article["paragraphs"]))


def save_new_model(folder: Path, data: Path, seed: int) -> None:
    """Write a decoder with random weights, and a tokenizer that has learnt its vocabulary from the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    from whet.models.loading.quiet import quiet

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[_END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator([json.loads(line)["text"] for line in data.read_text("utf-8").splitlines()], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=_END, model_max_length=_POSITIONS)
    set_seed(seed)
    ids: dict[str, Any] = {"vocab_size": len(tokenizer), "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None}
    with quiet():
        LlamaForCausalLM(LlamaConfig(**_SIZES, **ids, tie_word_embeddings=True)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _show_it(job: LmArguments, args: TrainingArguments, folder: Path, started_s: float) -> None:
    examples = {name: read_split(job, name) for name in ("train", "validation")}

    from transformers import set_seed

    from whet.tasks.lm.arguments import GenerateArguments
    from whet.tasks.lm.generate import Writer
    from whet.tasks.lm.job import prepare
    from whet.tasks.lm.judge import perplexity

    begin(args)
    prepared = prepare(job, args, examples)
    metrics = prepared.run()
    stop.mark_work_done()
    before = next(entry["eval_loss"] for entry in prepared.engine.state.log_history if "eval_loss" in entry)
    print()
    show(SHOWN, metrics, folder, time.perf_counter() - started_s)
    print(f"\nperplexity before training {perplexity(before):,.0f}, after {metrics['eval_perplexity']:,.0f}\n")
    asked = GenerateArguments(model=str(folder), prompt="The", max_new_tokens=80, do_sample=True, temperature=0.8)
    engine = prepared.engine
    set_seed(args.seed)
    writer = Writer(engine.model.eval(), engine.spec.processing_class, asked)
    print(console.paragraph(f"The{writer.continued('The')}"))
    print(f'\nMore:\n  whet generate {folder} --prompt "..." --do_sample')
