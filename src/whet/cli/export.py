"""`whet export`: a trained model for another runtime, checked against torch."""

from whet.config.command_line import Command
from whet.export.arguments import ExportArguments


def _run(asked: ExportArguments) -> int:
    from whet.export.run import run_export

    return run_export(asked)


COMMAND = Command(
    name="whet export",
    summary=(
        "Write a trained model as a folder for ONNX Runtime or OpenVINO, in fp32 or int8, and compare it with torch:"
        " outputs, the task's metric, rows per second and size. The folder holds the tokenizer and a script that serves"
        " it without whet; whet predict, ask and search read it too."
    ),
    usage="MODEL --to onnx|openvino|gguf [--int8] [--OPTION VALUE ...]",
    examples=(
        "whet export out --to onnx",
        "whet export out --to onnx --int8 --validation_file test.csv --output_dir served",
    ),
    parts=(ExportArguments,),
    lone="model",
    run=_run,
)
