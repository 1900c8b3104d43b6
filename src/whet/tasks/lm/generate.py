"""`whet generate`: a language model continues texts, or answers in a chat, through transformers' own `generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import set_seed

from whet import console, log
from whet.errors import ConfigError, escape_controls
from whet.models.loading.heads import CAUSAL_LM
from whet.models.loading.load import ModelSource, load_model, load_tokenizer, max_positions
from whet.tasks.lm.generate_arguments import GenerateArguments

Turns = list[dict[str, str]]
_SAID = "whatissaid"


@dataclass(frozen=True)
class Writer:
    """A model that continues texts, with its tokenizer and its options."""

    model: Any
    tokenizer: Any
    asked: GenerateArguments

    def continued(self, text: str) -> str:
        """Return the continuation of a text."""
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"]
        return self._shown(ids, self._written(ids))

    def answer(self, turns: Turns) -> str:
        """Return the assistant's next turn."""
        text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        return self._text(self._written(ids, ends=end_of_turn(self.tokenizer))[ids.shape[1] :])

    def _shown(self, ids: torch.Tensor, written: torch.Tensor) -> str:
        """Return the text behind the prompt's; a tokenizer may leave out the space that a text begins with."""
        prompt, whole = self._text(ids[0]), self._text(written)
        return whole[len(prompt) :] if whole.startswith(prompt) else self._text(written[ids.shape[1] :])

    def _text(self, ids: torch.Tensor) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _written(self, ids: torch.Tensor, *, ends: int | None = None) -> torch.Tensor:
        """Return the ids (1, T) with those that follow (T + N,); `ends` is a token that ends them too."""
        asked, limit = self.asked, max_positions(self.model)
        room = asked.max_new_tokens if limit is None else min(asked.max_new_tokens, limit - ids.shape[1])
        if not ids.shape[1] or room < 1:
            raise _no_room(ids.shape[1], limit)
        chosen: dict[str, Any] = {"do_sample": asked.do_sample, "repetition_penalty": asked.repetition_penalty}
        if asked.do_sample:
            chosen |= {"temperature": asked.temperature, "top_k": asked.top_k, "top_p": asked.top_p}
        if ends is not None:
            chosen["eos_token_id"] = sorted({ends, *_ids(self.model.generation_config.eos_token_id)})
        mask = torch.ones_like(ids)
        end = self.tokenizer.eos_token_id
        padding = end if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=room, pad_token_id=padding, **chosen
            )
        return found[0]


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
    source = ModelSource(model=asked.model, flag="--model")
    writer = Writer(load_model(source, CAUSAL_LM, trained=True).eval(), load_tokenizer(source), asked)
    set_seed(asked.seed)
    if not asked.chat:
        for prompt in asked.prompts:
            _show(prompt + writer.continued(prompt))
        return 0
    _require_template(writer)
    turns: Turns = []
    for said in asked.prompts or _lines():
        turns.append({"role": "user", "content": said})
        turns.append({"role": "assistant", "content": writer.answer(turns)})
        _show(turns[-1]["content"])
    return 0


def _lines() -> Iterator[str]:
    """Yield what the user says, a line a turn."""
    asks = console.is_terminal(sys.stdin) and console.is_terminal(sys.stdout)
    while True:
        if asks:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def _show(text: str) -> None:
    print("\n".join(escape_controls(line) for line in text.split("\n")), flush=True)


def _require_template(writer: Writer) -> None:
    if not getattr(writer.tokenizer, "chat_template", None):
        raise ConfigError(
            what="the tokenizer has no chat template",
            got=writer.asked.model,
            why="a conversation becomes text by the template that the model was trained with",
            fix="name a chat model, or leave --chat out and give --prompt",
        )


def _no_room(n_tokens: int, limit: int | None) -> ConfigError:
    return ConfigError(
        what="the prompt leaves no room for a continuation" if n_tokens else "the prompt has no token",
        got=f"{n_tokens} tokens" + ("" if limit is None else f", {limit} positions"),
        why="the model continues a text of at least one token within its positions",
        fix="use a shorter --prompt" if n_tokens else "use another --prompt",
    )
