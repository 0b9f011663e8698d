"""The matrix products of the block at its own count of rows, against torch.mm of the same shapes.

As csrc/linear.cpp calls them: y = x W^T; dx = dy W, or added to what dx has; dW += dy^T x in fp32
for rows in bf16. torch.mm writes bf16 and adds to nothing. TFLOP/s count 2 * rows * out * in
operations. The results of one call of each are compared.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from attention_case import SECONDS, TOLERANCE, compare
from block_layers import Shape
from options import Options
from report import Row
from timing import Budget, alternate, rotated, sm_mhz

ROWS = 8192  # of a block, where the call does not say
DTYPE = torch.bfloat16
DIRECTION = {
    "forward": "fwd",
    "input gradient": "bwd",
    "input gradient added": "bwd",
    "weight gradient": "bwd",
}


@dataclass
class LinearCase:
    weight: str
    size: tuple[int, int]  # of the weight, [out, in]
    product: str  # a key of DIRECTION
    rows: int
    head_dim: int

    def row(self) -> Row:
        return {
            "case": f"{self.weight} {self.size[0]}x{self.size[1]}, {self.product}",
            "dtype": str(DTYPE).removeprefix("torch."),
            "head_dim": self.head_dim,
            "seqlen": self.rows,
            "causal": False,
            "direction": DIRECTION[self.product],
            "unit": "TFLOP/s",
            "kind": "linear",
        }

    def draw(self, device: str) -> tuple[torch.Tensor, ...]:
        """The two factors, and zeros that the block's call writes or adds to, and torch.mm's."""
        of_out, of_in = self.size

        def random(*size):
            return torch.randn(size, device=device, dtype=DTYPE)

        if self.product == "forward":
            factors = random(self.rows, of_in), random(of_out, of_in).t()
        elif self.product == "weight gradient":
            factors = random(self.rows, of_out).t(), random(self.rows, of_in)
        else:
            factors = random(self.rows, of_out), random(of_out, of_in)
        result = torch.zeros(len(factors[0]), factors[1].shape[1], device=device, dtype=DTYPE)
        ours = result.float() if self.product == "weight gradient" else torch.zeros_like(result)
        return *factors, ours, result

    @property
    def calls(self) -> dict[str, Callable[..., torch.Tensor]]:
        ours = {"weight gradient": _add_in_fp32, "input gradient added": _add}
        return {
            "flashbpt": lambda a, b, out, _: ours.get(self.product, _write)(a, b, out),
            "plain": lambda a, b, _, out: _write(a, b, out),
        }


def _write(a, b, out):
    return torch.mm(a, b, out=out)


def _add(a, b, out):
    return out.addmm_(a, b)


def _add_in_fp32(a, b, out):
    if not out.is_cuda:
        return out.addmm_(a.float(), b.float())
    return torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)


def linear_cases(shape: Shape, rows: int) -> Iterator[LinearCase]:
    square = "wq", (shape.heads * shape.head_dim, shape.hidden)
    up, down = ("w_up", (shape.ffn, shape.hidden)), ("w_down", (shape.hidden, shape.ffn))
    for product in DIRECTION:
        for weight, size in (square, up, down):
            if (weight, product) != ("w_down", "input gradient added"):  # it comes alone
                yield LinearCase(weight, size, product, rows, shape.head_dim)


def measure_linear(
    cases: Iterable[LinearCase], options: Options, device: str = "cuda"
) -> Iterator[Row]:
    for case in cases:
        if options.wants(case.row()):
            yield _measure(case, options, device)


def _measure(case: LinearCase, options: Options, device: str) -> Row:
    inputs = rotated(lambda: case.draw(device), device)
    calls = {
        name: call
        for name, call in case.calls.items()
        if name == "flashbpt" or name in options.wanted_peers({"plain": call})
    }
    results = {name: (call(*inputs[0]),) for name, call in calls.items()}
    compare(results, TOLERANCE[DTYPE], case.row())
    budget = Budget(seconds=SECONDS[device] * len(calls), max_rounds=200)
    if options.quick:
        budget = Budget(seconds=0.0, min_rounds=2)
    seconds = alternate(calls, budget, inputs, clock="events" if device == "cuda" else "host")
    flop = 2 * case.rows * case.size[0] * case.size[1]
    row = {**case.row(), "backend": "cublas" if device == "cuda" else "cpu"}
    row |= {name: flop / seconds[name] * 1e-12 for name in calls}
    return {**row, **({"sm_mhz": sm_mhz()} if device == "cuda" else {})}
