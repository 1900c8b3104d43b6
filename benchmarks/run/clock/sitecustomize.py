"""Notes the loss of each backward pass and the time at the end of each optimizer step of a script, for `run.py`;
ends it after STEP_CLOCK_STEPS. With STEP_CLOCK_FP32, scripts that ask for the fp16 or bf16 of a GPU train in fp32. With
STEP_CLOCK_TPU, accelerate knows a name that it no longer has, and that two scripts of transformers ask for.

The script is measured the same way with and without whet: `whet run` puts its own folder in front of PYTHONPATH, and
runs this file as well.
"""

import json
import os
import sys
import time

if os.environ.get("STEP_CLOCK") and sys.orig_argv[1:4] != ["-m", "whet", "run"]:
    import random
    from pathlib import Path

    import numpy as np
    import torch

    for _seed in (random.seed, np.random.seed, torch.manual_seed):  # some scripts make heads and splits without one
        _seed(0)
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

    if os.environ.get("STEP_CLOCK_TPU"):
        from accelerate import DistributedType

        DistributedType.TPU = DistributedType.XLA

    if os.environ.get("STEP_CLOCK_FP32"):
        from transformers.training_args import TrainingArguments

        _post_init = TrainingArguments.__post_init__

        def _in_fp32(self):
            self.fp16 = self.bf16 = False
            _post_init(self)

        TrainingArguments.__post_init__ = _in_fp32
