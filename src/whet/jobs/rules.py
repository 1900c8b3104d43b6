"""The rules that every task's run keeps: on its model, data and work, its adapter, its experts and its teacher."""

import math
from collections.abc import Collection
from typing import Any

from whet.config import recipes
from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, at_least, only_with
from whet.errors import MASK, Problem
from whet.jobs.fields import HONOURED_BY_CALLS, JobFields


def top_k_is_1_or_2(job: JobFields) -> Problem | None:
    """With more, a sparse layer costs as much as a wider dense one."""
    if job.moe_top_k in (1, 2):
        return None
    return Problem(
        what="moe_top_k is neither 1 nor 2",
        got=job.moe_top_k,
        why="whet routes a token to its best expert, or to its two best",
        fix="use --moe_top_k 1, or --moe_top_k 2",
    )


def factors_are_numbers(job: JobFields) -> Problem | None:
    """A negative weight would make the balance worse, and no expert can take less than nothing."""
    weights = {name: getattr(job, name) for name in ("moe_aux_loss_coef", "moe_z_loss_coef")}
    wrong = {name: value for name, value in weights.items() if not (math.isfinite(value) and value >= 0)}
    factor = job.moe_capacity_factor
    if factor is not None and not (math.isfinite(factor) and factor > 0):
        wrong["moe_capacity_factor"] = factor
    if not wrong:
        return None
    return Problem(
        what=f"{' and '.join(wrong)} cannot be used",
        got=wrong,
        why="weights of losses are numbers from 0 up, a capacity is larger than 0",
        fix="use --moe_aux_loss_coef 0.01 --moe_z_loss_coef 0.001 --moe_capacity_factor 1.25, or leave them out",
    )


def experts_are_trained(job: JobFields, args: TrainingArguments) -> Problem | None:
    """New experts are all alike."""
    if job.moe_experts is None or args.do_train:
        return None
    return Problem(
        what="moe_experts has nothing to train",
        got=f"moe_experts={job.moe_experts} without do_train",
        why="new experts are copies of one part, and change nothing before they are trained",
        fix="add --do_train; a folder with experts is evaluated without --moe_experts",
    )


def experts_keep_their_blocks(job: JobFields, args: TrainingArguments) -> Problem | None:
    """New weights for the last blocks would not reach their experts."""
    if job.moe_experts is None or not args.reinit_layers or recipes.sets(args, "reinit_layers"):
        return None
    return Problem(
        what="reinit_layers does not go with moe_experts",
        got=f"reinit_layers={args.reinit_layers}, moe_experts={job.moe_experts}",
        why="experts begin as copies of pretrained weights, and reinit_layers drops these",
        fix="leave --reinit_layers or --moe_experts out",
    )


def experts_are_not_compiled(job: JobFields, args: TrainingArguments) -> Problem | None:
    """The number of tokens of an expert is known only when it runs."""
    if job.moe_experts is None or not args.torch_compile:
        return None
    return Problem(
        what="torch_compile does not go with moe_experts",
        got=f"torch_compile={args.torch_compile}, moe_experts={job.moe_experts}",
        why="a graph would be compiled again for each number of tokens that an expert gets",
        fix="leave --torch_compile out: the products of experts are native without it",
    )


def experts_see_all_tokens(job: JobFields, args: TrainingArguments) -> Problem | None:
    """Reported before anything is tokenised; a folder that has experts is found when it is loaded."""
    if job.moe_experts is None or not args.cache_frozen_trunk:
        return None
    return Problem(
        what="cache_frozen_trunk does not go with moe_experts",
        got=f"cache_frozen_trunk=True, moe_experts={job.moe_experts}",
        why="the balance of experts is that of all tokens in all blocks, and frozen blocks would not run",
        fix="leave --cache_frozen_trunk or --moe_experts out",
    )


EXPERT_RULES: tuple[Rule, ...] = (
    at_least("moe_experts", 2, "a token is routed to its best experts of several"),
    at_least("moe_every", 1, "blocks are counted from 1"),
    top_k_is_1_or_2,
    factors_are_numbers,
    only_with(
        "experts_are_asked_for",
        "moe_experts",
        ("moe_top_k", "moe_every", "moe_capacity_factor", "moe_aux_loss_coef", "moe_z_loss_coef"),
        why="they say how experts are used, and none are asked for",
        fix="add --moe_experts 8, or leave them out",
    ),
)
EXPERT_RUN_RULES: tuple[Rule, ...] = (
    experts_are_trained,
    experts_keep_their_blocks,
    experts_are_not_compiled,
    experts_see_all_tokens,
)


