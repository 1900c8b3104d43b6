"""The page about a run: what a reader finds in it, whatever the files of the run hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_parts import Page
from report_runs import (
    FORECAST,
    SETTINGS,
    UNSURE,
    WRONG,
    record_run,
    write_confusion,
    write_errors,
    write_lines,
    write_trainer_state,
)

from whet import ConfigError
from whet.cli.main import run
from whet.report import bars, curves, page, runs
from whet.report.runs import UNKNOWN

_LABELS = ["card_arrival", "lost_card", "lost_phone"]
_COUNTS = [[5, 1, 0], [2, 4, 0], [0, 1, 3]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run with errors and a confusion matrix."""
    found = record_run(tmp_path / "banking")
    write_errors(found)
    write_confusion(found, _LABELS, _COUNTS)
    return found


def _text(*folders: Path) -> str:
    found = runs.name_apart([runs.read(folder) for folder in folders])
    return page.render(found, curves.draw(found), bars.draw(found), Path())


def _page(*folders: Path) -> Page:
    return Page(_text(*folders))


def test_page_is_well_formed_and_its_headings_are_in_order(folder: Path) -> None:
    found = _page(folder)
    assert found.unclosed == []
    assert len(found.ids) == len({*found.ids})
    assert found.headings[0] == (1, "banking")
    assert [words for _, words in found.headings[1:]] == [
        "Worst examples", "Confused labels", "Metrics", "Forecast and outcome", "Curves", "Where the time went",
        "Settings", "Command, model and machine",
    ]  # fmt: skip
    assert all(after - before <= 1 for (before, _), (after, _) in zip(found.headings, found.headings[1:], strict=False))
    assert all(table.caption for table in found.tables)


def test_page_asks_for_nothing_from_any_address(folder: Path) -> None:
    text = _text(folder)
    outside = [one for one in Page(text).addresses if not one.startswith(("#", "data:,"))]
    assert outside == []
    assert re.findall(r"https?://|//\w|@import|url\((?!#)", text) == []


def test_worst_examples_come_first_with_what_was_expected(folder: Path) -> None:
    table = _page(folder).table("3 examples of the validation split that the model gets wrong, worst first, then 1")
    assert table.rows[0] == ["Example", "Expected", "Predicted", "Probability", "Loss", "Row"]
    shown = [row[:3] for row in table.rows[1:]]
    assert shown[:3] == [[one["text"], one["expected"], one["predicted"]] for one in WRONG]
    assert shown[3] == [UNSURE["text"], UNSURE["expected"], "card_arrivalright, but unsure"]
    assert table.rows[1][3:] == ["0.010", "4.60", "test.csv:7"]


def test_texts_of_a_language_model_say_what_their_columns_are(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "lm", task="lm")
    (folder / "all_results.json").write_text('{"eval_loss": 5.5, "eval_perplexity": 240.0}')
    row = {"row": "line 9", "text": "Teams of California", "expected": " Cali", "predicted": " the", "loss": 6.0}
    write_errors(folder, [row | {"probability": None}])
    caption = "1 example of the validation split, worst first. Expected is the hardest stretch of the text"
    assert _page(folder).table(caption).rows[1] == ["Teams of California", "Cali", "the", "6.00", "line 9"]


def test_an_empty_answer_to_a_question_is_named(folder: Path) -> None:
    asked = {"row": "q1", "question": "Who?", "context": "In 1911.", "expected": "", "predicted": "1911"}
    write_errors(folder, [asked, WRONG[0] | {"predicted": []}])
    table = next(one for one in _page(folder).tables if "examples of the validation split" in one.caption)
    assert table.rows[1][:3] == ["Who?In 1911.", "no answer", "1911"]  # in two paragraphs
    assert table.rows[2][:3] == ["I lost my card", "lost_card", "nothing"]


def test_a_question_shows_by_what_the_worst_come_first(folder: Path) -> None:
    asked = {"question": "Who?", "context": "In 1911 Ada.", "expected": "Ada", "predicted": "1911", "probability": None}
    write_errors(folder, [asked | {"row": "q1", "score": 0.8}, asked | {"row": "q2", "score": 0.3}])
    table = next(one for one in _page(folder).tables if "the score is the probability of the predicted" in one.caption)
    assert [row[-2:] for row in table.rows[:3]] == [["Score", "Row"], ["0.800", "q1"], ["0.300", "q2"]]


