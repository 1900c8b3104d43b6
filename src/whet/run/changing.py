"""When `whet run` changes a model of the script, and what a step takes before and after.

The first two optimizer steps of a training run as the script has them, and the faster one is what later steps are
compared with. Then `whet.optimize` changes the model in place, and the steps after the next one are timed. So nothing
runs that the script does not run, no random number is drawn for it, and both times are of the same process. A step
lasts from the model's first call to the end of the optimizer's step. Batches differ: times are compared per place.

What is known so far is written down after each step that was timed, as the process may be killed.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from whet.config import environment
from whet.config.ranks import place_or_alone
from whet.errors import WhetError
from whet.kernels import allocator
from whet.log import logger
from whet.methods.unpad import calls
from whet.methods.unpad import method as unpad
from whet.models import known, record
from whet.models.adapters import unwrapped
from whet.models.forwards import home_of, instance_forward, is_whets
from whet.models.packed import packed_model
from whet.models.standard import is_trusted
from whet.objectives import lazy_logits
from whet.own_loop import locate
from whet.own_loop.changes import changes, may_show_padding
from whet.own_loop.optimize import optimize, restore
from whet.run import reports

N_UNCHANGED = 2
"""Optimizer steps that run as the script has them. The first also warms the process up, so one would flatter."""
N_WARM_UP = 1
"""Steps of a changed model that are not timed: its operators run for the first time."""
N_JUDGED = 20
"""Steps after which a model that has become slower is put back to what it was: tiny ones may."""
LEAST_GAIN = 0.97
"""How many times as fast a changed model has to be by then; less is no noise."""
N_TIMED = 40
"""Steps of a changed model that are timed; after them, this module has no hook in the model any more."""
_SHARED = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
"""Kinds of training in accelerate in which a rank has a part of the weights."""
_ELSEWHERE = "its weights are shared among ranks"
_BY_SCRIPT = "the script itself calls whet"
_ENCODER, _UNTRAINED = "it is an encoder without a head", "it was not trained"

_in_trainer: ContextVar[bool] = ContextVar("whet_run_in_trainer", default=False)
"""Whether transformers' Trainer trains: of a training step it reads the loss, and no hidden states later."""


# ---- The functions around the entry points: the replaced function comes first, then its arguments ----


