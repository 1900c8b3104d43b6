"""What ranks send each other is read as data: a program in a rank's place cannot run code in the others."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from many import Jobs

pytestmark = [pytest.mark.slow, pytest.mark.reliability]


def _message(text: str, arrays: bytes = b"", length: int | None = None) -> str:
    raw = text.encode()
    return (struct.pack("<Q", len(raw) if length is None else length) + raw + arrays).hex()


_FORGED = {
    "no message": (b"GET / HTTP/1.0\r\n\r\n".hex(), "longer than the message"),
    "short": ("00", "unpack requires"),
    "not JSON": (_message("{"), "not JSON"),
    "two documents": (_message("{} {}"), "more text follows"),
    "another form": (_message("[1]"), "JSON of another form"),
    "another kind": (_message('{"value": {"object": "os.system"}}'), "is no kind of value"),
    "bare list": (_message('{"value": [1]}'), "a list without its kind"),
    "another value": (_message('{"value": 3}'), "another value than is sent at this point of a run"),
    "long text": (_message('{"value": "a"}', length=1 << 62), "longer than the message"),
    "array cut off": (_message(json.dumps({"value": {"tensor": ["float32", [1 << 60]]}})), "cut off"),
    "negative shape": (_message(json.dumps({"value": {"array": ["<f4", [-1]]}})), "no shape"),
    "objects": (_message(json.dumps({"value": {"array": ["|O", [1]]}}), b"8 bytes."), "no plain numbers"),
    "odd dtype": (_message(json.dumps({"value": {"array": ["i4,O", [1]]}}), b"8 bytes."), "no plain numbers"),
    "bytes at the end": (_message('{"value": "a"}', b"more"), "bytes follow"),
    "deep": (_message('{"value": ' + '{"list": [' * 5000 + "]}" * 5000 + "}"), ""),
}


_SIZES = [1 << 50, -1]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    jobs = Jobs(tmp_path_factory.mktemp("messages"))
    jobs.add("exchanges", "exchanges", 2)
    jobs.add("copies", "copies", 2)
    jobs.add("rogue", "meets_rogue", 2, rogue=1, messages=["pickle", *_SIZES, *(one for one, _ in _FORGED.values())])
    jobs.add("rogue rank 0", "meets_rogue", 2, rogue=0, messages=["to all"])
    args: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    jobs.add("trains", "trains_with_rogue", 2, args=args, within_s=60)
    return jobs.run()


@pytest.mark.parametrize(("name", "rogue"), [("rogue", 1), ("rogue rank 0", 0)])
def test_pickle_from_a_rogue_rank_ends_the_others_and_is_not_read(found: Jobs, name: str, rogue: int) -> None:
    other = found[name, 2][1 - rogue]
    assert not other["created"]
    error, text = other["said"][0]
    assert error == "MessageError", text
    assert f"rank {rogue} sent a message that no rank of this run sends" in text
    assert "got: a pickle, which can run code and is not read" in text


def test_training_ends_at_the_first_pickle_of_a_rank(found: Jobs) -> None:
    first = found["trains", 2][0]
    assert not first["created"]
    assert first["error"] == "MessageError"
    assert "rank 1 sent a message that no rank of this run sends" in first["text"]


def test_message_of_an_impossible_size_is_refused_before_memory_is_taken(found: Jobs) -> None:
    for size, (error, text) in zip(_SIZES, found["rogue", 2][0]["said"][1:], strict=False):
        assert error == "MessageError"
        assert f"a message of {size} bytes" in text


@pytest.mark.parametrize("name", [*_FORGED])
def test_forged_message_is_refused_with_its_fault(found: Jobs, name: str) -> None:
    error, text = found["rogue", 2][0]["said"][1 + len(_SIZES) + [*_FORGED].index(name)]
    assert error == "MessageError", text
    assert "rank 1 sent" in text
    assert _FORGED[name][1] in text


def test_values_of_every_kind_arrive_as_they_were_sent(found: Jobs) -> None:
    for rank in found["exchanges", 2]:
        assert rank["same"] == [True, True]
        assert rank["first"]


def test_weights_of_every_layout_and_type_become_those_of_rank_0(found: Jobs) -> None:
    """Parts of other tensors and expanded ones, as buffers and parameters may be; what lies around them stays."""
    wanted = ["columns", "turned", "number", "expanded", "empty", "torch.int16", "torch.complex64", "torch.bool",
              "torch.bfloat16"]  # fmt: skip
    assert found["copies", 2] == [{**rank, "same": wanted, "beyond": True} for rank in found["copies", 2]]


def test_value_that_cannot_travel_ends_all_ranks_with_its_class(found: Jobs) -> None:
    for rank in found["exchanges", 2]:
        assert rank["refused"].startswith("ConfigError: a value of rank 1 cannot travel")
        assert "got: builtins.object" in rank["refused"]