def test_of_many_examples_the_worst_are_shown_and_the_rest_is_counted(folder: Path) -> None:
    write_errors(folder, [WRONG[0] | {"row": f"r{n}"} for n in range(runs.WORST + 7)])
    found = _page(folder)
    table = next(one for one in found.tables if "examples of the validation split" in one.caption)
    assert len(table.rows) == 1 + runs.WORST
    assert f"Shown are the worst {runs.WORST}; errors.jsonl has all {runs.WORST + 7}." in table.caption


_HOSTILE = '</td><script>document.title = "taken"</script><img src=x onerror=alert(1)>'


def test_texts_of_the_data_are_shown_and_never_run(folder: Path) -> None:
    hostile = {"text": _HOSTILE, "expected": "<b>bold</b>", "predicted": "{{ 7 * 7 }}", "row": '"><script>'}
    write_errors(folder, [WRONG[0] | hostile])
    write_confusion(folder, ["<i>a</i>", "'\" onmouseover=alert(1) x='"], [[1, 2], [3, 4]])
    begin = {"command": "whet classify --x '<script>'", "machine": {"<u>": "<script>"}}
    record_run(folder, settings={"<s>": {"value": "</table>", "from": "<script>"}}, **begin)
    text = _text(folder)
    found = Page(text)
    assert found.unclosed == []
    assert found.tags.count("script") == 1
    assert not {"img", "i", "u", "s"} & {*found.tags}
    assert "onerror" not in re.sub(r"&lt;.*?&gt;", "", text)
    row = next(one for one in found.tables if "examples of the validation" in one.caption).rows[1]
    assert row[:3] == [_HOSTILE, "<b>bold</b>", "{{ 7 * 7 }}"]


