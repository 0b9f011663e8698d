"""`block`: transformer layers, forward and backward, in ms and GB, on CUDA; bf16, causal, B 1.

One layer and four of a 7B model (hidden 4096, 32 heads, FFN 11008) at 16384, 65536 and 131072
tokens, against the same layer by autograd and recomputing less and more of it, as block_layers.py
has them; then one layer of an 8B model (8 key heads, FFN 14336). Time, what a further layer keeps
and the peak of one layer, as block_case.py measures them. Besides: flashbpt.blockwise_ffn against
the FFN by autograd, and the matrix products of the block against torch.mm, in TFLOP/s.

`--big` adds the 8B layer at 524288 tokens, one step without a warm-up. On a CPU only --quick has
rows, those of time.
"""

from collections.abc import Iterator

import torch
from block_case import BlockCase, CudaMemory, measure
from block_layers import Shape
from linear_case import ROWS, LinearCase, linear_cases, measure_linear
from options import Options
from report import Row, bar_line, ratio, target

LLAMA_7B = Shape("7B", hidden=4096, heads=32, kv_heads=32, ffn=11008)
LLAMA_8B = Shape("8B", hidden=4096, heads=32, kv_heads=8, ffn=14336)
# Of the time of plain_flashbpt, at most, by tokens.
TIME = {16384: 1.22, 65536: 1.12, 131072: 1.08}
KEPT = 9  # times less than plain_flashbpt, at least
PEAK = {131072: 13.5}  # GB, at most
FFN_TOKENS = 65536
LONG, BIG = 131072, 524288  # tokens of the 8B layer
LINEAR = 0.95  # of the rate of torch.mm

PEERS = "plain plain_flashbpt compile checkpoint checkpoint_chunked selective".split()
# At four layers: what the target is about, and the strongest that PyTorch has.
PEERS_OF_FOUR = "plain_flashbpt", "selective"
FORWARD_ONLY = "plain", "compile", "checkpoint", "checkpoint_chunked"
QUICK = 1024  # times fewer tokens
QUICK_SHAPES = {
    "7B": Shape("7B", hidden=64, heads=4, kv_heads=4, ffn=96, head_dim=16),
    "8B": Shape("8B", hidden=64, heads=4, kv_heads=2, ffn=96, head_dim=16),
}


def rows(options: Options) -> Iterator[Row]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        return
    yield from measure_linear(products(options), options, device)
    memory = CudaMemory() if device == "cuda" else None
    yield from measure(cases(options), options, device, memory)


def products(options: Options) -> Iterator[LinearCase]:
    return linear_cases(_shape(LLAMA_7B, options), 64 if options.quick else ROWS)


def cases(options: Options) -> Iterator[BlockCase]:
    """The short ones first."""
    scale = QUICK if options.quick else 1
    of_7b, of_8b = (_shape(shape, options) for shape in (LLAMA_7B, LLAMA_8B))
    yield BlockCase(of_7b, FFN_TOKENS // scale, ffn=True, peers=("plain",))
    for tokens, most in TIME.items():
        time = {"plain_flashbpt_time": most}
        yield BlockCase(
            of_7b,
            tokens // scale,
            peers=PEERS,
            bars={"time": time, "peak": {"most": PEAK[tokens]} if tokens in PEAK else {}},
        )
        yield BlockCase(
            of_7b,
            tokens // scale,
            layers=4,
            peers=PEERS_OF_FOUR,
            kept=FORWARD_ONLY,
            bars={"time": time},
        )
    yield BlockCase(of_8b, LONG // scale, peers=("plain_flashbpt",))
    if options.big:
        yield BlockCase(of_8b, BIG // scale, once=True)


def _shape(shape: Shape, options: Options) -> Shape:
    return QUICK_SHAPES[shape.name] if options.quick else shape


def verdict(rows: list[Row]) -> list[str]:
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in ("time", "kept", "peak")}
    lines = []
    for row in of["time"]:
        if row.get("plain_flashbpt") and "plain_flashbpt_time" in row:
            what = f"time of plain_flashbpt, {row['case']}, {row['seqlen']} tokens"
            times = [1 / ratio(row, "plain_flashbpt")]
            lines += bar_line(what, times, row["plain_flashbpt_time"])
    less = [r for row in of["kept"] if (r := ratio(row, "plain_flashbpt")) is not None]
    lines += target("plain_flashbpt's kept memory over flashbpt's", less, worst=KEPT)
    for row in of["peak"]:
        if "most" in row:
            what = f"GB, {row['case']}, {row['seqlen']} tokens"
            lines += bar_line(what, [row["flashbpt"]], row["most"])
    for kind in ("kept", "peak"):
        of_measured = [r["predicted"] / r["flashbpt"] for r in of[kind] if "predicted" in r]
        lines += bar_line(f"predicted {kind} memory over the measured", of_measured, None)
    linear = [r for row in rows if row["kind"] == "linear" and (r := ratio(row)) is not None]
    return lines + target("matrix products of torch.mm", linear, worst=LINEAR)
