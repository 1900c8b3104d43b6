"""The options of language models, in the names of transformers' run_clm.py and of TRL's SFTConfig, and their rules."""

from dataclasses import dataclass, field
from typing import Any, Literal

from whet.config.aliases import Alias
from whet.config.arguments import TrainingArguments
from whet.config.rules.ranges import Rule, above, at_least, is_text, only_with
from whet.config.settings import broken, checked, printable
from whet.errors import Problem
from whet.jobs.fields import OFF, REFUSED, JobFields
from whet.jobs.rules import JOB_RULES, JOB_RUN_RULES, spans_are_of_answers
from whet.jobs.task import OF_TRAINING

LmLoss = Literal["next_tokens", "dpo"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LmFields(JobFields):
    """What a run of causal language modelling is asked for, unchecked."""

    train_file: str | None = None
    """File to train on: plain text (.txt), or JSON lines, JSON, Parquet or CSV whose rows have text, messages
    (conversations, a list of objects with role and content), or prompt and completion."""
    validation_file: str | None = None
    """File to compute the perplexity on, in any format of train_file."""
    test_file: str | None = None
    """File that do_predict computes the perplexity on, in any format of train_file."""
    dataset_text_field: str | None = None
    """Column that holds the text. null: text, content or another usual name, or the only column."""

    max_length: int | None = None
    """Longest row in tokens. Longer texts become several rows; longer conversations and completions are cut, and the
    log counts them. null: what the model and its tokenizer allow, 1024 at most."""
    packing: bool | None = None
    """true: join all texts, and cut them into blocks of max_length, as run_clm.py does; a row then holds parts of
    several texts, which see each other. false: each text is a row, and so is each line of a plain text file. null: true
    for plain text files. Rows of a batch never see each other, and whet computes no padding in either case."""
    completion_only_loss: bool | None = None
    """true: only completions, and the turns of the assistant in messages, are learnt. false: prompts and the other
    turns too. null: true; texts are learnt completely."""
    loss: LmLoss = "next_tokens"
    """next_tokens: learn the texts. dpo: direct preference optimization (Rafailov et al. 2023). Rows have prompt,
    chosen and rejected; the model learns to prefer the chosen completion, compared with itself before training."""
    beta: float = 0.1
    """With loss dpo: the weight of staying near the model before training. Smaller: the model may move further away."""
    label_smoothing: float = 0.0
    """With loss dpo: the share of pairs whose preference is assumed to be wrong (conservative DPO)."""
    precompute_ref_log_probs: bool = False
    """With loss dpo: true and false give the same run. whet always computes the reference's log-probabilities once,
    before training."""


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


_HEADINGS = {"model_name_or_path": "Model", "dataset_name": "Data", "max_length": "Rows and targets"}
_BEGINS = "whet lm begins with a model: save a new one with transformers' save_pretrained, and name its folder"
_FORMAT = "weights are read in float32, and --precision bf16 sets the number format of the products"
_REFUSED = REFUSED | {
    "validation_split_percentage": "name parts of a dataset's split: --train_split_name 'train[5%:]' "
    "--validation_split_name 'train[:5%]'",
    "streaming": "whet lm reads all of the data before it trains; whet.Trainer takes iterable data sets",
    "keep_linebreaks": "plain text is learnt with its line breaks",
    "model_type": _BEGINS,
    "config_overrides": _BEGINS,
    "torch_dtype": _FORMAT,
    "dtype": _FORMAT,
    "loss_type": "whet has the sigmoid loss of DPO: use --loss dpo, and --label_smoothing for its conservative form",
    "reference_free": "whet compares with the model before training: leave it out, or use TRL's DPOTrainer",
}
_OFF = OFF | {
    "loss_type": ("sigmoid",),
    "reference_free": (False, None),
    "validation_split_percentage": (None,),
    "streaming": (False, None),
    "keep_linebreaks": (True, None),
    "model_type": (None,),
    "config_overrides": (None,),
    "torch_dtype": ("float32", None),
    "dtype": ("float32", None),
}
_ALIASES = {
    "block_size": Alias(to="max_length", kind=int | None),
    "max_seq_length": Alias(to="max_length", kind=int | None),
    "assistant_only_loss": Alias(to="completion_only_loss", kind=bool | None),
}


@checked(headings=_HEADINGS, rules=LM_RULES, refused=_REFUSED, off=_OFF, aliases=_ALIASES)
@dataclass(frozen=True, kw_only=True, slots=True)
class LmArguments(LmFields):
    """Which language model learns which texts."""

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON, the token masked."""
        return printable(self)


@checked(headings={"output_dir": "Demo"}, rules=(at_least("max_steps", 1, "a model learns in steps"),))
@dataclass(frozen=True, kw_only=True, slots=True)
class DemoLmArguments:
    """How the demonstration is run."""

    output_dir: str = "whet-demo-lm"
    """Folder for the trained model and its results."""
    max_steps: int = 300
    """Optimizer steps."""
    seed: int = 42
    """Random seed of the new weights and of the order of rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateFields:
    """Which model continues which text, unchecked."""

    model: str = field(default="", metadata={"required": True})
    """Trained model: a folder that whet lm wrote, with all weights or an adapter, or a name on the hub. Comes first,
    with or without its flag."""
    base_model_name_or_path: str | None = None
    """For the folder of an adapter: the model that it was trained on. null: the one that the adapter names."""
    prompt: str | tuple[str, ...] = ()
    """Text to continue. Give the flag several times to continue several texts. With chat it is what the user says."""
    chat: bool = False
    """Answer as the assistant, by the model's chat template. Without a prompt, each line of standard input is a turn of
    the user, and earlier turns are remembered."""
    max_new_tokens: int = 128
    """Longest continuation in tokens; it ends sooner at the end-of-text token."""
    do_sample: bool = False
    """Draw each token by its probability. false: take the most probable one, also if the model's own settings draw."""
    temperature: float = 1.0
    """With do_sample: below 1 prefers probable tokens more, above 1 less."""
    top_k: int = 50
    """With do_sample: draw among this many of the most probable tokens. 0: all."""
    top_p: float = 1.0
    """With do_sample: draw among the most probable tokens whose probabilities sum to this."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that the text already holds less probable."""
    seed: int = 42
    """With do_sample: random seed of what is drawn."""


def has_a_model(asked: GenerateFields) -> Problem | None:
    """Nothing continues a text by itself."""
    if asked.model.strip():
        return None
    return Problem(
        what="no model is named",
        got="no model",
        why="a trained language model continues the text",
        fix='name the folder that whet lm wrote: whet generate out --prompt "Once upon a time"',
    )


def has_a_prompt(asked: GenerateFields) -> Problem | None:
    """Only a chat reads its turns from standard input."""
    if asked.chat or (asked.prompt and all(text for text in _prompts(asked))):
        return None
    return Problem(
        what="there is no text to continue",
        got="no prompt" if not asked.prompt else "an empty prompt",
        why="a model continues a text, or answers in a chat",
        fix="add --prompt TEXT, or --chat to talk with it",
    )


def positive(name: str, why: str) -> Rule:
    """Return the rule that the field is above 0."""

    def rule(asked: GenerateFields) -> Problem | None:
        value = getattr(asked, name)
        return None if value > 0 else Problem(what=f"{name} is not above 0", got=value, why=why, fix=f"use --{name} 1")

    rule.__name__ = f"{name}_is_positive"
    return rule


def top_p_is_a_probability(asked: GenerateFields) -> Problem | None:
    """It is compared with a sum of probabilities."""
    if 0 < asked.top_p <= 1:
        return None
    return Problem(
        what="top_p is not a probability",
        got=asked.top_p,
        why="tokens are drawn from the smallest set whose probabilities sum to it",
        fix="use a --top_p above 0, up to 1",
    )


def _prompts(asked: GenerateFields) -> tuple[str, ...]:
    return (asked.prompt,) if isinstance(asked.prompt, str) else tuple(asked.prompt)


GENERATE_RULES: tuple[Rule, ...] = (
    has_a_model,
    has_a_prompt,
    is_text("prompt"),
    at_least("max_new_tokens", 1, "a continuation has a token"),
    at_least("top_k", 0, "tokens are drawn among the most probable ones; 0 means all"),
    at_least("seed", 0, "torch's generators take no negative seed"),
    positive("temperature", "scores are divided by it"),
    positive("repetition_penalty", "scores are divided by it"),
    top_p_is_a_probability,
    only_with(
        "draws_are_asked_for",
        "do_sample",
        ("temperature", "top_k", "top_p", "seed"),
        is_on=lambda asked: asked.do_sample,
        why="without it the most probable token is taken, which these do not change",
        fix="add --do_sample, or leave them out",
    ),
)


@checked(headings={"model": "Text", "do_sample": "Choice of tokens"}, rules=GENERATE_RULES)
@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateArguments(GenerateFields):
    """Which model continues which text, and how."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts to continue."""
        return _prompts(self)
