"""The matrix of all families that whet knows: a new file in models/families is covered without a change here."""

from tiny import operators

__all__ = ["operators"]
