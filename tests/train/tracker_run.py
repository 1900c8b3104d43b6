"""Run by test_trackers.py as a process of its own: a run that reports to one tracker, in the working directory."""

from __future__ import annotations

import sys

from tiny_runs import toy_trainer


def main(tracker: str) -> None:
    """Train two epochs, evaluated before, after each and once more at the end."""
    trainer = toy_trainer(
        "out", report_to=tracker, run_name="toy", num_train_epochs=2, logging_steps=1, eval_strategy="epoch",
        eval_on_start=True, log_format="json",
    )  # fmt: skip
    trainer.train()
    trainer.evaluate()
    trainer.close()


if __name__ == "__main__":
    main(sys.argv[1])
