"""`whet lm`, `whet generate` and `whet demo-lm`: the commands of language models, and what their run consists of."""

import json
from pathlib import Path
from typing import Any

from whet.config.command_line import Command
from whet.jobs.command import least_is_best, training_command
from whet.jobs.task import HONOURED_BY_CALLS, Task, lazily, words
from whet.models.loading.heads import CAUSAL_LM
from whet.tasks.lm.arguments import RUN_RULES, DemoLmArguments, GenerateArguments, LmArguments, metrics_of

_USUAL_LENGTH = 1024


def _sample(job: LmArguments, n_rows: int) -> tuple[str, str]:
    length = job.max_length or _USUAL_LENGTH
    row = {job.dataset_text_field or "text": words(length)}
    if job.loss == "dpo":
        row = {"prompt": words(length // 2)} | dict.fromkeys(("chosen", "rejected"), words(length // 2))
    return ".jsonl", "\n".join([json.dumps(row)] * n_rows)


TASK = Task(
    name="lm",
    head=CAUSAL_LM,
    rules=RUN_RULES,
    read=lazily(__name__, "examples", "read_split"),
    prepare=lazily(__name__, "job", "prepare"),
    sample=_sample,
    takes=(*HONOURED_BY_CALLS, "label_smoothing_factor"),
    metrics=metrics_of,
    shown={
        "eval_loss": ("loss", "{:.4f}"),
        "eval_rewards/accuracies": ("chosen preferred", "{:.1%}"),
        "eval_rewards/margins": ("reward margin", "{:.4f}"),
        "eval_perplexity": ("perplexity", "{:,.2f}"),
        "eval_mean_token_accuracy": ("token accuracy", "{:.1%}"),
        "predict_perplexity": ("perplexity, test", "{:,.2f}"),
        "predict_mean_token_accuracy": ("token accuracy, test", "{:.1%}"),
    },
    judged_by=("perplexity", "loss"),
    lower_is_better=True,
)
LM = training_command(
    TASK,
    LmArguments,
    main=("dataset_text_field", "max_length"),
    summary=(
        "Fine-tune a causal language model on texts, on prompts with completions, or on conversations, and compute its"
        " perplexity. The options are those of transformers' run_clm.py and TrainingArguments, and of TRL's SFTConfig."
    ),
    examples=(
        "whet lm --model_name_or_path HuggingFaceTB/SmolLM2-135M --train_file book.txt --do_train --output_dir out",
        "whet lm run.yaml --train_file chats.jsonl --max_length 512 --output_dir out",
    ),
    usual=least_is_best("rewards/rejected"),
)
GENERATE = Command(
    name="whet generate",
    summary="Continue a text with a language model, or chat with it in the terminal.",
    usage="MODEL --prompt TEXT [--OPTION VALUE ...]",
    examples=(
        'whet generate out --prompt "Once upon a time" --max_new_tokens 60 --do_sample --temperature 0.8',
        "whet generate HuggingFaceTB/SmolLM2-135M-Instruct --chat",
    ),
    parts=(GenerateArguments,),
    lone="model",
    run=lazily(__name__, "generate", "run_generate"),
)

_SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "attention_dropout": 0.1,
}  # fmt: skip
"""Of the decoder of the demo."""


def _run_demo(demo: DemoLmArguments) -> int:
    """Make a tokenizer and a model, train it, and print the perplexity before and after and a sample."""
    from whet.jobs.demo import demo_arguments, run_demo

    folder = Path(demo.output_dir)
    job = LmArguments(
        model_name_or_path=str(folder / "new"),
        train_file=str(folder / "train.jsonl"),
        validation_file=str(folder / "validation.jsonl"),
        max_length=_SIZES["max_position_embeddings"],
    )
    args = demo_arguments(
        demo,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        weight_decay=0.1,
        max_steps=demo.max_steps,
        logging_steps=25,
        save_interval_s=5,
    )

    def begin() -> None:
        _save_new_model(folder / "new", _write_texts(folder), demo.seed)

    end = lazily(__name__, "generate", "show_demo")
    return run_demo(TASK, job, args, marker="whet_demo_lm.json", begin=begin, end=end)


def _write_texts(folder: Path) -> list[str]:
    """Write the texts that the demo trains on and is judged by, each once; return those to train on."""
    from whet.jobs.demo import DATA
    from whet.watch import files as output_files

    found = {}
    for split in ("train", "validation"):
        data = json.loads((DATA / f"{split}.json").read_text("utf-8"))["data"]
        found[split] = list(dict.fromkeys(part["context"] for article in data for part in article["paragraphs"]))
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in found[split])
        output_files.write_text(folder / f"{split}.jsonl", "".join(lines))
    return found["train"]


def _save_new_model(folder: Path, texts: list[str], seed: int) -> None:
    """Write a decoder with random weights, and a tokenizer that has learnt its vocabulary from the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    from whet.models.loading.quiet import quiet

    end = "<|endoftext|>"
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=768, special_tokens=[end], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    raw.train_from_iterator(texts, trainer)
    most = _SIZES["max_position_embeddings"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token=end, model_max_length=most)
    set_seed(seed)
    with quiet():
        config = LlamaConfig(
            **_SIZES, vocab_size=len(tokenizer), bos_token_id=None, eos_token_id=0, pad_token_id=None,
            tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


DEMO = Command(
    name="whet demo-lm",
    summary="Train a small decoder from scratch, and show what it writes. Nothing is downloaded.",
    usage="[--OPTION VALUE ...]",
    examples=("whet demo-lm", "whet demo-lm --output_dir demo --max_steps 600 --seed 7"),
    parts=(DemoLmArguments,),
    run=_run_demo,
)
COMMANDS = (LM, GENERATE, DEMO)
