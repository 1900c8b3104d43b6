"""`TrainingArguments`: the settings of a run, with the names and defaults of `transformers`."""

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whet.config import recipes
from whet.config.aliases import ALIASES, REFUSED
from whet.config.fields import OUTPUT_DIR, TrainingFields
from whet.config.recipes import RECIPE_RULES
from whet.config.rules.computing import COMPILE_RULES, METHOD_RULES, PRECISION_RULES, resolve_compile, resolve_precision
from whet.config.rules.memory import LOADING_RULES, MEMORY_RULES
from whet.config.rules.optimizer import OPTIMIZER_RULES
from whet.config.rules.schedule import BY_METRIC
from whet.config.rules.sharing import SHARING_RULES
from whet.config.rules.training import LOGGING_RULES, SAVING_RULES, TRAINING_RULES, unread
from whet.config.settings import checked, printable

_FOR_NULL = {"output_dir": OUTPUT_DIR, "gradient_checkpointing": False, "disable_tqdm": False, "eval_delay": 0.0}
"""The meaning of None for fields that may be None in transformers."""
_HEADINGS = {
    "output_dir": "Run",
    "per_device_train_batch_size": "Training",
    "eval_strategy": "Evaluation",
    "save_strategy": "Saving",
    "logging_strategy": "Logging",
}


def _resolve_defaults(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in fields that follow from others, as `transformers` does."""
    values |= {name: usual for name, usual in _FOR_NULL.items() if values[name] is None}
    for folder in ("output_dir", "logging_dir"):
        values[folder] = str(Path(values[folder]).expanduser()) if values[folder] else values[folder]
    values["do_eval"] |= values["eval_strategy"] != "no" or values["eval_on_start"]
    if values["eval_strategy"] == "steps":
        values["eval_steps"] = values["eval_steps"] or values["logging_steps"]
    if values["load_best_model_at_end"] or values["lr_scheduler_type"] in BY_METRIC:
        values["metric_for_best_model"] = values["metric_for_best_model"] or "loss"
    if values["greater_is_better"] is None and values["metric_for_best_model"]:
        values["greater_is_better"] = not values["metric_for_best_model"].endswith("loss")
    allowed = (name for words in values["resume_allow_changes"] for name in words.split(","))
    values["resume_allow_changes"] = tuple(dict.fromkeys(allowed))
    values["methods"] = tuple(dict.fromkeys(name for words in values["methods"] for name in words.split(",")))
    values["resume_from_checkpoint"] = _checkpoint(values["resume_from_checkpoint"])
    values["report_to"] = _trackers(tuple(values["report_to"]))
    return values | resolve_precision(values) | resolve_compile(values)


def _values_for(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the recipe and DeepSpeed's configuration set, where these settings name them."""
    found = recipes.values_for(given)
    if given.get("deepspeed") is None:
        return found
    from whet.config import deepspeed

    return found | deepspeed.values_for(given)


def _checkpoint(asked: str | bool | None) -> str | None:
    """Return the checkpoint that is meant: true means auto, and false none, as in transformers."""
    words = {"true": "auto", "false": None, "no": None, "none": None}
    return words.get(str(asked).lower(), str(asked))


def _trackers(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the trackers that are meant: "all" means every installed one, as in transformers."""
    if names == ("none",):
        return ()
    if names == ("all",):
        off = {"mlflow"} if os.environ.get("DISABLE_MLFLOW_INTEGRATION", "").upper() == "TRUE" else set()
        known = ("tensorboard", "wandb", "mlflow", "trackio")
        return tuple(name for name in known if name not in off and _is_installed(name))
    return tuple(dict.fromkeys(names))


def _is_installed(package: str) -> bool:
    found = importlib.util.find_spec(package)
    # A folder of the same name in the working directory (wandb creates one) is found as well, but has no module.
    return found is not None and found.origin is not None


_RULES = (
    *TRAINING_RULES, *PRECISION_RULES, *MEMORY_RULES, *OPTIMIZER_RULES, *SAVING_RULES, *LOADING_RULES, *LOGGING_RULES,
    *COMPILE_RULES, *METHOD_RULES, *RECIPE_RULES, *SHARING_RULES,
)  # fmt: skip


@checked(
    headings=_HEADINGS, rules=_RULES, usual=_values_for, resolve=_resolve_defaults, aliases=ALIASES, refused=REFUSED,
    notes=unread,
)  # fmt: skip
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingArguments(TrainingFields):
    """How a model is trained, evaluated, saved and logged.

    Accepts the older names of the guides too (`no_cuda`, `evaluation_strategy` ...). Raises ConfigError for an unknown
    name, for a field of `transformers` that whet does not honour, for a wrong type and for a broken rule, all at once.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return every field by name, ready for JSON; without tokens, `TrainingArguments(**it)` gives equal ones."""
        return printable(self)

    def to_json_string(self) -> str:
        """Return `to_dict` as JSON text, indented and in the order of the fields."""
        return json.dumps(self.to_dict(), indent=2)
