"""`overhead`: host time of a call with a small tensor against SDPA's, in microseconds.

Three modes: forward without grad, forward with inputs that require grad, forward and backward. On
one thread, since waking others is not the call's own time. On CUDA the peer is SDPA with
FLASH_ATTENTION; the calls are enqueued and not waited for.
"""

import contextlib
import itertools
from collections.abc import Iterator

import torch
from peers import sdpa
from report import Row, geometric_mean, ratio
from timing import Budget, alternate, sm_mhz
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashbpt

# How many times SDPA's host time a call may take.
BARS = {"no grad": 1.5, "with grad": 2.0, "backward": 1.7}
DIRECTION = {"no grad": "fwd", "with grad": "fwd", "backward": "fwd+bwd"}
SHAPES = [(1, 2, 16, 32), (2, 4, 32, 32), (1, 8, 64, 64)]


def rows(quick: bool = False) -> Iterator[Row]:
    budget = Budget(
        seconds=0.02 if quick else 2.0,
        min_rounds=3 if quick else 100,
        max_rounds=5 if quick else 2000,
        calls=5 if quick else 20,
    )
    devices = ["cpu"]
    if torch.cuda.is_available():
        refused = cuda_refusal()
        if refused is None:
            devices.append("cuda")
        else:
            print(f"overhead: no rows for CUDA, flashbpt does not serve it here: {refused}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for device in devices:
            for shape, mode in itertools.product(SHAPES, BARS):
                yield _row(device, shape, mode, budget, packed=False)
            for mode in BARS:
                yield _row(device, SHAPES[1], mode, budget, packed=True)
    finally:
        torch.set_num_threads(threads)


def cuda_refusal() -> str | None:
    """Why flashbpt has no attention on CUDA, None where it has."""
    probe = torch.zeros(1, 2, 16, 32, device="cuda", dtype=torch.bfloat16)
    try:
        flashbpt.attention(probe, probe, probe)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    return None


def _row(device, shape, mode, budget, packed) -> Row:
    """One row; `packed` compares varlen_attention with SDPA on the same sequences, unpacked."""
    batch, heads, seqlen, head_dim = shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    grad = mode != "no grad"

    def draw(*size):
        return torch.randn(size, device=device, dtype=dtype, requires_grad=grad)

    dense = [draw(*shape) for _ in range(3)]
    candidates = {"sdpa": (sdpa, dense)}
    if packed:
        tokens = [draw(batch * seqlen, heads, head_dim) for _ in range(3)]
        cu_seqlens = torch.arange(batch + 1, device=device, dtype=torch.int32) * seqlen

        def varlen(q, k, v):
            return flashbpt.varlen_attention(q, k, v, cu_seqlens, None, seqlen, seqlen)

        candidates = {"flashbpt": (varlen, tokens), **candidates}
    else:
        candidates = {"flashbpt": (flashbpt.attention, dense), **candidates}

    calls = {name: _call(function, inputs, mode) for name, (function, inputs) in candidates.items()}
    flash = (
        sdpa_kernel(SDPBackend.FLASH_ATTENTION) if device == "cuda" else contextlib.nullcontext()
    )
    with flash, torch.set_grad_enabled(grad):
        seconds = alternate(calls, budget)
    peer = "fa2" if device == "cuda" else "sdpa"
    name = "varlen_attention" if packed else "attention"
    return {
        "case": f"{name} {'x'.join(map(str, shape))}, {mode}",
        "backend": flashbpt.which_kernel(*dense).kernel,
        "dtype": str(dtype).removeprefix("torch."),
        "head_dim": head_dim,
        "seqlen": seqlen,
        "causal": False,
        "direction": DIRECTION[mode],
        "unit": "us",
        "flashbpt": seconds["flashbpt"] * 1e6,
        peer: seconds["sdpa"] * 1e6,
        "threads": 1,
        "mode": mode,
        "bar": None if packed else BARS[mode],
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
            times = [1 / ratio(row) for row in held]
            worst = max(times)
            lines.append(
                f"bar: {backend}, {mode}, at most {bar} times SDPA's host time: mean "
                f"{geometric_mean(times):.2f}, worst {worst:.2f}, "
                f"{'met' if worst <= bar else 'MISSED'}"
            )
    return lines
