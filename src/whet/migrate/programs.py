"""The programs whose options whet knows, and what becomes of each option.

The settings classes of a task say which names are whet's, which are older ones, and which are refused. The tables here
hold the rest: what transformers' scripts and TRL call or mean otherwise, and what they do by default and whet does not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

from whet.config import secrets
from whet.config.aliases import ALIASES, Alias, is_off, kind_of
from whet.config.settings import Names, take
from whet.config.values import is_many, is_switch, read_flag
from whet.errors import MASK
from whet.migrate import accelerate
from whet.migrate.draft import Draft, Status, shown
from whet.migrate.shell import Word

Act = Callable[[Draft, "Flag", "Flags"], None]


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of a script with its values."""

    name: str
    text: str
    """As it was written, without a secret."""
    values: Sequence[Word]

    @property
    def value(self) -> Word:
        """Its value; true for a flag that stands alone."""
        return self.values[0] if self.values else Word.of("true")

    @property
    def is_off(self) -> bool:
        """Whether its value switches it off."""
        return self.value.text.lower() in ("false", "no", "0", "none", "null", "")


Flags = Mapping[str, Flag]


def _says(status: Status, why: str) -> Act:
    return lambda draft, flag, _: draft.say(flag.text, status, why)


def _renamed(to: str, why: str = "") -> Act:
    return lambda draft, flag, _: draft.say(flag.text, "translated", why, draft.put(to, *flag.values or [flag.value]))


def _only(off: tuple[str, ...], why: str, instead: str) -> Act:
    """Return what accepts the values that change nothing here, and refuses others."""

    def act(draft: Draft, flag: Flag, _: Flags) -> None:
        if all(value.text.lower() in off for value in flag.values or [flag.value]):
            draft.say(flag.text, "no effect", why)
        else:
            draft.say(flag.text, "refused", instead)

    return act


def _dtype(draft: Draft, flag: Flag, given: Flags) -> None:
    named = flag.value.text.removeprefix("torch.")
    if named in ("bfloat16", "float16") and not {"bf16", "fp16"} & given.keys():
        why = "weights stay float32; the products compute in bf16"
        draft.say(flag.text, "translated", why, draft.put("precision", "bf16"))
    else:
        draft.say(flag.text, "done", "weights are float32")


@dataclass(frozen=True, kw_only=True)
class Program:
    """A script, or a command of TRL."""

    name: str
    task: str
    acts: Mapping[str, Act] = field(default_factory=dict)
    """Options that whet's settings do not know, or that mean something else there."""
    complete: Callable[[Draft, Flags], None] = lambda *_: None
    """Sets what the program does without being asked, and whet does not."""


