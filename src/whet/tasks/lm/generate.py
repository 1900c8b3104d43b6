"""`whet generate`: a language model continues texts, or answers in a chat, through transformers' own `generate`."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, set_seed

from whet import console, json_output, log
from whet.data.files.bad_rows import Rejected
from whet.errors import ConfigError, DataError, WhetError, escape_controls
from whet.jobs.task_run import TaskRun
from whet.jobs.tokenising import progress
from whet.log import logger
from whet.models.loading.adapter import load_trained
from whet.models.loading.heads import CAUSAL_LM
from whet.models.loading.load import max_positions
from whet.store.weights import device_of
from whet.tasks.lm.arguments import GenerateArguments
from whet.tasks.lm.render import Template, require_template

Turns = list[dict[str, str]]
_SAID = "whatissaid"
_OF_MODEL = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "stop_strings", "no_repeat_ngram_size", "min_new_tokens"),
    *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
)
"""Settings of generation_config.json that are read: which tokens end a text, and which may not stand in it."""
_OF_OPTIONS = ("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens", "max_length",
               "use_cache", "transformers_version", "_from_model_config")  # fmt: skip
"""Settings of it that the options of the command replace."""


@dataclass(frozen=True)
class Writer:
    """A model that continues texts, with its tokenizer and its options."""

    model: Any
    tokenizer: Any
    asked: GenerateArguments

    def continued(self, text: str) -> str:
        """Return the continuation of a text."""
        ids = self._prompt(text)
        written, is_cut = self._written(ids)
        n_new = len(written) - ids.shape[1]
        if is_cut and n_new < self.asked.max_new_tokens:
            logger.warning("the continuation is cut after %d tokens: it fills the model's positions", n_new)
        return self._shown(ids, written)

    def answer(self, turns: Turns) -> str:
        """Return the assistant's next turn; the oldest turns are removed from `turns` if the conversation is full."""
        ids = self._fitting(turns)
        written, is_cut = self._written(ids, ends=end_of_turn(self.tokenizer))
        new = written[ids.shape[1] :]
        if is_cut:
            why = "--max_new_tokens" if len(new) == self.asked.max_new_tokens else "the model's positions"
            logger.warning("the answer is cut after %d tokens, by %s", len(new), why)
        return self._text(new)

    def _fitting(self, turns: Turns) -> torch.Tensor:
        """Return the ids (1, T) of the turns that leave room for an answer; remove the oldest from `turns`."""
        limit, ids, n_left_out = max_positions(self.model), self._asked(turns), 0
        room = 0 if limit is None else min(self.asked.max_new_tokens, limit // 2)
        while limit is not None and ids.shape[1] + room > limit and len(turns) > 2:
            del turns[:2]  # a question and its answer
            ids, n_left_out = self._asked(turns), n_left_out + 2
        if n_left_out:
            logger.warning(
                "the conversation fills the model's %d positions: its oldest %d turns are left out from here on",
                limit, n_left_out,
            )  # fmt: skip
        return ids

    def _asked(self, turns: Turns) -> torch.Tensor:
        with progress.reported(1, "writing the text by the chat template", "conversation"):
            try:
                text = Template(self.tokenizer).shown(turns, ask=True)
            except Rejected as problem:
                raise problem.error(self.asked.model) from None
        return self._ids_of(text, add_special_tokens=False)

    def _prompt(self, text: str) -> torch.Tensor:
        """Return the ids (1, T) of a text to continue: without an end that the tokenizer puts behind each text."""
        ids, end = self._ids_of(text), self.tokenizer.eos_token
        is_added = end is not None and not text.endswith(end) and ids[0, -1:].tolist() == [self.tokenizer.eos_token_id]
        return ids[:, :-1] if is_added else ids

    def _ids_of(self, text: str, **options: bool) -> torch.Tensor:
        with progress.reported(len(text)):
            return self.tokenizer(text, return_tensors="pt", verbose=False, **options)["input_ids"]

    def _shown(self, ids: torch.Tensor, written: torch.Tensor) -> str:
        """Return the text behind the prompt's; a tokenizer may leave out the space that a text begins with."""
        prompt, whole = self._text(ids[0]), self._text(written)
        return whole[len(prompt) :] if whole.startswith(prompt) else self._text(written[ids.shape[1] :])

    def _text(self, ids: torch.Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _written(self, ids: torch.Tensor, *, ends: int | None = None) -> tuple[torch.Tensor, bool]:
        """Return the ids (1, T) with those that follow (T + N,), and whether these were cut.

        `ends` is a token that ends them, next to the model's own.
        """
        asked, limit = self.asked, max_positions(self.model)
        room = asked.max_new_tokens if limit is None else min(asked.max_new_tokens, limit - ids.shape[1])
        if not ids.shape[1] or room < 1:
            raise _no_room(ids.shape[1], limit, chat=asked.chat)
        chosen: dict[str, Any] = {"do_sample": asked.do_sample, "repetition_penalty": asked.repetition_penalty}
        if asked.do_sample:
            chosen |= {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
        stops = _ids(self.model.generation_config.eos_token_id)
        if ends is not None:
            stops = sorted({ends, *stops})
            chosen["eos_token_id"] = stops
        given = ids.to(self.model.device)
        end = self.tokenizer.eos_token_id
        padding = end if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        if self.model.generation_config.stop_strings:
            chosen["tokenizer"] = self.tokenizer
        try:
            with torch.inference_mode():
                found = self.model.generate(
                    input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=room, pad_token_id=padding,
                    **chosen,
                ).cpu()  # fmt: skip
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise ConfigError(
                what="the model cannot continue the text with its settings",
                got=asked.model,
                why=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400],
                fix="correct generation_config.json in the model's folder, or remove it",
            ) from error
        return found[0], len(found[0]) == ids.shape[1] + room and int(found[0][-1]) not in stops


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the special token that the chat template puts behind what the assistant says; None if there is none."""
    turns = [{"role": "user", "content": _SAID}, {"role": "assistant", "content": _SAID}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except Exception:  # a template raises what it likes, and will do so for the conversation itself
        return None
    behind = text.rpartition(_SAID)[2]
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    ids = tokenizer(behind, add_special_tokens=False)["input_ids"] if behind else []
    return next((number for number in ids if number in special), None)


def _ids(found: int | list[int] | None) -> list[int]:
    return [] if found is None else found if isinstance(found, list) else [found]


def run_generate(asked: GenerateArguments) -> int:
    """Run the command; return its exit code."""
    log.set_up()
    model, tokenizer = load_trained(asked.model, CAUSAL_LM, asked.base_model_name_or_path)
    _read_generation_config(model, asked.model)
    writer = Writer(model.eval().to(device_of(use_cpu=False)), tokenizer, asked)
    set_seed(asked.seed)
    if not asked.chat:
        for prompt in asked.prompts:
            text = writer.continued(prompt)
            json_output.append("texts", {"prompt": prompt, "text": text})
            _show(prompt + text)
        return 0
    require_template(tokenizer, asked.model, "leave --chat out and give --prompt")
    _talk(writer, asked.prompts or _lines(), at_a_terminal=not asked.prompts and _asks())
    return 0


def _read_generation_config(model: Any, name: str) -> None:
    """Leave of the model's generation_config.json what `_OF_MODEL` names; the log says what else it holds."""
    found = model.generation_config
    kept = {name: value for name in _OF_MODEL if (value := getattr(found, name, None)) is not None}
    asked = {name for name, value in found.to_diff_dict().items() if value is not None and value is not False}
    if others := sorted(asked - {*_OF_MODEL, *_OF_OPTIONS}):
        text = "generation_config.json of %s: %s left out: a token is the most probable one, or is drawn"
        logger.info(text, name, ", ".join(others))
    model.generation_config = GenerationConfig(**kept)


def _talk(writer: Writer, said: Iterable[str], *, at_a_terminal: bool) -> None:
    """Answer each turn of the user; at a terminal, a turn that is too long does not end the conversation."""
    turns: Turns = []
    for one in said:
        turns.append({"role": "user", "content": one})
        try:
            turns.append({"role": "assistant", "content": writer.answer(turns)})
        except WhetError as problem:
            if not at_a_terminal:
                raise
            turns.pop()
            logger.warning("%s", problem)
            continue
        json_output.append("texts", {"prompt": one, "text": turns[-1]["content"]})
        _show(turns[-1]["content"])


def _asks() -> bool:
    return console.is_terminal(sys.stdin) and console.is_terminal(sys.stdout)


def _lines() -> Iterator[str]:
    """Yield what the user says, a line a turn."""
    asks = _asks()
    while True:
        if asks:
            print("> ", end="", flush=True)
        try:
            line = sys.stdin.readline()
            line.encode()  # under LC_ALL=C other bytes are read as halves of surrogate pairs
        except UnicodeError as error:
            raise DataError(
                what="a line of standard input is not UTF-8",
                got=str(error),
                why="a turn of the user is text",
                fix="convert the text first, such as with iconv -f LATIN1 -t UTF-8",
            ) from None
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(text: str) -> None:
    print("\n".join(escape_controls(line) for line in text.split("\n")), flush=True)


def _no_room(n_tokens: int, limit: int | None, *, chat: bool) -> ConfigError:
    text = "turn" if chat else "prompt"
    return ConfigError(
        what=f"the {text} leaves no room for what follows" if n_tokens else f"the {text} has no token",
        got=f"{n_tokens} tokens" + ("" if limit is None else f", {limit} positions"),
        why="the model continues a text of at least one token within its positions",
        fix=("say it in fewer words" if chat else "use a shorter --prompt") if n_tokens else "use another --prompt",
    )


def show_demo(job: TaskRun, metrics: Mapping[str, float]) -> None:
    """Show what the model of `whet demo-lm` has learnt, and a text that it writes."""
    before = next(entry["eval_loss"] for entry in job.engine.state.log_history if "eval_loss" in entry)
    print(f"\nperplexity before training {math.exp(before):,.0f}, after {metrics['eval_perplexity']:,.0f}\n")
    folder, engine = job.args.output_dir, job.engine
    asked = GenerateArguments(model=folder, prompt="The", max_new_tokens=80, do_sample=True, temperature=0.8)
    set_seed(job.args.seed)
    writer = Writer(engine.model.eval(), engine.spec.processing_class, asked)
    print(console.paragraph(f"The{writer.continued('The')}"))
    print(f'\nMore:\n  {console.own_program()} generate {folder} --prompt "..." --do_sample')