def test_only_the_script_of_the_page_may_run(folder: Path) -> None:
    text = _text(folder)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", policy[1])


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\u202eb", "a\\u202eb"), ("a\x00\x1b[31m", "a\\x00\\x1b[31m"), ("\ud800", "\\ud800"), ("a\u2066b", "a\\u2066b")],
)
def test_characters_that_control_are_shown_as_escapes(text: str, shown: str, folder: Path) -> None:
    write_errors(folder, [WRONG[0] | {"text": text}])
    found = _text(folder)
    assert text not in found
    found.encode("utf-8")
    assert next(one for one in Page(found).tables if "examples of the" in one.caption).rows[1][0] == shown


def test_text_from_right_to_left_keeps_its_own_direction(folder: Path) -> None:
    text = "אני צריך כרטיס حساب"
    write_errors(folder, [WRONG[0] | {"text": text}])
    assert f'<div class="text" dir="auto">{text}</div>' in _text(folder)


def test_confused_pairs_come_with_their_share_and_the_matrix_has_names(folder: Path) -> None:
    found = _page(folder)
    pairs = found.table("Pairs of labels that are confused in the validation split: all 3")
    assert pairs.rows[1:] == [
        ["lost_card", "card_arrival", "2", "6", "33%"], ["card_arrival", "lost_card", "1", "6", "17%"],
        ["lost_phone", "lost_card", "1", "4", "25%"],
    ]  # fmt: skip
    matrix = found.table("Confusion matrix of the validation split.")
    assert matrix.rows == [
        ["", *_LABELS], ["card_arrival", "5", "1", ""], ["lost_card", "2", "4", ""], ["lost_phone", "", "1", "3"],
    ]  # fmt: skip


def test_matrix_of_very_many_labels_shows_the_most_confused(folder: Path) -> None:
    n = page._MOST_LABELS + 50
    labels = [f"label-{one}" for one in range(n)]
    counts = [[3 if a == b else 0 for b in range(n)] for a in range(n)]
    counts[170][180] = 9
    write_confusion(folder, labels, counts)
    matrix = _page(folder).table("Confusion matrix of the validation split, the 2 most confused of 200 labels")
    assert matrix.rows == [["", "label-170", "label-180"], ["label-170", "3", "9"], ["label-180", "", "3"]]


def test_settings_that_were_chosen_come_first_with_their_origin(folder: Path) -> None:
    found = _page(folder)
    chosen = found.table("Settings that differ from their default")
    assert chosen.rows[1:] == [["learning_rate", "0.0003", "command line"], ["optim", "lion", "recipe"]]
    assert found.table("Settings with their default value").rows[1:] == [["seed", "42"], ["weight_decay", "0.0"]]


def test_forecast_stands_next_to_what_came(folder: Path) -> None:
    rows = _page(folder).table("What was expected after the first steps").rows[1:]
    assert rows[0] == ["peak memory", "1.0 GB", "1.1 GB", "1.10"]
    assert rows[1] == ["training time", "1m40s (1m20s to 2m10s)", "2m00s", "1.20"]
    assert rows[2] == ["end of the training", "21 Sep 2026, 14:15 UTC", "21 Sep 2026, 14:15 UTC", ""]
    assert FORECAST["train_s"] == 100.0


def test_automatic_choice_has_what_was_tried_and_what_flags_cost(tmp_path: Path) -> None:
    large = {"setting": "8 x 1", "step_s": None, "peak_bytes": None, "why": "takes 114% of what is free"}
    tried = [{"setting": "4 x 2", "step_s": 0.4123, "peak_bytes": 1.2e9, "why": ""}, large]
    auto = {"setting": "4 x 2", "tried": tried, "prices": ["--fp16 costs 40% here"]}
    found = _page(record_run(tmp_path / "auto", auto=auto))
    rows = found.table("What --auto has tried").rows[1:]
    assert rows == [["4 x 2", "0.412 s", "1.2 GB", "taken"], ["8 x 1", UNKNOWN, UNKNOWN, large["why"]]]
    assert "--fp16 costs 40% here" in found.text


def test_curves_are_drawn_in_the_colours_of_the_page_and_described(folder: Path) -> None:
    text = _text(folder)
    drawn = re.findall(r'<svg class="chart".*?</svg>', text, flags=re.DOTALL)
    titles = [re.search(r"<title[^>]*>(.*?)</title>", one)[1] for one in drawn]  # type: ignore[index]
    assert titles == ["Loss", "Accuracy, validation", "Learning rate", "Gradient norm", "Real tokens a second",
                      "Memory of the process"]  # fmt: skip
    assert "training: 1.0000 to 0.0833 at step 12; validation: 2.0000 to 1.0000 at step 12." in drawn[0]
    colours = re.findall(r"#[0-9a-fA-F]{3,6}\b(?=[;\"\s])", re.sub(r'(?:href="|url\()#[^")]*', "", "".join(drawn)))
    assert colours == []
    assert "var(--run-0)" in drawn[0]
    assert "var(--run-1)" in drawn[0]


def test_steps_that_a_resumed_run_took_again_are_drawn_once(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text("utf-8").splitlines()]
    killed = lines[:10]  # up to step 9
    again = [line for line in lines if line["event"] == "step" and line["step"] > 6]
    write_lines(folder / "run.jsonl", [*killed, lines[0] | {"resumed_from": 6}, *again, *lines[-3:]])
    found = runs.read(folder)
    assert [step.step for step in found.steps] == list(range(1, 13))
    text = Page(_text(folder)).text
    assert "It was resumed from step 6." in text
    assert "dotted line: resumed from step 6" in text


@pytest.mark.parametrize(("status", "memory"), [(None, "1.1 GB"), ("stopped", "2.0 GB")])
def test_time_and_memory_of_a_resumed_run_are_those_of_all_its_processes(
    status: str | None, memory: str, folder: Path
) -> None:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text("utf-8").splitlines()]
    first = lines[:8]  # up to step 6, one minute after the begin
    first += [lines[-1] | {"status": status, "train_s": 60.0, "peak_bytes": 2e9}] if status else []
    write_lines(folder / "run.jsonl", [*first, lines[0] | {"resumed_from": 6}, lines[1], *lines[8:]])
    text = _text(folder)
    assert "<dt>training time</dt><dd>3m00s</dd>" in text
    assert f"<dt>peak memory</dt><dd>{memory}</dd>" in text
    rows = Page(text).table("What was expected after the first steps").rows[1:]
    assert rows[0] == ["peak memory since the resume", "1.0 GB", "1.1 GB", "1.10"]
    assert rows[1][::2] == ["training time since the resume", "2m00s"], "the forecast is of this process"


