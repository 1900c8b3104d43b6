"""The tests of this folder run with native operators and without."""

from accelerate_state import fresh_accelerate
from tiny import operators

__all__ = ["fresh_accelerate", "operators"]
