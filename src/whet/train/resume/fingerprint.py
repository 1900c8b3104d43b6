"""The identity of a run: its model, data and environment, written into each checkpoint and compared on resume."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from whet.data.store import RowStore
from whet.kernels.library import library
from whet.models import adapters
from whet.objectives.packed_head import PackedHead
from whet.optim import schedule
from whet.optim.optimizers.native import WhetAdamW
from whet.optional import is_from
from whet.train.run import Run
from whet.version import __version__

_PASSING = {
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "_attn_implementation",
    "_experts_implementation", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript",
}  # fmt: skip
"""Entries of a model's configuration that do not change its loss: where it is from, how it runs, what it returns."""
_INFERRED = ("problem_type",)
"""Entries that transformers' forwards fill in from the first labels if the user left them open (None)."""
_MODEL_CONFIG = "config.json"
UNDER_ADAPTERS = "weights under the adapter"
"""A fact of the model of a run with adapters."""
_SAMPLED_ROWS = 64
_SAMPLED_NUMBERS = 256


def of(run: Run, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
    """Return the facts of the run as JSON values."""
    facts = {
        "model": {"class": type(run.model).__name__, "config": _config(run.model)},
        "weights": {name: _shape(parameter) for name, parameter in run.model.named_parameters()},
        "dtype": ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in run.model.parameters()})),
        "data": _data(run.train_dataset),
        "order": run.plan.order_rule,
        "optimizer": _optimizer_class(optimizer),
        "environment": environment(),
    }
    if schedule.moves_by_metric(scheduler):
        facts["evaluation_data"] = _data_of_each(run.eval_dataset)
    padding = run.objective.padding
    if padding.in_loss != "none":
        facts["data"]["padded_to"] = padding.length or "the longest row of a batch"
    # A padded run takes its dropout masks from torch's generator.
    if isinstance(getattr(run.objective, "plain", run.objective), PackedHead):
        facts["data"]["padding"] = "not computed"
    if (under := frozen_under_adapters(run.model)) is not None:
        facts["model"][UNDER_ADAPTERS] = under
    if (loss := getattr(run.objective, "identity", None)) is not None:
        facts["loss"] = loss
    return json.loads(json.dumps(facts, default=str))


def continue_with_inferred(identity: dict[str, Any], model: nn.Module, folder: Path) -> None:
    """Give the model, and the identity, what the run of the checkpoint inferred and this run leaves open.

    A forward before the start of a run (an evaluation, an earlier training) fills these in earlier than another run
    does. So an open entry is no difference: the run continues with what the checkpoint's run trained with.
    """
    entries, saved = identity["model"]["config"], _config_in(folder)
    for name in _INFERRED:
        if name in entries and entries[name] is None and saved.get(name) is not None:
            setattr(model.config, name, saved[name])
            entries[name] = saved[name]


def model_differences(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield one line for each difference from the model of a checkpoint, whichever version of whet wrote it."""
    kept = {name: value for name, value in before.get("config", {}).items() if name not in _PASSING}
    saved = _config_in(folder)
    for name in _INFERRED:  # open when the run of the checkpoint began
        if name in kept and kept[name] is None:
            kept[name] = saved.get(name) if saved else now["config"].get(name)
    under = {name: one for name, one in now.items() if name == UNDER_ADAPTERS}  # earlier versions have none
    yield from differences({**under, **before, "config": kept}, now, "model")


def _config_in(folder: Path) -> dict[str, Any]:
    """Return the model's configuration as the checkpoint holds it after the forwards of its run; none of adapters."""
    path = folder / _MODEL_CONFIG
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}


def _optimizer_class(optimizer: Optimizer) -> str:
    """Return the full name of the class; whet's AdamW has torch's name, as its rule and state are the same."""
    kind = torch.optim.AdamW if type(optimizer) is WhetAdamW else type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}"


def environment() -> dict[str, Any]:
    """Return what the last bits of the results may depend on besides the settings."""
    return {
        "threads": torch.get_num_threads(),
        "whet": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_operators": library() is not None,
    }


def differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield one line for each value that differs, with its dotted name."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name}: {before} in the checkpoint -> {now} now"


def digest_of_rows(rows: Any) -> str | None:
    """Return a checksum of a data set: of all arrays of a RowStore or its like, or of sampled rows of other sets.

    None for any set but a list or a datasets.Dataset: reading its rows may be slow or draw random numbers.
    """
    digest = xxhash.xxh3_128()
    if isinstance(rows, RowStore) or hasattr(rows, "arrays"):
        for name, column in sorted(rows.arrays().items()):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()
    fixed = is_from(rows, "datasets", "Dataset") and rows.format["type"] != "custom"
    if not (fixed or isinstance(rows, list | tuple)):
        return None
    for row in np.unique(np.linspace(0, len(rows) - 1, _SAMPLED_ROWS).astype(int)):
        for part in _parts(rows[int(row)]):
            digest.update(part)
    return digest.hexdigest()


def digest_of_weights(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a checksum of named weights, of some numbers of each; state of other kinds takes no part."""
    digest = xxhash.xxh3_128()
    for name, weight in ((name, one) for name, one in weights if isinstance(one, Tensor)):
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        for numbers in (part.detach().flatten() for part in _plain_parts(weight)):
            some = numbers[:: max(1, len(numbers) // _SAMPLED_NUMBERS)]
            digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _plain_parts(weight: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a weight is made of: of a quantised one its codes and scales, otherwise itself."""
    if not is_traceable_wrapper_subclass(weight):
        yield weight
        return
    names, _ = weight.__tensor_flatten__()
    for name in names:
        yield from _plain_parts(getattr(weight, name))


def frozen_under_adapters(model: nn.Module) -> str | None:
    """Return a checksum of the weights under a model's adapters, which no checkpoint holds; None: it has none."""
    if not adapters.names_of(model):
        return None
    return digest_of_weights((name, one) for name, one in model.named_parameters() if not one.requires_grad)


def _parts(value: Any) -> Iterator[bytes]:
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode()
            yield from _parts(value[name])
    elif isinstance(value, Tensor):
        plain = value.detach().cpu()
        yield from _parts((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, list | tuple):
        yield json.dumps(value, default=str).encode()
    else:
        yield str(value).encode(errors="surrogatepass")


def _data(dataset: Any) -> dict[str, Any]:
    """Return the number of rows and their checksum; None if that would need reading all of them."""
    return {"rows": len(dataset), "digest": digest_of_rows(dataset)}


def _data_of_each(dataset: Any) -> dict[str, Any]:
    """Return the same for an evaluation set, or for each of several."""
    if isinstance(dataset, Mapping):
        return {str(name): _data(one) for name, one in dataset.items()}
    return {} if dataset is None else _data(dataset)


def _config(model: nn.Module) -> dict[str, Any]:
    config = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    return {name: value for name, value in values.items() if name not in _PASSING}


def _shape(parameter: nn.Parameter) -> str:
    return f"{list(parameter.shape)}" + ("" if parameter.requires_grad else " frozen")
