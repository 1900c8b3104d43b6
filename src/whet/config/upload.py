"""What of an output folder belongs on the hub, and the command that uploads it by hand."""

from __future__ import annotations

import json
import os
import shlex
from contextlib import suppress
from pathlib import Path

ADAPTER = "adapter_config.json"
MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_model.safetensors", ADAPTER,
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.*",
    "additional_chat_templates/*.jinja", "preprocessor_config.json",
    "processor_config.json", "whet_task.json", "README.md",
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]*_*/*.json",
    "[0-9]*_*/model.safetensors",
)  # fmt: skip
"""Of an output folder, what transformers, sentence-transformers and `whet predict` read.

The hub's client lets a star stand for slashes too: no pattern may begin with one, or it would match files of
checkpoints.
"""


EARLIER_MODEL = (
    "model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json",
    "adapter_model.safetensors", ADAPTER,
    "modules.json", "config_sentence_transformers.json", "sentence_*_config.json",
)  # fmt: skip
"""Files by which a repository would still be the model that it held before: those that are not uploaded are deleted.

transformers prefers an adapter to weights next to it, and sentence-transformers begins with modules.json. None of these
patterns matches a file of a checkpoint.
"""


def upload_command(folder: str | Path, repository: str | None = None, revision: str | None = None) -> str:
    """Return the command that uploads the model in this folder, and nothing else, in place of the repository's.

    It names the patterns that match a file; all of them if the folder has no model yet. `repository` None: the name of
    the folder.
    """
    place = Path(folder)
    there: list[str] = []
    with suppress(OSError, ValueError):  # a name that no disk can store
        there = [one for one in MODEL_FILES if any(place.glob(one))]
    options = [word for one in there or MODEL_FILES for word in ("--include", one)]
    options += [word for one in EARLIER_MODEL for word in ("--delete", one)]
    options += [] if revision is None else ["--revision", revision]
    return shlex.join(["hf", "upload", repository or place.absolute().name, str(folder), ".", *options])


def before_upload(folder: str | Path, base: str | None = None) -> str:
    """Return the words before the command, if an adapter in the folder names its model by a path of this machine.

    `base` is what the adapter will name, None what it names.
    """
    settings = Path(folder) / ADAPTER
    with suppress(OSError, ValueError, AttributeError):  # no adapter, or a damaged one
        base = base or json.loads(settings.read_text("utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not os.path.isabs(base):  # noqa: PTH117 - of a text
        return ""
    return f"in {settings} write the name that the model of the adapter has on the hub, in place of {base}; then run: "
