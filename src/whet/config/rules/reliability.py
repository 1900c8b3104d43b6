"""Rules about the guards of a run: non-finite steps, loss spikes, memory."""

from whet.config.fields import TrainingFields
from whet.config.rules.ranges import Rule, at_least
from whet.errors import Problem


def spike_is_above_the_median(args: TrainingFields) -> Problem | None:
    """Half of all losses lie above their median."""
    if args.max_loss_spike is None or args.max_loss_spike > 1:
        return None
    return Problem(
        what="max_loss_spike is not above 1",
        got=args.max_loss_spike,
        why="it is the largest loss of a step as a multiple of the usual one: at 1 every other step would be skipped",
        fix="use --max_loss_spike 5, for example, or leave it out",
    )


RELIABILITY_RULES: tuple[Rule, ...] = (
    at_least("max_nonfinite_steps", 1, "the run ends when as many steps in a row were not finite"),
    spike_is_above_the_median,
    at_least("memory_limit_gb", 0, "it is an amount of memory; 0 switches the guard off"),
)
