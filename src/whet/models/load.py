"""Load a question answering model and its tokenizer: safetensors and JSON only, no code from the folder, ever."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.errors import ConfigError, WhetError
from whet.log import logger
from whet.models.families import family_of


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model comes from: a folder, or a name on the hub."""

    model: str
    config: str | None = None
    tokenizer: str | None = None
    cache_dir: str | None = None
    revision: str = "main"
    token: str | None = None

    def hub_options(self) -> dict[str, Any]:
        """Return the keyword arguments that every from_pretrained call gets."""
        return {
            "cache_dir": self.cache_dir,
            "revision": self.revision,
            "token": self.token,
            "trust_remote_code": False,
        }


def load_tokenizer(source: ModelSource) -> Any:
    """Return the tokenizer; raises ConfigError where it cannot be loaded."""
    from transformers import AutoTokenizer

    name = source.tokenizer or source.model
    try:
        return AutoTokenizer.from_pretrained(name, use_fast=True, **source.hub_options())
    except Exception as error:
        raise _not_loaded("tokenizer", name, error, "--tokenizer_name") from error


def load_qa_model(source: ModelSource, *, trained: bool = False) -> Any:
    """Return the model with a question answering head, weights in float32 (the master copy of any precision).

    Raises ConfigError where it cannot be loaded, or, if it has to be `trained` already, where weights are missing.
    """
    import torch
    from transformers import AutoConfig, AutoModelForQuestionAnswering

    from whet.models.quiet import quiet

    name = source.config or source.model
    try:
        config = AutoConfig.from_pretrained(name, **source.hub_options())
    except Exception as error:
        raise _not_loaded("model configuration", name, error, "--model_name_or_path") from error
    try:
        with quiet():
            model, report = AutoModelForQuestionAnswering.from_pretrained(
                source.model,
                config=config,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                **source.hub_options(),
            )
    except Exception as error:
        raise _not_loaded("model", source.model, error, "--model_name_or_path") from error
    missing = sorted(report["missing_keys"])
    if trained and missing:
        raise ConfigError(
            what="the model has not learnt to answer questions",
            got=source.model,
            why=f"its folder holds no weights for {', '.join(missing)}",
            fix="train it first: whet qa --model_name_or_path ... --do_train --output_dir out, then use the folder out",
        )
    _say_what_is_new(model, missing)
    return model


def max_positions(model: Any) -> int | None:
    """Return how many tokens of one row the model has positions for, None where positions are not a table."""
    table = getattr(model.config, "max_position_embeddings", None)
    family = family_of(model)
    return table if table is None or family is None else table - family.position_offset(model)


def _say_what_is_new(model: Any, missing: list[str]) -> None:
    n_weights = sum(parameter.numel() for parameter in model.parameters())
    new = f"; new, still to be learnt: {', '.join(missing)}" if missing else ""
    logger.info("%s, %.1f million weights%s", type(model).__name__, n_weights / 1e6, new)


def _not_loaded(part: str, name: str, error: Exception, flag: str) -> WhetError:
    if isinstance(error, WhetError):
        return error
    folder = Path(name)
    if folder.is_dir():
        fix = f"check the files in {name}, or name another folder in {flag}"
    else:
        fix = f"{flag} takes a folder with config.json and model.safetensors, or a name on the hub (needs a network)"
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return ConfigError(what=f"the {part} cannot be loaded", got=name, why=" ".join(lines)[:500], fix=fix)
