"""`varlen`: packed sequences on CUDA against torch.nn.attention.varlen, in TFLOP/s.

32768 tokens and 2048 channels in every row. A forward runs against FlashAttention-3 too, and counts
4 * H * L * L * D operations for a sequence of length L, half of it under a causal mask.
"""

import functools
import itertools
import random
from collections.abc import Iterator

import torch
from attention_case import Case, measure
from options import Options
from peers import VARLEN_PEERS
from report import Row, ratio, target

TOKENS, CHANNELS = 32768, 2048
HEAVY_TAIL = "mean 1K, tail to 16K"
SHORTEST, LONGEST = 256, 16384  # of these
TAIL = 1.2  # the exponent of their Pareto distribution
PEERS = ("fa2",)
FORWARD_PEERS = ("fa3", *PEERS)
HEAVY_TAIL_WORST = 1.05  # of FlashAttention-3's rate


def rows(options: Options) -> Iterator[Row]:
    return measure(cases(options), options)


def lengths(quick: bool = False) -> dict[str, list[int]]:
    """Lengths of sequences that fill the tokens, by what they are."""
    scale = 64 if quick else 1
    tokens = TOKENS // scale

    def fill(filled, draw):
        while (left := tokens - sum(filled)) > 0:
            filled = [*filled, min(left, draw())]
        return filled

    def uniform(low, high, seed):
        generator = random.Random(seed)
        return lambda: generator.randint(low // scale, high // scale)

    def heavy_tail(seed):
        generator = random.Random(seed)
        return lambda: min(LONGEST, int(SHORTEST * generator.paretovariate(TAIL))) // scale

    return {
        "128..4096 A": fill([], uniform(128, 4096, seed=1)),
        "128..4096 B": fill([], uniform(128, 4096, seed=2)),
        "one long, many short": fill([tokens // 2], uniform(64, 512, seed=3)),
        "all 512": fill([], uniform(512, 512, seed=0)),
        HEAVY_TAIL: fill([], heavy_tail(seed=19)),
    }


def cases(options: Options) -> Iterator[Case]:
    dtypes = (torch.bfloat16, torch.float16) if options.fp16 else (torch.bfloat16,)
    for dtype, head_dim, (name, seqlens), causal, direction in itertools.product(
        dtypes,
        (64, 128),
        lengths(options.quick).items(),
        (False, True),
        ("fwd", "bwd", "fwd+bwd"),
    ):
        heads = (256 if options.quick else CHANNELS) // head_dim
        yield _case(name, seqlens, heads, dtype, head_dim, causal, direction)


def _case(name, seqlens, heads, dtype, head_dim, causal, direction) -> Case:
    longest = max(seqlens)

    def make(device):
        shape = (sum(seqlens), heads, head_dim)
        packed = [torch.randn(shape, device=device, dtype=dtype) for _ in range(3)]
        offsets = [0, *itertools.accumulate(seqlens)]
        cu_seqlens = torch.tensor(offsets, device=device, dtype=torch.int32)
        return *packed, cu_seqlens, cu_seqlens, longest, longest

    return Case(
        case=f"{name}: {len(seqlens)} sequences, H{heads}",
        dtype=dtype,
        head_dim=head_dim,
        seqlen=longest,
        causal=causal,
        direction=direction,
        make=make,
        others={
            peer: VARLEN_PEERS[peer] and functools.partial(VARLEN_PEERS[peer], causal=causal)
            for peer in (FORWARD_PEERS if direction == "fwd" else PEERS)
        },
        forward_flop=4 * heads * sum(n * n for n in seqlens) * head_dim / (2 if causal else 1),
        op="varlen_attention",
        kwargs={"causal": causal},
    )


def verdict(rows: list[Row]) -> list[str]:
    lines = []
    for direction in ("fwd", "bwd", "fwd+bwd"):
        held = [
            ratio(row, "fa2") for row in rows if row["direction"] == direction and row.get("fa2")
        ]
        lines += target(f"of varlen_attn, {direction}", held, mean=1.0)
    held = [
        row
        for row in rows
        if (row["backend"], row["direction"]) == ("sm90", "fwd") and row.get("fa3")
    ]
    heavy = [row for row in held if row["case"].startswith(f"{HEAVY_TAIL}:")]
    lines += target("sm90 of fa3, fwd", [ratio(row, "fa3") for row in held])
    ratios = [ratio(row, "fa3") for row in heavy]
    lines += target(f"sm90 of fa3, {HEAVY_TAIL}, fwd", ratios, worst=HEAVY_TAIL_WORST)
    return lines
