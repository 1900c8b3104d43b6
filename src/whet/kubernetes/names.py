"""What Kubernetes accepts as names, labels and variables."""

from __future__ import annotations

import re

LONGEST = 63
"""Characters of a DNS label, which the name of every pod must be as well."""
_DNS_1035 = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
_DNS_1123 = re.compile(r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]*[a-z0-9])?)*")
_LABEL_VALUE = re.compile(r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_IMAGE_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:[a-z0-9.-]+(?::\d+)?/)?{_IMAGE_PART}(?:/{_IMAGE_PART})*(?::[\w][\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?"
)
_INTERFACES = re.compile(r"[A-Za-z0-9][\w.@-]{0,14}(?:,[A-Za-z0-9][\w.@-]{0,14})*", re.ASCII)
"""Names that Linux takes for an interface; gloo takes several with commas."""
_SUFFIX = {"trainjob": "-node-0-{}-abcde", "pytorchjob": "-worker-{}", "job": "-{}"}
"""Kind -> what the cluster appends to the job's name for the name of a pod, or its host name.

The webhook of JobSet counts the five random characters of a TrainJob's pods as well."""


def is_job_name(text: str) -> bool:
    """Return whether the text is a DNS label that begins with a letter (RFC 1035)."""
    return len(text) <= LONGEST and _DNS_1035.fullmatch(text) is not None


def is_namespace(text: str) -> bool:
    """Return whether the text is a DNS label, which a namespace must be (RFC 1123)."""
    return len(text) <= LONGEST and "." not in text and is_object_name(text)


def is_object_name(text: str) -> bool:
    """Return whether other objects (claims, Secrets, accounts) can have this name."""
    return len(text) <= 253 and _DNS_1123.fullmatch(text) is not None


def is_label(name: str, value: str) -> bool:
    """Return whether this is a label with or without a prefix: team, kueue.x-k8s.io/queue-name."""
    prefix, slash, own = name.rpartition("/")
    named = bool(own) and len(own) <= LONGEST and _LABEL_VALUE.fullmatch(own) is not None
    return named and (not slash or is_object_name(prefix)) and is_label_value(value)


def is_label_value(value: str) -> bool:
    """Return whether a label can have this value."""
    return len(value) <= LONGEST and _LABEL_VALUE.fullmatch(value) is not None


def is_variable(text: str) -> bool:
    """Return whether this is the name of an environment variable."""
    return _VARIABLE.fullmatch(text) is not None


def is_image(text: str) -> bool:
    """Return whether this is the name of a container image."""
    return _IMAGE.fullmatch(text) is not None


def is_interface(text: str) -> bool:
    """Return whether these are names of network interfaces."""
    return _INTERFACES.fullmatch(text) is not None


def longest_pod_name(kind: str, name: str, index: int) -> str:
    """Return the name of the job's pod with this index, as long as the cluster counts it."""
    return name + _SUFFIX[kind].format(index)
