"""Each data form of TRL, Axolotl, LLaMA-Factory and OpenAI: read as its users expect, or refused.

One list has the cases of the test and the rows of the table in docs/lm.md: those that are read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from text_tasks import write_csv, write_lines
from whet.errors import DataError
from whet.tasks.lm.examples import Examples, read_file
from whet.tasks.lm.render import rendered

PAGE = Path(__file__).resolve().parents[2] / "docs" / "lm.md"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | map(attribute='function.name') | join(',') }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{% endfor %}</s>{% endfor %}{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}(){% endif %}{% endif %}"
)
"""Shows all that a row can say."""
ASK, ANSWER = "what broke over the bow?", "a wave"
TOOL = {"type": "function", "function": {"name": "tide", "parameters": {"type": "object"}}}


def user(words: str = ASK) -> dict[str, Any]:
    return {"role": "user", "content": words}


def assistant(words: str = ANSWER, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": words, **more}


def said(speaker: str, words: str, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": words, **more}


@dataclass(frozen=True)
class Form:
    """A case, and a row of the page's table if it is read: a row of data, and what becomes of it."""

    program: str
    data: str
    """How the page describes the row."""
    how: str
    """How the page says that it is read; of others, why they are refused and what to do."""
    row: dict[str, Any]
    text: str | tuple[str, ...] = ""
    """The text of the row, what is learnt in brackets of its own, «»; of a pair two texts."""
    refused: str = ""
    """A part of the refusal."""
    pairs: bool = False
    not_read: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """The row of the page's table."""
        return f"| {self.program} | {self.data} | {self.how} |"


