"""The native operators against what eager torch offers, alternating in one process: medians and ratios.

    python benchmarks/cpu/operators.py --width 384 --threads 2 --rounds 15
    python benchmarks/cpu/operators.py --only attention --rounds 40 --against OLDER/_native.so

Forward and backward together, fp32, 12 rows of mixed lengths (60 to 384 tokens, 2,088 in all), dropout 0.1.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from whet.kernels import adamw as fused_optimizer
from whet.kernels import cross_entropy as fused_loss
from whet.kernels import embedding as fused_embedding
from whet.kernels import operator
from whet.kernels import packed_attention as fused_attention
from whet.kernels.activation import bias_act, gated_act_joined
from whet.kernels.adamw import AdamWStep
from whet.kernels.attention_spec import AttentionSpec
from whet.kernels.batch_position import BatchPosition, Drop
from whet.kernels.dropout import dropout
from whet.kernels.embedding import Tables
from whet.kernels.library import Library, library
from whet.kernels.norm import Norm, add_norm

LENGTHS = [384, 290, 240, 210, 180, 160, 146, 130, 112, 96, 80, 60]
P = 0.1
Run = Callable[[], Any]


def position_of(lengths: list[int]) -> BatchPosition:
    """Return the position of a batch with these rows in step 0."""
    slots = torch.arange(len(lengths), dtype=torch.int32)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths])
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return BatchPosition(0, 0, slots.repeat_interleave(torch.tensor(lengths)), positions, starts, slots)


def both_ways(make: Callable[..., Tensor], inputs: list[Tensor]) -> Run:
    """Return a forward and backward pass of `make` over the inputs."""
    grad = torch.randn_like(make(*inputs).detach())

    def run() -> None:
        torch.autograd.grad(make(*inputs), inputs, grad)

    return run


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Return random tensors that take gradients."""
    return [torch.randn(shape).requires_grad_() for shape in shapes]


def dropout_pair(n: int, d: int, position: BatchPosition) -> tuple[Run, Run]:
    x = leaves((n, d))
    drop = Drop(P, position, 0)
    return both_ways(lambda a: dropout(a, drop), x), both_ways(lambda a: functional.dropout(a, P), x)


def norm_pair(n: int, d: int, position: BatchPosition) -> tuple[Run, Run]:
    x = leaves((n, d), (n, d), (d,), (d,), (d,))
    drop = Drop(P, position, 0)

    def ours(a: Tensor, r: Tensor, w: Tensor, b: Tensor, lb: Tensor) -> Tensor:
        return add_norm(a, r, Norm(w, b, 1e-12), linear_bias=lb, drop=drop)[0]

    def eager(a: Tensor, r: Tensor, w: Tensor, b: Tensor, lb: Tensor) -> Tensor:
        return functional.layer_norm(functional.dropout(a + lb, P) + r, (d,), w, b, 1e-12)

    return both_ways(ours, x), both_ways(eager, x)


def gelu_pair(n: int, d: int, _position: BatchPosition) -> tuple[Run, Run]:
    x = leaves((n, 4 * d), (4 * d,))
    return both_ways(lambda a, b: bias_act(a, b, "gelu"), x), both_ways(lambda a, b: functional.gelu(a + b), x)


def swiglu_pair(n: int, d: int, _position: BatchPosition) -> tuple[Run, Run]:
    x = leaves((n, 8 * d))

    def eager(a: Tensor) -> Tensor:
        gate, up = a.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return both_ways(lambda a: gated_act_joined(a, "silu"), x), both_ways(eager, x)


def attention_pair(
    n: int, d: int, position: BatchPosition, p: float = P, dtype: torch.dtype = torch.float32
) -> tuple[Run, Run]:
    qkv, ours, eager = attentions(n, d, position, p, dtype)
    return both_ways(ours, qkv), both_ways(eager, qkv)


def attention_without_dropout_pair(n: int, d: int, position: BatchPosition) -> tuple[Run, Run]:
    return attention_pair(n, d, position, p=0.0)


def attention_bf16_pair(n: int, d: int, position: BatchPosition) -> tuple[Run, Run]:
    return attention_pair(n, d, position, dtype=torch.bfloat16)


def attention_forward_pair(
    n: int, d: int, position: BatchPosition, dtype: torch.dtype = torch.float32
) -> tuple[Run, Run]:
    (qkv,), ours, eager = attentions(n, d, position, P, dtype)
    return lambda: ours(qkv.detach()), lambda: eager(qkv.detach())


def attention_forward_bf16_pair(n: int, d: int, position: BatchPosition) -> tuple[Run, Run]:
    return attention_forward_pair(n, d, position, torch.bfloat16)


