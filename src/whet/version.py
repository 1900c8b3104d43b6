"""The version of whet, and the name under which it is installed."""

DISTRIBUTION = "whet-train"
"""The name of the distribution. On package indexes, `whet` is somebody else's package."""
__version__ = "0.1.0"