PLAIN = f"<user>{ASK}</s><assistant>«{ANSWER}</s>»"
SYSTEM = f"<system>be brief</s>{PLAIN}"
PAIR = (PLAIN, f"<user>{ASK}</s><assistant>«a gull</s>»")
SYSTEM_PAIR = tuple(f"<system>be brief</s>{one}" for one in PAIR)
CALL = '[tide {"port": "Oslo"}]'
CALLED = f"<tools>tide</tools><user>{ASK}</s><assistant>«{CALL}</s>»<tool>3 m</s><assistant>«3 m it is</s>»"
ARGUMENTS = {"port": "Oslo"}
TRL, AXOLOTL, FACTORY, OPENAI = "TRL", "Axolotl", "LLaMA-Factory", "OpenAI"
_GULL, _WAVE = said("gpt", "a gull"), said("gpt", ANSWER)
FORMS = (
    Form(TRL, "`text`", "learnt completely, as it is", {"text": ANSWER}, f"«{ANSWER}»"),
    Form(TRL, "`messages`", "chat template; turns of the assistant are learnt",
         {"messages": [user(), assistant()]}, PLAIN),
    Form(TRL, "`prompt`, `completion`: texts", "joined as they are; the completion is learnt",
         {"prompt": ASK, "completion": f" {ANSWER}"}, f"{ASK}« {ANSWER}»"),
    Form(TRL, "`prompt`, `completion`: lists of messages", "chat template; turns of the completion are learnt",
         {"prompt": [user()], "completion": [assistant()]}, PLAIN),
    Form(TRL, "`messages` with `tool_calls`, `tools`", "given to the chat template; a call is learnt like words",
         {"messages": [user(), assistant("", tool_calls=[{"type": "function", "function": {"name": "tide",
          "arguments": ARGUMENTS}}]), {"role": "tool", "content": "3 m"}, assistant("3 m it is")], "tools": [TOOL]},
         CALLED),
    Form(TRL, "`thinking`, `reasoning_content` or `reasoning` of a message",
         "given to the chat template; refused if it does not show it",
         {"messages": [user(), assistant(thinking="hm")]}, f"<user>{ASK}</s><assistant>«(hm){ANSWER}</s>»"),
    Form(TRL, "`chat_template_kwargs`", "variables of the chat template; one that it does not have is refused",
         {"messages": [user(), assistant("()a wave")], "chat_template_kwargs": {"enable_thinking": False}},
         f"<user>{ASK}</s><assistant>()«{ANSWER}</s>»"),
    Form(TRL, "`prompt`, `chosen`, `rejected`: texts", "with `--loss dpo`, as they are",
         {"prompt": ASK, "chosen": " a", "rejected": " b"}, (f"{ASK}« a»", f"{ASK}« b»"), pairs=True),
    Form(TRL, "`chosen`, `rejected`, with `prompt` or what both begin with: messages", "with `--loss dpo`",
         {"chosen": [user(), assistant()], "rejected": [user(), assistant("a gull")]}, PAIR, pairs=True),
    Form(TRL, "`chosen`, `rejected` without `--loss dpo`", "add the option",
         {"prompt": ASK, "chosen": " a", "rejected": " b"}, refused="add --loss dpo"),
    Form(TRL, "`prompt`, `completion`, `label: true` (KTO)", "as without `label`",
         {"prompt": ASK, "completion": " a", "label": True}, f"{ASK}« a»", not_read=("label",)),
    Form(TRL, "`prompt`, `completion`, `label: false` (KTO)", "nobody wants this completion; `--skip_bad` leaves such "
         "rows out", {"prompt": ASK, "completion": " a", "label": False}, refused="label is false"),
    Form(TRL, "`prompt` alone", "there is no answer to learn", {"prompt": ASK}, refused="which column holds the text"),
    Form(TRL, "`prompt`, `completions`, `labels` (stepwise)", "whet has no loss of steps",
         {"prompt": ASK, "completions": ["a", "b"], "labels": [True, False]}, refused="which column holds the text"),
    Form(TRL, "`input_ids`", "name the texts; `whet.Trainer` takes tokens", {"input_ids": [1, 2], "labels": [1, 2]},
         refused="the rows hold tokens"),
    Form(TRL, "`images`", "the model reads texts; empty lists are no images",
         {"messages": [user(), assistant()], "images": ["a.png"]}, refused="images holds what"),
    Form(AXOLOTL, "chat_template: `messages`, `system`", "the column is the first turn",
         {"messages": [user(), assistant()], "system": "be brief"}, SYSTEM),
    Form(AXOLOTL, "chat_template: `train: false`, also `training`", "the turn is not learnt",
         {"messages": [user(), assistant("aye", train=False), user(), assistant()]},
         f"<user>{ASK}</s><assistant>aye</s>{PLAIN}"),
    Form(AXOLOTL, "chat_template: `train: true` of another role", "its words are learnt",
         {"messages": [user("ho") | {"train": True}, assistant()]}, f"<user>«ho</s>»<assistant>«{ANSWER}</s>»"),
    Form(AXOLOTL, "chat_template: `train_detail`", "these characters and the end of the turn are learnt",
         {"messages": [user(), assistant("a big wave", train_detail=[
             {"begin_offset": 0, "end_offset": 1, "train": False},
             {"begin_offset": 2, "end_offset": 4, "train": True}])]},
         f"<user>{ASK}</s><assistant>a «big» wave«</s>»"),
    Form(AXOLOTL, "chat_template: `arguments`, `parameters` as JSON text", "read as the objects that they are",
         {"messages": [user(), assistant("", tool_calls=[{"function": {"name": "tide",
          "arguments": '{"port": "Oslo"}'}}]), {"role": "tool", "content": "3 m"}, assistant("3 m it is")],
          "tools": [{"type": "function", "function": {"name": "tide", "parameters": '{"type": "object"}'}}]}, CALLED),
    Form(AXOLOTL, "alpaca: `instruction`, `input`, `output`",
         "a turn of the user, `input` on a line of its own, and its answer, by the chat template",
         {"instruction": "what broke", "input": "over the bow?", "output": ANSWER},
         PLAIN.replace("broke over", "broke\nover")),
    Form(AXOLOTL, "alpaca: `question`, `answer`; `instruction`, `response`", "the same",
         {"question": ASK, "answer": ANSWER}, PLAIN),
    Form(AXOLOTL, "alpaca: `system_prompt`, `question`, `response`", "the same, after the system's turn",
         {"system_prompt": "be brief", "question": ASK, "response": ANSWER}, SYSTEM),
    Form(AXOLOTL, "alpaca: `article` or `context`, `question`, `answer`", "write the complete prompt into `question`",
         {"article": "the sea", "question": ASK, "answer": ANSWER}, refused="article may belong to the prompt"),
    Form(AXOLOTL, "sharegpt: `conversations` of `from`, `value`", "`human` is the user; `gpt`, `chatgpt`, `bing`, "
         "`bard`, `model`, `assistant` are the assistant",
         {"conversations": [said("human", ASK), said("chatgpt", ANSWER)]}, PLAIN),
    Form(AXOLOTL, "sharegpt: another speaker", "nothing says whether it is learnt",
         {"conversations": [said("human", ASK), said("narrator", "x"), _WAVE]}, refused="names an unknown speaker"),
    Form(AXOLOTL, "DPO: `system`, `question` or `input`, `chosen`, `rejected`", "with `--loss dpo`, a conversation",
         {"system": "be brief", "question": ASK, "chosen": ANSWER, "rejected": "a gull"}, SYSTEM_PAIR, pairs=True),
    Form(AXOLOTL, "DPO: `messages`, and `chosen`, `rejected`, a message each", "with `--loss dpo`",
         {"messages": [user()], "chosen": assistant(), "rejected": assistant("a gull")}, PAIR, pairs=True),
    Form(AXOLOTL, "DPO: `system`, `prompt`, `chosen`, `rejected`: texts",
         "TRL joins these as they are: rename `prompt` to `instruction` for a conversation",
         {"system": "be brief", "prompt": ASK, "chosen": ANSWER, "rejected": "a gull"}, pairs=True,
         refused="system stands next to texts"),
    Form(FACTORY, "alpaca: `instruction`, `input`, `output`, `system`, `history`",
         "turns by the chat template; the answers of `history` are learnt too",
         {"instruction": ASK, "input": "", "output": ANSWER, "system": "be brief", "history": [["ho?", "aye"]]},
         f"<system>be brief</s><user>ho?</s><assistant>«aye</s>»{PLAIN}"),
    Form(FACTORY, "alpaca preference: `instruction`, `input`, `chosen`, `rejected`", "with `--loss dpo`",
         {"instruction": ASK, "input": "", "chosen": ANSWER, "rejected": "a gull"}, PAIR, pairs=True),
    Form(FACTORY, "alpaca or sharegpt KTO: `kto_tag: false`", "as `label: false`",
         {"instruction": ASK, "input": "", "output": ANSWER, "kto_tag": False}, refused="kto_tag is false"),
    Form(FACTORY, "sharegpt: `conversations`, `system`, `tools` with `function_call` and `observation`",
         "a call is the assistant's and learnt, an observation is a tool's turn",
         {"conversations": [said("human", ASK), said("function_call", json.dumps({"name": "tide",
          "arguments": ARGUMENTS})), said("observation", "3 m"), said("gpt", "3 m it is")], "system": "",
          "tools": json.dumps([{"name": "tide", "parameters": {"type": "object"}}])}, CALLED),
    Form(FACTORY, "sharegpt preference: `conversations`, and `chosen`, `rejected`, a message each", "with `--loss dpo`",
         {"conversations": [said("human", ASK)], "chosen": _WAVE, "rejected": _GULL}, PAIR, pairs=True),
    Form(FACTORY, "sharegpt preference without `--loss dpo`", "add the option",
         {"conversations": [said("human", ASK)], "chosen": _WAVE, "rejected": _GULL}, refused="add --loss dpo"),
    Form(FACTORY, "openai: `messages`", "as TRL's", {"messages": [user(), assistant()]}, PLAIN),
    Form(FACTORY, "`images`, `videos`, `audios`", "the model reads texts",
         {"instruction": ASK, "output": ANSWER, "videos": ["a.mp4"]}, refused="videos holds what"),
    Form(OPENAI, "`messages` with `weight` 0 or 1", "a turn with weight 0 is not learnt; other weights are refused",
         {"messages": [user(), assistant("aye", weight=0), user(), assistant(weight=1)]},
         f"<user>{ASK}</s><assistant>aye</s>{PLAIN}"),
    Form(OPENAI, "`tools`, `tool_calls`, `parallel_tool_calls`", "as TRL's; the last one changes nothing, and is named",
         {"messages": [user(), assistant("", tool_calls=[{"id": "1", "type": "function", "function": {"name": "tide",
          "arguments": '{"port": "Oslo"}'}}]), {"role": "tool", "content": "3 m"}, assistant("3 m it is")],
          "tools": [TOOL], "parallel_tool_calls": False}, CALLED, not_read=("parallel_tool_calls",)),
    Form(OPENAI, "`functions`, `function_call`, role `function`", "older names of the same",
         {"messages": [user(), {"role": "assistant", "content": None, "function_call": {"name": "tide",
          "arguments": '{"port": "Oslo"}'}}, {"role": "function", "name": "tide", "content": "3 m"},
          assistant("3 m it is")], "functions": [{"name": "tide", "parameters": {"type": "object"}}]}, CALLED),
    Form(OPENAI, "content as a list of text parts", "end to end",
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "what broke "},
          {"type": "text", "text": "over the bow?"}]}, assistant()]}, PLAIN),
    Form(OPENAI, "parts of images, sounds, files", "the model reads texts",
         {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}, assistant()]},
         refused="is no text"),
    Form(OPENAI, "`refusal` of a message", "chat templates do not show it: write it into `content`",
         {"messages": [user(), assistant("no", refusal="I will not")]}, refused="does not show messages.1..refusal"),
    Form(OPENAI, "preference: `input`, `preferred_output`, `non_preferred_output`", "with `--loss dpo`",
         {"input": {"messages": [user()], "tools": [], "parallel_tool_calls": True}, "preferred_output": [assistant()],
          "non_preferred_output": [assistant("a gull")]}, PAIR, pairs=True, not_read=("input.parallel_tool_calls",)),
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(decoder: Path) -> Any:
    """The decoder's tokenizer with a template that shows everything."""
    found = AutoTokenizer.from_pretrained(decoder)
    found.chat_template = TEMPLATE
    return found


