"""Translate a command line of transformers' scripts or of TRL, or a file with one, and run what came out if asked to.

Usage: migrate_script.py 'python run_qa.py --model_name_or_path ...'|FILE [--run]
"""

import shlex
import sys

from whet_json import show, whet

source = sys.argv[1]
moved = whet("migrate", source, accepts=("ok", "error", "failed"))
changed = [{"given": row["given"], "status": row["status"], "becomes": row["becomes"], "why": row["why"]}
           for run in moved["runs"] for row in run["rows"] if row["status"] != "kept"]  # fmt: skip
answer = {"command": moved["command"], "complete": moved["complete"], "changed": changed, "error": moved.get("error")}
if "--run" in sys.argv[2:] and moved["complete"]:
    done = [whet(*shlex.split(line, comments=False)[1:]) for line in moved["command"].replace("\\\n", " ").splitlines()]
    answer["runs"] = [{"metrics": one["metrics"], "outputs": one["outputs"]} for one in done]
show(answer)
sys.exit(0 if moved["complete"] else moved["exit_code"])
