"""The parts of a model that methods work on, by name: blocks, linear layers, tables, norms and the head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from whet.models.adapters import unwrapped
from whet.models.known import of_model
from whet.optional import is_from

_LINEARS = (nn.Linear, Conv1D)
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Named(NamedTuple):
    """A module of a model and its name, which `get_submodule` of `ModelView.model` takes."""

    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class ModelView:
    """The parts of any model, each list in the order of the model's modules and without repetition.

    - A model of a known family answers with what the family's file names.
    - An unknown model gets the generic answer, which only looks at classes and structure. It may be empty.
    - A wrapped model answers as the model inside: the wrappers of peft, torch.compile, DataParallel and
      DistributedDataParallel are removed. Adapters are not parts of the model: a layer with an adapter is listed as the
      layer that the adapter wraps (`query.base_layer`), the adapter's own matrices are not listed. Of a layer in
      `modules_to_save` the copy that is in use is listed.

    Nothing is cached: a view of a model that has changed shows the change.
    """

    root: nn.Module
    """The model as it was given."""

    @property
    def model(self) -> Any:
        """The model inside all wrappers; names are relative to it."""
        model = self.root
        while (inner := _inside(model)) is not model:
            model = inner
        return model

    def blocks(self) -> list[Named]:
        """Return the blocks that the model is a stack of.

        Known family: the modules of its block classes; ALBERT has one, which runs many times. Otherwise the members of
        each outermost ModuleList of two or more modules of one class; of an encoder and decoder, both stacks.
        """
        modules, family = list(_modules(self.model)), of_model(self.model)
        blocks = [named for named in modules if family is not None and family.is_block(named.module)]
        return blocks or _stacked(modules)

    def linears(self) -> list[Named]:
        """Return the linear layers, head included, known family or not: `nn.Linear`, its subclasses, and `Conv1D`.

        The weight of transformers' `Conv1D` (GPT-2) is (in, out), all others are (out, in).
        """
        return [named for named in _modules(self.model) if isinstance(named.module, _LINEARS)]

    def tables(self) -> list[Named]:
        """Return the embedding tables, known family or not: words, positions, segments, relative distances."""
        return [named for named in _modules(self.model) if isinstance(named.module, _TABLES)]

    def norms(self) -> list[Named]:
        """Return the normalisation layers, known family or not: torch's, and classes whose name ends in `Norm`."""
        return [named for named in _modules(self.model) if _is_norm(named.module)]

    def head(self) -> list[Named]:
        """Return the parts with weights that read the encoder's output, such as `qa_outputs` or `classifier`.

        A model of transformers, known family or not: the children outside of its `base_model`; if there is no base
        model inside, the output embeddings unless they are the input's. An encoder alone has no head, and neither has
        a module that is not of transformers: nothing says where its body ends.
        """
        model = self.model
        base = getattr(model, "base_model", None)
        if not isinstance(base, nn.Module):
            return []
        if base is not model:
            parts = [child for child in _children(model) if not any(own is base for own in child.module.modules())]
        else:
            output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            parts = [named for named in _modules(model) if output is not None and named.module is output]
        return [part for part in parts if any(True for _ in part.module.parameters())]

    def depths(self) -> dict[int, int]:
        """Return the depth of each parameter by its id, counted in blocks; empty if it is not known.

        0: embedding tables, what the encoder has before its blocks, and what each block reads. 1: the first block, and
        so on. What follows the last block is one deeper than it: the pooler, the head. Known for models of transformers
        that are one stack of blocks with weights of their own.
        """
        model, blocks = self.model, self.blocks()
        base = getattr(model, "base_model", None)
        n_layers = getattr(getattr(model, "config", None), "num_hidden_layers", len(blocks))
        one_stack = len({name.rpartition(".")[0] for name, _ in blocks}) == 1
        if not isinstance(base, nn.Module) or not one_stack or n_layers != len(blocks):
            return {}
        found = {id(weight): depth for depth, (_, block) in enumerate(blocks, 1) for weight in block.parameters()}
        below = [table for _, table in self.tables()] + self._read_by_blocks(base)
        found = {id(weight): 0 for part in below for weight in part.parameters()} | found
        depth = 0
        for weight in base.parameters():
            depth = len(blocks) + 1 if found.get(id(weight), 0) == len(blocks) else depth
            found.setdefault(id(weight), depth)
        return {id(weight): len(blocks) + 1 for weight in self.root.parameters()} | found

    def _read_by_blocks(self, encoder: nn.Module) -> list[nn.Module]:
        """Return the parts that the family names as read by each block; a model may lack some."""
        family, modules = of_model(self.model), dict(encoder.named_modules())
        return [modules[name] for name in ([] if family is None else family.read_by_blocks) if name in modules]


def _inside(model: nn.Module) -> nn.Module:
    """Return the model inside the outermost wrapper; a model without one as it is."""
    if is_from(model, "torch._dynamo", "OptimizedModule"):
        return cast("nn.Module", model._orig_mod)
    return model.module if isinstance(model, _PARALLEL) else unwrapped(model)


def _modules(model: nn.Module) -> Iterator[Named]:
    """Yield each module below the model once, adapters left out."""
    seen: set[int] = set()
    stack = [*reversed(_children(model))]
    while stack:
        named = stack.pop()
        if id(named.module) not in seen:
            seen.add(id(named.module))
            yield named
            below = (Named(f"{named.name}.{name}", module) for name, module in _children(named.module))
            stack.extend(reversed([*below]))


def _children(module: nn.Module) -> list[Named]:
    return [_without_adapter(Named(name, child)) for name, child in module.named_children()]


def _without_adapter(named: Named) -> Named:
    """Return the layer that one of peft's stands around, or its copy that trains; any other module as it is."""
    while type(named.module).__module__.startswith("peft."):
        layer: Any = named.module
        active = next(iter(getattr(layer, "active_adapters", [])), None)
        copies = getattr(layer, "modules_to_save", {}) if "modules_to_save" in layer._modules else {}
        if active is not None and active in copies:
            return Named(f"{named.name}.modules_to_save.{active}", copies[active])
        held = layer._modules  # a name may hold None, as in peft's layer of trainable tokens
        inner = next((name for name in ("base_layer", "original_module") if held.get(name) is not None), None)
        if inner is None:
            return named
        named = Named(f"{named.name}.{inner}", held[inner])
    return named


def _stacked(modules: list[Named]) -> list[Named]:
    """Return the members of the outermost lists of equal modules."""
    lists = [module for _, module in modules if isinstance(module, nn.ModuleList) and _is_stack(module)]
    inner = {id(below) for one in lists for block in one for below in block.modules()}
    outermost = {id(block) for one in lists if id(one) not in inner for block in one}
    return [named for named in modules if id(named.module) in outermost]


def _is_stack(modules: nn.ModuleList) -> bool:
    return len(modules) > 1 and len({type(module) for module in modules}) == 1


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")
