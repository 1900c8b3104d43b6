"""What stands in files: DeepSpeed's and accelerate's configurations, options in JSON and YAML, and Python scripts."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from whet.config import deepspeed
from whet.config.arguments import TrainingArguments
from whet.config.command_line import read_config
from whet.config.settings import Names
from whet.config.settings import draft as draft_settings
from whet.errors import ConfigError
from whet.migrate import accelerate
from whet.migrate.answer import OwnCommands
from whet.migrate.draft import Draft
from whet.migrate.programs import Flag, Program, own_program, program_of, translate
from whet.migrate.shell import Word

_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}
_ARGUMENTS = {"TrainingArguments": None, "Seq2SeqTrainingArguments": None, "SFTConfig": "sft", "DPOConfig": "dpo"}
"""Classes of arguments -> the command of TRL that has the same, if there is one."""
_HEADS = {
    "QuestionAnswering": "qa", "SequenceClassification": "classify", "TokenClassification": "tag", "CausalLM": "lm",
}  # fmt: skip
_WORK = {"train": "do_train", "evaluate": "do_eval", "predict": "do_predict"}
_SPLITS = {"train": "train_file", "validation": "validation_file", "test": "test_file"}


def options_of(values: Mapping[str, Any]) -> dict[str, Flag]:
    """Return the options that names and values of a file are."""
    return {name: Flag(name, f"{name}: {_text(value)}", _words(value)) for name, value in values.items()}


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
    program, flags = _read(draft, path, task)
    if program is not None:
        translate(draft, program, flags, own.options(program.task))
    else:
        names = Names.of((TrainingArguments,), say="--{}".format)
        translate(draft, Program(name=path.name, task=""), flags, names)
        draft.task = task
    return draft


def _read(draft: Draft, path: Path, task: str | None) -> tuple[Program | None, dict[str, Flag]]:
    """Read a file; return its program, and options that are still to be translated."""
    if path.suffix == ".py":
        return _from_python(draft, path, task)
    found = read_config(str(path))
    if accelerate.is_config(found):
        accelerate.translate_config(draft, found)
    elif _OF_DEEPSPEED & found.keys():
        _from_deepspeed(draft, path, found)
    else:
        return (own_program(task, path.name) if task else None), options_of(found)
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


class _Script(ast.NodeVisitor):
    """Collects what a training script says in literals, and in names that are set once to literals."""

    def __init__(self, tree: ast.Module) -> None:
        self.constants: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        """Option -> the expression that the script computes it by."""
        self.task: str | None = None
        self.command: str | None = None
        """Of TRL: sft or dpo."""
        self.found = False
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                known, value = self._value(node.value)
                if known:
                    self.constants[node.targets[0].id] = value
        self.visit(tree)

    def _value(self, node: ast.expr) -> tuple[bool, Any]:
        if isinstance(node, ast.Name) and node.id in self.constants:
            return True, self.constants[node.id]
        try:
            return True, ast.literal_eval(node)
        except ValueError:
            return False, None

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(node.func.value, "id", "") if isinstance(node.func, ast.Attribute) else ""
        if name in _ARGUMENTS:
            self._arguments(name, node)
        elif name == "from_pretrained" and (head := owner.rpartition("For")[2]) in _HEADS:
            self.task = _HEADS[head]
            self._put("model_name_or_path", node.args[:1])
        elif name == "load_dataset":
            self._data(node)
        elif name in _WORK and isinstance(node.func, ast.Attribute) and "train" in owner.lower():
            self.values[_WORK[name]] = True
        elif name in ("SFTTrainer", "DPOTrainer"):
            self.task, self.command = "lm", name[:3].lower()
            self._put("model_name_or_path", [one.value for one in node.keywords if one.arg == "model"])
        self.generic_visit(node)

    def _put(self, option: str, nodes: list[ast.expr]) -> None:
        known, value = self._value(nodes[0]) if nodes else (False, None)
        if known and isinstance(value, str):
            self.values[option] = value

    def _arguments(self, name: str, node: ast.Call) -> None:
        self.found = True
        self.command = _ARGUMENTS[name] or self.command
        given = [*zip(("output_dir",), node.args, strict=False)]
        given += [(one.arg or "", one.value) for one in node.keywords]
        for option, expression in given:
            known, value = self._value(expression)
            if known and not option and isinstance(value, dict):
                self.values |= value
            elif known and option:
                self.values[option] = value
            else:
                self.unknown[option or "**"] = ast.unparse(expression)

    def _data(self, node: ast.Call) -> None:
        files = next((self._value(one.value)[1] for one in node.keywords if one.arg == "data_files"), None)
        if isinstance(files, dict):
            self.values |= {_SPLITS[split]: file for split, file in files.items() if split in _SPLITS}
        elif isinstance(files, str):
            self.values["train_file"] = files
        else:
            self._put("dataset_name", node.args[:1])
            self._put("dataset_config_name", node.args[1:2])


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
    else:
        task = task or script.task
        program = own_program(task, path.name) if task else None
    for option, expression in script.unknown.items():
        draft.say(f"{option}={expression}", "refused", "the script computes it: give its value to the command of whet")
    why = (
        "its loop, collator and metrics are whet's own in a command; or keep it, and change the import to whet.Trainer"
    )
    draft.say(str(path), "done", why)
    return program, options_of(script.values)
