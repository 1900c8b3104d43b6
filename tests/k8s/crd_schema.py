"""The schema of a CustomResourceDefinition as JSON schema, and what it finds in an object.

The API server does more than the openAPI text says: it prunes or refuses unknown fields, takes numbers for amounts, and
knows that metadata is always there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from not_shown import not_shown

Schema = dict[str, Any]
_CRDS = {
    "TrainJob": "trainjobs-v2.3.0.yaml",
    "TrainingRuntime": "trainingruntimes-v2.3.0.yaml",
    "PyTorchJob": "pytorchjobs-v1.9.4.yaml",
}
NEWER = {"TrainJob": "trainjobs-main-2026-08.yaml", "TrainingRuntime": "trainingruntimes-main-2026-08.yaml"}
OLDER = {"PyTorchJob": "pytorchjobs-v1.9.0.yaml"}
_INT32: Schema = {"minimum": -(2**31), "maximum": 2**31 - 1}
_DROPPED = ("format", "description", "default")


def folder() -> Path:
    """Return the folder of definitions, or skip."""
    root = Path(os.environ.get("WHET_TEST_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))
    found = root / "crds"
    if not found.is_dir():
        not_shown("S8", f"there are no definitions of Kubeflow in {found}", "WHET_TEST_DATA, the folder with crds/")
    return found


def findings(manifest: Schema, files: dict[str, str] | None = None) -> list[str]:
    """Return what the schema of the object's kind finds in it."""
    kind = manifest["kind"]
    if kind == "Job":  # batch/v1: its schema is a part of the runtime's
        spec = schema_of(_CRDS["TrainingRuntime"])["properties"]["spec"]["properties"]["template"]
        job = spec["properties"]["spec"]["properties"]["replicatedJobs"]["items"]["properties"]["template"]
        return found_by(job["properties"]["spec"], manifest["spec"])
    return found_by(schema_of({**_CRDS, **(files or {})}[kind]), manifest)


@cache
def schema_of(file: str) -> Schema:
    """Return the converted schema of a definition."""
    definition = yaml.load((folder() / file).read_text("utf-8"), Loader=yaml.CSafeLoader)
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    root["properties"] |= {"metadata": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    return converted(root)


def converted(node: Schema) -> Schema:
    """Return JSON schema for a node of an openAPI schema as Kubernetes uses it."""
    out = {
        name: _converted_part(name, value)
        for name, value in node.items()
        if name not in _DROPPED and not name.startswith("x-kubernetes-") and name != "nullable"
    }
    if node.get("format") == "int32":
        out = {**_INT32, **out}
    if node.get("x-kubernetes-int-or-string"):
        out = {name: value for name, value in out.items() if name != "anyOf"} | {"type": ["integer", "string"]}
    open_ended = node.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in node
    if "properties" in node and not open_ended:
        out["additionalProperties"] = False
    if node.get("nullable") and "type" in out:
        out["type"] = [*([out["type"]] if isinstance(out["type"], str) else out["type"]), "null"]
    if keys := node.get("x-kubernetes-list-map-keys"):
        out["keys"] = keys
    return out


def _converted_part(name: str, value: Any) -> Any:
    if name == "properties":
        return {key: converted(child) for key, child in value.items()}
    if name in ("items", "additionalProperties", "not") and isinstance(value, dict):
        return converted(value)
    if name in ("anyOf", "allOf", "oneOf"):
        return [converted(child) for child in value]
    return value


def found_by(schema: Schema, value: Any) -> list[str]:
    """Return what a converted schema finds in a value, with the path of each."""
    errors = jsonschema.Draft202012Validator(schema).iter_errors(value)
    return [f"{one.json_path}: {one.message[:200]}" for one in errors] + list(_twice(schema, value, "$"))


def _twice(schema: Schema, value: Any, path: str) -> Iterator[str]:
    """Yield lists with two items of the same key."""
    if isinstance(value, list):
        keys = schema.get("keys", [])
        ids = [tuple(item.get(key) for key in keys) for item in value] if keys else []
        yield from (f"{path}: {one} twice" for one in sorted({str(one) for one in ids if ids.count(one) > 1}))
        for number, item in enumerate(value):
            yield from _twice(schema.get("items", {}), item, f"{path}[{number}]")
    elif isinstance(value, dict):
        for name, child in value.items():
            named = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            yield from _twice(named if isinstance(named, dict) else {}, child, f"{path}.{name}")
