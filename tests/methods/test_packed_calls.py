"""Calls whose rows hold several sequences end to end: `whet.optimize` keeps apart what transformers keeps apart.

Every number is compared with the untouched model's. Tolerances are fp32 rounding: sums in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForTokenClassification, DataCollatorWithFlattening

import whet
from tiny import DECODERS, FAMILIES, tiny_config
from tiny_decoders import tiny_decoder, token_rows
from whet.errors import ConfigError, DataError
from whet.models.known import known

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using .DataCollatorWithFlattening:UserWarning"
)  # asks for flash kernels
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 5e-6}
LENGTHS = (5, 6, 14)
WINDOW = 4
WITH_PADDING = "with their padding run"
WAYS = [(family, way) for family in DECODERS for way in (("eager",) if family == "gemma2" else ("sdpa", "eager"))]
"""Families and attentions of transformers; Gemma 2 has no other than eager, for its caps."""
_QUICK = ("llama", "gpt2", "mistral", "gemma2")


def tokens(*shape: int) -> Tensor:
    return torch.randint(10, 190, shape, generator=torch.Generator().manual_seed(sum(shape)))


def places(*lengths: int, start: int = 0) -> Tensor:
    return torch.cat([torch.arange(start, start + length) for length in lengths])[None]


def own_block(lengths: Iterable[int]) -> Tensor:
    """Return the mask (1, 1, T, T) of causal sequences end to end: True where a token sees another."""
    return torch.block_diag(*(torch.ones(n, n).tril() for n in lengths)).bool()[None, None]


def offsets(*lengths: int) -> dict[str, Any]:
    """Return what DataCollatorWithFlattening makes for flash attention."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    longest = max(lengths)
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


IDS, TWO, PLACES = tokens(1, 25), tokens(2, 12), places(*LENGTHS)
NUMBERS = torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int()
LEFT = torch.tensor([[0] * 4 + [1] * 8, [1] * 12])
LOWEST = torch.finfo(torch.float32).min
FORMS: dict[str, dict[str, Any]] = {
    "positions alone": {"input_ids": IDS, "position_ids": PLACES},
    "positions, int32": {"input_ids": IDS.int(), "position_ids": PLACES.int()},
    "positions with a mask of ones": {"input_ids": IDS, "position_ids": PLACES, "attention_mask": torch.ones_like(IDS)},
    "offset positions": {
        "input_ids": IDS,
        "position_ids": torch.cat([places(5, start=7), places(6, start=3), places(14, start=1)], dim=1),
    },
    "one sequence, offset": {"input_ids": IDS, "position_ids": places(25, start=9)},
    "positions that jump ahead": {"input_ids": IDS, "position_ids": torch.cat([places(5), places(20, start=9)], 1)},
    "positions that fall": {"input_ids": IDS, "position_ids": torch.arange(25).flip(0)[None]},
    "one position for all": {"input_ids": IDS, "position_ids": torch.zeros_like(IDS)},
    "rows with other cuts": {"input_ids": TWO, "position_ids": torch.cat([places(4, 8), places(1, 1, 10)])},
    "rows with one set of positions": {"input_ids": TWO, "position_ids": places(4, 8)},
    "padded on the left, without a mask": {"input_ids": TWO, "position_ids": (LEFT.cumsum(1) - 1).clamp(min=0)},
    "padded on the left": {
        "input_ids": TWO, "position_ids": (LEFT.cumsum(1) - 1).masked_fill(LEFT == 0, 1), "attention_mask": LEFT,
    },
    "padded on the right": {
        "input_ids": TWO, "position_ids": torch.cat([places(5, 7), places(6, 6)]), "attention_mask": LEFT.flip(1),
    },
    "block mask": {
        "input_ids": IDS, "position_ids": PLACES, "attention_mask": torch.where(own_block(LENGTHS), 0.0, LOWEST),
    },
    "block mask, positions that go on": {
        "input_ids": IDS, "attention_mask": torch.where(own_block(LENGTHS), 0.0, LOWEST),
    },
    "cu_seq_lens": {"input_ids": IDS, "position_ids": PLACES, **offsets(*LENGTHS)},
    "seq_idx": {"input_ids": IDS, "position_ids": PLACES, "seq_idx": NUMBERS},
}  # fmt: skip
NAMED = ("cu_seq_lens", "seq_idx")


