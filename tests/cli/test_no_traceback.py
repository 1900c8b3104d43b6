"""What a user can cause ends with a message and its exit code: files of a model, folders, limits, damaged packages."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from not_shown import not_shown
from saved_decoder import save_decoder
from text_tasks import examples, save_encoder, topic_rows, words, write_csv
from whet.cli.main import refusal, run
from whet.errors import EXIT_BAD_CONFIG, EXIT_BAD_DATA, EXIT_CANNOT_CREATE, EXIT_IO, EXIT_OTHER


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    save_decoder(folder)
    return folder


def command(
    *asked: object, limit: Callable[[], None] | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """Run whet in a process of its own."""
    line = [sys.executable, "-m", "whet", *map(str, asked)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
    return subprocess.run(
        line, capture_output=True, check=False, env=environment, preexec_fn=limit, timeout=120, **options
    )


def changed(folder: Path, copy: Path, file: str, **settings: Any) -> Path:
    """Return a copy of the model whose file has other settings."""
    shutil.copytree(folder, copy)
    before = json.loads((copy / file).read_text()) if (copy / file).exists() else {}
    (copy / file).write_text(json.dumps(before | settings))
    return copy


OF_CALLS: tuple[dict[str, Any], ...] = (
    {"return_dict": False},
    {"use_return_dict": False},
    {"output_attentions": True},
    {"output_hidden_states": "x"},
    {"torchscript": True},
    {"chunk_size_feed_forward": "x"},
    {"is_encoder_decoder": True},
)


@pytest.mark.parametrize("settings", OF_CALLS, ids=str)
def test_settings_of_what_a_call_returns_do_not_end_a_command(
    settings: dict[str, Any], decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = changed(decoder, tmp_path / "model", "config.json", **settings)
    assert run(["generate", str(model), "--prompt", "the boat", "--max_new_tokens", "4"]) == 0
    found = capfd.readouterr()
    assert next(iter(settings)) in found.err
    assert run(["generate", str(decoder), "--prompt", "the boat", "--max_new_tokens", "4"]) == 0
    assert capfd.readouterr().out == found.out


@pytest.mark.parametrize("task", ["classify", "lm"])
def test_training_is_the_same_with_settings_of_what_a_call_returns(task: str, decoder: Path, tmp_path: Path) -> None:
    folder, losses = decoder, []
    if task == "classify":
        folder = tmp_path / "encoder"
        folder.mkdir()
        save_encoder(folder)
    model = changed(folder, tmp_path / "model", "config.json", return_dict=False, output_attentions=True)
    for number, one in enumerate((folder, model)):
        out = tmp_path / f"out{number}"
        file = examples(task, tmp_path)
        assert (
            run(words(task, one, out, "--do_train", "--do_eval", train_file=file, validation_file=file, max_steps=2))
            == 0
        )
        losses.append(json.loads((out / "eval_results.json").read_text())["eval_loss"])
    assert losses[0] == losses[1]


FAULTS: dict[str, list[dict[str, Any]]] = {
    "config.json": [{"num_labels": 10**12}, {"num_hidden_layers": 10**12}, {"hidden_act": 5}, {"id2label": {"a": 1}},
                    {"eos_token_id": "x"}, {"rope_parameters": []}, {"num_labels": None},
                    {"attention_dropout": 5.0}, {"attention_dropout": None}],
    "tokenizer_config.json": [{"chat_template": [{"name": "../../x", "template": "a"}]}, {"chat_template": 5},
                              {"chat_template": [{"name": "x" * 252, "template": "a"}]}, {"model_max_length": []}],
    "generation_config.json": [{"stop_strings": 3}, {"bad_words_ids": 3}, {"eos_token_id": {}}],
}  # fmt: skip


@pytest.mark.parametrize(("file", "settings"), [(file, one) for file, some in FAULTS.items() for one in some], ids=str)
def test_fault_in_a_file_of_the_model_names_that_file(
    file: str, settings: dict[str, Any], decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also when the tokenizer is what is loaded: it reads config.json too."""
    model = changed(decoder, tmp_path / "model", file, **settings)
    assert run(["generate", str(model), "--prompt", "the boat"]) == EXIT_BAD_CONFIG
    said = capfd.readouterr().err
    assert file in said
    assert ("tokenizer cannot" in said or "tokenizer_config" in said) == (file == "tokenizer_config.json")


