"""Nothing of a data file is dropped in silence: it is read, refused, or named in the first lines of a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet
from test_data_forms import ANSWER, ASK, PLAIN, SYSTEM, TEMPLATE, TOOL, assistant, marked, said, user
from transformers import AutoTokenizer

from saved_decoder import TEMPLATE as PLAIN_TEMPLATE
from text_tasks import QUESTIONS, TAGS, load, words, write_csv, write_lines
from whet.cli.main import run
from whet.errors import EXIT_BAD_DATA, ConfigError, DataError
from whet.jobs.tokenising.cache import Cache
from whet.tasks.lm.examples import read_file
from whet.tasks.lm.job import RowMaker
from whet.tasks.lm.render import rendered

CALL = assistant("", tool_calls=[{"type": "function", "function": {"name": "tide", "arguments": {"port": "Oslo"}}}])
RESULT = {"role": "tool", "content": "3 m"}
GENERATION = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
    "<|end|>\n{% endgeneration %}{% else %}{{ m['content'] }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def with_template(decoder: Path, template: str) -> Any:
    """The decoder's tokenizer with this chat template."""
    found = AutoTokenizer.from_pretrained(decoder)
    found.chat_template = template
    return found


def read(file: Path, *, pairs: bool = False) -> Any:
    return read_file(file, None, limit=None, skip_bad=False, pairs=pairs)


def maker(tokenizer: Any, folder: Path) -> RowMaker:
    return RowMaker(tokenizer, 200, Cache(rows="rows", folder=folder / "cache"))


@pytest.mark.parametrize("more", [{}, {"weight": 0}, {"train": False}, {"loss_mask": 0}], ids=str)
def test_learnt_tokens_are_those_of_the_assistant_mask_of_transformers(
    decoder: Path, tmp_path: Path, more: dict[str, Any]
) -> None:
    """Which TRL learns with assistant_only_loss; a masked turn is taken out of it by its number."""
    tokenizer = with_template(decoder, GENERATION)
    chat = [{"role": "system", "content": "be brief"}, user(), assistant("aye"), user("and now? ÄÖ"), assistant()]
    theirs: Any = tokenizer.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    mask = theirs["assistant_masks"]
    if more:
        first = mask.index(1)
        mask[first : mask.index(0, first)] = [0] * (mask.index(0, first) - first)
    file = write_lines(tmp_path / "c.jsonl", [{"messages": [*chat[:2], chat[2] | more, *chat[3:]]}])
    row: Any = maker(tokenizer, tmp_path).rows("train", read(file))[0]
    assert list(row["input_ids"]) == theirs["input_ids"]
    assert [label != -100 for label in row["labels"]] == [bool(one) for one in mask]


