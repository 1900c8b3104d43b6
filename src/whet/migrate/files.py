"""What stands in files: DeepSpeed's and accelerate's configurations, manifests, options, and Python scripts."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from whet.config import deepspeed, secrets
from whet.config.arguments import TrainingArguments
from whet.config.command_line import LARGEST_BYTES, read_config
from whet.config.settings import Names
from whet.config.settings import draft as draft_settings
from whet.config.values import is_switch
from whet.errors import MASK, ConfigError
from whet.kubernetes.arguments import RESERVED
from whet.migrate import accelerate, launchers, variables
from whet.migrate.answer import OwnCommands
from whet.migrate.draft import Draft, Ranks, Status, option_text, shown
from whet.migrate.programs import (
    NOT_TAKEN,
    Flag,
    Program,
    flags_of,
    own_program,
    program_of,
    switched_off,
    translate,
    why_not,
)
from whet.migrate.shell import Live, Word


@dataclass(frozen=True)
class Pods:
    """The pods of a job on Kubernetes."""

    kind: str
    """That of `whet k8s`."""
    n_pods: int
    template: Mapping[str, Any]
    n_ranks: str = ""
    """Ranks of a pod, as far as the job itself says it."""
    restarts: tuple[str, int] | None = None
    """How the job says which failures of pods it survives, and how often all pods can start again by that."""
    elastic: Mapping[str, Any] = field(default_factory=dict)
    rest: Mapping[str, Any] = field(default_factory=dict)
    """What `whet k8s` has no option for: names and values."""

    @property
    def spec(self) -> Mapping[str, Any]:
        """What a pod is."""
        return self.template["spec"]


_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
_ARGUMENTS = {"TrainingArguments": None, "Seq2SeqTrainingArguments": None, "SFTConfig": "sft", "DPOConfig": "dpo"}
"""Classes of arguments -> the command of TRL that has the same, if there is one."""
_HEADS = {
    "QuestionAnswering": "qa", "SequenceClassification": "classify", "TokenClassification": "tag", "CausalLM": "lm",
}  # fmt: skip
_NO_HEADS = {
    "MaskedLM": NOT_TAKEN["run_mlm.py"], "PreTraining": NOT_TAKEN["run_mlm.py"],
    "MultipleChoice": NOT_TAKEN["run_swag.py"],
    **dict.fromkeys(("Seq2SeqLM", "ConditionalGeneration"), NOT_TAKEN["run_summarization.py"]),
}  # fmt: skip
"""Head of a model that no command trains -> why."""
_LOADING_CALLS = ("from_pretrained", "from_config", "_from_config")
_WORK = {"train": "do_train", "evaluate": "do_eval", "predict": "do_predict"}
_SPLITS = {
    "train": ("train_file", "train_split_name"), "validation": ("validation_file", "validation_split_name"),
    "test": ("test_file", "test_split_name"),
}  # fmt: skip
"""Part of the data, and the usual name of its split -> the options for its file and for the name of its split."""


def options_of(draft: Draft, values: Mapping[str, Any]) -> dict[str, Flag]:
    """Return the options that names and values of a file are; what asks for nothing is said, and left out."""
    found: dict[str, Flag] = {}
    for name, value in values.items():
        is_secret = bool(secrets.in_command([f"--{name}", _text(value)]))
        text = shown(f"{name}: {_text(value)}", secret=is_secret)
        if value is None or value in ([], (), {}):
            draft.say(text, "no effect", "it asks for nothing")
        elif name.endswith("token") and value in (MASK, f"<{name.upper()}>"):
            draft.say(text, "no effect", "it stands in the place of a token, which a file does not hold")
        else:
            found[name] = Flag(name, text, _words(value))
    return found


def _words(value: Any) -> list[Word]:
    if isinstance(value, (list, tuple)):
        return [Word.of(_text(one)) for one in value]
    return [Word.of(_text(value))]


def _text(value: Any) -> str:
    if isinstance(value, (dict, list, tuple)):
        return json.dumps(value)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def of_file(path: Path, task: str | None, own: OwnCommands) -> Draft:
    """Return the run, or the part of one, that a file other than a shell script describes."""
    draft = Draft(partial=path.suffix != ".py")
    if (job := _job_in(path)) is not None:
        return _of_job(job, task, own)
    program, flags = _read(draft, path, task)
    if program is not None:
        translate(draft, program, flags, own.options(program.task))
    else:
        names = Names.of((TrainingArguments,), say="--{}".format)
        translate(draft, Program(name=path.name, task=""), flags, names)
        draft.task = task
    return draft


def read_options(draft: Draft, program: Program, words: Sequence[Word], own: OwnCommands) -> None:
    """Read the words after a script: its options, and the files of options that it names."""
    names = own.options(program.task)
    flags, lone = flags_of(words, lambda name: is_switch(names.kind(name)) or switched_off(name, names) is not None)
    config = flags.pop("config", None)
    settings = [word for word in lone if word.text.endswith((".json", ".yaml", ".yml"))]
    if config is not None:
        settings += config.values
    for word in lone:
        if word.is_variable:
            draft.trailing.append(word)
            draft.say(word.text, "kept", "whet reads words that only the shell knows by the same rules")
        elif word not in settings:
            draft.say(word.text, "refused", "the script takes options alone: put its flag before it")
    for word in settings:
        path = Path(word.text).expanduser()
        if path.is_file():
            draft.say(word.text, "translated", "its values follow")
            found = options_of(draft, read_config(str(path)))
            for name, value in _environment(found).items():
                draft.given_variables[name] = value
            flags = {**found, **flags}
        else:
            draft.say(word.text, "refused", "the file is not here: run whet migrate where it is")
    translate(draft, program, flags, names)


def _environment(found: dict[str, Flag]) -> Mapping[str, Word]:
    """Take the variables that a configuration of TRL sets out of its options."""
    env = found.pop("env", None)
    values = json.loads(env.value.text) if env is not None and env.value.text.startswith("{") else {}
    return {str(name): Word.of(value) for name, value in values.items()}


def _read(draft: Draft, path: Path, task: str | None) -> tuple[Program | None, dict[str, Flag]]:
    """Read a file; return its program, and options that are still to be translated."""
    if path.suffix == ".py":
        return _from_python(draft, path, task)
    found = read_config(str(path))
    if accelerate.is_config(found):
        accelerate.translate_config(draft, found)
        if "hostfile" in draft.ranks.options:
            launchers.place_ranks(draft)
    elif _OF_DEEPSPEED & found.keys():
        _from_deepspeed(draft, path, found)
    else:
        return (own_program(task, path.name) if task else None), options_of(draft, found)
    return None, {}


def _from_deepspeed(draft: Draft, path: Path, found: Mapping[str, Any]) -> None:
    """Name the file in --deepspeed; if whet refuses a key of it, write its values as options instead."""
    draft.ranks.launched = True
    given = {"deepspeed": str(path)}
    settings = draft_settings(TrainingArguments, given)
    problem = deepspeed.config_is_honoured(settings)
    wrong = dict(_by_key(str(problem.got))) if problem is not None else {}
    values, tuned = deepspeed.values_for(given), deepspeed.tunes_engine(str(path))
    stage = deepspeed.stage_of(str(path))
    if problem is None:
        draft.put("deepspeed", path)
        draft.say(str(path), "kept", f"without DeepSpeed's engine, whet's own stage {stage} does the same")
    else:
        draft.say(str(path), "translated", "whet refuses keys of the file: these options say what it can honour",
                  " ".join(_put_values(draft, values, stage)))  # fmt: skip
    for key, value in _leaves(found):
        text = f"{key}: {_text(value)}"
        fault = next((said for name, said in wrong.items() if f"{key}.".startswith(f"{name}.")), None)
        if fault is not None:
            draft.say(text, "refused", f"{fault.rpartition(', and ')[2]}: remove the key, or use the options above")
        elif value == deepspeed.AUTO:
            draft.say(text, "done", "it takes the value of whet's option")
        elif key in tuned and not deepspeed.runs(str(path)):
            draft.say(text, "no effect", "it tunes DeepSpeed's engine, which is not installed")
        else:
            draft.say(text, "kept" if problem is None else "translated", "")


def _put_values(draft: Draft, values: Mapping[str, Any], stage: int) -> Iterator[str]:
    if stage:
        yield draft.put("zero_stage", stage)
    for name, value in values.items():
        yield draft.put(name, _text(value))


def _by_key(got: str) -> Iterator[tuple[str, str]]:
    for text in got.split("; "):
        yield text.partition(" is ")[0], text


def _leaves(part: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


_COMPUTED = "the script computes it: give its value to the command of whet"
_KEEP = "keep the script, and change the import to whet.Trainer"
_READERS = ("json", "csv", "parquet", "text")
"""What load_dataset calls its readers of files."""
_LOADING = {"cache_dir", "download_config", "download_mode", "keep_in_memory", "num_proc", "save_infos", "token",
            "use_auth_token", "verification_mode"}  # fmt: skip
"""Keywords of load_dataset that change no row."""
_PICKING = {"concatenate_datasets", "filter", "interleave_datasets", "select", "shard", "train_test_split"}
"""Functions of datasets that choose rows."""
_DATA = {"train_dataset": "train", "eval_dataset": "validation", "test_dataset": "test"}
"""Argument of a trainer or of one of its methods -> the part of the data that it is."""
_OF_MODEL = {
    "revision": "model_revision", "torch_dtype": "torch_dtype", "dtype": "dtype", "token": "token",
    "cache_dir": "cache_dir", "trust_remote_code": "trust_remote_code", "load_in_8bit": "load_in_8bit",
    "load_in_4bit": "load_in_4bit",
}  # fmt: skip
"""Keyword of from_pretrained -> the option of transformers' scripts."""
_IN_COMMAND = {
    "num_labels", "id2label", "label2id", "ignore_mismatched_sizes", "use_cache", "device_map", "low_cpu_mem_usage",
    "use_safetensors", "use_auth_token", "return_dict", "local_files_only", "force_download", "attn_implementation",
}  # fmt: skip
"""Keywords of from_pretrained that a command of whet needs no option for."""
_BY_COMMAND = {"args", "data_collator", "processing_class", "tokenizer", "model_init", "compute_metrics",
               "preprocess_logits_for_metrics"}  # fmt: skip
