"""A model folder is hostile until it is checked: what leaves it, what runs code, and what is larger than it can be.

Everything here is decided before transformers opens a file of the folder. config.json and tokenizer_config.json pass
by allow-list: settings of the architecture pass, what loads code does not.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from whet.config.upload import ADAPTER
from whet.errors import ConfigError
from whet.log import logger
from whet.models.experts.settings import KEY, unmarked
from whet.strict_json import BadJson, parse_document

CONFIG, TOKENIZER_CONFIG, TOKENIZER = "config.json", "tokenizer_config.json", "tokenizer.json"
_TEMPLATES = "additional_chat_templates"
_MIB = 1 << 20
_LARGEST_BYTES = {
    CONFIG: 8 * _MIB,
    TOKENIZER_CONFIG: 16 * _MIB,
    "special_tokens_map.json": 4 * _MIB,
    "added_tokens.json": 16 * _MIB,
    "model.safetensors.index.json": 32 * _MIB,
    TOKENIZER: 128 * _MIB,
}
"""Limits of the JSON files, far above those of the largest models that are published."""
_LARGEST_TEXT_BYTES = 128 * _MIB
"""Limit of vocabularies, merges and templates."""
_READ_WHOLE = (".json", ".txt", ".model", ".jinja", ".bpe", ".vocab")


def check_folder(folder: Path, *, adapter: bool = False, hub_name: str | None = None) -> None:
    """Refuse a folder of whose files one leaves it, is no plain file, or is too large to be what its name says.

    One with an adapter is refused too, unless `adapter` says that nothing of that is read. `hub_name` is the name on
    the hub from which it was downloaded.
    """
    for path in sorted(folder.iterdir()):
        if path.name == _TEMPLATES and path.is_dir():
            for template in sorted(path.iterdir()):
                _check_entry(template, folder)
        _check_entry(path, folder)
    if not adapter and (folder / ADAPTER).exists():
        place = "FOLDER" if hub_name is None else "adapter"
        first = "" if hub_name is None else f"download it: hf download {hub_name} --local-dir {place}; then "
        raise bad_model(
            f"{hub_name or folder}: this is an adapter",
            got=ADAPTER,
            why="it names a model of its own choice, to be loaded from another place",
            fix=f"{first}fold it into its model, and name that folder: whet merge {place} --output_dir MERGED; "
            f"whet predict, whet ask and whet generate take {place} as it is",
        )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of the folder; raises ConfigError if it is damaged or anything else."""
    try:
        value = parse_document(path.read_text("utf-8"))
    except BadJson as problem:
        raise bad_model(f"{path}: {problem.what}", got=problem.got, why=problem.why, fix=problem.fix) from None
    except FileNotFoundError:
        raise bad_model(f"{path} is missing", why="it says how the model is built", fix=_AGAIN) from None
    except (OSError, ValueError) as error:
        raise bad_model(f"{path}: cannot be read", got=str(error), why="it has to be UTF-8 text", fix=_AGAIN) from None
    if not isinstance(value, dict):
        raise bad_model(f"{path}: holds no object", got=type(value).__name__, why="settings have names", fix=_AGAIN)
    return value


def file_of_run(folder: Path, name: str) -> Path | None:
    """Return this file of the run that wrote a folder: a checkpoint's may lie in the folder around it.

    None if there is none, and for the name of a model that is no folder.
    """
    if not folder.is_dir():
        return None
    places = [folder, folder.resolve().parent] if folder.resolve().name.startswith("checkpoint-") else [folder]
    return next((place / name for place in places if (place / name).exists()), None)


