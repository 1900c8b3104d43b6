"""What `--auto` takes, next to twelve settings picked by hand, under a limit that kills what needs more memory.

    python benchmarks/plan/auto.py                                       # 6 jobs: hours on two cores
    python benchmarks/plan/auto.py --jobs minilm-classify --settings 4   # one job next to four settings: minutes

The models have random weights and a vocabulary of made-up words, so that nothing is downloaded. Every run is a command
of its own. The settings run once for three steps without a limit, which tells what each of them holds. Then everything
runs in a cgroup whose limit lies between the one that holds least and the one that holds most: the kernel ends what is
above it. That takes root, as in a container. The time of a step is the mean from the third step to the last, on the
same rows for all. At the end `--auto` and the fastest by hand run in turn, and the median of these counts, since the
fastest of twelve is also the one with the most luck. Trials of `--auto` do not count: its first run makes them, the
others take the choice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import machine
from limited import Limited
from made_up import BERT_BASE, LLAMA, MINILM, VOCABULARY, word, write_model

RESULTS = Path(__file__).with_name("auto.json")
N_ROWS = 1200
_FIRST = 2
"""The mean begins after this step: the first ones make the optimizer's state and fill caches."""
_ABOVE = 1.2
"""The limit lies so far above the least: of what is free, --auto leaves a tenth for what a forecast does not know."""
MODELS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "minilm": ("bert", MINILM), "bert-base": ("bert", BERT_BASE),
    "llama": ("llama", {**LLAMA, "num_hidden_layers": 12}),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A training: a task, a model, rows of a step, and lengths in words."""

    name: str
    task: str
    model: str
    rows: int
    words: tuple[int, int]
    options: tuple[str, ...] = ()


JOBS = (
    Job("minilm-classify", "classify", "minilm", 128, (8, 48), ("--max_seq_length", "64")),
    Job("minilm-qa", "qa", "minilm", 32, (120, 300), ("--max_seq_length", "320", "--doc_stride", "64")),
    Job("bert-classify", "classify", "bert-base", 8, (60, 250), ("--max_seq_length", "256")),
    Job("minilm-tag", "tag", "minilm", 128, (10, 60), ("--max_seq_length", "128")),
    Job("llama-lm", "lm", "llama", 16, (60, 300), ("--max_length", "256")),
    Job("llama-lora", "lm", "llama", 16, (60, 300), ("--max_length", "256", "--lora_r", "16")),
)


@dataclass(frozen=True)
class Setting:
    """How somebody might set a run by hand."""

    split: int
    """Micro-batches of a step."""
    checkpointing: str | None
    threads: int | None
    """None: torch's own number."""

    @property
    def name(self) -> str:
        """The setting in words."""
        parts = [f"1/{self.split}", self.checkpointing or "no checkpointing"]
        return ", ".join([*parts, f"{self.threads} threads" if self.threads else "all threads"])

    def flags(self, job: Job) -> list[str]:
        """Return its flags."""
        found = ["--per_device_train_batch_size", str(job.rows // self.split)]
        found += ["--gradient_accumulation_steps", str(self.split)]
        if self.checkpointing:
            found += ["--gradient_checkpointing", "true", "--checkpointing_policy", self.checkpointing]
        return found


def by_hand() -> list[Setting]:
    """Return the twelve settings."""
    half = max((os.cpu_count() or 2) // 2, 1)
    return [Setting(*one) for one in product((1, 2, 4), (None, "selective"), (None, half))]


@dataclass
class Line:
    """What came of one setting, or of --auto."""

    name: str
    step_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    failed: str = ""
    """How the run ended early: by the kernel's signal, by whet's error or guard, or the last line that it wrote."""
    n_killed: int = 0
    """Processes of it that the kernel has ended for want of memory, trials included."""
    final_s: list[float] = field(default_factory=list)
    """Of `--auto` and the fastest by hand: the times of the runs in which these two alone took turns."""

    @property
    def best_s(self) -> float:
        """The best time of a step; infinite if it did not run."""
        return min(self.step_s, default=float("inf"))

    def add(self, step_s: float | None, *, final: bool = False) -> None:
        """Take up a run's time of a step; None: it ended early."""
        if step_s is not None:
            (self.final_s if final else self.step_s).append(step_s)


def make_model(folder: Path, name: str) -> None:
    """Write a model without a head of a task."""
    kind, sizes = MODELS[name]
    auto = "AutoModelForCausalLM" if kind == "llama" else "AutoModel"
    write_model(folder / name, kind, sizes, auto, n_positions=512)


def write_rows(path: Path, job: Job) -> None:
    """Write the examples of a job."""
    numbers = random.Random(job.name)

    def example(n: int) -> dict[str, Any]:
        words = [word(numbers.randrange(VOCABULARY - 5)) for _ in range(numbers.randint(*job.words))]
        text = " ".join(words)
        if job.task == "tag":
            return {"tokens": words, "ner_tags": ["O" if k % 5 else "B-X" for k in range(len(words))]}
        if job.task == "qa":
            answers = {"text": [words[3]], "answer_start": [text.index(words[3])]}
            return {"id": str(n), "question": " ".join(words[:8]), "context": text, "answers": answers}
        return {"text": text} | ({} if job.task == "lm" else {"label": "ab"[n % 2]})

    path.write_text("".join(json.dumps(example(n)) + "\n" for n in range(N_ROWS)), "utf-8")


def why(said: str) -> str:
    """Return what an output says about its end: whet's error, or the last line before the command that resumes."""
    lines = said.partition("\nwhet: continue with")[0].splitlines() or [""]
    errors = (line.removeprefix("error: ") for line in lines if line.startswith("error: "))
    return next(errors, lines[-1].removeprefix("whet: "))


def limit_of(peaks: Sequence[int]) -> int:
    """Return the limit under which the settings that hold most are ended, in bytes.

    It is a third of the way from the least to the most, or higher. Where all hold nearly the same, nothing is to be
    told apart: the limit is then above them all.
    """
    least, most = min(peaks), max(peaks)
    return max(least + (most - least) // 3, int(_ABOVE * least))


@dataclass(frozen=True)
class Bench:
    """Runs a job's settings, each in a process of its own, in a cgroup where there is one."""

    job: Job
    folder: Path
    steps: int
    budget_s: float
    cgroup: Limited | None = None

    def auto(self, line: Line, *, again: bool = False) -> float | None:
        """Run with `--auto`; `again`: try the settings, whatever an earlier run has found."""
        flags = ["--auto", "--auto_budget_s", str(self.budget_s), *(["--auto_again", "true"] if again else [])]
        return self._run(line, [*flags, *Setting(1, None, None).flags(self.job)], None)

    def by_hand(self, line: Line, setting: Setting) -> float | None:
        """Run with a setting by hand."""
        return self._run(line, setting.flags(self.job), setting.threads)

    def _run(self, line: Line, flags: Sequence[str], threads: int | None) -> float | None:
        """Return the time of a step in seconds, or None if the run ended early: the line then says why."""
        job, out = self.job, self.folder / "out"
        words = [
            sys.executable, "-m", "whet", job.task, "--model_name_or_path", str(self.folder / job.model), "--do_train",
            "--train_file", str(self.folder / f"{job.name}.jsonl"), "--output_dir", str(out), "--overwrite_output_dir",
            "--use_cpu", "--save_strategy", "no", "--logging_steps", "1", "--report_html", "false", *job.options,
            *flags, "--max_steps", str(self.steps),
        ]  # fmt: skip
        environment = {**os.environ, "XDG_CACHE_HOME": str(self.folder / "cache"), "HF_HUB_OFFLINE": "1"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        join = self.cgroup.join if self.cgroup else None
        n_killed = self.cgroup.n_killed if self.cgroup else 0
        with (self.folder / "output.txt").open("w") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=subprocess.STDOUT, preexec_fn=join)
            _, status, usage = os.wait4(process.pid, 0)
        said = (self.folder / "output.txt").read_text().strip()
        line.n_killed += self.cgroup.n_killed - n_killed if self.cgroup else 0
        if status:
            ended = f"by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else why(said)
            ended = re.sub(r"the cgroup /\S+", "the cgroup", ended.replace(f"{self.folder}/", ""))
            line.failed = ended or f"with status {status}"
            return None
        if "--auto" in flags and "\nauto  " in f"\n{said}":
            print(f"\n{said}"[f"\n{said}".index("\nauto  ") :].partition("\nmodel")[0], flush=True)
        events = [json.loads(text) for text in (out / "run.jsonl").read_text().splitlines()]
        last = max(n for n, event in enumerate(events) if event["event"] == "begin")  # an earlier run wrote there too
        times = {event["step"]: event["time"] for event in events[last:] if event["event"] == "step"}
        line.peak_bytes = max(line.peak_bytes, usage.ru_maxrss * 1024)
        return (times[self.steps] - times[_FIRST]) / (self.steps - _FIRST)


def compare(bench: Bench, settings: Sequence[Setting], repeats: int, finals: int) -> tuple[int, list[Line]]:
    """Return the limit in bytes and what came of `--auto`, in the first line, and of each setting by hand."""
    auto, hand = Line("--auto"), [Line(one.name) for one in settings]
    short = replace(bench, steps=_FIRST + 1)
    for setting, line in zip(settings, hand, strict=True):
        if short.by_hand(line, setting) is None:
            raise SystemExit(f"{line.name}, without a limit, ended {line.failed}")
    limit = limit_of([line.peak_bytes for line in hand])
    with Limited(limit) as cgroup:
        bench = replace(bench, cgroup=cgroup)
        for repeat in range(repeats):
            auto.add(bench.auto(auto, again=repeat == 0))
            for setting, line in zip(settings, hand, strict=True):
                if not line.failed:
                    line.add(bench.by_hand(line, setting))
        best = min(hand, key=lambda line: line.best_s)
        if best.step_s and not auto.failed:
            setting = settings[hand.index(best)]
            for _ in range(finals):
                auto.add(bench.auto(auto), final=True)
                best.add(bench.by_hand(best, setting), final=True)
    return limit, [auto, *hand]


def main() -> None:
    """Run the jobs, print a table of each, and store it if no setting was left out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=[one.name for one in JOBS], choices=[one.name for one in JOBS])
    parser.add_argument("--settings", type=int, default=12, help="only so many of the twelve settings by hand")
    parser.add_argument("--steps", type=int, default=12, help="of each run")
    parser.add_argument("--repeats", type=int, default=2, help="runs of each setting under the limit")
    parser.add_argument("--finals", type=int, default=3, help="runs of --auto and the fastest by hand, in turn")
    parser.add_argument("--budget_s", type=float, default=60.0, help="for the trials of --auto")
    parser.add_argument("--folder", type=Path, help="keep the models and the cache here")
    asked = parser.parse_args()
    hand = by_hand()[: asked.settings]
    with tempfile.TemporaryDirectory(prefix="whet-bench-auto-") as made:
        folder = asked.folder or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for job in (one for one in JOBS if one.name in asked.jobs):
            if not (folder / job.model).exists():
                make_model(folder, job.model)
            write_rows(folder / f"{job.name}.jsonl", job)
            limit, lines = compare(Bench(job, folder, asked.steps, asked.budget_s), hand, asked.repeats, asked.finals)
            show(job, lines, limit)
            if len(hand) == len(by_hand()):
                store(job, lines, limit)


def store(job: Job, lines: Sequence[Line], limit: int) -> None:
    """Keep what came of a job, next to the other jobs."""
    kept = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    kept[job.name] = {"machine": machine.facts(), "limit_bytes": limit, "lines": [asdict(line) for line in lines]}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


def show(job: Job, lines: Sequence[Line], limit: int) -> None:
    """Print what came of a job: --auto next to the best by hand, and what the limit has ended."""
    auto, *hand = lines
    best = min(hand, key=lambda line: line.best_s)
    ratio = f"{auto.best_s / best.best_s:.2f} of the best by hand" if best.step_s else "nothing by hand fits"
    print(f"\n{job.name}: --auto {auto.best_s:.3f} s a step, {ratio}")
    rival = next((line for line in hand if line.final_s), None)
    if rival and auto.final_s:
        ours, theirs = median(auto.final_s), median(rival.final_s)
        print(f"  in turn: --auto {ours:.3f} s, {rival.name} {theirs:.3f} s; ratio {ours / theirs:.2f}")
    for line in sorted(lines, key=lambda line: line.best_s):
        taken = f"{line.best_s:8.3f} s {line.peak_bytes / 1e9:6.2f} GB" if line.step_s else f"ended {line.failed[:60]}"
        killed = f"  ({line.n_killed} killed)" if line.n_killed else ""
        print(f"  {line.name:<40}{taken}{killed}", flush=True)
    print(f"  limit of the cgroup: {limit / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