"""Arguments of a trainer that a command of whet has itself, or that are read where they are made."""
_NO_CODE = f"a command runs no code of yours: {_KEEP}"
_FROZEN = f"--freeze_layers N freezes the embeddings and N blocks; for other weights {_KEEP}"
_NEW_TOKENS = (
    "save the tokenizer with its new tokens, and name the folder in --tokenizer_name: whet gives the model rows for "
    f"them; or {_KEEP}"
)
_BY_CALL = {
    **dict.fromkeys(("resize_token_embeddings", "add_tokens", "add_special_tokens"), _NEW_TOKENS),
    **dict.fromkeys(("add_callback", "set_transform", "with_transform"), _NO_CODE),
    "requires_grad_": _FROZEN,
}
"""Methods whose work no option says -> what to do."""
_TEXTS = ("text", "text_pair")
_LENGTHS = {"max_length": "max_seq_length", "stride": "doc_stride"}
"""Keyword of a tokenizer -> the option of whet."""
_OF_TOKENIZER = {*_TEXTS, *_LENGTHS, "truncation", "padding", "return_tensors", "return_attention_mask",
                 "return_token_type_ids", "return_special_tokens_mask", "verbose"}  # fmt: skip
"""Keywords of a tokenizer that whet's own tokenisation needs no code for."""
_CUT_AT = {"classify": 128, "qa": 384}
"""Command -> the tokens of a row, unless its option says another number."""
_CODE = dict.fromkeys(
    ("callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_loss_func", "formatting_func"), _NO_CODE
) | {"ref_model": "whet's reference is the model before training: leave it out if it is that one"}
"""Argument of a trainer that changes the training, and that no option can say -> what to do."""
_LORA = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "use_rslora": "use_rslora",
         "target_modules": "lora_target_modules", "use_dora": "use_dora"}  # fmt: skip
_USUAL_LORA = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""peft's defaults, which are not those of whet."""


