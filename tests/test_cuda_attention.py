"""The CUDA kernels over head dims, dtypes, layouts and features: values and gradients against the
reference, in shapes of a few tiles.

A kernel has rows of tiles (`flashbpt._C.kernels()`), and taller ones where there are blocks enough
for the whole GPU: FULL is a call that has.
"""

import re
from dataclasses import replace

import pytest
import reference
import torch
from cases import DTYPES, Case, VarlenCase, draw, ids, make, make_mask, make_varlen
from compare import as_truth, assert_close, check, evaluate, largest, with_cotangents
from op_calls import with_dropout
from test_attention import FEATURES, LENGTHS
from test_attention_layout import LAYOUTS

import flashbpt

pytestmark = pytest.mark.gpu

INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def sm80_alone():
    """Some of these calls would go to faster kernels of other GPUs."""
    with flashbpt.use_backend("sm80"):
        yield


LOW_AND_HIGH = ["bf16", "fp16", "fp32"]

FULL = {"batch": 4, "heads": 36, "kv_heads": 12}
PLAIN = Case(lq=130, lk=150, batch=1, heads=2, causal=True, align="lower-right")
EVERYTHING = Case(
    lq=90,
    lk=200,
    batch=1,
    heads=3,
    kv_heads=1,
    align="lower-right",
    window=(120, 60),
    softcap=6.0,
    alibi="bh",
    sinks=True,
    size=1.5,
    lse=True,
)
# What leaves the scores as they are has rows of its own.
MASKED = replace(PLAIN, causal=False, window=(110, 40), mask="bool:1hqk", sinks=True, lse=True)
# Every tile of the kernels, its edges, heads wider than the widest tile; key and value widths that
# ask for different ones.
HEAD_DIMS = [
    *((d, d) for d in (1, 7, 33, 40, 64, 65, 80, 96, 100, 128, 129, 192, 200, 256, 257, 320, 512)),
    (1, 512),
    (512, 1),
    (64, 128),
    (128, 64),
    (40, 65),
    (192, 128),
    (7, 200),
    (257, 33),
    (256, 320),
    (320, 256),
]


# A mask and the dropout beside every other feature.
MASKS = [("fp32:b1qk", 0.2), ("bool:1hqk", 0.0), ("bool:b11k", 0.3)]


def check_everything(case, device, masks=MASKS):
    for mask, p in masks:
        inputs = make(replace(case, mask=mask), device)
        check(inputs, with_dropout(inputs, p, flashbpt.attention))


# Calls that between them reach every row of the kernels, with 99 KB of shared memory and without.
ROWS = [
    replace(case, dim=dim, dtype=dtype)
    for dtype in LOW_AND_HIGH
    for dim in (64, 128, 256, 512)
    for case in (
        PLAIN,
        MASKED,
        EVERYTHING,
        replace(PLAIN, **FULL),
        replace(MASKED, **FULL),
        replace(MASKED, mask="own:11qk", **FULL),
        replace(EVERYTHING, lq=130, **FULL),
    )
]


def kernels_of(case, device):
    """The rows that serve a case, forward and backward."""
    dtype, kv_heads = DTYPES[case.dtype], case.kv_heads or case.heads
    q = torch.empty(case.batch, case.heads, case.lq, case.dim, dtype=dtype, device=device)
    k = torch.empty(case.batch, kv_heads, case.lk, case.dim, dtype=dtype, device=device)
    options = {"is_causal": case.causal, "enable_gqa": True, "softcap": case.softcap}
    if case.mask:
        options["attn_mask"] = make_mask(case, device)
    return {
        flashbpt.which_kernel(q, k, k, **options, dropout_p=p, backward=b).config
        for b in (False, True)
        for p in (0.0, 0.2)
    }


def test_every_row_is_reached(cuda):
    reached = set()
    for limit in (0, 101376):
        flashbpt._C.limit_shared_memory(limit)
        try:
            reached = reached.union(*(kernels_of(case, cuda) for case in ROWS))
        finally:
            flashbpt._C.limit_shared_memory(0)
    rows = {k["name"] for k in flashbpt._C.kernels() if k["backend"] == "sm80"}
    assert reached == {n for n in rows if re.match("attn_(fwd|bwd)_(bf16|fp16|fp32)_", n)}


