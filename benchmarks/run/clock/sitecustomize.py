"""Notes the loss of each backward pass and the time at the end of each optimizer step of a script, for `run.py`;
ends it after STEP_CLOCK_STEPS.

The script is measured the same way with and without whet: `whet run` puts its own folder in front of PYTHONPATH, and
runs this file as well.
"""

import json
import os
import time

if os.environ.get("STEP_CLOCK"):
    from pathlib import Path

    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    _backward = torch.Tensor.backward
    _found = {"losses": [], "step_ends_s": [], "processor_ends_s": []}

    def _note_loss(self, *given, **named):
        _found["losses"].append(self.item())
        return _backward(self, *given, **named)

    def _note_time(*_):
        _found["step_ends_s"].append(time.perf_counter())
        _found["processor_ends_s"].append(time.process_time())
        Path(os.environ["STEP_CLOCK"]).write_text(json.dumps(_found), "utf-8")
        if len(_found["step_ends_s"]) == int(os.environ["STEP_CLOCK_STEPS"]):
            raise SystemExit(0)

    torch.Tensor.backward = _note_loss
    register_optimizer_step_post_hook(_note_time)