def test_evaluations_of_steps_that_were_taken_again_are_not_drawn(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text("utf-8").splitlines()]
    given_up = lines[-3] | {"step": 9, "metrics": {"eval_accuracy": 0.0625}}
    again = [line for line in lines if line["event"] == "step" and line["step"] > 6]
    write_lines(
        folder / "run.jsonl", [*lines[:11], lines[-3], given_up, lines[0] | {"resumed_from": 6}, *again, *lines[-2:]]
    )
    assert [*runs.read(folder).evaluations] == [6, 12]
    assert "0.0625" not in _text(folder)


def test_long_and_damaged_lines_move_no_example_to_the_right_ones(folder: Path) -> None:
    long = WRONG[0] | {"text": "word " * (1 << 20)}
    write_errors(folder, [long, WRONG[1], WRONG[2], UNSURE])
    rows = _page(folder).table("3 examples of the validation split that the model gets wrong").rows[1:]
    assert len(rows) == 4
    assert rows[0][1:3] == [WRONG[0]["expected"], WRONG[0]["predicted"]]
    path = folder / "errors.jsonl"
    path.write_text("[]\n" + path.read_text("utf-8").partition("\n")[2], "utf-8")
    text = _text(folder)
    assert "1 of its lines are not JSON objects" in text
    rows = Page(text).table("3 examples of the validation split that the model gets wrong").rows[1:]
    assert ["right, but unsure" in row[2] for row in rows] == [False, False, True]


def test_time_of_each_part_is_summed(folder: Path) -> None:
    rows = _page(folder).table("2m00s of the training, by part").rows[1:]
    assert [row[:3] for row in rows] == [
        ["forward and backward", "1m12s", "60%"], ["update of the weights", "36s", "30%"], ["data", "12s", "10%"],
    ]  # fmt: skip


def test_several_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    first = record_run(tmp_path / "a" / "out")
    second = record_run(tmp_path / "b" / "out", settings=SETTINGS | {"seed": {"value": 7}}, factor=2.0)
    found = _page(first, second)
    assert found.unclosed == []
    assert len(found.ids) == len({*found.ids})
    assert found.table("Settings that differ between the runs.").rows == [
        ["Setting", "a/out", "b/out"], ["seed", "42", "7"],
    ]  # fmt: skip
    assert ["eval_accuracy", "0.7500", "0.7500"] in found.table("Metrics at the end").rows
    assert "a/out: 1.0000 to 0.0833" in found.text
    assert "b/out: 2.0000 to 0.1667" in found.text


def test_folder_of_transformers_trainer_shows_its_log_and_says_what_is_missing(tmp_path: Path) -> None:
    write_trainer_state(tmp_path / "theirs" / "checkpoint-3")
    found = _page(tmp_path / "theirs")
    assert "What transformers' Trainer has logged, up to step 3 of 3." in found.text
    assert ["accuracy", "0.6250", UNKNOWN] in found.table("Metrics at the end").rows
    assert "2.0000 to 0.6667 at step 3" in found.text
    lacks = found.text[found.text.index("What this page lacks") :]
    assert "there is no run.jsonl: whet's commands write it" in lacks
    assert "there is no errors.jsonl" in lacks


