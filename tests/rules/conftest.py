"""The models and rows of the training's tests, for the rules that need a run."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))
