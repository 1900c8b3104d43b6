"""The fields of `LmArguments`: names of transformers' run_clm.py and of TRL's SFTConfig, and a text for each."""

from dataclasses import dataclass
from typing import Literal

from whet.jobs.fields import JobFields

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
