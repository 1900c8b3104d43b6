"""How long a rank waits for rank 0, by what keeps it from there; no process waits here."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from many import free_port

from whet.config.ranks import Place
from whet.dist import reaching
from whet.dist.meeting import Address
from whet.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "in_kubernetes", "expected_s"),
    [
        ("refused", False, 300),
        ("closed", False, 300),
        ("unresolved", False, 30),
        ("no answer", False, 30),
        ("another program", False, 30),
        ("unresolved", True, 300),
        ("no answer", True, 300),
        ("refused here", True, 30),
    ],
)
def test_waits_long_only_for_what_can_still_appear(kind: reaching.Kind, in_kubernetes: bool, expected_s: float) -> None:
    assert reaching.patience_s(kind, 300, in_kubernetes=in_kubernetes) == expected_s
    assert reaching.patience_s(kind, 10, in_kubernetes=in_kubernetes) == 10


class _Clock:
    """Stands for `time`: sleeping takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("environment", "ends_at_s"), [({}, 30), ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 300)])
def test_name_that_never_resolves_ends_the_wait(
    environment: Mapping[str, str], ends_at_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock()
    monkeypatch.setattr(reaching, "time", clock)
    monkeypatch.setattr(reaching, "resolve", lambda name: ([], "Name or service not known"))
    with pytest.raises(ConfigError, match="cannot be resolved here: Name or service not known"):
        reaching.reach(Place(1, 2), Address("pod-0.job", 29500, from_launcher=True), 300, environment)
    assert ends_at_s <= clock.now < ends_at_s + 3


def test_name_of_a_pod_may_appear_minutes_later(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 itself resolves its name, once the name service of the cluster knows it."""
    clock = _Clock()
    monkeypatch.setattr(reaching, "time", clock)
    monkeypatch.setattr(reaching, "resolve", lambda name: (["127.0.0.1"], "") if clock.now > 120 else ([], "unknown"))
    address = Address("pod-0.job", free_port(), from_launcher=True)
    reached = reaching.reach(Place(0, 2), address, 300, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert reached == "127.0.0.1"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4, lines  # after 5 seconds, and every 30 from then on
    assert "rank 0 of 2 waits for pod-0.job" in lines[0]
