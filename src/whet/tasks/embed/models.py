"""Models of sentence-transformers: loaded from safetensors in float32, and no code of their folder runs.

What `whet export` made of one is a model of sentence-transformers, too: its only module calls another runtime.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from whet.errors import ConfigError
from whet.log import logger
from whet.models.loading import exported, heads
from whet.models.loading.exported import Arrays
from whet.models.loading.load import ModelSource, load_config, load_tokenizer, max_positions, positions_of
from whet.models.loading.missing_check import in_short, is_part, new_parts
from whet.models.loading.quiet import quiet
from whet.models.loading.tensor_check import check_weights
from whet.optional import require
from whet.tasks.embed.arguments import INSTALL, PACKAGE, SIMILARITIES, PairFields, require_package
from whet.tasks.embed.folders import KINDS, Kind, class_of_folder

DOCUMENT_PROMPTS = ("document", "passage", "corpus")
"""Names under which a model has what comes before a text that is searched: the first that is not empty counts."""
_OUTPUTS = {"embed": "sentence_embedding", "rerank": "scores"}
"""What a graph gives, by task: the key of sentence-transformers' features."""


def library(part: str = "") -> ModuleType:
    """Return sentence-transformers, or a part of it; raises ConfigError with what installs it."""
    require_package()
    package = require(PACKAGE, needed_for="this command", install=INSTALL)
    return import_module(f"{PACKAGE}.{part}") if part else package


def load(
    kind: Kind, name: str, flag: str, *, job: PairFields | None = None, trains: bool = False, use_cpu: bool = False
) -> Any:
    """Return the model of this folder or name of the hub; raises ConfigError, naming `flag`, if it cannot be loaded.

    `job` says how the hub is asked. A model that `trains` may get a new head; any other has learnt what `kind` does.
    Weights are read from safetensors, and become float32.
    """
    is_here = Path(name).is_dir()
    if is_here:
        is_plain = class_of_folder(Path(name)) is None and (Path(name) / "config.json").is_file()
        config = load_config(ModelSource(model=name, flag=flag)) if is_plain and not trains else None
        _require_kind(kind, Path(name), config, name, flag, trains=trains)
    about = exported.about_folder(name)
    if about is not None:
        _require_open(about, kind, name, flag, trains=job is not None)
        source = ModelSource(model=name, flag=flag)
        compute = exported.runtime(Path(name), about["format"], (_OUTPUTS[about["task"]],))
        return computed_by(compute, about, load_tokenizer(source), load_config(source))
    from_hub = {} if job is None or is_here else {
        "cache_folder": job.cache_dir, "revision": job.model_revision, "token": job.token
    }  # fmt: skip
    device = "cuda" if torch.cuda.is_available() and not use_cpu else "cpu"
    try:
        with quiet():
            model = getattr(library(), kind)(
                name, device=device, trust_remote_code=False,
                model_kwargs={"dtype": torch.float32, "use_safetensors": True}, **from_hub,
            )  # fmt: skip
    except ConfigError:
        raise
    except Exception as error:  # of transformers, of the hub's client, of safetensors or of a damaged file
        raise ConfigError(
            what=f"{flag}: the model cannot be loaded",
            got=f"{name}: {type(error).__name__}: {error}",
            why="it is a folder of sentence-transformers or of transformers with weights in safetensors, or a name on "
            "the hub",
            fix=f"correct {flag}; weights in .bin files: load and save the model once with save_pretrained",
        ) from error
    folder = Path(name)
    if not is_here:
        folder = _downloaded(name, kind, from_hub.get("revision"), from_hub.get("cache_folder"))
    if folder is not None:
        config = getattr(model.transformers_model, "config", None)
        if not is_here:
            _require_kind(kind, folder, config, name, flag, trains=trains)
        is_plain = class_of_folder(folder) is None and (folder / "config.json").is_file()
        if kind == "CrossEncoder" and is_plain and not trains:
            _require_weights_of_head(model, folder, name, flag)
    if kind == "SentenceTransformer":
        _name_document_prompt(model)
    return model


