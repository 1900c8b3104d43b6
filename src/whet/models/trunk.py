"""The frozen lower part of a model, whose hidden states a pass can be given instead of computing them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from whet.errors import ConfigError
from whet.models.forwards import Replaced
from whet.models.view import ModelView


class Trunk:
    """The first blocks of a model, and what comes before them."""

    def __init__(self, model: nn.Module, n_blocks: int) -> None:
        view = ModelView(model)
        self._blocks: Sequence[nn.Module] = [block for _, block in view.blocks()][:n_blocks]
        depths = view.depths()
        self.weights = [weight for weight in model.parameters() if depths[id(weight)] <= n_blocks]
        """All weights that the hidden states depend on."""
        self._n_results: int | None = None
        """Of a block that returns a tuple: its length."""

    def states(self, run: Callable[[], object]) -> Tensor:
        """Return the hidden states that the last of these blocks gives in a pass, which ends there."""
        last = self._blocks[-1]
        inner = last.forward

        def stop(*args: Any, **options: Any) -> Any:
            raise _Reached(inner(*args, **options))

        with _forwards({last: stop}):
            try:
                run()
            except _Reached as reached:
                found = reached.result
            else:
                raise AssertionError("the pass has not reached the last frozen block")
        if isinstance(found, tuple) and all(one is None for one in found[1:]):
            self._n_results, found = len(found), found[0]
        if not isinstance(found, Tensor):
            raise ConfigError(
                what="cache_frozen_trunk does not know what the blocks of this model return",
                got=f"{type(last).__name__}: {type(found).__name__}",
                why="it keeps hidden states, and gives them to the first block that is trained",
                fix="leave --cache_frozen_trunk out",
            )
        return found

    @contextmanager
    def given(self, states: Tensor) -> Iterator[None]:
        """Let passes take these hidden states for those behind the last of these blocks; `states` has run before."""
        result = states if self._n_results is None else (states, *[None] * (self._n_results - 1))
        with _forwards({block: lambda *_, **__: result for block in self._blocks}):
            yield


class _Reached(Exception):  # noqa: N818
    """Carries the result of the last block."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result


@contextmanager
def _forwards(instead: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Let these modules run other forwards."""
    replaced = Replaced()
    for module, forward in instead.items():
        replaced.put(module, forward)
    try:
        yield
    finally:
        replaced.undo()
