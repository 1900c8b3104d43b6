"""What a task is: what its run consists of, and how a model that it has trained predicts.

Nothing that a run is asked for is ignored. A task names in `takes` what it honours of `HONOURED_BY_CALLS` and
`HONOURED_BY_LOSSES`; the others are refused before any work. Whether its functions do honour a setting, one of these or
one that every task honours, is checked when they have run: a setting that they have not read ends the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, is_set
from whet.config.settings import broken, options_of, spec_of
from whet.errors import ConfigError, Problem
from whet.jobs.fields import JobFields
from whet.jobs.rules import JOB_RUN_RULES, best_metric_among
from whet.jobs.splits import SPLITS
from whet.models.loading.heads import Head

if TYPE_CHECKING:
    from whet.jobs.predict.arguments import PredictArguments

HONOURED_BY_CALLS = ("resize_token_embeddings", "lora_r", "moe_experts", "teacher_model", "preprocessing_num_workers")
"""Settings that `prepare` honours by calls: `load_tokenizer` and `adapted` (`jobs.lora.adapt`), `require_reads` and
`taught` (`jobs.teacher`), and the threads that it gives to `jobs.tokenising`."""
HONOURED_BY_LOSSES = ("label_smoothing_factor", "span_loss")
"""Settings that some losses honour: those of one class in the column labels, and of answers."""
_BY_READERS = ("dataset_name", "dataset_config_name", "skip_bad")
"""Settings that `read` honours, next to those of its split."""
_BY_PREPARE = ("config_name", "tokenizer_name", "cache_dir", "model_revision", "token", "overwrite_cache")
"""Settings that `prepare` honours, next to those in `takes`."""

_BY_PREDICT = (
    *("model", "file", "output", "skip_bad", "max_predict_samples"),
    *("per_device_eval_batch_size", "precision"),
)
"""Options of `whet predict` that each task honours."""


class Needs(NamedTuple):
    """What an option of `whet predict` changes nothing without: another option, or that setting of the training."""

    option: str
    why: str


IN_WINDOWS: Mapping[str, Needs | None] = {
    "doc_stride": None,
    "window_pooling": Needs(
        "doc_stride", "it joins the predictions of the windows of a text, and without doc_stride a text has one"
    ),
}
"""For `predict_takes`: long texts are cut into windows."""
Shown = Mapping[str, tuple[str, str]]
"""Name of a metric -> the words for it, and the format of its value."""
_TRAINING_SHOWN: Shown = {
    "train_runtime": ("training", "{:,.1f} s"),
    "train_samples_per_second": ("rows a second", "{:,.2f}"),
    "train_tokens_per_second": ("real tokens a second", "{:,.0f}"),
    "train_padding_avoided": ("padding avoided", "{:.0%}"),
    "train_loss": ("mean training loss", "{:.4f}"),
    "eval_runtime": ("evaluation", "{:,.1f} s"),
}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a task is; `job` is its settings. The functions import what they need when they are called (`lazily`)."""

    name: str
    """That of its command, and of the task in the file next to a trained model (`jobs.predict.trained`)."""
    head: Head
    """The head that its models are loaded with."""
    rules: Sequence[Rule] = ()
    """What is checked between the settings of the task and those of the training, besides `JOB_RUN_RULES`."""
    read: Callable[[Any, str], Any]
    """Returns the examples of a split: called with `job` and its name. Does not import torch. `examples` calls it."""
    takes: Sequence[str] = ()
    """What it honours of `HONOURED_BY_CALLS` and `HONOURED_BY_LOSSES`; the others are refused."""
    prepare: Callable[[Any, TrainingArguments, Mapping[str, Any]], Any]
    """Returns the TaskRun over these examples, by split. `begin` calls it."""
    sample: Callable[[Any, int], tuple[str, str]] | None = None
    """Returns a file of so many examples that fill the rows which `job` allows: its suffix and its text. None: a plan
    needs data."""
    predict: Callable[[PredictArguments, Mapping[str, Any]], int] | None = None
    """Writes the predictions that `whet predict` asks for; returns the exit code. Its second argument is the `reading`
    of the run that trained the model, empty for a model that was trained elsewhere. None: it has nothing to predict."""
    metrics: Callable[[Any], Sequence[str]]
    """Returns the metrics that evaluations with these settings may compute, the usual one first."""
    shown: Shown
    """The metrics of the table at the end, after those of the training; a metric of these gets other words."""
    judged_by: Sequence[str]
    """The metrics that a model is judged by, if the settings name none: the first that an evaluation has."""
    lower_is_better: bool = False
    """Whether the smallest of this metric is the best."""
    by_engine: bool = True
    """Whether whet's engine trains its models; else a library's trainer does, of which no plan is made."""
    may_change: Collection[str] | None = None
    """The names in `resume_allow_changes` whose change its trainer carries out; None: all, and others are refused."""
    predict_takes: Mapping[str, Needs | None] = field(default_factory=dict)
    """The options of `whet predict` that `predict` honours besides those that each task does, with what they need; the
    others are refused."""
    knows: Callable[[Path], bool] = lambda _: False
    """Returns whether this folder holds a model of the task that the name of its class does not tell."""
    tables: Callable[[Any], Sequence[str]] = lambda _: ()
    """Returns lines of its own that follow this table, from the TaskRun that has run; the worst errors come after."""

    @property
    def table(self) -> Shown:
        """The metrics of the table at the end."""
        return {**_TRAINING_SHOWN, **self.shown}

    def problems(self, job: Any, args: TrainingArguments) -> list[Problem]:
        """Return the problems between the settings of the task and those of the training."""
        metrics = self.metrics(job)
        assert any(name in metrics for name in self.judged_by), f"whet {self.name} is judged by none of its metrics"
        some = (*HONOURED_BY_CALLS, *HONOURED_BY_LOSSES)
        refused = [name for name in some if name not in self.takes and is_set(name, job, args)]
        rules = (*JOB_RUN_RULES, best_metric_among(self.metrics), *self.rules)
        problems = [self._ignores(refused, job, args)] if refused else []
        return [*problems, *self._kept(args), *broken(rules, job, args)]

    def _kept(self, args: TrainingArguments) -> list[Problem]:
        """Return the problem of settings that a resumed run would take from the checkpoint, whatever is allowed."""
        known = self.may_change
        if known is None or not (kept := [name for name in args.resume_allow_changes if name not in known]):
            return []
        return [
            Problem(
                what=f"a run of whet {self.name} cannot resume with another {' and another '.join(kept)}",
                got=f"resume_allow_changes={','.join(args.resume_allow_changes)}",
                why=f"its trainer would go by the checkpoint; what may change is {', '.join(known)}",
                fix=f"leave {' and '.join(kept)} out of --resume_allow_changes; or start a new run in another "
                "--output_dir",
            )
        ]

    def unread(self, asked: PredictArguments, reading: Mapping[str, Any]) -> list[Problem]:
        """Return the problems of options of `whet predict` that change nothing for a model with this reading."""
        options = options_of(type(asked))
        given = {
            name: getattr(asked, name)
            for name, option in options.items()
            if name not in _BY_PREDICT and getattr(asked, name) != option.default
        }
        odd = {name: value for name, value in given.items() if name not in self.predict_takes}
        flags = " and ".join(f"--{name}" for name in odd)
        problems = []
        if odd:
            problems.append(
                Problem(
                    what=f"{' and '.join(odd)} would change nothing here",
                    got=odd,
                    why=f"predictions of a model that whet {self.name} trains do not depend on {flags}",
                    fix=f"leave {flags} out",
                )
            )
        for name, value in given.items():
            needs = self.predict_takes.get(name)
            if needs is None or getattr(asked, needs.option) is not None or reading.get(needs.option) is not None:
                continue
            problems.append(
                Problem(
                    what=f"{name} would change nothing without {needs.option}",
                    got=value,
                    why=needs.why,
                    fix=f"add --{needs.option}, or leave --{name} out",
                )
            )
        return problems

    def examples(self, job: Any, split: str) -> Any:
        """Return the examples of the split `train`, `validation` or `test`."""
        of_split = SPLITS[split]
        with self._reading(job, (*_BY_READERS, of_split.file, of_split.of_dataset, of_split.limit)) as seen:
            return self.read(seen, split)

    def begin(self, job: Any, args: TrainingArguments, examples: Mapping[str, Any]) -> Any:
        """Return the TaskRun over these examples, whose new weights are those of the run's seed.

        Refuses a resume with changed settings first.
        """
        from transformers import set_seed

        from whet.store import restore

        restore.check_early(args, self.may_change)
        set_seed(args.seed)
        with self._reading(job, (*_BY_PREPARE, *self.takes)) as seen:
            made = self.prepare(seen, args, examples)
        made.reading = {"task": self.name, **made.reading}
        return made

    @contextmanager
    def _reading(self, job: Any, names: Sequence[str]) -> Iterator[Any]:
        """Yield these settings; raise ConfigError if one of `names` is set and has not been read by the end."""
        read: set[str] = set()
        yield _followed(job, read)
        if left := [name for name in names if hasattr(job, name) and name not in read and is_set(name, job)]:
            raise ConfigError.of([self._ignores(left, job)])

    def _ignores(self, names: Sequence[str], *settings: Any) -> Problem:
        given = {name: one for one in settings for name in names if hasattr(one, name)}
        flags = " and ".join(f"--{name}" for name in names)
        return Problem(
            what=f"{' and '.join(names)} would change nothing here",
            got={name: options_of(type(one))[name].shown(getattr(one, name)) for name, one in given.items()},
            why=f"whet {self.name} does not do what {flags} asks for",
            fix=f"leave {flags} out",
        )

    def lines(self, run: Any) -> list[str]:
        """Return the lines that follow the table at the end, from the TaskRun that has run."""
        return [*self.tables(run), *run.worst]

    def best_by(self, metrics: Mapping[str, float], args: TrainingArguments) -> tuple[str, bool]:
        """Return which of the metrics of an evaluation the best model is chosen by, and whether more is better."""
        wanted = args.metric_for_best_model
        if wanted is None:
            return next(name for one in self.judged_by if (name := f"eval_{one}") in metrics), not self.lower_is_better
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name not in metrics:
            raise ConfigError(
                what="metric_for_best_model names no metric of the evaluation",
                got=wanted,
                why=f"the evaluation computed {', '.join(one for one in metrics if one.startswith('eval_'))}",
                fix="use one of these in --metric_for_best_model",
            )
        return name, bool(args.greater_is_better)


def _followed(job: JobFields, read: set[str]) -> Any:
    """Return equal settings that add the name of each field to `read` when it is read."""
    cls = type(job)

    def getattribute(self: Any, name: str) -> Any:
        read.add(name)
        return object.__getattribute__(self, name)

    content = {"__slots__": (), "__getattribute__": getattribute, "__whet_spec__": spec_of(cls)}
    followed = object.__new__(type(cls.__name__, (cls,), content))
    for one in fields(cls):
        object.__setattr__(followed, one.name, getattr(job, one.name))
    return followed


def words(n: int) -> str:
    """Return so many words, each at least a token: a made-up text."""
    return " ".join(["text"] * n)


def lazily(task: str, module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports `name` of a module next to `task` when it is called: it loads torch.

    `task` is the `__name__` of a task's task.py.
    """
    folder = task.rpartition(".")[0]

    def call(*given: Any) -> Any:
        return getattr(import_module(f"{folder}.{module}"), name)(*given)

    return call
