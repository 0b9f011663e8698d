"""One or more layers of a transformer, forward and backward: what runs, and how it is measured.

All candidates run over the same input, weights and gradient of the output, in turns. A step is the
forward of all layers and the backward, which adds to gradients that the weights have already. It is
timed by CUDA events or, on the CPU, by the host's clock, and on CUDA it leaves the rows in GB, of
1e9 bytes: `kept` is what a further layer leaves allocated until the backward, from the allocator
after the forwards of the first layer and of the last; `peak` is the most that is allocated above
x, the weights and their gradients, the gradient of the output included; `predicted` is what
flashbpt.block_memory says of flashbpt's own. The first step of each is the warm-up, and its results
are compared.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_case import compare
from block_layers import (
    FFNS,
    LAYERS,
    FfnWeights,
    Rope,
    Shape,
    block_config,
    draw_weights,
    make_rope,
)
from options import Options
from report import Row
from timing import Budget, alternate, sm_mhz
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashbpt

SECONDS, MIN_ROUNDS, MAX_ROUNDS = 4.0, 2, 10  # of a row
TOLERANCE = 0.1  # of gradients through several layers in bf16
# Rows, the first: there attention is not yet a mean of so many keys that it is small.
COMPARED = 256


class CudaMemory:
    """Bytes of torch's allocator."""

    @staticmethod
    def reset_peak() -> None:
        torch.cuda.reset_peak_memory_stats()

    @staticmethod
    def allocated() -> int:
        return torch.cuda.memory_allocated()

    @staticmethod
    def peak() -> int:
        return torch.cuda.max_memory_allocated()


@dataclass
class BlockCase:
    """One measurement: a row of its time and rows of its memory."""

    shape: Shape
    tokens: int
    layers: int = 1
    ffn: bool = False  # the FFN alone
    peers: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # peers whose kept memory alone is measured, by a forward
    once: bool = False  # one step and no warm-up, for those of many seconds
    bars: dict[str, dict[str, float]] = field(default_factory=dict)  # keys of a row, by its kind

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("time", "peak" if self.layers == 1 else "kept")

    def row(self, kind: str) -> Row:
        what = "FFN" if self.ffn else f"{self.layers} layer{'s' * (self.layers > 1)}"
        what = {"time": what, "peak": f"peak of {what}", "kept": "kept a layer"}[kind]
        return {
            "case": f"{self.shape.name}, {what}",
            "dtype": "bfloat16",
            "head_dim": self.shape.head_dim,
            "seqlen": self.tokens,
            "causal": not self.ffn,
            "direction": "fwd+bwd",
            "unit": "ms" if kind == "time" else "GB",
            "kind": kind,
            "layers": self.layers,
            **self.bars.get(kind, {}),
        }

    def predicted(self, kind: str) -> dict[str, float]:
        """What flashbpt says of its own memory, in GB."""
        if self.ffn:
            return {}
        s = self.shape
        config = block_config(s.heads, s.kv_heads)
        sizes = {"hidden": s.hidden, "ffn": s.ffn, "head_dim": s.head_dim}
        memory = flashbpt.block_memory(config, self.tokens, **sizes)
        return {"predicted": getattr(memory, kind) * 1e-9}

    def functions(self, names: Iterable[str]) -> dict[str, Callable | None]:
        found = FFNS if self.ffn else LAYERS
        return {name: found[name] for name in names}

    def draw(self, device: str) -> "Inputs":
        random = functools.partial(torch.randn, 1, self.tokens, self.shape.hidden, device=device)
        weights = [draw_weights(self.shape, device) for _ in range(self.layers)]
        if self.ffn:
            weights = [FfnWeights(w.w_gate, w.w_up, w.w_down) for w in weights]
        return Inputs(
            x=random(dtype=torch.bfloat16).requires_grad_(),
            weights=weights,
            rope=make_rope(self.tokens, self.shape.head_dim, device),
            grad=random(dtype=torch.bfloat16),
        )


@dataclass
class Inputs:
    """What the candidates of a row share."""

    x: torch.Tensor
    weights: list[tuple[torch.Tensor, ...]]  # of each layer
    rope: Rope
    grad: torch.Tensor


