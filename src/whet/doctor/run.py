"""`whet doctor`: examine, advise, print."""

from __future__ import annotations

import sys

from whet.doctor import advice, machine, native, rates, show, software
from whet.doctor.arguments import DoctorArguments
from whet.doctor.findings import Findings
from whet.errors import EXIT_OK, EXIT_OTHER


def run_doctor(asked: DoctorArguments) -> int:
    """Print what this machine can do; return 0, or 1 if torch, transformers or the native library is broken."""
    if asked.model:
        sys.stdout.write(f"{_about_model(asked)}\n")
        return EXIT_OK
    found = examine(asked)
    broken, more = advice.broken(found), advice.advice(found)
    text = show.as_json(found, broken, more) if asked.json else show.as_text(found, broken, more)
    sys.stdout.write(f"{text}\n")
    return EXIT_OTHER if broken else EXIT_OK


def examine(asked: DoctorArguments) -> Findings:
    """Return the requested findings; the native library is loaded before the OpenMP libraries are counted."""
    its_library = native.examine()
    if asked.kernels:
        return Findings(machine=None, software=None, native=its_library, rates=None)
    installed = software.examine()
    measured = None
    if asked.measure and installed.torch_error is None:
        measured = rates.measure(has_native=its_library.isa is not None)
    return Findings(machine=machine.examine(), software=installed, native=its_library, rates=measured)


def _about_model(asked: DoctorArguments) -> str:
    from whet.own_loop.examine import examine

    found = examine(asked.model)
    return show.model_as_json(found) if asked.json else show.model_as_text(found)
