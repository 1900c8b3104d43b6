"""The file of a state whose bytes come in pieces, from several ranks, is the one that safetensors would write."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from whet.dist.messages import DTYPES
from whet.store.state import in_file_order, write_pieces


def test_file_in_pieces_is_that_of_safetensors(tmp_path: Path) -> None:
    """Tensors of every format that a state has, and several of one width. safetensors has no complex128."""
    formats = {name: dtype for name, dtype in DTYPES.items() if name != "complex128"}
    complete = {
        f"{part}.{name}": torch.arange(6).reshape(2, 3).to(dtype)
        for part in ("b", "a", "é")
        for name, dtype in formats.items()
    }
    shapes = {name: one.to("meta") for name, one in complete.items()}
    pieces = (half for name in in_file_order(shapes) for half in complete[name].view(-1).view(torch.uint8).split(5))
    write_pieces(shapes, pieces, tmp_path, "pieces")
    save_file(complete, tmp_path / "complete.safetensors")
    assert (tmp_path / "pieces.safetensors").read_bytes() == (tmp_path / "complete.safetensors").read_bytes()
