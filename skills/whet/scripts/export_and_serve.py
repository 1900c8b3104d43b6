"""Export a trained model to ONNX Runtime, checked against torch, and answer one JSON line with the folder's server.

Usage: export_and_serve.py MODEL_FOLDER '{"text": "..."}' [--OPTION VALUE ...]

MODEL_FOLDER: from whet qa, classify or tag. The line of a question has question and context, that of tags words.
Needs: pip install 'whet-train[onnx]'
"""

import json
import subprocess
import sys

from whet_json import show, whet

model, line, *options = sys.argv[1:]
found = whet("export", model, "--to", "onnx", *options)
served = subprocess.run(
    [sys.executable, found["outputs"]["server"]], input=f"{line}\n", capture_output=True, text=True, check=True
)
measured = found["export"]
show({
    "folder": found["outputs"]["folder"], "largest_difference": measured["outputs_fp32"]["largest_difference"],
    "bytes": measured["bytes"], "metric": measured.get("metric"), "answer": json.loads(served.stdout),
})  # fmt: skip
