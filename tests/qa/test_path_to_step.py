"""How many calls lie between the command line and an optimizer step; docs/architecture.md names them."""

import json
import re
import subprocess
import sys
from pathlib import Path

from tiny_qa import command, squad, write_json

_MOST_CALLS = 10
_PAGE = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
_RUN = """
import json, sys
from pathlib import Path

found, words = sys.argv[1], json.loads(sys.argv[2])

def watch(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_name == "take_step" and code.co_filename.endswith("engine/step.py"):
        sys.setprofile(None)
        calls = []
        while frame is not None:
            if "/whet/" in frame.f_code.co_filename:
                calls.append(frame.f_code.co_qualname)
            frame = frame.f_back
        Path(found).write_text(json.dumps(calls[::-1]))

sys.setprofile(watch)
from whet.cli.main import main
main(words)
"""


def test_step_is_at_most_ten_calls_below_the_command(encoder: Path, tmp_path: Path) -> None:
    data = write_json(tmp_path / "train.json", squad())
    words = command(encoder, tmp_path / "out", "--do_train", train_file=data, max_steps=1)
    found = tmp_path / "calls.json"
    subprocess.run([sys.executable, "-c", _RUN, str(found), json.dumps(words)], check=True, capture_output=True)
    calls = json.loads(found.read_text())
    assert calls[0] == "main"
    assert calls[-1] == "take_step"
    assert len(calls) <= _MOST_CALLS, calls
    assert calls == _calls_on_the_page()


def _calls_on_the_page() -> list[str]:
    """Return the calls that the page names for this path, in its order."""
    (paragraph,) = [text for text in _PAGE.read_text("utf-8").split("\n\n") if text.startswith("The path from")]
    return [name for name in re.findall(r"`([^`]+)`", paragraph) if not name.endswith(".py")]