def check_row(case, device):
    if case.causal:
        check(make(case, device))
    elif case.mask:
        for p in (0.0, 0.2):
            inputs = make(case, device)
            check(inputs, with_dropout(inputs, p, flashbpt.attention))
    else:
        check_everything(case, device)


@pytest.mark.parametrize("case", ROWS, ids=ids(ROWS))
def test_rows(cuda, case):
    check_row(case, cuda)


@pytest.mark.parametrize("case", ROWS, ids=ids(ROWS))
def test_rows_for_small_shared_memory(cuda, small_rows, case):
    check_row(case, cuda)


@pytest.mark.parametrize("dtype", LOW_AND_HIGH)
@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS, ids=lambda n: str(n))
def test_head_dims(cuda, dim, dim_v, dtype):
    check(make(replace(PLAIN, dim=dim, dim_v=dim_v, dtype=dtype), cuda))
    masks = [MASKS[(dim + LOW_AND_HIGH.index(dtype)) % 3]]
    check_everything(replace(EVERYTHING, dim=dim, dim_v=dim_v, dtype=dtype), cuda, masks)


@pytest.mark.parametrize("dtype", LOW_AND_HIGH)
@pytest.mark.parametrize("dim, dim_v", [(40, 40), (100, 100), (100, 33), (200, 256), (320, 320)])
def test_head_dims_on_a_full_gpu(cuda, dim, dim_v, dtype):
    case = replace(PLAIN, dim=dim, dim_v=dim_v, dtype=dtype, **FULL)
    check(make(case, cuda))
    inputs = make(replace(case, causal=False, mask="own:b1qk", sinks=True), cuda)
    check(inputs, with_dropout(inputs, 0.2, flashbpt.attention))


