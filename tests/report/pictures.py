"""Take pictures of reports, to look at them: as a phone, a desktop and a printer show them, light and dark.

    make report-pictures DATA=FOLDER            # of runs of each kind, on BANKING77, XQuAD and English EWT
    make readme-picture                         # of `make demo`, the picture of README

The runs train the small encoder of the demo, and are kept: a second call takes pictures alone. DATA holds banking77/,
xquad/ and ud_ewt/ as the tests read them.
"""

from __future__ import annotations

import argparse
import csv
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from browser import Browser
from PIL import Image, ImageOps

from whet import report
from whet.cli.main import run as whet
from whet.report.bars import palettes
from whet.tasks.qa.task import small_encoder

ROOT = Path(__file__).resolve().parents[2]
Options = Mapping[str, Any]
Kind = Callable[[Path, Path], tuple[str, Options]]
"""From the folder of the data sets, and one to write other files to, to a command and its options."""
_PHONE, _DESKTOP = 390, 1280
_LONGEST = 2400
"""Pixels of a picture: of a longer page there are several."""
_USUAL: Options = {"use_cpu": "true", "save_strategy": "no", "eval_strategy": "epoch", "logging_steps": 5,
                   "per_device_train_batch_size": 16, "learning_rate": 3e-4, "num_train_epochs": 2,
                   "report_to": "none", "disable_tqdm": "true"}  # fmt: skip


def classify(data: Path, folder: Path) -> tuple[str, Options]:
    """77 intents of a bank's customers."""
    banking = data / "banking77"
    return "classify", _files(banking / "train.csv", banking / "test.csv") | {"max_seq_length": 64}


_WORDS = ("card", "transfer", "top", "cash", "pin", "identity", "exchange", "payment", "charge", "pending")


def several(data: Path, folder: Path) -> tuple[str, Options]:
    """Several labels a text: words in the name of its intent."""

    def row(name: str, text: str) -> Mapping[str, Any]:
        return {"text": text, "labels": [word for word in _WORDS if word in name.split("_")]}

    return "classify", _written(data, folder, row)


def numbers(data: Path, folder: Path) -> tuple[str, Options]:
    """A number for each text: how long it is."""
    return "classify", _written(data, folder, lambda _, text: {"text": text, "label": len(text) / 100})


def qa(data: Path, folder: Path) -> tuple[str, Options]:
    """Questions about paragraphs."""
    xquad = data / "xquad"
    return "qa", _files(xquad / "train.json", xquad / "dev.json") | {
        "max_seq_length": 256,
        "doc_stride": 64,
        "max_train_samples": 400,
    }


def tag(data: Path, folder: Path) -> tuple[str, Options]:
    """Parts of speech."""
    ewt = data / "ud_ewt"
    return "tag", _files(ewt / "train.jsonl", ewt / "test.jsonl") | {"task_name": "pos"}


def lm(data: Path, folder: Path) -> tuple[str, Options]:
    """A new decoder, which learns to write."""
    from whet.tasks.lm.task import _save_new_model

    texts = {}
    for name in ("train", "dev"):
        articles = json.loads((data / "xquad" / f"{name}.json").read_text("utf-8"))["data"]
        texts[name] = list(dict.fromkeys(one["context"] for article in articles for one in article["paragraphs"]))
        _write_lines(folder / f"{name}.jsonl", ({"text": text} for text in texts[name]))
    _save_new_model(folder / "new", texts["train"], seed=1)
    files = _files(folder / "train.jsonl", folder / "dev.jsonl")
    return "lm", files | {"model_name_or_path": folder / "new", "max_length": 256, "learning_rate": 3e-3,
                          "num_train_epochs": 4}  # fmt: skip


KINDS: Sequence[Kind] = (classify, several, numbers, qa, tag, lm)
_OTHERS: Sequence[Options] = (
    {"learning_rate": 1e-4, "max_steps": 40},
    {"learning_rate": 2e-3, "max_steps": 40, "lr_scheduler_type": "cosine"},
)
"""Of the second and third run of a kind, which stand next to the first."""


def _files(train: Path, validation: Path) -> dict[str, Any]:
    return {"train_file": train, "validation_file": validation}


