"""A small API server of Kubernetes: objects are checked by their definitions and stored, jobs get pods, pods have logs.

It proves what the clients ask for. It has no webhooks, no scheduler and no kubelet.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

from crd_schema import findings

Object = dict[str, Any]
RESOURCES = {
    "v1": {"events": "Event", "pods": "Pod", "services": "Service", "persistentvolumeclaims": "PersistentVolumeClaim"},
    "batch/v1": {"jobs": "Job"},
    "kubeflow.org/v1": {"pytorchjobs": "PyTorchJob"},
    "trainer.kubeflow.org/v1alpha1": {"trainjobs": "TrainJob", "trainingruntimes": "TrainingRuntime"},
}
_CHECKED = {"Job", "PyTorchJob", "TrainJob", "TrainingRuntime"}
_REASONS = {
    400: "BadRequest", 401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 422: "Invalid",
    429: "TooManyRequests", 500: "InternalError",
}  # fmt: skip
_STAMP = "2026-01-01T00:00:{:02}.000000000Z"


class Cluster:
    """What the server holds, and how it misbehaves."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Object] = {}
        """(plural, namespace, name) -> the object."""
        self.logs: dict[str, list[str]] = {}
        self.asked: list[tuple[str, str]] = []
        """Method and path of every request."""
        self.missing: set[str] = set()
        """Groups whose definitions are not installed."""
        self.answers: dict[tuple[str, str], tuple[int, str]] = {}
        """(method, plural) -> an answer of its own."""
        self.hangs: dict[tuple[str, str], Callable[[], None]] = {}
        """(method, plural) -> what happens in place of an answer, for as long as the client waits."""
        self.log_answers: list[tuple[int, str]] = []
        """Answers to the next questions for a log, before its lines; (0, "") closes the connection."""
        self.log_queries: list[dict[str, str]] = []
        self.pause_s = 0.02
        for name, mode in (("runs", "ReadWriteMany"), ("single", "ReadWriteOnce"), ("frozen", "ReadOnlyMany")):
            self.add("persistentvolumeclaims", claim(name, mode))

    def add(self, plural: str, one: Object, namespace: str = "ml") -> None:
        one["metadata"] |= {"namespace": namespace, "uid": f"uid-{len(self.objects)}", "resourceVersion": "1"}
        one["metadata"].setdefault("creationTimestamp", f"2026-01-01T00:00:{len(self.objects):02}Z")
        self.objects[(plural, namespace, one["metadata"]["name"])] = one

    def of(self, plural: str) -> list[Object]:
        return [one for (kind, _, _), one in self.objects.items() if kind == plural]

    def finish(self, plural: str, name: str, condition: str = "Complete", message: str = "") -> None:
        """End a job as its controller would, and its pods."""
        (job,) = [one for one in self.of(plural) if one["metadata"]["name"] == name]
        job["status"] = {"conditions": [{"type": condition, "status": "True", "message": message}]}
        for pod in self.of("pods"):
            set_state(pod, {"terminated": {"exitCode": 0, "reason": "Completed"}}, "Succeeded")


def claim(name: str, mode: str) -> Object:
    return {
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name},
        "spec": {"accessModes": [mode]},
    }  # fmt: skip


def event(job: str, reason: str, message: str) -> Object:
    """Return an event about a job, as a controller reports it."""
    about = {"apiVersion": "batch/v1", "kind": "Job", "name": job, "namespace": "ml"}
    return {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{job}.1"}, "involvedObject": about,
        "type": "Warning", "reason": reason, "message": message, "lastTimestamp": "2026-01-01T00:00:00Z", "count": 1,
    }  # fmt: skip


def pod(name: str, number: int, template: Object, state: Object, *, phase: str = "Running") -> Object:
    """Return a pod as the controllers of all three kinds make them."""
    labels = template["metadata"]["labels"] | {
        "batch.kubernetes.io/job-completion-index": str(number), "training.kubeflow.org/replica-index": str(number),
    }  # fmt: skip
    found = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels},
        "spec": {**template["spec"], "nodeName": f"node-{number}"}, "status": {},
    }  # fmt: skip
    set_state(found, state, phase)
    return found