def test_mask_of_a_row_is_one_of_its_messages(decoder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(decoder, TEMPLATE)
    chat = [user(), assistant("aye"), user(), assistant()]
    file = write_lines(tmp_path / "c.jsonl", [{"messages": chat, "loss_mask": [0, 0, 0, 1]}])
    assert marked(read(file), tokenizer) == [f"<user>{ASK}</s><assistant>aye</s>{PLAIN}"]
    for mask in ([1, 0], 3, [0, 0, 0, 0.5]):
        with pytest.raises(DataError, match="line 1: loss_mask"):
            read(write_lines(tmp_path / "d.jsonl", [{"messages": chat, "loss_mask": mask}]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}], "each row is one message"),
        ([{"from": "human", "value": ASK}, {"from": "gpt", "value": ANSWER}], "each row is one message"),
        ([{"title": "bow", "body": ASK, "answer": ANSWER}], "body alone would be learnt without answer"),
        ([{"text": ASK, "response": ANSWER}], "text alone would be learnt without response"),
        ([{"text": ASK, "weight": 2}], "line 1: weight is a weight other than 1"),
        ([{"messages": [user(), assistant(weight=0.5)]}], r"messages\[1\].weight is neither 0 nor 1"),
        ([{"messages": [user(), assistant()], "chat_template_kwargs": "x"}], "chat_template_kwargs is a text"),
        ([{"prompt": ASK, "completion": "a", "chat_template_kwargs": {"a": 1}}], "chat_template_kwargs stand next to"),
        (
            [{"prompt": ASK, "completion": "a"}, {"prompt": ASK, "completion": "b", "system": "x"}],
            "line 2: system stands",
        ),
        ([{"messages": [{"role": "system", "content": "a"}, user(), assistant()], "system": "b"}], "is given twice"),
        ([{"messages": [user(), assistant("", tool_calls=[{"name": "f", "arguments": "x="}])]}], "arguments of"),
        ([{"conversations": [said("human", ASK), said("function_call", "call tide")]}], "its words are no JSON"),
        ([{"messages": [user(), assistant(images=["a.png"])]}], r"messages\[1\].images is no text"),
        ([{"messages": "[{'role': 'user', 'content': 'a'}]"}], "messages is a text, and no JSON"),
        ([{"instruction": ASK, "output": ANSWER, "history": [["a"]]}], "history is no list of pairs"),
        (
            [
                {
                    "input": {"messages": [user()]},
                    "preferred_output": [assistant()],
                    "non_preferred_output": [assistant("x")],
                }
            ],
            "add --loss dpo",
        ),
        ([{"text": None}], "line 1: text is null, not a text(.|\n)*fix: fill it in, or remove the row"),
        ([{"text": 7}], 'line 1: text is a whole number, not a text(.|\n)*fix: write it as a text: "7"'),
        ([{"text": True}], 'fix: write it as a text: "true"'),
        ([{"text": ["a", "b"]}], "line 1: text is a list, not a text(.|\n)*fix: write a row for each of its texts"),
        (
            [{"url": "a", "body": {"model": "m", "messages": [user(), assistant()]}}],
            "line 1: body is an object, not a text(.|\n)*fix: take body.messages out into a column of its own: "
            r'{"messages": ',
        ),
        (
            [{"id": 1, "body": {"title": "a", "text": "b"}}],
            "fix: name its field that holds the text: --dataset_text_field body.title, or body.text",
        ),
        (
            [{"segments": [{"label": False, "text": ASK}, {"label": True, "text": ANSWER}]}],
            "line 1: segments is a list, not a text(.|\n)*fix: write the row as messages, or with prompt and ",
        ),
        ([{"chat": [user(), assistant()]}], "fix: rename the column chat to messages"),
        (
            [{"messages": [user() | {"content": {"text": "a"}}]}],
            "without the notation of an object, such as those of its field text",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_row_that_says_what_is_not_honoured_is_refused(tmp_path: Path, rows: list[Any], message: str) -> None:
    for name, text in (("r.jsonl", "".join(json.dumps(row) + "\n" for row in rows)), ("r.json", json.dumps(rows))):
        (tmp_path / name).write_text(text, "utf-8")
        place = message.replace("line 1", "entry 0").replace("line 2", "entry 1") if name == "r.json" else message
        with pytest.raises(DataError, match=place):
            read(tmp_path / name)


def test_object_of_parquet_is_no_text(tmp_path: Path) -> None:
    """Its fields are no columns, so that no option can name one."""
    parquet.write_table(pyarrow.Table.from_pylist([{"body": {"text": ASK}}]), tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="fix: write the words of its field text into a column of their own: text"):
        read(tmp_path / "rows.parquet")


def test_unnamed_column_that_is_not_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(",text,id\n0,a,x\n", "utf-8")
    assert read(tmp_path / "rows.csv").columns == "text: text; not read: (no name), id"


@pytest.mark.parametrize(
    "template",
    ["{% for m in messages %}{{ m['content'] }}", "{{ messages[0]['content'] | unheard }}",
     "{% if messages %}{{ messages[0]['content'] | unheard }}{% endif %}"],
)  # fmt: skip
def test_damaged_chat_template_is_no_fault_of_a_row(decoder: Path, tmp_path: Path, template: str) -> None:
    rows = read(write_lines(tmp_path / "c.jsonl", [{"messages": [user(), CALL, RESULT, assistant()]}]))
    with pytest.raises(ConfigError, match="the model's chat template is damaged") as refused:
        rendered(rows, with_template(decoder, template), completion_only=True)
    assert "line 1:" in str(refused.value.problems[0].got) or "No filter" in str(refused.value.problems[0].got)
    assert "c.jsonl" not in str(refused.value)
    with pytest.raises(DataError, match="line 1: the model's chat template refuses the conversation"):
        rendered(rows, with_template(decoder, "{{ raise_exception('No filter named a') }}"), completion_only=True)


def test_unwanted_completions_can_be_skipped(tmp_path: Path) -> None:
    rows = [{"prompt": ASK, "completion": one, "label": one != "b"} for one in ("a", "b", "c")]
    found = read_file(write_lines(tmp_path / "k.jsonl", rows), None, limit=None, skip_bad=True)
    assert [completion for _, completion in found.values] == ["a", "c"]
    assert found.left_out.n_rows == 1


HIDES_CALLS = PLAIN_TEMPLATE
QWEN_3 = PLAIN_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if loop.last and message.reasoning_content %}({{ message.reasoning_content }}){% endif %}{{ message.content }}",
)
LAST_THOUGHT = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content and loop.index0 > 1 %}({{ m.reasoning_content }})"
    "{% endif %}{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (HIDES_CALLS, {"messages": [user(), CALL, RESULT, assistant()]}, r"messages\[1\].tool_calls"),
        (HIDES_CALLS, {"prompt": [user(), CALL, RESULT], "completion": [assistant()]}, r"messages\[1\].tool_calls"),
        (HIDES_CALLS, {"messages": [user(), assistant(reasoning_content="hm")]}, r"messages\[1\].reasoning_content"),
        (HIDES_CALLS, {"messages": [user(), assistant(thinking="hm")]}, r"messages\[1\].thinking"),
        (LAST_THOUGHT, {"messages": [user(), assistant(reasoning="a"), user(), assistant(reasoning="b")]},
         r"messages\[1\].reasoning"),
        (QWEN_3, {"messages": [user(), assistant(reasoning="a"), user(), assistant(reasoning="b")]},
         r"messages\[1\](.reasoning| is shown differently)"),
        (NO_SYSTEM, {"messages": [user(), assistant()], "system": "be brief"}, r"messages\[0\], of role system"),
        (NO_SYSTEM, {"system": "be brief", "instruction": ASK, "output": ANSWER}, r"messages\[0\], of role system"),
        (TEMPLATE, {"messages": [user(), assistant()], "chat_template_kwargs": {"enable_thought": True}},
         "has no variable enable_thought"),
        (TEMPLATE, {"messages": [user(), assistant()], "chat_template_kwargs": {"tools": []}}, "no variable tools"),
        (TEMPLATE, {"messages": [user(), assistant(weight=0)]}, "no turn of the assistant that shall be learnt"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 50 else "",
)  # fmt: skip
@pytest.mark.parametrize("completion_only", [True, False])
def test_template_that_hides_what_a_row_says_is_refused(
    decoder: Path, tmp_path: Path, template: str, row: dict[str, Any], message: str, completion_only: bool
) -> None:
    if not completion_only and "no turn" in message:
        message = "shall not be learnt, and all turns are"
    found = read(write_lines(tmp_path / "c.jsonl", [row]))
    with pytest.raises(DataError, match=message):
        rendered(found, with_template(decoder, template), completion_only=completion_only)


