"""What a run is, as its checkpoints hold it, and which changes of it a resumed run may have.

A checkpoint holds the settings of its run (`training_args.json`) and its identity (`identity.json`): model, data,
optimizer and environment. A resumed run with others is refused, unless the user has allowed the change by name.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import transformers
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from whet.config.arguments import TrainingArguments
from whet.config.ranks import Place, here
from whet.config.rules.schedule import BY_METRIC
from whet.config.rules.training import CURVE_FIELDS, EVALUATION_FIELDS, METRIC_FIELDS
from whet.config.settings import options_of
from whet.data.store import RowStore
from whet.errors import ConfigError
from whet.kernels.library import library
from whet.kernels.random import generators_kept
from whet.log import logger
from whet.models import adapters
from whet.optim import schedule
from whet.optim.optimizers.native import WhetAdamW
from whet.optional import is_from
from whet.precision import policy
from whet.store import manifest
from whet.version import __version__

_ROWS, _BATCHES = "per_device_train_batch_size", "gradient_accumulation_steps"
ARGUMENTS, FINGERPRINT = "training_args.json", "identity.json"
OPTIMIZER, _WEIGHTS, _EVALUATION_DATA, _LOSS = "optimizer", "weights", "evaluation_data", "loss"
SCHEDULE = {
    "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "layerwise_lr_decay",
}  # fmt: skip
IN_GROUPS = {
    "learning_rate": ("lr", "initial_lr"), "layerwise_lr_decay": ("lr", "initial_lr"),
    "adam_beta1": ("betas",), "adam_beta2": ("betas",), "adam_epsilon": ("eps",), "weight_decay": ("weight_decay",),
}  # fmt: skip
"""Settings that an optimizer stores in its parameter groups, and their names there."""
_SCHEDULED = {"lr", "initial_lr"}
_LEARNED = {*_SCHEDULED, "betas", "eps", "weight_decay"}
_MOST_LINES = 6
_LONGEST_SHOWN = 60
_MEANT = {
    "rows_per_step": "per_device_train_batch_size times gradient_accumulation_steps times ranks",
    "data_seed": "the order of the rows; without it, seed",
}
"""Compared names that are not settings themselves -> the settings that they follow from."""
_PASSING = {
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "_attn_implementation",
    "_experts_implementation", "use_cache", "output_attentions", "output_hidden_states", "return_dict", "torchscript",
}  # fmt: skip
"""Entries of a model's configuration that do not change its loss: where it is from, how it runs, what it returns."""
_INFERRED = ("problem_type",)
"""Entries that transformers' forwards fill in from the first labels if the user left them open (None)."""
_MODEL_CONFIG = "config.json"
UNDER_ADAPTERS = "weights under the adapter"
ADAPTERS = "adapters"
"""Facts of the model of a run with adapters."""
_SAMPLED_ROWS, _READ_ROWS = 64, 3
_SAMPLED_NUMBERS = 256


class Interval(Protocol):
    """How often a run saves."""

    @property
    def strategy(self) -> str: ...
    @property
    def every(self) -> int: ...
    def due(self, done: int, epoch_ends: bool) -> bool: ...


class Plan(Protocol):
    """The steps of a run."""

    @property
    def n_steps(self) -> int: ...
    @property
    def order_rule(self) -> str | None: ...
    @property
    def save(self) -> Interval: ...


class Run(Protocol):
    """What does not change during a run."""

    @property
    def args(self) -> TrainingArguments: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def objective(self) -> Any: ...
    @property
    def plan(self) -> Plan: ...
    @property
    def train_dataset(self) -> Any: ...
    @property
    def eval_dataset(self) -> Any: ...
    @property
    def processing_class(self) -> Any: ...
    @property
    def files(self) -> Mapping[str, str]: ...
    @property
    def place(self) -> Place: ...
    @property
    def output_dir(self) -> Path: ...


# ---- comparing ----


def require_same(args: TrainingArguments, identity: Mapping[str, Any], folder: Path) -> set[str]:
    """Return the allowed differences from the checkpoint; raises ConfigError for the others."""
    lines = dict(_settings(args, folder)) | _facts(identity, _read(folder / FINGERPRINT), folder)
    _refuse(lines, args, folder)
    for text in lines.values():
        logger.warning("resuming from %s with a change that was allowed: %s", folder.name, text)
    return set(lines)


def require_same_settings(
    args: TrainingArguments, folder: Path, allowable: Collection[str] | None = None
) -> dict[str, str]:
    """Return the allowed differences in settings, in words; raises ConfigError for the others.

    Needs neither model nor data. `allowable` are the settings whose change the error may say how to allow; None: all.
    """
    lines = dict(_settings(args, folder))
    _refuse(lines, args, folder, allowable)
    return lines