def plain_name(name: object) -> bool:
    """Return whether this is the name of a file in the folder itself: no path, nothing that leads elsewhere."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= 255
        and name not in (".", "..")
        and not any(letter in name for letter in "/\\\0:")
        and name.isprintable()
    )


def bad_model(what: str, *, why: str, fix: str, got: object = None) -> ConfigError:
    """Return the error of a model folder that is not loaded; `what` says which file of it, and what is wrong."""
    return ConfigError(what=f"the model cannot be loaded: {what}", got=got, why=why, fix=fix)


_AGAIN = "copy the folder again from where it comes, or use another model"


def _check_entry(path: Path, folder: Path) -> None:
    if path.is_symlink() and not _stays(path, folder):
        raise bad_model(
            f"{path}: this link leaves the folder",
            got=str(path.readlink()),
            why="a model is read from its own folder alone",
            fix="put the file itself in its place, or remove the link",
        )
    kind = path.stat()
    if stat.S_ISDIR(kind.st_mode):
        return
    if not stat.S_ISREG(kind.st_mode):
        raise bad_model(
            f"{path}: this is a pipe, a socket or a device",
            got=stat.filemode(kind.st_mode),
            why="a model folder holds plain files",
            fix="remove it",
        )
    limit = _LARGEST_BYTES.get(path.name, _LARGEST_TEXT_BYTES if path.suffix in _READ_WHOLE else None)
    if limit is not None and kind.st_size > limit:
        raise bad_model(
            f"{path}: the file is too large",
            got=f"{kind.st_size:,} bytes",
            why=f"at most {limit:,} bytes are read of such a file",
            fix=_AGAIN,
        )


def _stays(path: Path, folder: Path) -> bool:
    """Return whether the link ends in the folder, or in the file store of the hub's cache, next to a snapshot."""
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        return False
    root = folder.resolve()
    if target.is_relative_to(root):
        return True
    return root.parent.name == "snapshots" and target.is_relative_to(root.parents[1] / "blobs")


_RUNS_CODE = "it names code that would be run, and whet never runs code that comes with a model"
_ELSEWHERE = "it names a file or a method of its own choice, and a model is read from its own folder alone"
_FORBIDDEN = {
    "auto_map": _RUNS_CODE,
    "trust_remote_code": _RUNS_CODE,
    "custom_pipelines": _RUNS_CODE,
    "_attn_implementation_internal": _RUNS_CODE,
    "_experts_implementation_internal": _RUNS_CODE,
    "transformers_weights": _ELSEWHERE,
    "gguf_file": _ELSEWHERE,
    "quantization_config": "weights are read as float numbers; a quantised model needs the code of another package",
}
_IMPLEMENTATIONS = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_OWN_IMPLEMENTATIONS = (None, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_DTYPES = (None, "float32", "float16", "bfloat16", "float64")
_ALSO_KNOWN = (
    *("model_type", "num_labels", "torch_dtype", "gradient_checkpointing", "position_embedding_type", "pruned_heads",
     "output_attentions", "output_past", "use_bfloat16", "finetuning_task", "task_specific_params", "layer_types",
     "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "net_structure_type", "type_vocab_size",
     "num_memory_blocks", "gap_size", "down_scale_factor", "directionality", "pooler_fc_size", "pooler_size_per_head",
     "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_type", "sep_token_id",
     "cls_token_id", "mask_token_id", "norm_pooled", "use_cache", "classifier_dropout", "language", "name",
     "summary_activation", "summary_first_dropout", "summary_last_dropout", "summary_type", "summary_use_proj",
     "tie_weights_", "decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("attention_head_size", "cls_dropout", "conv_act", "conv_groups", "conv_kernel_size", "embedding_size",
     "norm_rel_ebd", "pooler_hidden_size", "position_buckets", "share_att_key", "talking_head"),
)  # fmt: skip
"""Settings that classes of today do not declare: those of older versions of transformers, and what DeBERTa reads."""
_OF_CALLS = ("return_dict", "use_return_dict", "output_attentions", "output_hidden_states", "torchscript",
             "chunk_size_feed_forward", "is_encoder_decoder")  # fmt: skip
"""Settings of how a call runs and what it returns, which whet decides, and one that is what its class says it is."""
_PROBABILITIES = ("dropout", "dropout_prob", "pdrop", "layerdrop")
"""Ends of the names of settings that are probabilities."""
_LARGEST = {
    **dict.fromkeys(("num_labels", "num_experts", "num_local_experts"), 1 << 20),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), 1 << 14
    ),
}
"""Counts of which transformers makes lists while it reads a configuration, and limits far above published models."""
_TOKENIZER_FORBIDDEN = {
    "auto_map": _RUNS_CODE,
    "trust_remote_code": _RUNS_CODE,
    "init_inputs": "values without a name go to the tokenizer's class, whatever it does with them",
    "mecab_kwargs": _ELSEWHERE,
    "sudachi_kwargs": _ELSEWHERE,
    "jumanpp_kwargs": _ELSEWHERE,
    "gguf_file": _ELSEWHERE,
}
_ROBERTAS = ("roberta", "xlm-roberta", "camembert")
"""Model types with the same layers and the same names of weights."""
_LEFT_BEHIND = ("special_tokens_map_file", "tokenizer_file")
"""Paths on the machine that saved the tokenizer; older versions wrote them, and nobody opens them."""