@pytest.mark.parametrize("loss", ["next_tokens", "dpo"])
def test_conversations_that_the_template_hides_can_be_skipped(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], loss: str
) -> None:
    """All of them are named in one error; with --skip_bad they are left out and counted, of preferences as pairs."""
    model = Path(shutil.copytree(decoder, tmp_path / "model"))
    (model / "chat_template.jinja").write_text(NO_SYSTEM, "utf-8")
    bad = {1, 3}
    asked = [[{"role": "system", "content": "be brief"}] * (n in bad) + [user()] for n in range(6)]
    rows = [{"messages": [*one, assistant()]} for one in asked]
    if loss == "dpo":
        rows = [{"prompt": one, "chosen": [assistant()], "rejected": [assistant("no")]} for one in asked]
    file = write_lines(tmp_path / "c.jsonl", rows)
    options: dict[str, Any] = {"train_file": file, "loss": loss, "max_steps": 1}
    line = words("lm", model, tmp_path / "out", "--do_train", **options)
    assert run(line) == EXIT_BAD_DATA
    shown = " ".join(capfd.readouterr().err.split())
    assert all(f"line {n + 1}: the model's chat template does not show messages[0]" in shown for n in bad)

    assert run([*line, "--overwrite_output_dir", "--skip_bad"]) == 0
    assert load(tmp_path / "out", "train_results.json").items() >= {
        "train_examples_left_out": 2, "train_samples": 4,
    }.items()  # fmt: skip
    left_out = load(tmp_path / "out", "train_left_out.json")
    assert [one["what"].split(":")[1] for one in left_out] == [f" line {n + 1}" for n in sorted(bad)]
    assert f"2 {'pairs' if loss == 'dpo' else 'conversations'} are bad and were left out" in capfd.readouterr().err


