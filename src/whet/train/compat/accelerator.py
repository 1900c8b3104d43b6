"""The error of an attribute that whet's Accelerator does not have."""

from whet.errors import ConfigError


class MissingAttributeError(ConfigError, AttributeError):
    """An attribute that whet's accelerator does not have; `hasattr` returns False for it."""