Attentions = tuple[list[Tensor], Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def attentions(n: int, d: int, position: BatchPosition, p: float, dtype: torch.dtype) -> Attentions:
    """Return the joined projections of 12 heads, and two ways to attend."""
    heads = 12
    qkv = [torch.randn(n, 3, heads, d // heads, dtype=dtype).requires_grad_()]
    spec = AttentionSpec(position.cu_seqlens, (d // heads) ** -0.5, drop=Drop(p, position, 0) if p else None)

    def eager(a: Tensor) -> Tensor:
        rows = [row.permute(1, 2, 0, 3)[:, None] for row in a.split(LENGTHS)]
        outs = [functional.scaled_dot_product_attention(*row, dropout_p=p)[0] for row in rows]
        return torch.cat([out.transpose(0, 1) for out in outs])

    return qkv, lambda a: fused_attention.attend_joined(a, spec), eager


def embedding_pair(n: int, d: int, position: BatchPosition) -> tuple[Run, Run]:
    tables, params = leaves((30522, d), (512, d), (2, d)), leaves((d,), (d,))
    ids = [torch.randint(0, 30522, (n,)), position.positions.long(), torch.zeros(n, dtype=torch.int64)]
    kept, drop = [fused_embedding.RowGradient(table) for table in tables], Drop(P, position, 0)
    grad = torch.randn(n, d)

    def ours() -> None:
        given, norm = Tables(tuple(tables), (0, None, None)), Norm(params[0], params[1], 1e-12)
        fused_embedding.embed(ids, given, norm, drop=drop, gradients=kept).backward(grad)
        forget_gradients()

    def eager() -> None:
        total = sum(functional.embedding(i, table) for i, table in zip(ids, tables, strict=True))
        functional.dropout(functional.layer_norm(total, (d,), *params, 1e-12), P).backward(grad)
        forget_gradients()

    def forget_gradients() -> None:
        for tensor in (*tables, *params):
            tensor.grad = None

    return ours, eager


def loss_pair(n: int, d: int, _position: BatchPosition) -> tuple[Run, Run]:
    x, labels = leaves((n, d), (32000, d)), torch.randint(0, 32000, (n,))
    eager = both_ways(lambda h, w: functional.cross_entropy(h @ w.T, labels, reduction="sum"), x)
    return both_ways(lambda h, w: fused_loss.linear_cross_entropy(h, w, labels), x), eager


def adamw_pair(_n: int, d: int, _position: BatchPosition) -> tuple[Run, Run]:
    shapes = [(4 * d, d), (d, 4 * d), (3 * d, d), (d, d), (d,), (d,)] * 4
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    eager = torch.optim.AdamW(params, lr=1e-4, fused=True)
    own = [torch.randn(shape) for shape in shapes]
    moments = [[torch.zeros(shape) for shape in shapes] for _ in range(2)]
    ours = fused_optimizer.AdamWTensors(own, *moments)
    grads = [param.grad for param in params]
    step, rates = AdamWStep(0.9, 0.999, 1e-8, 1), [(1e-4, 0.01)] * len(own)

    def clip_and_step() -> None:
        fused_optimizer.squared_norm(grads)
        ours.update(grads, rates, step)

    def clip_and_step_eager() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1e9)
        eager.step()

    return clip_and_step, clip_and_step_eager


PAIRS = {
    "dropout": dropout_pair,
    "bias+dropout+add+layernorm": norm_pair,
    "bias+gelu": gelu_pair,
    "swiglu": swiglu_pair,
    "attention with dropout": attention_pair,
    "attention without dropout": attention_without_dropout_pair,
    "attention in bf16": attention_bf16_pair,
    "attention forward": attention_forward_pair,
    "attention forward in bf16": attention_forward_bf16_pair,
    "embeddings+layernorm+dropout": embedding_pair,
    "linear+cross entropy": loss_pair,
    "clip+adamw": adamw_pair,
}


def under(other: Library, run: Run) -> Run:
    """Return the same run with the operators of another library."""

    def swapped() -> None:
        ours = operator.library
        operator.library = lambda: other
        try:
            run()
        finally:
            operator.library = ours

    return swapped


def alternate(pair: tuple[Run, Run], rounds: int, clock: Callable[[], float]) -> tuple[list[float], list[float]]:
    """Return the seconds of both, measured in turns so that a busy moment hits them alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 2):
        for run, seconds in zip(pair, times, strict=True):
            start = clock()
            run()
            if i >= 2:  # the first two warm caches and buffers
                seconds.append(clock() - start)
    return times


def main() -> None:
    """Print one line an operator, and everything as JSON with --json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: for a busy machine, one thread")
    parser.add_argument("--only", default="", help="run the operators whose name contains this")
    parser.add_argument("--against", type=Path, help="another build of the library, which then runs in eager's place")
    parser.add_argument("--json", action="store_true", help="print all measured seconds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found, position = library(), position_of(LENGTHS)
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    other = args.against.name if args.against else "eager"
    print(f"width {args.width}, {args.threads} threads, instruction set {found.isa if found else 'none: plain torch'}")
    for name, make in PAIRS.items():
        if args.only not in name:
            continue
        pair = make(sum(LENGTHS), args.width, position)
        if args.against:
            pair = pair[0], under(Library(args.against), pair[0])
        ours, eager = alternate(pair, args.rounds, clock)
        mid, mid_eager = statistics.median(ours), statistics.median(eager)
        ratio = statistics.median(e / o for o, e in zip(ours, eager, strict=True))
        best = f"best {min(ours) * 1e3:.2f} and {min(eager) * 1e3:.2f}"
        print(f"{name:28s} {mid * 1e3:8.2f} ms   {other} {mid_eager * 1e3:8.2f} ms   {ratio:5.2f}x  {best}", flush=True)
        if args.json:
            print(json.dumps({"operator": name, "ours_s": ours, "eager_s": eager}))


if __name__ == "__main__":
    main()
