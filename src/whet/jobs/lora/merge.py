"""`whet merge`: the weights of an adapter added to those of its model, saved as a model like any other.

Nothing is written before the merged model has computed what the adapted one computes: peft's merge of tied tables and
of weights that overflow is wrong without an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whet import json_output
from whet.errors import ConfigError, StorageError
from whet.hardware import memory
from whet.jobs.predict.trained import NAME
from whet.log import logger, set_up
from whet.models import finite
from whet.models.adapters import is_pefts, passed_on, unwrapped
from whet.models.loading import heads
from whet.models.loading.adapter import (
    WITH_PEFT,
    base_model,
    head_of_adapter,
    quiet_peft,
    require_rows,
    revision_of,
    settings_of,
    tokenizer_source,
    with_adapter,
)
from whet.models.loading.folder_check import ADAPTER, file_of_run, read_object
from whet.models.loading.load import (
    ModelSource,
    load_tokenizer,
    max_positions,
)
from whet.models.loading.special_tokens import align_special_tokens
from whet.store.weights import save_processing, save_weights
from whet.watch import files as output_files
from whet.watch import printing

_TYPES = "token_type_ids"
_OUTPUTS = ("logits", "last_hidden_state")
"""What models are compared by: those without a head give hidden states alone."""
_N_ROWS, _ROW_TOKENS = 3, 24
"""Of the comparison of the merged model with the adapted one."""
_CLOSE = 1e-3
"""Of the largest logit, how far the two may be apart: rounding of float32 through tens of blocks stays below a tenth of
it, and a pair that is missing, added twice, or added to another table does not."""
_UNFINISHED = ".merge.partial"
"""Lies in the output folder while the model is written to it."""


def run_merge(adapter: str, output_dir: str, base: str | None, known: Iterable[heads.Head]) -> int:
    """Run the command; return its exit code. The arguments are those of `write_merged`."""
    set_up()
    base = write_merged(Path(adapter), Path(output_dir), base, known)
    printing.show([f"{base} with the adapter of {adapter} is in {output_dir}"])
    json_output.add(base=base)
    json_output.add_outputs(folder=output_dir)
    return 0


def write_merged(folder: Path, output: Path, base: str | None, known: Iterable[heads.Head]) -> str:
    """Write the model with the adapter of the folder folded in to a new folder; return the name of the model.

    `base` is the model that the adapter was trained on, None the one that it names; `known` are the heads of models
    whose adapters whet trains.
    """
    _require_empty(output)
    settings = settings_of(folder)
    base = base or base_of(settings, folder)
    source = ModelSource(model=base, revision=revision_of(settings, base), flag="--base_model_name_or_path")
    head = head_of_adapter(settings, folder, known)
    model = base_model(source, head, folder)
    tokenizer, reading = load_tokenizer(tokenizer_source(source, folder), resize=None), file_of_run(folder, NAME)
    require_rows(model, tokenizer, folder)
    wrapped = with_adapter(model, settings, folder)
    _embed_types_as_trained(wrapped)
    with quiet_peft():
        align_special_tokens(wrapped, tokenizer)  # as in the training
    merged = _merged(wrapped, _rows(model, head, tokenizer, settings), folder)

    def fill(staging: Path) -> None:
        save_weights(merged, staging)
        save_processing(tokenizer, staging)
        if reading is not None:
            shutil.copyfile(reading, staging / NAME)

    _write(output, fill)
    return base


def _write(output: Path, fill: Callable[[Path], None]) -> None:
    """Write the model that `fill` puts into a folder; a merge that is killed in the middle can be repeated."""
    mark = output / _UNFINISHED
    with output_files.stored(f"the model cannot be written to {output}", output):
        output.mkdir(parents=True, exist_ok=True)
        mark.touch()
    try:
        output_files.write_model(output, fill)
    except StorageError:
        with suppress(OSError):
            if [*output.iterdir()] == [mark]:
                mark.unlink()
        raise
    with output_files.stored(f"{mark} cannot be removed", output):
        mark.unlink()


def base_of(settings: Mapping[str, Any], folder: Path) -> str:
    """Return the model that the adapter names."""
    found = settings.get("base_model_name_or_path")
    if not isinstance(found, str) or not found.strip():
        raise ConfigError(
            what="the adapter names no model",
            got=f"{folder / ADAPTER}: base_model_name_or_path {found!r}",
            why="its pairs belong to the weights of one model",
            fix="name the model that it was trained on in --base_model_name_or_path",
        )
    return found


def _merged(wrapped: Any, rows: list[Tensor], folder: Path) -> Any:
    """Return the model with the pairs added to its weights; raises ConfigError if it computes anything else then.

    Tables that were tied, and differ now, are saved as two.
    """
    wanted = _logits(wrapped, rows, folder)
    inside = unwrapped(wrapped)
    tied = _untied(inside)
    try:
        with quiet_peft():
            merged = wrapped.merge_and_unload()
    except Exception as error:
        raise memory.lack(error) or ConfigError(
            what="the adapter cannot be added to the weights of its model",
            got=str(folder),
            why=" ".join(str(error).split())[:300],
            fix="load it next to its model with peft instead",
        ) from error
    if tied:
        _tie_if_equal(merged, tied)
    found = _logits(merged, rows, folder)
    largest = max(float(one.abs().max()) for one in wanted)
    off = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
    spoilt = finite.not_finite(merged)
    if off > _CLOSE * largest or spoilt:
        raise ConfigError(
            what="the merged model does not compute what the model with the adapter computes",
            got=f"logits off by {off:.3g}, where the largest is {largest:.3g}"
            + (f"; not finite: {finite.shown(spoilt)}" if spoilt else ""),
            why=f"on {len(rows)} sequences they may differ by float32 rounding, {_CLOSE:g} of the largest logit",
            fix="load the adapter next to its model with peft instead; nothing was written",
        )
    return merged


def _untied(inside: Any) -> dict[str, str]:
    """Give tables that share their weight one each, if a pair is at one of them; return which were tied, by name.

    Otherwise what is added to one would be added to the other.
    """
    pairs: dict[str, str] = inside.get_expanded_tied_weights_keys(all_submodels=True)
    parts = {name.rpartition(".")[0] for pair in pairs.items() for name in pair}
    if not any(is_pefts(inside.get_submodule(part)) for part in parts):
        return {}
    shared = {id(weight) for weight in _plain_weights(inside, parts)}
    for module in inside.modules():
        for name, weight in module._parameters.items():
            if id(weight) in shared and not is_pefts(module):
                setattr(module, name, nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad))
    return pairs


def _tie_if_equal(merged: Any, tied: Mapping[str, str]) -> None:
    """Let the tables share one weight again if they are still equal, else say in the configuration that they do not."""
    equal = all(torch.equal(merged.get_parameter(one), merged.get_parameter(other)) for one, other in tied.items())
    for part in merged.modules():
        if hasattr(getattr(part, "config", None), "tie_word_embeddings"):
            part.config.tie_word_embeddings = equal
    merged.tie_weights()
    if not equal:
        logger.info(
            "tables that were tied differ now, and each is saved: %s", ", ".join(sorted({*tied, *tied.values()}))
        )


def _plain_weights(inside: Any, parts: set[str]) -> Iterator[nn.Parameter]:
    """Yield the model's own weights in these modules, under peft's layers too."""
    for part in parts:
        for module in inside.get_submodule(part).modules():
            if not is_pefts(module) and not isinstance(module, nn.ParameterDict | nn.ModuleDict):
                yield from module.parameters(recurse=False)


def _rows(model: Any, head: heads.Head, tokenizer: Any, settings: Mapping[str, Any]) -> list[Tensor]:
    """Return token ids (1, T) to compare models on: any for a decoder, pairs of texts for an encoder."""
    seed = torch.Generator().manual_seed(0)
    n_known = min(len(tokenizer), model.get_input_embeddings().weight.shape[0])
    length = min(_ROW_TOKENS, max_positions(model) or _ROW_TOKENS)
    ids = torch.randint(n_known, (_N_ROWS, length), generator=seed)
    named = settings.get("trainable_token_indices") or []
    learnt = named if isinstance(named, list) else [one for some in named.values() for one in some]
    if learnt:
        ids[:, ::2] = torch.tensor(learnt).repeat(length)[: ids[:, ::2].numel()].reshape(_N_ROWS, -1)
    if head.causal:
        return list(ids.split(1))
    texts = [tokenizer.decode(row[: length // 3], skip_special_tokens=True) for row in ids]
    asked = [tokenizer(text, text, truncation=True, max_length=length, return_tensors="pt") for text in texts]
    return [row["input_ids"] for row in asked]


def _logits(model: Any, rows: list[Tensor], folder: Path) -> list[Tensor]:
    """Return the model's logits for each row; raises ConfigError if it has none that are finite."""
    model.eval()
    try:
        with torch.no_grad():
            done = [model(input_ids=row, attention_mask=torch.ones_like(row)) for row in rows]
    except Exception as error:
        raise memory.lack(error) or ConfigError(
            what="the model with the adapter cannot be run",
            got=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            why="the merged model is compared with it before anything is written",
            fix=WITH_PEFT,
        ) from error
    found = [value for one in done for name, value in one.items() if name.endswith(_OUTPUTS)]
    if not all(bool(torch.isfinite(value).all()) for value in found):
        settings = read_object(folder / ADAPTER)
        raise ConfigError(
            what="the model with the adapter computes logits that are not finite",
            got=f"{folder}: lora_alpha {settings.get('lora_alpha')}, r {settings.get('r')}",
            why="the weights of the model and of its adapter are finite, but their products are not",
            fix="name another checkpoint of the run, or correct lora_alpha in " + ADAPTER,
        )
    return found


def _embed_types_as_trained(wrapped: nn.Module) -> None:
    """Give all token types the embedding of the first, if peft's class for the task keeps them from the model.

    PeftModelForQuestionAnswering does: an adapter learns with the first type alone, and a merged model is given others.
    """
    if _TYPES in passed_on(wrapped, frozenset({"input_ids", _TYPES})):
        return
    for name, table in unwrapped(wrapped).named_modules():
        if name.endswith("token_type_embeddings") and isinstance(table, nn.Embedding):
            with torch.no_grad():
                table.weight.copy_(table.weight[:1].expand_as(table.weight))
            logger.info("%s: each type has the embedding of the first, as under %s", name, type(wrapped).__name__)


def _require_empty(output: Path) -> None:
    """Refuse a folder with files, except for those of a merge that was killed in the middle."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())) and not (output / _UNFINISHED).is_file():
        raise ConfigError(
            what="output_dir is not empty",
            got=str(output),
            why="the merged model would replace files that are there",
            fix="name a new folder in --output_dir",
        )
