"""`dense`: attention on CUDA with 16384 tokens in every row, in TFLOP/s.

A forward counts 4 * B * H * S * S * D operations, half of it under a causal mask; where values have
a head dim of their own, 2 * B * H * S * S * (D + Dv); under a window, 4 * B * H * D for each pair
that it leaves. bf16 (and fp16 with --fp16) runs against cuDNN, FlashAttention-2 and
memory-efficient attention, a forward against FlashAttention-3 too; fp32 against PyTorch's two
backends for it, under both settings of torch.backends.cuda.matmul.allow_tf32. These rows have 2048
channels.

Forwards alone have further rows, which say their `kind`: "short" sequences, "gqa" where query heads
share those of keys, the "head_dim"s between the others, and a "window".
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
FASTEST = ("fa3", "cudnn")
SHORT_LENGTHS = (128, 256)
GQA_HEADS = ((32, 8), (64, 8))  # of queries, of keys
HEAD_DIMS = ((80, 80), (96, 96), (192, 128))  # of keys, of values; CHANNELS // 128 heads
WINDOW = (1024, 0)
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
SM90_KIND_WORST = 1.0  # of the peers of a kind


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
    for dtype in dtypes:
        yield from _forwards(dtype, options.quick)
    seqlens = [64] if options.quick else [1024, 2048, 4096, 8192]
    for head_dim, seqlen, causal, direction, tf32 in itertools.product(
        (64, 128), seqlens, (False, True), ("fwd", "bwd"), (False, True)
    ):
        shape = (head_dim, seqlen, causal, direction, options.quick)
        yield _case(torch.float32, *shape, FLOAT_PEERS, tf32)


def _forwards(dtype, quick) -> Iterator[Case]:
    """The rows of each kind."""
    masks = (False, True)
    short = (32,) if quick else SHORT_LENGTHS
    for head_dim, seqlen, causal in itertools.product((64, 128, 256), short, masks):
        shape = (dtype, head_dim, seqlen, causal, "fwd", quick)
        yield _case(*shape, FORWARD_PEERS, kind="short")
    seqlens = [64] if quick else [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
    for (heads, shared), seqlen, causal in itertools.product(GQA_HEADS, seqlens, masks):
        heads = (heads // 8, shared // 8) if quick else (heads, shared)
        shape = (dtype, 128, seqlen, causal, "fwd", quick)
        yield _case(*shape, FASTEST, kind="gqa", heads=heads)
    seqlens = [64] if quick else [2048, 8192]
    for (head_dim, values), seqlen, causal in itertools.product(HEAD_DIMS, seqlens, masks):
        heads = (256 if quick else CHANNELS) // 128
        shape = (dtype, head_dim, seqlen, causal, "fwd", quick)
        peers = (*FASTEST, "fa2")
        yield _case(*shape, peers, kind="head_dim", heads=(heads, heads), values=values)
    seqlen, window = (64, (8, 0)) if quick else (16384, WINDOW)
    yield _case(dtype, 128, seqlen, True, "fwd", quick, ("fa3",), kind="window", window=window)


def _case(
    dtype,
    head_dim,
    seqlen,
    causal,
    direction,
    quick,
    peers,
    tf32=None,
    kind=None,
    heads=None,
    values=None,
    window=None,
) -> Case:
    """heads: of queries and of keys; values: the head dim of these; window: (left, 0)."""
    batch = (128 if quick else TOKENS) // seqlen
    heads_q, heads_k = heads or [(256 if quick else CHANNELS) // head_dim] * 2
    values = values or head_dim
    gqa = heads_q != heads_k
    text = f"B{batch} H{heads_q}" + (f"/{heads_k}" if gqa else "")
    text += {None: "", False: ", no TF32", True: ", TF32"}[tf32]
    text += f", d {head_dim}, {values} values" if values != head_dim else ""
    text += f", window {window[0]}" if window else ""
    pairs = seqlen * seqlen / (2 if causal else 1)
    if window:
        pairs = sum(min(row, window[0]) + 1 for row in range(seqlen))
    kwargs = {"is_causal": causal}
    kwargs |= {"enable_gqa": True} if gqa else {}
    kwargs |= {"window": window} if window else {}

    def make(device):
        shapes = (heads_q, head_dim), (heads_k, head_dim), (heads_k, values)
        return [
            heads_first(batch, count, seqlen, dim, dtype, device, count=1)[0]
            for count, dim in shapes
        ]

    return Case(
        case=text,
        dtype=dtype,
        head_dim=head_dim,
        seqlen=seqlen,
        causal=causal,
        direction=direction,
        make=make,
        others={name: PEERS[name] and functools.partial(PEERS[name], **kwargs) for name in peers},
        forward_flop=2 * batch * heads_q * (head_dim + values) * pairs,
        kwargs=kwargs,
        tf32=tf32,
        extra={} if kind is None else {"kind": kind},
    )


def verdict(rows: list[Row]) -> list[str]:
    forwards = [row for row in rows if "kind" in row]
    rows = [row for row in rows if "kind" not in row]
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
    lines += _of_kinds(forwards)
    for tf32, direction in itertools.product((False, True), ("fwd", "bwd")):
        held = [
            ratio(row) for row in rows if (row.get("tf32"), row["direction"]) == (tf32, direction)
        ]
        setting = "TF32" if tf32 else "no TF32"
        lines += target(f"fp32 of its best peer, {setting}, {direction}", held, mean=1.0)
    return lines


def _of_kinds(rows: list[Row]) -> list[str]:
    """In each of its rows flashbpt against the best of the peers that the kind names."""
    lines = []
    for kind, what, peers in (
        ("short", "the best of fa3 and cudnn, short", FASTEST),
        ("gqa", "the best of fa3 and cudnn, shared heads", FASTEST),
        ("head_dim", "its best peer, other head dims", (*FASTEST, "fa2")),
        ("window", "fa3, window", ("fa3",)),
    ):
        held = []
        for row in rows:
            if (row["backend"], row["kind"]) == ("sm90", kind):
                ratios = [r for peer in peers if (r := ratio(row, peer)) is not None]
                held += [min(ratios)] if ratios else []
        lines += target(f"sm90 of {what}, fwd", held, worst=SM90_KIND_WORST)
    return lines
