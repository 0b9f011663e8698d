"""`cpu`: attention on the CPU against PyTorch's own, in TFLOP/s.

A forward counts 4 * B * H * S * S * D operations, half of it under a causal mask. Tokens times
heads are the same in every row, and there are always at least as many heads as two threads need
(PyTorch's backward runs a head on one thread).
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from attention_case import Case, measure
from options import Options
from peers import PEERS
from report import Row, ratio, target

TOKENS_TIMES_HEADS = 16384
GEOMETRIC_MEAN, WORST = 0.8, 0.6  # of the ratios, at least


def rows(options: Options) -> Iterator[Row]:
    return measure(cases(options), options, device="cpu")


def cases(options: Options) -> Iterator[Case]:
    seqlens = [128, 256] if options.quick else [512, 1024, 2048, 4096, 8192]
    head_dims = [64] if options.quick else [64, 128]
    for dtype, head_dim, seqlen, causal, direction in itertools.product(
        (torch.float32, torch.bfloat16), head_dims, seqlens, (False, True), ("fwd", "fwd+bwd")
    ):
        heads = 2 if options.quick else TOKENS_TIMES_HEADS // seqlen
        yield _case(dtype, head_dim, seqlen, heads, causal, direction)


def _case(dtype, head_dim, seqlen, heads, causal, direction) -> Case:
    def make(device):
        return [
            torch.randn(1, heads, seqlen, head_dim, device=device, dtype=dtype) for _ in range(3)
        ]

    return Case(
        case=f"B1 H{heads}",
        dtype=dtype,
        head_dim=head_dim,
        seqlen=seqlen,
        causal=causal,
        direction=direction,
        make=make,
        others={"sdpa": functools.partial(PEERS["sdpa"], is_causal=causal)},
        forward_flop=4 * heads * seqlen * seqlen * head_dim / (2 if causal else 1),
        kwargs={"is_causal": causal},
        extra={"threads": torch.get_num_threads()},
    )


def verdict(rows: list[Row]) -> list[str]:
    return target("of SDPA", [ratio(row) for row in rows], GEOMETRIC_MEAN, WORST)
