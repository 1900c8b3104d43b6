"""The rules that every task's run keeps: it has a model, data and something to do."""

from typing import Any

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, at_least, only_with
from whet.errors import MASK, Problem
from whet.jobs.expert_rules import EXPERT_RULES, EXPERT_RUN_RULES
from whet.jobs.fields import JobFields
from whet.jobs.lora.rules import LORA_RULES, LORA_RUN_RULES
from whet.jobs.teacher_rules import TEACHER_RULES, TEACHER_RUN_RULES


def names_a_model(job: JobFields) -> Problem | None:
    """Everything begins with pretrained weights."""
    if job.model_name_or_path.strip():
        return None
    return Problem(
        what="no model is named",
        got="no model_name_or_path",
        why="fine-tuning starts from pretrained weights",
        fix="name a folder or a model of the hub: --model_name_or_path distilbert-base-uncased",
    )


def runs_no_foreign_code(job: JobFields) -> Problem | None:
    """Promise 5 of the design: no code from data."""
    if not job.trust_remote_code:
        return None
    return Problem(
        what="trust_remote_code is true",
        got=True,
        why="whet never runs code that comes with a model or a dataset: it could do anything this user may do",
        fix="leave --trust_remote_code out, and use a model that transformers itself implements",
    )


def token_is_real(job: JobFields) -> Problem | None:
    """What --print_config wrote in place of a token is not a token."""
    if job.token != MASK:
        return None
    return Problem(
        what="the token is masked",
        got=MASK,
        why="--print_config prints this in place of a token, so that none ends up in a file",
        fix="take token out of the config file and set HF_TOKEN, or give --token",
    )


def has_data(job: JobFields) -> Problem | None:
    """No data, no run."""
    if job.dataset_name or _files(job):
        return None
    return Problem(
        what="no data is named",
        got="no dataset_name and no file",
        why="data comes from a dataset of the hub or from files",
        fix="use --dataset_name NAME, or --train_file, --validation_file and --test_file",
    )


def data_from_one_place(job: JobFields) -> Problem | None:
    """The guides' scripts would ignore the files."""
    if not (job.dataset_name and _files(job)):
        return None
    return Problem(
        what="data is named twice",
        got={"dataset_name": job.dataset_name, **_files(job)},
        why="data comes from one dataset or from files, and one of them would be ignored",
        fix=f"keep --dataset_name, or --{' and --'.join(_files(job))}",
    )


def config_of_a_dataset(job: JobFields) -> Problem | None:
    """Files have no configurations."""
    if not job.dataset_config_name or job.dataset_name:
        return None
    return Problem(
        what="dataset_config_name is given without a dataset",
        got=job.dataset_config_name,
        why="it chooses among the configurations of a dataset of the hub",
        fix="leave --dataset_config_name out"
        if _files(job)
        else "add --dataset_name, or leave --dataset_config_name out",
    )


def does_something(job: JobFields, args: TrainingArguments) -> Problem | None:
    """As run_job.py, nothing happens by default."""
    if args.do_train or args.do_eval or args.do_predict:
        return None
    return Problem(
        what="there is nothing to do",
        got="no do_train, do_eval or do_predict",
        why="a run trains, evaluates or predicts only when asked to",
        fix="add --do_train, --do_eval or --do_predict",
    )


def work_has_its_file(work: str, flag: str) -> Rule:
    """Return the rule that work which is asked for has its file, where the data comes from files."""

    def rule(job: JobFields, args: TrainingArguments) -> Problem | None:
        if not getattr(args, work) or job.dataset_name or not _files(job) or getattr(job, flag):
            return None
        return Problem(
            what=f"{work} has no data",
            got=_files(job),
            why=f"with data from files, {work} reads {flag}, which is not given",
            fix=f"add --{flag}, or leave out what asks for it ({_askers(work)})",
        )

    rule.__name__ = f"{work}_has_{flag}"
    return rule


def metrics_are_the_tasks(job: JobFields, args: TrainingArguments) -> Problem | None:
    """A task judges all predictions itself; nobody else is called with them."""
    given = {"eval_do_concat_batches": args.eval_do_concat_batches, "include_for_metrics": args.include_for_metrics}
    changed = {name: value for name, value in given.items() if value not in (True, ())}
    if not changed:
        return None
    return Problem(
        what=f"{' and '.join(changed)} would change nothing here",
        got=changed,
        why="it says what a compute_metrics of your own gets, and this command computes its task's own metrics",
        fix=f"leave {' and '.join(f'--{name}' for name in changed)} out, or use whet.Trainer with compute_metrics",
    )


def profile_has_steps(job: JobFields, args: TrainingArguments) -> Problem | None:
    """A run without training has none."""
    if not args.profile or args.do_train:
        return None
    return Problem(
        what="profile has nothing to look at",
        got="profile without do_train",
        why="it shows where the time of training steps goes",
        fix="add --do_train, or leave --profile out",
    )


def seeds_are_compared(job: JobFields, args: TrainingArguments) -> Problem | None:
    """The best of several models is the one with the best evaluation."""
    if job.seeds <= 1 or (args.do_train and args.do_eval):
        return None
    missing = [f"--{work}" for work in ("do_train", "do_eval") if not getattr(args, work)]
    data = "" if job.dataset_name or job.validation_file or args.do_eval else " --validation_file FILE"
    return Problem(
        what="seeds has no evaluation to choose by" if args.do_train else "seeds has nothing to train",
        got=f"seeds={job.seeds} without {' and '.join(missing)}",
        why="each seed trains a model, and the one with the best evaluation is kept",
        fix=f"add {' '.join(missing)}{data}, or leave --seeds out",
    )


