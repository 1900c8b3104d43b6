"""The state of a job, from what its controller wrote into it."""

from __future__ import annotations

from typing import Any

_ENDS = {"Complete": "succeeded", "Succeeded": "succeeded", "Failed": "failed"}
"""Conditions of jobs, of all three kinds, that are final -> what the job did."""


def state_of(job: dict[str, Any]) -> str:
    """Return whether the job runs, has succeeded or has failed, with the reason."""
    found = [one for one in job.get("status", {}).get("conditions") or () if one.get("status") == "True"]
    for one in found:
        if one.get("type") in _ENDS:
            why = one.get("message") or one.get("reason") or ""
            return f"{_ENDS[one['type']]}{f' ({why})' if why else ''}"
    if any(one.get("type") == "Suspended" for one in found):
        return "suspended"
    return "not finished"