class _Script(ast.NodeVisitor):
    """Collects what a training script says in literals, and in names that are bound once, to a literal."""

    def __init__(self, tree: ast.Module) -> None:
        self.bound = _bindings(tree)
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.mutated = {
            node.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.value, ast.Name)
            and (isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load))
        }  # fmt: skip
        """Names whose dict or list may be another one later."""
        self.values: dict[str, Any] = {}
        self.refused: dict[str, str] = {}
        """What no option stands for -> why."""
        self.task: str | None = None
        self.command: str | None = None
        """Of TRL: sft or dpo."""
        self.found = False
        self.model: tuple[str, Any] | None = None
        """Head and name of the model."""
        self.tokenizer: Any = None
        """Name of the tokenizer, if the script says it."""
        self.is_cut: bool | None = None
        """Whether the tokenizer cuts at its own length; None if the script names one, or calls none."""
        self.loaded: dict[str, str] | None = None
        """Arguments of load_dataset, without the split."""
        self.splits: dict[str, str] = {}
        """Part of the data -> the split that the script takes for it."""
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for node in calls:
            self._find_parts(node)
        if any(_name(node.func) == "train_test_split" for node in calls):
            self.splits = {}  # "train" and "test" are parts of one split then
        self.visit(tree)
        if self.tokenizer and self.tokenizer != self.values.get("model_name_or_path", self.tokenizer):
            self.values["tokenizer_name"] = self.tokenizer
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if self._is_arguments(node.value):
                    self.values.pop(node.attr, None)
                    self.refused[ast.unparse(node)] = _COMPUTED
                elif node.attr == "requires_grad":
                    self.refused[ast.unparse(node)] = _FROZEN

    def _followed(self, node: ast.expr | None) -> tuple[ast.expr | None, set[str]]:
        """Return what an expression stands for, through names that are bound once, and these names."""
        names = set[str]()
        while isinstance(node, ast.Name) and node.id not in names:
            names.add(node.id)
            bound = self.bound.get(node.id, [])
            node = bound[0] if len(bound) == 1 else None
        return node, names

    def _value(self, node: ast.expr) -> tuple[bool, Any]:
        found, names = self._followed(node)
        try:
            value = ast.literal_eval(found) if found is not None else ...
        except (ValueError, TypeError):
            return False, None
        is_stale = isinstance(value, dict | list | set) and names & self.mutated
        return (False, None) if value is ... or is_stale else (True, value)

    def _is_arguments(self, node: ast.expr) -> bool:
        bound = self.bound.get(node.id, []) if isinstance(node, ast.Name) else []
        return any(isinstance(one, ast.Call) and _name(one.func) in _ARGUMENTS for one in bound)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            if _name(base).endswith("Trainer"):
                self.refused[f"class {node.name}({ast.unparse(base)})"] = _NO_CODE
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node.func)
        of = node.func.value if isinstance(node.func, ast.Attribute) else ast.Name("")
        owner = _name(of.func if isinstance(of, ast.Call) else of)
        if name in _ARGUMENTS:
            self._arguments(name, node)
        elif name == "from_pretrained" and (head := owner.rpartition("For")[2]) in _HEADS:
            self._pretrained(_HEADS[head], node)
        elif (why := _no_command(name, owner)) is not None:
            self.refused[ast.unparse(node)] = why
        elif name == "from_pretrained" and owner == "PeftModel":
            self.refused[ast.unparse(node)] = f"whet trains a new adapter: merge this one first; or {_KEEP}"
        elif name == "from_pretrained" and "Tokenizer" in owner and node.args:
            self.tokenizer = self._value(node.args[0])[1]
        elif name == "load_dataset":
            self._data(node)
        elif name in _PICKING and (isinstance(node.func, ast.Attribute) or name.endswith("_datasets")):
            of = ast.unparse(node.func.value) if isinstance(node.func, ast.Attribute) else ""
            self.refused[ast.unparse(node).removeprefix(of)] = (
                "the script chooses rows: name a split such as --train_split_name 'train[:1000]', or a file of them"
            )
        elif name in _WORK and isinstance(node.func, ast.Attribute) and "train" in owner.lower():
            self.values[_WORK[name]] = True
            if name == "train":
                self._resume(dict(_named(node, "resume_from_checkpoint")).get("resume_from_checkpoint"))
        elif name == "set_seed":
            self._option("seed", dict(_named(node, "seed")).get("seed", node))
        elif name == "map" and isinstance(node.func, ast.Attribute) and not owner.lower().endswith(_POOLS):
            self._mapped(node, of)
        elif name in ("get_peft_model", "add_adapter"):
            given = dict(_named(node, *(("model",) if name == "get_peft_model" else ()), "peft_config"))
            self._adapter(given.get("peft_config") or given.get("adapter_config") or node)
        elif name in _BY_CALL and isinstance(node.func, ast.Attribute):
            self.refused[ast.unparse(node)] = _BY_CALL[name]
        elif name.endswith("Trainer"):
            self._trainer(name, node)
        self.generic_visit(node)

    def _resume(self, expression: ast.expr | None) -> None:
        known, value = (True, None) if expression is None else self._value(expression)
        if not known:
            self.refused[f"resume_from_checkpoint={ast.unparse(expression or ast.Name(''))}"] = _COMPUTED
        elif value:
            self._take("resume_from_checkpoint", "auto" if value is True else value, f"train({value!r})")

    # The tokens: of functions that a data set is mapped with

    def _mapped(self, node: ast.Call, data: ast.expr) -> None:
        """Read the lengths that a tokenizer is called with; refuse a function that does more than call it."""
        function = self._function(dict(_named(node, "function")).get("function"))
        calls = [one for one in ast.walk(function) if self._tokenizes(one)] if function is not None else []
        body = _result(function)
        given = ast.unparse(node).removeprefix(ast.unparse(data))
        if isinstance(function, ast.FunctionDef) and function.name == "group_texts":
            self.values["packing"] = True
            self._option("block_size", ast.Name("block_size", ast.Load()))
        elif body is None or body not in calls or not _is_of_columns(body):
            self.refused[given] = _NO_CODE
        else:
            self._tokenisation(body)
        for one in calls:
            self._lengths(one)

    def _function(self, node: ast.expr | None) -> ast.FunctionDef | ast.Lambda | None:
        if isinstance(node, ast.Call) and _name(node.func) == "partial" and node.args:
            node = node.args[0]
        if isinstance(node, ast.Name) and len(self.bound.get(node.id, [])) == 1 and node.id in self.functions:
            return self.functions[node.id]
        found, _ = self._followed(node)
        return found if isinstance(found, ast.Lambda) else None

    def _tokenizes(self, node: ast.AST) -> bool:
        """Return whether this is a call of a tokenizer."""
        if not isinstance(node, ast.Call):
            return False
        called = _name(node.func)
        bound = self.bound.get(called, []) if isinstance(node.func, ast.Name) else []
        return called.lower() in ("tok", "tokenizer") or any(
            isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and "Tokenizer" in _name(one.func.value)
            for one in bound
        )

    def _tokenisation(self, node: ast.expr) -> None:
        """Refuse what a tokenizer is asked for and whet's own tokenisation does not do."""
        for name, expression in _named(node) if isinstance(node, ast.Call) else ():
            if name not in {*_OF_TOKENIZER, "*"}:
                why = _COMPUTED if name == "**" else f"whet's own tokenisation has no such setting: {_KEEP}"
                self.refused[f"{name}={ast.unparse(expression)}"] = why

    def _lengths(self, node: ast.AST) -> None:
        """Take the lengths of a call of a tokenizer, or keep that it has none."""
        given = dict(_named(node)) if isinstance(node, ast.Call) else {}
        for name, option in _LENGTHS.items():
            if name in given:
                self._option(option, given[name])
        if not {"max_length", "**"} & given.keys():
            known, cuts = self._value(given["truncation"]) if "truncation" in given else (True, False)
            self.is_cut = not known or bool(cuts)

    def name_length(self, task: str | None) -> None:
        """Say how long the rows of the script are, if a command has another number by default."""
        if self.is_cut is None or task not in _CUT_AT or "max_seq_length" in self.values:
            return
        length = "at what the tokenizer allows, such as 512 tokens" if self.is_cut else "nothing"
        why = (
            f"the script cuts {length}, and whet {task} at {_CUT_AT[task]}: say how long rows may be, --max_seq_length"
        )
        self.refused["(no max_length of the tokenizer)"] = why

    def _take(self, option: str, value: Any, given: str) -> None:
        """Take the value of an option; of two, only the script knows which one counts."""
        if option in self.values and self.values[option] != value:
            self.refused[given] = "the script has two values for it: give the command of whet the one that counts"
        else:
            self.values[option] = value

    def _option(self, option: str, expression: ast.expr) -> None:
        known, value = self._value(expression)
        given = f"{option}={ast.unparse(expression)}"
        if known and option == "**" and isinstance(value, dict):
            for name, one in value.items():
                self._take(str(name), one, f"{name}={one!r}")
        elif known and not option.startswith("*"):
            self._take(option, value, given)
        else:
            self.refused[given] = _COMPUTED

    def _arguments(self, name: str, node: ast.Call) -> None:
        self.found = True
        self.command = _ARGUMENTS[name] or self.command
        for option, expression in _named(node, "output_dir"):
            self._option(option, expression)

    def _pretrained(self, task: str, node: ast.Call) -> None:
        first = "pretrained_model_name_or_path"
        given = dict(_named(node, first))
        if not self._takes_model(task, given.pop(first, node)):
            return
        for name, expression in given.items():
            known, value = self._value(expression)
            text, option = ast.unparse(expression), _OF_MODEL.get(name)
            if (known and (value is None or value is False)) or (option is None and name in _IN_COMMAND):
                continue
            if option and (known or text.startswith("torch.")):
                self._take(option, value if known else text, f"{name}={text}")
            else:
                why = f"a command of whet does not change the model's configuration: {_KEEP}"
                self.refused[f"{name}={text}"] = _COMPUTED if option else why

    def _takes_model(self, task: str, expression: ast.expr) -> bool:
        """Take the name of the model, unless another one was named."""
        known, value = self._value(expression)
        text = ast.unparse(expression)
        model = (task, value if known else text)
        if self.model not in (None, model):
            self.refused[f"the model {text}"] = "whet trains one model; that of a teacher is --teacher_model"
            return False
        self.model, self.task = model, task
        if known:
            self.values["model_name_or_path"] = value
        else:
            self.refused[f"model_name_or_path={text}"] = _COMPUTED
        return True

    def _trainer(self, name: str, node: ast.Call) -> None:
        if name in ("SFTTrainer", "DPOTrainer"):
            self.task, self.command = "lm", name[:3].lower()
        for option, expression in _of_trainer(node):
            known, value = self._value(expression)
            given = f"{option}={ast.unparse(expression)}"
            if option in _BY_COMMAND or option in _DATA or (known and value in (None, [], (), (None, None))):
                continue
            if option == "model":
                if known and isinstance(value, str):
                    self._takes_model("lm", expression)
            elif option == "peft_config":
                self._adapter(expression)
            elif option in _CODE:
                self.refused[given] = _CODE[option]
            else:
                self._option(option, expression)

    def _adapter(self, expression: ast.expr) -> None:
        """Take the values of a LoraConfig, and peft's own defaults of the others."""
        config, _ = self._followed(expression)
        if not isinstance(config, ast.Call) or _name(config.func) != "LoraConfig":
            self.refused[f"peft_config={ast.unparse(expression)}"] = "whet has LoRA: --lora_r, --lora_alpha and so on"
            return
        found: dict[str, Any] = dict(_USUAL_LORA)
        for name, one in _named(config):
            known, value = self._value(one)
            option, given = _LORA.get(name), f"LoraConfig({name}={ast.unparse(one)})"
            if name == "target_modules" and isinstance(value, list | tuple | set):
                value = ",".join(map(str, sorted(value) if isinstance(value, set) else value))
            elif name == "target_modules" and value not in (None, "all-linear"):
                option = None  # a pattern
            if name in ("task_type", "inference_mode") or (known and value in (None, False, "none")):
                continue
            if option and known:
                found[option] = value
            else:
                found.pop(option or "", None)
                self.refused[given] = _COMPUTED if option else f"whet's adapters have no such setting: {_KEEP}"
        for option, value in found.items() if "lora_r" in found else ():
            self._take(option, value, f"LoraConfig({option}={value})")

    # The data: of a trainer's arguments, which splits it takes; of load_dataset, where they are

    def _find_parts(self, node: ast.Call) -> None:
        name, given = _name(node.func), list[tuple[str, ast.expr]]()
        if name.endswith("Trainer"):
            given = _of_trainer(node)
        elif name in ("evaluate", "predict") and isinstance(node.func, ast.Attribute):
            is_trainer = "train" in _name(node.func.value).lower()
            given = _named(node, "eval_dataset" if name == "evaluate" else "test_dataset") if is_trainer else []
        for option, expression in given:
            if option not in _DATA or self._value(expression) == (True, None):
                continue
            splits, part = self._splits_of(expression, set()), _DATA[option]
            split = splits.pop() if len(splits) == 1 else None
            text = f"{option}={ast.unparse(expression)}"
            if split is None:
                self.refused[text] = f"the script makes it: name a split or a file of its rows, or {_KEEP}"
            elif split and self.splits.setdefault(part, split) != split:
                self.refused[text] = f"it is another split than before: --{_SPLITS[part][1]} names one"

    def _splits_of(self, node: ast.expr | None, seen: set[str]) -> set[str | None]:
        """Return the splits that an expression may be: "" for all that is loaded, None for what no split is."""
        if isinstance(node, ast.Name):
            bound = [] if node.id in seen else self.bound.get(node.id, [None])
            seen.add(node.id)
            return set[str | None]().union(*(self._splits_of(one, seen) for one in bound))
        if isinstance(node, ast.Subscript):
            _, value = self._value(node.slice)
            return {value if isinstance(value, str) else None}
        if isinstance(node, ast.Call) and _name(node.func) == "load_dataset":
            split = dict(_named(node)).get("split")
            known, value = (True, "") if split is None else self._value(split)
            return {value if known and isinstance(value, str) else None}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):  # data.map(...)
            return self._splits_of(node.func.value, seen)
        return {None}

    def _data(self, node: ast.Call) -> None:
        given = dict(_named(node, "path", "name", "data_dir", "data_files"))
        split, text = given.pop("split", None), ast.unparse(given.get("path", node.func))
        _, named = (True, None) if split is None else self._value(split)
        loaded = {name: ast.dump(one) for name, one in given.items()}
        if self.loaded is None:
            self.loaded = loaded
        else:
            if loaded != self.loaded or (named is not None and named not in self.splits.values()):
                self.refused[f"load_dataset({text}{f', split={named!r}' if named else ''})"] = (
                    "whet trains on one data set, whose splits --train_split_name and --validation_split_name name; or "
                    "join the rows, and name their file"
                )
            return
        if isinstance(named, str):
            self.splits.setdefault("train", named)
        elif split is not None:
            self.refused[f"split={ast.unparse(split)}"] = _COMPUTED
        path, files = given.pop("path", None), given.pop("data_files", None)
        known, name = (False, None) if path is None else self._value(path)
        if not known:
            self.refused[f"dataset_name={text}"] = _COMPUTED
        elif name not in _READERS:
            self._take("dataset_name", name, f"load_dataset({text})")
            self.values |= {_SPLITS[part][1]: own for part, own in self.splits.items() if own != part}
        if files is not None and name in _READERS:
            self._files(files)
        elif files is not None:
            self.refused[f"data_files={ast.unparse(files)}"] = "whet reads a data set of the hub, or files of your own"
        for option, expression in given.items():
            known, value = self._value(expression)
            if option in _LOADING or (known and (value is None or value is False)):
                continue
            if option == "name" and known:
                self._take("dataset_config_name", value, f"name={value!r}")
            else:
                why = "whet does not load data so: save the rows, and name their file"
                self.refused[f"{option}={ast.unparse(expression)}"] = _COMPUTED if option == "name" else why

    def _files(self, expression: ast.expr) -> None:
        known, value = self._value(expression)
        named = value if isinstance(value, dict) else {"train": value}
        alone = {
            name: one[0] if isinstance(one, list | tuple) and len(one) == 1 else one for name, one in named.items()
        }
        if not known or not all(isinstance(one, str) for one in alone.values()):
            why = "the script computes it, or has several: join their rows, and name the file in --train_file"
            self.refused[f"data_files={ast.unparse(expression)}"] = why
            return
        used = {part: self.splits.get(part, part) for part in _SPLITS}
        for part, name in used.items():
            if name in alone and (part in self.splits or name not in self.splits.values()):
                self.values[_SPLITS[part][0]] = alone[name]
            elif part in self.splits:
                self.refused[f"split {name}"] = f"files have no splits: name its rows in --{_SPLITS[part][0]}"
        for name in alone.keys() - {*used.values(), *_SPLITS}:
            self.refused[f"data_files: {name}"] = "nothing says what it is for: --train_file or --validation_file"