def checked_config(folder: Path, *, of_adapter: bool = False) -> dict[str, Any]:
    """Return the settings of config.json that its architecture knows; raises ConfigError for what leads elsewhere.

    The log names the settings that are left out. `of_adapter`: the file describes the model of an adapter next to it,
    whose weights are in another folder, where they may have been quantised as they were loaded.
    """
    path = folder / CONFIG
    values = unmarked(read_object(path))
    if of_adapter:
        values.pop("quantization_config", None)
    _refuse_forbidden(path, values, _FORBIDDEN)
    experts = {KEY: values.pop(KEY)} if KEY in values else {}
    config_class = _class_of(path, values)
    _require_one_family(path, values)
    return _known(path, values, config_class) | experts


def check_tokenizer_config(folder: Path) -> None:
    """Refuse a tokenizer_config.json that names code, or a file that is not in the folder."""
    path = folder / TOKENIZER_CONFIG
    if not path.exists():
        return
    values = read_object(path)
    _refuse_forbidden(path, values, _TOKENIZER_FORBIDDEN)
    _check_template_names(path, values.get("chat_template"))
    for place, name, value in _entries({name: value for name, value in values.items() if name not in _LEFT_BEHIND}):
        names = value if isinstance(value, list) and name.endswith("_files") else [value]
        if name.endswith(("_file", "_files")) and not all(one is None or plain_name(one) for one in names):
            raise bad_model(f"{path}: {place} leads out of the folder", got=value, why=_ELSEWHERE, fix=_TAKE_OUT)


def _check_template_names(path: Path, templates: Any) -> None:
    """Refuse chat templates whose names are no names of files: each is saved in one of its own."""
    if templates is None or isinstance(templates, str):
        return
    named = templates if isinstance(templates, list) else [templates]
    for one in named:
        name, text = (one.get("name"), one.get("template")) if isinstance(one, Mapping) else (None, None)
        if not isinstance(text, str) or not plain_name(f"{name}.jinja") or not isinstance(name, str):
            raise bad_model(
                f"{path}: chat_template is no text, and no list of templates with names",
                got=f"{one!r}"[:200],
                why="each template is saved in a file of its name",
                fix="correct chat_template, or take it out",
            )


_COPY = "copy config.json again from where the model comes"
_TAKE_OUT = "take the entry out if you trust the rest, or use another model"


