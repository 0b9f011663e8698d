"""`masks`: attention with a mask, a bias or dropout on CUDA; B 2 and 2048 channels in every row.

Against PyTorch's memory-efficient attention, the only one that takes a mask, in TFLOP/s: a forward
counts 4 * B * H * S * S * D operations, half of it where the mask is causal in content. Against
flashbpt itself without what the row measures, in microseconds, with a bar on how many times longer
it may take. Softcap, sinks and ALiBi have such rows alone, forwards of the longest sequences.
"""

import functools
import itertools
from collections.abc import Iterator

import torch
from attention_case import Case, heads_first, measure
from options import Options
from peers import PEERS
from report import Row, bar_line, ratio, target

from flashbpt import attention

BATCH, CHANNELS = 2, 2048
DROPOUT = 0.1
TIMES_EFFICIENT = 1.8
SOFTCAP = 30.0
# What flashbpt runs as beside itself, and the times of that which the row may take, by direction;
# of a forward most are fractions of the rate.
BARS = {
    "flag": {"fwd": 1 / 0.85, "fwd+bwd": 1.25},
    "unmasked": {"fwd": 0.60, "fwd+bwd": 0.62},
    "no_dropout": {"fwd": 1 / 0.75, "fwd+bwd": 1.35},
    "no_bias": {"fwd": 1 / 0.6},
    "no_softcap": {"fwd": 1 / 0.85},
    "no_sinks": {"fwd": 1 / 0.95},
    "no_alibi": {"fwd": 1 / 0.95},
    "no_bias_grad": {"fwd+bwd": None},
}


def rows(options: Options) -> Iterator[Row]:
    return measure(cases(options), options)


def cases(options: Options) -> Iterator[Case]:
    dtypes = (torch.bfloat16, torch.float16) if options.fp16 else (torch.bfloat16,)
    seqlens = [128] if options.quick else [2048, 8192]
    channels = 256 if options.quick else CHANNELS
    for dtype, head_dim, seqlen, direction in itertools.product(
        dtypes, (64, 128), seqlens, ("fwd", "fwd+bwd")
    ):
        heads = channels // head_dim
        case = functools.partial(_case, heads, seqlen, head_dim, dtype, direction)
        yield case("bias (1,H,S,S)", _bias, "efficient", _efficient)
        yield case("random half (1,1,S,S)", _random, "efficient", _efficient)
        yield case("causal in content (1,1,S,S)", _causal, "efficient", _efficient)
        yield case("causal in content (1,1,S,S)", _causal, "flag", _flag)
        yield case("half the keys (B,1,1,S)", _half, "unmasked", _unmasked, same_result=False)
        if head_dim == 128:
            kwargs = {"dropout_p": DROPOUT}
            other = ("no_dropout", _unmasked)
            yield case(f"dropout {DROPOUT}", None, *other, kwargs=kwargs, same_result=False)
        if (direction, head_dim, seqlen) == ("fwd", 128, seqlens[-1]):
            yield case("bias (1,H,S,S)", _bias, "no_bias", _unmasked, same_result=False)
            for name, other, kwargs in (
                (f"softcap {SOFTCAP:g}", "no_softcap", {"softcap": SOFTCAP}),
                ("sinks (H,)", "no_sinks", {"sinks": functools.partial(_sinks, heads)}),
                ("ALiBi (H,)", "no_alibi", {"alibi_slopes": functools.partial(_slopes, heads)}),
            ):
                yield case(name, None, other, _unmasked, kwargs=kwargs, same_result=False)
        if direction == "fwd+bwd":
            name = "bias (1,H,S,S) with gradient"
            yield case(name, _bias, "efficient", _efficient, leaves=4)
            other = ("no_bias_grad", _detached)
            yield case(name, _bias, *other, leaves=4, same_result=False)


def _bias(heads, seqlen, dtype, device):
    return torch.randn(1, heads, seqlen, seqlen, device=device, dtype=dtype)


def _random(heads, seqlen, dtype, device):
    return torch.rand(1, 1, seqlen, seqlen, device=device) < 0.5


def _causal(heads, seqlen, dtype, device):
    return torch.ones(1, 1, seqlen, seqlen, device=device, dtype=torch.bool).tril()


def _half(heads, seqlen, dtype, device):
    visible = torch.arange(seqlen, device=device) < seqlen // 2
    return visible.expand(BATCH, 1, 1, seqlen).contiguous()


def _sinks(heads, device):
    return torch.randn(heads, device=device)


def _slopes(heads, device):
    """From 2 ** (-8 / heads) down to 2 ** -8, a geometric series."""
    return torch.exp2(-8 * torch.arange(1, heads + 1, device=device) / heads)


def _efficient(query, key, value, mask):
    return PEERS["efficient"](query, key, value, attn_mask=mask)


def _flag(query, key, value, mask):
    return attention(query, key, value, is_causal=True)


def _unmasked(query, key, value, mask=None):
    return attention(query, key, value)


def _detached(query, key, value, mask):
    return attention(query, key, value, mask.detach())


def _case(heads, seqlen, head_dim, dtype, direction, name, mask, other, function, **rest) -> Case:
    def make(device):
        inputs = heads_first(BATCH, heads, seqlen, head_dim, dtype, device)
        return inputs if mask is None else [*inputs, mask(heads, seqlen, dtype, device)]

    causal = mask is _causal
    flop = 4 * BATCH * heads * seqlen * seqlen * head_dim / (2 if causal else 1)
    if other == "efficient":
        rest |= {"forward_flop": flop}
        function = PEERS["efficient"] and function
    else:
        rest |= {"extra": {"bar": BARS[other][direction]}}
    return Case(
        case=f"{name}, B{BATCH} H{heads}",
        dtype=dtype,
        head_dim=head_dim,
        seqlen=seqlen,
        causal=causal,
        direction=direction,
        make=make,
        others={other: function},
        **rest,
    )


def verdict(rows: list[Row]) -> list[str]:
    lines = []
    for direction in ("fwd", "fwd+bwd"):
        held = [row for row in rows if row["direction"] == direction]
        ratios = [ratio(row) for row in held if row.get("efficient")]
        lines += target(f"of efficient, {direction}", ratios, worst=TIMES_EFFICIENT)
        for other, bars in BARS.items():
            times = [1 / ratio(row) for row in held if row.get(other)]
            lines += bar_line(f"time of {other}, {direction}", times, bars.get(direction))
    return lines