_GLUE = {
    "cola": ("sentence", None), "mnli": ("premise", "hypothesis"), "mrpc": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"), "qqp": ("question1", "question2"), "rte": ("sentence1", "sentence2"),
    "sst2": ("sentence", None), "stsb": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip
"""Task of GLUE -> its columns, as in run_glue.py."""


def _glue_task(draft: Draft, flag: Flag, given: Flags) -> None:
    name = {"sst-2": "sst2", "sts-b": "stsb"}.get(flag.value.text.lower(), flag.value.text.lower())
    if name not in _GLUE:
        draft.say(flag.text, "refused", f"run_glue.py has {', '.join(_GLUE)}: name one, or data of your own")
        return
    text, pair = _GLUE[name]
    becomes = [draft.put("dataset_name", "nyu-mll/glue"), draft.put("dataset_config_name", name)]
    becomes += [draft.put("text_column_names", text)]
    becomes += [draft.put("text_pair_column_names", pair)] if pair else []
    becomes += [draft.put("do_regression", "true")] if name == "stsb" else []
    why = ""
    if name == "mnli":
        becomes += [draft.put("validation_split_name", "validation_matched")]
        becomes += [draft.put("test_split_name", "test_matched")] if "do_predict" in given else []
        why = "for the mismatched pairs, evaluate the trained model with --validation_split_name validation_mismatched"
    draft.say(flag.text, "translated", why, " ".join(becomes))


def _glue_folder(draft: Draft, flag: Flag, given: Flags) -> None:
    if "task_name" in given:
        draft.say(flag.text, "no effect", "the data of GLUE comes from the hub")
    else:
        draft.say(flag.text, "refused", "name the files: --train_file and --validation_file")


def _conll_folder(draft: Draft, flag: Flag, given: Flags) -> None:
    """Older run_ner.py read train.txt, dev.txt and test.txt of a folder."""
    folder = flag.value
    becomes = []
    for work, option, file in (
        ("do_train", "train_file", "train.txt"), ("do_eval", "validation_file", "dev.txt"),
        ("do_predict", "test_file", "test.txt"),
    ):  # fmt: skip
        if work in given:
            end = "" if folder.text.endswith("/") else "/"
            becomes.append(draft.put(option, Word((*folder.parts, f"{end}{file}"), quoted=True)))
    draft.say(flag.text, "translated", "the files that the script reads in it", " ".join(becomes))


def _complete_clm(draft: Draft, given: Flags) -> None:
    """run_clm.py joins all texts and cuts them into blocks; whet does so by itself for plain text files."""
    file = draft.value("train_file") or draft.value("validation_file") or ""
    if not file.endswith(".txt"):
        draft.usual("packing", "true", "the script joins all texts, and cuts them into blocks")
    if {"dataset_name", "do_eval"} <= given.keys() and "validation_split_percentage" not in given:
        draft.say(
            "(5% of the data for validation)", "no effect",
            "it counts if the data set has no split for validation: then add --train_split_name 'train[5%:]' "
            "--validation_split_name 'train[:5%]'",
        )  # fmt: skip


def _percentage(draft: Draft, flag: Flag, given: Flags) -> None:
    if "dataset_name" not in given:
        draft.say(flag.text, "refused", "split the file, and name its parts: --train_file, --validation_file")
        return
    part = flag.value.text
    becomes = [
        draft.put("train_split_name", f"train[{part}%:]"),
        draft.put("validation_split_name", f"train[:{part}%]"),
    ]
    why = "the script does so if the data set has no split for validation: if it has one, leave these out"
    draft.say(flag.text, "translated", why, " ".join(becomes))


def _backend(draft: Draft, flag: Flag, _: Flags) -> None:
    """Read the backend as its older name does: ccl is gone."""
    named = ALIASES["xpu_backend"].convert(flag.value.text)
    if named == flag.value.text or flag.value.live:
        draft.put(flag.name, flag.value)
        draft.say(flag.text, "kept")
    else:
        why = "Intel's oneCCL bindings for PyTorch are archived"
        draft.say(flag.text, "translated", why, draft.put(flag.name, named))


_TOKENIZER = _says("done", "the tokenizer's own files say it")
_OF_TOKENIZER = ("do_lower_case", "do_basic_tokenize", "strip_accents", "keep_accents", "tokenize_chinese_chars",
                 "use_fast")  # fmt: skip
_FROM_WEIGHTS = _says("done", "the model's configuration says it")
_LAUNCHED = _says("no effect", "whet reads the rank from variables")
_OLD: Mapping[str, Act] = {
    "ddp_backend": _backend,
    **dict.fromkeys(_OF_TOKENIZER, _TOKENIZER),
    "model_type": _FROM_WEIGHTS,
    "low_cpu_mem_usage": _says("done", "weights are read once, from safetensors"),
    **dict.fromkeys(("server_ip", "server_port"), _says("no effect", "it is for a debugger")),
    "n_gpu": _LAUNCHED,
    "threads": _renamed("preprocessing_num_workers"),
    "eval_all_checkpoints": _says("refused", "evaluate while training: --eval_strategy steps --eval_steps 500"),
    "verbose_logging": _says("no effect", "--log_level info shows more"),
    "torch_dtype": _dtype,
    "dtype": _dtype,
    "evaluate_during_training_steps": _renamed("eval_steps"),
    "tokenizer_revision": _renamed("model_revision"),
}
"""Options that transformers' scripts have had."""
_QA_OLD = {
    "predict_file": _renamed("validation_file"),
    "max_query_length": _says("no effect", "a question is never cut: the context is, into windows"),
    "lang_id": _only(("0",), "English", "whet qa has no language embeddings of XLM: leave it out"),
}
_SCRIPTS = {
    "run_qa.py": Program(name="run_qa.py", task="qa", acts=_OLD | _QA_OLD),
    "run_squad.py": Program(name="run_squad.py", task="qa", acts=_OLD | _QA_OLD),
    "run_glue.py": Program(
        name="run_glue.py", task="classify", acts=_OLD | {"task_name": _glue_task, "data_dir": _glue_folder}
    ),
    "run_classification.py": Program(name="run_classification.py", task="classify", acts=_OLD),
    "run_ner.py": Program(
        name="run_ner.py",
        task="tag",
        acts=_OLD | {
            "data_dir": _conll_folder,
            "labels": _says("done", "the labels are those of the data"),
            "task_type": _says("no effect", "--label_column_name chooses the column"),
        },
    ),
    "run_clm.py": Program(
        name="run_clm.py", task="lm", acts=_OLD | {"validation_split_percentage": _percentage}, complete=_complete_clm
    ),
}  # fmt: skip


def _uses_peft(given: Flags) -> bool:
    return "use_peft" in given and not given["use_peft"].is_off


def _peft(draft: Draft, flag: Flag, given: Flags) -> None:
    if flag.is_off:
        draft.say(flag.text, "no effect", "all weights are trained")
    elif "lora_r" in given:
        draft.say(flag.text, "translated", "", f"--lora_r {given['lora_r'].value.text}")
    else:
        draft.say(flag.text, "translated", "16 is TRL's rank", draft.put("lora_r", 16))


def _with_peft(draft: Draft, flag: Flag, given: Flags) -> None:
    if not _uses_peft(given):
        draft.say(flag.text, "no effect", "TRL reads it with use_peft alone")
        return
    several = len(flag.values) > 1
    becomes = draft.put(flag.name, Word.of(",".join(value.text for value in flag.values)) if several else flag.value)
    draft.say(flag.text, "translated" if several else "kept", "", becomes if several else "")


def _packing(draft: Draft, flag: Flag, given: Flags) -> None:
    strategy = given["packing_strategy"].value.text if "packing_strategy" in given else "bfd"
    if flag.is_off:
        draft.put("packing", "false")
        draft.say(flag.text, "kept")
    elif strategy == "wrapped":
        draft.put("packing", "true")
        draft.say(flag.text, "kept", "texts are joined and cut into blocks of max_length")
    else:
        why = "rows of a batch never see each other, and whet pads nothing; a step counts texts, not blocks: a larger "
        why += "--per_device_train_batch_size gives it as many tokens as TRL's"
        draft.say(flag.text, "done", why, draft.put("packing", "false"))


def _streaming(draft: Draft, flag: Flag, _: Flags) -> None:
    if flag.is_off:
        draft.say(flag.text, "no effect", "all data is read before the training")
    else:
        draft.say(flag.text, "refused", "whet lm reads all data before it trains; use whet.Trainer for streams")


def _trl_evaluates(draft: Draft, flag: Flag, given: Flags) -> None:
    strategy = given.get("eval_strategy") or given.get("evaluation_strategy")
    if flag.is_off or strategy is None or strategy.is_off:
        draft.say(flag.text, "no effect", "trl evaluates as eval_strategy says, and not at the end")
    else:
        draft.say(flag.text, "done", "eval_strategy says it")


_PRESETS = {
    "single_gpu": None, "multi_gpu": None, "fsdp1": ("fsdp", "full_shard"), "fsdp2": ("fsdp", "full_shard"),
    "zero1": ("zero_stage", "1"), "zero2": ("zero_stage", "2"), "zero3": ("zero_stage", "3"),
    "context_parallel_2gpu": None,
}  # fmt: skip


def _accelerate_config(draft: Draft, flag: Flag, _: Flags) -> None:
    """Read one of TRL's own configurations, or a file."""
    name = flag.value.text
    if name not in _PRESETS:
        accelerate.translate_flags(draft, [("config_file", flag.text, flag.value)], nested=False)
    elif (option := _PRESETS[name]) is None:
        draft.say(flag.text, "done", "whet launch starts ranks")
    else:
        draft.say(flag.text, "translated", "", draft.put(*option))


def _ds_config(draft: Draft, flag: Flag, _: Flags) -> None:
    draft.put("deepspeed", flag.value)
    draft.say(flag.text, "kept", "whet migrate FILE explains its keys")


_DROPOUT = "most decoders have none; of GPT-2 and its like, set it to 0 in the model's configuration"
_IN_TOKENIZER = "save the tokenizer with it, and name its folder: --tokenizer_name FOLDER"
_CUT = "--max_length cuts prompt and completion together, at the end: leave it out"
_SIGMOID = "whet has the sigmoid loss of DPO alone: leave it out, or use TRL's DPOTrainer after whet.optimize(model)"
_TRL: Mapping[str, Act] = {
    **_OLD,
    "dataset_config": _renamed("dataset_config_name"),
    "dataset_train_split": _renamed("train_split_name"),
    "dataset_test_split": _renamed("validation_split_name"),
    "dataset_train_name": _renamed("train_split_name"),
    "dataset_test_name": _renamed("validation_split_name"),
    "dataset_num_proc": _renamed("preprocessing_num_workers", "threads"),
    "dataset_streaming": _streaming,
    "streaming": _streaming,
    "do_eval": _trl_evaluates,
    "use_peft": _peft,
    **dict.fromkeys(
        ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"), _with_peft
    ),
    "lora_modules_to_save": _only(
        ("none", "null"), "a new head is trained anyway", "whet trains the pairs and a new head alone: leave it out"
    ),
    "lora_target_parameters": _says("refused", "name layers: --lora_target_modules"),
    "lora_task_type": _only(("causal_lm",), "whet lm is of this type", "whet lm trains causal language models alone"),
    "bnb_4bit_quant_type": _only(("nf4",), "the form of --load_in_4bit", "whet has nf4: leave it out"),
    "bnb_4bit_quant_storage": _says("no effect", "ranks share no rounded weights"),
    "bnb_4bit_use_double_quant": _says("no effect", "scales stay float32: 0.4 bits more for each weight"),
    "use_bnb_nested_quant": _says("no effect", "scales stay float32: 0.4 bits more for each weight"),
    "use_flash_attention_2": _says("done", "whet's attention computes no padding"),
    "use_liger_kernel": _says("done", "whet's own fused operators are used for every model that they support"),
    "model_code_revision": _says("no effect", "whet runs no code that comes with a model"),
    "base_model_revision": _renamed("model_revision"),
    "packing": _packing,
    "packing_strategy": _says("done", "packing says it"),
    "eval_packing": _says("done", "packing counts for all splits"),
    "padding_free": _says("done", "whet computes no padding"),
    "pad_to_multiple_of": _says("no effect", "whet computes no padding"),
    **dict.fromkeys(
        ("pad_token", "padding_value", "label_pad_token_id"), _says("no effect", "whet computes no padding")
    ),
    "shuffle_dataset": _says("done", "rows come in random order: train_sampling_strategy"),
    "truncation_mode": _only(
        ("keep_start",),
        "conversations and completions that are too long are cut at the end; a plain text becomes several rows",
        "whet cuts at the end: shorten the texts",
    ),
    "dataset_kwargs": _only(("none", "null", "{}"), "nothing is asked for", "leave it out; whet lm tokenizes all data"),
    "model_init_kwargs": _only(
        ("none", "null", "{}"), "nothing is asked for", "whet's own options say it: --attn_implementation, --precision"
    ),
    "chat_template_path": _says("refused", f"the tokenizer's own template is used: {_IN_TOKENIZER}"),
    "eos_token": _says("refused", f"the tokenizer's own token is used: {_IN_TOKENIZER}"),
    "activation_offloading": _renamed("activation_offload"),
    "gradient_checkpointing_use_reentrant": _only(
        ("false",), "whet checkpoints without reentrant autograd", "leave it out: torch advises against it"
    ),
    "ignore_bias_buffers": _says("no effect", "buffers are copied from rank 0 when the training begins"),
    "accelerate_config": _accelerate_config,
    "deepspeed": _ds_config,
    "trust_remote_code": _only(
        ("false",),
        "whet runs no code that comes with a model",
        "whet runs no code that comes with a model: use a model that transformers implements",
    ),
}
_SFT: Mapping[str, Act] = {
    **_TRL,
    "loss_type": _only(
        ("nll", "chunked_nll"), "the loss of whet lm", "whet lm has the plain loss of tokens: leave it out"
    ),
}
_DPO: Mapping[str, Act] = {
    **_TRL,
    "loss_type": _only(("sigmoid",), "the loss of --loss dpo", _SIGMOID),
    "max_prompt_length": _says("refused", _CUT),
    "max_completion_length": _says("refused", _CUT),
    "max_target_length": _says("refused", _CUT),
    "disable_dropout": _only(
        ("true",),
        _DROPOUT,
        "dropout is that of the model's configuration: set it there",
    ),
    "generate_during_eval": _only(("false",), "nothing is generated", "whet generate FOLDER shows what a model writes"),
    "f_divergence_type": _only(("reverse_kl",), "that of --loss dpo", _SIGMOID),
    "f_alpha_divergence_coef": _says("no effect", "it is for another divergence"),
    "sync_ref_model": _only(("false",), "the reference stays", _SIGMOID),
    **dict.fromkeys(("ref_model_mixup_alpha", "ref_model_sync_steps"), _says("no effect", "the reference stays")),
    **dict.fromkeys(
        ("rpo_alpha", "ld_alpha", "discopop_tau", "loss_weights", "base_model_attribute_name"),
        _only(("none", "null"), "nothing is asked for", _SIGMOID),
    ),
    "use_weighting": _only(("false",), "pairs count alike", _SIGMOID),
    "is_encoder_decoder": _only(("false", "none"), "whet lm trains decoders", "whet lm trains decoders alone"),
    "force_use_ref_model": _only(("false",), "the reference is the model before training", _SIGMOID),
    **dict.fromkeys(
        ("model_adapter_name", "ref_adapter_name", "ref_model_init_kwargs"),
        _only(
            ("none", "null", "{}"), "nothing is asked for", "the reference is the model before training: leave it out"
        ),
    ),
    "use_logits_to_keep": _says("done", "logits are computed for the tokens that the loss reads"),
    "use_num_logits_to_keep": _says("done", "logits are computed for the tokens that the loss reads"),
    "precompute_ref_batch_size": _says("no effect", "--per_device_train_batch_size counts"),
    "reference_free": _only(("false",), "the reference is the model before training", _SIGMOID),
}


def _complete_trl(draft: Draft, rate: str) -> None:
    """Set TRL's own defaults, and say which are left out."""
    draft.usual("do_train", "true", "trl always trains")
    draft.usual("learning_rate", rate, "TRL's default; whet's is 5e-5")
    if draft.value("eval_strategy") not in (None, "no") and "train_file" not in draft.options:
        draft.usual("validation_split_name", "test", "TRL evaluates on the split test")
    if not {"bf16", "fp16", "precision"} & draft.options.keys():
        draft.say("(default of TRL: bf16)", "done", "whet measures whether bf16 is faster on this machine")
    if "gradient_checkpointing" not in draft.options:
        why = "the result is the same; add --gradient_checkpointing if memory is short"
        draft.say("(default of TRL: gradient_checkpointing)", "no effect", why)


def _complete_sft(draft: Draft, given: Flags) -> None:
    _complete_trl(draft, "2e-5")
    if not {"completion_only_loss", "assistant_only_loss"} & draft.options.keys():
        why = "of conversations, whet learns the assistant's turns: --assistant_only_loss false learns all, as TRL does"
        draft.say("(default of TRL: all turns of messages)", "no effect", why)
    if draft.value("packing") != "true":
        why = "whet makes several rows of a longer plain text, and learns all of it: shorten the texts to learn their "
        why += "beginnings alone; conversations and completions are cut, as by TRL"
        draft.say("(default of TRL: texts end at max_length)", "no effect", why)


def _complete_dpo(draft: Draft, given: Flags) -> None:
    draft.usual("loss", "dpo", "direct preference optimization")
    _complete_trl(draft, "1e-6")
    if "disable_dropout" not in given:
        draft.say("(default of TRL: disable_dropout)", "no effect", _DROPOUT)


_SFT_PROGRAM = Program(name="trl sft", task="lm", acts=_SFT, complete=_complete_sft)
_DPO_PROGRAM = Program(name="trl dpo", task="lm", acts=_DPO, complete=_complete_dpo)
_OF_TRL = {"sft": _SFT_PROGRAM, "dpo": _DPO_PROGRAM}
_KEEP = "change the import to whet.Trainer in it (docs/trainer.md)"
NOT_TAKEN = {
    "run_mlm.py": "whet has no command for masked language models",
    "run_plm.py": "whet has no command for permutation language models",
    "run_fim.py": "whet has no command for filling in the middle",
    "run_swag.py": "whet has no command for multiple choice",
    "run_seq2seq_qa.py": "whet trains encoders and decoders, not both in one",
    "run_summarization.py": "whet trains encoders and decoders, not both in one",
    "run_translation.py": "whet trains encoders and decoders, not both in one",
    "run_xnli.py": "its options choose languages: use whet classify --dataset_name facebook/xnli "
    "--dataset_config_name LANGUAGE",
    "run_qa_beam_search.py": "whet has no beam search over answers: whet qa scores starts and ends",
}
"""Scripts of transformers without a command of whet -> why."""


def program_of(script: str, words: Sequence[Word]) -> tuple[Program | None, list[Word]]:
    """Return the program that a script, or a module after a dot, is, and the words of its options."""
    name = script.rsplit("/", 1)[-1]
    if name in ("trl", ".trl", ".trl.cli") and words and words[0].text in _OF_TRL:
        return _OF_TRL[words[0].text], [*words[1:]]
    if match := re.fullmatch(r"\.trl\.scripts\.(sft|dpo)", name):
        return _OF_TRL[match[1]], [*words]
    if name in ("sft.py", "dpo.py"):
        return _OF_TRL[name[:3]], [*words]
    return _SCRIPTS.get(name.lower()), [*words]


def own_program(task: str, script: str) -> Program:
    """Return a script that is not known as one that does a task of whet, with the names of transformers' scripts."""
    found = next((one for one in _SCRIPTS.values() if one.task == task), None)
    acts = {name: act for name, act in (found.acts if found else _OLD).items() if name not in ("task_name", "data_dir")}
    return Program(name=script, task=task, acts=acts)


def why_not(script: str) -> str:
    """Return what to do with a script that whet does not know."""
    name = script.rsplit("/", 1)[-1]
    known = NOT_TAKEN.get(name)
    if known:
        return known if name == "run_xnli.py" else f"{known}: {_KEEP}"
    if name in ("bash", "sh"):
        return "name the script that it runs: whet migrate FILE"
    if name.endswith("_no_trainer.py"):
        return (
            f"its options are those of its own loop: use {name.replace('_no_trainer', '')}, or call whet.optimize in it"
        )
    like = next((program.task for known, program in _SCRIPTS.items() if name.endswith(known)), None)
    named = f"--task {like}" if like else "--task qa, classify, tag or lm"
    return f"if its options are those of transformers' scripts, say what it trains: {named}; or {_KEEP}"


def flags_of(
    words: Sequence[Word], switches: Callable[[str], bool] = lambda _: False
) -> tuple[dict[str, Flag], list[Word]]:
    """Return the options of a script by name, the last one of a name, and the words that belong to none.

    A variable that may hold several words is the value of the option before it, unless that has one or is a switch.
    """
    found: dict[str, Flag] = {}
    lone: list[Word] = []
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--") or word.is_variable:
            lone.append(word)
            continue
        pair = word.cut("=")
        name = (pair[0] if pair else word).text[2:].replace("-", "_")
        values = [pair[1]] if pair else []
        begin = at
        while not pair and at < len(words) and not _is_flag(words[at]):
            if words[at].is_variable and (values or switches(name) or words[at].quoted):
                break
            values.append(words[at])
            at += 1
        text = " ".join(one.spelled for one in (word, *words[begin:at]))
        is_secret = bool(secrets.in_command([f"--{name}", *(value.text for value in values)]))
        found.pop(name, None)
        found[name] = Flag(name, shown(text, secret=is_secret), values)
    return found, lone


def _is_flag(word: Word) -> bool:
    return word.text.startswith("--") and len(word.text) > 2


def translate(draft: Draft, program: Program, given: Flags, names: Names) -> None:
    """Write the options of a program into the draft; `names` are those of whet's command."""
    draft.task, draft.program = program.task, program.name
    for one in given.values():
        plain = None if one.values or one.name in program.acts else switched_off(one.name, names)
        flag = one if plain is None else Flag(plain, one.text, [Word.of("false")])
        act = program.acts.get(flag.name)
        is_known = act is not None or flag.name in {*names.aliases, *accelerate.FLAGS}
        if flag.name == "token" or (flag.name in names.options and names.options[flag.name].secret):
            _token(draft, flag)
        elif is_known and len(flag.values) > 1 and flag.name not in _SEVERAL:
            draft.say(flag.text, "refused", f"{program.name} takes one value of it: give that one")
        elif act is not None:
            act(draft, flag, given)
        elif flag.name in names.options:
            _keep(draft, flag, names)
        elif flag.name in names.aliases:
            _alias(draft, flag, names.aliases[flag.name])
        elif flag.name in names.refused:
            _refused(draft, flag, names)
        elif program.name.startswith("trl") and flag.name in accelerate.FLAGS:
            accelerate.translate_flags(draft, [(flag.name, flag.text, flag.value)], nested=False)
        else:
            _unknown(draft, flag, names)
    program.complete(draft, given)


_SEVERAL = ("labels", "loss_type", "loss_weights", "lora_modules_to_save", "lora_target_modules",
            "lora_target_parameters")  # fmt: skip
"""Options of the tables above that take several values."""


def switched_off(name: str, names: Names) -> str | None:
    """Return the switch that `--no_NAME` of transformers' parser of arguments turns off; None for another name."""
    plain = name.removeprefix("no_")
    if plain == name or names.kind(name) is not None or name in names.refused:
        return None
    kind = kind_of(names.refused[plain].off) if plain in names.refused else names.kind(plain)
    return plain if is_switch(kind) else None


def _token(draft: Draft, flag: Flag) -> None:
    why = "other users can read a command: set it in the environment"
    draft.say(f"--{flag.name} {MASK}", "translated", why, "HF_TOKEN")


def _keep(draft: Draft, flag: Flag, names: Names) -> None:
    """Keep an option whose value whet takes."""
    kind = names.options[flag.name].kind
    bare = "auto" if flag.name == "resume_from_checkpoint" else "true" if is_switch(kind) else None
    values = [*flag.values] or ([] if bare is None else [Word.of(bare)])
    if len(values) != 1 and not is_many(kind):
        draft.say(
            flag.text, "refused", f"whet takes one value of --{flag.name}: {'join them' if values else 'give it'}"
        )
        return
    if not any(value.live for value in values):
        texts = [value.text for value in values]
        problems = take({flag.name: texts if is_many(kind) else texts[0]}, names, read_flag).problems
        if problems:
            draft.say(flag.text, "refused", f"{problems[0].why}: {problems[0].fix}")
            return
        if is_switch(kind) and texts != ["null"]:
            values = [Word.of(str(read_flag(texts[0], kind)).lower())]
    if len(values) > 1 and _has_choices(kind):
        values = [Word.of(",".join(value.text for value in values))]
    becomes = draft.put(flag.name, *values)
    if flag.text.lstrip("-").startswith(("no_", "no-")):
        draft.say(flag.text, "translated", _NOTES.get(flag.name, ""), becomes)
    else:
        draft.say(flag.text, "kept", _NOTES.get(flag.name, ""))


_NOTES = {
    "pad_to_max_length": "whet itself computes no padding",
    "fp16": "on a CPU, --bf16 is faster if it has instructions for it, and needs no loss scaling",
    "attn_implementation": "without it, whet's own attention computes no padding",
    "preprocessing_num_workers": "threads",
    "dataloader_num_workers": "threads",
}
"""Options that are kept, and what is different about them."""


def _has_choices(kind: Any) -> bool:
    members = [kind] if get_origin(kind) is tuple else [one for one in get_args(kind) if get_origin(one) is tuple]
    return any(get_origin(get_args(one)[0]) is Literal for one in members)


def _alias(draft: Draft, flag: Flag, alias: Alias) -> None:
    if flag.value.live and alias.to is not None:
        draft.say(flag.text, "translated", alias.name, draft.put(alias.to, flag.value))
        return
    try:
        value = read_flag(flag.value.text, alias.kind)
    except ValueError:
        draft.say(flag.text, "refused", f"its value does not fit{f': use --{alias.to}' if alias.to else ''}")
        return
    if alias.to is None:
        off = not alias.quiet and not value
        draft.say(flag.text, "no effect", "it is off" if off else alias.note)
    elif value in alias.unset:
        draft.say(flag.text, "no effect", "it is off")
    else:
        new = alias.convert(value)
        words = [*new] if isinstance(new, tuple) else [new]
        texts = [str(one).lower() if isinstance(one, bool) else one for one in words]
        draft.say(flag.text, "translated", alias.name, draft.put(alias.to, *texts))


def _refused(draft: Draft, flag: Flag, names: Names) -> None:
    one = names.refused[flag.name]
    text = " ".join(value.text for value in flag.values) if flag.values else "true"
    if is_off(text, one.off, read_flag):
        draft.say(flag.text, "no effect", "this is what whet does")
    elif flag.name in _HARMLESS or flag.name.removesuffix("_full_eval") in draft.options:
        draft.say(flag.text, "done", one.instead)
    else:
        draft.say(flag.text, "refused", one.instead or "leave it out")


_HARMLESS = ("include_num_input_tokens_seen", "include_tokens_per_second", "use_liger_kernel", "liger_kernel_config",
             "save_safetensors", "fp16_backend", "half_precision_backend", "jit_mode_eval")  # fmt: skip
"""Refused names that ask for what whet does in any case, as the sentence of each says."""


def _unknown(draft: Draft, flag: Flag, names: Names) -> None:
    longer = [name for name in (*names.options, *names.aliases) if name.startswith(flag.name)]
    if len(longer) == 1 and longer[0] in names.options:
        draft.say(flag.text, "translated", "argparse completes names", draft.put(longer[0], *flag.values or ["true"]))
        return
    problem = take({flag.name: flag.value.text}, names, read_flag).problems[0]
    draft.say(flag.text, "refused", f"{problem.what}: {problem.fix}")