def decoder(family: str, way: str = "sdpa") -> Any:
    """Return a tiny decoder, with windows shorter than the sequences if the family has any."""
    windows = {"sliding_window": WINDOW} if hasattr(tiny_config(family), "sliding_window") else {}
    model = tiny_decoder(family, **windows)
    model.set_attn_implementation(way)
    return model


def same(model: Any, optimised: Any, call: dict[str, Any]) -> None:
    mask = call.get("attention_mask")
    at = mask.bool() if mask is not None and mask.dim() == 2 else ...
    torch.testing.assert_close(optimised(**call).logits[at], model(**call).logits[at], **CLOSE)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_packed_input_in_any_form_gives_what_transformers_gives(family: str, form: str) -> None:
    """With a cache, too: transformers then does not look at positions. It never looks at the columns of `NAMED`."""
    model = decoder(family)
    optimised = whet.optimize(deepcopy(model))
    caches: list[dict[str, Any]] = [{"use_cache": False}] + [{"use_cache": True}, {}] * (form not in NAMED)
    for training in (True, False):
        model.train(training)
        optimised.train(training)
        for cache in caches:
            same(model, optimised, FORMS[form] | cache)


@pytest.mark.parametrize(
    ("family", "way"),
    [one if one[0] in _QUICK else pytest.param(*one, marks=pytest.mark.reliability) for one in WAYS],
)
def test_flattened_batch_has_the_loss_and_gradients_of_transformers(
    family: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It runs as it is, not padded. The collator's labels are -100 where a sequence begins."""
    model = decoder(family, way).train()
    optimised = whet.optimize(deepcopy(model))
    rows = token_rows(5)
    for collate in (DataCollatorWithFlattening(), DataCollatorWithFlattening(return_flash_attn_kwargs=True)):
        batch = collate(rows)
        expected, found = (one(**batch, use_cache=False).loss for one in (model, optimised))
        torch.testing.assert_close(found, expected, **CLOSE)
        for one, other in zip(_gradients(found, optimised), _gradients(expected, model), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)  # sums over 100 tokens in another order
        same(model.eval(), optimised.eval(), {**batch, "use_cache": False})
        model.train()
        optimised.train()
    assert WITH_PADDING not in caplog.text


def _gradients(loss: Tensor, model: Any) -> list[Tensor]:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    found = torch.autograd.grad(loss, weights, allow_unused=True)  # of experts that no token chose
    return [torch.zeros_like(weight) if one is None else one for one, weight in zip(found, weights, strict=True)]


def test_decoder_alone_keeps_sequences_apart(caplog: pytest.LogCaptureFixture) -> None:
    """A batch without padding has no hidden states of padding that somebody might read."""
    model = decoder("llama").base_model
    optimised = whet.optimize(deepcopy(model))
    call = {"input_ids": IDS, "position_ids": PLACES, "use_cache": False}
    torch.testing.assert_close(optimised(**call).last_hidden_state, model(**call).last_hidden_state, **CLOSE)
    assert WITH_PADDING not in caplog.text


@pytest.mark.parametrize("form", NAMED)
@pytest.mark.parametrize("given_positions", [True, False], ids=["positions", "no positions"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "modernbert", "roberta"])
def test_named_sequences_are_kept_apart_in_every_attention(family: str, given_positions: bool, form: str) -> None:
    """As by flash attention in transformers: sdpa and eager attention do not read these columns."""
    model = decoder(family) if family in DECODERS else encoder(family)
    optimised, first = whet.optimize(deepcopy(model)), known()[family].first_position(model)
    positions = places(*LENGTHS, start=first) if given_positions else places(25, start=first)
    call = FORMS[form] | {"position_ids": positions}
    if not given_positions:
        del call["position_ids"]
    parts = zip(IDS.split(LENGTHS, 1), positions.split(LENGTHS, 1), strict=True)
    expected = torch.cat([model(ids, position_ids=one).logits for ids, one in parts], dim=1)
    for mask in ({}, {"attention_mask": torch.ones_like(IDS)}):
        torch.testing.assert_close(optimised(**call, **mask).logits, expected, **CLOSE)


@pytest.mark.parametrize("named", ["cu_seq_lens", "seq_idx"])
@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("more", ["output_hidden_states", "inputs_embeds", "use_cache", "set_attn_implementation"])
def test_named_sequences_that_would_see_each_other_are_refused(more: str, family: str, named: str) -> None:
    """Such calls run with transformers' own sdpa, which does not read the names."""
    model = decoder(family) if family in DECODERS else encoder(family)
    optimised = whet.optimize(model)
    call: dict[str, Any] = FORMS[named] | {"position_ids": places(25)}
    if more == "inputs_embeds":
        call[more] = optimised.get_input_embeddings()(call.pop("input_ids"))
    elif more == "set_attn_implementation":
        optimised.set_attn_implementation("eager")
    elif more == "use_cache" and family == "bert":
        pytest.skip("an encoder has no cache")
    else:
        call[more] = True
    with pytest.raises(ConfigError, match="would see each other"):
        optimised(**call)


def test_decoder_that_transformers_keeps_apart_itself_may_give_its_hidden_states() -> None:
    """By positions that restart where the names say, without mask and cache."""
    model = decoder("llama")
    call = FORMS["cu_seq_lens"] | {"position_ids": PLACES, "output_hidden_states": True, "use_cache": False}
    expected = model(**call).hidden_states[-1]
    torch.testing.assert_close(whet.optimize(model)(**call).hidden_states[-1], expected, **CLOSE)


def test_evaluation_with_the_default_cache_keeps_named_sequences_apart() -> None:
    """Nobody continues several sequences in a row; a call that asks for a cache itself is refused."""
    optimised = whet.optimize(decoder("llama"))
    assert optimised.config.use_cache
    call = FORMS["cu_seq_lens"] | {"position_ids": PLACES}
    torch.testing.assert_close(optimised(**call).logits, optimised(**call, use_cache=False).logits, **CLOSE)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "llama"])
