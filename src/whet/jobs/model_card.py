"""README.md in the output folder: the model card, made of what the run has recorded about itself.

The folder may be published, so the card names files and folders of this machine by their last part alone, and masks
secrets. What it does not know, it leaves out.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whet import console
from whet.config.arguments import TrainingArguments
from whet.config.secrets import hidden
from whet.jobs.fields import JobFields
from whet.log import logger
from whet.models.loading.hub import is_hub_name
from whet.watch import files as output_files
from whet.watch import record

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

NAME = "README.md"
_OF_HUB_CACHE = re.compile(r"/models--([^/]+)/snapshots/")
_SPLITS = {"train": "training", "eval": "evaluation", "predict": "test"}
_MOST_EVALUATIONS = 20
_NO_SCORES = ("_samples", "_left_out", "_judged", "_listed", "_wrong")
_NUMBERS = int | float


def write(
    args: TrainingArguments, job: JobFields, pipeline_tag: str, facts: Mapping[str, Any],
    metrics: Mapping[str, Any], history: Sequence[Mapping[str, Any]], precision: str,
) -> None:  # fmt: skip
    """Write the card; `facts` are those of the line `begin` in run.jsonl, `history` the log entries.

    `pipeline_tag` is the hub's name of the task.
    """
    if not args.should_save:
        return
    folder = Path(args.output_dir)
    title = args.hub_model_id or (folder.absolute().parent if job.seeds > 1 else folder.absolute()).name
    base, words = _base_of(job.model_name_or_path)
    scores = {split: _scores(metrics, split) for split in ("eval", "predict")}
    data = _metadata(title, job, pipeline_tag, base, scores)
    parts = [
        _beginning(title, job, words, facts),
        _results(job, scores, metrics),
        _training(args, facts, metrics, precision),
        _evaluations(history),
    ]
    body = "\n\n".join(part for part in parts if part)
    text = f"---\n{data.to_yaml()}\n---\n\n{body}\n"
    with output_files.stored(f"{NAME} cannot be written", folder, on_error=args.save_error_policy):
        folder.mkdir(parents=True, exist_ok=True)
        output_files.write_text(folder / NAME, text.encode("utf-8", "backslashreplace").decode("utf-8"))


# ---- where the model comes from ----


def _base_of(name: str) -> tuple[dict[str, Any], str]:
    """Return what the card of the model says that hold for one trained on it, and the model's name in words.

    Of a folder of the hub's cache that is its name on the hub, of another folder what its own card calls its base.
    """
    if cached := _OF_HUB_CACHE.search(f"{Path(name).absolute()}/"):
        name = cached[1].replace("--", "/")
    elif Path(name).is_dir():
        said = _card_of(Path(name))
        kept = {key: said[key] for key in ("base_model", "license") if said.get(key)}
        base = kept.get("base_model", [])
        if not all(isinstance(one, str) and is_hub_name(one) for one in (base if isinstance(base, list) else [base])):
            del kept["base_model"]  # a folder of the machine that wrote the card
        on = f", itself trained on `{kept['base_model']}`" if isinstance(kept.get("base_model"), str) else ""
        return kept, f"the model in the folder `{_plain(Path(name).absolute().name)}`{on}"
    return {"base_model": name}, f"[{name}](https://huggingface.co/{name})"


def published_base(name: str) -> str:
    """Return what a published adapter calls its base, whose own name here may be the path of a folder."""
    base = _base_of(name)[0].get("base_model")
    return base if isinstance(base, str) else Path(name).name


def _card_of(folder: Path) -> dict[str, Any]:
    """Return the metadata of the card in a folder; empty if there is none, or it cannot be read."""
    from huggingface_hub import ModelCard

    path = folder / NAME
    try:
        return ModelCard.load(path, ignore_metadata_errors=True).data.to_dict() if path.is_file() else {}
    except Exception as error:  # of YAML, of the file, of the library's own checks
        logger.debug("%s is not read: %s", path, error)
        return {}


def _metadata(
    name: str, job: JobFields, pipeline_tag: str, base: Mapping[str, Any], scores: Mapping[str, Mapping[str, float]]
) -> ModelCardData:
    from huggingface_hub import EvalResult, ModelCardData

    on_hub = _on_hub(job)
    results = [
        EvalResult(
            task_type=pipeline_tag, dataset_type=on_hub or "file", dataset_name=_data_name(job, split),
            metric_type=metric, metric_value=round(value, 6),
        )
        for split, found in scores.items() for metric, value in found.items()
    ]  # fmt: skip
    return ModelCardData(
        library_name="transformers", pipeline_tag=pipeline_tag, tags=["whet", "generated_from_trainer"],
        datasets=None if on_hub is None else [on_hub],
        metrics=sorted({metric for found in scores.values() for metric in found} - {"loss"}) or None,
        model_name=name, eval_results=results or None, **base,
    )  # fmt: skip


def _data_name(job: JobFields, split: str) -> str:
    file = {"train": job.train_file, "eval": job.validation_file, "predict": job.test_file}[split]
    local = job.dataset_name or file
    return _on_hub(job) or (Path(local).absolute().name if local else _SPLITS[split])


def _on_hub(job: JobFields) -> str | None:
    """Return the name of the data set on the hub; None for files, and for a folder of this machine."""
    return job.dataset_name if job.dataset_name and is_hub_name(job.dataset_name) else None


# ---- the text ----


def _beginning(name: str, job: JobFields, base: str, facts: Mapping[str, Any]) -> str:
    model, data = facts["model"], facts.get("data") or {}
    trained = f"{model['parameters']:,} parameters"
    if model["trainable"] != model["parameters"]:
        trained += f", {model['trainable']:,} of them trained"
    train = f"`{_data_name(job, 'train')}`"
    rows = f": {data['rows']:,} rows" if data.get("rows") else ""
    tokens = f", {data['tokens']:,} tokens" if data.get("tokens") else ""
    return (
        "<!-- Written by whet. Say what the model is for, and where it fails, before you publish it. -->\n\n"
        f"# {_plain(name)}\n\n"
        f"{base[0].upper()}{base[1:]}, fine-tuned on {train}{rows}{tokens}. It has {trained}."
    )


def _results(job: JobFields, scores: Mapping[str, Mapping[str, float]], metrics: Mapping[str, Any]) -> str:
    tables = []
    for split, found in scores.items():
        if found:
            n = metrics.get(f"{split}_samples")
            of = f", {n:,} examples" if isinstance(n, int) else ""
            rows = [(name.replace("_", " "), f"{value:.4f}") for name, value in found.items()]
            tables.append(f"On `{_data_name(job, split)}` ({_SPLITS[split]}{of}):\n\n{_table('metric', 'value', rows)}")
    return "\n\n".join(["## Results", *tables]) if tables else ""


def _scores(metrics: Mapping[str, Any], split: str) -> dict[str, float]:
    start = f"{split}_"
    return {
        name.removeprefix(start): float(value)
        for name, value in metrics.items()
        if name.startswith(start) and isinstance(value, _NUMBERS) and not record.is_detail(name)
        and not name.endswith(_NO_SCORES)
    }  # fmt: skip


def _training(args: TrainingArguments, facts: Mapping[str, Any], metrics: Mapping[str, Any], precision: str) -> str:
    machine, seconds = facts["machine"], metrics.get("train_runtime")
    ranks = f", {args.world_size} ranks" if args.world_size > 1 else ""
    rows = [
        ("machine", f"{machine['processor']}, {machine['threads']} of {machine['cores']} cores{ranks}"),
        ("time of the training", console.duration(seconds) if isinstance(seconds, _NUMBERS) else ""),
        ("number format", precision),
        ("learning rate", f"{args.learning_rate:g}, {_word(args.lr_scheduler_type)}"),
        ("epochs" if args.max_steps <= 0 else "steps", f"{args.num_train_epochs:g}" if args.max_steps <= 0
         else f"{args.max_steps}"),
        ("rows in a step", f"{args.train_rows_per_step:,}"),
        ("optimizer", _word(args.optim)),
        ("weight decay", f"{args.weight_decay:g}"),
        ("seed", f"{args.seed}"),
        ("versions", f"whet {facts.get('whet', record.__version__)}, torch {machine['torch']}, "
         f"transformers {machine['transformers']}"),
    ]  # fmt: skip
    command = record.running_command()
    shown = "" if command is None else f"\n\n```bash\n{_command(command.words)}\n```"
    return f"## Training{shown}\n\n{_table('setting', 'value', [row for row in rows if row[1]])}"


def _evaluations(history: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the evaluations during the training, if there were several; the first and last of many."""
    found = list({one.get("step"): one for one in history if "eval_loss" in one}.values())
    if len(found) < 2:
        return ""
    names = [f"eval_{name}" for name in _scores(found[0], "eval")]
    left_out = max(len(found) - _MOST_EVALUATIONS, 0)
    half = _MOST_EVALUATIONS // 2
    shown = found if not left_out else [*found[:half], *found[-half:]]
    heads = ["step", "epoch", *(name.removeprefix("eval_").replace("_", " ") for name in names)]
    lines = [heads, ["---:"] * len(heads)]
    for one in shown:
        cells = [f"{one.get('step', '')}", f"{one.get('epoch', 0):.2f}"]
        lines.append([*cells, *(f"{one[name]:.4f}" if name in one else "" for name in names)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    note = f"\n\n{left_out} evaluations between these are left out." if left_out else ""
    return f"### Evaluations during the training\n\n{table}{note}"


def _table(first: str, second: str, rows: Sequence[tuple[str, str]]) -> str:
    cells = [(first, second), ("---", "---"), *((a, _plain(b)) for a, b in rows)]
    return "\n".join(f"| {a} | {b} |" for a, b in cells)


def _plain(text: str) -> str:
    """Return the text without what Markdown would take for a cell, a line or a tag."""
    return re.sub(r"[|`<>\r\n]", " ", text)


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


# ---- the command ----


def _command(words: Sequence[str]) -> str:
    """Return the command as others may read it: secrets masked, files and folders by their last part."""
    shown, _ = hidden(words)
    return " \\\n    ".join(_by_flag(["whet", *(_without_folders(word) for word in shown)]))


def _by_flag(words: Sequence[str]) -> Iterator[str]:
    """Yield the words, each flag with its values."""
    line: list[str] = []
    for word in words:
        if word.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    yield shlex.join(line)


def _without_folders(word: str) -> str:
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    is_path = os.sep in value and (value.startswith((os.sep, ".", "~")) or Path(value).expanduser().exists())
    if not is_path:
        return word
    cached = _OF_HUB_CACHE.search(f"{value}/")
    return f"{flag}{equals}{cached[1].replace('--', '/') if cached else Path(value).expanduser().absolute().name}"
