"""`cpu`: attention on the CPU against PyTorch's own, in TFLOP/s.

A forward counts 4 * B * H * S * S * D operations, half of it under a causal mask; forward and
backward together 3.5 times that. Tokens times heads are the same in every row, and there are always
at least as many heads as two threads need (PyTorch's backward runs a head on one thread).
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from peers import sdpa
from report import Row, geometric_mean, ratio
from timing import Budget, alternate

import flashbpt

TOKENS_TIMES_HEADS = 16384
GEOMETRIC_MEAN, WORST = 0.8, 0.6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


def rows(quick: bool = False) -> Iterator[Row]:
    seqlens = [128, 256] if quick else [512, 1024, 2048, 4096, 8192]
    head_dims = [64] if quick else [64, 128]
    budget = Budget(seconds=0.02 if quick else 1.0, max_rounds=5 if quick else 100)
    cases = itertools.product((torch.float32, torch.bfloat16), head_dims, seqlens, (False, True))
    for dtype, head_dim, seqlen, causal in cases:
        heads = 2 if quick else TOKENS_TIMES_HEADS // seqlen
        for direction in ("fwd", "fwd+bwd"):
            yield _row(dtype, head_dim, seqlen, heads, causal, direction, budget)


def _row(dtype, head_dim, seqlen, heads, causal, direction, budget) -> Row:
    generator = torch.Generator().manual_seed(0)
    shape = (1, heads, seqlen, head_dim)
    q, k, v, grad = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    functions = {"flashbpt": flashbpt.attention, "sdpa": sdpa}

    if direction == "fwd":
        flop = 4 * heads * seqlen * seqlen * head_dim

        def candidate(attention):
            with torch.no_grad():
                return attention(q, k, v, is_causal=causal)
    else:
        flop = 3.5 * 4 * heads * seqlen * seqlen * head_dim
        for t in (q, k, v):
            t.requires_grad_()

        def candidate(attention):
            out = attention(q, k, v, is_causal=causal)
            return out, *torch.autograd.grad(out, (q, k, v), grad)

    results = {}

    def call(name, attention):
        results[name] = candidate(attention)

    calls = {name: functools.partial(call, name, f) for name, f in functions.items()}
    seconds = alternate(calls, budget)
    # What was timed computed the same thing.
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(*results.values(), atol=tolerance, rtol=tolerance)
    rate = {name: flop / (2 if causal else 1) / t * 1e-12 for name, t in seconds.items()}
    return {
        "case": f"B1 H{heads}",
        "backend": "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "seqlen": seqlen,
        "causal": causal,
        "direction": direction,
        "unit": "TFLOP/s",
        **rate,
        "threads": torch.get_num_threads(),
    }


def verdict(rows: list[Row]) -> list[str]:
    ratios = [ratio(row) for row in rows]
    mean, worst = geometric_mean(ratios), min(ratios)
    return [
        f"target: geometric mean at least {GEOMETRIC_MEAN}: {mean:.3f}, "
        f"{'met' if mean >= GEOMETRIC_MEAN else 'MISSED'}",
        f"target: no row under {WORST}: {worst:.3f}, {'met' if worst >= WORST else 'MISSED'} "
        f"({sum(r < WORST for r in ratios)} of {len(ratios)} rows under it)",
    ]