class Stack:
    """The layers of one candidate."""

    def __init__(self, layer: Callable, inputs: Inputs, memory: Any | None):
        self.layer, self.inputs, self.memory = layer, inputs, memory
        self.results: tuple[torch.Tensor, ...] | None = None  # of the first step
        self.kept = self.peak = None  # bytes

    def forward(self) -> torch.Tensor:
        x, allocated = self.inputs.x, []
        for weights in self.inputs.weights:
            x = self.layer(x, weights, self.inputs.rope)
            if self.memory is not None:
                allocated.append(self.memory.allocated())
        if len(allocated) > 1:
            self.kept = (allocated[-1] - allocated[0]) / (len(allocated) - 1)
        return x

    def step(self) -> None:
        x, grad, memory = self.inputs.x, self.inputs.grad, self.memory
        x.grad = None
        if self.results is None:
            self._zero_gradients()
        if memory is not None:
            memory.reset_peak()
            before = memory.allocated()
        y = self.forward()
        y.backward(grad)
        if memory is not None:
            self.peak = memory.peak() - before + grad.nbytes
        if self.results is None:
            self.results = self._first_rows(y)

    def _zero_gradients(self) -> None:
        for weights in self.inputs.weights:
            for w in weights:
                w.grad.zero_()

    def _first_rows(self, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Of the output, and of the gradients of x and of the first layer's weights."""
        of_weights = (w.grad for w in self.inputs.weights[0])
        return tuple(
            t[:COMPARED].clone() for t in (y.detach()[0], self.inputs.x.grad[0], *of_weights)
        )


def measure(
    cases: Iterable[BlockCase], options: Options, device: str = "cuda", memory: Any | None = None
) -> Iterator[Row]:
    for case in cases:
        kinds = [kind for kind in case.kinds if options.wants(case.row(kind))]
        if kinds:
            with _cudnn(device):
                yield from _measure(case, kinds, options, device, memory)


def _cudnn(device: str) -> contextlib.AbstractContextManager:
    """Inside it the attention of `plain` is cuDNN's, in the recomputation of a backward too."""
    if device != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def _measure(case, kinds, options, device, memory) -> Iterator[Row]:
    if device == "cuda":
        torch.cuda.empty_cache()
    inputs = case.draw(device)
    names = ["flashbpt", *options.wanted_peers(dict.fromkeys(case.peers))]
    stacks = {
        name: Stack(layer, inputs, memory)
        for name, layer in case.functions(names).items()
        if layer is not None
    }
    seconds = _seconds(case, stacks, options, device)
    clock = {"sm_mhz": sm_mhz()} if device == "cuda" else {}
    compare({n: s.results for n, s in stacks.items() if n in seconds}, TOLERANCE, case.row("time"))
    shared = {"backend": backend(case, device), **clock}
    if "time" in kinds:
        values = {name: s * 1e3 for name, s in seconds.items()}
        yield {**case.row("time"), **shared, **{name: values.get(name) for name in names}}
    for kind in kinds:
        if kind != "time" and memory is not None:
            held = {name: getattr(stacks[name], kind) for name in seconds}
            if kind == "kept":
                further = options.wanted_peers(dict.fromkeys(case.kept))
                held |= {n: _kept(f, inputs, memory) for n, f in case.functions(further).items()}
            measured = {name: b * 1e-9 for name, b in held.items() if b is not None}
            asked = [name for name in LAYERS if name in names or name in held]
            values = {name: measured.get(name) for name in asked}
            yield {**case.row(kind), **shared, **values, **case.predicted(kind)}


def _seconds(case, stacks: dict[str, Stack], options, device) -> dict[str, float]:
    """Of a step of each candidate that does not refuse it."""
    if case.once:
        return {name: _once(stack, device) for name, stack in stacks.items()}
    budget = Budget(SECONDS, MIN_ROUNDS, MAX_ROUNDS)
    if options.quick:
        budget = Budget(seconds=0.0, min_rounds=1)
    steps = {name: stack.step for name, stack in stacks.items()}
    seconds = alternate(steps, budget, clock="events" if device == "cuda" else "host")
    return {name: s for name, s in seconds.items() if s is not None}


def _once(stack: Stack, device: str) -> float:
    started = time.perf_counter()
    stack.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _kept(layer: Callable | None, inputs: Inputs, memory: Any) -> float | None:
    """By a forward alone."""
    if layer is None:
        return None
    stack = Stack(layer, inputs, memory)
    try:
        stack.forward()
    except RuntimeError:
        return None
    return stack.kept


def backend(case: BlockCase, device: str) -> str | None:
    """Of attention in such a layer."""
    shape, rows = case.shape, min(case.tokens, COMPARED)
    query, key = (
        torch.empty(1, heads, rows, shape.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (shape.heads, shape.kv_heads)
    )
    return flashbpt.which_kernel(query, key, key, is_causal=True, enable_gqa=True).kernel
