"""The options of `whet generate`, in the names of transformers' GenerationConfig."""

from dataclasses import dataclass, field

from whet.config.rules.ranges import Rule, at_least, is_text, only_with
from whet.config.settings import checked
from whet.errors import Problem


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