def test_other_fields_that_the_template_hides_are_named(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": [user() | {"name": "Mira", "time": 3}, assistant(id="x")]}] * 2
    template = PLAIN_TEMPLATE.replace("|>{{", "|>{{ message['name'] or '' }}{{", 1)
    maker(with_template(decoder, template), tmp_path).rows("train", read(write_lines(tmp_path / "c.jsonl", rows)))
    assert "train: fields of messages that the chat template does not show: id, time" in caplog.text


@pytest.mark.parametrize("ends", [True, False])
def test_template_that_ends_no_turn_of_the_assistant_is_reported(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    template = PLAIN_TEMPLATE if ends else PLAIN_TEMPLATE.replace("<|end|>", "")
    file = write_lines(tmp_path / "c.jsonl", [{"messages": [user(), assistant()]}])
    maker(with_template(decoder, template), tmp_path).rows("train", read(file))
    assert ("ends no turn of the assistant" in caplog.text) is not ends


def test_nulls_of_parquet_are_no_arguments(decoder: Path, tmp_path: Path) -> None:
    """Each object of a column has the fields of all rows: those of calls, of tools, of parts of a content."""
    other = assistant("", tool_calls=[{"type": "function", "function": {"name": "wind", "arguments": {"hour": 3}}}])
    parts = {"role": "user", "content": [{"type": "text", "text": ASK}]}
    rows = [{"messages": [{**user(), "content": parts["content"]}, {**call, "content": None}], "tools": [TOOL]}
            for call in (CALL, other)]  # fmt: skip
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    texts = marked(read(tmp_path / "c.parquet"), with_template(decoder, TEMPLATE))
    called = ('[tide {"port": "Oslo"}]', '[wind {"hour": 3}]')
    assert texts == [f"<tools>tide</tools><user>{ASK}</s><assistant>«{one}</s>»" for one in called]


def test_null_that_json_gives_as_an_argument_stays(decoder: Path, tmp_path: Path) -> None:
    call = assistant("", tool_calls=[{"function": {"name": "tide", "arguments": {"port": None}}}])
    file = write_lines(tmp_path / "c.jsonl", [{"messages": [user(), call]}])
    assert '[tide {"port": null}]' in marked(read(file), with_template(decoder, TEMPLATE))[0]


def test_template_that_joins_arguments_as_text_gets_text(decoder: Path, tmp_path: Path) -> None:
    template = TEMPLATE.replace("{{ c.function.name }} {{ c.function.arguments | tojson }}",
                                "{{ c.function.name + ' ' + c.function.arguments }}")  # fmt: skip
    file = write_lines(tmp_path / "c.jsonl", [{"messages": [user(), CALL]}])
    (text,) = marked(read(file), with_template(decoder, template))
    assert text == f'<user>{ASK}</s><assistant>«[tide {{"port": "Oslo"}}]</s>»'


def test_column_that_only_later_rows_have_is_read_or_named(decoder: Path, tmp_path: Path) -> None:
    rows = [{"messages": [user(), assistant()]}, {"messages": [user(), assistant()], "system": "be brief", "url": "a"}]
    found = read(write_lines(tmp_path / "c.jsonl", rows))
    assert marked(found, with_template(decoder, TEMPLATE)) == [PLAIN, SYSTEM]
    assert found.columns == "messages: messages; system: system; not read: url"


def test_lists_in_cells_of_csv_are_json(decoder: Path, tmp_path: Path) -> None:
    tokenizer = with_template(decoder, TEMPLATE)
    chats = [{"conversation": json.dumps([user(), assistant()]), "tools": json.dumps([TOOL]), "system": ""}]
    assert marked(read(write_csv(tmp_path / "c.csv", chats)), tokenizer) == [f"<tools>tide</tools>{PLAIN}"]
    pairs = [{"prompt": json.dumps([user()]), "completion": json.dumps([assistant()]), "label": "True"}]
    assert marked(read(write_csv(tmp_path / "p.csv", pairs)), tokenizer) == [PLAIN]
    with pytest.raises(DataError, match="line 2: label is false"):
        read(write_csv(tmp_path / "k.csv", [pairs[0] | {"label": "False"}]))


@pytest.mark.parametrize("name", ["train", "data", "rows", "test"])
def test_document_with_one_list_of_rows_is_a_table(tmp_path: Path, name: str) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"version": "1.0", name: [{"text": "a"}, {"text": "b"}]}, indent=1), "utf-8")
    assert read(file).values == ["a", "b"]
    file.write_text(json.dumps({"train": [{"text": "a"}], "validation": [{"text": "b"}]}), "utf-8")
    with pytest.raises(DataError, match="several lists of rows"):
        read(file)
    file.write_text(json.dumps({"text": "a row alone", "rows": [{"x": 1}]}), "utf-8")
    assert read(file).values == ["a row alone"]