def _require_kind(kind: Kind, folder: Path, config: Any, name: str, flag: str, *, trains: bool) -> None:
    """Raise ConfigError for a model that another class has written, or that has learnt something else than this kind.

    `config` is read of a folder that no class of sentence-transformers has written, unless its model trains.
    """
    found = class_of_folder(folder)
    architectures = None if found is not None or trains else getattr(config, "architectures", None) or []
    head = None if architectures is None else heads.head_named(architectures)
    if found not in (None, *KINDS):
        raise ConfigError(
            what=f"{flag} names another kind of model",
            got=f"{name}: a {found}",
            why="here a text becomes one vector, or a pair one score, and its own class computes something else",
            fix=f"name a {kind}, or use this model with sentence-transformers itself",
        )
    if kind == "SentenceTransformer":
        if found == "CrossEncoder":
            raise ConfigError(
                what=f"{flag} names a reranker",
                got=f"{name}: a {found}",
                why="it scores pairs of texts, and here a text becomes a vector",
                fix="name an embedding model, or a plain encoder",
            )
        if head is not None:
            raise ConfigError(
                what="the model has not learnt to embed",
                got=f"{name}: {', '.join(architectures or ())}",
                why="its vectors served its own head alone, and say little about what a text means",
                fix=f"name a model that whet embed has trained, or a plain encoder, in {flag}",
            )
        return
    is_embedder = found == "SentenceTransformer" and not trains
    if is_embedder or (architectures is not None and head is not heads.SEQUENCE_CLASSIFICATION):
        raise _no_reranker(name, flag, f"a {found}" if is_embedder else ", ".join(architectures or ()) or "an encoder")


def _no_reranker(name: str, flag: str, found: str) -> ConfigError:
    return ConfigError(
        what=f"{flag} names no reranker",
        got=f"{name}: {found}",
        why="it has learnt no scores of pairs: a head of random weights would give other ones in each run",
        fix="name a model that whet rerank has trained, or another CrossEncoder"
        + ("; or train this one: --do_train" if flag == "--model_name_or_path" else ""),
    )


def _require_weights_of_head(model: Any, folder: Path, name: str, flag: str) -> None:
    """Raise ConfigError if the files of this folder lack weights of the head that its configuration names."""
    inner = model.transformers_model
    parts = [*new_parts(inner)]
    held = check_weights(folder, inner.config.to_dict())
    lost = [weight for weight in inner.state_dict() if is_part(weight, parts) and weight not in held]
    if lost:
        raise _no_reranker(name, flag, f"no weights for {in_short(lost)}")


def require_one_score(model: Any, name: str, flag: str) -> None:
    """Raise ConfigError for a reranker that gives several numbers for a pair."""
    if model.num_labels != 1:
        raise ConfigError(
            what="the reranker gives several labels",
            got=f"{flag} {name}: {model.num_labels} labels",
            why="texts are ordered by one score of each pair",
            fix="name a reranker with one label"
            + (", or a plain encoder; labels are trained by whet classify" if flag == "--model_name_or_path" else ""),
        )


