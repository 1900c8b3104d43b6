"""An output folder that is used again: what earlier runs said there must not pass for what this run says.

The results in the folder are of one model (`watch/results.py`). Here a run says when that model becomes another one:
a training that has taken its first step has changed it, and a run that only judges may judge another one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash

from whet import report
from whet.config.ranks import here
from whet.data.files.file_bytes import digest_of
from whet.jobs.fields import JobFields
from whet.models.loading.hub import cached_snapshot
from whet.watch import results
from whet.watch.events import FirstStep

_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "[0-9]_*/model*.safetensors")
"""The files with the weights of a model, those of sentence-transformers' modules among them."""


class UsedAgain:
    """The results of earlier runs in an output folder, for one run in it; rank 0 reads and removes."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._found = results.names_in(self._folder)
        self._has_stepped = False
        self.is_as_before = False
        """Whether the training took no step, and has saved the model that was there: its figures there stay true."""

    def after_first_step(self) -> FirstStep:
        """Return the callback that removes what was said of the model before the training."""
        return FirstStep(self._forget)

    @contextmanager
    def saving_model(self) -> Iterator[None]:
        """Note the model that is saved within the block; a training that took no step may have left another one."""
        before = None if self._has_stepped else checksum_in(self._folder)
        yield
        if (saved := checksum_in(self._folder)) is not None:
            results.settle(self._folder, saved, before)
            self.is_as_before = saved == before

    def judging(self, job: JobFields) -> bool:
        """Note the model that is judged without training; return whether what was there was said of another one.

        A model is known by its weights, wherever they lie: in a folder, or in the hub's cache, where it was read from.
        """
        if not here().is_first:
            return False
        name, revision = job.model_name_or_path, job.model_revision
        folder: Path | None = Path(name)
        if not folder.is_dir():
            folder = cached_snapshot(name, cache_dir=job.cache_dir, revision=revision)
        judged = None if folder is None else checksum_in(folder)
        by_name = xxhash.xxh3_128_hexdigest(f"{name} {revision if folder is None else folder.name}".encode())
        return results.settle(self._folder, judged or by_name, checksum_in(self._folder))

    def _forget(self) -> None:
        self._has_stepped = True
        results.forget(self._folder, named=self._found)  # an evaluation at the start of this run is nobody's news
        report.remove(self._folder)


def holds_model(folder: Path) -> bool:
    """Return whether there are weights of a model in this folder."""
    return bool(_weights_in(folder))


def checksum_in(folder: Path) -> str | None:
    """Return a checksum of the weights of the model in this folder; None if there are none, and on other ranks."""
    if not here().is_first:
        return None
    weights = _weights_in(folder)
    return digest_of(weights) if weights else None


def _weights_in(folder: Path) -> list[Path]:
    return [path for pattern in _WEIGHTS for path in sorted(folder.glob(pattern)) if path.is_file()]