def test_column_that_transformers_ignores_changes_nothing(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = decoder(family) if family in DECODERS else encoder(family)
    expected = model(input_ids=IDS, return_loss=True).logits
    torch.testing.assert_close(whet.optimize(model)(input_ids=IDS, return_loss=True).logits, expected, **CLOSE)


def encoder(family: str) -> Any:
    torch.manual_seed(2)
    return AutoModelForTokenClassification.from_config(tiny_config(family)).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_encoder_does_not_look_at_positions_and_neither_does_transformers(family: str) -> None:
    model = encoder(family)
    optimised, first = whet.optimize(deepcopy(model)), known()[family].first_position(model)
    same(model, optimised, {"input_ids": IDS, "position_ids": places(*LENGTHS, start=first)})


def test_first_token_of_a_row_is_pooled_not_those_of_its_sequences() -> None:
    """BERT's pooler reads the first token of each row of the batch, however many sequences are in it."""
    torch.manual_seed(0)
    model = AutoModel.from_config(tiny_config("bert")).eval()
    optimised = whet.optimize(deepcopy(model))
    found = optimised(input_ids=IDS, **offsets(*LENGTHS)).pooler_output
    torch.testing.assert_close(found, model(input_ids=IDS[:, :5]).pooler_output, **CLOSE)


@pytest.mark.parametrize(
    "wrong",
    [
        {"cu_seq_lens_q": torch.tensor([5, 11, 25])},
        {"cu_seq_lens_q": torch.tensor([0, 5, 11])},
        {"cu_seq_lens_k": torch.tensor([0, 11, 5, 25])},
        {"cu_seq_lens_q": torch.tensor([[0, 25]])},
        {"seq_idx": NUMBERS[:, 1:]},
    ],
    ids=["lengths", "too short", "falling", "two dims", "seq_idx"],
)
def test_columns_that_name_no_sequences_are_refused(wrong: dict[str, Tensor]) -> None:
    """They would be silently ignored, or read outside of the batch."""
    with pytest.raises(DataError, match=f"{next(iter(wrong))} does not say"):
        whet.optimize(decoder("llama"))(input_ids=IDS, use_cache=False, **wrong)


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        ({"use_cache": False, "attention_mask": torch.ones_like(IDS)}, "attention_mask: leave it out"),
        ({}, "use_cache: pass use_cache=False"),
    ],
    ids=["mask", "cache"],
)
def test_log_says_why_sequences_see_each_other(
    call: dict[str, Any], fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once for a model: transformers is silent, and its loss is that of other rows."""
    optimised = whet.optimize(decoder("llama")).train()
    optimised(input_ids=IDS, position_ids=places(25), **call)
    assert "see each other" not in caplog.text
    for _ in range(2):
        optimised(input_ids=IDS, position_ids=PLACES, **call)
    assert caplog.text.count("see each other") == 1
    assert fix in caplog.text


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_blocks_see_the_same_sequences(reentrant: bool) -> None:
    """Checkpointing switches transformers' cache off in training, and so sequences are kept apart by default."""
    model = decoder("llama").train()
    model.enable_input_require_grads()  # which a reentrant checkpoint needs
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    optimised, batch = whet.optimize(deepcopy(model)), DataCollatorWithFlattening()(token_rows(5))
    expected, found = (one(**batch).loss for one in (model, optimised))
    torch.testing.assert_close(found, expected, **CLOSE)
    expected.backward()
    found.backward()
    for one, other in zip(optimised.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-6)  # sums in another order


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft asks transformers so
def test_adapter_of_peft_trains_on_packed_input(caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    model = peft.get_peft_model(decoder("llama").train(), config)
    optimised, batch = whet.optimize(deepcopy(model)), DataCollatorWithFlattening()(token_rows(5))
    expected, found = (one(**batch, use_cache=False).loss for one in (model, optimised))
    torch.testing.assert_close(found, expected, **CLOSE)
    for one, other in zip(_gradients(found, optimised), _gradients(expected, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=2e-6)  # sums in another order
    assert WITH_PADDING not in caplog.text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in aot_autograd
def test_compiled_model_keeps_sequences_apart() -> None:
    model = decoder("llama")
    call = {"input_ids": IDS, "position_ids": PLACES, "use_cache": False}
    compiled = torch.compile(whet.optimize(deepcopy(model)), backend="eager")
    torch.testing.assert_close(compiled(**call).logits, model(**call).logits, **CLOSE)


def test_model_generates_as_before_after_packed_calls() -> None:
    model = decoder("llama").eval()
    optimised = whet.optimize(deepcopy(model))
    optimised(input_ids=IDS, position_ids=PLACES, use_cache=False)
    ids, mask = TWO.masked_fill(LEFT == 0, 0), LEFT
    write: Callable[[Any], Any] = partial(
        lambda given, **options: given.generate(ids, attention_mask=mask, **options),
        max_new_tokens=6, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(write(optimised), write(model))


def test_dropout_of_a_sequence_is_that_of_its_place_in_the_batch() -> None:
    """Sequences draw masks of their own: two equal ones differ, and the same seed gives the same again."""
    optimised = whet.optimize(tiny_decoder("llama", dropout=0.4)).train()
    twice, found = torch.cat([IDS, IDS], dim=1), []
    for _ in range(2):
        torch.manual_seed(1)
        out = optimised(input_ids=twice, position_ids=places(25, 25), use_cache=False).logits
        found.append(out.detach())
    assert torch.equal(*found)
    assert not torch.allclose(found[0][:, :25], found[0][:, 25:])