def marked(examples: Examples, tokenizer: Any) -> list[str]:
    """The texts of examples, with brackets around what is learnt."""
    found = rendered(examples, tokenizer, completion_only=True)
    texts = []
    for text, spans in zip(found.texts, found.spans, strict=True):
        for begin, end in sorted(spans or ((0, len(text)),), reverse=True):
            text = f"{text[:begin]}«{text[begin:end]}»{text[end:]}"
        texts.append(text)
    return texts


def in_pairs(found: Examples) -> Examples:
    """The two examples of each pair."""
    values = [(prompt, one) for prompt, *both in found.values for one in both]
    twice = [place for place in found.places for _ in range(2)]
    return replace(found, form="completion", values=values, places=twice, inputs=[*found.inputs, *found.inputs])


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.program} {form.data}")
def test_row_of_each_form_is_read_or_refused_as_the_page_says(form: Form, tokenizer: Any, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [form.row])
    if form.refused:
        with pytest.raises(DataError, match=form.refused):
            marked(read_file(file, None, limit=None, skip_bad=False, pairs=form.pairs), tokenizer)
        return
    found = read_file(file, None, limit=None, skip_bad=False, pairs=form.pairs)
    wanted = [form.text] if isinstance(form.text, str) else [*form.text]
    assert marked(in_pairs(found) if form.pairs else found, tokenizer) == wanted
    named = found.columns.partition("not read: ")[2]
    assert named == ", ".join(form.not_read)


