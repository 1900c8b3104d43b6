"""The page `report.html` of a run, or of several next to each other: what they reached, and what they get wrong.

`runs` decides what the files of an output folder say of a run, `curves` and `bars` what is drawn of it and of a
forecast, `page` what a reader sees. Nothing here trains or computes a metric, and neither torch nor transformers is
imported.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from whet import console
from whet.config.ranks import here
from whet.config.rules.training import REPORT_NAME
from whet.errors import ConfigError, escape_controls
from whet.log import logger


def write(folders: Sequence[str | Path], path: Path | None = None) -> Path:
    """Write the page of the runs in these output folders, and return its path.

    It is `report.html` in the folder, or in the current one if there are several, unless `path` names another file. Of
    a folder with several seeds it shows each seed. Raises ConfigError for a folder without a run, and for a file that
    is not such a page.
    """
    from whet.report import bars, curves, page, runs
    from whet.watch import files as output_files

    places = [Path(folder) for folder in folders]
    each = [one for place in places for one in (_seeds_of(place) or [place])]
    found = runs.name_apart([runs.read(one) for one in each])
    path = path or (places[0] if len(places) == 1 else Path()) / REPORT_NAME
    _require_free(path)
    with output_files.stored(f"{path.name} cannot be written", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        output_files.write_text(path, page.render(found, curves.draw(found), bars.draw(found), path.parent))
    return path


@contextmanager
def written_after(folder: Path) -> Iterator[None]:
    """Write the page of the run in this folder after the block; not after a signal, nor if it fails at its first steps.

    Of several seeds each has its page in its folder, and the folder's own shows them next to each other. A page that
    cannot be written is a warning.
    """
    try:
        yield
    except Exception:
        with suppress(Exception):  # the error that ended the run is what counts
            if _is_under_way(folder):
                write([folder])
        raise
    try:
        _write_all(folder)
    except Exception as error:
        again = f"whet report {shlex.quote(str(folder))}"
        logger.warning("%s was not written (`%s` tries it again): %s", REPORT_NAME, again, error)
    else:
        from whet.watch import printing

        label, path = f"  {'report':<24}", escape_controls(str(folder / REPORT_NAME))
        printing.show([label + console.shorten(path, console.width() - len(label))])


def remove(folder: Path) -> None:
    """Remove the page of an earlier run from the folder; a file that is no such page stays, and so does a link."""
    path = folder / REPORT_NAME
    with suppress(OSError):
        if here().is_first and stat.S_ISREG(path.lstat().st_mode) and _is_page(path):
            path.unlink()


def _is_under_way(folder: Path) -> bool:
    """Return whether this process records a run in the folder which has steps enough for a curve."""
    from whet.watch import record

    found = record.read(folder)
    return found.last.begin.get("pid") == os.getpid() and len(found.steps) > 1


def _write_all(folder: Path) -> None:
    for seed in _seeds_of(folder):
        write([seed])
    write([folder])


def _seeds_of(folder: Path) -> list[Path]:
    """Return the folders of the seeds that the folder's model is the best of; none for a single run."""
    from whet.report import runs

    return [folder / name for name in runs.seeds_in(folder)]


def _is_page(path: Path) -> bool:
    """Return whether the file has the mark of whet's pages."""
    from whet.report import page

    return f'content="{page.GENERATOR}'.encode() in path.read_bytes()[:4096]


def _require_free(path: Path) -> None:
    """Raise ConfigError if a page here would replace a folder, or a file without the mark of whet's pages.

    What else has this name, such as a link, is only another name, and replaced.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    is_only_name = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
    if stat.S_ISDIR(status.st_mode) or (is_only_name and not _is_page(path)):
        raise ConfigError(
            what="there is a folder of this name" if path.is_dir() else "the file is not a report of whet",
            got=str(path),
            why="it would be lost",
            fix="name another file in --output",
        )