def train(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Stand around transformers' `Trainer.train`."""
    token = _in_trainer.set(True)
    try:
        return function(*given, **named)
    finally:
        _in_trainer.reset(token)


def prepare_model(function: Callable[..., Any], accelerator: Any, model: Any, *given: Any, **named: Any) -> Any:
    """Stand around accelerate's `prepare_model`, through which each model of `prepare` goes as well."""
    evaluates = named.get("evaluation_mode", given[1] if len(given) > 1 else False)
    if isinstance(model, nn.Module) and (model in _watches or not getattr(model, "_is_accelerate_prepared", False)):
        by = "transformers' Trainer" if _in_trainer.get() else "accelerate"
        trains = not evaluates and any(one.requires_grad for one in model.parameters())
        shared = str(getattr(accelerator.distributed_type, "value", "")) in _SHARED
        _take(
            model, by, trains=trains, why_untimed=_why_untimed(accelerator), why_left=_ELSEWHERE if shared else None,
            is_teacher=not trains and not evaluates,
        )  # fmt: skip
    return function(accelerator, model, *given, **named)


def fit(function: Callable[..., Any], trainer: Any, model: Any, *given: Any, **named: Any) -> Any:
    """Stand around Lightning's `Trainer.fit`, in which the module may still make its model."""
    if isinstance(model, nn.Module):
        _take(model, "Lightning's Trainer", trains=True, why_untimed=None, is_complete=False)
    return function(trainer, model, *given, **named)


def update(function: Callable[..., Any], pipeline: Any, examples: Any, *given: Any, **named: Any) -> Any:
    """Stand around spaCy's `Language.update`, which is a step or a part of one."""
    watch = _take(pipeline, "spaCy", trains=True, why_untimed=None)
    if not watch.is_timing:
        return function(pipeline, examples, *given, **named)
    examples = list(examples) if isinstance(examples, Iterator) else examples
    watch.forget_begin()  # of an update that failed
    watch.begin(_n_tokens(examples))
    found = function(pipeline, examples, *given, **named)
    with watch.guarded():
        watch.end()
    return found


def _n_tokens(examples: Any) -> int:
    """Return how many tokens spaCy's examples have; 0 for what it refuses itself, in its own words."""
    found = [getattr(one, "reference", ()) for one in examples] if isinstance(examples, Iterable) else []
    return sum(map(len, found))


def save(function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Stand around `torch.save`: the pickle of a model holds what the script has made, and loads without whet."""
    modules = list(_modules_in(given[0] if given else named.get("obj")))
    with ExitStack() as stack:
        parts = {id(part) for one in modules for part in one.modules()}
        for watch in list(_watches.values()) if parts else ():
            stack.enter_context(watch.paused(parts))
        for one in modules:
            if _is_own(one):  # a copy of a model that was changed
                _undo(one)
        return function(*given, **named)


_DEPTH, _MOST_ITEMS = 3, 1000
"""How deep modules are looked for in what is saved, and in how large a list: in a data set there are none."""


def _modules_in(saved: Any, depth: int = _DEPTH) -> Iterator[nn.Module]:
    """Yield the modules among what is saved, which may be a dictionary with one."""
    if isinstance(saved, nn.Module):
        yield saved
    elif isinstance(saved, Mapping | list | tuple) and depth and len(saved) <= _MOST_ITEMS:
        for one in saved.values() if isinstance(saved, Mapping) else saved:
            yield from _modules_in(one, depth - 1)


def _why_untimed(accelerator: Any) -> str | None:
    """Return why steps of a model that this Accelerator prepares are not timed; None if they are."""
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    compiles = str(getattr(getattr(plugin, "backend", None), "value", "NO")) != "NO"
    return "torch.compile reads it before the first step" if compiles else None


# ---- The models of the script ----


_report = reports.Report()
_hooks: list[Any] = []


class _Watch:
    """A model of the script, or a pipeline of spaCy: whether it is changed, and what its steps take."""

    def __init__(self, holder: Any, by: str, why_untimed: str | None, *, trains: bool, is_teacher: bool) -> None:
        self._holder = ref(holder)
        self._is_module = isinstance(holder, nn.Module)
        self._decided = False
        self._handles: list[Any] = []
        self._began: tuple[float, float] | None = None
        """When the step began, and the processor time until then."""
        self._places = [0, 0]
        """Of the batches in calls of encoders, and of the holder: libraries may call either without its hooks."""
        self._n_steps = 0
        self._was_called = False
        """Whether a call was noted: where a compiler has read the model, none is."""
        self._differentiates_twice = False
        """Whether a backward pass of the first steps made a graph of itself."""
        self._reads_padding: bool | None = None
        """Whether losses of the first steps read what an encoder returns for padding; None: they had no padding."""
        self._is_encoder = False
        """Whether the model is an encoder without a head: accelerate may put mixed precision around whet's forward."""
        self._timed: list[reports.Timed] = []
        """Each step that was timed after the change."""
        self.by, self.trains, self._is_teacher = by, trains, is_teacher
        self.is_timing = trains and why_untimed is None
        self.report = reports.ModelReport(type(holder).__name__, by, untimed=why_untimed if trains else _UNTRAINED)
        _report.models.append(self.report)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let no error of whet end the script: the model then stays as it was, and the last line says why."""
        try:
            yield
        except Exception as error:
            self.give_up(error)
        _write()

    def give_up(self, error: Exception) -> None:
        """Leave the model as the script has it."""
        self.stop()
        self._decided = True
        with suppress(Exception):
            _undo(self._holder())
        self.report.changed, self.report.left = None, _in_words(error)

    def trains_now(self) -> bool:
        """Note that a model that was evaluated is trained; return whether it stays changed, and is not timed first."""
        if self._is_encoder:
            self.trains, self.report.untimed = True, _ENCODER
        return self._is_encoder

    def decide(self, why_left: str | None = None) -> None:
        """Change the model, or say why not; if its steps are to be timed, it is then put back to what it was."""
        self._decided, holder = True, self._holder()
        if holder is None:
            return
        self.report.left = why_left or _why_left(holder)
        if self.report.left is not None:
            self.stop()
            return
        self._change(holder)
        self._is_encoder = self._is_module and is_whets(instance_forward(holder))
        if self.is_timing and self._is_encoder:
            self.is_timing, self.report.untimed = False, _ENCODER
        if self.is_timing:
            _undo(self._holder())
            self.report.changed = None
            self._listen(holder)

    def _change(self, holder: Any) -> None:
        level = logger.level
        logger.setLevel(max(level, logging.WARNING))  # what was changed is said at the end
        try:
            # a loop of the script's own may read hidden states after the optimizer's step
            tokens: Any = "read" if self.by == "transformers' Trainer" else "all"
            optimize(holder, last_block_tokens=tokens)
            models = [one.model for one in locate.encoders_in(holder)]
            is_read = self._reads_padding or (self._is_teacher and any(calls.shows_tokens(one) for one in models))
            if is_read or any(may_show_padding(one) for one in models):  # the script's loss is to be its own
                optimize(holder, last_block_tokens=tokens, padding="all")
            for encoder in locate.encoders_in(holder):
                if (packed := packed_model(encoder.model)) is not None:
                    if self._reads_padding is None and calls.shows_tokens(packed.module):
                        unpad.require_labels(packed.module)
                    packed.hooks.want_padding = True  # they are the script's own, also those that come later
            if not torch.cuda.is_available():
                allocator.keep_freed_memory()
        finally:
            logger.setLevel(level)
        for model in _marked_in(holder):
            record.keep(model, _MARK, True)
        self.report.changed = str(changes(holder))

    @contextmanager
    def paused(self, parts: Container[int]) -> Iterator[None]:
        """Let the model be as the script has it for a while, if one of its modules is among those with these ids."""
        holder = self._holder()
        is_touched = bool(self._handles) or self.report.changed is not None
        if not isinstance(holder, nn.Module) or not is_touched or all(id(one) not in parts for one in holder.modules()):
            yield
            return
        was_changed, is_listening, forward = self.report.changed, bool(self._handles), vars(holder).get("forward")
        self._deafen()
        if was_changed is not None:
            _undo(self._holder())
        try:
            yield
        finally:
            with self.guarded():
                if was_changed is not None:
                    self._change(holder)
                    self.report.changed = was_changed
                if forward is not None:  # accelerate may have put mixed precision around it
                    holder.forward = forward
                if is_listening:
                    self._listen(holder)

    def _listen(self, holder: Any) -> None:
        if self._is_module:
            encoders = [encoder.model for encoder in locate.encoders_in(holder)]
            outer = [] if holder in encoders else [holder]
            for level, modules in enumerate((encoders, outer)):
                hook = _Called(self, level)
                self._handles += [one.register_forward_pre_hook(hook, with_kwargs=True) for one in modules]
            if self.report.changed is None:
                inner = [known.encoder_of(unwrapped(one)) or one for one in encoders]
                returned = _Returned(self)
                self._handles += [one.register_forward_hook(returned, with_kwargs=True) for one in inner]

    def note_backward(self, gradient: Tensor, padding: Tensor | None) -> None:
        """Note a backward pass; torch keeps gradients on in one whose result is to be differentiated again.

        `gradient` (B, T, D) is that of the hidden states of an encoder, `padding` (B, T) marks its places of padding.
        """
        self._differentiates_twice |= torch.is_grad_enabled()
        if padding is not None and bool(padding.any()):
            self._reads_padding = bool(self._reads_padding) or bool(gradient[padding].any())

    def begin(self, n_places: int, level: int = 0) -> None:
        """Note a call of the model with a batch of this many places; the first one begins a step."""
        if self._began is None:
            self._began, self._places, self._was_called = _now_s(), [0, 0], True
        self._places[level] += n_places

    def forget_begin(self) -> None:
        """Forget a step that has begun: it failed, or a training ended in its middle, and the loop begins again."""
        self._began = None

    def end(self) -> None:
        """Note the end of a step; after the last one that is to run unchanged, change the model."""
        if not self._decided:
            self._n_steps = 1
            self.decide()
            return
        if not self.is_timing:
            return
        self._n_steps += 1
        if self._began is not None:
            seconds, processor_seconds = (now - then for now, then in zip(_now_s(), self._began, strict=True))
            places, self._began = self._places[0] or self._places[1] or 1, None
            self._note(reports.Timed(seconds, seconds / places, processor_seconds / places, 1))
        if self._n_steps == N_UNCHANGED and not self._was_called:
            self.stop()
            self.report.left = "torch.compile reads it, or its parts are called one by one"
            return
        if self._n_steps == N_UNCHANGED and self._differentiates_twice:
            self.stop()
            self.report.left = "the script differentiates its gradients (create_graph=True)"
            return
        if self._n_steps == N_UNCHANGED and (holder := self._holder()) is not None:
            self._deafen()
            self._change(holder)
            self._listen(holder)
        if len(self._timed) == N_JUDGED and self.report.is_slower(LEAST_GAIN):
            self.stop()
            _undo(self._holder())
            why = f"steps took longer: {self.report.gain:.2f} times as fast, so it was put back"
            self.report.changed, self.report.left = None, why
        if self._n_steps == N_UNCHANGED + N_WARM_UP + N_TIMED:
            self.stop()

    def _note(self, step: reports.Timed) -> None:
        """Keep what a step took."""
        if self._n_steps <= N_UNCHANGED:
            before = self.report.before
            faster = step if before is None or step.seconds_per_place < before.seconds_per_place else before
            self.report.before = replace(faster, n_steps=1 if before is None else before.n_steps + 1)
        elif self._n_steps > N_UNCHANGED + N_WARM_UP:
            self._timed.append(step)
            self.report.after = reports.median(self._timed)

    def stop(self) -> None:
        """Time no more steps."""
        self.is_timing = False
        self._deafen()

    def _deafen(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def is_trained_by(self, optimizer: Optimizer) -> bool:
        """Return whether a step of the optimizer is one of this model, and of interest."""
        holder = self._holder()
        if not self._is_module or holder is None or (self._decided and not self.is_timing):
            return False
        own = {id(one) for one in holder.parameters()}
        return any(id(one) in own for group in optimizer.param_groups for one in group["params"])


class _Called:
    """The hook of a model whose steps are timed. Copies and pickles have one that does nothing, and needs no whet."""

    def __init__(self, watch: _Watch, level: int) -> None:
        self._watch, self._level = watch, level

    def __call__(self, model: nn.Module, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        if not torch.compiler.is_compiling() and (model.training or torch.is_grad_enabled()):
            try:
                inner = [value for one in given if isinstance(one, Mapping) for value in one.values()]
                self._watch.begin(_n_places([named.get("input_ids"), *given, *inner, *named.values()]), self._level)
            except Exception as error:  # a batch of a kind that nobody thought of
                self._watch.give_up(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class _Returned(_Called):
    """The hook of what an encoder returns in the first steps: its backward pass is looked at."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__(watch, 0)

    def __call__(self, model: nn.Module, given: Any, named: Any, out: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.compiler.is_compiling():
            return
        values = [*out.values()] if isinstance(out, Mapping) else out if isinstance(out, tuple | list) else [out]
        states = next((one for one in values if isinstance(one, Tensor) and one.requires_grad), None)
        if states is None:
            return
        try:
            mask = (calls.named(model, given, named) or {}).get("attention_mask")
            has_places = isinstance(mask, Tensor) and mask.shape == states.shape[:2]
            padding = mask == 0 if has_places else None
            states.register_hook(lambda gradient, watch=self._watch: watch.note_backward(gradient, padding))
        except Exception as error:
            self._watch.give_up(error)


_watches: WeakKeyDictionary[Any, _Watch] = WeakKeyDictionary()
_MARK = "changed by whet run"
"""The entry in the record of encoders that were changed here, and not by the script, and of their copies."""


def _take(
    model: Any, by: str, *, trains: bool, why_untimed: str | None, why_left: str | None = None,
    is_complete: bool = True, is_teacher: bool = False,
) -> _Watch:  # fmt: skip
    """Return what is known of a model that is to be trained or evaluated; decide about it if it comes for that first.

    `is_complete`: its modules are all there. Otherwise it is looked at after the first step. `why_left`: why it stays
    as it is whatever it is. `is_teacher`: a loop that trains may read all that it returns.
    """
    watch = _watches.get(model)
    if watch is not None and (watch.report.left is not None or watch.trains or not trains):
        if by != "spaCy":
            watch.forget_begin()
        return watch
    if watch is not None:
        if watch.trains_now():
            return watch
        _undo(model)
        _report.models[:] = [one for one in _report.models if one is not watch.report]
    watch = _watches[model] = _Watch(model, by, why_untimed, trains=trains, is_teacher=is_teacher)
    if not _hooks:
        lazy_logits.keep_readable_after_backward()
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        _hooks.append(register_optimizer_step_post_hook(_after_step))
        logger.addHandler(_Notes(logging.WARNING))
    if is_complete:
        with watch.guarded():
            watch.decide(why_left)
    return watch


def _why_left(holder: Any) -> str | None:
    """Return why the model stays as the script has it; None if it is to be changed."""
    roots = [root for _, root in locate.modules_in(holder)]
    if changes(holder) is not None and not any(map(_is_own, roots)):
        return _BY_SCRIPT
    why = next(filter(None, map(locate.why_elsewhere, roots)), None)
    if why is not None:
        return why
    locate.prove_in(holder)
    encoders = [encoder.model for encoder in locate.encoders_in(holder)]
    return locate.why_unchanged(encoders) or next(filter(None, map(_why_own_code, encoders)), None)


_INSTALLED = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_SITES = ("site-packages", "dist-packages")
"""Names of folders into which packages are installed: the user's own has one too, and the system's."""
_LIBRARIES = (
    "torch", "transformers", "peft", "accelerate", "sentence_transformers", "setfit", "trl", "lightning",
    "pytorch_lightning", "spacy", "thinc", "curated_transformers", "bitsandbytes", "whet",
)  # fmt: skip
"""Libraries that may lie in any folder of PYTHONPATH."""


def _why_own_code(model: Any) -> str | None:
    """Return which code of the script's own runs inside the encoder: it may read rows as they are in the batch."""
    encoder = getattr(model, "base_model", model)
    for name, module in encoder.named_modules():
        forward = instance_forward(module)
        if forward is None:
            home = None if is_trusted(type(module)) else type(module).__module__
        else:
            home = None if is_whets(forward) else home_of(forward)
        if name and home is not None and not _is_installed(home):
            return f"the script computes {name} of its {type(encoder).__name__} itself"
    return None


def _is_installed(home: str) -> bool:
    """Return whether a module is Python's or an installed package's, and not the script's own."""
    if home.partition(".")[0] in _LIBRARIES:
        return True
    sites = [path.rstrip(os.sep) + os.sep for path in sys.path if Path(path).name in _SITES]
    return (getattr(sys.modules.get(home), "__file__", None) or "").startswith((*_INSTALLED, *sites))


def _marked_in(holder: Any) -> Iterator[nn.Module]:
    """Yield the modules that carry the mark of a change: each encoder, and what stands around it."""
    for encoder in locate.encoders_in(holder):
        yield encoder.model
        base: Any = getattr(encoder.model, "base_model", None)
        if isinstance(base, nn.Module) and base is not encoder.model:
            yield base


def _is_own(root: nn.Module) -> bool:
    """Return whether there is an encoder in the module that was changed here."""
    return any(record.read(module, _MARK) for module in root.modules())


def _undo(holder: Any) -> None:
    """Put what was changed here back to what it was."""
    restore(holder)
    for model in _marked_in(holder):
        record.take(model, _MARK)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    lazy_logits.keep_readable(optimizer)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for watch in list(_watches.values()):
        if watch.is_trained_by(optimizer):
            with watch.guarded():
                watch.end()


def _n_places(values: Sequence[Any]) -> int:
    """Return how many places the first tensor of a batch has: (B, T) ids, or (B, T, D) embeddings."""
    first = next((one for one in values if isinstance(one, Tensor) and one.dim() > 1), None)
    if first is None:
        return 0
    return first.numel() if not first.is_floating_point() else first.shape[0] * first.shape[1]


def _now_s() -> tuple[float, float]:
    """Return the time, and the processor time of this process, both in seconds."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


class _Notes(logging.Handler):
    """Keeps what whet warns about while the script runs, for the last line."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("whet.optimize: ")
        if text not in _report.notes:
            _report.notes.append(text)
            _write()


def _in_words(error: Exception) -> str:
    if isinstance(error, WhetError):
        return f"{error.problems[0].what}: {error.problems[0].why}"
    return f"whet failed with {type(error).__name__}: {error}"


def _write() -> None:
    """Write down what is known so far; of several ranks, the first does so."""
    folder = os.environ.get(environment.RUN_REPORTS)
    if folder and place_or_alone().is_first:
        _report.write(Path(folder))
