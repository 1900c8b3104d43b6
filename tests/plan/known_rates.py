"""Rates of a machine that does not exist, whose times are simple to tell."""

from __future__ import annotations

from typing import Any

from whet.plan.rates import FORMATS, Key, Rates, Surface

FLOPS = {"fp32": 1e11, "bf16": 2e11}
KEY = Key(processor="a processor", cores=2, threads=2, operators="x86-64-v4", native="0", torch="2.13.0", whet="0")


def known_rates(**changes: Any) -> Rates:
    """Return rates of a machine whose products run at FLOPS at every size."""
    surfaces: dict[str, Surface] = {}
    for form in FORMATS:
        for kind in ("encoder", "decoder"):
            for part, passes in (("forward", 2), ("backward", 4)):
                speed = FLOPS[form] / passes
                surfaces[f"block {kind} {form} {part}"] = _plane((1e5, 1e7), (64, 2048), lambda w, n: w * n / speed)  # noqa: B023
                surfaces[f"ends {kind} {form} {part}"] = _plane((128, 1024), (64, 2048), lambda d, n: 1e-9 * d * n)
                surfaces[f"attention {kind} {form} {part}"] = _plane((32, 128), (64, 1024), lambda _, t: 2 * t / speed)  # noqa: B023
        surfaces[f"head {form}"] = _plane((4e6,), (64, 512), lambda w, n: 6 * w * n / FLOPS[form])  # noqa: B023
    numbers = {
        "optimizer auto": 1e-9, "optimizer adafactor": 4e-9, "norm": 1e-10, "copy_byte": 1e-10, "save_byte": 1e-9,
        "row": 1e-5, "start": 5.0, "frozen fp32": 0.5, "frozen bf16": 0.5,
    }  # fmt: skip
    given: dict[str, Any] = {"key": KEY, "made": 1.0, "took_s": 9.0, "load": 0.1, "noise": 0.02}
    return Rates(**(given | {"surfaces": surfaces, "numbers": numbers} | changes))


def _plane(firsts: tuple[float, ...], seconds: tuple[float, ...], of: Any) -> Surface:
    return Surface.of({first: {second: of(first, second) for second in seconds} for first in firsts})