_POOLS = ("pool", "executor")
"""Ends of the names of what maps a function over no data set."""


def _no_command(name: str, owner: str) -> str | None:
    """Return why no command trains a model that is made so; None for other calls, and for models that one trains."""
    maker = owner if name in _LOADING_CALLS else name
    head = maker.rpartition("For")[2] if "For" in maker and "Collator" not in maker else ""
    is_known = head in _HEADS or head in _NO_HEADS
    if not head or (not is_known and name not in _LOADING_CALLS) or (head in _HEADS and name == "from_pretrained"):
        return None
    begins_new = "a command begins with pretrained weights"
    other = "whet has no command for such models"
    return f"{begins_new if head in _HEADS else _NO_HEADS.get(head, other)}: {_KEEP}"


def _result(function: ast.FunctionDef | ast.Lambda | None) -> ast.expr | None:
    """Return the expression that is all of a function; None if it does more."""
    if not isinstance(function, ast.FunctionDef):
        return None if function is None else function.body
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    last = body[-1].value if body and isinstance(body[-1], ast.Return) else None
    match body[:-1]:
        case []:
            return last
        case [ast.Assign(targets=[ast.Name(id=name)], value=value)] if _name(last or value) == name:
            return value
    return None


def _is_of_columns(node: ast.expr) -> bool:
    """Return whether a call gets columns of its rows as they are."""
    given = [one for name, one in _named(node) if name in ("*", *_TEXTS)] if isinstance(node, ast.Call) else []
    return bool(given) and all(
        isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name) and isinstance(one.slice, ast.Constant)
        for one in given
    )