def _class_of(path: Path, values: Mapping[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    name = values.get("model_type")
    if not isinstance(name, str) or name not in CONFIG_MAPPING:
        raise bad_model(
            f"{path} names no architecture of transformers",
            got=name,
            why="model_type says which of transformers' own classes builds the model",
            fix="use a model that transformers itself implements",
        )
    return CONFIG_MAPPING[name]


def _require_one_family(path: Path, values: Mapping[str, Any]) -> None:
    """Refuse a model_type that contradicts the class in `architectures`.

    Weights of Gemma fit a Llama, say: it computes something else with them.
    """
    from transformers.models.auto import modeling_auto

    named, model_type = values.get("architectures"), values["model_type"]
    tables = [table for name, table in vars(modeling_auto).items() if name.endswith("_MAPPING_NAMES")]
    for name in named if isinstance(named, list) else []:
        families = {kind for table in tables for kind, classes in table.items() if name in _listed(classes)}
        if families and not any(_alike(kind, model_type) for kind in families):
            raise bad_model(
                f"{path} names two architectures",
                got=f"model_type {model_type}, architectures {name}",
                why="the weights are those of one of them, and the other would compute something else with them",
                fix=f"set model_type to {' or '.join(sorted(families))}, or take architectures out if that is wrong",
            )


def _alike(family: str, other: str) -> bool:
    return family == other or (family in _ROBERTAS and other in _ROBERTAS)


def _listed(classes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (classes,) if isinstance(classes, str) else classes


def _known(path: Path, values: Mapping[str, Any], config_class: Any) -> dict[str, Any]:
    """Return the settings that this class declares; the log names those that are left out."""
    known = _names(config_class)
    kept = {name: value for name, value in values.items() if name in known and name not in _OF_CALLS}
    for name, largest in _LARGEST.items():
        if isinstance(value := kept.get(name), int | float) and not 0 <= value <= largest:
            raise bad_model(
                f"{path}: {name} is no number that a model has", got=value, why=f"it is 0 to {largest:,}", fix=_COPY
            )
    usual = {field.name: field.default for field in fields(config_class)} | {"use_return_dict": True}
    for name, value in kept.items():
        if name.endswith(_PROBABILITIES) and (value is None or isinstance(value, int | float)):
            if value is None and not isinstance(usual.get(name), int | float):
                continue  # such as classifier_dropout, which takes that of the hidden states then
            if value is None or not 0 <= value <= 1:
                raise bad_model(f"{path}: {name} is no probability", got=value, why="it is 0 to 1", fix=_COPY)
    for name, part in config_class.sub_configs.items():
        if isinstance(kept.get(name), dict):
            inner = kept[name]
            kept[name] = _known(path, inner, part if hasattr(part, "attribute_map") else _class_of(path, inner))
    odd = sorted(set(values) - set(kept) - {"_name_or_path", "_commit_hash", *_IMPLEMENTATIONS, *_OF_CALLS})
    odd = [name for name in odd if not name.startswith("_")]
    unread = [name for name in _OF_CALLS if values.get(name) not in (None, usual.get(name, False))]
    if unread:
        logger.info("%s: %s left out: whet decides how a forward pass runs", path, ", ".join(unread))
    if odd:
        logger.info("%s: %s left out: %s does not know it", path, ", ".join(odd)[:300], config_class.__name__)
    return kept


def _names(config_class: Any) -> set[str]:
    """Return every setting that the class declares, or names in its own code where it is built."""
    known = {field.name for field in fields(config_class)} | set(config_class.attribute_map) | set(_ALSO_KNOWN)
    for one in config_class.__mro__:
        code = getattr(one.__dict__.get("__post_init__"), "__code__", None)
        known |= {word for word in (*code.co_consts, *code.co_names) if isinstance(word, str)} if code else set()
    return {name for name in known if not name.startswith("_")}


def _refuse_forbidden(path: Path, values: Mapping[str, Any], forbidden: Mapping[str, str]) -> None:
    for place, name, value in _entries(values):
        if name in forbidden and not (name == "init_inputs" and value in ([], None)):
            raise bad_model(f"{path}: {place} is not read", got=value, why=forbidden[name], fix=_TAKE_OUT)
        if name in _IMPLEMENTATIONS and value not in _OWN_IMPLEMENTATIONS:
            raise bad_model(
                f"{path}: {place} is not one of transformers' own", got=value, why=_RUNS_CODE, fix=_TAKE_OUT
            )
        if name in ("dtype", "torch_dtype") and value not in _DTYPES:
            kinds = ", ".join(str(kind) for kind in _DTYPES[1:])
            raise bad_model(f"{path}: {place} is no float type", got=value, why=f"weights are {kinds}", fix=_TAKE_OUT)


def _entries(values: Any, place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name, value) of every named entry, however deep it lies."""
    pairs = values.items() if isinstance(values, Mapping) else enumerate(values)
    for name, value in pairs:
        here = f"{place}.{name}" if place else str(name)
        if isinstance(values, Mapping):
            yield here, str(name), value
        if isinstance(value, Mapping | list):
            yield from _entries(value, here)
