"""Say whether a training fits into memory, how long it takes, and which options make it fit; nothing is trained.

Usage: plan_what_fits.py TASK --model_name_or_path MODEL [--train_file FILE] [--memory 8GB] [--OPTION VALUE ...]
"""

import sys

from whet_json import show, whet

found = whet("plan", *sys.argv[1:], "--output_dir", "planned", "--fit")
memory, time = found["memory"], found.get("time")
ways = [
    {"add": way["flags"], "peak_bytes": way["memory"]["peak_bytes"], "times_as_long": way["times_as_long"],
     "same_result": way["same_result"]}
    for way in found["fit"]
]  # fmt: skip
show({
    "task": found["task"], "fits": memory["fits"], "peak_bytes": memory["peak_bytes"],
    "free_bytes": memory["free_bytes"], "train_s": None if time is None else time["train_s"],
    "parts": memory["parts"], "ways_that_fit": ways,
})  # fmt: skip