def _downloaded(name: str, kind: Kind, revision: str | None, cache_folder: str | None) -> Path | None:
    """Return the folder with what the hub's client has just brought of this name; None if it lies elsewhere."""
    from huggingface_hub import try_to_load_from_cache

    cache = cache_folder or os.environ.get("SENTENCE_TRANSFORMERS_HOME")
    owner = getattr(getattr(library(), kind), "default_huggingface_organization", None)
    for full in (name, *([f"{owner}/{name}"] if owner and "/" not in name else [])):
        for file in ("config_sentence_transformers.json", "modules.json", "config.json"):
            found = try_to_load_from_cache(full, file, cache_dir=cache, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    return None


def _name_document_prompt(model: Any) -> None:
    """Give the model's prompt for passages, or for its corpus, the name of the prompt for documents, if that is empty.

    sentence-transformers fills a missing prompt for documents with "", which `encode_document` then takes first.
    """
    prompts = model.prompts
    name = next((one for one in DOCUMENT_PROMPTS if prompts.get(one)), None)
    if name is not None and not prompts.get("document"):
        prompts["document"] = prompts[name]
        logger.info("before each document: %r, the model's prompt %r", prompts[name], name)


def set_document_prompt(model: Any, text: str) -> None:
    """Let this text come before each document, under every name that the model has for such a prompt."""
    names = [name for name in DOCUMENT_PROMPTS if name in model.prompts]
    model.prompts |= dict.fromkeys(["document", *names], text)


def prompts_of(model: Any) -> tuple[str, str, str]:
    """Return what comes before a query, before a document, and before any other text, of a model that was loaded."""
    prompts = model.prompts
    return prompts.get("query") or "", prompts.get("document") or "", prompts.get(model.default_prompt_name) or ""


def _require_open(about: Mapping[str, Any], kind: Kind, name: str, flag: str, *, trains: bool) -> None:
    """Raise ConfigError for an export that is no model of this kind, or that is to be trained."""
    task = "embed" if kind == "SentenceTransformer" else "rerank"
    if trains:
        raise ConfigError(
            what=f"{flag} names an export",
            got=name,
            why="a graph has no weights that can be trained",
            fix="name the folder that it was exported from",
        )
    if about.get("task") != task:
        raise ConfigError(
            what=f"{flag} names the export of another model",
            got=f"{name}: of whet {about.get('task')}",
            why="a text becomes a vector here" if task == "embed" else "a pair of texts gets a score here",
            fix=f"name an export of a model that whet {task} has trained",
        )
    prompts = about.get("prompts", {})
    checks = {
        "max_seq_length": isinstance(about.get("max_seq_length"), int),
        "prompts": isinstance(prompts, dict) and {*map(type, prompts.values())} <= {str},
        "default_prompt_name": about.get("default_prompt_name") in (None, *prompts),
        "dimension": task == "rerank" or isinstance(about.get("dimension"), int),
        "similarity_fn_name": task == "rerank" or about.get("similarity_fn_name") in SIMILARITIES,
    }
    if odd := [key for key, is_right in checks.items() if not is_right]:
        raise ConfigError(
            what=f"{Path(name) / exported.MANIFEST} cannot be read",
            got={key: about.get(key) for key in odd},
            why="it says how texts are read, and what their vectors are",
            fix="export the model again with this version of whet",
        )


def computed_by(compute: Callable[[Arrays], Arrays], about: Mapping[str, Any], tokenizer: Any, config: Any) -> Any:
    """Return a model of sentence-transformers whose only module is a graph.

    `about` is whet's section of the manifest, `compute` returns the outputs of the graph by name.
    """
    kind: Any = library("base.modules").InputModule
    module = type("Graph", (_Graph, kind), {})(compute, about, tokenizer, config)
    if about["task"] == "rerank":  # the graph holds the activation
        return library().CrossEncoder(modules=[module], device="cpu", activation_fn=nn.Identity())
    model = library().SentenceTransformer(
        modules=[module], device="cpu", prompts={**about["prompts"]}, default_prompt_name=about["default_prompt_name"],
        similarity_fn_name=about["similarity_fn_name"],
    )  # fmt: skip
    _name_document_prompt(model)
    return model


class _Graph(nn.Module):
    """Texts, or pairs of them, to vectors or scores; with sentence-transformers' InputModule, the module of a model."""

    def __init__(
        self,
        compute: Callable[[exported.Arrays], exported.Arrays],
        about: Mapping[str, Any],
        tokenizer: Any,
        config: Any,
    ) -> None:
        super().__init__()
        self.compute = compute
        self.about = about
        self.tokenizer = tokenizer
        self.config = config
        self.max_seq_length: int = about["max_seq_length"]

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Return the columns (B, T) of these texts or pairs."""
        texts = [[f"{prompt or ''}{one}"] if isinstance(one, str) else [*one] for one in inputs]
        found = self.tokenizer(
            *([*column] for column in zip(*texts, strict=True)), padding=True, truncation="longest_first",
            max_length=self.max_seq_length, return_tensors="pt",
        )  # fmt: skip
        return {name: found[name] for name in self.about["inputs"]}

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Add the vectors (B, D) or the scores (B,)."""
        feed = {name: features[name].to("cpu", torch.int64).numpy() for name in self.about["inputs"]}
        name = _OUTPUTS[self.about["task"]]
        return {**features, name: torch.from_numpy(self.compute(feed)[name])}

    def get_embedding_dimension(self) -> int:
        """Return how many numbers a vector has."""
        return self.about["dimension"]

    def save(self, *_: Any, **__: Any) -> None:
        """Refuse: the folder of the export is what there is."""
        raise NotImplementedError("an exported model has no weights to save; copy its folder")


def described(model: Any) -> str | None:
    """Return the number format and runtime of an export, for people; None for any other model."""
    return exported.described(model[0].about) if isinstance(model[0], _Graph) else None


def set_length(model: Any, asked: int | None) -> int | None:
    """Let the model cut texts after so many tokens; return its length. ConfigError if it has not the positions."""
    backbone = model.transformers_model
    most = None if backbone is None else max_positions(backbone)
    if isinstance(model[0], _Graph):
        most = positions_of(model[0].config)
    if asked is not None and most is not None and asked > most:
        raise ConfigError(
            what="max_seq_length is longer than the model",
            got=asked,
            why=f"it has {most} positions",
            fix=f"use --max_seq_length {most} or less",
        )
    if asked is not None:
        model.max_seq_length = asked
    elif most is not None and (model.max_seq_length is None or model.max_seq_length > most):
        model.max_seq_length = most
    return model.max_seq_length


def optimized(model: Any, precision: str = "fp32") -> Any:
    """Return the model, changed by `whet.optimize` if it knows its encoder; the log says why not."""
    import whet

    if (own := described(model)) is not None:
        if precision == "bf16":
            raise exported.other_format("bf16", own)
        return model

    try:
        return whet.optimize(model, dtype=torch.bfloat16 if precision == "bf16" else None)
    except ConfigError as error:
        if precision == "bf16":
            raise
        logger.info("%s runs as it is, with its padding: %s", type(model).__name__, error)
        return model