def config_digest(settings: Mapping[str, Any], n_ranks: int, identity: Mapping[str, Any]) -> str:
    """Return a checksum of everything that a resume compares; `settings` are those in the checkpoint."""
    facts = {name: value for name, value in identity.items() if name != "environment"}
    return manifest.digest_of({"settings": curve(settings, n_ranks) | {"data_seed": _data_seed(settings)}, **facts})


def group_settings(changed: set[str], group: Mapping[str, Any]) -> set[str]:
    """Return the entries of an optimizer's group that come from the new settings, not from the checkpoint."""
    wanted = {entry for name in changed for entry in IN_GROUPS.get(name, ())}
    if "optim" in changed:
        wanted |= group.keys() - _LEARNED
    if "optim_args" in changed:
        wanted |= group.keys() - _SCHEDULED
    return wanted & group.keys()


def _refuse(
    lines: Mapping[str, str], args: TrainingArguments, folder: Path, allowable: Collection[str] | None = None
) -> None:
    allowed = set(args.resume_allow_changes)
    if "optim" in allowed:
        allowed.add(OPTIMIZER)
    refused = {name: text for name, text in lines.items() if name not in allowed}
    if refused:
        may_be_allowed = _WEIGHTS not in refused and (allowable is None or refused.keys() <= {*allowable})
        raise _refusal(folder, refused, args.resume_allow_changes, may_be_allowed=may_be_allowed)


def _settings(args: TrainingArguments, folder: Path) -> Iterator[tuple[str, str]]:
    kept, given = _read(folder / ARGUMENTS), json.loads(args.to_json_string())
    before, now = curve(kept, manifest.n_ranks_of(folder)), curve(given, here().n_ranks)
    if kept.get("data_seed") is not None or given["data_seed"] is not None:  # else the order follows seed
        before["data_seed"], now["data_seed"] = _data_seed(kept), _data_seed(given)
    if args.precision == "auto":  # takes what the checkpoint has
        del now["precision"]
    yield from changed_settings(before, now)


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each setting that differs, and a line with both of its values."""
    for name, value in now.items():
        if name in before and before[name] != value:
            hint = f" ({_MEANT[name]})" if name in _MEANT else ""
            yield name, f"{name}: {_shown(before[name])} in the checkpoint -> {_shown(value)} now{hint}"


def _shown(value: Any) -> str:
    """Return a setting for people, shortened if it is long."""
    text = "not set" if value is None else json.dumps(value) if isinstance(value, bool | dict) else str(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _facts(now: Mapping[str, Any], before: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Return a text for each kind of difference; the log warns if only the last bits may differ."""
    found = {}
    if _EVALUATION_DATA not in before:  # the schedule did not follow a metric then
        before = {**before, _EVALUATION_DATA: now.get(_EVALUATION_DATA)}
    for kind in ("model", "data", _EVALUATION_DATA, "order", "dtype", _WEIGHTS, OPTIMIZER, _LOSS):
        if kind == "model":
            lines = list(_model_differences(before[kind], now[kind], folder))
        else:
            lines = list(_differences(before.get(kind), now.get(kind), kind))
        if lines:
            more = len(lines) - _MOST_LINES
            found[kind] = "; ".join(lines[:_MOST_LINES]) + (f"; and {more} more" if more > 0 else "")
    elsewhere = list(_differences(before.get("environment"), now["environment"]))
    if elsewhere:
        logger.warning("the run resumes, but not bit for bit as it would have: %s", "; ".join(elsewhere))
    return found


def _refusal(folder: Path, refused: Mapping[str, str], allowed: Sequence[str], *, may_be_allowed: bool) -> ConfigError:
    """Return the error; its fix keeps the changes that are already allowed."""
    names = [*allowed] + [name if name != OPTIMIZER else "optim" for name in refused]
    allow = f", or accept the change with --resume_allow_changes {','.join(dict.fromkeys(names))}"
    return ConfigError(
        what=f"the run of {folder.name} cannot resume with other settings: {', '.join(refused)}",
        got="; ".join(refused.values()),
        why="its loss curve would be that of neither setting; only the length of the run may change freely",
        fix="use the settings of the checkpoint; or start a new run in another --output_dir, without "
        "--resume_from_checkpoint" + (allow if may_be_allowed else ""),
    )


def curve(values: Mapping[str, Any], n_ranks: int) -> dict[str, Any]:
    """Return the settings that change the loss curve, without those that have no effect in this run."""
    rows, batches = values.get("per_device_train_batch_size", 0), values.get("gradient_accumulation_steps", 0)
    options = options_of(TrainingArguments)
    padding = values.get("padding_in_loss", "none")
    found = {name: values.get(name, options[name].default) for name in CURVE_FIELDS} | {
        "padding_in_loss": padding,
        "precision": policy.in_checkpoint(values),
        "methods": ",".join(values.get("methods", ())),
        "rows_per_step": rows * batches * n_ranks,
    }
    if padding != "none":
        found["per_device_train_batch_size"] = values.get("per_device_train_batch_size")
    if values.get("metric_for_best_model"):
        found |= {name: values.get(name) for name in METRIC_FIELDS}
    if values.get("lr_scheduler_type") in BY_METRIC:
        found |= {name: values.get(name) for name in EVALUATION_FIELDS}
    return found