def set_state(one: Object, state: Object, phase: str, restarts: int = 0) -> None:
    container = one["spec"]["containers"][0]
    status = {"name": container["name"], "image": "i", "imageID": "i", "ready": True, "restartCount": restarts}
    one["status"] = {"phase": phase, "containerStatuses": [{**status, "state": state}]}


def _make_pods(cluster: Cluster, job: Object, namespace: str) -> None:
    name, spec = job["metadata"]["name"], job["spec"]
    if job["kind"] == "Job":
        count, template, form = spec["completions"], spec["template"], "{}-{}"
    elif job["kind"] == "PyTorchJob":
        worker = spec["pytorchReplicaSpecs"]["Worker"]
        count, template, form = worker["replicas"], worker["template"], "{}-worker-{}"
    elif job["kind"] == "TrainJob":
        runtime = cluster.objects[("trainingruntimes", namespace, spec["runtimeRef"]["name"])]
        template = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        count, form = spec["trainer"]["numNodes"], "{}-node-0-{}"
    else:
        return
    for number in range(count):
        one = pod(form.format(name, number), number, template, {"running": {"startedAt": "2026-01-01T00:00:00Z"}})
        cluster.add("pods", one, namespace)
        cluster.logs[one["metadata"]["name"]] = [f"step {step} of pod {number}" for step in range(3)]


def _kind(plural: str) -> str:
    return next(kinds[plural] for kinds in RESOURCES.values() if plural in kinds)


def _version(plural: str) -> str:
    return next(version for version, kinds in RESOURCES.items() if plural in kinds)


