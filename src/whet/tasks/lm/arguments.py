"""The options of language models, in the names of transformers' run_clm.py and of TRL's SFTConfig, and their rules."""

from dataclasses import dataclass, field
from typing import Literal

from whet.config.aliases import Alias, refused
from whet.config.rules.ranges import Rule, above, at_least, broken_if, excludes, is_given, is_text, only_with, within
from whet.config.settings import checked
from whet.jobs.fields import JobFields

LmLoss = Literal["next_tokens", "dpo"]


_ACCURACY = "mean_token_accuracy"
_REWARDS = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")


def metrics_of(job: "LmArguments") -> tuple[str, ...]:
    """Return the metrics that this run's evaluations may compute."""
    return ("loss", *(_REWARDS if job.loss == "dpo" else (_ACCURACY,)))


LM_RULES: tuple[Rule, ...] = (
    at_least("max_length", 2, "a token predicts the next one of its row"),
    above("beta", 0, "it is the weight of staying near the model before training"),
    within("label_smoothing", "[0, 0.5)", "it is the share of pairs whose preference is assumed to be wrong", 0.1),
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
    excludes(
        "pairs_are_complete",
        "loss=dpo",
        ("packing=True", "completion_only_loss=False", "assistant_only_loss=False"),
        why="it compares the completions of a pair, each a row of its own after the same prompt",
    ),
    excludes(
        "turns_are_learnt_in_one_way",
        "completion_only_loss=False",
        ("assistant_only_loss=True",),
        why="it learns prompts and all turns, and the other only what the assistant says",
        fix="leave --completion_only_loss out: prompts and turns of the user are then not learnt",
    ),
    excludes(
        "pairs_have_no_text_column",
        "loss=dpo",
        ("dataset_text_field",),
        why="the columns of a pair are prompt, chosen and rejected",
        fix="rename the columns to these, and leave --dataset_text_field out",
    ),
)
RUN_RULES: tuple[Rule, ...] = (
    broken_if(
        "preferences_are_trained",
        ("loss", "do_train"),
        lambda job, args: job.loss == "dpo" and not args.do_train,
        what="loss dpo has nothing to compare without training",
        why="a reward is how far the model has moved away from itself before training",
        fix="add --do_train; to compute the perplexity of a trained model on texts, leave --loss dpo out",
    ),
    excludes(
        "loss_is_one",
        "loss=dpo",
        ("label_smoothing_factor", "teacher_model", "moe_experts"),
        why="it compares two completions, and these change the loss of tokens; --label_smoothing is that of DPO",
    ),
    excludes(
        "pairs_are_computed",
        "loss=dpo",
        ("cache_frozen_trunk",),
        why="it keeps the hidden states of rows, and a pair is two rows that one pass reads together",
        fix="leave --cache_frozen_trunk out: --freeze_layers alone saves the backward pass of these layers",
    ),
)


_BEGINS = "whet lm begins with a model: save a new one with transformers' save_pretrained, and name its folder"
_FORMAT = "weights are read in float32, and --precision bf16 sets the number format of the products"
_NOT_HONOURED = {
    "validation_split_percentage": refused(
        "name parts of a dataset's split: --train_split_name 'train[5%:]' --validation_split_name 'train[:5%]'", None
    ),
    "streaming": refused(
        "whet lm reads all of the data before it trains; whet.Trainer takes iterable data sets", False, None
    ),
    "keep_linebreaks": refused("plain text is learnt with its line breaks", True, None),
    "model_type": refused(_BEGINS, None),
    "config_overrides": refused(_BEGINS, None),
    "torch_dtype": refused(_FORMAT, "float32", None),
    "dtype": refused(_FORMAT, "float32", None),
    "loss_type": refused(
        "whet has the sigmoid loss of DPO: use --loss dpo, and --label_smoothing for its conservative form", "sigmoid"
    ),
    "reference_free": refused(
        "whet compares with the model before training: leave it out, or use TRL's DPOTrainer", False, None
    ),
}
_ALIASES = {
    "block_size": Alias(to="max_length", kind=int | None),
    "max_seq_length": Alias(to="max_length", kind=int | None),
}


@checked(headings={"max_length": "Rows and targets"}, rules=LM_RULES, refused=_NOT_HONOURED, aliases=_ALIASES)
@dataclass(frozen=True, kw_only=True, slots=True)
class LmArguments(JobFields):
    """Which language model learns which texts."""

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
    assistant_only_loss: bool | None = None
    """For rows of messages, in place of completion_only_loss. true: only the turns of the assistant are learnt. false:
    all turns are. Rows with prompt and completion stay as completion_only_loss says. null: as completion_only_loss."""
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


def _prompts(asked: "GenerateArguments") -> tuple[str, ...]:
    return (asked.prompt,) if isinstance(asked.prompt, str) else tuple(asked.prompt)


GENERATE_RULES: tuple[Rule, ...] = (
    is_given(
        "has_a_model",
        "model",
        what="no model is named",
        why="a trained language model continues the text",
        fix='name the folder that whet lm wrote: whet generate out --prompt "Once upon a time"',
    ),
    broken_if(
        "has_a_prompt",
        ("prompt",),
        lambda asked: not asked.chat and not (asked.prompt and all(_prompts(asked))),
        what="there is no text to continue",
        why="a model continues a text, or answers in a chat",
        fix="add --prompt TEXT, or --chat to talk with it",
    ),
    is_text("prompt"),
    at_least("max_new_tokens", 1, "a continuation has a token"),
    at_least("top_k", 0, "tokens are drawn among the most probable ones; 0 means all"),
    at_least("seed", 0, "torch's generators take no negative seed"),
    above("temperature", 0, "scores are divided by it"),
    above("repetition_penalty", 0, "scores are divided by it"),
    within("top_p", "(0, 1]", "tokens are drawn from the smallest set whose probabilities sum to it", 0.9),
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
class GenerateArguments:
    """Which model continues which text, and how."""

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

    @property
    def prompts(self) -> tuple[str, ...]:
        """The texts to continue."""
        return _prompts(self)
