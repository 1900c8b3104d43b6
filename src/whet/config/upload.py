"""What of an output folder belongs on the hub, and the command that uploads it by hand."""

from __future__ import annotations

import shlex
from contextlib import suppress
from pathlib import Path

MODEL_FILES = (
    "model*.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_model.safetensors", "adapter_config.json",
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


def upload_command(folder: str | Path, repository: str | None = None, revision: str | None = None) -> str:
    """Return the command that uploads the model in this folder, and nothing else that is there.

    It names the patterns that match a file; all of them if the folder has no model yet. `repository` None: the name of
    the folder.
    """
    place = Path(folder)
    there: list[str] = []
    with suppress(OSError, ValueError):  # a name that no disk can store
        there = [one for one in MODEL_FILES if any(place.glob(one))]
    options = [word for one in there or MODEL_FILES for word in ("--include", one)]
    options += [] if revision is None else ["--revision", revision]
    return shlex.join(["hf", "upload", repository or place.absolute().name, str(folder), ".", *options])
