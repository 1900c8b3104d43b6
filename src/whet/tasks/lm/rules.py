"""The rules of causal language modelling: what a run needs to make sense."""

from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, at_least, only_with
from whet.config.settings import broken
from whet.errors import Problem
from whet.jobs.rules import JOB_RULES, JOB_RUN_RULES, spans_are_of_answers
from whet.jobs.task import OF_TRAINING
from whet.tasks.lm.fields import LmFields

SHOWN = {
    **OF_TRAINING,
    "eval_loss": ("loss", "{:.4f}"),
    "eval_rewards/accuracies": ("chosen preferred", "{:.1%}"),
    "eval_rewards/margins": ("reward margin", "{:.4f}"),
    "eval_perplexity": ("perplexity", "{:,.2f}"),
    "eval_mean_token_accuracy": ("token accuracy", "{:.1%}"),
    "predict_perplexity": ("perplexity, test", "{:,.2f}"),
    "predict_mean_token_accuracy": ("token accuracy, test", "{:.1%}"),
}
"""The metrics of the table at the end of a run."""


def best_metric_is_known(job: LmFields, args: TrainingArguments) -> Problem | None:
    """Reported before the training, not at its first evaluation."""
    wanted = args.metric_for_best_model
    known = ("loss", *(_REWARDS if job.loss == "dpo" else (_ACCURACY,)))
    if wanted is None or wanted.removeprefix("eval_") in known:
        return None
    return Problem(
        what="metric_for_best_model names no metric",
        got=wanted,
        why=f"the evaluations of a training compute {', '.join(known)}",
        fix="use --metric_for_best_model loss, or leave it out",
    )


def pairs_are_complete(job: LmFields) -> Problem | None:
    """A pair is two rows of its own, of which the completions count."""
    odd = {name: value for name, value in _NOT_WITH_DPO.items() if getattr(job, name) is value}
    if job.loss != "dpo" or not odd:
        return None
    return Problem(
        what=f"{' and '.join(odd)} does not go with loss dpo",
        got=odd,
        why="it compares the completions of a pair, each a row of its own after the same prompt",
        fix=f"leave {' and '.join(f'--{name}' for name in odd)} out; whet computes no padding in any case",
    )


def smoothing_keeps_the_preference(job: LmFields) -> Problem | None:
    """With half of the pairs assumed to be wrong, nothing is preferred."""
    if 0 <= job.label_smoothing < 0.5:
        return None
    return Problem(
        what="label_smoothing is not below one half",
        got=job.label_smoothing,
        why="it is the share of pairs whose preference is assumed to be wrong",
        fix="use a --label_smoothing from 0 up to 0.5, such as 0.1",
    )


def preferences_are_trained(job: LmFields, args: TrainingArguments) -> Problem | None:
    """The reference is the model before training: without training both are the same."""
    if job.loss != "dpo" or args.do_train:
        return None
    return Problem(
        what="loss dpo has nothing to compare without training",
        got="no do_train",
        why="a reward is how far the model has moved away from itself before training",
        fix="add --do_train; to compute the perplexity of a trained model on texts, leave --loss dpo out",
    )


def loss_is_one(job: LmFields, args: TrainingArguments) -> Problem | None:
    """A smoothed loss is one of the Trainer's own, over labels."""
    odd = {"label_smoothing_factor": args.label_smoothing_factor or None}
    odd |= {"teacher_model": job.teacher_model, "moe_experts": job.moe_experts}
    given = {name: value for name, value in odd.items() if value is not None}
    if job.loss != "dpo" or not given:
        return None
    return Problem(
        what=f"{' and '.join(given)} does not go with loss dpo",
        got=given,
        why="it changes the loss of tokens, and DPO compares two completions",
        fix=f"leave {' and '.join(f'--{name}' for name in given)} out; --label_smoothing is that of DPO",
    )


def pairs_are_computed(job: LmFields, args: TrainingArguments) -> Problem | None:
    """Reported before the reference is computed."""
    if job.loss != "dpo" or not args.cache_frozen_trunk:
        return None
    return Problem(
        what="cache_frozen_trunk does not go with loss dpo",
        got="cache_frozen_trunk=True, loss=dpo",
        why="it keeps the hidden states of rows, and a pair is two rows that one pass reads together",
        fix="leave --cache_frozen_trunk out: --freeze_layers alone saves the backward pass of these layers",
    )


def check_run(job: LmFields, args: TrainingArguments) -> list[Problem]:
    """Return what is wrong between the options of the task and those of the training."""
    return broken(RUN_RULES, job, args)


def pairs_have_no_text_column(job: LmFields) -> Problem | None:
    """Their columns are prompt, chosen and rejected."""
    if job.loss != "dpo" or job.dataset_text_field is None:
        return None
    return Problem(
        what="dataset_text_field would change nothing with loss dpo",
        got=job.dataset_text_field,
        why="the columns of a pair are prompt, chosen and rejected",
        fix="rename the columns to these, and leave --dataset_text_field out",
    )


_ACCURACY = "mean_token_accuracy"
_REWARDS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
_NOT_WITH_DPO = {"packing": True, "completion_only_loss": False}
LM_RULES: tuple[Rule, ...] = (
    *JOB_RULES,
    at_least("max_length", 2, "a token predicts the next one of its row"),
    above("beta", 0, "it is the weight of staying near the model before training"),
    smoothing_keeps_the_preference,
    only_with(
        "preferences_are_asked_for",
        "loss dpo",
        ("beta", "label_smoothing"),
        is_on=lambda job: job.loss == "dpo",
        why="they say how preferences are learnt",
        fix="add --loss dpo, or leave them out; --label_smoothing_factor smooths the labels of texts",
    ),
    only_with(
        "reference_is_that_of_preferences",
        "loss dpo",
        ("precompute_ref_log_probs",),
        is_on=lambda job: job.loss == "dpo",
        why="the reference is the model before training, which preferences are compared with",
        fix="add --loss dpo, or leave --precompute_ref_log_probs out",
    ),
    pairs_are_complete,
    pairs_have_no_text_column,
)
RUN_RULES: tuple[Rule, ...] = (
    *JOB_RUN_RULES,
    best_metric_is_known,
    spans_are_of_answers,
    preferences_are_trained,
    loss_is_one,
    pairs_are_computed,
)
