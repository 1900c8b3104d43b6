"""Examples become rows of tokens: what is learnt of each, against a mask made the slow way, token by token."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from following import followed, problems, ways
from saved_decoder import TEMPLATE
from text_tasks import SAILING, write_lines
from whet.data.files.bad_rows import Rejected
from whet.errors import ConfigError, DataError
from whet.jobs.tokenising.cache import Cache
from whet.tasks.lm.examples import read_file
from whet.tasks.lm.job import RowMaker, collate
from whet.tasks.lm.render import Template, _turn, rendered
from whet.tasks.lm.task import LM as COMMAND

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "what broke over the bow?"},
    {"role": "assistant", "content": "a wave"},
    {"role": "user", "content": "and where did the boat lie? ÄÖ"},
    {"role": "assistant", "content": "in the harbour, ü"},
]


def made(decoder: Path, file: Path, *, max_length: int = 64, **options: Any) -> list[dict[str, Any]]:
    """The rows of a file."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    maker = RowMaker(tokenizer, max_length, Cache(rows="rows", folder=file.parent / "cache"), **options)
    rows = maker.rows("train", read_file(file, None, limit=None, skip_bad=False))
    return [rows[n] for n in range(len(rows))]


def labels_of(row: dict[str, Any]) -> list[int]:
    """The tokens that are learnt."""
    return [label for label in row["labels"] if label != -100]


def learnt_by_hand(tokenizer: Any, parts: list[tuple[str, bool]]) -> tuple[list[int], list[int]]:
    """Tokens and labels of parts that are tokenised one after the other: special tokens part them."""
    ids: list[int] = []
    labels: list[int] = []
    for text, learnt in parts:
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += found
        labels += found if learnt else [-100] * len(found)
    return ids, labels


def test_conversation_learns_the_turns_of_the_assistant(decoder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    parts = []
    for message in CHAT:
        is_answer = message["role"] == "assistant"
        parts += [(f"<|{message['role']}|>", False), (f"{message['content']}<|end|>\n", is_answer)]
    ids, labels = learnt_by_hand(tokenizer, parts)
    (row,) = made(decoder, write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}]), max_length=200)
    assert row["input_ids"] == ids == tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert row["labels"] == labels
    (whole,) = made(decoder, tmp_path / "chats.jsonl", max_length=200, completion_only=False)
    assert whole["labels"] == ids


