"""What the tests of number formats share: operators with and without the native library."""

from tiny import operators

__all__ = ["operators"]
