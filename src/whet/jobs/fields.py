"""The fields that the commands of all tasks share: which model, which data, what is done with bad examples."""

from dataclasses import dataclass, field
from typing import Literal

Pooling = Literal["mean", "max"]
"""How the logits of several windows become one."""


REFUSED = {
    "use_fast_tokenizer": "whet reads only tokenizers of the `tokenizers` library, which are the fast ones",
    "use_auth_token": "set HF_TOKEN, or use --token",
}
"""Flags of transformers' scripts that whet does not honour -> what to do instead."""
OFF: dict[str, tuple[object, ...]] = {"use_fast_tokenizer": (True,), "use_auth_token": (False, None)}
"""Their values without effect, which are accepted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFields:
    """What every task's run is asked for, unchecked."""

    model_name_or_path: str = field(default="", metadata={"required": True})
    """Pretrained model: a folder, or a name on the hub. Weights are read from safetensors files only."""
    config_name: str | None = None
    """Take the model's configuration from this folder or hub name instead."""
    tokenizer_name: str | None = None
    """Take the tokenizer from this folder or hub name instead."""
    cache_dir: str | None = None
    """Folder in which downloaded models and datasets are kept. null: the usual cache of the hub."""
    model_revision: str = "main"
    """Branch, tag or commit of the model on the hub. A commit makes the run repeatable."""
    token: str | None = field(default=None, repr=False, metadata={"secret": True})
    """Access token for private models and datasets. null: the environment's HF_TOKEN, or the login kept by the hub's
    own tool. Other users of the machine can read flags, so prefer those two."""
    trust_remote_code: bool = False
    """Must stay false: whet never runs code that comes with a model or a dataset."""

    dataset_name: str | None = None
    """Dataset of the hub, such as squad or imdb. Use this or files, not both."""
    dataset_config_name: str | None = None
    """Configuration of that dataset, if it has several."""
    train_file: str | None = None
    """File with the examples to train on: CSV, JSON lines, JSON or Parquet."""
    validation_file: str | None = None
    """File with the examples to evaluate on, in any format of train_file."""
    test_file: str | None = None
    """File with the examples to predict, in any format of train_file."""
    seeds: int = 1
    """Train this many models one after the other, with seed, seed + 1 and so on, each in seed-S of output_dir. The best
    one by metric_for_best_model (null: the task's own metric) is kept in output_dir; the results have mean and standard
    deviation. Needs do_eval."""
    skip_bad: bool = False
    """Leave bad examples out instead of ending the run. The results count them, the log names the first ones, and
    train_left_out.json (eval, predict) lists each with its reason. A file that cannot be read ends the run."""
    max_train_samples: int | None = None
    """Use only this many of the first examples for training. null: all."""
    max_eval_samples: int | None = None
    """Use only this many of the first examples for evaluation. null: all."""
    max_predict_samples: int | None = None
    """Use only this many of the first examples for prediction. null: all."""
    overwrite_cache: bool = False
    """Tokenize again even if the tokens of this data are cached."""
    preprocessing_num_workers: int | None = None
    """Threads that tokenize. null: one for each core that this process may use."""
