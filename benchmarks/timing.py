"""Medians of several functions timed against each other in one process.

Calls alternate between the candidates, so that a clock that drifts, a neighbour on the machine or a
cache that warms meets all of them alike; who goes first changes from round to round.

A sample by the host's clock is `time.perf_counter_ns` around a number of calls: the time of a call
on the CPU, the host's part of it on CUDA, where nothing is waited for inside a sample. A sample by
events is a pair of CUDA events around the calls, enqueued behind a kernel that keeps the GPU busy
while the host gets ahead, so that the launches are not what is measured; give `inputs` as a list
from `rotated`, larger together than the L2 cache, so that no call finds its inputs there.
"""

import contextlib
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# What the GPU spins before a sample, in clock cycles: half a millisecond, in which the host
# enqueues a forward and a backward through autograd.
SPIN_CYCLES = 1_000_000
NVML_CLOCK_SM = 1


@dataclass
class Budget:
    """How much to measure: rounds until `seconds` are spent, but within the two bounds."""

    seconds: float = 1.0
    min_rounds: int = 3
    max_rounds: int = 1000
    calls: int = 1  # calls in one sample, for functions of microseconds
    warm_up: float = 0.0  # seconds that all candidates together run on a GPU before the rounds


def host_budget(quick: bool) -> Budget:
    """For the host's time of calls of microseconds."""
    if quick:
        return Budget(seconds=0.02, min_rounds=3, max_rounds=5, calls=5)
    return Budget(seconds=2.0, min_rounds=100, max_rounds=2000, calls=20)


def alternate(
    candidates: dict[str, Callable[..., Any]],
    budget: Budget,
    inputs: Sequence[tuple] = ((),),
    clock: str = "host",
) -> dict[str, float | None]:
    """Median seconds a call of each candidate, called as `candidate(*inputs[i])`, i rotating.

    The first call of each with each of the inputs is the warm-up and is not counted, nor is what
    the budget adds to it. A peer that refuses it, by a RuntimeError (also for want of memory), is
    None in the result; "flashbpt" may not refuse.
    """
    sample = {"host": _sample_host, "events": _sample_events}[clock]
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    turn = _Turn(inputs)
    order = [name for name, function in candidates.items() if _accepts(name, function, inputs)]
    with _no_gc():
        if budget.warm_up:
            _warm_up([candidates[name] for name in order], inputs, budget.warm_up)
        started, rounds = time.perf_counter(), 0
        while rounds < budget.min_rounds or (
            rounds < budget.max_rounds and time.perf_counter() - started < budget.seconds
        ):
            for name in order:
                samples[name].append(sample(candidates[name], turn.take(budget.calls)))
            order = order[1:] + order[:1]
            rounds += 1
    return {name: statistics.median(s) / budget.calls if s else None for name, s in samples.items()}


class _Turn:
    """Sets of inputs, over and over."""

    def __init__(self, inputs: Sequence[tuple]):
        self.inputs, self.at = list(inputs), 0

    def take(self, count: int) -> list[tuple]:
        taken = [self.inputs[(self.at + i) % len(self.inputs)] for i in range(count)]
        self.at += count
        return taken


def _accepts(name: str, function: Callable[..., Any], inputs: Sequence[tuple]) -> bool:
    try:
        for one in inputs:
            function(*one)
    except RuntimeError:
        if name == "flashbpt":
            raise
        return False
    return True


def _warm_up(functions: list[Callable[..., Any]], inputs: Sequence[tuple], seconds: float) -> None:
    """Calls them in turns for that long, so that the GPU's clock is that of steady work."""
    torch.cuda.synchronize()
    turn, started = _Turn(inputs), time.perf_counter()
    while time.perf_counter() - started < seconds:
        for function in functions:
            function(*turn.take(1)[0])
        torch.cuda.synchronize()


def _sample_host(function: Callable[..., Any], batch: list[tuple]) -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    started = time.perf_counter_ns()
    for inputs in batch:
        function(*inputs)
    return (time.perf_counter_ns() - started) * 1e-9


def _sample_events(function: Callable[..., Any], batch: list[tuple]) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    start.record()
    for inputs in batch:
        function(*inputs)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


@contextlib.contextmanager
def _no_gc():
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def rotated(make: Callable[[], tuple], device: str) -> list[tuple]:
    """Enough sets of inputs from `make` to fill the L2 cache of a GPU twice; one on the CPU."""
    first = make()
    size = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    return [first] + [make() for _ in range(copies(size, device) - 1)]


def copies(size: int, device: str) -> int:
    """How many inputs of `size` bytes fill the L2 cache of a GPU twice; one on the CPU."""
    if device != "cuda":
        return 1
    l2 = torch.cuda.get_device_properties().L2_cache_size
    return 1 + min(64, (2 * l2 - 1) // max(size, 1))


def sm_mhz() -> int | None:
    """The present SM clock of torch's GPU, None where NVML does not say.

    By the library itself: nvidia-smi takes so long that the clock has changed.
    """
    gpu = torch.cuda.get_device_properties()
    bus = f"{gpu.pci_domain_id:08x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0".encode()
    handle, clock = ctypes.c_void_p(), ctypes.c_uint()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    errors = (
        nvml.nvmlInit_v2()
        or nvml.nvmlDeviceGetHandleByPciBusId_v2(bus, ctypes.byref(handle))
        or nvml.nvmlDeviceGetClockInfo(handle, NVML_CLOCK_SM, ctypes.byref(clock))
    )
    return None if errors else clock.value
