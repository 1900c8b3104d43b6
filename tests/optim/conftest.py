"""The tests of this folder may run with native operators and without."""

from tiny import operators

__all__ = ["operators"]
