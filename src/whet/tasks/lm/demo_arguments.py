"""The options of `whet demo-lm`."""

from dataclasses import dataclass

from whet.config.rules.ranges import at_least
from whet.config.settings import checked


@checked(headings={"output_dir": "Demo"}, rules=(at_least("max_steps", 1, "a model learns in steps"),))
@dataclass(frozen=True, kw_only=True, slots=True)
class DemoLmArguments:
    """How the demonstration is run."""

    output_dir: str = "whet-demo-lm"
    """Folder for the trained model and its results."""
    max_steps: int = 300
    """Optimizer steps."""
    seed: int = 42
    """Random seed of the new weights and of the order of rows."""