def _data_seed(values: Mapping[str, Any]) -> Any:
    """Return the seed of the row order: data_seed, or else seed."""
    own = values.get("data_seed")
    return values.get("seed") if own is None else own


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


# ---- identity ----


def identity_of(run: Run, optimizer: Optimizer, scheduler: Any) -> dict[str, Any]:
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
    facts["data"] |= getattr(getattr(run.objective, "plain", run.objective), "facts_of_data", {})
    if (under := frozen_under_adapters(run.model)) is not None:
        facts["model"][UNDER_ADAPTERS] = under
        facts["model"][ADAPTERS] = adapters.settings_of(run.model)
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


def _model_differences(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> Iterator[str]:
    """Yield one line for each difference from the model of a checkpoint."""
    kept = {name: value for name, value in before.get("config", {}).items() if name not in _PASSING}
    saved = _config_in(folder)
    for name in _INFERRED:  # open when the run of the checkpoint began
        if name in kept and kept[name] is None:
            kept[name] = saved.get(name) if saved else now["config"].get(name)
    then, latest = before.get(ADAPTERS) or now.get(ADAPTERS) or {}, now.get(ADAPTERS) or {}
    yield from _differences(
        {**before, "config": kept, ADAPTERS: _known_to(latest, then)},
        {**now, ADAPTERS: _known_to(then, latest)},
        "model",
    )


def _known_to(others: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of adapters without those that only one version of peft has."""
    return {
        name: {key: value for key, value in settings.items() if key in others.get(name, settings)}
        for name, settings in own.items()
    }


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


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """Yield one line for each value that differs, with its dotted name."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
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
    if not (_is_fixed(rows) or isinstance(rows, list | tuple)):
        return None
    for row in _sampled(rows, _SAMPLED_ROWS):
        for part in _parts(rows[row]):
            digest.update(part)
    return digest.hexdigest()


def identity_of_rows(rows: Any, *, may_read: bool) -> str | None:
    """Return a checksum of a data set that is the same in each process that makes it; None: nobody knows.

    A part of another set (`Subset`) counts by what it takes of it. `may_read`: some rows of a set of the user's own
    class are read, twice, and count if they are the same.
    """
    if isinstance(rows, Subset):
        return _of_several([identity_of_rows(rows.dataset, may_read=may_read), _digest_of(np.asarray(rows.indices))])
    if isinstance(rows, ConcatDataset):
        return _of_several([identity_of_rows(one, may_read=may_read) for one in rows.datasets])
    if _is_fixed(rows) or isinstance(rows, list | tuple | TensorDataset):
        return _digest_of([rows[n] for n in _sampled(rows, _SAMPLED_ROWS)])
    if not may_read:
        return None
    with generators_kept():
        first, again = (_digest_of([rows[n] for n in _sampled(rows, _READ_ROWS)]) for _ in range(2))
    return first if first == again else None


def identity_of_model(model: nn.Module, inner: nn.Module) -> dict[str, Any]:
    """Return what tells a model from others, in each process that makes it; `inner` is the one inside adapters.

    Its weights take no part: a new head is drawn each time. The folder that it is from may lie elsewhere each time.
    """
    config = {name: str(value) for name, value in _config(inner).items() if name not in _INFERRED}
    origin = str(getattr(getattr(inner, "config", None), "name_or_path", ""))
    return {
        "class": type(inner).__name__,
        "origin": Path(origin).name,
        "config": config,
        "parameters": {name: _shape(one) for name, one in model.named_parameters()},
    }


def _is_fixed(rows: Any) -> bool:
    """Return whether this is a datasets.Dataset whose rows no function of the user's makes."""
    return is_from(rows, "datasets", "Dataset") and rows.format["type"] != "custom"


def _sampled(rows: Any, most: int) -> list[int]:
    return np.unique(np.linspace(0, len(rows) - 1, most).astype(int)).tolist()


def _of_several(digests: Sequence[str | None]) -> str | None:
    return None if None in digests else _digest_of(list(digests))


def _digest_of(value: Any) -> str | None:
    """Return a checksum of plain values and arrays; None if there are others, whose text may name where they lie."""
    digest = xxhash.xxh3_128()
    try:
        for part in _plain_values(value):
            digest.update(part)
    except TypeError:
        return None
    return digest.hexdigest()


def _plain_values(value: Any) -> Iterator[bytes]:
    """Yield the bytes of plain values; raise TypeError for any other."""
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name).encode(errors="surrogatepass")
            yield from _plain_values(value[name])
    elif isinstance(value, Tensor):
        plain = value.detach().cpu()
        yield from _plain_values((plain.float() if plain.dtype == torch.bfloat16 else plain).numpy())
    elif isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.dtype == object):
        yield f"[{len(value)}".encode()
        for one in value:
            yield from _plain_values(one)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype}{value.shape}".encode()
        yield np.ascontiguousarray(value).tobytes()
    elif isinstance(value, str | bytes | int | float | np.generic) or value is None:
        yield value if isinstance(value, bytes) else f"{value}\0".encode(errors="surrogatepass")
    elif hasattr(value, "__array_interface__"):  # such as a picture
        yield from _plain_values(np.asarray(value))
    else:
        raise TypeError(type(value).__name__)


