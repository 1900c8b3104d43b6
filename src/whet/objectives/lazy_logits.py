"""Logits of a large vocabulary that are computed when somebody reads them; their cross entropy is, a chunk at a time.

A model of transformers computes the logits of all tokens (B, T, V), and its loss copies them twice. Most loops read
the loss alone. `LazyLogits` stands in their place: it knows its shape, and it notes what the model and its loss do with
it on the way (a cap, a cast, a shift, a change of shape). `cross_entropy` of it computes the logits of tokens with a
label, some hundred at a time. Whatever else is done is done with the logits themselves, which then are computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.optim.optimizer import Optimizer

from whet.errors import ConfigError
from whet.kernels.cross_entropy import chunk_rows, linear_cross_entropy
from whet.kernels.operator import is_followed, native_for
from whet.models import standard
from whet.models.forwards import bind, instance_forward
from whet.models.lazy_tensor import WATCHED, Alive, LazyTensor, Origin, Step, version_of
from whet.objectives.next_tokens import chunked_loss_sum

_TO_FLOAT = frozenset({Tensor.float})
_SAME = frozenset({Tensor.contiguous})
_SHAPED = frozenset({Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten})
_CUT = frozenset({Tensor.__getitem__})
_DIVIDED = frozenset({Tensor.div, Tensor.__truediv__, torch.div})
_BOUNDED = frozenset({Tensor.tanh, torch.tanh})
_TIMES = frozenset({Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul})


def make_lazy(model: nn.Module) -> None:
    """Let the layer of the model that turns hidden states into logits return lazy ones, if it is a linear layer."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, nn.Module) and standard.why_called(head, nn.Linear) is None:
        head.forward = bind(_head, head)


def restore(model: nn.Module) -> None:
    """Undo `make_lazy`, exactly."""
    for module in model.modules():  # an adapter may have been put around the head since
        if instance_forward(module) is _head:
            del module.forward


def keep_readable(optimizer: Optimizer) -> None:
    """Let logits that somebody still holds be read, without gradients, after the optimizer's step that comes next.

    A loop may look at the logits of its last batch at any time. They keep a copy of the weights that made them, which
    takes far less than they would.
    """
    sources = _SOURCES.all()
    if sources:
        changing = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for source in sources:
            if any(id(one) in changing for one in source.weights):
                source.keep_readable()


_KEEPS = False


def keep_readable_after_backward() -> None:
    """Do the same for all logits whose loss has computed its gradient, as long as this process runs.

    A loop may then change weights by hand, as SAM and adversarial training do, which nobody sees coming.
    """
    global _KEEPS
    _KEEPS = True


def _head(self: Any, states: Tensor) -> Tensor:
    """Stand in for the forward of a linear layer (..., D) -> (..., V): lazy if the result is larger than a chunk."""
    size = states.numel() // states.shape[-1] if states.dim() == 3 and states.numel() else 0
    same = states.dtype == self.weight.dtype or torch.is_autocast_enabled(states.device.type)  # which casts both
    lazy = size > chunk_rows(self.weight) and type(states) is Tensor and same
    if not lazy or is_followed() or standard.why_odd(self) is not None:
        return nn.functional.linear(states, self.weight, self.bias)
    return LazyLogits.of(states, self.weight, self.bias)


class Source:
    """The hidden states (..., D) that logits come from, the head's weights, and how its product was to be computed."""

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.states, self.weight, self.bias = states, weight, bias
        self.loss_is_computed = False
        self._has_grad, device = torch.is_grad_enabled(), states.device.type
        enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        self.autocast = partial(torch.autocast, device, dtype, enabled)
        """The context that the product was to be computed in."""
        self.dtype = dtype if enabled else states.dtype
        """What the logits are in."""
        self._of_states, self._of_weights = Origin((states,)), Origin(self.weights)
        self._sample = _sample_of(weight)
        self._kept: tuple[Tensor, Tensor | None] | None = None
        """A copy of the weights, for when they have changed."""
        self._logits: Tensor | None = None
        self._written = 0
        _SOURCES.add(self)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """The head's weight (V, D), and its bias (V,) if it has one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def keep_readable(self) -> None:
        """Copy the weights, unless the logits have been computed or cannot be any more."""
        if self._kept is None and self._logits is None and not self.is_stale and self.has_same_weights():
            weight, *bias = (one.detach().clone() for one in self.weights)
            self._kept = weight, bias[0] if bias else None

    def logits(self) -> Tensor:
        """Return the logits (..., V) of all tokens, computed at the first call as they would have been at once.

        Of weights that have changed since, by the copy that was kept of them, and without a gradient.
        """
        if self._logits is None:
            product = nn.functional.linear
            if not self.is_stale and self.has_same_weights():
                with torch.set_grad_enabled(self._has_grad), self.autocast():
                    self._logits = product(self.states, self.weight, self.bias)
            elif self._kept is not None and not self._of_states.is_stale:
                with torch.no_grad(), self.autocast():
                    self._logits = product(self.states.detach(), *self._kept)
            else:
                raise _too_late()
            self._written = version_of(self._logits)
        return self._logits

    @property
    def is_stale(self) -> bool:
        """Whether the weights or the hidden states have changed: what is computed now is of another call."""
        return self._of_weights.is_stale or self._of_states.is_stale

    def has_same_weights(self) -> bool:
        """Return whether a number of each row of the weight is what it was: writes to `weight.data` count nowhere."""
        return torch.equal(self._sample, _sample_of(self.weight))

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written to the logits, so that they are those of the hidden states no more."""
        return self._logits is not None and version_of(self._logits) != self._written

    def loss_sum(self, states: Tensor, labels: Tensor, cap: float | None) -> Tensor:
        """Return the summed cross entropy () fp32 of the labels (M,) for the states (M, D)."""
        total = self._loss_sum(states, labels, cap)
        self.loss_is_computed = True
        if _KEEPS and total.requires_grad:
            total.register_hook(_Keeping(ref(self)))
        return total

    def _loss_sum(self, states: Tensor, labels: Tensor, cap: float | None) -> Tensor:
        weight, bias = self.weight, self.bias
        if not torch.is_grad_enabled():
            weight, bias = weight.detach(), None if bias is None else bias.detach()
        with self.autocast():
            if native_for(weight) is not None and native_for(states) is not None:
                return linear_cross_entropy(states, weight, labels, cap, bias)
            head = partial(nn.functional.linear, weight=weight, bias=bias)
            return chunked_loss_sum(states, labels, head, cap, chunk_rows(weight))