def test_all_turns_of_messages_are_learnt_and_prompts_are_not(decoder: Path, tmp_path: Path) -> None:
    """`assistant_only_loss` false is TRL's default, and says nothing of prompts and completions."""
    chat = write_lines(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    (row,) = made(decoder, chat, max_length=200, assistant_only=False)
    assert row["labels"] == row["input_ids"]
    pair = write_lines(tmp_path / "pairs.jsonl", [{"prompt": "the boat", "completion": " held"}])
    assert made(decoder, pair, assistant_only=False) == made(decoder, pair)
    asked = ["--model_name_or_path", "m", "--train_file", "t", "--do_train", "--assistant_only_loss", "false"]
    assert problems(COMMAND, [*asked, "--completion_only_loss", "true"]) == []
    assert problems(COMMAND, [*asked, "--loss", "dpo"])


def test_rows_of_a_template_that_prints_the_date_are_those_of_any_day(decoder: Path, tmp_path: Path) -> None:
    """A run could not resume on another day; who talks with the model gets today's date."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = "{% if strftime_now is defined %}{{ strftime_now('%d %B %Y') }} {% endif %}" + TEMPLATE
    examples = read_file(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]), None, limit=None, skip_bad=False)
    (text,) = rendered(examples, tokenizer, completion_only=True).texts
    today = f"{datetime.now():%d %B %Y}"
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False).replace(today, "01 January 2026")
    assert today in Template(tokenizer).shown(CHAT)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [("the boat lay", " in the harbour"), ("the boat lay ", "in the harbour"), ("ü", "äö lay"), ("no", "body")],
)
def test_completion_is_each_token_with_a_character_of_it(
    decoder: Path, tmp_path: Path, prompt: str, completion: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    (row,) = made(decoder, write_lines(tmp_path / "p.jsonl", [{"prompt": prompt, "completion": completion}]))
    found = tokenizer(prompt + completion, return_offsets_mapping=True)
    wanted = [
        token if end > len(prompt) else -100
        for token, (_, end) in zip(found["input_ids"], found["offset_mapping"], strict=True)
    ]
    assert row["input_ids"] == [*found["input_ids"], 1]
    assert row["labels"] == [*wanted, 1]
    assert row["labels"][0] == -100
    (whole,) = made(decoder, tmp_path / "p.jsonl", completion_only=False)
    assert whole["labels"] == whole["input_ids"]


def test_prompt_of_messages_is_a_conversation_with_one_answer(decoder: Path, tmp_path: Path) -> None:
    """Earlier turns of the assistant belong to the prompt."""
    pair = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    (row,) = made(decoder, write_lines(tmp_path / "p.jsonl", [pair]), max_length=200)
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    assert row["input_ids"] == tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert labels_of(row) == tokenizer("in the harbour, ü<|end|>\n", add_special_tokens=False)["input_ids"]


def test_rows_do_not_depend_on_threads(decoder: Path, tmp_path: Path) -> None:
    texts = [{"prompt": f"what is {n}?", "completion": SAILING[n % 4]} for n in range(1100)]
    file = write_lines(tmp_path / "pairs.jsonl", texts)
    found = []
    for n in (None, 1, 3):  # of more than two calls of tokenizers
        (tmp_path / str(n)).mkdir()
        copy = (tmp_path / str(n) / "pairs.jsonl").resolve()
        copy.write_bytes(file.read_bytes())
        found.append(made(decoder, copy, n_threads=n))
    assert found[0] == found[1] == found[2]
    assert len({str(row) for row in found[0]}) == len(texts)


def test_texts_are_documents_with_an_end(decoder: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [{"text": text} for text in SAILING])
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    rows = made(decoder, file)
    assert [row["input_ids"] for row in rows] == [[*tokenizer(text)["input_ids"], 1] for text in SAILING]
    assert all(row["labels"] == row["input_ids"] for row in rows)


def test_long_text_becomes_several_rows_and_nothing_is_lost(decoder: Path, tmp_path: Path) -> None:
    text = " ".join(SAILING * 3)
    file = write_lines(tmp_path / "t.jsonl", [{"text": text}, {"text": SAILING[0]}])
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    rows = made(decoder, file, max_length=16)
    wanted = [[*tokenizer(one)["input_ids"], 1] for one in (text, SAILING[0])]
    assert [token for row in rows for token in row["input_ids"]] == wanted[0] + wanted[1]
    assert max(len(row["input_ids"]) for row in rows) == 16
    blocks = made(decoder, file, max_length=16, packing=True)
    assert [token for row in blocks for token in row["input_ids"]] == wanted[0] + wanted[1]
    assert {len(row["input_ids"]) for row in blocks[:-1]} == {16}


def test_plain_text_is_one_document_in_blocks_or_one_for_each_line(decoder: Path, tmp_path: Path) -> None:
    text = "\n".join([*SAILING, "", "the end"]) + "\n"
    file = tmp_path / "book.txt"
    file.write_text(text, "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    rows = made(decoder, file, max_length=16)
    joined = [token for row in rows for token in row["input_ids"]]
    assert joined[0] == 0
    assert joined[-1] == 1
    assert tokenizer.decode(joined[1:-1]) == text
    lines = made(decoder, file, packing=False)
    assert [row["input_ids"] for row in lines] == [[*tokenizer(one)["input_ids"], 1] for one in [*SAILING, "the end"]]


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_line_of_a_file_ends_at_its_line_end_alone(decoder: Path, tmp_path: Path, inside: str) -> None:
    """Other characters at which str.splitlines cuts stand in texts of the web."""
    texts = [f"the boat{inside}lay", "in the harbour"]
    file = tmp_path / "web.txt"
    file.write_text("\n".join(texts) + "\n", "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    lines = made(decoder, file, packing=False)
    assert [row["input_ids"] for row in lines] == [[*tokenizer(one)["input_ids"], 1] for one in texts]
    assert read_file(file, None, limit=1, skip_bad=False).values == [texts[0] + "\n"]


def test_row_without_a_target_is_left_out_and_counted(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first prompt fills its row."""
    pairs = [{"prompt": " ".join(SAILING), "completion": "yes"}, {"prompt": "the", "completion": " boat"}]
    rows = made(decoder, write_lines(tmp_path / "p.jsonl", pairs), max_length=12)
    assert len(rows) == 1
    assert "1 row longer than max_length 12, and cut" in caplog.text
    assert "1 row without a token to learn, left out" in caplog.text
    with pytest.raises(DataError, match="no row has a token to learn"):
        made(decoder, write_lines(tmp_path / "q.jsonl", pairs[:1]), max_length=12)


BAD = {
    '{"messages": "hello"}': "line 1: messages is a text, not a list of messages",
    '{"messages": []}': "line 1: messages is empty",
    '{"messages": ["hello"]}': r"line 1: messages\[0\] is a text, not an object",
    '{"messages": [{"role": "user"}]}': r"line 1: messages\[0\].content is missing",
    '{"messages": [{"role": "user", "content": 3}]}': r"line 1: messages\[0\].content is a whole number, not a text",
    '{"messages": [{"role": "assistant", "content": ""}]}': r"line 1: messages\[0\].content is empty",
    '{"conversations": [{"from": ["human"], "value": "hi"}]}': r"line 1: conversations\[0\].role is a list, not a text",
    '{"messages": [{"role": "assistant", "content": "", "tool_calls": 3}]}': r"line 1: messages\[0\].tool_calls is a",
    '{"messages": [{"role": "assistant", "content": "", "tool_calls": [3]}]}': r"messages\[0\].tool_calls\[0\] is a",
    '{"messages": [{"role": "user", "content": "a"}], "tools": "f"}': "line 1: tools is a text, not a list of objects",
    '{"messages": [{"role": "user", "content": "a"}], "tools": "[1]"}': r"line 1: tools\[0\] is a whole number, not an",
    '{"prompt": "a", "completion": "b", "tools": [{"name": "f"}]}': "line 1: tools stand next to texts",
    '{"prompt": "a", "completion": ""}': "line 1: completion is empty",
    '{"prompt": "a", "completion": null}': "line 1: completion is null, not a text",
    '{"text": "a\\u0000b"}': "line 1: text holds the character",
    '{"a": "x", "b": "y"}': "it is not known which column holds the text",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_row_is_named_by_line_and_field(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n", "utf-8")
    with pytest.raises(DataError, match=BAD[line]):
        read_file(file, None, limit=None, skip_bad=False)


TOOL: dict[str, Any] = {"type": "function", "function": {"name": "tide", "parameters": {"port": {"type": "string"}}}}
SHOWS_TOOLS = "{% if tools %}<|tools|>{{ tools | map(attribute='function.name') | join }}<|end|>{% endif %}" + TEMPLATE


@pytest.mark.parametrize("given", [[TOOL], json.dumps([TOOL]), [TOOL | {"strict": None}]], ids=["list", "text", "null"])
def test_tools_of_a_row_are_shown_by_the_template_and_not_learnt(decoder: Path, tmp_path: Path, given: Any) -> None:
    """Of messages, of prompts with completions, and of rows without tools among them."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = SHOWS_TOOLS
    rows: list[dict[str, Any]] = [{"messages": CHAT[1:3], "tools": given}, {"messages": CHAT[1:3], "tools": None}]
    examples = read_file(write_lines(tmp_path / "c.jsonl", rows), None, limit=None, skip_bad=False)
    found = rendered(examples, tokenizer, completion_only=True)
    assert found.texts == ["<|tools|>tide<|end|>" + found.texts[1], found.texts[1]]
    learnt, alone = (found.spans[0] or ())[0], (found.spans[1] or ())[0]
    assert found.texts[0][slice(*learnt)] == found.texts[1][slice(*alone)]
    pair = [{"prompt": CHAT[1:2], "completion": CHAT[2:3], "tools": given}]
    examples = read_file(write_lines(tmp_path / "p.jsonl", pair), None, limit=None, skip_bad=False)
    assert rendered(examples, tokenizer, completion_only=True).texts == found.texts[:1]
    wanted = tokenizer.apply_chat_template(CHAT[1:3], tokenize=False, tools=[TOOL])
    assert wanted == found.texts[0]


def test_tools_that_the_template_leaves_out_are_refused(decoder: Path, tmp_path: Path) -> None:
    rows = [{"messages": CHAT[1:3]}, {"messages": CHAT[1:3], "tools": [TOOL]}]
    examples = read_file(write_lines(tmp_path / "c.jsonl", rows), None, limit=None, skip_bad=False)
    with pytest.raises(DataError, match="line 2: the model's chat template does not show tools"):
        rendered(examples, AutoTokenizer.from_pretrained(decoder), completion_only=True)


def test_messages_without_words_are_read_where_nobody_learns_them(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    chats = [[{"role": "system", "content": ""}, {"role": "user", "content": " "}, CHAT[2]], [CHAT[1], call]]
    rows = [{"messages": chat, "tools": None} for chat in chats]
    found = read_file(write_lines(tmp_path / "c.jsonl", rows), None, limit=None, skip_bad=False).values
    called = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert found == [chats[0], [CHAT[1], call | {"tool_calls": [called]}]]


def test_bad_rows_can_be_skipped(tmp_path: Path) -> None:
    rows = [{"text": "one"}, {"text": ""}, {"text": 4}, {"text": "two"}]
    found = read_file(write_lines(tmp_path / "t.jsonl", rows), None, limit=None, skip_bad=True)
    assert found.values == ["one", "two"]
    assert found.left_out.n_rows == 2


ODD: tuple[Any, ...] = (
    3, 2.5, True, [], {}, [3], [None], ["x"], [[]], [{}], {"a": [1]}, "", "\0", "\ud800",
    [{"role": 3, "content": "x"}], [{"role": ["user"], "content": "x"}], [{"role": "user", "content": {"a": 1}}],
    [{"from": ["human"], "value": "hi"}], [{"from": {"a": 1}, "value": "hi"}], [{"from": None, "value": "hi"}],
    [{"from": "human", "value": [1]}], [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}],
    [{"role": "assistant", "content": None, "tool_calls": "x"}],
)  # fmt: skip
GOOD = (
    {"messages": CHAT[1:3]},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    {"prompt": "a", "completion": "b"},
    {"prompt": CHAT[1:2], "completion": CHAT[2:3]},
    {"prompt": "a", "chosen": "b", "rejected": "c"},
    {"prompt": CHAT[1:2], "chosen": CHAT[2:3], "rejected": CHAT[4:]},
    {"prompt": "a", "chosen": CHAT[2:3], "rejected": CHAT[4:]},
)


@pytest.mark.parametrize("row", GOOD, ids=lambda row: " ".join(f"{name}-{type(row[name]).__name__}" for name in row))
def test_odd_types_in_any_field_are_named_by_line_and_can_be_skipped(tmp_path: Path, row: dict[str, Any]) -> None:
    for name in row:
        for odd in ODD:
            file = write_lines(tmp_path / "odd.jsonl", [row, row | {name: odd}])
            with pytest.raises(DataError, match=f"line 2: .*{name}"):
                read_file(file, None, limit=None, skip_bad=False, pairs="chosen" in row)
            found = read_file(file, None, limit=None, skip_bad=True, pairs="chosen" in row)
            assert (len(found), found.left_out.n_rows) == (1, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"messages": CHAT}, {"messages": CHAT[:2]}], "line 2: the conversation has no turn of the assistant"),
        ([{"prompt": "a", "completion": "b"}, {"prompt": CHAT[:4], "completion": CHAT[4:]}], "line 1: the prompt is"),
    ],
)
def test_conversation_that_cannot_be_learnt_is_named_by_line(
    decoder: Path, tmp_path: Path, rows: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        made(decoder, write_lines(tmp_path / "bad.jsonl", rows))


def test_template_that_changes_earlier_turns_is_refused(decoder: Path, tmp_path: Path) -> None:
    """Such as one that shows the thoughts of the last turn alone."""
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{% if loop.last %}!{% endif %}{{ m['content'] }}{% endfor %}"
    )
    maker = RowMaker(tokenizer, 64, Cache(rows="rows", folder=tmp_path / "cache"))
    found = read_file(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]), None, limit=None, skip_bad=False)
    with pytest.raises(DataError, match=r"messages\[2\] is shown differently once more turns follow") as refused:
        maker.rows("train", found)
    (all_turns,) = ways(refused.value.problems[0].fix)
    for loss in ("next_tokens", "dpo"):
        asked = ["--model_name_or_path", "m", "--train_file", "t", "--do_train", "--loss", loss]
        assert problems(COMMAND, followed(asked, all_turns)) == []
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        maker.rows("train", found)


LONG = [
    {"role": role, "content": f"{words} {n}"}
    for n in range(200)
    for role, words in (("user", "what broke over the bow?"), ("assistant", "a wave"))
]
WITH_TOOLS = [*LONG[:9], *[{"role": role, "content": "it"} for role in ("tool", "assistant")] * 3, *LONG[20:60]]
TEMPLATES = {
    "usual": TEMPLATE,
    "counts turns": TEMPLATE.replace("<|end|>", "{{ loop.index }}<|end|>"),
    "one end": TEMPLATE.replace("{% if add", "</s>{% if add"),
    "asks later": TEMPLATE.replace("<|{{ message['role'] }}|>", "<|{{ message['role'] }}|>{{ loop.length }}"),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", [LONG[:60], [CHAT[0], *LONG[:60]], LONG[1:60], WITH_TOOLS])
def test_turns_of_a_long_conversation_are_those_found_one_after_the_other(
    chat: list[dict[str, Any]], template: str, decoder: Path, tmp_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = TEMPLATES[template]
    examples = read_file(write_lines(tmp_path / "c.jsonl", [{"messages": chat}]), None, limit=None, skip_bad=False)
    shown = Template(tokenizer)

    def outcome(work: Any) -> Any:
        try:
            return work()
        except (DataError, Rejected) as problem:
            return re.findall(r"messages\[\d+\]", str(problem))[0]

    found = outcome(
        lambda: [one for spans in rendered(examples, tokenizer, completion_only=True).spans for one in spans or ()]
    )
    answers = [n for n, message in enumerate(chat) if message["role"] == "assistant"]
    assert found == outcome(
        lambda: [span for n in answers for span in _turn(chat[: n + 1], None, shown.shown(chat), shown)]
    )


def test_turns_of_a_long_conversation_are_found_in_time_that_grows_with_it(decoder: Path, tmp_path: Path) -> None:
    tokenizer, n_shown = AutoTokenizer.from_pretrained(decoder), [0]
    real = tokenizer.apply_chat_template

    def counted(messages: list[dict[str, Any]], **options: Any) -> Any:
        n_shown[0] += len(messages)
        return real(messages, **options)

    tokenizer.apply_chat_template = counted
    examples = read_file(write_lines(tmp_path / "c.jsonl", [{"messages": LONG}]), None, limit=None, skip_bad=False)
    rendered(examples, tokenizer, completion_only=True)
    assert n_shown[0] < 8 * len(LONG)


def test_template_that_takes_long_is_seen_in_the_log(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("whet.jobs.tokenising.progress.FIRST_S", 0.05)
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.chat_template = "{% for n in range(99999) %}{% for m in range(9) %}{% endfor %}{% endfor %}" + TEMPLATE
    examples = read_file(write_lines(tmp_path / "c.jsonl", [{"messages": CHAT}]), None, limit=None, skip_bad=False)
    with caplog.at_level("INFO", logger="whet"):
        rendered(examples, tokenizer, completion_only=False)
    assert "writing texts by the chat template: 0 of 1 conversations are done" in caplog.text


def test_collated_rows_are_padded_with_a_mask() -> None:
    batch = collate([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}])
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [8, -100, -100]]


def test_line_ends_of_windows_are_those_of_others(decoder: Path, tmp_path: Path) -> None:
    text = b"the boat lay in the harbour\nand a wave broke over the bow\n"
    files = [tmp_path / "lf.txt", tmp_path / "crlf.txt"]
    for file, content in zip(files, (text, text.replace(b"\n", b"\r\n")), strict=True):
        file.write_bytes(content)
    first, second = (made(decoder, file) for file in files)
    assert [row["input_ids"] for row in first] == [row["input_ids"] for row in second]


def test_conversations_of_sharegpt_are_messages(decoder: Path, tmp_path: Path) -> None:
    names = {"user": "human", "assistant": "gpt"}
    shared = [{"from": names.get(one["role"], one["role"]), "value": one["content"]} for one in CHAT]
    found = [
        made(decoder, write_lines(tmp_path / f"{column}.jsonl", [{column: value}]))[0]
        for column, value in (("messages", CHAT), ("conversations", shared))
    ]
    assert found[0]["labels"] == found[1]["labels"]


@pytest.mark.parametrize(("prompt", "answer"), [("query", "completion"), ("prompt", "response")])
def test_answers_under_another_name_are_not_taken_for_the_text(prompt: str, answer: str, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{prompt: "where?", answer: "there"}])
    with pytest.raises(DataError, match=f"rename {prompt if answer == 'completion' else answer} to"):
        read_file(file, None, limit=None, skip_bad=False)


def test_tokenizer_without_an_end_is_reported(decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "endless"
    tokenizer = AutoTokenizer.from_pretrained(decoder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    made(folder, write_lines(tmp_path / "a.jsonl", [{"text": SAILING[0]}]))
    assert "has no eos_token" in caplog.text
