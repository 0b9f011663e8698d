"""`dense`: attention on CUDA with 16384 tokens and 2048 channels in every row, in TFLOP/s.

A forward counts 4 * B * H * S * S * D operations, half of it under a causal mask. bf16 (and fp16
with --fp16) runs against cuDNN, FlashAttention-2 and memory-efficient attention, a forward against
FlashAttention-3 too; fp32 against
PyTorch's two backends for it, under both settings of torch.backends.cuda.matmul.allow_tf32.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from attention_case import Case, heads_first, measure
from options import Options
from peers import PEERS
from report import Row, ratio, target

TOKENS, CHANNELS = 16384, 2048
HALF_PEERS = ("cudnn", "fa2", "efficient")
FORWARD_PEERS = ("fa3", *HALF_PEERS)
FLOAT_PEERS = ("efficient", "math")
# Of FlashAttention-2's rate: the least geometric mean, and the least row.
SM80_TARGETS = {
    ("fwd", 64): (1.0, 0.9),
    ("bwd", 64): (1.0, 0.9),
    ("fwd", 128): (1.0, 0.9),
    ("bwd", 128): (1.0, 0.9),
    ("fwd", 256): (1.0, 0),
    ("bwd", 256): (1.1, 0),
}
# Of the best peer's, at these lengths.
SM90_FORWARD = {"mean": 1.04, "worst": 0.98}
SM90_LENGTHS = (2048, 8192, 16384)


def rows(options: Options) -> Iterator[Row]:
    return measure(cases(options), options)


def cases(options: Options) -> Iterator[Case]:
    dtypes = (torch.bfloat16, torch.float16) if options.fp16 else (torch.bfloat16,)
    seqlens = [64] if options.quick else [512, 1024, 2048, 4096, 8192, 16384]
    for dtype, head_dim, seqlen, causal, direction in itertools.product(
        dtypes, (64, 128, 256), seqlens, (False, True), ("fwd", "bwd", "fwd+bwd")
    ):
        peers = FORWARD_PEERS if direction == "fwd" else HALF_PEERS
        yield _case(dtype, head_dim, seqlen, causal, direction, options.quick, peers)
    seqlens = [64] if options.quick else [1024, 2048, 4096, 8192]
    for head_dim, seqlen, causal, direction, tf32 in itertools.product(
        (64, 128), seqlens, (False, True), ("fwd", "bwd"), (False, True)
    ):
        shape = (head_dim, seqlen, causal, direction, options.quick)
        yield _case(torch.float32, *shape, FLOAT_PEERS, tf32)


def _case(dtype, head_dim, seqlen, causal, direction, quick, peers, tf32=None) -> Case:
    batch = (128 if quick else TOKENS) // seqlen
    heads = (256 if quick else CHANNELS) // head_dim
    setting = {None: "", False: ", no TF32", True: ", TF32"}[tf32]
    return Case(
        case=f"B{batch} H{heads}{setting}",
        dtype=dtype,
        head_dim=head_dim,
        seqlen=seqlen,
        causal=causal,
        direction=direction,
        make=lambda device: heads_first(batch, heads, seqlen, head_dim, dtype, device),
        others={
            name: PEERS[name] and functools.partial(PEERS[name], is_causal=causal) for name in peers
        },
        forward_flop=4 * batch * heads * seqlen * seqlen * head_dim / (2 if causal else 1),
        kwargs={"is_causal": causal},
        tf32=tf32,
    )


def verdict(rows: list[Row]) -> list[str]:
    lines = []
    for (direction, head_dim), (mean, worst) in SM80_TARGETS.items():
        held = [
            ratio(row, "fa2")
            for row in rows
            if (row["backend"], row["direction"], row["head_dim"]) == ("sm80", direction, head_dim)
            and row.get("fa2")
        ]
        lines += target(f"sm80 of fa2, d {head_dim} {direction}", held, mean, worst)
    for dtype in ("bfloat16", "float16"):
        held = [
            r
            for row in rows
            if (row["backend"], row["direction"], row["dtype"]) == ("sm90", "fwd", dtype)
            and row["seqlen"] in SM90_LENGTHS
            and (r := ratio(row)) is not None
        ]
        lines += target(f"sm90 of its best peer, {dtype} fwd", held, **SM90_FORWARD)
    for tf32, direction in itertools.product((False, True), ("fwd", "bwd")):
        held = [
            ratio(row) for row in rows if (row.get("tf32"), row["direction"]) == (tf32, direction)
        ]
        setting = "TF32" if tf32 else "no TF32"
        lines += target(f"fp32 of its best peer, {setting}, {direction}", held, mean=1.0)
    return lines
