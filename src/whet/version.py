"""The version of whet."""

__version__ = "0.1.0"
