"""The pre-flight of `whet launch --hosts` with real faults: each host and its fix are named, all at once, and soon."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from host_runs import SLEEP, ended, script

from namespaces import Cluster, cluster, missing

pytestmark = [pytest.mark.reliability, pytest.mark.skipif(missing() is not None, reason=str(missing()))]

MOST_S = 30.0
_HOSTS = "127.0.0.1 localhost\n"
_ONE_EACH = ("--nproc_per_node", "1")


@pytest.fixture
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("hosts"), n_hosts=3) as made:
        yield made
        assert made.empty(2) == ""


def refused(process: subprocess.Popen[str]) -> str:
    """Return what a launcher prints that starts nothing; it must not take long."""
    began = time.monotonic()
    code, out, err = ended(process, MOST_S)
    assert (code, out) == (78, ""), err
    assert time.monotonic() - began < MOST_S
    return err


def test_every_fault_of_every_host_is_shown_at_once(hosts: Cluster, tmp_path: Path) -> None:
    """No sshd on one host, another torch on the next, a name that nobody knows."""
    script(tmp_path, SLEEP)
    fake = tmp_path / "fake" / "torch-1.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    hosts.stop_sshd("h2")
    hosts.start_sshd("h3", f"SetEnv PYTHONPATH={fake.parent}")
    err = refused(hosts.over_ssh("h1,h2,h3,no-such-host", *_ONE_EACH, folder=tmp_path))
    assert "h2 cannot be reached" in err
    assert "Connection refused" in err
    assert "fix: start sshd there" in err
    assert "h3: another version of torch" in err
    assert "got: 1.0; h1 has 2" in err
    assert "no-such-host cannot be reached" in err
    assert "fix: correct the name" in err
    assert not list(tmp_path.glob("pid-*"))


def test_a_host_without_key_or_python_or_folder_is_named(hosts: Cluster, tmp_path: Path) -> None:
    script(tmp_path, SLEEP)
    hosts.start_sshd("h2", "AuthorizedKeysFile none")
    (hosts.folder / "h2" / "sshd_config").read_text()
    python = tmp_path / "python"  # exists on h1 alone, by what h3 is started with
    python.write_text(f'#!/bin/sh\n[ "$(hostname)" = h3 ] && exec /none/python "$@"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    err = refused(hosts.over_ssh("h1,h2,h3", "--python", str(python), *_ONE_EACH, folder=tmp_path))
    assert "fix: let the key in once: ssh-copy-id h2" in err
    assert "h3 cannot be reached" in err
    assert "fix: name the Python of the hosts with --python PATH" in err
