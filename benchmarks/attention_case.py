"""One row of attention: what runs in it, and how it is measured.

All candidates get the same arguments and run in the same direction, in turns, timed by CUDA events
or, on the CPU, by the host's clock. `fwd` runs without grad; `fwd+bwd` is the call and
torch.autograd.grad of its output; `bwd` is that torch.autograd.grad alone, on a graph that one
forward before the timing has left. A backward counts 2.5 times the operations of its forward.
After the timing the results are compared.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from options import Options
from report import Row
from timing import Budget, alternate, rotated, sm_mhz

import flashbpt

SECONDS = {"cuda": 0.08, "cpu": 0.5}  # a candidate
WARM_UP = {"cuda": 0.1, "cpu": 0.0}  # all candidates together
FORWARDS = {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}  # operations, in those of a forward
# Of the results: |flashbpt - peer| / |peer| over the whole tensor.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}
TOLERANCE_TF32 = 5e-3


@dataclass
class Case:
    """One row before it is measured."""

    case: str
    dtype: torch.dtype
    head_dim: int
    seqlen: int
    causal: bool
    direction: str
    make: Callable[[str], tuple]  # device -> the arguments of one call, query, key and value first
    others: dict[str, Callable | None]  # what runs beside flashbpt, called with these arguments
    forward_flop: float | None = None  # None: the row is in microseconds
    op: str = "attention"  # flashbpt's function
    # And what it takes besides; a tensor as a function of the device.
    kwargs: dict[str, Any] = field(default_factory=dict)
    leaves: int = 3  # the first arguments, which get gradients
    same_result: bool = True  # as the others
    tf32: bool | None = None  # torch's precision setting, where it matters
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of the row

    def row(self) -> Row:
        return {
            "case": self.case,
            "dtype": str(self.dtype).removeprefix("torch."),
            "head_dim": self.head_dim,
            "seqlen": self.seqlen,
            "causal": self.causal,
            "direction": self.direction,
            **({} if self.tf32 is None else {"tf32": self.tf32}),
            **self.extra,
        }

    def draw(self, device: str) -> tuple:
        """Arguments of one call, before them the gradient of its output."""
        arguments = self.make(device)
        for t in arguments[: self.leaves]:
            t.requires_grad_(self.direction != "fwd")
        query, _, value, *_ = arguments
        return torch.randn_like(query[..., : value.size(-1)]), *arguments

    def keywords(self, device: str) -> dict[str, Any]:
        return {name: v(device) if callable(v) else v for name, v in self.kwargs.items()}


def heads_first(batch, heads, seqlen, head_dim, dtype, device, count=3) -> list[torch.Tensor]:
    """[batch, heads, seqlen, head_dim] tensors, laid out in memory as projections leave them."""
    shape = (batch, seqlen, heads, head_dim)
    return [torch.randn(shape, device=device, dtype=dtype).transpose(1, 2) for _ in range(count)]


def measure(cases: Iterable[Case], options: Options, device: str = "cuda") -> Iterator[Row]:
    if device == "cuda" and not torch.cuda.is_available():
        return
    allowed = torch.backends.cuda.matmul.allow_tf32
    for case in cases:
        if options.wants(case.row()):
            torch.backends.cuda.matmul.allow_tf32 = bool(case.tf32)
            try:
                yield _measure(case, options, device)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = allowed


def _measure(case: Case, options: Options, device: str) -> Row:
    torch.cuda.empty_cache()
    others = options.wanted_peers(case.others)
    functions = {name: function for name, function in others.items() if function is not None}
    keywords = case.keywords(device)
    functions["flashbpt"] = functools.partial(getattr(flashbpt, case.op), **keywords)
    calls = {name: _call(f, case.direction, case.leaves) for name, f in functions.items()}
    inputs = rotated(functools.partial(case.draw, device), device)
    budget = Budget(seconds=SECONDS[device] * len(calls), max_rounds=200, warm_up=WARM_UP[device])
    if options.quick:
        budget = Budget(seconds=0.0, min_rounds=2)
    seconds = alternate(calls, budget, inputs, clock="events" if device == "cuda" else "host")
    clock = {"sm_mhz": sm_mhz()} if device == "cuda" else {}
    if case.same_result:
        tolerance = TOLERANCE_TF32 if case.tf32 else TOLERANCE[case.dtype]
        results = {name: calls[name](*inputs[0]) for name, s in seconds.items() if s}
        compare(results, tolerance, case.row())
    choice = flashbpt.which_kernel(
        *inputs[0][1:], op=case.op, backward=case.direction == "bwd", **keywords
    )
    unit, value = "us", lambda t: t * 1e6
    if case.forward_flop is not None:
        flop = case.forward_flop * FORWARDS[case.direction]
        unit, value = "TFLOP/s", lambda t: flop / t * 1e-12
    values = {name: value(t) for name, t in seconds.items() if t is not None}
    row = {**case.row(), "backend": choice.kernel, "unit": unit, "flashbpt": values["flashbpt"]}
    return {**row, **{name: values.get(name) for name in others}, **clock}


def _call(function: Callable, direction: str, leaves: int) -> Callable[..., tuple]:
    """`function` in that direction, called with the gradient of its output before its arguments."""
    graphs: dict[int, torch.Tensor] = {}  # outputs, by the gradient that belongs to them

    def forward(grad, *arguments):
        with torch.no_grad():
            return (function(*arguments),)

    def backward(grad, *arguments):
        if id(grad) not in graphs:  # in the warm-up
            graphs[id(grad)] = function(*arguments)
        return gradients(graphs[id(grad)], arguments, grad, retain_graph=True)

    def both(grad, *arguments):
        out = function(*arguments)
        return out, *gradients(out, arguments, grad)

    def gradients(out, arguments, grad, **options):
        return torch.autograd.grad(out, arguments[:leaves], grad, allow_unused=True, **options)

    return {"fwd": forward, "bwd": backward, "fwd+bwd": both}[direction]


def compare(results: dict[str, tuple], tolerance: float, row: Row) -> None:
    """Raises AssertionError where a peer's tensors are further from flashbpt's."""
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    for name, result in results.items():
        for ours, theirs in zip(results["flashbpt"], result):
            error = float(norm(ours.detach() - theirs.detach()) / norm(theirs.detach()))
            if not error <= tolerance:
                raise AssertionError(f"flashbpt is {error:.1e} from {name} in {row}")
