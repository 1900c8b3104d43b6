"""A script for two ranks: one of them fails while a state is saved or loaded; each prints how it ends."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from own_loops import Loop, leave, made


class Registered:
    """Something with a state that cannot be read on the first rank, or restored on the second."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        """Fail as a user's code does."""
        if self.fails:
            raise LookupError("no state today")
        return {"n": 1}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        """Fail as a user's code does."""
        if self.fails:
            raise LookupError("no state today")


def main(folder: Path) -> None:
    """Save with a first rank that fails, save, load with a second rank that fails; print each error in a line."""
    accelerator = made("whet")
    loop = Loop(accelerator)
    place = Registered(fails=accelerator.is_main_process)
    accelerator.register_for_checkpointing(place)
    for fails, call in (
        (accelerator.is_main_process, accelerator.save_state),
        (False, accelerator.save_state),
        (not accelerator.is_main_process, accelerator.load_state),
        (False, accelerator.load_state),
    ):
        place.fails = fails
        said = "done"
        try:
            call(folder)
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())}"
        sys.stdout.write(f"rank {accelerator.process_index} {call.__name__}: {said}\n")
        sys.stdout.flush()
    loop.epoch(0, last=1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
