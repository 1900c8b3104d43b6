"""Run a training to its end: resume it when a signal stopped it, or when it was killed.

Usage: keep_running.py TASK --output_dir OUT --save_steps N [--OPTION VALUE ...]

A stopped run has saved; a killed one (out of memory, power) resumes from its last checkpoint. Both resumed runs end as
the one that nobody stopped would have. Errors are not tried again: their fix is in the answer.
"""

import sys

from whet_json import show, whet

MOST_STARTS = 10
task, *words = sys.argv[1:]
resume = ["--resume_from_checkpoint", "auto"]
starts, found = 0, {"status": "killed"}
while found["status"] in ("killed", "stopped") and starts < MOST_STARTS:
    found = whet(task, *words, *(resume if starts else []), accepts=("ok", "stopped", "killed"))
    starts += 1
show({"starts": starts, **found})
sys.exit(found["exit_code"])