def one_number_of_bits(job: JobFields) -> Problem | None:
    """A weight has one form."""
    if not (job.load_in_8bit and job.load_in_4bit):
        return None
    return Problem(
        what="load_in_8bit and load_in_4bit are both asked for",
        got="load_in_8bit=True, load_in_4bit=True",
        why="a frozen weight is kept in one form",
        fix="keep --load_in_8bit, which is more exact, or --load_in_4bit, which takes less memory",
    )


def rounded_weights_stay_as_they_are(job: JobFields) -> Problem | None:
    """DoRA reads the lengths of exact columns, and experts are weights of their own kind."""
    odd = {"use_dora": job.use_dora or None, "moe_experts": job.moe_experts}
    given = {name: value for name, value in odd.items() if value is not None}
    if (asked := _asked(job)) is None or not given:
        return None
    return Problem(
        what=f"{asked} does not go with {' and '.join(given)}",
        got=given,
        why="DoRA measures the columns of the exact weights in each step, and new experts are trained completely",
        fix=f"leave --{asked} out, or {' and '.join(f'--{name}' for name in given)}",
    )


def rounded_weights_have_plain_products(job: JobFields, args: TrainingArguments) -> Problem | None:
    """Rounded weights are read by whet's own products, and every rank holds them completely."""
    odd = {
        "zero_stage": args.zero_stage or None,
        "fsdp": args.fsdp,
        "deepspeed": args.deepspeed,
        "torch_compile": args.torch_compile or None,
        "precision": args.precision if args.precision == "int8" else None,
        "activation_offload": args.activation_offload or None,
    }
    given = {name: value for name, value in odd.items() if value}
    if (asked := _asked(job)) is None or not given:
        return None
    return Problem(
        what=f"{asked} does not go with {' and '.join(given)}",
        got=given,
        why="the frozen weights are read by whet's own products, in fp32 or bf16, and each rank holds all of them",
        fix=f"leave {' and '.join(f'--{name}' for name in given)} out, or --{asked}",
    )


def _asked(job: JobFields) -> str | None:
    """Return the setting that asks for rounded weights."""
    return next((name for name in ("load_in_8bit", "load_in_4bit") if getattr(job, name)), None)


LORA_RULES: tuple[Rule, ...] = (
    one_number_of_bits,
    only_with(
        "rounded_weights_are_frozen",
        "lora_r",
        ("load_in_8bit", "load_in_4bit"),
        why="weights of 8 or 4 bits cannot be trained: a step is smaller than the distance between two codes",
        fix="add --lora_r 16, which trains pairs next to the frozen weights, or leave it out",
    ),
    rounded_weights_stay_as_they_are,
)
LORA_RUN_RULES: tuple[Rule, ...] = (rounded_weights_have_plain_products,)


def alpha_is_a_share(job: JobFields) -> Problem | None:
    """With none of it the teacher would compute in vain."""
    if 0 < job.distillation_alpha <= 1:
        return None
    return Problem(
        what="distillation_alpha is not a share of the loss",
        got=job.distillation_alpha,
        why="it is the teacher's share, from above 0 to 1; the labels have the rest",
        fix="use a --distillation_alpha such as 0.5",
    )


def teacher_teaches(job: JobFields, args: TrainingArguments) -> Problem | None:
    """A teacher takes part in the loss of a training."""
    odd = [] if args.do_train else ["no do_train"]
    odd += [f"moe_experts={job.moe_experts}"] if job.moe_experts is not None else []
    odd += [f"label_smoothing_factor={args.label_smoothing_factor}"] if args.label_smoothing_factor else []
    if job.teacher_model is None or not odd:
        return None
    return Problem(
        what="teacher_model does not go with these settings",
        got=", ".join(odd),
        why="it takes part in the loss of a training, next to the loss of the labels as they are",
        fix="use --do_train, without --label_smoothing_factor and --moe_experts",
    )


TEACHER_RULES: tuple[Rule, ...] = (
    above("distillation_temperature", 0, "the logits are divided by it"),
    alpha_is_a_share,
    only_with(
        "teacher_is_there",
        "teacher_model",
        ("distillation_temperature", "distillation_alpha"),
        why="they say how a teacher takes part in the loss",
        fix="add --teacher_model FOLDER, or leave them out",
    ),
)
TEACHER_RUN_RULES: tuple[Rule, ...] = (teacher_teaches,)


def not_taken(job: JobFields, command: str, takes: Collection[str]) -> Problem | None:
    """Return the problem that a task does not honour what is asked for: without this rule it would say nothing."""
    asked = {name: getattr(job, name) for name in HONOURED_BY_CALLS if name not in takes}
    given = {name: value for name, value in asked.items() if value}
    if not given:
        return None
    flags = " and ".join(f"--{name}" for name in given)
    return Problem(
        what=f"{' and '.join(given)} would change nothing here",
        got=given,
        why=f"{command} does not do what {flags} asks for",
        fix=f"leave {flags} out",
    )


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