def digest_of_weights(weights: Iterable[tuple[str, Any]]) -> str:
    """Return a checksum of named weights, of some numbers of each; state of other kinds takes no part."""
    digest = xxhash.xxh3_128()
    for name, weight in weights:
        if not isinstance(weight, Tensor):
            continue
        digest.update(f"{name}{tuple(weight.shape)}".encode())
        for part in _plain_parts(weight) if is_traceable_wrapper_subclass(weight) else [weight]:
            numbers = part.detach().flatten()
            some = numbers[:: max(1, len(numbers) // _SAMPLED_NUMBERS)]
            digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _plain_parts(weight: Any) -> Iterator[Tensor]:
    """Yield the tensors that a weight is made of: of a quantised one its codes and scales, otherwise itself."""
    if not is_traceable_wrapper_subclass(weight):
        yield weight
        return
    for name in weight.__tensor_flatten__()[0]:
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
    """Return the number of rows and their checksum; see `digest_of_rows`."""
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


# ---- another number of ranks ----


def with_step_of(folder: Path, args: TrainingArguments, n_ranks: int) -> TrainingArguments:
    """Return the settings with which so many ranks take the steps of this checkpoint's run, each as large as before.

    Where the batches of a step decide which rows it has, it keeps their number too. Settings stay as they are if the
    number of ranks is the same, if `rows_per_step` may change, or if the rows cannot be dealt evenly; the comparison
    with the checkpoint follows.
    """
    before = manifest.n_ranks_of(folder)
    if before == n_ranks or "rows_per_step" in args.resume_allow_changes:
        return args
    rows_then, batches_then = _sizes_in(folder)
    rows, rest = divmod(rows_then * batches_then * before, n_ranks)
    if rest or not rows or rows == args.per_device_train_batch_size * args.gradient_accumulation_steps:
        return args
    if args.dataloader_drop_last or args.train_sampling_strategy == "batch_rebalance":
        at_a_time, rest = divmod(rows, batches_then)
        if rest:
            return args
    else:
        at_a_time = next(n for n in range(min(args.per_device_train_batch_size, rows), 0, -1) if rows % n == 0)
    sizes = {_ROWS: at_a_time, _BATCHES: rows // at_a_time}
    _require_auto(args, sizes, f"{before} ranks then, {n_ranks} now")
    logger.info(
        "the run had %d ranks and has %d now: each takes %d batches of %d rows a step, so that steps keep their rows",
        before, n_ranks, rows // at_a_time, at_a_time,
    )  # fmt: skip
    return replace(args, **sizes)


def _require_auto(args: TrainingArguments, sizes: Mapping[str, int], got: str) -> None:
    """Refuse sizes that the configuration of DeepSpeed says itself if other ranks need others."""
    if args.deepspeed is None:
        return
    from whet.config import deepspeed

    fixed = {key: size for key, (name, size) in deepspeed.fixed_sizes(args.deepspeed).items() if size != sizes[name]}
    if not fixed:
        return
    names = " and ".join(fixed)
    flags = " ".join(f"--{name} {size}" for name, size in sizes.items())
    raise ConfigError(
        what="the number of ranks changed, and the configuration of DeepSpeed does not let whet divide the step again",
        got=f"{got}; {', '.join(f'{key} {size}' for key, size in fixed.items())}",
        why="a step keeps its rows, so each rank takes other numbers of them than before",
        fix=f'write "auto" for {names} in the configuration; or give {flags} and write these numbers there',
    )


def _sizes_in(folder: Path) -> tuple[int, int]:
    """Return the rows of a batch on each rank of the checkpoint's run, and its batches of a step; 0 if unreadable."""
    try:
        kept = json.loads((folder / ARGUMENTS).read_text("utf-8"))
        return int(kept[_ROWS]), int(kept[_BATCHES])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0