class Handler(BaseHTTPRequestHandler):
    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def _answer(self, method: str) -> None:
        url = urlparse(self.path)
        self.cluster.asked.append((method, url.path))
        size = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(size)
        if self.headers.get("Authorization") == "Bearer old":  # kubectl sends none without TLS
            return self._status(401, "Unauthorized")
        parts = url.path.strip("/").split("/")
        if parts[0] == "openapi":
            return self._openapi(parts[1:])
        group = "v1" if parts[0] == "api" else "/".join(parts[1:3])
        rest = parts[2:] if parts[0] == "api" else parts[3:]
        if not rest:
            return self._discovery(parts, group)
        if group not in RESOURCES or group.split("/")[0] in self.cluster.missing:
            return self._send(404, "404 page not found", "text/plain")
        namespace, plural, *name = rest[1:]
        own = self.cluster.answers.get((method, plural))
        if own is not None:
            return self._status(*own)
        if (method, plural) in self.cluster.hangs:
            self.cluster.hangs[method, plural]()
            self.close_connection = True
            self.connection.settimeout(60)
            self.connection.recv(1)
            return None
        return self._act(method, namespace, plural, name, {k: v[0] for k, v in parse_qs(url.query).items()})

    def _act(self, method: str, namespace: str, plural: str, name: list[str], query: dict[str, str]) -> None:
        if method == "POST":
            return self._create(namespace, plural, json.loads(self.body))
        if not name:
            return self._list(namespace, plural, query)
        key = (plural, namespace, name[0])
        if key not in self.cluster.objects:
            return self._status(404, f'{plural} "{name[0]}" not found', {"name": name[0], "kind": plural})
        if name[1:] == ["log"]:
            return self._log(name[0], query)
        if method == "DELETE":
            wanted = (json.loads(self.body or b"{}") or {}).get("preconditions", {}).get("uid")
            if wanted not in (None, self.cluster.objects[key]["metadata"]["uid"]):
                return self._status(409, f"the UID in the precondition ({wanted}) is another", {"name": name[0]})
            return self._send(200, self.cluster.objects.pop(key))
        return self._send(200, self.cluster.objects[key])

    def _create(self, namespace: str, plural: str, one: Object) -> None:
        name = one["metadata"]["name"]
        if (plural, namespace, name) in self.cluster.objects:
            return self._status(409, f'{plural} "{name}" already exists', {"name": name})
        found = findings(one) if one["kind"] in _CHECKED else []
        if found:
            return self._status(422, f'{one["kind"]} "{name}" is invalid: {"; ".join(found)}', {"name": name})
        self.cluster.add(plural, one, namespace)
        _make_pods(self.cluster, one, namespace)
        return self._send(201, one)

    def _list(self, namespace: str, plural: str, query: dict[str, str]) -> None:
        wanted = dict(word.split("=") for word in query.get("labelSelector", "").split(",") if word)
        items = [
            one for one in self.cluster.of(plural)
            if wanted.items() <= one["metadata"].get("labels", {}).items() and one["metadata"]["namespace"] == namespace
        ]  # fmt: skip
        self._send(
            200,
            {
                "kind": f"{_kind(plural)}List",
                "apiVersion": _version(plural),
                "metadata": {"resourceVersion": "1"},
                "items": items,
            },
        )

    def _log(self, name: str, query: dict[str, str]) -> None:
        self.cluster.log_queries.append(query)
        if self.cluster.log_answers:
            code, message = self.cluster.log_answers.pop(0)
            self.close_connection = not code
            return self._status(code, message, {"name": name}) if code else None
        lines = list(enumerate(self.cluster.logs.get(name, [])))
        lines = lines[-int(query["tailLines"]) :] if "tailLines" in query else lines
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, line in lines:
            text = f"{_STAMP.format(number)} {line}\n" if query.get("timestamps", "").lower() == "true" else f"{line}\n"
            time.sleep(self.cluster.pause_s if query.get("follow", "").lower() == "true" else 0)
            data = text.encode()
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        return None

    def _discovery(self, parts: list[str], group: str) -> None:
        """Answer what kubectl asks before anything else: which kinds there are."""
        known = {one for one in RESOURCES if "/" in one and one.split("/")[0] not in self.cluster.missing}
        if parts == ["api"]:
            return self._send(200, {"kind": "APIVersions", "versions": ["v1"]})
        if parts == ["apis"]:
            groups = []
            for one in sorted(known):
                version = {"groupVersion": one, "version": one.split("/")[1]}
                groups.append({"name": one.split("/")[0], "versions": [version], "preferredVersion": version})
            return self._send(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        if group not in known | {"v1"}:
            return self._send(404, "404 page not found", "text/plain")
        verbs = ["create", "delete", "get", "list", "watch"]
        resources = [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for plural, kind in RESOURCES[group].items()
        ]
        resources += [{**one, "name": "pods/log"} for one in resources if one["name"] == "pods"]
        return self._send(
            200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": resources}
        )

    def _openapi(self, parts: list[str]) -> None:
        """Answer that the server checks the fields of objects itself, which kubectl asks before it creates one."""
        if parts[:1] != ["v3"]:
            return self._status(404, "not found")
        if len(parts) == 1:
            named = {f"apis/{one}" if "/" in one else f"api/{one}" for one in RESOURCES}
            return self._send(200, {"paths": {one: {"serverRelativeURL": f"/openapi/v3/{one}"} for one in named}})
        group, _, version = "/".join(parts[2:]).rpartition("/")
        kinds = {**RESOURCES[f"{group}/{version}".strip("/")], **({} if group else {"namespaces": "Namespace"})}
        paths = {}
        for plural, kind in kinds.items():
            gvk = {"group": group, "version": version, "kind": kind}
            checked = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
            patch = {"parameters": [checked], "responses": {}, "x-kubernetes-group-version-kind": gvk}
            paths[f"/{'/'.join(parts[1:])}/{plural}/{{name}}"] = {"patch": patch}
        body = {"openapi": "3.0.0", "info": {"title": "t", "version": "1"}, "paths": paths}
        return self._send(200, body)

    def _status(self, code: int, message: str, details: Object | None = None) -> None:
        body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
        self._send(code, body | {"reason": _REASONS.get(code, "Unknown"), "details": details or {}})

    def _send(self, code: int, body: object, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve(cluster: Cluster) -> ThreadingHTTPServer:
    """Return a running server of this cluster; its address is in `server_address`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"cluster": cluster}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server