@dataclass
class _Keeping:
    """The hook of a loss by which logits that somebody still holds stay readable."""

    source: ref[Source]

    def __call__(self, grad: Tensor) -> None:
        source = self.source()
        if source is not None:
            source.keep_readable()


def _sample_of(weight: Tensor) -> Tensor:
    """Return the bits of a number of each row of a weight (V, D), a different column in each: (V,) or a few less."""
    with torch.no_grad():
        flat = weight.detach().reshape(-1) if weight.is_contiguous() else weight.detach()[:, 0]
        bits = flat.view({1: torch.int8, 2: torch.int16, 8: torch.int64}.get(weight.element_size(), torch.int32))
        return bits[:: weight.shape[-1] + 1 if weight.is_contiguous() else 1].clone()


_SOURCES: Alive[Source] = Alive()
"""Those whose logits somebody holds."""


class LazyLogits(LazyTensor):
    """Logits (..., V) that exist when they are read."""

    _source: Source
    _states: Tensor
    """The hidden states of these logits, (..., D)."""
    _steps: tuple[Step, ...]
    _cap: tuple[str, float] | None
    """How far the logits are capped: "divided" by the number, "bounded" by tanh too, and "done"."""
    _has_grad: bool
    """Whether gradients were on when these logits were made."""
    _value: Tensor | None
    """The logits, once they were read: whatever is done to them from there on is done to these."""

    @staticmethod
    def of(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the logits (..., V) of the hidden states (..., D) for a head's weight (V, D) and bias (V,)."""
        source = Source(states, weight, bias)
        return _lazy(source, states, (*states.shape[:-1], weight.shape[0]), source.dtype, (), None)

    def computed(self) -> Tensor:
        """Return the logits as an ordinary tensor, the same one each time."""
        if self._value is None:
            self._value = self._source.logits()
            with torch.set_grad_enabled(self._has_grad):
                for function, given, options in self._steps:
                    self._value = function(self._value, *given, **options)
        assert self._value is not None
        return self._value

    @property
    def is_open(self) -> bool:
        """Whether nobody has read these logits, nor written to what they are made of."""
        source = self._source
        return self._value is None and not (source.is_changed or source.is_stale)

    def without_numbers(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the cross entropy of these logits, or the logits after a step that it can follow; else None."""
        if func is nn.functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if not args or args[0] is not self or not self.is_open:
            return None
        if func in WATCHED and self._source.loss_is_computed:
            raise _unwatchable()
        return _after(self, func, args[1:], kwargs)


class _Lazy(Function):
    """Gives lazy logits their place in the graph, for whoever reaches them below __torch_function__."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, shape: Any, dtype: Any, steps: Any, product: Any
    ) -> Tensor:
        ctx.save_for_backward(states, weight, bias)
        ctx.steps, ctx.product = steps, product
        return Tensor._make_wrapper_subclass(LazyLogits, torch.Size(shape), dtype=dtype, device=states.device)  # pyright: ignore

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        given: list[Any] = [None if one is None else one.detach() for one in ctx.saved_tensors]
        wanted = [one.requires_grad_() for one, asked in zip(given, ctx.needs_input_grad, strict=False) if asked]
        with torch.enable_grad(), ctx.product():
            found = nn.functional.linear(*given)
            for function, arguments, options in ctx.steps:
                found = function(found, *arguments, **options)
        made = iter(torch.autograd.grad(found, wanted, grads[0].to(found.dtype)))
        return (*(next(made) if asked else None for asked in ctx.needs_input_grad[:3]), None, None, None, None)


def _lazy(
    source: Source,
    states: Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    steps: tuple[Step, ...],
    cap: tuple[str, float] | None,
) -> LazyLogits:
    found: Any = _Lazy.apply(source.states, source.weight, source.bias, tuple(shape), dtype, steps, source.autocast)
    found._source, found._states, found._steps, found._cap = source, states, steps, cap
    found._has_grad, found._value = torch.is_grad_enabled(), None
    return found


def _after(logits: LazyLogits, func: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> LazyLogits | None:
    """Return the logits after a step that their cross entropy can follow; None for any other."""
    states, cap, dtype = logits._states, logits._cap, logits.dtype
    shape: Sequence[int] = logits.shape
    if func in _TO_FLOAT and not given and not options:
        dtype = torch.float32
    elif func in _SHAPED and all(isinstance(one, int | tuple | list) for one in (*given, *options.values())):
        shape = func(torch.empty(shape, device="meta"), *given, **options).shape
        if not shape or shape[-1] != logits.shape[-1]:
            return None
        states = states.reshape(*shape[:-1], states.shape[-1])
    elif func in _CUT and len(given) == 1 and _leaves_vocabulary(given[0], logits.dim()):
        states = states[given[0]]
        shape = (*states.shape[:-1], logits.shape[-1])
    elif func in _DIVIDED | _BOUNDED | _TIMES and not options:
        cap = _capped(cap, func, given)
        if cap is None:
            return None
    elif func not in _SAME or given or options:
        return None
    return _lazy(logits._source, states, shape, dtype, (*logits._steps, (func, given, options)), cap)


def _leaves_vocabulary(index: Any, n_dims: int) -> bool:
    """Return whether an index cuts leading dimensions alone."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, slice) or part is Ellipsis for part in parts) or parts.count(Ellipsis) > 1:
        return False
    reaches = parts[-1] is not Ellipsis and (len(parts) == n_dims or Ellipsis in parts)
    return len(parts) <= n_dims and (not reaches or parts[-1] == slice(None))


def _capped(cap: tuple[str, float] | None, func: Any, given: tuple[Any, ...]) -> tuple[str, float] | None:
    """Return how far the logits are capped after this; None if it is no part of capping, c tanh(logits / c)."""
    number = float(given[0]) if len(given) == 1 and isinstance(given[0], int | float) else None
    if cap is None and func in _DIVIDED and number:
        return "divided", number
    if cap is not None and cap[0] == "divided" and func in _BOUNDED and not given:
        return "bounded", cap[1]
    if cap is not None and cap[0] == "bounded" and func in _TIMES and number == cap[1]:
        return "done", cap[1]
    return None


def _cross_entropy(input: Any, target: Any, *given: Any, **options: Any) -> Tensor | None:
    """Return torch's cross_entropy, whose arguments these are, of lazy logits (N, V) and labels (N,).

    None if the logits have to be computed.
    """
    ignored, reduction = options.pop("ignore_index", -100), options.pop("reduction", "mean")
    is_plain = all(one is None or (isinstance(one, float) and one == 0.0) for one in (*given, *options.values()))
    if not isinstance(input, LazyLogits) or not input.is_open or not is_plain:
        return None  # weights of classes, label smoothing, arguments of an older torch
    if not input._source.has_same_weights():
        return None
    if reduction not in ("mean", "sum") or (input._cap is not None and input._cap[0] != "done"):
        return None
    if not (_are_labels(target, input) and target.device == input.device):
        return None
    (read,) = (target != ignored).nonzero(as_tuple=True)
    wanted = target[read]
    if not len(read) or int(wanted.min()) < 0 or int(wanted.max()) >= input.shape[-1]:
        return None  # torch has its own answers
    cap = None if input._cap is None else input._cap[1]
    total = input._source.loss_sum(input._states.index_select(0, read), wanted, cap)
    loss = total / len(read) if reduction == "mean" else total
    return loss if torch.is_autocast_enabled(loss.device.type) else loss.to(input.dtype)


def _are_labels(labels: Any, logits: LazyLogits) -> bool:
    """Return whether these are a label for each of the logits (N, V)."""
    is_list = type(labels) is Tensor and labels.dtype == torch.int64 and logits.dim() == 2
    return is_list and labels.shape == logits.shape[:1]


def _too_late() -> ConfigError:
    return ConfigError(
        what="the logits of this call cannot be computed any more",
        got="logits that are read after the model's weights or hidden states have changed",
        why="whet.optimize computes the logits of a large vocabulary when they are read, and the loss without them",
        fix="read them before optimizer.step() or you change the weights: logits = outputs.logits.detach().clone()",
    )


def _unwatchable() -> ConfigError:
    return ConfigError(
        what="the loss of this call has no gradient with respect to its logits",
        got="a hook or retain_grad on logits after the model has computed its loss",
        why="under whet.optimize the loss of a large vocabulary is computed a chunk of logits at a time",
        fix="call the model without labels, put the hook on outputs.logits and compute the loss from them",
    )