LABELLED = [{"text": row["context"], "label": "ab"[n % 2], "id": n} for n, row in enumerate(QUESTIONS)]
NESTED = {"data": [{"title": "Sea", "source": "web", "paragraphs": [
    {"context": row["context"], "qas": [{name: row[name] for name in ("id", "question")}
     | {"answers": [{"text": row["answers"]["text"][0], "answer_start": row["answers"]["answer_start"][0]}],
        "level": 3}]} for row in QUESTIONS]}]}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "rows", "line"),
    [
        ("lm", [{"text": ASK, "url": "a"}], "validation: 1 texts; text: text; not read: url"),
        ("lm", [{"messages": [user("hi"), assistant("ho")], "tools": None, "id": 3}],
         "validation: 1 conversations; messages: messages; tools: tools; not read: id"),
        ("classify", LABELLED, "validation: 12 examples; text: text; label: label; not read: id"),
        ("tag", [row | {"doc": "a"} for row in TAGS], "not read: doc"),
        ("qa", [row | {"url": "a"} for row in QUESTIONS],
         "validation: 12 questions; read: id, context, question, answers; not read: url"),
        ("qa", [NESTED], "read: id, title, context, question, answers; not read: source, level"),
    ],
    ids=["lm", "lm chats", "classify", "tag", "qa", "qa nested"],
)  # fmt: skip
def test_every_task_names_the_columns_that_it_does_not_read(
    tmp_path: Path, command: str, rows: list[Any], line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Before a model is loaded: the folder of this one is empty."""
    (tmp_path / "none").mkdir()
    more = {"doc_stride": 16} if command == "qa" else {}
    file = write_lines(tmp_path / "rows.jsonl", rows)
    assert run(words(command, tmp_path / "none", tmp_path / "out", "--do_eval", validation_file=file, **more)) != 0
    assert line in " ".join(capfd.readouterr().out.split())


def test_command_refuses_a_row_and_names_the_way_forward(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_lines(tmp_path / "c.jsonl", [{"messages": [user(), CALL, RESULT, assistant()]}])
    assert run(words("lm", decoder, tmp_path / "out", "--do_train", train_file=file)) == EXIT_BAD_DATA
    said_ = capfd.readouterr().err
    assert "does not show messages[1].tool_calls" in said_
    assert "use a model whose template shows tool_calls" in said_
