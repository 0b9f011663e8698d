"""What a transformer layer takes on the CPU: bytes kept for its backward, and bytes at the peak."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

MIB = 2**20


def measure(
    layers: dict[str, nn.Module],
    width: int,
    tables: Callable[[int], tuple[Tensor, Tensor]],
    longest: int,
) -> dict[str, dict[str, list[int]]]:
    """Measure each layer's forward and backward over one fp32 sequence of up to `longest` tokens.

    `tables` gives the rotary tables for a length. Returns {"tokens": lengths}, and by the name of
    each layer {"kept": bytes, "peak": bytes} at each length.
    """
    lengths = [longest // n for n in (16, 8, 4, 2, 1)]
    result = {"tokens": lengths}
    for name, layer in layers.items():
        pairs = [
            bytes_of(layer, torch.randn(1, tokens, width, requires_grad=True), *tables(tokens))
            for tokens in (lengths[0], *lengths)  # the first run makes the gradients of the weights
        ]
        result[name] = dict(zip(("kept", "peak"), map(list, zip(*pairs[1:]))))
    return result


def bytes_of(layer: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[int, int]:
    """Bytes alive between forward and backward beside x and y, and the most ever during both.

    Counts every tensor that torch's CPU allocator hands out, those inside C++ ops too.
    """
    grad = torch.ones_like(x)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no word about GPUs that are not there
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        y = layer(x, cos=cos, sin=sin)
        with record_function("forward is done"):
            pass
        y.backward(grad)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    alive = peak = kept = 0
    for event in sorted(events, key=lambda event: event.get("ts", 0)):
        if event.get("name") == "[memory]":
            alive += event["args"]["Bytes"]
            peak = max(peak, alive)
        elif event.get("name") == "forward is done" and event["ph"] == "X":
            kept = alive - y.nbytes
    return kept, peak


def plot_memory(memory: dict[str, dict[str, list[int]]], path: Path) -> None:
    """Draw kept and peak bytes over the tokens, and print the longest."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="tokens", ylabel="MiB a layer", xscale="log", yscale="log")
    axes.set_xscale("log", base=2)
    tokens = memory["tokens"]
    layers = {name: memory[name] for name in memory if name != "tokens"}
    for (name, series), color in zip(layers.items(), ("tab:orange", "tab:blue")):
        for what, style in (("peak", "o-"), ("kept", "o--")):
            label = {"peak": "peak", "kept": "kept for the backward"}[what]
            mib = [n / MIB for n in series[what]]
            axes.plot(tokens, mib, style, ms=4, color=color, label=f"{name}: {label}")
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    for name, series in layers.items():
        print(
            f"a {name} layer over {tokens[-1]:,} tokens in fp32 keeps "
            f"{series['kept'][-1] / MIB:.0f} MiB for its backward, {series['peak'][-1] / MIB:.0f} "
            "at the peak"
        )