@pytest.mark.parametrize("name", ["run.jsonl", "errors.jsonl", "all_results.json", "trainer_state.json",
                                  "eval_confusion.csv"])  # fmt: skip
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\x00[1", b'{"event": "begin", "settings": 3}\n[[[[', b"[" * 100_000]
)
def test_damaged_files_leave_a_page(name: str, content: bytes, folder: Path) -> None:
    write_trainer_state(folder)
    (folder / name).write_bytes(content)
    assert _page(folder).unclosed == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", 1e300, -1, "text", None, [1], {"a": 1}, True])
def test_odd_values_leave_a_page(value: object, tmp_path: Path) -> None:
    forecast = dict.fromkeys(FORECAST, value)
    odd = {"forecast": forecast, "time": value, "machine": {"memory_bytes": value}, "model": value, "command": value}
    odd |= {"auto": {"tried": [{"setting": value, "step_s": value, "peak_bytes": value}, value], "prices": value}}
    folder = record_run(tmp_path / "odd", settings={"seed": {"value": value, "from": value}}, **odd)
    write_errors(folder, [{"row": value, "text": value, "expected": value, "predicted": value, "probability": value,
                           "loss": value}])  # fmt: skip
    (folder / "all_results.json").write_text(json.dumps({"eval_accuracy": value, "train_runtime": value}))
    assert _page(folder).unclosed == []


def test_run_that_has_not_ended_has_a_page(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "running", ends=False)
    with (folder / "run.jsonl").open("a") as file:
        file.write('{"event": "step", "ste')
    assert "No end of the run is recorded: it still runs, or it was killed after step 12 of 12." in _page(folder).text


def test_links_in_the_folder_are_not_followed(folder: Path, tmp_path: Path) -> None:
    secret = write_lines(tmp_path / "elsewhere.jsonl", [WRONG[0] | {"text": "secret words"}])
    (folder / "errors.jsonl").unlink()
    (folder / "errors.jsonl").symlink_to(secret)
    assert "secret words" not in _text(folder)


def test_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the folder holds no files of a run"):
        runs.read(tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        runs.read(tmp_path / "nowhere")


def test_command_writes_the_page_next_to_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'report.html'}\n"
    assert Page((folder / "report.html").read_text("utf-8")).headings[0] == (1, "banking")
    assert run(["report", str(folder)]) == 0  # over a page of its own


def test_command_compares_several_runs_in_the_current_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record_run(tmp_path / "other")
    assert run(["report", "banking"]) == 0
    assert run(["report", "banking", "other"]) == 0
    found = Page((tmp_path / "report.html").read_text("utf-8"))
    assert found.headings[0] == (1, "2 runs")
    assert "./banking/report.html" in found.addresses
    assert run(["report", "banking", "--output", "deep/er/page.html", "other"]) == 0
    assert (tmp_path / "deep" / "er" / "page.html").is_file()


def test_file_that_is_not_a_report_is_not_overwritten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "report.html").write_text("<p>mine</p>")
    assert run(["report", str(folder)]) == 78
    assert "the file is not a report of whet" in capsys.readouterr().err
    assert (folder / "report.html").read_text() == "<p>mine</p>"


def test_command_without_a_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report"]) == 78
    assert "no run is named" in capsys.readouterr().err


@pytest.mark.true_start
def test_command_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = f"""
import sys
from whet.cli.main import run
assert run(["report", {str(folder)!r}]) == 0
print(sorted({{"torch", "transformers", "datasets", "pandas", "matplotlib.pyplot"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def _contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [0, 1], ids=["light", "dark"])
def test_colours_can_be_told_from_their_ground(palette: int) -> None:
    css = page._resource("page.css")
    blocks = [
        dict(re.findall(r"--([\w-]+): (#\w{6})", block)) for block in re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    ]
    colours = blocks[palette]
    assert len(blocks) == 2
    for ground in ("paper", "panel"):
        for ink in ("ink", "muted", "accent", "wrong"):
            assert _contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for n in range(curves.MOST_COLOURS):
        assert _contrast(colours[f"run-{n}"], colours["paper"]) >= 4.5
    for shade in ("accent", "wrong"):
        assert _contrast(colours["ink"], _mixed(colours[shade], colours["paper"], 0.45)) >= 4.5, shade


def _mixed(one: str, other: str, share: float) -> str:
    parts = [(int(one[n : n + 2], 16), int(other[n : n + 2], 16)) for n in (1, 3, 5)]
    return "#" + "".join(f"{round(share * a + (1 - share) * b):02x}" for a, b in parts)
