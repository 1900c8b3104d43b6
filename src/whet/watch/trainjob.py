"""Posts progress, time left and metrics to the TrainJob of Kubeflow Trainer that this process belongs to.

Where a cluster offers it (Trainer 2.3 with the feature gate TrainJobRuntimeStatus), the controller gives the pod an
address in the environment, and what is posted there becomes `status.trainerStatus` of the TrainJob.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from transformers import TrainerCallback

from whet.config.environment import TRAINJOB
from whet.log import logger

_CA, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("CA_CERT", "TOKEN"))
"""Variables of the controller: the files with its certificate and our token."""
_OFF = "DISABLE_KUBEFLOW_INTEGRATION"
_EVERY_S = 5.0
_ANSWER_S = 5.0
_END_S = 10.0
"""Seconds that the end of a training waits for its last post."""


def build() -> list[TrainerCallback]:
    """Return the callback, or nothing outside of a TrainJob that takes a status."""
    url = os.environ.get(TRAINJOB, "")
    if not url or os.environ.get(_OFF, "").upper() == "TRUE":
        return []
    if not url.startswith("https://"):
        logger.warning(
            "%s is not an address with https: no progress is posted, as the token would be readable", TRAINJOB
        )
        return []
    return [TrainJobStatus(url)]


class TrainJobStatus(TrainerCallback):
    """Keeps the newest status, which a thread posts: no step waits for the network."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._metrics: dict[str, str] = {}
        self._newest: dict[str, Any] = {}
        self._began = (0.0, 0)
        """When the training began, and at which step."""
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._failed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not state.is_world_process_zero or state.max_steps <= 0:
            return
        self._began = (time.monotonic(), state.global_step)
        self._newest = self._status(state)
        self._ends.clear()
        self._thread = threading.Thread(target=self._post_all, name="whet-trainjob", daemon=True)
        self._thread.start()

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Mapping[str, Any], **_: Any) -> None:
        self._metrics |= {name: f"{value:.6g}" for name, value in logs.items() if isinstance(value, int | float)}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._thread is not None:
            self._newest = self._status(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._thread is not None:
            self._newest = self._status(state)
            self._ends.set()
            self._thread.join(_END_S)
            self._thread = None

    def _status(self, state: Any) -> dict[str, Any]:
        since, first = self._began
        done, left = state.global_step - first, state.max_steps - state.global_step
        found: dict[str, Any] = {"progressPercentage": 100 * state.global_step // state.max_steps}
        if done > 0:
            found["estimatedRemainingSeconds"] = round((time.monotonic() - since) / done * left)
        metrics = self._metrics | {"step": str(state.global_step)}
        return found | {"metrics": [{"name": name, "value": value} for name, value in metrics.items()]}

    def _post_all(self) -> None:
        """Post each newest status, at most every few seconds, until the training ends."""
        posted, ends = None, False
        while not ends:
            ends = self._ends.wait(_EVERY_S if posted is not None else 0)
            if self._newest is not posted:
                posted = self._newest
                self._post(posted)

    def _post(self, status: dict[str, Any]) -> None:
        """Post one status; the log names the first failure, and the training goes its way."""
        body = {"trainerStatus": status | {"lastUpdatedTime": datetime.now(UTC).isoformat(timespec="seconds")}}
        try:
            token = Path(os.environ[_TOKEN]).read_text("utf-8").strip()  # the kubelet replaces it every hour
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            request = Request(self._url, json.dumps(body).encode(), headers, method="POST")  # noqa: S310  https, above
            trusted = ssl.create_default_context(cafile=os.environ.get(_CA))
            urlopen(request, timeout=_ANSWER_S, context=trusted).close()  # noqa: S310
            self._failed = False
        except (OSError, KeyError, ValueError) as error:
            if not self._failed:
                logger.warning("progress could not be posted to the TrainJob, training continues: %s", error)
            self._failed = True
