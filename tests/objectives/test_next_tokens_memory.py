"""The loss of a causal language model never holds all logits at once, in training and in evaluation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from whet.kernels.library import library

pytestmark = pytest.mark.true_start

TESTS = Path(__file__).parents[1]
_VOCABULARY, _TOKENS = 60_000, 3_000
_ALL_LOGITS_BYTES = _VOCABULARY * _TOKENS * 4
_MEASURE = """
import re, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
import engine
import whet
from tiny import arguments
from tiny_decoders import collate, tiny_decoder, token_rows
torch.set_num_threads(1)

def status(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

vocabulary, n_tokens, folder, training = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5] == "train"
rows = token_rows(n_tokens // 60, lengths=(60, 60), labelled=1.0)
caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
hows = {"packed": ("llama", None, {}), "optimized": ("llama", None, {})}
hows |= {"sdpa": ("llama", "sdpa", {}), "capped": ("gemma2", None, caps)}
family, attn, changes = hows[sys.argv[6]]
model = tiny_decoder(family, vocab_size=vocabulary, **changes)
if sys.argv[6] == "optimized":
    model.config.use_cache = False
    whet.optimize(model)
else:
    trainer = engine.Trainer(model, arguments(folder, attn_implementation=attn), collate, rows)
    assert trainer.objective.packed == (sys.argv[6] == "packed")
    objective = trainer.objective
    objective.needs_logits = False
model.train(training)

def run(n):
    with torch.set_grad_enabled(training):
        if sys.argv[6] == "optimized":
            loss = model(**collate(rows[:n])).loss
        else:
            batch = objective.batch(rows, range(n), 0)
            loss = objective.loss_sum(objective.forward(batch, seed=0, step=0), batch)
    if training:
        loss.backward()

run(2)
held = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
run(len(rows))
print(status("VmHWM") - held)
"""


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="the native operators are not built here")
@pytest.mark.parametrize(
    "how", ["packed", *(pytest.param(how, marks=pytest.mark.reliability) for how in ("optimized", "sdpa", "capped"))]
)
@pytest.mark.parametrize("mode", ["train", pytest.param("evaluate", marks=pytest.mark.gate)])
def test_loss_holds_a_chunk_of_the_logits_at_most(tmp_path: Path, mode: str, how: str) -> None:
    """transformers holds all of them several times: 720 MB each here. A cap takes the memory of one more chunk."""
    command = [sys.executable, "-c", _MEASURE, str(TESTS), str(_VOCABULARY), str(_TOKENS), str(tmp_path), mode, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    weights = 4 * _VOCABULARY * 32 * 3  # gradients of the head: kept, scaled, and added to .grad
    assert int(done.stdout.split()[-1]) < (0.2 if how == "capped" else 0.1) * _ALL_LOGITS_BYTES + weights
