"""Amounts as Kubernetes writes them: 8, 500m, 64Gi."""

from __future__ import annotations

import re
from decimal import Decimal

_FORM = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:(m|k|[MGTPE]|[KMGTPE]i)|[eE]([+-]?\d{1,2}))?")
_FACTORS = {"": Decimal(1), "m": Decimal("0.001"), "k": Decimal(1000)}
_FACTORS |= {letter: Decimal(1000) ** (n + 2) for n, letter in enumerate("MGTPE")}
_FACTORS |= {f"{letter}i": Decimal(1024) ** (n + 1) for n, letter in enumerate("KMGTPE")}


def read(text: str) -> Decimal | None:
    """Return the amount in units (bytes, CPUs), None if this is no quantity of Kubernetes."""
    found = _FORM.fullmatch(text)
    if found is None:
        return None
    number, suffix, exponent = found.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent) if exponent else _FACTORS[suffix or ""])