def test_page_lists_each_form_that_is_read_once_in_this_order() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    shown = [one for one in lines if one.startswith(tuple(f"| {name} |" for name in (TRL, AXOLOTL, FACTORY, OPENAI)))]
    assert shown == [form.line for form in FORMS if not form.refused]


_CHOSEN, _REJECTED = [user(), assistant()], [user(), assistant("a gull")]
_TRANSFER = '{"from": "Ann", "to": "Bob", "value": "7"}'


@pytest.mark.parametrize("file", ["rows.csv", "rows.jsonl"])
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": ASK, "chosen": json.dumps(_CHOSEN), "rejected": json.dumps(_REJECTED, indent=2)}, PAIR),
        ({"prompt": json.dumps(user()), "chosen": json.dumps(assistant()), "rejected": json.dumps(_REJECTED[1])}, PAIR),
        ({"prompt": json.dumps([user()], indent=1), "completion": json.dumps(assistant())}, (PLAIN,)),
        ({"prompt": ASK, "completion": '{"port": "Oslo"}'}, (f'{ASK}«{{"port": "Oslo"}}»',)),
        ({"prompt": ASK, "completion": _TRANSFER}, (f"{ASK}«{_TRANSFER}»",)),
        ({"prompt": ASK, "completion": json.dumps(assistant())}, (f"{ASK}«{json.dumps(assistant())}»",)),
        ({"prompt": _TRANSFER, "completion": ASK}, (f"{_TRANSFER}«{ASK}»",)),
        ({"prompt": ASK, "chosen": _TRANSFER, "rejected": ASK}, (f"{ASK}«{_TRANSFER}»", f"{ASK}«{ASK}»")),
    ],
    ids=[
        "ultrafeedback",
        "one message each",
        "completion",
        "no messages",
        "other fields",
        "a message to write",
        "other fields in the prompt",
        "other fields in a pair",
    ],
)
def test_messages_as_json_text_are_messages(
    row: dict[str, str], wanted: tuple[str, ...], file: str, tokenizer: Any, tmp_path: Path
) -> None:
    pairs = "chosen" in row
    path = (write_csv if file.endswith("csv") else write_lines)(tmp_path / file, [row])
    found = read_file(path, None, limit=None, skip_bad=False, pairs=pairs)
    assert marked(in_pairs(found) if pairs else found, tokenizer) == [*wanted]


