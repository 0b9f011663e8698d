"""`overhead`: host time of a call with a small tensor against SDPA's, in microseconds.

Three modes: forward without grad, forward with inputs that require grad, forward and backward. On
one thread, since waking others is not the call's own time. On CUDA the peer is FlashAttention-2,
by SDPA or by varlen_attn; calls are enqueued and waited for after each sample, outside of it.
"""

import itertools
from collections.abc import Iterator

import torch
from options import Options
from peers import VARLEN_PEERS, flash_sdpa, sdpa
from report import Row, bar_line, ratio
from timing import alternate, host_budget, sm_mhz

import flashbpt

# How many times SDPA's host time a call may take.
BARS = {"no grad": 1.5, "with grad": 2.0, "backward": 1.7}
DIRECTION = {"no grad": "fwd", "with grad": "fwd", "backward": "fwd+bwd"}
SHAPES = [(1, 2, 16, 32), (2, 4, 32, 32), (1, 8, 64, 64)]


def rows(options: Options) -> Iterator[Row]:
    budget = host_budget(options.quick)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            refused = refusal(device)
            if refused is not None:
                print(f"overhead: no rows for {device}, flashbpt does not serve it here: {refused}")
                continue
            dense = itertools.product([False], SHAPES, BARS)
            packed = itertools.product([True], SHAPES[1:2], BARS)
            for case in (*dense, *packed):
                row = _row(device, *case)
                if options.wants(row):
                    yield row | _measure(device, *case, budget)
    finally:
        torch.set_num_threads(threads)


def refusal(device: str) -> str | None:
    """Why flashbpt has no attention on this device, None where it has."""
    probe = torch.zeros(1, 2, 16, 32, device=device, dtype=torch.bfloat16)
    try:
        flashbpt.attention(probe, probe, probe)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


def _dtype(device) -> torch.dtype:
    return torch.float32 if device == "cpu" else torch.bfloat16


def _row(device, packed, shape, mode) -> Row:
    name = "varlen_attention" if packed else "attention"
    return {
        "case": f"{name} {'x'.join(map(str, shape))}, {mode}",
        "dtype": str(_dtype(device)).removeprefix("torch."),
        "head_dim": shape[3],
        "seqlen": shape[2],
        "causal": False,
        "direction": DIRECTION[mode],
        "unit": "us",
        "threads": 1,
        "mode": mode,
        "bar": None if packed else BARS[mode],
    }


def _measure(device, packed, shape, mode, budget) -> Row:
    """The times of a row; `packed` runs sequences of one length through varlen_attention."""
    batch, heads, seqlen, head_dim = shape
    grad = mode != "no grad"

    def draw(*size):
        return torch.randn(size, device=device, dtype=_dtype(device), requires_grad=grad)

    dense = [draw(*shape) for _ in range(3)]
    candidates = {"flashbpt": (flashbpt.attention, dense), "peer": (sdpa, dense)}
    if packed:
        tokens = [draw(batch * seqlen, heads, head_dim) for _ in range(3)]
        cu_seqlens = torch.arange(batch + 1, device=device, dtype=torch.int32) * seqlen

        def varlen(attention):
            return lambda *qkv: attention(*qkv, cu_seqlens, cu_seqlens, seqlen, seqlen)

        candidates["flashbpt"] = varlen(flashbpt.varlen_attention), tokens
        if device == "cuda":
            candidates["peer"] = varlen(VARLEN_PEERS["fa2"]), tokens
    calls = {name: _call(function, inputs, mode) for name, (function, inputs) in candidates.items()}
    with flash_sdpa(device), torch.set_grad_enabled(grad):
        seconds = alternate(calls, budget)
    return {
        "backend": flashbpt.which_kernel(*dense).kernel,
        "flashbpt": seconds["flashbpt"] * 1e6,
        "fa2" if device == "cuda" else "sdpa": seconds["peer"] * 1e6,
        **({"sm_mhz": sm_mhz()} if device == "cuda" else {}),
    }


def _call(function, inputs, mode):
    if mode != "backward":
        return lambda: function(*inputs)
    grad_out = torch.ones_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), inputs, grad_out)


def verdict(rows: list[Row]) -> list[str]:
    lines = []
    for backend in sorted({row["backend"] for row in rows}):
        for mode, bar in BARS.items():
            held = [r for r in rows if (r["backend"], r["mode"], r["bar"]) == (backend, mode, bar)]
            what = f"host time of {backend}'s attention over SDPA's, {mode}"
            lines += bar_line(what, [1 / ratio(row) for row in held], bar)
    return lines
