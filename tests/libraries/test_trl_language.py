"""`whet lm` and TRL on the same rows: the losses of SFTTrainer and DPOTrainer, of all weights and of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

import whet
from saved_decoder import save_decoder
from text_tasks import BAKING, GARDEN, SAILING, load, words, write_lines
from tiny_decoders import tiny_decoder
from whet.cli.main import run
from whet.tasks.lm import job

pytestmark = pytest.mark.filterwarnings("default")  # those of these libraries are not whet's
trl = pytest.importorskip("trl", reason="needs trl: make test-libraries installs it")
peft = pytest.importorskip("peft")

FAMILIES = ("llama", "qwen3", "gemma3_text", "gpt2")
N_STEPS, BATCH = 50, 4
TOLERANCE = 1e-4
"""Relative, of a loss: float32 sums in another order, over 50 steps. One other token in a row moves it by 1e-2."""
USUAL: dict[str, Any] = {
    "max_steps": N_STEPS, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3, "weight_decay": 0.0,
    "lr_scheduler_type": "constant", "logging_steps": 1, "max_length": 48, "save_strategy": "no", "seed": 42,
}  # fmt: skip
EPSILON = 1e-4
"""Weights that move both rewards of a pair alike, or all scores of a query, have gradients of rounding alone; Adam's
usual epsilon makes their steps as large as the others."""
DPO: dict[str, Any] = {"beta": 0.2, "adam_epsilon": EPSILON}
ADAPTER: dict[str, Any] = {
    "lora_r": 4, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear", "learning_rate": 1e-2,
    "adam_epsilon": EPSILON,
}  # fmt: skip
_FIRST = [*SAILING, *BAKING, *GARDEN]
TEXTS = [{"prompt": " ".join(one.split()[: 2 + n % 3]), "completion": f" {' '.join(one.split()[2 + n % 3 :])}"}
         for n, one in enumerate(f"{a} and {b}" for a, b in zip(_FIRST, reversed(_FIRST), strict=True))]  # fmt: skip
"""Twelve rows of different lengths."""
PAIRS = [
    {"prompt": row["prompt"], "chosen": row["completion"], "rejected": f" {other}"}
    for row, other in zip(TEXTS, [*GARDEN, *SAILING, *BAKING], strict=True)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model of each family without dropout, with one tokenizer."""
    place = tmp_path_factory.mktemp("models")
    save_decoder(place / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(place / "tokenizer")
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": None}
    for family in FAMILIES:
        tiny_decoder(family, vocab_size=len(tokenizer), **special).save_pretrained(place / family)
        tokenizer.save_pretrained(place / family)
    return {family: place / family for family in FAMILIES}


def by_whet(
    folder: Path, rows: list[dict[str, str]], place: Path, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[dict[str, float]]:
    """Return the log of `whet lm`; the model that it begins with is kept in the folder `begun`."""
    inner = job.engine_of

    def kept(model: Any, *given: Any, **named: Any) -> Any:
        model.save_pretrained(place / "begun")
        return inner(model, *given, **named)

    monkeypatch.setattr(job, "engine_of", kept)
    file = write_lines(place / "rows.jsonl", rows)
    given = {"train_file": file, "validation_file": file, "per_device_eval_batch_size": len(rows)} | USUAL | options
    asked = words("lm", folder, place / "whet", "--do_train", "--do_eval", **given)
    at = asked.index("--max_seq_length")  # another name of max_length, which the tests of other tasks give
    assert run(asked[:at] + asked[at + 2 :]) == 0
    return [*load(place / "whet", "trainer_state.json")["log_history"], load(place / "whet", "eval_results.json")]


def by_trl(trainer: Any, folder: Path, rows: list[dict[str, str]], place: Path, args: Any) -> list[dict[str, float]]:
    """Return the log of a trainer of TRL that begins with the same weights."""
    model, begun = AutoModelForCausalLM.from_pretrained(folder), place / "begun"
    if (begun / "adapter_config.json").exists():
        model = peft.PeftModel.from_pretrained(model, begun, is_trainable=True)
    data = Dataset.from_list(rows)
    made = trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data,
        processing_class=AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    made.train()
    made.evaluate()
    return made.state.log_history


def settings(place: Path, n_rows: int, **more: Any) -> dict[str, Any]:
    """Return the settings of TRL that are those of the command."""
    fixed = {"output_dir": str(place / "trl"), "bf16": False, "use_cpu": True, "gradient_checkpointing": False,
             "report_to": "none", "disable_tqdm": True, "per_device_eval_batch_size": n_rows}  # fmt: skip
    return USUAL | fixed | {name: value for name, value in more.items() if not name.startswith("lora")}


def column(log: list[dict[str, float]], name: str) -> list[float]:
    """Return the values of this name in the log."""
    return [entry[name] for entry in log if name in entry]


@pytest.mark.parametrize("options", [{}, ADAPTER], ids=["complete", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_have_the_losses_and_the_accuracy_of_trls_trainer(
    family: str, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_whet(folders[family], TEXTS, tmp_path, monkeypatch, **options)
    args = trl.SFTConfig(**settings(tmp_path, len(TEXTS), **options), completion_only_loss=True)
    wanted = by_trl(trl.SFTTrainer, folders[family], TEXTS, tmp_path, args)
    assert len(column(found, "loss")) == N_STEPS
    assert column(found, "loss") == pytest.approx(column(wanted, "loss"), rel=TOLERANCE)
    assert column(found, "loss")[-1] < 0.9 * column(found, "loss")[0]
    for name in ("eval_loss", "eval_mean_token_accuracy"):
        assert column(found, name)[-1] == pytest.approx(column(wanted, name)[-1], rel=TOLERANCE), name


@pytest.mark.parametrize("options", [{}, ADAPTER], ids=["complete", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_preferences_have_the_losses_and_rewards_of_trls_trainer(
    family: str, options: dict[str, Any], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = by_whet(folders[family], PAIRS, tmp_path, monkeypatch, loss="dpo", **(DPO | options))
    args = trl.DPOConfig(**settings(tmp_path, len(PAIRS), **(DPO | options)))
    wanted = by_trl(trl.DPOTrainer, folders[family], PAIRS, tmp_path, args)
    assert len(column(found, "loss")) == N_STEPS
    for name in ("loss", "rewards/margins", "eval_loss", "eval_rewards/accuracies"):
        scale = max(map(abs, column(wanted, name)))
        assert column(found, name) == pytest.approx(column(wanted, name), abs=TOLERANCE * scale), name
    assert column(found, "loss")[-1] < 0.9 * column(found, "loss")[0]


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_trainer_runs_without_padding(
    family: str, bf16: bool, folders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL puts a forward of its own around the model's, which reads tokens with a label."""
    logs = []
    for optimized in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folders[family])
        model.config.use_cache = False
        given = settings(tmp_path, len(TEXTS)) | {"bf16": bf16, "max_steps": 10}
        args = trl.SFTConfig(**given, completion_only_loss=True)
        trainer = trl.SFTTrainer(
            model=whet.optimize(model) if optimized else model, args=args, train_dataset=Dataset.from_list(TEXTS),
            processing_class=AutoTokenizer.from_pretrained(folders[family]),
        )  # fmt: skip
        trainer.train()
        logs.append(column(trainer.state.log_history, "loss"))
    assert "with their padding" not in caplog.text
    assert len(logs[0]) == 10
    assert logs[1] == pytest.approx(logs[0], rel=0.02 if bf16 else 1e-4)  # bf16 has 8 bits


@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_trainer_of_preferences_has_the_same_losses(
    family: str, folders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both completions of a pair are rows of one padded batch; the model as it was before judges them as well."""
    logs = []
    for optimized in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folders[family])
        model.config.use_cache = False
        trainer = trl.DPOTrainer(
            model=whet.optimize(model) if optimized else model,
            args=trl.DPOConfig(**settings(tmp_path, len(PAIRS), **DPO) | {"max_steps": 10}),
            train_dataset=Dataset.from_list(PAIRS), processing_class=AutoTokenizer.from_pretrained(folders[family]),
        )  # fmt: skip
        trainer.train()
        logs.append({name: column(trainer.state.log_history, name) for name in ("loss", "rewards/margins")})
    assert "with their padding" not in caplog.text
    assert len(logs[0]["loss"]) == 10
    for name, wanted in logs[0].items():
        assert logs[1][name] == pytest.approx(wanted, abs=TOLERANCE * max(map(abs, wanted))), name


@pytest.mark.parametrize(
    "form", [{"padding_free": True, "max_length": None}, {"packing": True}], ids=["free", "packed"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_its_own_trainer_keeps_sequences_apart_that_it_lays_end_to_end(
    family: str, form: dict[str, Any], folders: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By positions that restart, without a mask: TRL asks for flash attention, and transformers' sdpa does it too."""
    logs = []
    for optimized in (False, True):
        model = AutoModelForCausalLM.from_pretrained(folders[family])
        args = trl.SFTConfig(**(settings(tmp_path, len(TEXTS)) | {"max_steps": 6} | form), completion_only_loss=True)
        trainer = trl.SFTTrainer(
            model=whet.optimize(model) if optimized else model, args=args, train_dataset=Dataset.from_list(TEXTS),
            processing_class=AutoTokenizer.from_pretrained(folders[family]),
        )  # fmt: skip
        trainer.train()
        logs.append(column(trainer.state.log_history, "loss"))
    assert not any(text in caplog.text for text in ("with their padding", "see each other"))
    assert len(logs[0]) == 6
    assert logs[1] == pytest.approx(logs[0], rel=1e-4)  # float32 sums in another order
