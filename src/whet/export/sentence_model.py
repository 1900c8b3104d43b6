"""A model of sentence-transformers, as what is exported: texts to vectors, or pairs of texts to scores.

The graph holds all of its modules: pooling, dense layers, normalisation and truncation of an embedding model, the
activation of a reranker. So a vector, or a score, is what every runtime gives; the script only tokenises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from whet.errors import ConfigError, DataError
from whet.export import check
from whet.export.arguments import ExportArguments, needs_texts
from whet.export.subject import Arrays, Data, Row, Rows, inputs_of, padding_of, require_padding, require_same_rows
from whet.jobs.predict.trained import NAME, folder_of, read_reading
from whet.jobs.task import Task
from whet.jobs.tokenising.encode import row_length
from whet.jobs.tokenising.rows import RowOptions, truncation
from whet.models.loading.load import max_positions
from whet.models.loading.quiet import quiet
from whet.tasks.embed.folders import Kind
from whet.tasks.embed.job import words_of
from whet.tasks.embed.judging import judge_embedder, judge_reranker
from whet.tasks.embed.models import computed_by, library, load, prompts_of, set_length
from whet.tasks.embed.pairs import Pairs
from whet.watch import files as output_files

_KINDS: Mapping[str, Kind] = {"embed": "SentenceTransformer", "rerank": "CrossEncoder"}
_SCRIPTS = {"embed": "embedding.py.txt", "rerank": "reranker.py.txt"}
_COMPARED = {"embed": ("sentence_embedding",), "rerank": ("logits", "scores")}
_SERVED = {"embed": ["sentence_embedding"], "rerank": ["scores"]}
_OF_TASK_LENGTHS = ("query_length", "document_length", "query_expansion")


@dataclass
class SentenceModel:
    """A `Subject` that sentence-transformers made, and the pairs that are at hand."""

    task: Task
    folder: str
    model: Any
    """Of sentence-transformers."""
    module: nn.Module
    rows: Rows
    texts: Sequence[_Text]
    """Those of `checked`."""
    checked: Sequence[Row]
    calibration: Sequence[Row] | None
    data: Data
    pairs: Pairs | None
    """Those of the evaluation."""
    reading: Mapping[str, Any]
    """What the training has left for `whet predict`."""
    batch_rows: int
    _judged: tuple[Any, str, float] | None = None
    """The evaluator, its metric and torch's value, once they are computed."""

    @classmethod
    def prepared(cls, asked: ExportArguments, task: Task, work: Path) -> SentenceModel:
        """Load the model, and the pairs that it is checked with."""
        if asked.base_model_name_or_path is not None:
            raise ConfigError(
                what="base_model_name_or_path would change nothing",
                got=asked.base_model_name_or_path,
                why="a folder of sentence-transformers names the model of its adapter itself",
                fix="leave --base_model_name_or_path out",
            )
        model = load(_KINDS[task.name], asked.model, "--model", use_cpu=True).eval()
        _require_exportable(model, asked.model)
        _truncate(model, asked.truncate_dim)
        backbone = model.transformers_model
        length = set_length(model, asked.max_seq_length) or row_length(None, model.tokenizer, backbone)
        model.max_seq_length = length
        data = Data.of(asked, task, max_positions(backbone))
        examples = _examples(asked, task, data, work)
        if needs_texts(asked) and "train" not in examples:
            raise data.no_texts(asked)
        rows = Rows(model.tokenizer, inputs_of(backbone, model.tokenizer), length)
        calibration = None
        if needs_texts(asked):
            calibration = [one.row(model) for one in _texts_of(task.name, examples["train"], model)]
        if examples:
            every = [*_texts_of(task.name, examples.get("validation") or examples["train"], model)]
            sizes = [len(one.text) + len(one.other or "") for one in every]
            texts = [every[n] for n in check.spread(len(every), check.N_ROWS, sizes.index(max(sizes)))]
        else:
            data.notes.append("made-up texts were compared, as none of the training are at hand")
            made_up = rows.made_up_texts(backbone.get_input_embeddings().weight.shape[0], check.N_ROWS)
            texts = [_Text(text[:50], text) if task.name == "rerank" else _Text(text) for text in made_up]
        return cls(
            task, asked.model, model, _Outputs(task.name, model), rows, texts, [one.row(model) for one in texts],
            calibration, data, examples.get("validation"), read_reading(folder_of(asked.model)),
            asked.per_device_eval_batch_size,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """The class of sentence-transformers, and that of transformers in it."""
        return f"{type(self.model).__name__} of {type(self.model.transformers_model).__name__}"

    @property
    def config(self) -> Any:
        """The configuration of transformers."""
        return self.model.transformers_model.config

    @property
    def tokenizer(self) -> Any:
        """The model's own, which cuts texts at its length."""
        return self.model.tokenizer

    @property
    def compared(self) -> Sequence[str]:
        """Vectors, or scores before and after their activation."""
        return _COMPARED[self.task.name]

    @property
    def kind(self) -> check.Kind:
        """Vectors, or scores."""
        return "scores" if self.task.name == "rerank" else "vectors"

    @property
    def notes(self) -> list[str]:
        """What is not measured, and why."""
        return self.data.notes

    @property
    def script(self) -> str:
        """That of the task."""
        return _SCRIPTS[self.task.name]

    @property
    def about(self) -> Mapping[str, Any]:
        """Head, task, columns, and what makes a model of sentence-transformers of the graph (`computed_by`)."""
        about: dict[str, Any] = {
            "head": self.task.head.auto, "task": self.task.name, "inputs": [*self.rows.names],
            "max_seq_length": self.rows.length,
        }  # fmt: skip
        if self.task.name == "embed":
            about |= {
                "prompts": self.model.prompts, "default_prompt_name": self.model.default_prompt_name,
                "similarity_fn_name": str(self.model.similarity_fn_name),
                "dimension": self.model.truncate_dim or self.model.get_embedding_dimension(),
            }  # fmt: skip
        return about

    def metric(self, compute: Callable[[Arrays], Arrays], about: Mapping[str, Any]) -> check.Metric | None:
        """Return the evaluator's metric of both on the validation pairs; None if there are none."""
        if self.pairs is None:
            return None
        if self._judged is None:
            try:
                if self.task.name == "rerank":
                    judge = judge_reranker(self.pairs, self.batch_rows)
                else:
                    judge = judge_embedder(self.pairs, self.model, self.batch_rows)
            except DataError as error:
                self.notes.append(f"no metric was compared: {error.problems[0].what}")
                self.pairs = None
                return None
            self.notes.extend([f"validation: {judge.note}"] if judge.note else [])
            evaluator, name = judge.evaluator, judge.primary
            self._judged = evaluator, name, _value(evaluator, name, self.model)
        evaluator, name, of_torch = self._judged
        found = _value(evaluator, name, computed_by(compute, about, self.tokenizer, self.config))
        file = Path(self.data.validation or "").name
        return check.Metric(
            words_of(name), len(self.pairs), file, of_torch, found, drop_points=100 * (of_torch - found), unit="pairs"
        )

    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write the tokenizer, the modules without the encoder's weights, and how pairs are read.

        The modules are those that sentence-transformers' own backends read. Raises ConfigError if the tokens
        of the script would not be the model's. Returns what the script reads.
        """
        with quiet():
            self.model.save_pretrained(str(folder), create_model_card=False)
        for path in (*folder.glob("model*.safetensors*"), *folder.glob("adapter_*")):
            path.unlink()  # the graph has them, an adapter among them
        output_files.write_json(folder / NAME, {**self.reading, "task": self.task.name}, indent=2, on_error="stop")
        cut = truncation(RowOptions(max_seq_length=self.rows.length), self.tokenizer, pairs=False)
        serving: dict[str, Any] = {
            "outputs": _SERVED[self.task.name], "padding": padding_of(self.tokenizer), "truncation": cut,
            "pair_truncation": cut, "windows": False,
        }  # fmt: skip
        if self.task.name == "embed":
            query, document, other = prompts_of(self.model)
            serving["prompts"] = {**self.model.prompts, "query": query, "document": document}
            serving["prompt"] = other
        read = [((one.text, one.other), [row]) for one, row in zip(self.texts, self.checked, strict=True)]
        require_same_rows(read, folder, serving, by="sentence-transformers")
        return serving


def _value(evaluator: Any, metric: str, model: Any) -> float:
    with quiet():
        return float(evaluator(model)[metric])


# ---- what can be exported ----


class _Outputs(nn.Module):
    """All modules of an embedding model, or of a reranker and its activation, from columns to outputs by name."""

    def __init__(self, task: str, model: Any) -> None:
        super().__init__()
        self.task = task
        self.model = model
        self.config = model.transformers_model.config

    def forward(self, **columns: Tensor) -> dict[str, Tensor]:
        encoder, *others = self.model
        features = encoder(dict(columns))
        hidden = features.get("token_embeddings")
        for module in others:
            features = module(features)
        if self.task == "rerank":
            logits = features["scores"]
            return {"logits": logits, "scores": self.model.activation_fn(logits).squeeze(-1)}
        vectors = features["sentence_embedding"]
        return {"last_hidden_state": hidden, "sentence_embedding": vectors[:, : self.model.truncate_dim]}


def _require_exportable(model: Any, name: str) -> None:
    """Raise ConfigError for a model that does more to a text than tokens in, numbers out."""
    modules = library("base.modules")
    encoder = model[0]
    odd: list[str] = []
    if not isinstance(encoder, modules.Transformer):
        odd.append(f"it begins with {type(encoder).__name__}, and not with an encoder of transformers")
    else:
        odd += ["its texts go through a chat template"] if "message" in encoder.modality_config else []
        odd += [f"it has a {one}" for one in _OF_TASK_LENGTHS if getattr(encoder, one, None) is not None]
        odd += ["its processing_kwargs change the tokens"] if encoder.processing_kwargs else []
    if any(getattr(one, "include_prompt", True) is False for one in model) and any(model.prompts.values()):
        odd.append("its pooling leaves the prompt out")
    if isinstance(model, library().CrossEncoder):
        odd += [f"it gives {model.num_labels} labels, and a pair gets one score"] if model.num_labels != 1 else []
        odd += ["it has prompts"] if any(model.prompts.values()) else []
    if odd:
        raise ConfigError(
            what="a graph cannot compute what this model does to a text",
            got=f"{name}: {'; '.join(odd)}",
            why="it takes tokens of one text, or of a pair, and gives a vector, or a score",
            fix="serve the folder of the model with sentence-transformers",
        )
    require_padding(model.tokenizer, name)


def _truncate(model: Any, dim: int | None) -> None:
    """Let the model give the first numbers of its vectors alone, if that is asked for."""
    if dim is None:
        return
    longest = model.get_embedding_dimension()
    if dim > longest:
        raise ConfigError(
            what="truncate_dim is too long",
            got=dim,
            why=f"the model's vectors have {longest} numbers",
            fix="leave --truncate_dim out, or use a smaller one",
        )
    model.truncate_dim = dim


# ---- texts ----


@dataclass(frozen=True)
class _Text:
    """A text with its prompt, or the first of a pair."""

    text: str
    other: str | None = None

    def row(self, model: Any) -> Row:
        """Return its columns, as the model reads it."""
        found = model.preprocess([self.text if self.other is None else (self.text, self.other)])
        return {name: value[0].tolist() for name, value in found.items() if isinstance(value, Tensor)}


def _texts_of(task: str, pairs: Pairs, model: Any) -> Iterator[_Text]:
    """Yield the texts of these pairs as the model reads them: queries and documents after their prompts."""
    query, document, _ = prompts_of(model) if task == "embed" else ("", "", "")
    for one, two in zip(pairs.anchors, pairs.positives, strict=True):
        if task == "rerank":
            yield _Text(one, two)
        else:
            yield from (_Text(f"{query}{one}"), _Text(f"{document}{two}"))


def _examples(asked: ExportArguments, task: Task, data: Data, work: Path) -> Mapping[str, Pairs]:
    """Return the pairs of the evaluation, and of the training if they are needed."""
    splits: dict[str, Mapping[str, Any]] = {"validation": {}} if data.validation else {}
    if data.train is not None and (needs_texts(asked) or data.validation is None):
        of_hub = "dataset_name" in data.values
        splits["train"] = {"max_train_samples": asked.calibration_samples} | (
            {} if of_hub else {"train_file": data.train}
        )
    found = data.examples(asked, task, asked.model, splits, work / "judged")
    return {} if found is None else found[2]
