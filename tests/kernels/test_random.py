"""The random bits of dropout masks: published test vectors, which word serves what, what they depend on."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from whet.kernels import random
from whet.kernels.random import attention_bits, hidden_bits, stream_key

CPU = torch.device("cpu")
Words = tuple[int, ...]

KNOWN_ANSWERS: list[tuple[int, Words, Words, Words]] = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        7,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        10,
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""philox4x32 in Random123's file kat_vectors: rounds, counter, key, output."""


@pytest.mark.parametrize(("rounds", "counter", "key", "wanted"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(
    monkeypatch: pytest.MonkeyPatch, rounds: int, counter: Words, key: tuple[int, int], wanted: Words
) -> None:
    assert random.ROUNDS == 7
    monkeypatch.setattr(random, "ROUNDS", rounds)
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    found = random._philox(c0, c1, c2, c3, key)
    assert tuple(word.item() for word in found) == wanted
    assert plain_philox(counter, key, rounds) == wanted


def plain_philox(counter: Words, key: Words, rounds: int = 7) -> Words:
    """Return the words in Python's own integers, which have no width: the paper's figure 2, step by step."""
    left, right = list(counter), list(key)
    for _ in range(rounds):
        first, second = 0xD2511F53 * left[0], 0xCD9E8D57 * left[2]
        mixed = second // 2**32 ^ left[1] ^ right[0], first // 2**32 ^ left[3] ^ right[1]
        left = [mixed[0], second % 2**32, mixed[1], first % 2**32]
        right = [(right[0] + 0x9E3779B9) % 2**32, (right[1] + 0xBB67AE85) % 2**32]
    return tuple(left)


@pytest.mark.parametrize("width", [1, 63, 64, 130])
def test_which_word_serves_which_channel(width: int) -> None:
    """Word w of lane l in block b serves channel 64 b + 16 w + l; the counter is (16 b + l, position, slot, 0)."""
    key, slots, positions = (0xDEADBEEF, 0x12345678), torch.tensor([7, 2**31 - 1]), torch.tensor([300, 0])
    found = hidden_bits(key, slots.int(), positions.int(), width)
    assert found.shape == (2, width)
    for token, channel in product(range(2), range(width)):
        block, word, lane = channel // 64, channel % 64 // 16, channel % 16
        counter = (16 * block + lane, int(positions[token]), int(slots[token]), 0)
        assert int(found[token, channel]) == plain_philox(counter, key)[word], (token, channel)


@pytest.mark.parametrize("n_keys", [1, 17, 70])
def test_which_word_serves_which_attention_weight(n_keys: int) -> None:
    """As for channels, with keys in their place and the head, counted from 1, as the last word of the counter."""
    key, slot = (3, 0xFFFFFFFF), 9
    found = attention_bits(key, slot, 2, 3, n_keys, device=CPU)
    assert found.shape == (2, 3, n_keys)
    for head, query, column in product(range(2), range(3), range(n_keys)):
        block, word, lane = column // 64, column % 64 // 16, column % 16
        wanted = plain_philox((16 * block + lane, query, slot, head + 1), key)[word]
        assert int(found[head, query, column]) == wanted, (head, query, column)


def test_streams_have_different_keys() -> None:
    """No two of 120,000 places (seed, step, site) share a key, neighbours and swapped numbers included."""
    places = list(product(range(12), range(100), range(100)))
    keys = {stream_key(*place) for place in places}
    assert len(keys) == len(places)
    assert all(0 <= word < 2**32 for key in keys for word in key)
    assert stream_key(2**64 - 1, 0, 0) == stream_key(-1, 0, 0)  # seeds are 64 bits


def test_bits_of_a_token_do_not_depend_on_other_tokens() -> None:
    key = stream_key(1, 2, 3)
    slots, positions = torch.arange(6).repeat_interleave(9), torch.arange(9).repeat(6)
    together = hidden_bits(key, slots, positions, 100)
    order = torch.randperm(54, generator=torch.Generator().manual_seed(0))[:20]
    assert torch.equal(hidden_bits(key, slots[order], positions[order], 100), together[order])
    assert torch.equal(hidden_bits(key, slots[30:31], positions[30:31], 100), together[30:31])
    assert torch.equal(hidden_bits(key, slots, positions, 70), together[:, :70])


def test_bits_of_a_weight_do_not_depend_on_the_rows_length() -> None:
    key = stream_key(1, 2, 3)
    large = attention_bits(key, 5, 4, 90, 90, device=CPU)
    assert torch.equal(attention_bits(key, 5, 2, 33, 33, device=CPU), large[:2, :33, :33])


def test_torch_is_seeded_as_its_own_call_does() -> None:
    key = stream_key(5, 6, 7)
    torch.manual_seed(key[0] | (key[1] >> 1) << 32)
    wanted = torch.get_rng_state()
    torch.manual_seed(1)
    random.seed_torch(key)
    assert torch.equal(torch.get_rng_state(), wanted)
