"""A call of an optimised model gives what it gave before, in whatever form it is made; tolerances are fp32 rounding."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from optimized import inputs, logits
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModel, AutoModelForSequenceClassification

import whet
from tiny import FAMILIES, tiny_config, tiny_model
from tiny_decoders import DECODERS, tiny_decoder
from whet.models.known import known
from whet.optim.optimizers.native import WhetAdamW8bit

BATCH = inputs(9, 14, 3)
IDS, MASK = BATCH["input_ids"], BATCH["attention_mask"]
EMPTY_ROW = torch.cat([MASK, torch.zeros(1, 14, dtype=torch.long)])
HOLES = MASK * (torch.arange(14) % 5 != 3)
POSITIONS = torch.randint(2, 60, (3, 14), generator=torch.Generator().manual_seed(1))
CAUSAL = torch.ones(14, 14, dtype=torch.bool).tril()[None, None].expand(3, 1, 14, 14)
Call = Callable[[Any], Any]

CALLS: dict[str, Call] = {
    "by position": lambda model: model(IDS, MASK),
    "without a mask": lambda model: model(IDS),
    "int32": lambda model: model(input_ids=IDS.int(), attention_mask=MASK.int()),
    "float mask": lambda model: model(IDS, attention_mask=MASK.float()),
    "bool mask": lambda model: model(IDS, attention_mask=MASK.bool()),
    "mask of one row": lambda model: model(IDS, attention_mask=MASK[1:2]),
    "mask of weights": lambda model: model(IDS, attention_mask=CAUSAL),
    "mask with holes": lambda model: model(IDS, attention_mask=HOLES),
    "a row without a token": lambda model: model(torch.cat([IDS, IDS[:1]]), attention_mask=EMPTY_ROW),
    "token types of one dim": lambda model: model(IDS, attention_mask=MASK, token_type_ids=MASK[0]),
    "one token": lambda model: model(IDS[:1, :1], attention_mask=MASK[:1, :1]),
    "embeddings": lambda model: model(inputs_embeds=model.get_input_embeddings()(IDS), attention_mask=MASK),
    "positions": lambda model: model(IDS, attention_mask=MASK, position_ids=POSITIONS),
    "positions of one row, int32": lambda model: model(IDS, attention_mask=MASK, position_ids=POSITIONS[:1].int()),
    "hidden states": lambda model: model(IDS, attention_mask=MASK, output_hidden_states=True),
    "some hidden states": lambda model: model(IDS, attention_mask=MASK, output_hidden_states=[0, -1]),
    "a tuple": lambda model: model(IDS, attention_mask=MASK, return_dict=False),
    "its encoder": lambda model: model.base_model(IDS, MASK),
    "its encoder, a tuple": lambda model: model.base_model(IDS, attention_mask=MASK, return_dict=False),
    "other weights": lambda model: functional_call(
        model, {name: weight * 1.1 for name, weight in model.named_parameters()}, (IDS, MASK)
    ),
    "inference mode": torch.inference_mode()(lambda model: model(IDS, MASK)),
    "no gradients": torch.no_grad()(lambda model: model(IDS, MASK)),
}


def tensors(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    parts = out.values() if isinstance(out, dict) else out
    return [tensor for part in parts if part is not None for tensor in tensors(part)]


def form(out: Any) -> Any:
    """What a caller can see of an output besides its numbers."""
    names = list(out) if isinstance(out, dict) else type(out).__name__
    return names, [(tensor.shape, tensor.dtype) for tensor in tensors(out)]


def same(model: Any, call: Call, *, mask: Tensor = MASK) -> None:
    """Compare the call of the model as it is and optimised, at real tokens."""
    expected = call(model)
    found = call(whet.optimize(deepcopy(model)))
    assert form(found) == form(expected)
    for one, other in zip(tensors(found), tensors(expected), strict=True):
        at = mask.bool() if one.shape[:2] == mask.shape else ...
        torch.testing.assert_close(one[at], other[at], rtol=0, atol=5e-6)


def new(family: str, head: Any = AutoModelForSequenceClassification, **changes: Any) -> Any:
    torch.manual_seed(3)
    attention = changes.pop("attn_implementation", None)
    return head.from_config(tiny_config(family, **changes), attn_implementation=attention).eval()


def mask_of(name: str) -> Tensor:
    return {"mask with holes": HOLES, "a row without a token": EMPTY_ROW}.get(name, MASK)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("head", [AutoModel, AutoModelForSequenceClassification], ids=["encoder", "classes"])
def test_a_call_in_another_form_gives_what_it_gave(head: Any, name: str) -> None:
    same(new("bert", head), CALLS[name], mask=mask_of(name))


@pytest.mark.parametrize("family", ["distilbert", "modernbert", *DECODERS])
def test_token_types_of_a_tokenizer_are_ignored_by_a_model_without_any(family: str) -> None:
    """BERT's tokenizer returns them for every model; transformers hands them on, and no attention reads them."""
    model = tiny_decoder(family).eval() if family in DECODERS else new(family)
    model.config.use_cache = False
    same(model, lambda called: called(IDS, attention_mask=MASK, token_type_ids=torch.zeros_like(IDS)))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_between_tokens_counts_as_distance(family: str) -> None:
    """Relative positions, local windows and rotary angles are those of the places, not of the tokens end to end."""
    same(new(family, AutoModel), CALLS["mask with holes"], mask=HOLES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions", "return_dict"])
@pytest.mark.parametrize("head", [AutoModel, AutoModelForSequenceClassification], ids=["encoder", "classes"])
def test_outputs_that_the_configuration_asks_for_are_there(head: Any, flag: str, family: str) -> None:
    if (family, head, flag) == ("modernbert", AutoModelForSequenceClassification, "return_dict"):
        pytest.skip("transformers' own head of ModernBERT fails with return_dict=False in the configuration")
    model = new(family, head, attn_implementation="eager", **{flag: flag != "return_dict"})
    same(model, lambda called: called(IDS, attention_mask=MASK))
    other = {flag: flag == "return_dict"}
    same(model, lambda called: called(IDS, attention_mask=MASK, **other))


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_that_a_call_asks_for_are_there(family: str) -> None:
    model = new(family, AutoModel, attn_implementation="eager")
    same(model, lambda called: called(IDS, attention_mask=MASK, output_attentions=True))
    assert len(model(IDS, output_attentions=True).attentions) == 2


def test_an_attention_implementation_that_is_set_later_is_honoured() -> None:
    model, later = new("bert", AutoModel, attn_implementation="eager"), whet.optimize(new("bert", AutoModel))
    later.set_attn_implementation("eager")
    expected, found = (one(IDS, attention_mask=MASK, output_attentions=True) for one in (model, later))
    for weights, others in zip(found.attentions, expected.attentions, strict=True):
        torch.testing.assert_close(weights, others, rtol=0, atol=5e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("said_by", ["call", "configuration"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "modernbert"])
def test_attention_in_one_or_both_directions_is_what_is_asked_for(family: str, said_by: str, attention: str) -> None:
    """`is_causal` turns a decoder into an encoder, and an encoder into a decoder, as far as it does in transformers."""
    causal = family in DECODERS
    model = tiny_decoder(family, use_cache=False).eval() if causal else new(family, AutoModel)
    model.set_attn_implementation(attention)
    optimised, mask = whet.optimize(deepcopy(model)), torch.ones_like(IDS)
    for asked in (causal, not causal):
        for one in (model, optimised) if said_by == "configuration" else ():
            one.config.is_causal = asked
        options = {"is_causal": asked} if said_by == "call" else {}
        for call in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": mask}):
            expected, found = (tensors(one(**call, **options))[0] for one in (model, optimised))
            torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("by_position", [False, True], ids=["masked", "by position"])
@pytest.mark.parametrize("family", ["bert", "deberta-v2", "llama", "gpt2"])
def test_the_default_device_of_torch_is_not_that_of_a_call(family: str, by_position: bool) -> None:
    """A script may have set a GPU as the default, and train a model on the CPU."""
    model: Any = whet.optimize((tiny_decoder if family in DECODERS else tiny_model)(family, dropout=0.1)).train()
    batch: dict[str, Any] = {"position_ids": torch.arange(7).repeat(3, 2)} if by_position else {"attention_mask": MASK}
    if family in DECODERS:
        batch |= {"labels": IDS.masked_fill(MASK == 0, -100), "use_cache": False}
    else:
        batch |= {"start_positions": torch.tensor([1, 2, 0]), "end_positions": torch.tensor([3, 2, 1])}
    found = []
    for device in ("cpu", "meta"):
        called, losses = deepcopy(model), []
        optimizer = WhetAdamW8bit(called.parameters(), lr=1e-3)
        torch.manual_seed(7)
        with torch.device(device):
            for _ in range(3):
                loss = called(IDS, **batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        found.append(losses)
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "modernbert"])
def test_a_direction_that_its_modules_have_is_theirs(
    family: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers' attention asks each module whether it is causal, where the batch has no padding."""
    causal = family in DECODERS
    model = tiny_decoder(family, use_cache=False).eval() if causal else new(family, AutoModel)
    model.set_attn_implementation(attention)
    optimised = whet.optimize(deepcopy(model))
    kinds = known()[family].attention
    for module in (*model.modules(), *optimised.modules()):
        if type(module).__name__ in kinds:
            module.is_causal = not causal
    for call in ({"input_ids": IDS}, {"input_ids": IDS, "attention_mask": MASK}):
        expected, found = (tensors(one(**call))[0] for one in (model, optimised))
        at = call.get("attention_mask", torch.ones_like(IDS)).bool()
        torch.testing.assert_close(found[at], expected[at], rtol=0, atol=5e-6)
    (said,) = [text for text in caplog.messages if "with their padding" in text]
    assert said.endswith(f"is {'bidirectional' if causal else 'causal'} (its is_causal is {not causal})")
    if causal:
        with pytest.raises(whet.ConfigError, match="is bidirectional"):
            whet.optimize(model)


WRONG = {
    "no row": {"input_ids": IDS[:0], "attention_mask": MASK[:0]},
    "a short mask": {"input_ids": IDS, "attention_mask": MASK[:, :9]},
    "one dim": {"input_ids": IDS[0]},
    "numbers with a fraction": {"input_ids": IDS.float()},
    "no such token": {"input_ids": IDS + 1000},
    "no such position": {"input_ids": IDS, "position_ids": POSITIONS + 1000},
    "nothing": {"attention_mask": MASK},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_call_fails_as_before(wrong: dict[str, Tensor]) -> None:
    """With the same kind of error, but for numbers out of range: whet says IndexError where torch may say another."""
    model, errors = new("bert", AutoModel), (RuntimeError, ValueError, IndexError, TypeError)
    with pytest.raises(errors):
        model(**wrong)
    with pytest.raises(errors):
        whet.optimize(model)(**wrong)


def test_why_a_call_runs_with_its_padding_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = whet.optimize(new("bert"))
    for _ in range(2):
        model(IDS, attention_mask=MASK, output_hidden_states=True)
        model(IDS, attention_mask=MASK)
    assert [text for text in caplog.messages if "with their padding" in text] == [
        "whet.optimize: with their padding run calls that ask for hidden states or attention weights of all layers"
    ]


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of every size that it fixes
def test_a_trace_holds_no_result_of_the_batch_that_it_was_made_with() -> None:
    """torch.jit.trace takes what it cannot see for a constant; native operators would be such."""
    model = whet.optimize(new("bert", return_dict=False))
    traced = torch.jit.trace(model, (IDS, MASK), strict=False, check_trace=False)
    ids, mask = IDS.flip(0), MASK.flip(0)
    torch.testing.assert_close(traced(ids, mask)[0], model(ids, mask)[0], rtol=0, atol=5e-6)


def test_transforms_of_torch_see_through_the_model() -> None:
    model = new("bert")
    weights = dict(model.named_parameters())

    def gradients(called: Any) -> dict[str, Tensor]:
        return torch.func.grad(lambda own: functional_call(called, own, (IDS, MASK)).logits.square().sum())(weights)

    expected, found = gradients(model), gradients(whet.optimize(deepcopy(model)))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_with_padding_compute_in_the_dtype_that_was_asked_for(dtype: torch.dtype) -> None:
    """In bf16 within the rounding of its 8 bits, and not closer; in fp32 even where the loop asks for bf16."""
    model, batch = new("bert"), {"input_ids": IDS.flip(1), "attention_mask": MASK.flip(1)}
    expected = model(**batch).logits
    whet.optimize(model, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        hidden = model.bert(**batch)
    assert hidden.last_hidden_state.dtype == hidden.pooler_output.dtype == torch.float32
    distance = (model.classifier(hidden.pooler_output) - expected).abs().max() / expected.abs().max()
    assert distance < 1e-5 if dtype is torch.float32 else 1e-4 < distance < 0.02


def test_second_derivatives_are_refused_and_not_left_out() -> None:
    """torch would return them without the terms of whet's operators: wrong numbers, and no word."""
    model = whet.optimize(new("bert", AutoModel, attn_implementation="eager"))
    changed = whet.changes(model)
    assert changed is not None
    if not changed.fused:
        pytest.skip("no native operators here")
    weights = [weight for name, weight in model.named_parameters() if "pooler" not in name]

    def curvature() -> tuple[Tensor, ...]:
        loss = model(IDS, attention_mask=MASK).last_hidden_state[MASK.bool()].square().mean()
        first = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(sum(part.square().sum() for part in first), weights)

    with pytest.raises(whet.ConfigError, match=r"create_graph=True") as caught:
        curvature()
    assert "whet.restore(model)" in caught.value.problems[0].fix
    whet.restore(model)
    assert len(curvature()) == len(weights)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_configuration_reads_as_it_was_loaded(family: str, attention: str, tmp_path: Path) -> None:
    plain = new(family, AutoModel)
    if not plain._can_set_attn_implementation():
        attention = plain.config._attn_implementation
    model = new(family, AutoModel, attn_implementation=attention)
    before = (model.config._attn_implementation, model.config.to_dict(), signature(model.forward))
    whet.optimize(model)
    model(IDS, attention_mask=MASK)
    for one in (model, deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (one.config._attn_implementation, one.config.to_dict(), signature(one.forward)) == before
        assert f"{one.config._attn_implementation}" == attention
    model.save_pretrained(tmp_path)
    assert "whet" not in (tmp_path / "config.json").read_text()
    whet.restore(model)
    assert type(model.config._attn_implementation) is str
    assert signature(model.forward) == before[-1]


def test_another_model_of_the_same_configuration_is_as_transformers_has_it() -> None:
    """Both keep what they are: the second is made after the first was optimised."""
    model = whet.optimize(new("bert", AutoModel, attn_implementation="eager").eval())
    other, plain = new_of(model.config), new_of(deepcopy(model.config))
    wanted = plain(IDS, attention_mask=MASK, output_attentions=True)
    found = other(IDS, attention_mask=MASK, output_attentions=True)
    assert torch.equal(found.attentions[0], wanted.attentions[0])
    before = n_computed_of(model)
    assert before < IDS.numel()


def new_of(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(config).eval()


def n_computed_of(model: Any) -> int:
    """Return how many tokens the blocks of the model compute in a call with padding."""
    seen: list[int] = []
    handle = model.encoder.layer[0].register_forward_hook(lambda _, given, __: seen.append(given[0][..., 0].numel()))
    model(IDS, attention_mask=MASK)
    handle.remove()
    return seen[0]


def test_attention_weights_can_be_asked_for_later_as_in_transformers() -> None:
    model, plain = (new("bert", AutoModel, attn_implementation="eager") for _ in range(2))
    whet.optimize(model)
    for one in (model, plain):
        one.config.output_attentions = True
    found, wanted = (one(IDS, attention_mask=MASK) for one in (model, plain))
    for weights, others in zip(found.attentions, wanted.attentions, strict=True):
        assert torch.equal(weights, others)
    by_sdpa = whet.optimize(new("bert", AutoModel, attn_implementation="sdpa"))
    with pytest.raises(ValueError, match="set to sdpa"):  # transformers' own words
        by_sdpa.config.output_attentions = True


def test_threads_outside_of_a_pass_read_what_was_loaded() -> None:
    model, read = whet.optimize(new("bert", AutoModel, attn_implementation="eager")), []
    with ThreadPoolExecutor(1) as pool:

        def look(*_: Any) -> None:
            read.append(
                (model.config._attn_implementation, pool.submit(lambda: model.config._attn_implementation).result())
            )

        model.encoder.layer[0].register_forward_hook(look)
        model(IDS, attention_mask=MASK)
    assert read == [("whet", "eager")]


def test_an_untouched_model_compiles_as_one_graph_next_to_an_optimised_one() -> None:
    whet.optimize(new("bert", AutoModel))
    plain = new("bert", AutoModel)
    compiled: Any = torch.compile(plain, backend="eager", fullgraph=True)
    wanted, found = (one(IDS, attention_mask=MASK).last_hidden_state for one in (plain, compiled))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("family", ["bert", "modernbert", "deberta-v2"])
def test_a_short_text_evaluated_alone_is_bitwise_what_it_was(family: str) -> None:
    """Of few tokens torch's own operators are faster; with gradients, or in training, whet's run and keep its masks."""
    plain = tiny_model(family, **({"pad_token_id": 0} if known()[family].skips_padding else {})).eval()
    found = whet.optimize(deepcopy(plain))
    for lengths, alike in (((5,), True), ((4, 4), True), ((63,), True), ((64,), False), ((9, 5), False)):
        batch = inputs(*lengths)
        with torch.no_grad():
            wanted, got = logits(plain, batch), logits(found, batch)
        assert torch.equal(wanted, got) or not alike
        real = batch["attention_mask"].bool().expand_as(wanted)
        torch.testing.assert_close(got[real], wanted[real], rtol=1e-4, atol=1e-5)  # sums of float32 in another order
    found.train()
    with torch.no_grad():
        state = torch.get_rng_state()
        one = logits(found, inputs(5))
    torch.set_rng_state(state)
    assert torch.equal(logits(found, inputs(5)), one)


def test_class_that_gets_another_forward_later_sees_the_rows_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = whet.optimize(new("bert", AutoModel))
    own, seen = type(model).forward, []

    def patched(self: Any, input_ids: Tensor, attention_mask: Tensor, **named: Any) -> Any:
        seen.append(input_ids.shape)
        return own(self, input_ids, attention_mask, **named)

    wanted = model(IDS, attention_mask=MASK).last_hidden_state
    monkeypatch.setattr(type(model), "forward", patched)
    found = model(IDS, attention_mask=MASK).last_hidden_state
    assert seen == [IDS.shape]
    torch.testing.assert_close(found[MASK.bool()], wanted[MASK.bool()], rtol=0, atol=1e-5)
