"""A small call of every CUDA kernel: what `make sanitize` runs under compute-sanitizer."""

from dataclasses import replace

import paged_cases
import pytest
import reference
import test_append_paged_kv
import torch
from block_cases import leaves, make_weights
from cases import Case, VarlenCase, make, make_varlen
from compare import as_truth, evaluate, with_cotangents
from op_calls import backward, backward_accumulate, forward

import flashbpt
from flashbpt.backend import BACKENDS
from flashbpt.blockwise import _numbers

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("states", [1, 3, 9])
@pytest.mark.parametrize("dim", [1, 40, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_merge_states(cuda, dtype, dim, states):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [torch.randn(3, 5, dim).to(dtype) for _ in range(states)]
    lses = [torch.randn(3, 5, dtype=acc) for _ in range(states)]
    lses[-1][1] = -torch.inf
    expected = flashbpt.merge_attention_states(outs, lses)
    seen = flashbpt.merge_attention_states([t.to(cuda) for t in outs], [t.to(cuda) for t in lses])
    for on_gpu, on_cpu in zip(seen, expected):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu)


def run(inputs, fn=flashbpt.attention, truth=reference.attention, backend="sm80"):
    """Forward and backward, roughly right: other tests hold them to the roundings."""
    tolerance = 0.05
    exact = evaluate(truth, replace(inputs, grads=()), convert=as_truth)
    inputs = with_cotangents(inputs, exact)
    exact = evaluate(truth, inputs, convert=as_truth)
    with flashbpt.use_backend(backend):
        got = evaluate(fn, inputs)
    for name, right in exact.items():
        if name != "graph":
            scale = max(1.0, float(right.nan_to_num(0, 0, 0).abs().max()))
            torch.testing.assert_close(
                got[name].double().cpu(), right, rtol=0, atol=tolerance * scale, msg=name
            )


KERNELS = [(dtype, dim) for dtype in ("bf16", "fp16", "fp32") for dim in (64, 128, 256, 320)]
kernels = pytest.mark.parametrize("dtype, dim", KERNELS)

PLAIN = Case(lq=70, lk=80, batch=1, kv_heads=1, causal=True, lse=True)
TERMS = Case(lq=66, lk=70, batch=1, softcap=5.0, alibi="h", sinks=True, window=(60, 20))
FULL = {"heads": 136, "kv_heads": 2}  # blocks enough for taller tiles


def has_taller_tiles(dtype, dim):
    """Wider heads go through the same kernels in slices, so their full calls would add nothing."""
    return dim <= (128 if dtype == "fp32" else 256)


@kernels
def test_attention(cuda, dtype, dim):
    run(make(replace(PLAIN, dtype=dtype, dim=dim, dim_v=dim - 7), cuda))
    if has_taller_tiles(dtype, dim):
        run(make(replace(PLAIN, lq=66, lk=20, dtype=dtype, dim=dim, **FULL), cuda))


@kernels
@pytest.mark.parametrize("mask", ["bool:bhqk", "own:11qk", "fp32:b11k"])
def test_terms(cuda, mask, dtype, dim):
    run(make(replace(TERMS, dtype=dtype, dim=dim, mask=mask), cuda))
    if mask == "bool:bhqk" and has_taller_tiles(dtype, dim):
        run(make(replace(TERMS, lk=20, dtype=dtype, dim=dim, mask="bool:1h1k", **FULL), cuda))


@kernels
@pytest.mark.parametrize("mask", ["bool:1hqk", "own:1hqk"])
def test_masks(cuda, mask, dtype, dim):
    case = replace(PLAIN, causal=False, dtype=dtype, dim=dim, mask=mask)
    run(make(case, cuda))
    if has_taller_tiles(dtype, dim):
        run(make(replace(case, lq=66, lk=20, **FULL), cuda))


@kernels
def test_few_rows(cuda, dtype, dim):
    """Keys that are split over blocks, then queries."""
    run(make(Case(lq=2, lk=600, batch=1, dim=dim, dtype=dtype, sinks=True), cuda))
    run(make(Case(lq=600, lk=20, batch=1, heads=1, dim=dim, dtype=dtype), cuda))


@kernels
def test_packed(cuda, dtype, dim):
    for case in (
        VarlenCase((33, 0, 66), causal=True, kv_heads=1, extra=5, lse=True),
        VarlenCase((5, 70), (40, 3), alibi="bh", sinks=True, index="int64"),
    ):
        inputs = make_varlen(replace(case, dtype=dtype, dim=dim), cuda)
        run(inputs, flashbpt.varlen_attention, reference.varlen_attention)


@kernels
def test_small_rows(cuda, small_rows, dtype, dim):
    run(make(replace(PLAIN, dtype=dtype, dim=dim), cuda))
    run(make(replace(TERMS, dtype=dtype, dim=dim, mask="fp32:1hqk"), cuda))


@pytest.mark.parametrize("dim", [64, 128])
def test_tf32(cuda, dim):
    torch.set_float32_matmul_precision("high")
    try:
        run(make(replace(PLAIN, dim=dim), cuda))
        run(make(replace(TERMS, dim=dim, mask="own:11qk"), cuda))
    finally:
        torch.set_float32_matmul_precision("highest")


@kernels
def test_dropout_in_order(cuda, dtype, dim):
    """A drawn state, its mask by the op, and the deterministic backward, into given tensors too."""
    state = torch.ops.flashbpt.draw_rng_state(torch.zeros(1, device=cuda), 4)
    assert torch.ops.flashbpt.dropout_mask(state, 0.5, [1, 2, 70, 40], [0] * 5).any()
    x = make(Case(lq=70, lk=150, batch=1, dtype=dtype, dim=dim), cuda, grads=False).leaves
    call = {"q": x["query"], "k": x["key"], "v": x["value"], "rng_state": state, "dropout_p": 0.5}
    call["backend"] = BACKENDS["sm80"]
    saved = forward(**call)
    grad = torch.randn_like(saved[0])
    got = backward(grad, None, *saved, deterministic=True, **call)
    sums = [torch.zeros(t.shape, device=cuda) for t in (call["k"], call["v"])]
    backward_accumulate(grad, None, *saved, *sums, deterministic=True, **call)
    for a, b in zip(got[1:3], sums, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.02, atol=0.02)


HOPPER = [(dtype, dim) for dtype in ("bf16", "fp16") for dim in (64, 96, 128, 192, 256)]


@pytest.mark.parametrize("dtype, dim", HOPPER)
def test_hopper(cuda, dtype, dim):
    """Its tiles, more of them than multiprocessors, then every term of the scores."""
    case = replace(PLAIN, dtype=dtype, dim=dim, dim_v=128 if dim == 192 else dim)
    run(make(replace(case, lq=200, lk=333), cuda), backend="sm90")
    if dim == 64:  # fewer keys are another kernel's
        many = replace(case, lk=1100, heads=140, kv_heads=2, causal=False)
        run(make(many, cuda), backend="sm90")
    run(make(replace(case, heads=140, kv_heads=2, causal=False), cuda), backend="sm90")
    terms = replace(case, causal=False, sinks=True, lq=66, lk=144)
    run(make(replace(terms, mask="bool:bhqk", window=(60, 20)), cuda), backend="sm90")
    run(make(replace(terms, mask="own:11qk", softcap=5.0, alibi="h"), cuda), backend="sm90")


@pytest.mark.parametrize("dtype, dim", HOPPER)
def test_hopper_packed(cuda, dtype, dim):
    case = VarlenCase((33, 0, 266), causal=True, kv_heads=1, extra=5, lse=True, dtype=dtype)
    case = replace(case, dim=dim, dim_v=128 if dim == 192 else dim)
    for more in ({}, {"alibi": "bh", "window": (90, 9)}):
        inputs = make_varlen(replace(case, **more), cuda)
        run(inputs, flashbpt.varlen_attention, reference.varlen_attention, backend="sm90")


@pytest.mark.parametrize("dtype, dim", HOPPER)
def test_hopper_paged(cuda, dtype, dim):
    """Boxes for all four copying warps, for fewer, and rows that are gathered."""
    case = paged_cases.Case(lens=(170, 40, 0), rows=(66, 40, 0), dtype=dtype, dim=dim, kv_heads=1)
    with flashbpt.use_backend("sm90"):
        for page_size in (8, 64, 5):
            paged_cases.check(replace(case, page_size=page_size, sinks=True), cuda)
        paged_cases.check(replace(case, table="token", window=(50, -1)), cuda)


@pytest.mark.parametrize("dtype, dim", HOPPER)
def test_hopper_dropout(cuda, dtype, dim):
    x = make(replace(PLAIN, lq=200, lk=333, dtype=dtype, dim=dim), cuda, grads=False).leaves
    state = torch.ops.flashbpt.draw_rng_state(torch.zeros(1, device=cuda), 4)
    call = {"q": x["query"], "k": x["key"], "v": x["value"], "rng_state": state, "dropout_p": 0.5}
    call["backend"] = BACKENDS["sm90"]
    assert forward(**call)[0].isfinite().all()
    q, k, v = (torch.randn(300, 2, dim, device=cuda).to(x["query"].dtype) for _ in range(3))
    offsets = torch.tensor([0, 33, 33, 270], dtype=torch.int32, device=cuda)
    with flashbpt.use_backend("sm90"):
        out = flashbpt.varlen_attention(q, k, v, offsets, causal=True, dropout_p=0.5)
    assert out.isfinite().all()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_paged_decode(cuda, dtype, dim):
    """Requests split over blocks, several rows a request, and a tile of more than 16 rows."""
    case = paged_cases.Case(lens=(300, 5, 0, 33), dim=dim, dtype=dtype)
    paged_cases.check(replace(case, rows=(3, 1, 0, 2), page_size=5, sinks=True), cuda)
    paged_cases.check(replace(case, heads=32, kv_heads=1, softcap=5.0, tree=True), cuda)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_paged_decode_small_rows(cuda, small_rows, dtype, dim):
    paged_cases.check(paged_cases.Case(lens=(300, 5), dim=dim, dtype=dtype), cuda)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("cache", ["e4m3", "e5m2"])
def test_paged_decode_fp8(cuda, cache, dim):
    case = paged_cases.Case(lens=(130, 5), dim=dim, dtype="bf16", cache=cache, scales="heads")
    paged_cases.check(case, cuda)
    paged_cases.check(replace(case, heads=32, kv_heads=1), cuda)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_paged_prefill(cuda, dtype, dim):
    case = paged_cases.Case(lens=(70, 40), rows=(66, 40), heads=3, kv_heads=1, dim=dim, dtype=dtype)
    with flashbpt.use_backend("sm80"):
        paged_cases.check(case, cuda)
        paged_cases.check(replace(case, softcap=5.0, alibi="h", sinks=True, page_size=5), cuda)
        paged_cases.check(replace(case, lens=(600, 40), rows=(70, 1)), cuda)  # split keys


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_append(cuda, dtype):
    test_append_paged_kv.test_append(cuda, dtype, "hnd", torch.int32)
    test_append_paged_kv.test_append_rotates_keys(cuda, dtype, 20, True)
    test_append_paged_kv.test_append_to_fp8(cuda, "e4m3", "heads")


@pytest.mark.parametrize("hidden", [64, 33])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["rms", "layer", "offload"])
def test_block(cuda, kind, dtype, hidden):
    """The kernels between a block's products, in vectors and element by element."""
    config = flashbpt.BlockConfig(
        heads=4,
        kv_heads=2,
        norm="layer" if kind == "layer" else "rms",
        activation="gelu" if kind == "layer" else "silu",
        rope="interleaved" if kind == "layer" else "half",
        qk_norm=kind != "layer",
        residual_dropout=0.25,
        offload="cpu" if kind == "offload" else None,
        rows=16,
    )
    weights = make_weights(config, hidden, 40, dtype, "cpu", head_dim=16, bias=True)
    x = torch.randn(2, 37, hidden).to(dtype)
    on_cpu, on_gpu = (
        replace(
            weights, **{n: t.detach().to(d).requires_grad_() for n, t in leaves(weights).items()}
        )
        for d in ("cpu", cuda)
    )
    results = []
    for device, w in (("cpu", on_cpu), (cuda, on_gpu)):
        moved = x.to(device).requires_grad_()
        state = torch.tensor([7, 4], device=device)
        arguments = (moved, *w.tensors(), None, None, None, state, *_numbers(config))
        with torch.no_grad():
            y, _, _, *saved = torch.ops.flashbpt.transformer_block_forward(*arguments, True, False)
            need = [t is not None for t in (moved, *w.tensors())]
            grads = torch.ops.flashbpt.transformer_block_backward(
                torch.ones_like(y), *arguments, *saved, True, need
            )
        results.append([y, *(g for g in grads if g is not None)])
    for right, got in zip(*results, strict=True):
        size = max(1.0, float(right.abs().max()))
        torch.testing.assert_close(got.cpu(), right, rtol=0, atol=0.06 * size)