@pytest.mark.parametrize("file", ["rows.csv", "rows.jsonl"])
def test_a_prompt_of_messages_next_to_a_text_is_refused_in_csv_alone(file: str, tokenizer: Any, tmp_path: Path) -> None:
    """A file of JSON has lists for messages, so that a text there is a text; a cell of CSV has no other way."""
    row = {"prompt": json.dumps([user()]), "completion": "a gull"}
    path = (write_csv if file.endswith("csv") else write_lines)(tmp_path / file, [row])
    if file.endswith("csv"):
        with pytest.raises(DataError, match="both are texts, or both are lists of messages"):
            read_file(path, None, limit=None, skip_bad=False)
    else:
        found = read_file(path, None, limit=None, skip_bad=False)
        assert marked(found, tokenizer) == [f"{row['prompt']}«a gull»"]


@pytest.mark.parametrize("text", [str([assistant()]), json.dumps([assistant()])[:-2]], ids=["of Python", "cut"])
def test_messages_in_another_notation_than_json_are_refused(text: str, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "rows.csv", [{"prompt": json.dumps([user()]), "completion": text}])
    with pytest.raises(DataError, match="completion is a text, and no JSON"):
        read_file(file, None, limit=None, skip_bad=False)


def test_empty_list_of_details_says_nothing(tokenizer: Any, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", [{"messages": [user(), assistant(train_detail=[])], "loss_mask": []}])
    assert marked(read_file(file, None, limit=None, skip_bad=False), tokenizer) == [PLAIN]


@pytest.mark.parametrize(("no", "yes"), [(0, 1), ("0", "1")])
def test_label_0_of_a_completion_is_one_that_nobody_wants(no: Any, yes: Any, tmp_path: Path) -> None:
    rows = [{"prompt": ASK, "completion": one, "label": no if one == "b" else yes} for one in ("a", "b", "c")]
    found = read_file(write_lines(tmp_path / "kto.jsonl", rows), None, limit=None, skip_bad=True)
    assert [completion for _, completion in found.values] == ["a", "c"]
    classes = [row | {"label": n} for n, row in enumerate(rows)]
    found = read_file(write_lines(tmp_path / "classes.jsonl", classes), None, limit=None, skip_bad=False)
    assert len(found) == len(rows), "of three classes, 0 is the first"
