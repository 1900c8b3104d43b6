"""Progress in a TrainJob of Kubeflow: what is posted, to whom, and that training never waits for it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import toy_trainer

sys.path.append(str(Path(__file__).parents[1] / "k8s"))

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
URL = "KUBEFLOW_TRAINER_SERVER_URL"


class Server:
    """A status server with a certificate of its own."""

    def __init__(self, folder: Path) -> None:
        self.posts: list[tuple[str, dict[str, Any]]] = []
        self.pause_s = 0.0
        key, self.certificate = folder / "key", folder / "ca.crt"
        words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
        words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(words, check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.http.daemon_threads = True
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        self.url = f"https://localhost:{self.http.server_address[1]}/status"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                time.sleep(server.pause_s)
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.posts.append((self.headers["Authorization"], body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        return Handler

    def statuses(self) -> list[dict[str, Any]]:
        return [body["trainerStatus"] for _, body in self.posts]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A running server, of which the environment tells as a controller does."""
    made = Server(tmp_path)
    (tmp_path / "token").write_text("first\n", "utf-8")
    monkeypatch.setenv(URL, made.url)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_CA_CERT", str(made.certificate))
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "token"))
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_progress_and_metrics_are_posted_with_the_token(server: Server, tmp_path: Path) -> None:
    toy_trainer(tmp_path / "out", logging_steps=1).train()
    assert {authorization for authorization, _ in server.posts} == {"Bearer first"}
    first, last = server.statuses()[0], server.statuses()[-1]
    assert first["progressPercentage"] == 0
    assert (last["progressPercentage"], last["estimatedRemainingSeconds"]) == (100, 0)
    metrics = {one["name"]: one["value"] for one in last["metrics"]}
    assert {"loss", "learning_rate", "epoch", "step"} <= metrics.keys()
    assert float(metrics["loss"]) > 0


def test_what_is_posted_satisfies_the_definition(server: Server, tmp_path: Path) -> None:
    from crd_schema import found_by, schema_of

    schema = schema_of("trainjobs-v2.3.0.yaml")["properties"]["status"]["properties"]["trainerStatus"]
    toy_trainer(tmp_path / "out", logging_steps=1).train()
    assert server.posts
    assert [found for status in server.statuses() for found in found_by(schema, status)] == []
    assert all("lastUpdatedTime" in status for status in server.statuses())


@pytest.mark.slow
def test_a_slow_server_holds_no_step_up(server: Server, tmp_path: Path) -> None:
    """The server answers after half a second; the training, which takes less, waits only once, at its end."""
    server.pause_s = 0.5
    began = time.monotonic()
    trainer = toy_trainer(tmp_path / "out", logging_steps=1)
    trainer.train()
    assert time.monotonic() - began < 12
    assert server.statuses()[-1]["progressPercentage"] == 100


@pytest.mark.parametrize("fault", ["nobody listens", "no token", "another certificate"])
def test_a_post_that_fails_is_logged_once_and_training_continues(
    fault: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "nobody listens":
        monkeypatch.setenv(URL, "https://localhost:9/status")
    elif fault == "no token":
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(tmp_path / "none"))
    else:
        monkeypatch.delenv("KUBEFLOW_TRAINER_SERVER_CA_CERT")
    with caplog.at_level(logging.WARNING, logger="whet"):
        assert toy_trainer(tmp_path / "out").train().global_step > 0
    assert caplog.text.count("could not be posted to the TrainJob") == 1
    assert server.posts == []


def test_nothing_is_posted_in_clear_or_when_it_is_switched_off(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("DISABLE_KUBEFLOW_INTEGRATION", "true")
    toy_trainer(tmp_path / "off").train()
    monkeypatch.delenv("DISABLE_KUBEFLOW_INTEGRATION")
    monkeypatch.setenv(URL, server.url.replace("https", "http"))
    with caplog.at_level(logging.WARNING, logger="whet"):
        toy_trainer(tmp_path / "clear").train()
    assert "no progress is posted" in caplog.text
    assert server.posts == []


def test_other_ranks_post_nothing(server: Server) -> None:
    from transformers import TrainerControl, TrainerState

    from whet.watch import trainjob

    (callback,) = trainjob.build()
    state = TrainerState(max_steps=4, is_world_process_zero=False)
    callback.on_train_begin(None, state, TrainerControl())
    callback.on_train_end(None, state, TrainerControl())
    assert server.posts == []
    assert os.environ[URL] == server.url
