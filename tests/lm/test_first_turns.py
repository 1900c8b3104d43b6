"""Conversations in which the assistant speaks first: what the template writes before its words is not learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from text_tasks import write_lines
from whet.errors import DataError
from whet.tasks.lm.examples import read_file
from whet.tasks.lm.render import rendered

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n\n"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% set messages = messages[1:] %}{% endif %}"
    "<|eot_id|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
QWEN_3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think>\n\n</think>\n\n"
    "{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
)
FORGETS = (
    "{% for m in messages %}{% if not loop.first or m['role'] == 'user' %}{{ m['content'] }};{% endif %}{% endfor %}"
)
SAYS = {"role": "assistant", "content": "Ahoy! What can I do?"}
REST = [{"role": "user", "content": "Sail."}, {"role": "assistant", "content": "Aye."}]


def parts(decoder: Path, folder: Path, template: str, messages: list[dict[str, Any]], **roles: Any) -> list[str]:
    """The texts that are learnt."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = template
    file = write_lines(folder / "c.jsonl", [{"messages": messages, **roles}])
    found = rendered(read_file(file, None, limit=None, skip_bad=False), tokenizer, completion_only=True)
    return [found.texts[0][slice(*span)] for span in found.spans[0] or ()]


@pytest.mark.parametrize(
    ("template", "thought", "end"),
    [
        (CHATML, "", "<|im_end|>\n"),
        (LLAMA_3, "", "<|eot_id|>"),
        (GEMMA, "", "<end_of_turn>\n"),
        (QWEN_3, "<think>\n\n</think>\n\n", "<|im_end|>\n"),
        (MISTRAL, " ", "</s>"),
    ],
    ids=["chatml", "llama 3", "gemma", "qwen 3", "mistral"],
)
def test_first_turn_of_the_assistant_is_learnt_like_a_later_one(
    decoder: Path, tmp_path: Path, template: str, thought: str, end: str
) -> None:
    """Without the system turn and the names of roles before it, and with what the template has the assistant write."""
    first, second = parts(decoder, tmp_path, template, [SAYS, *REST])
    assert second == f"{thought}Aye.{end}"
    assert first.removeprefix(thought) == f"Ahoy! What can I do?{end}"
    assert parts(decoder, tmp_path, template, [SAYS])[0] == first
    if template is not MISTRAL:  # which writes the space before the answer without being asked to
        assert first == f"{thought}Ahoy! What can I do?{end}"


def test_first_words_may_begin_as_any_mark(decoder: Path, tmp_path: Path) -> None:
    for words in ("\ue000 the boat", "<|im_start|>assistant\nAhoy", "assistant\n", "\ue000\ue001"):
        (found,) = parts(decoder, tmp_path, CHATML, [{"role": "assistant", "content": words}])
        assert found == f"{words}<|im_end|>\n"


def test_template_that_leaves_out_a_first_turn_of_the_assistant_is_refused(decoder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 1: the model's chat template leaves out a first message of the") as found:
        parts(decoder, tmp_path, FORGETS, [SAYS, *REST])
    assert "begin the conversation with a message of the user" in found.value.problems[0].fix
