"""What the tests of this folder share."""

from accelerate_state import fresh_accelerate

__all__ = ["fresh_accelerate"]