KERNELS = [("bf16", 128), ("fp16", 64), ("bf16", 256), ("fp32", 96)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_lengths(cuda, dtype, dim, causal):
    for lq, lk in LENGTHS[causal::2]:
        check(make(Case(lq=lq, lk=lk, dim=dim, dtype=dtype, causal=causal, batch=1), cuda))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_lengths_on_a_full_gpu(cuda, dtype, dim, causal):
    for lq, lk in ((65, 64), (127, 129), (129, 65)):
        case = Case(lq=lq, lk=lk, dim=dim, dtype=dtype, causal=causal, lse=True, **FULL)
        check(make(case, cuda))


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("number", range(len(FEATURES)), ids=ids(FEATURES))
def test_one_feature_at_a_time(cuda, number, dtype, dim):
    check(make(replace(FEATURES[number], dim=dim, dim_v=None, dtype=dtype), cuda))


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize(
    "window", [(0, 0), (3, 0), (-1, 40), (70, 70), (16, 300), (200, -1)], ids=str
)
def test_windows(cuda, window, dtype, dim):
    for align, lq, lk in (("upper-left", 257, 300), ("lower-right", 300, 180)):
        case = Case(lq=lq, lk=lk, dim=dim, dtype=dtype, window=window, align=align, batch=1)
        check(make(case, cuda))
        check(make(replace(case, causal=True, lse=True), cuda))
    if window[0] > 3:
        check(make(Case(lq=200, lk=140, dim=dim, dtype=dtype, window=window, **FULL), cuda))


@pytest.mark.parametrize("lq", [1, 5, 16, 70])
@pytest.mark.parametrize("ratio", [1, 2, 3, 8, 16])
def test_grouped_queries(cuda, ratio, lq):
    """With rows of a group in one tile or not: every term that differs from head to head."""
    case = Case(lq=lq, lk=333, heads=2 * ratio, kv_heads=2, dim=64, dtype="bf16", lse=True)
    check(make(replace(case, causal=True, align="lower-right"), cuda))
    check(make(replace(case, alibi="bh", sinks=True, mask="bool:1hqk"), cuda))
    check(make(replace(case, kv_heads=1, mask="own:bhqk", window=(200, 9), dtype="fp16"), cuda))
    inputs = make(replace(case, kv_heads=1, dtype="fp32", alibi="h"), cuda)
    check(inputs, with_dropout(inputs, 0.3, flashbpt.attention))


# --- packed
LONG = (129, 5, 0, 300, 64, 1)
PACKED = [
    VarlenCase(LONG, causal=True, heads=4, kv_heads=2, lse=True),
    VarlenCase(LONG, (70, 0, 9, 257, 1, 200), heads=6, kv_heads=2, dim_v=40, sinks=True, lse=True),
    VarlenCase(LONG, (140, 33, 5, 90, 64, 1), causal=True, window=(60, -1), softcap=6.0, extra=9),
    VarlenCase(LONG, (140, 33, 5, 90, 64, 1), alibi="bh", index="int64", max_seqlens=False),
    VarlenCase(LONG * 3, heads=48, kv_heads=16, causal=True, lse=True),
    VarlenCase(LONG * 3, heads=48, kv_heads=16, window=(90, 30), alibi="h", sinks=True),
]


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("number", range(len(PACKED)), ids=ids(PACKED))
def test_packed(cuda, number, dtype, dim):
    case = replace(PACKED[number], dtype=dtype, dim=dim)
    check(make_varlen(case, cuda), flashbpt.varlen_attention, reference.varlen_attention)


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_packed_tokens_of_no_sequence(cuda, dtype, dim, deterministic):
    """NaN after the last sequence, in inputs and grad_out, and all over one in the middle."""
    case = VarlenCase((33, 20, 64), (70, 9, 40), extra=70, dtype=dtype, dim=dim, causal=True)
    inputs = make_varlen(case, cuda, grads=False)
    leaves = {**inputs.leaves, "grad": draw((187, 2, dim), inputs.dtype, cuda)}
    parts = {n: ((33, 53), 117) if n in ("query", "grad") else ((70, 79), 119) for n in leaves}
    results = []
    for poison in (False, True):
        x = {n: t.clone() for n, t in leaves.items()}
        for name, ((begin, end), last) in parts.items():
            x[name][last:] = NAN if poison else 0.0
            if poison and name != "grad":
                x[name][begin:end] = NAN
        grad, given = x.pop("grad"), [t.requires_grad_() for t in x.values()]
        out = flashbpt.varlen_attention(*given, **inputs.options, deterministic=deterministic)
        results.append([out.detach(), *torch.autograd.grad(out, given, grad)])
    names = ("query", "query", "key", "value")
    for name, clean, got in zip(names, *results, strict=True):
        (begin, end), last = parts[name]
        assert torch.isnan(got[begin:end]).any() and (got[last:] == 0).all()
        got[begin:end] = clean[begin:end]
        assert_close(name, got, clean, ulps=2)


# --- layouts
def placed(x, offset, gap):
    """x with its first element `offset` elements past an aligned address, and `gap` elements of NaN
    between rows.
    """
    batch, heads, rows, dim = x.shape
    pitch = dim + gap
    wide = torch.full((offset + batch * heads * rows * pitch,), NAN, dtype=x.dtype, device=x.device)
    view = wide.as_strided(x.shape, (heads * rows * pitch, rows * pitch, pitch, 1), offset)
    view.copy_(x)
    return view


PLACES = [(0, 0), (1, 0), (2, 0), (4, 0), (8, 0), (0, 1), (0, 2), (0, 4), (0, 8), (3, 5)]


def check_layouts(case, device, layouts):
    """layouts: functions of a tensor, for query, key, value and grad_out."""
    inputs = make(case, device)
    grad_out = draw((*inputs.leaves["query"].shape[:3], case.dim), inputs.dtype, device)
    for name, layout in zip(("query", "key", "value"), layouts, strict=False):
        inputs.leaves[name] = layout(inputs.leaves[name])
    inputs.grad_out = layouts[3](grad_out)
    check(inputs)


@pytest.mark.parametrize("dtype", LOW_AND_HIGH)
@pytest.mark.parametrize("turn", range(len(PLACES)))
def test_alignment(cuda, turn, dtype):
    """Each tensor in turn at every offset and pitch, so that every mix of alignments comes up."""

    def layout(i):
        return lambda x: placed(x, *PLACES[(turn * (i + 1) + i) % len(PLACES)])

    for dim in (33, 40, 128):
        case = Case(lq=70, lk=75, batch=2, dim=dim, dtype=dtype, causal=True, lse=True)
        check_layouts(case, cuda, [layout(i) for i in range(4)])
    if dtype == "bf16":
        case = Case(lq=130, dim=64, dtype=dtype, **FULL)
        check_layouts(case, cuda, [layout(i) for i in range(4)])


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("turn", range(len(LAYOUTS)))
def test_strides(cuda, turn, dtype):
    """Any stride of any tensor, the last one included."""
    every = list(LAYOUTS.values())
    for dim in (40, 128):
        case = Case(lq=70, lk=75, heads=4, kv_heads=2, dim=dim, dtype=dtype)
        check_layouts(case, cuda, [every[(turn + i) % len(every)] for i in range(4)])


def test_layout_of_the_gradient_of_the_lse(cuda):
    for change in (
        lambda x: x[:, :1].expand(x.shape),
        lambda x: x[..., :1].expand(x.shape),
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: x.repeat_interleave(2, -1)[..., ::2],
    ):
        inputs = make(Case(lq=70, lk=75, heads=3, dim=64, dtype="bf16", sinks=True), cuda)
        inputs.grad_lse = change(torch.randn(2, 3, 70, device=cuda))
        check(inputs)


# --- scores far from zero
@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("largest_at", ["front", "back", "random"])
def test_running_maximum(cuda, largest_at, dtype, dim):
    order = {
        "front": torch.linspace(5, 0, 700),
        "back": torch.linspace(0, 5, 700),
        "random": torch.rand(700) * 5,
    }[largest_at]
    for fill in [{"batch": 1}] + [FULL] * (dim == 128):
        inputs = make(Case(lq=66, lk=700, dim=dim, dtype=dtype, lse=True, **fill), cuda)
        x, low = inputs.leaves, inputs.dtype
        x["query"] = (x["query"].abs() + 0.1).mul(4 / dim**0.5).to(low)
        x["key"] = (x["key"].abs() * order.to(cuda)[:, None]).to(low)
        check(inputs)


def far_mask(value, dtype):
    """Rows wholly, mostly, partly and nowhere at `value`; in a row with -inf too."""
    mask = torch.zeros(70, 300, dtype=dtype)
    mask[3], mask[66], mask[20:40, :250], mask[40:50, 7:] = value, value, value, value
    mask[66, 64:] = -INF
    return mask


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("value", [1e4, -1e4, -INF, "min"])
def test_additive_masks_far_from_zero(cuda, value, dtype, dim):
    for mask_dtype in {DTYPES[dtype], torch.float32}:
        number = torch.finfo(mask_dtype).min if value == "min" else value
        inputs = make(Case(lq=70, lk=300, batch=1, dim=dim, dtype=dtype, lse=True), cuda)
        inputs.leaves["attn_mask"] = far_mask(number, mask_dtype).to(cuda)
        inputs.grads += ("attn_mask",)
        check(inputs)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("size", [6.0, 10.0])
def test_peaked_softmax(cuda, size, dtype):
    got = check(make(Case(lq=90, lk=140, dim=64, size=size, dtype=dtype), cuda))
    assert all(torch.isfinite(got[n]).all() for n in ("dquery", "dkey", "dvalue"))


# --- fp32 products
@pytest.fixture(params=["allow_tf32", "set_float32_matmul_precision"])
def allow_tf32(request):
    def allow(on):
        if request.param == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = on
        else:
            torch.set_float32_matmul_precision("high" if on else "highest")

    yield allow
    allow(False)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tf32_where_torch_allows_it(cuda, allow_tf32, dim):
    """At most twice the error of the composition under the same setting, and in its class."""
    inputs = make(Case(lq=256, lk=256, batch=1, dim=dim, causal=True), cuda)
    exact = evaluate(reference.attention, replace(inputs, grads=()), convert=as_truth)
    inputs = with_cotangents(inputs, exact)
    exact = evaluate(reference.attention, inputs, convert=as_truth)
    names = ("out", "lse", "dquery", "dkey", "dvalue")
    errors = []
    for on in (False, True):
        allow_tf32(on)
        got = check(inputs)
        errors.append({n: largest(got[n].double().cpu() - exact[n]) for n in names})
    for name in names:
        assert errors[1][name] > 20 * errors[0][name], f"{name}: {errors[0]}, TF32 {errors[1]}"