def seeds_resume_together(job: JobFields, args: TrainingArguments) -> Problem | None:
    """A checkpoint belongs to one seed."""
    if job.seeds <= 1 or args.resume_from_checkpoint in (None, "auto"):
        return None
    return Problem(
        what="resume_from_checkpoint names one checkpoint, and seeds trains several models",
        got=f"seeds={job.seeds}, resume_from_checkpoint={args.resume_from_checkpoint}",
        why="seeds that have finished are kept, and the others resume from their own newest checkpoints",
        fix="use --resume_from_checkpoint auto",
    )


def spans_are_of_answers(job: JobFields, args: TrainingArguments) -> Problem | None:
    """For tasks without answers: reported before the data is read."""
    if args.span_loss == "independent":
        return None
    return Problem(
        what=f"span_loss {args.span_loss} is for question answering",
        got=args.span_loss,
        why="it is a loss of the start and the end of an answer, and this command trains another head",
        fix="leave --span_loss out",
    )


def _files(job: JobFields) -> dict[str, str]:
    named = {"train_file": job.train_file, "validation_file": job.validation_file, "test_file": job.test_file}
    return {name: path for name, path in named.items() if path}


def _askers(work: str) -> str:
    return "--do_eval, --eval_strategy, --eval_on_start" if work == "do_eval" else f"--{work}"


def windows_move_on(spans: Any) -> Problem | None:
    """Windows that overlap fully would never reach the end of the context."""
    if None in (spans.doc_stride, spans.max_seq_length) or spans.doc_stride < spans.max_seq_length:
        return None
    return Problem(
        what="doc_stride is not below max_seq_length",
        got=f"doc_stride={spans.doc_stride}, max_seq_length={spans.max_seq_length}",
        why="windows of max_seq_length tokens share doc_stride tokens, so at least one must be new",
        fix=f"use a --doc_stride below {spans.max_seq_length}, or a larger --max_seq_length",
    )


def lora_trains(job: JobFields, args: TrainingArguments) -> Problem | None:
    """An adapter that has not been trained changes nothing."""
    if job.lora_r is None or args.do_train:
        return None
    return Problem(
        what="lora_r has nothing to train",
        got=f"lora_r={job.lora_r} without do_train",
        why="a new adapter changes nothing before it is trained",
        fix="add --do_train; to evaluate a trained adapter, merge it first: whet merge FOLDER --output_dir MERGED; or "
        "write its predictions: whet predict FOLDER --file FILE",
    )


def new_rows_are_trained(job: JobFields, args: TrainingArguments) -> Problem | None:
    """Rows of new tokens mean nothing before they are trained."""
    if not job.resize_token_embeddings or args.do_train:
        return None
    return Problem(
        what="resize_token_embeddings has nothing to train",
        got="resize_token_embeddings=True without do_train",
        why="rows for new tokens begin without a meaning, and only a training gives them one",
        fix="add --do_train, or leave --resize_token_embeddings out",
    )


def lora_dropout_is_a_probability(job: JobFields) -> Problem | None:
    """It is that of a value to be dropped."""
    if 0 <= job.lora_dropout < 1:
        return None
    return Problem(
        what="lora_dropout is not a probability",
        got=job.lora_dropout,
        why="each value is dropped with it, and some have to stay",
        fix="use a --lora_dropout from 0 up to 1, such as 0.05",
    )


JOB_RULES: tuple[Rule, ...] = (
    at_least("seeds", 1, "a run trains one model at least"),
    names_a_model,
    runs_no_foreign_code,
    token_is_real,
    has_data,
    data_from_one_place,
    config_of_a_dataset,
    only_with(
        "splits_are_of_a_dataset",
        "dataset_name",
        ("train_split_name", "validation_split_name", "test_split_name"),
        why="they name the splits of a dataset of the hub, and files have none",
        fix="add --dataset_name, or leave them out",
    ),
    at_least("lora_r", 1, "a pair of matrices of rank 0 is nothing"),
    at_least("lora_alpha", 1, "the pairs' results are multiplied by it"),
    lora_dropout_is_a_probability,
    only_with(
        "lora_is_on",
        "lora_r",
        ("lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora"),
        why="they say how an adapter learns, and no adapter is asked for",
        fix="add --lora_r 16, or leave them out",
    ),
    *LORA_RULES,
    *EXPERT_RULES,
    *TEACHER_RULES,
    at_least("max_train_samples", 1, "training on no row is no training"),
    at_least("max_eval_samples", 1, "an evaluation of no row has no result"),
    at_least("max_predict_samples", 1, "predicting for no row gives nothing"),
    at_least("preprocessing_num_workers", 1, "one thread does the work at least"),
)
JOB_RUN_RULES: tuple[Rule, ...] = (
    does_something,
    new_rows_are_trained,
    lora_trains,
    *LORA_RUN_RULES,
    *EXPERT_RUN_RULES,
    *TEACHER_RUN_RULES,
    metrics_are_the_tasks,
    seeds_are_compared,
    seeds_resume_together,
    profile_has_steps,
    work_has_its_file("do_train", "train_file"),
    work_has_its_file("do_eval", "validation_file"),
    work_has_its_file("do_predict", "test_file"),
)
