"""What every method is: one file with a card, a stage, and the functions `apply`, `restore` and `cost`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from whet.card import Card
from whet.config.methods import MethodSettings
from whet.models.view import ModelView


class Stage(IntEnum):
    """What a method changes. Methods are applied in this order and restored in the reverse order."""

    WEIGHTS = 1
    """Which weights exist, and which are trained."""
    OPERATORS = 2
    """What computes the modules of a block."""
    CALLS = 3
    """What a call of the model takes and returns."""
    PRODUCTS = 4
    """The number format of matrix products."""
    COMPILATION = 5
    """What runs a block."""
    RECOMPUTATION = 6
    """Which activations are kept for backward."""
    PLACES = 7
    """Which memory holds the activations that are kept."""


@dataclass(frozen=True)
class Applied:
    """What a method did to a model."""

    method: str
    """The name on the method's card."""
    text: str
    """What it did, for the log."""
    changed: Mapping[str, int] = field(default_factory=dict)
    """How many modules of each class it changed, if it changes modules one by one."""

    def __str__(self) -> str:
        return f"{self.method}: {self.text}"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a method adds to the cost of training; below zero: what it saves. Costs of several methods add up."""

    weights_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    activation_bytes: int = 0
    """Kept from the forward pass for backward, whatever the batch: copies of weights that products read."""
    activation_bytes_per_token: float = 0.0
    """Kept from the forward pass for backward, for each token of a micro-batch."""
    backward_bytes_per_token: float = 0.0
    """Needed on top of these at the peak of backward."""
    host_bytes_per_token: float = 0.0
    """Kept in the host's memory instead of the device's."""
    flop_per_token: float = 0.0
    """Operations in products with weights, forward and backward; a multiplication with an addition is two."""
    flop_per_token_pair: float = 0.0
    """Operations in attention's products, for each token and each token of its sequence."""

    def __add__(self, other: Cost) -> Cost:
        mine, theirs = vars(self), vars(other)
        return Cost(**{name: mine[name] + theirs[name] for name in mine})


class Method(Protocol):
    """One way to change a model once, before it trains. A module of this folder is one."""

    CARD: Card
    STAGE: Stage

    def apply(self, view: ModelView, settings: MethodSettings) -> Applied | None:
        """Do what the settings ask of this method, or raise; None if they ask for nothing of it."""
        ...

    def restore(self, view: ModelView) -> None:
        """Undo `apply` exactly; a model without this method stays as it is."""
        ...

    def cost(self, view: ModelView, settings: MethodSettings) -> Cost:
        """Return what `apply` with these settings would add to a step's cost. Changes nothing."""
        ...