def test_generation_stops_at_the_texts_that_the_model_names(
    decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = ["--prompt", "the boat", "--max_new_tokens", "12"]
    assert run(["generate", str(decoder), *asked]) == 0
    written = capfd.readouterr().out
    stop = written.strip()[-8:-5]
    model = changed(decoder, tmp_path / "model", "generation_config.json", stop_strings=[stop])
    assert run(["generate", str(model), *asked]) == 0
    assert len(capfd.readouterr().out) < len(written)


@pytest.mark.parametrize(
    "settings", [{"return_dict_in_generate": True}, {"num_beams": "x"}, {"prompt_lookup_num_tokens": []}]
)
def test_settings_of_other_ways_to_generate_are_left_out_and_named(
    settings: dict[str, Any], decoder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = changed(decoder, tmp_path / "model", "generation_config.json", **settings)
    assert run(["generate", str(model), "--prompt", "the boat", "--max_new_tokens", "2"]) == 0
    assert f"{next(iter(settings))} left out" in capfd.readouterr().err


@pytest.mark.parametrize("flags", [["--prompt", "a\udcffb"], ["--chat", "--prompt", "a\ud800"]])
def test_prompt_that_is_no_text_is_refused(
    flags: list[str], decoder: Path, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    assert run(["generate", str(decoder), *flags]) == EXIT_BAD_CONFIG
    assert "prompt is not UTF-8" in capfd.readouterr().err


def test_question_that_is_no_text_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("the boat")
    assert run(["ask", "model", "--context", str(tmp_path / "text"), "--question", "a\udcff"]) == EXIT_BAD_CONFIG
    assert "question is not UTF-8" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("locale", ["C", pytest.param("C.UTF-8", marks=pytest.mark.night)])
def test_turn_of_a_chat_that_is_no_text_is_refused(locale: str, decoder: Path) -> None:
    done = command("generate", decoder, "--chat", input=b"a\xffb\n", env={"LC_ALL": locale, "PYTHONUTF8": "0"})
    assert done.returncode == EXIT_BAD_DATA, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"a line of standard input is not UTF-8" in done.stderr


def test_launch_names_its_log_folder_before_a_rank_starts(tmp_path: Path) -> None:
    """A file of its name is in the way here; a folder that cannot be written is the same to the launcher."""
    (tmp_path / "launch-logs").write_text("in the way")
    (tmp_path / "job.py").write_text("open('started', 'w')")
    done = command("launch", "--nproc_per_node", 2, "--kept_free_cores", 0, "--", "job.py", cwd=tmp_path)
    assert done.returncode == EXIT_CANNOT_CREATE, done.stderr
    assert b"Traceback" not in done.stderr
    assert b"--log_dir" in done.stderr
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [100, 1050])
def test_too_small_an_address_space_is_refused_in_words(megabytes: int, decoder: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))

    done = command("generate", decoder, "--prompt", "the", "--max_new_tokens", 1, limit=limit)
    assert b"Traceback" not in done.stderr
    assert done.returncode == EXIT_BAD_CONFIG
    assert b"ulimit -v" in done.stderr


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_command_without_memory_names_the_limits(
    error: Exception, decoder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", fails)
    assert run(["generate", str(decoder), "--prompt", "the"]) == EXIT_OTHER
    said = capfd.readouterr().err
    assert "there is not enough memory" in said
    assert "ulimit -v" in said


def test_file_that_the_system_refuses_is_named(
    decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard's folder: only its writer sees that it cannot be made."""
    (tmp_path / "logs").write_text("in the way")
    file = examples("lm", tmp_path)
    asked = words("lm", decoder, tmp_path / "out", "--do_train", train_file=file, max_steps=1,
                  report_to="tensorboard", logging_dir=tmp_path / "logs")  # fmt: skip
    assert run(asked) == EXIT_IO
    assert str(tmp_path / "logs") in capfd.readouterr().err


INCOMPLETE = """
import sys
class Missing:
    def find_spec(self, name, *_):
        if name.startswith("tensorboard."):
            raise {error}
sys.meta_path.insert(0, Missing())
from whet.cli.main import main
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ImportError(name)", "TypeError('Descriptors')"])
def test_incomplete_tensorboard_is_refused_before_the_training(error: str, decoder: Path, tmp_path: Path) -> None:
    file = examples("lm", tmp_path)
    asked = words("lm", decoder, tmp_path / "out", "--do_train", train_file=file, report_to="tensorboard")
    code = INCOMPLETE.format(error=error)
    done = subprocess.run([sys.executable, "-c", code, *asked], capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_BAD_CONFIG, done.stderr
    assert "Traceback" not in done.stderr
    assert "--force-reinstall --no-deps tensorboard" in done.stderr
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.slow
@pytest.mark.reliability
def test_interrupt_is_heard_while_a_long_text_is_tokenised(decoder: Path, tmp_path: Path) -> None:
    """Tokenising 20 million characters is one native call, during which Python runs no handler of signals."""
    (tmp_path / "turn").write_text("a" * 20_000_000 + "\n")
    line = [sys.executable, "-m", "whet", "generate", str(decoder), "--chat"]
    with (tmp_path / "turn").open() as turn:
        process = subprocess.Popen(line, stdin=turn, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = next(one for one in process.stderr if "characters are done" in one)
    assert "0 of 20,0" in said
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 128 + signal.SIGINT
    assert "interrupted" in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize(
    ("words_of", "n_threads"),
    [("classify", 1), pytest.param("classify", 2, marks=pytest.mark.night), ("generate", 1)],
    ids=lambda one: str(one),
)
def test_thread_that_the_user_may_not_start_names_the_limit(
    words_of: str, n_threads: int, decoder: Path, tmp_path: Path
) -> None:
    """A user without a process has as many threads as the limit says; root has no limit."""
    user = ["setpriv", "--reuid", "47011", "--regid", "47011", "--clear-groups"]
    user += ["--inh-caps", "+dac_override", "--ambient-caps", "+dac_override", "--"]
    if shutil.which("setpriv") is None or subprocess.run([*user, "true"], capture_output=True, check=False).returncode:
        not_shown("limits on threads", "no other user can be chosen", "root, and setpriv of util-linux")
    save_encoder(tmp_path / "encoder", positions=128)
    train = write_csv(tmp_path / "train.csv", topic_rows())
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to other users
        Path(folder).chmod(0o777)
        out = Path(folder, "out")
        asked = {
            "classify": words("classify", tmp_path / "encoder", out, "--do_train", train_file=train),
            "generate": ["generate", str(decoder), "--prompt", "a"],
        }[words_of]
        done = subprocess.run(
            [*user, sys.executable, "-m", "whet", *asked], capture_output=True, text=True, check=False, timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": "1", "HOME": folder},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (n_threads, n_threads)),
        )  # fmt: skip
    assert done.returncode == EXIT_OTHER, done.stderr
    assert "Traceback" not in done.stderr
    assert "error: no more threads or processes can be started" in done.stderr
    assert f"ulimit -u: {n_threads}" in done.stderr
    assert "raise the limit on processes (ulimit -u, the pids limit of the container or pod)" in done.stderr


@pytest.mark.parametrize("given", ["TORCHINDUCTOR_CACHE_DIR", "HF_HOME", None])
def test_folder_of_a_cache_that_cannot_be_made_names_its_variable(
    given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the compiler and the hub's client make theirs, in a place that the user chose or in the usual one."""
    monkeypatch.delenv("HF_HOME", raising=False)
    (tmp_path / "file").write_text("mine")
    folder = tmp_path / "file" / ("cache" if given else "torchinductor_me")
    if given:
        monkeypatch.setenv(given, str(folder))
    with pytest.raises(OSError, match="Not a directory") as caught:
        (folder / "aot").mkdir(parents=True)
    refused = refusal(caught.value)
    assert refused is not None
    assert f"in the variable {given or 'TORCHINDUCTOR_CACHE_DIR'}" in refused.problems[0].fix


def test_machine_without_a_temporary_folder_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose file system is read-only: the library looks at each place, and finds none."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)
    with pytest.raises(FileNotFoundError) as caught:
        tempfile.gettempdir()
    refused = refusal(caught.value)
    assert refused is not None
    assert "in the variable TMPDIR" in refused.problems[0].fix
    other = refusal(FileNotFoundError(2, "No such file or directory", "/data/train.json"))
    assert other is not None
    assert "variable" not in other.problems[0].fix