def _write_lines(path: Path, rows: Iterator[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    return path


def _written(data: Path, folder: Path, row: Callable[[str, str], Mapping[str, Any]]) -> dict[str, Any]:
    """Write BANKING77 with other labels, made of a text's label and itself."""
    files = {}
    for name in ("train", "test"):
        with (data / "banking77" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = [row(one["category"], one["text"]) for one in csv.DictReader(file)]
        files[name] = _write_lines(folder / f"{name}.jsonl", iter(rows))
    return _files(files["train"], files["test"]) | {"max_seq_length": 64, "max_train_samples": 2000}


def trained(kind: Kind, data: Path, folder: Path, limits: Options, n_runs: int = 3) -> list[Path]:
    """Train the runs of a kind, those that have not been trained before; return their folders."""
    folders = []
    for n, own in enumerate(({}, *_OTHERS)[:n_runs]):
        output = folder / kind.__name__ / f"run-{n + 1}"
        folders.append(output)
        if (output / "report.html").is_file():
            continue
        command, options = kind(data, folder / kind.__name__ / "data")
        given = {"model_name_or_path": small_encoder()} | _USUAL | options | own | limits | {"output_dir": output}
        words = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
        code = whet([command, "--do_train", "--do_eval", "--overwrite_output_dir", *words])
        if code:
            raise SystemExit(f"{kind.__name__} ended with {code}")
    return folders


def take(browser: Browser, page: Path, folder: Path, name: str) -> None:
    """Take the pictures of a page: phone and desktop, light and dark, and print."""
    for width, words in ((_PHONE, "phone"), (_DESKTOP, "desktop")):
        for scheme in ("light", "dark"):
            browser.open(page, width=width, scheme=scheme)
            path = folder / f"{name}-{words}-{scheme}.png"
            browser.picture(path)
            _cut(path)
    browser.open(page, width=_DESKTOP)
    browser.print_to(folder / f"{name}-print.pdf")


def _cut(path: Path) -> None:
    """Replace a long picture by several."""
    with Image.open(path) as image:
        width, height = image.size
        parts = [image.crop((0, top, width, min(top + _LONGEST, height))) for top in range(0, height, _LONGEST)]
    if len(parts) > 1:
        path.unlink()
        for n, part in enumerate(parts, start=1):
            part.save(path.with_stem(f"{path.stem}-{n}"))


def of_kinds(data: Path, output: Path, only: Sequence[str], limits: Options) -> None:
    """Train the runs of each kind, and take the pictures of one and of three of them."""
    # the browser's helpers may still write there when it has ended
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
        for kind in KINDS:
            if only and kind.__name__ not in only:
                continue
            folders = trained(kind, data, output / "runs", limits)
            for runs, name in ((folders[:1], f"{kind.__name__}-1-run"), (folders, f"{kind.__name__}-3-runs")):
                page = report.write(runs, output / "runs" / kind.__name__ / f"{len(runs)}.html")
                take(browser, page, output, name)
                print(f"{name}: {output}", flush=True)


_README_WIDTH, _FRAME = 880, 2
_README_END = "() => document.querySelectorAll('.examples tbody tr')[1].getBoundingClientRect().bottom + scrollY + 1"
"""Where the picture of README ends: after the second of the worst examples."""


def of_readme(demo: Path, output: Path) -> None:
    """Take the picture of README: the beginning of the report of `make demo`."""
    page = report.write([demo])
    # the browser's helpers may still write there when it has ended
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, Browser(Path(profile)) as browser:
        for scheme, colours in zip(("light", "dark"), palettes(), strict=True):
            browser.open(page, width=_README_WIDTH, scheme=scheme)
            path = output / f"report-{scheme}.png"
            browser.picture(path, scale=1.5, height=browser.find(_README_END))
            with Image.open(path) as image:  # a few shades of each colour are enough, and make a small file
                framed = ImageOps.expand(image.convert("RGB"), _FRAME, colours["line"])
                small = framed.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            small.save(path, optimize=True)
            print(path)


def main() -> None:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    parser.add_argument("--output", type=Path, default=Path("out/report-pictures"), help="folder for the pictures")
    parser.add_argument("--demo", type=Path, help="the folder of a finished whet demo: take the picture of README")
    parser.add_argument("--only", nargs="*", default=(), help=", ".join(kind.__name__ for kind in KINDS))
    parser.add_argument("--steps", type=int, help="steps of each run, for a quick look")
    asked = parser.parse_args()
    if asked.demo is not None:
        of_readme(asked.demo, ROOT / "docs")
        return
    if asked.data is None:
        parser.error("name the folder of the data sets: --data FOLDER")
    asked.output.mkdir(parents=True, exist_ok=True)
    limits = {} if asked.steps is None else {"max_steps": asked.steps, "max_eval_samples": 100}
    of_kinds(asked.data.resolve(), asked.output.resolve(), asked.only, limits)


if __name__ == "__main__":
    main()
