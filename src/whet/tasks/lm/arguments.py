"""The options of causal language modelling, in the names of transformers' run_clm.py and of TRL's SFTConfig."""

from dataclasses import dataclass
from typing import Any

from whet.config.aliases import Alias
from whet.config.settings import checked, printable
from whet.jobs.fields import OFF, REFUSED
from whet.tasks.lm.fields import LmFields
from whet.tasks.lm.rules import LM_RULES

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
