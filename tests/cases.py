"""Shapes and options of attention calls as data, and the random tensors for them."""

import math
from dataclasses import dataclass, fields

import torch
from compare import Inputs, accumulator

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


@dataclass(frozen=True)
class Case:
    """One dense call. Only what differs from the defaults shows up in the test's id."""

    lq: int = 17
    lk: int | None = None  # None: lq
    batch: int = 2
    heads: int = 2
    kv_heads: int | None = None  # None: heads
    dim: int = 16
    dim_v: int | None = None  # None: dim
    dtype: str = "fp32"
    causal: bool = False
    align: str = "upper-left"
    window: tuple | None = None
    softcap: float = 0.0
    scale: float | None = None
    mask: str = (
        ""  # "bool:bhqk", "fp32:b11k", "own:qk": kind and the dims that are full, 1 where not
    )
    alibi: str = ""  # "h" or "bh"
    sinks: bool = False
    lse: bool = False  # the loss uses the LSE too
    size: float = 1.0  # standard deviation of q and k
    mean: float = 0.0  # mean of q, k and v

    @property
    def id(self):
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value != f.default:
                text = "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
                parts.append(f.name if value is True else f"{f.name}={text}")
        return ",".join(parts) or "default"

    @property
    def full_lk(self):
        return self.lq if self.lk is None else self.lk


def ids(cases):
    return [case.id for case in cases]


def draw(shape, dtype, device, size=1.0, mean=0.0):
    """Normal values. Every device gets the same ones, but where they are many."""
    where = device if math.prod(shape) > 2**20 else "cpu"
    x = torch.randn(shape, dtype=torch.float64, device=where)
    return (x * size + mean).to(dtype).to(device)


def generator_state(device):
    """The state of torch's default generator of a device."""
    return (torch.cuda if device == "cuda" else torch).get_rng_state()


def mask_shape(dims, case):
    full = {"b": case.batch, "h": case.heads, "q": case.lq, "k": case.full_lk, "1": 1}
    return tuple(full[letter] for letter in dims)


def make_mask(case, device):
    """The mask of a case: about two thirds of a boolean mask are True; an additive one has some
    -inf.
    """
    kind, dims = case.mask.split(":")
    shape = mask_shape(dims, case)
    if kind == "bool":
        return (torch.rand(shape) < 0.65).to(device)
    dtype = torch.float32 if kind == "fp32" else DTYPES[case.dtype]
    mask = draw(shape, dtype, device)
    hide = (torch.rand(shape) < 0.15).to(device)
    return mask.masked_fill(hide, float("-inf")) if dims.endswith("k") else mask


def make(case, device, grads=True):
    """Inputs of a case; every floating tensor requires grad unless grads is False."""
    dtype, lk = DTYPES[case.dtype], case.full_lk
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    dim_v = case.dim if case.dim_v is None else case.dim_v
    leaves = {
        "query": draw(
            (case.batch, case.heads, case.lq, case.dim), dtype, device, case.size, case.mean
        ),
        "key": draw((case.batch, kv_heads, lk, case.dim), dtype, device, case.size, case.mean),
        "value": draw((case.batch, kv_heads, lk, dim_v), dtype, device, 1.0, case.mean),
    }
    if case.mask:
        leaves["attn_mask"] = make_mask(case, device)
    if case.alibi:
        shape = (case.heads,) if case.alibi == "h" else (case.batch, case.heads)
        leaves["alibi_slopes"] = (torch.rand(shape) * 0.5 + 0.01).to(accumulator(dtype)).to(device)
    if case.sinks:
        leaves["sinks"] = draw((case.heads,), accumulator(dtype), device)
    options = {
        "is_causal": case.causal,
        "scale": case.scale,
        "enable_gqa": kv_heads != case.heads,
        "window": case.window,
        "softcap": case.softcap,
        "causal_align": case.align,
    }
    wanted = tuple(name for name, x in leaves.items() if grads and x.is_floating_point())
    return Inputs(leaves, options, wanted, use_lse=case.lse)


@dataclass(frozen=True)
class VarlenCase:
    """One packed call: the lengths of its sequences; the other fields are those of Case."""

    lens_q: tuple
    lens_k: tuple | None = None  # None: cu_seqlens_k is not given
    heads: int = 2
    kv_heads: int | None = None
    dim: int = 16
    dim_v: int | None = None
    dtype: str = "fp32"
    causal: bool = False
    window: tuple | None = None
    softcap: float = 0.0
    scale: float | None = None
    alibi: str = ""
    sinks: bool = False
    lse: bool = False
    extra: int = 0  # rows after the last sequence
    index: str = "int32"
    max_seqlens: bool = True  # give max_seqlen_q and max_seqlen_k

    @property
    def id(self):
        def short(value):
            return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)

        parts = [short(self.lens_q)]
        for f in fields(self)[1:]:
            value = getattr(self, f.name)
            if value != f.default:
                parts.append(f.name if value is True else f"{f.name}={short(value)}")
        return ",".join(parts)


def cumulative(lens, dtype=torch.int32, device="cpu"):
    return torch.tensor(
        [0, *torch.tensor(lens, dtype=torch.int64).cumsum(0).tolist()], dtype=dtype, device=device
    )


def make_varlen(case, device, grads=True):
    dtype, index = DTYPES[case.dtype], getattr(torch, case.index)
    lens_k = case.lens_q if case.lens_k is None else case.lens_k
    kv_heads = case.heads if case.kv_heads is None else case.kv_heads
    dim_v = case.dim if case.dim_v is None else case.dim_v
    tokens_q, tokens_k = sum(case.lens_q) + case.extra, sum(lens_k) + case.extra
    leaves = {
        "query": draw((tokens_q, case.heads, case.dim), dtype, device),
        "key": draw((tokens_k, kv_heads, case.dim), dtype, device),
        "value": draw((tokens_k, kv_heads, dim_v), dtype, device),
    }
    if case.alibi:
        shape = (case.heads,) if case.alibi == "h" else (len(case.lens_q), case.heads)
        leaves["alibi_slopes"] = (torch.rand(shape) * 0.5 + 0.01).to(accumulator(dtype)).to(device)
    if case.sinks:
        leaves["sinks"] = draw((case.heads,), accumulator(dtype), device)
    options = {
        "cu_seqlens_q": cumulative(case.lens_q, index, device),
        "causal": case.causal,
        "scale": case.scale,
        "window": case.window,
        "softcap": case.softcap,
    }
    if case.lens_k is not None:
        options["cu_seqlens_k"] = cumulative(case.lens_k, index, device)
    if case.max_seqlens:
        options.update(max_seqlen_q=max(case.lens_q), max_seqlen_k=max(lens_k))
    wanted = tuple(name for name, x in leaves.items() if grads and x.is_floating_point())
    return Inputs(leaves, options, wanted, use_lse=case.lse)