def _name(node: ast.expr) -> str:
    """Return the last part of a dotted name; "" for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _named(node: ast.Call, *positional: str) -> list[tuple[str, ast.expr]]:
    """Return the arguments of a call with their names: * and ** for those that have none."""
    names = [*positional, *["*"] * len(node.args)]
    given = [("*" if isinstance(one, ast.Starred) else name, one) for name, one in zip(names, node.args, strict=False)]
    return [*given, *((one.arg or "**", one.value) for one in node.keywords)]


def _of_trainer(node: ast.Call) -> list[tuple[str, ast.expr]]:
    first = ("model", "ref_model") if _name(node.func) == "DPOTrainer" else ("model",)
    return _named(node, *first, "args", "data_collator", "train_dataset", "eval_dataset", "processing_class")


_NAMING = (ast.arg, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)


def _bindings(tree: ast.Module) -> dict[str, list[ast.expr | None]]:
    """Return for each name what each of its bindings gives it; None for what no plain assignment does."""
    assigned: dict[int, ast.expr | None] = {}
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        name: str | None = None
        if isinstance(node, ast.Assign):
            assigned |= {id(target): node.value for target in node.targets}
        elif isinstance(node, ast.AnnAssign):
            assigned[id(node.target)] = node.value
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            name = node.id
        elif isinstance(node, ast.alias):
            name = node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.MatchMapping):
            name = node.rest
        elif isinstance(node, _NAMING):
            name = node.arg if isinstance(node, ast.arg) else node.name
        if name:
            found.setdefault(name, []).append(assigned.get(id(node)))
    return found


def _from_python(draft: Draft, path: Path, task: str | None) -> tuple[Program | None, dict[str, Flag]]:
    """Read the arguments of a training script, without running it."""
    try:
        tree = ast.parse(path.read_text("utf-8-sig"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(
            what="the script cannot be read", got=f"{path}: {error}", why="its arguments are read from its source",
            fix="name a Python file that python -m py_compile accepts",
        ) from None  # fmt: skip
    script = _Script(tree)
    if not script.found:
        raise ConfigError(
            what="the script makes no arguments of a training",
            got=str(path),
            why=f"whet reads calls of {', '.join(_ARGUMENTS)}",
            fix="give the command line that starts it: whet migrate 'python ...'",
        )
    if script.command:
        program, _ = program_of(f".trl.scripts.{script.command}", [])
        if "lora_r" in script.values:
            script.values["use_peft"] = True
        if "dataset_name" in script.values and "validation" in script.splits:  # TRL's commands take another
            script.values["validation_split_name"] = script.splits["validation"]
    else:
        task = task or script.task
        program = own_program(task, path.name) if task else None
        script.name_length(task)
    for given, why in script.refused.items():
        draft.say(given, "refused", why)
    why = (
        "its loop, collator and metrics are whet's own in a command; or keep it, and change the import to whet.Trainer"
    )
    draft.say(str(path), "done", why)
    return program, options_of(draft, script.values)


_IMAGE = "registry.example.org/whet:1"
_OUTPUT = "/output"
"""Where `whet k8s` mounts the claim for the output."""


def _job_in(path: Path) -> dict[str, Any] | None:
    """Return the job of a manifest of Kubernetes, if the file is one; it may hold other objects too."""
    if path.suffix not in (".yaml", ".yml") or path.stat().st_size > LARGEST_BYTES:
        return None
    try:
        found = list(yaml.safe_load_all(path.read_text("utf-8-sig")))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    objects = [one for one in found if isinstance(one, dict) and {"apiVersion", "kind"} <= one.keys()]
    job = next((one for one in objects if one["kind"] in _PODS), None)
    if objects and job is None:
        raise ConfigError(
            what="no object of the manifest is a job that whet reads",
            got=", ".join(str(one["kind"]) for one in objects),
            why=f"whet reads the pods of {', '.join(_PODS)}",
            fix="give the command line of its containers: whet migrate 'torchrun ...'; whet k8s writes the manifest",
        )
    return job


def _of_pytorch_job(job: Mapping[str, Any]) -> Pods:
    spec = job["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    policy, elastic = spec.get("runPolicy") or {}, spec.get("elasticPolicy") or {}
    name = "Worker" if replicas.get("Worker") else next(iter(replicas))
    n_pods = sum(int(one.get("replicas", 1)) for one in replicas.values())
    read = {"pytorchReplicaSpecs", "elasticPolicy", "nprocPerNode", "runPolicy"}
    rest = _without(spec, read) | _without(policy, {"backoffLimit"}, "runPolicy.")
    if policy.get("cleanPodPolicy") == "None":  # as in the jobs of whet k8s
        rest.pop("runPolicy.cleanPodPolicy")
    rest |= _without(elastic, {*_ELASTIC, *_MEETING, "nProcPerNode"}, "elasticPolicy.")
    for other, one in replicas.items():
        rest |= _without(one, {"replicas", "restartPolicy", "template"}, f"{other}.")
        if one["template"]["spec"] != replicas[name]["template"]["spec"]:
            rest[f"the pods of {other}, which differ from those of {name}"] = one["template"]["spec"]
    return Pods(
        kind="pytorchjob",
        n_pods=n_pods,
        template=replicas[name]["template"],
        n_ranks=str(spec.get("nprocPerNode") or elastic.get("nProcPerNode") or ""),
        restarts=_restarts_of(policy, int(elastic.get("maxReplicas") or n_pods)),
        elastic=elastic,
        rest=rest,
    )


def _of_plain_job(job: Mapping[str, Any]) -> Pods:
    spec = job["spec"]
    n_pods = int(spec.get("completions") or spec.get("parallelism") or 1)
    same = {"parallelism"} if spec.get("parallelism") == n_pods else set[str]()
    read = {"completions", "completionMode", "backoffLimit", "template", *same}
    return Pods("job", n_pods, spec["template"], restarts=_restarts_of(spec, n_pods), rest=_without(spec, read))


def _restarts_of(part: Mapping[str, Any], most_pods: int) -> tuple[str, int] | None:
    n_failures = part.get("backoffLimit")
    return None if n_failures is None else (f"backoffLimit: {n_failures}", int(n_failures) // max(most_pods, 1))


def _without(part: Mapping[str, Any], read: Collection[str], path: str = "") -> dict[str, Any]:
    """Return what is left of a part of a manifest without these names."""
    return {f"{path}{name}": value for name, value in part.items() if name not in read}


_PODS = {"PyTorchJob": _of_pytorch_job, "Job": _of_plain_job}
"""Kind of an object -> what reads its pods."""


def _of_job(job: Mapping[str, Any], task: str | None, own: OwnCommands) -> Draft:
    """Return the run of a job on Kubernetes, as a command of `whet k8s`."""
    draft = Draft(cluster_name=str((job.get("metadata") or {}).get("name") or "train"))
    try:
        pods = _PODS[job["kind"]](job)
        containers = pods.spec["containers"]
        container = next((one for one in containers if one.get("name") == _TRAINS.get(pods.kind)), containers[0])
        draft.given_variables = _variables_of(container)
        known = {name: word.text for name, word in draft.given_variables.items() if not word.live}
        given = [*(container.get("command") or ()), *(container.get("args") or ())]
        script, words = launchers.peeled(draft, [Word.of(_resolved(str(word), known)) for word in given])
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ConfigError(
            what=f"the {job['kind']} has no pods that whet can read",
            got=f"{type(error).__name__}: {error}",
            why="a template names containers, and the command of one of them trains",
            fix="check the manifest with kubectl, or give the command line of its container to whet migrate",
        ) from None
    program, rest = program_of(script, words)
    if program is None and task is not None:
        program = own_program(task, script)
    if program is None:
        raise ConfigError(
            what="no script in the manifest is one that whet knows", got=script,
            why="the command of the first container trains", fix=why_not(script),
        )  # fmt: skip
    read_options(draft, program, rest, own)
    _describe(draft, job, pods, container)
    return draft


_TRAINS = {"pytorchjob": "pytorch"}
"""Kind of `whet k8s` -> the name of the container that trains, if the controller demands one."""
_REFERENCE = re.compile(r"\$\$|\$\(([-._A-Za-z][-._A-Za-z0-9]*)\)")
"""What the kubelet changes in commands and variables: $$ into $, and $(NAME) into the value of a variable."""


def _resolved(text: str, known: Mapping[str, str]) -> str:
    """Return a text as the container gets it, as far as the values of its variables are known."""
    return _REFERENCE.sub(lambda found: "$" if found[1] is None else known.get(found[1], found[0]), text)


def _variables_of(container: Mapping[str, Any]) -> dict[str, Word]:
    """Return the variables of the container whose values the manifest says; a secret is no value to put elsewhere."""
    found: dict[str, Word] = {}
    for one in container.get("env") or ():
        name = str(one["name"])
        if "valueFrom" in one:
            continue
        known = {other: word.text for other, word in found.items() if not word.live}
        text = _resolved("" if one.get("value") is None else str(one["value"]), known)
        unknown = bool(secrets.in_variables([f"{name}={text}"])) or any(match[1] for match in _REFERENCE.finditer(text))
        found[name] = Word((Live(text),), quoted=True) if unknown else Word.of(text)
    return found


def _describe(draft: Draft, job: Mapping[str, Any], pods: Pods, container: Mapping[str, Any]) -> None:
    """Write what the manifest says about its pods into the options of `whet k8s`."""

    def put(given: str, option: str, value: object, why: str = "") -> None:
        draft.cluster.setdefault(option, []).append(Word.of(value))
        draft.say(given, "translated", why, f"whet k8s --{option} {value}")

    meta, spec = job.get("metadata") or {}, pods.spec
    put(f"kind: {job['kind']}", "kind", pods.kind)
    put(f"image: {container.get('image')}", "image", _IMAGE, "an image with whet in it: docs/kubernetes.md builds one")
    put(f"replicas: {pods.n_pods}", "nodes", pods.n_pods)
    _start(draft, pods, put)
    for part, options in ((meta, _OF_META), (pods.elastic, _ELASTIC), (spec, _OF_POD), (container, _OF_CONTAINER)):
        for name, option in options.items():
            if name in part and option:
                put(f"{name}: {part[name]}", option, part[name])
    of_pods = pods.template.get("metadata") or {}
    for name in ("labels", "annotations"):
        both = (pair for one in (meta, of_pods) for pair in (one.get(name) or {}).items())
        for key, value in dict.fromkeys(both):
            put(f"{name} {key}: {value}", name[:-1], f"{key}={value}")
    for key, value in (spec.get("nodeSelector") or {}).items():
        put(f"nodeSelector {key}: {value}", "node_selector", f"{key}={value}")
    resources = container.get("resources") or {}
    for name, value in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}.items():
        if option := {"cpu": "cpus", "memory": "memory", "ephemeral-storage": "ephemeral_storage"}.get(name):
            put(f"{name}: {value}", option, value, "requested, and the limit as well")
        else:
            draft.say(f"{name}: {value}", "refused", "whet k8s asks for CPUs and memory: leave it out")
    moved = _mount(draft, spec, container, put)
    _pass_on(draft, container, moved, put)
    for name, words in draft.options.items():
        draft.options[name] = [_moved(word, moved) for word in words]
        if draft.options[name] != words:
            draft.correct(name, "translated", option_text(name, draft.options[name]))
    draft.say("restartPolicy", "done", "whet k8s restarts what failed, --max_restarts times")
    if "workingDir" in container:
        _work_in(draft, str(container["workingDir"]))
    if draft.prefix:
        draft.say(" ".join(word.text for word in draft.prefix), "no effect", "pods start whet themselves")
        draft.prefix = []
    rest = {**pods.rest, **_without(meta, _READ_OF_META), **_without(of_pods, _READ_OF_META, "template.metadata.")}
    rest |= _without(spec, {*_OF_POD, *_READ_OF_POD}) | _without(container, {*_OF_CONTAINER, *_READ_OF_CONTAINER})
    rest |= {f"container {one.get('name')}": one for one in spec["containers"] if one is not container}
    for name, value in rest.items():
        if value is None or value is False or value in ("", [], {}):
            draft.say(name, "no effect", "it asks for nothing")
        else:
            draft.say(name, "refused", "whet k8s --help all has the options of pods; or add it to what it renders")
    _refuse_unknown(draft)


_OF_META = {"namespace": "namespace"}
_OF_POD = {"serviceAccountName": "service_account", "terminationGracePeriodSeconds": "grace_period_s"}
_READ_OF_POD = {"containers", "volumes", "nodeSelector", "restartPolicy"}
_OF_CONTAINER = {"imagePullPolicy": "image_pull_policy"}
_READ_OF_CONTAINER = {"name", "image", "command", "args", "env", "resources", "volumeMounts", "workingDir"}
_READ_OF_META = {"name", "namespace", "labels", "annotations", "creationTimestamp", "generation", "managedFields",
                 "resourceVersion", "uid"}  # fmt: skip
"""Read, or written by the cluster itself."""
_ELASTIC = {"minReplicas": "min_nodes", "maxReplicas": "max_nodes", "rdzvBackend": "rdzv_backend",
            "maxRestarts": None}  # fmt: skip
_MEETING = {"rdzvId", "rdzvHost", "rdzvPort", "rdzvConf"}
"""Keys of elasticPolicy for which `whet k8s` has values of its own."""
Put = Callable[..., None]


def _start(draft: Draft, pods: Pods, put: Put) -> None:
    """Write what the launcher in the container says into options of `whet k8s`; refuse what these do not say."""
    ranks = draft.ranks
    said = [row for row in draft.rows if row.becomes.startswith("whet launch")]
    draft.rows = [row for row in draft.rows if row not in said]
    given: dict[str, str] = {}
    for row in said:
        name = (row.becomes.split()[2:3] or ["--nproc_per_node"])[0][2:]
        if name in _NUMBERS:
            given[name] = f"{given[name]} {row.given}" if name in given else row.given
        elif name in _BY_PLAN:
            draft.say(row.given, "done", _BY_PLAN[name])
        elif name == "kept_free_cores":
            put(row.given, name, ranks.options[name].text, row.why)
        elif row.becomes.endswith("--memory_allocator tcmalloc"):
            draft.say(row.given, "done", "whet's image preloads tcmalloc")
        else:
            draft.say(row.given, "refused", "whet k8s starts the ranks of the pods alone: leave it out")
    for name in _NUMBERS if ranks.stays else ():
        word = draft.given_variables.pop(f"PET_{name.upper()}", None)  # torchrun reads its options there too
        if word is not None and name not in given:
            given[name] = f"PET_{name.upper()}={word.text}"
            ranks.options[name] = word
    n_ranks = _count_ranks(draft, pods, given, put)
    _compare_nodes(draft, pods, given, n_ranks, put)
    _count_restarts(draft, pods, given, put)
    draft.ranks = Ranks()


_NUMBERS = ("nproc_per_node", "nnodes", "max_restarts")
_BY_PLAN = {
    **dict.fromkeys(("node_rank", "master_addr", "master_port"), "whet k8s numbers the pods, which meet at the first"),
    "log_dir": "kubectl logs shows what the ranks print",
}
"""Option of `whet launch` that `whet k8s` needs no option for -> why."""


def _count_ranks(draft: Draft, pods: Pods, given: Mapping[str, str], put: Put) -> str:
    """Write the ranks of a pod, of which the launcher knows the number, or else the job; return it."""
    ranks = draft.ranks
    text = given.get("nproc_per_node", "the ranks of a pod")
    word = ranks.flags().get("nproc_per_node")
    if word is None and ranks.total is not None and ranks.total.text.isdecimal():
        of_one, left = divmod(int(ranks.total.text), pods.n_pods)
        word = None if left else Word.of(of_one)
    if pods.n_ranks and (word is not None or not ranks.stays):
        draft.say(f"nprocPerNode: {pods.n_ranks}", "no effect", "the command in the container says another number, or "
                  "starts one process")  # fmt: skip
    elif pods.n_ranks:
        text, word = f"nprocPerNode: {pods.n_ranks}", Word.of(pods.n_ranks)
    if word is None and (ranks.stays or not ranks.launched):
        return "1"
    if word is None or not word.text.isdecimal():
        draft.say(text, "refused", "give their number: --nproc_per_node N, one for each NUMA node of a pod")
        return "1"
    put(text, "nproc_per_node", word.text, "ranks of a pod")
    return word.text


def _compare_nodes(draft: Draft, pods: Pods, given: Mapping[str, str], n_ranks: str, put: Put) -> None:
    """Refuse a launcher for which the pods of the manifest are not the nodes of one run."""
    nodes = draft.ranks.options.get("nnodes")
    fewest, colon, most = (nodes or Word()).text.partition(":")
    text = given.get("nnodes", f"{pods.n_pods} pods")
    by_controller = pods.kind == "pytorchjob" and (bool(draft.ranks.stays) or n_ranks == "1")
    if nodes is None:
        if pods.n_pods > 1 and not by_controller and "WORLD_SIZE" not in draft.given_variables:
            draft.say(text, "refused", "each pod starts a run of its own: render one job for each, with --nodes 1")
    elif nodes.text == str(pods.n_pods) or _BY_CONTROLLER.fullmatch(nodes.text):
        if "nnodes" in given:
            draft.say(text, "done", "each pod is a node")
    elif colon and pods.kind == "pytorchjob" and not {"minReplicas", "maxReplicas"} & pods.elastic.keys():
        put(text, "min_nodes", fewest)
        put(text, "max_nodes", most)
    elif [fewest, most] == [str(pods.elastic.get(name)) for name in ("minReplicas", "maxReplicas")]:
        draft.say(text, "done", "elasticPolicy says it too")
    else:
        why = f"it is not the number of pods, {pods.n_pods}: say how many pods a run has, --nodes N"
        draft.say(text, "refused", why)


_BY_CONTROLLER = re.compile(r"\$[({]?(WORLD_SIZE|PET_NNODES)[)}]?")
"""The number of pods, as a controller of Kubeflow gives it to them."""


def _count_restarts(draft: Draft, pods: Pods, given: Mapping[str, str], put: Put) -> None:
    """Write how often the job starts again; refuse what says another number of it."""
    numbers: list[tuple[str, str]] = []
    if (word := draft.ranks.options.get("max_restarts")) is not None:
        numbers.append((given["max_restarts"], word.text))
    if pods.elastic.get("maxRestarts") is not None:
        numbers.append((f"maxRestarts: {pods.elastic['maxRestarts']}", str(pods.elastic["maxRestarts"])))
    if pods.restarts is not None:
        numbers.append((pods.restarts[0], str(pods.restarts[1])))
    for number, (text, value) in enumerate(numbers):
        if number == 0:
            why = "in each restart all pods fail together" if text.startswith("backoffLimit") else ""
            put(text, "max_restarts", value, why)
        elif value == numbers[0][1]:
            draft.say(text, "done", f"--max_restarts {value} says it")
        else:
            draft.say(text, "refused", f"whet k8s has one number, --max_restarts {numbers[0][1]}: choose one")


def _mount(draft: Draft, spec: Mapping[str, Any], container: Mapping[str, Any], put: Put) -> dict[str, str]:
    """Name the claim that holds the output, or else the first; return the folders that have another name now."""
    moved: dict[str, str] = {}
    volumes = {one.get("name"): one for one in spec.get("volumes") or ()}
    mounts = [
        (str(one.get("mountPath")).rstrip("/"), one, volumes.get(one.get("name")) or {})
        for one in container.get("volumeMounts") or ()
    ]
    claims = {path: claim for path, one, volume in mounts if (claim := _claim_of(volume)) and "subPathExpr" not in one}
    output = f"{draft.value('output_dir') or ''}/"
    holding = sorted((path for path in claims if output.startswith(f"{path}/")), key=len)
    chosen = claims[holding[-1]] if holding else next(iter(claims.values()), None)
    for path, mount, volume in mounts:
        if path == "/dev/shm":  # noqa: S108
            size = (volume.get("emptyDir") or {}).get("sizeLimit")
            if size:
                put(f"{path}: {size}", "shared_memory", size)
            else:
                draft.say(path, "done", "--shared_memory is its size, 1Gi")
        elif path in claims and claims[path] == chosen:
            inside = str(mount.get("subPath") or "").strip("/")
            place = f"{_OUTPUT}/{inside}" if inside else _OUTPUT
            why = f"{path} is {place} in the pods"
            if "output_claim" in draft.cluster:
                draft.say(f"{path}: {chosen}", "translated", why, f"whet k8s --output_claim {chosen}")
            else:
                put(f"{path}: {chosen}", "output_claim", chosen, why)
            moved[path] = place
        else:
            draft.say(
                f"mount {path}", "refused", "whet k8s mounts claims: --data_claim at /data, --cache_claim at /cache"
            )
    return dict(sorted(moved.items(), key=lambda pair: -len(pair[0])))


def _claim_of(volume: Mapping[str, Any]) -> str | None:
    return (volume.get("persistentVolumeClaim") or {}).get("claimName")


def _pass_on(draft: Draft, container: Mapping[str, Any], moved: Mapping[str, str], put: Put) -> None:
    """Pass the variables of the container and of its text on, unless the plan or the image decides them."""
    for name, word in draft.given_variables.items():
        if secrets.in_variables([f"{name}={word.text}"]):
            given = shown(f"{name}={word.text}", secret=True)
            draft.say(given, "refused", f"put it into a Secret: --env_from_secret {name}=SECRET")
        elif (ours := _ours(name)) is not None:
            draft.say(f"{name}={word.text}", *ours)
        elif word.live:
            why = f"only its shell or the cluster knows it: give its value, --env {name}=VALUE"
            draft.say(f"{name}={word.text}", "refused", why)
        elif name == "CCL_WORKER_COUNT":
            why = "threads of each rank that are left for the exchange"
            put(f"{name}={word.text}", "kept_free_cores", word.text, why)
        else:
            value = _moved(word, moved).text
            put(f"{name}={word.text}", "env", f"{variables.MOVED.get(name, name)}={value}")
    for one in container.get("env") or ():
        name, source = str(one["name"]), one.get("valueFrom") or {}
        key = source.get("secretKeyRef")
        if "valueFrom" not in one or name in draft.given_variables:
            continue
        if key:
            put(f"{name} of a Secret", "env_from_secret", f"{name}={key.get('name')}/{key.get('key')}")
        elif (ours := _ours(name)) is not None:
            draft.say(f"{name} of {', '.join(source)}", *ours)
        else:
            why = f"whet k8s takes variables from Secrets alone: give its value, --env {name}=VALUE"
            draft.say(f"{name} of {', '.join(source)}", "refused", why)
    draft.given_variables = {}


def _ours(name: str) -> tuple[Status, str] | None:
    """Return what becomes of a variable that the plan or the image decides, and why; None for others."""
    fact = variables.fact_of(name)
    if name == "LD_PRELOAD":
        return "done", "whet's image preloads tcmalloc"
    if name in RESERVED:
        return "done", RESERVED[name]
    return None if fact.status == "kept" or name == "CCL_WORKER_COUNT" else (fact.status, fact.why)


def _work_in(draft: Draft, folder: str) -> None:
    """Say that relative paths are those of another folder now."""
    output = draft.value("output_dir") or "/"
    if output.startswith("/"):
        why = f"pods start in {_OUTPUT}, and whet needs no folder of a script"
        draft.say(f"workingDir: {folder}", "no effect", why)
    else:
        draft.say(f"workingDir: {folder}", "refused", f"pods start in {_OUTPUT}: write --output_dir from the root")


_HERE_AS_THERE = re.compile(r"\$\(date\b[^$`;&|<>()]*\)|`date\b[^$`;&|<>()]*`")
"""Commands whose output the shell of the user knows as well as that of a pod."""


def _refuse_unknown(draft: Draft) -> None:
    """Leave out what only a shell in the pods knows: the one that renders the manifest would compute another value."""
    passed = {
        word.text.partition("=")[0] for name in ("env", "env_from_secret") for word in draft.cluster.get(name, ())
    }
    for name, words in [*draft.options.items()]:
        unknown = dict.fromkeys(_unknown(words, passed))
        if others := [raw for raw in unknown if not _HERE_AS_THERE.fullmatch(raw)]:
            del draft.options[name]
            draft.correct(name, "refused", why=f"only the pods know {' and '.join(others)}: write the value there")
            continue
        for raw in unknown:
            draft.say(raw, "kept", "the shell that renders the manifest computes it, for all pods and restarts")
    texts = [word.text for word in draft.trailing]
    draft.rows = [row for row in draft.rows if row.given not in texts]
    for text in texts:
        draft.say(text, "refused", "only the pods know it: write its words there")
    draft.trailing = []


def _unknown(words: Sequence[Word], passed: Collection[str]) -> Iterator[str]:
    """Yield the parts that only the pods can compute, but for variables that are passed on to them."""
    for part in (part for word in words for part in word.parts):
        if isinstance(part, str):
            yield from (found[0] for found in _REFERENCE.finditer(part) if found[1] and found[1] not in passed)
        else:
            yield part.raw


def _moved(word: Word, moved: Mapping[str, str]) -> Word:
    first = word.parts[0] if word.parts else ""
    for before, after in moved.items():
        if isinstance(first, str) and f"{first}/".startswith(f"{before}/"):
            return Word((after + first[len(before) :], *word.parts[1:]), word.quoted)
    return word
