"""flashbpt.varlen_attention against the reference, one sequence after the other."""

import pytest
import reference
import torch
from cases import VarlenCase, cumulative, ids, make_varlen
from compare import assert_bitwise, assert_close, check
from op_calls import backward, forward

import flashbpt

INF, NAN = float("inf"), float("nan")


def check_varlen(inputs):
    return check(inputs, flashbpt.varlen_attention, reference.varlen_attention)


CASES = [
    VarlenCase((5, 1, 64, 65, 17)),
    VarlenCase((5, 1, 64, 65, 17), causal=True, lse=True),
    VarlenCase((257, 256, 255, 2), causal=True),
    VarlenCase((513,), causal=True),
    VarlenCase((1,)),
    VarlenCase((1, 1, 1, 1), causal=True),
    VarlenCase((20, 300, 3), (70, 33, 257), lse=True),
    VarlenCase((20, 300, 3), (70, 33, 257), causal=True, lse=True),
    VarlenCase((0, 9, 0, 0, 70, 0)),
    VarlenCase((0, 9, 0, 0, 70, 0), (3, 9, 0, 5, 100, 2), causal=True),
    VarlenCase((7, 30, 9), (0, 70, 0), lse=True),
    VarlenCase((7, 30, 9), (0, 70, 0), sinks=True, lse=True),
    VarlenCase((0, 0), (0, 0)),
    VarlenCase((0, 0, 1), (0, 4, 1), heads=6, kv_heads=2),
    VarlenCase((40, 70), extra=9, causal=True),
    VarlenCase((40, 70), (90, 3), extra=33),
    VarlenCase((0, 0), extra=4),
    VarlenCase((40, 70, 128), heads=6, kv_heads=2, causal=True),
    VarlenCase((33, 65), heads=10, kv_heads=2, dim=24, dim_v=40),
    VarlenCase((33, 65), heads=7, kv_heads=1, dim=80, causal=True),
    VarlenCase((30, 40), dim=0, dim_v=3),
    VarlenCase((5, 4), dim_v=0),
    VarlenCase((100, 300), window=(30, 0)),
    VarlenCase((100, 300), (280, 90), window=(16, 40), causal=True),
    VarlenCase((100, 30), (600, 90), window=(300, 40), lse=True),
    VarlenCase((60, 20), window=(-1, 3)),
    VarlenCase((100, 70), (100, 200), alibi="h", causal=True, lse=True),
    VarlenCase((100, 70), (100, 200), alibi="bh"),
    VarlenCase((100, 70), softcap=3.0, scale=0.7),
    VarlenCase((100, 70), scale=0.0),
    VarlenCase((50, 70), scale=-0.5, causal=True),
    VarlenCase(
        (100, 70, 0, 33),
        (64, 128, 5, 33),
        heads=6,
        kv_heads=3,
        causal=True,
        window=(50, -1),
        softcap=8.0,
        alibi="bh",
        sinks=True,
        lse=True,
    ),
    VarlenCase((40, 70), index="int64"),
    VarlenCase((40, 70), (33, 90), index="int64", causal=True, max_seqlens=False),
    VarlenCase((300, 20), max_seqlens=False),
]


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_against_the_reference(device, case):
    check_varlen(make_varlen(case, device))


LOW = [
    VarlenCase((129, 5, 0, 64), causal=True, heads=4, kv_heads=2, dim=64),
    VarlenCase((40, 70), (90, 33), dim=32, lse=True),
    VarlenCase((257, 66), window=(64, 0), sinks=True, softcap=10.0, dim=33),
]


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp64"])
@pytest.mark.parametrize("number", range(len(LOW)), ids=ids(LOW))
def test_dtypes(device, number, dtype):
    check_varlen(make_varlen(VarlenCase(**{**vars(LOW[number]), "dtype": dtype}), device))


def test_many_short_sequences(device):
    check_varlen(make_varlen(VarlenCase((2, 1, 0, 3) * 150, dim=4, causal=True, heads=1), device))


def test_agrees_with_dense(device):
    """One sequence is dense attention with lower-right causal."""
    inputs = make_varlen(VarlenCase((130,), (200,), heads=4, kv_heads=2, causal=True), device)
    out, lse = flashbpt.varlen_attention(**inputs.leaves, **inputs.options, return_lse=True)
    q, k, v = (x.transpose(0, 1)[None] for x in inputs.leaves.values())
    dense, dense_lse = flashbpt.attention(
        q, k, v, is_causal=True, causal_align="lower-right", enable_gqa=True, return_lse=True
    )
    torch.testing.assert_close(out, dense[0].transpose(0, 1))
    torch.testing.assert_close(lse, dense_lse[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_garbage_after_the_last_sequence(device, causal, dtype):
    """NaN and inf in the rows past cu_seqlens[-1]: valid rows are right, the others have output and
    gradients 0.
    """
    case = VarlenCase((33, 64), (70, 20), extra=40, causal=causal, dtype=dtype, lse=True)
    inputs = make_varlen(case, device)
    clean = check_varlen(inputs)
    for name, tokens in (("query", 97), ("key", 90), ("value", 90)):
        inputs.leaves[name][tokens:] = NAN
        inputs.leaves[name][tokens + 5] = INF
    grad = torch.randn(137, 2, 16, device=device).to(inputs.dtype)
    grad[97:] = NAN
    leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
    out, lse = flashbpt.varlen_attention(**leaves, **inputs.options, return_lse=True)
    assert_bitwise("out", out.detach(), clean["out"])
    assert (out[97:] == 0).all() and (lse[97:] == -INF).all()
    for name, gradient in zip(
        leaves, torch.autograd.grad(out, list(leaves.values()), grad), strict=True
    ):
        tokens = 97 if name == "query" else 90
        assert torch.isfinite(gradient).all(), f"d{name} has NaN"
        assert (gradient[tokens:] == 0).all(), f"d{name} beyond the last sequence"


@pytest.mark.parametrize(
    "lens", [((20, 30, 25), (20, 30, 25)), ((7, 50, 64), (70, 3, 65))], ids=str
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_nan_sequence_leaves_its_neighbours_alone(device, lens, causal):
    case = VarlenCase(*lens, causal=causal)
    inputs = make_varlen(case, device)
    clean = check_varlen(inputs)
    grad = torch.randn_like(clean["out"])
    results = []
    for poison in (False, True):
        leaves = {n: x.clone() for n, x in inputs.leaves.items()}
        for name, x in leaves.items():
            own = lens[0] if name == "query" else lens[1]
            if poison:
                x[own[0] : own[0] + own[1]] = NAN
            x.requires_grad_()
        out = flashbpt.varlen_attention(**leaves, **inputs.options, deterministic=True)
        results.append((out.detach(), *torch.autograd.grad(out, list(leaves.values()), grad)))
    for name, a, b in zip(("out", "dq", "dk", "dv"), *results, strict=True):
        own = lens[0] if name in ("out", "dq") else lens[1]
        assert torch.isnan(b[own[0] : own[0] + own[1]]).any()
        assert_bitwise(name + " before", a[: own[0]], b[: own[0]])
        assert_bitwise(name + " after", a[own[0] + own[1] :], b[own[0] + own[1] :])


def test_strides(device):
    """Packed q, k, v of one projection, and tensors stored (H, T, D)."""
    packed = torch.randn(110, 3, 4, 16, device=device)
    cu = cumulative((40, 70), device=device)
    for views in (
        packed.unbind(1),
        [x.transpose(0, 1).contiguous().transpose(0, 1) for x in packed.unbind(1)],
    ):
        leaves = [x.detach().requires_grad_() for x in views]
        out = flashbpt.varlen_attention(*leaves, cu, causal=True)
        right = [x.contiguous().detach().requires_grad_() for x in views]
        wanted = flashbpt.varlen_attention(*right, cu, causal=True)
        torch.testing.assert_close(out, wanted, atol=1e-6, rtol=1e-5)
        grad = torch.randn(4, 110, 16, device=device).transpose(0, 1)
        for a, b in zip(
            torch.autograd.grad(out, leaves, grad),
            torch.autograd.grad(wanted, right, grad.contiguous()),
            strict=True,
        ):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_output_keeps_the_stride_order_of_the_query(device):
    q = torch.randn(4, 110, 16, device=device).transpose(0, 1)
    k = torch.randn(110, 4, 16, device=device)
    out = flashbpt.varlen_attention(q, k, k, cumulative((40, 70), device=device))
    assert out.stride() == q.stride()


def test_max_seqlen_may_be_too_large_or_missing(device):
    inputs = make_varlen(VarlenCase((40, 70), (33, 90), causal=True), device)
    usual = flashbpt.varlen_attention(**inputs.leaves, **inputs.options)
    for lengths in ((None, None), (4096, 4096), (70, None)):
        inputs.options.update(max_seqlen_q=lengths[0], max_seqlen_k=lengths[1])
        got = flashbpt.varlen_attention(**inputs.leaves, **inputs.options)
        torch.testing.assert_close(got, usual)


def test_inputs_are_not_modified(device):
    inputs = make_varlen(VarlenCase((40, 0, 70), (33, 5, 90), causal=True, sinks=True), device)
    tensors = {
        **inputs.leaves,
        "cu_q": inputs.options["cu_seqlens_q"],
        "cu_k": inputs.options["cu_seqlens_k"],
    }
    before = {n: (x._version, x.clone()) for n, x in tensors.items()}
    leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
    flashbpt.varlen_attention(**leaves, **inputs.options).sum().backward()
    for name, x in tensors.items():
        assert x._version == before[name][0] and torch.equal(x.detach(), before[name][1]), name


# --- query blocks
BLOCK_CASES = [
    VarlenCase((100, 0, 33, 160), causal=True),
    VarlenCase((100, 64, 33), (70, 128, 200), heads=4, kv_heads=2),
    VarlenCase((100, 64, 33), (70, 128, 200), window=(40, 10), alibi="h", sinks=True),
]


@pytest.mark.parametrize("block", [1, 48, 97, 128])
@pytest.mark.parametrize("case", BLOCK_CASES, ids=ids(BLOCK_CASES))
def test_query_blocks_of_the_op_agree_with_the_whole(device, case, block):
    """q_offset: the op takes rows from q_offset on of the packed queries, and all keys."""
    inputs = make_varlen(case, device)
    op = op_arguments(inputs)
    whole = forward(**op)
    tokens = op["q"].size(0)
    for start in range(0, tokens, block if block > 1 else 61):
        rows = slice(start, start + block)
        out, lse, *_ = forward(**{**op, "q": op["q"][rows]}, q_offset=start)
        assert_close(f"out of rows from {start}", out, whole[0][rows])
        assert_close(f"lse of rows from {start}", lse, whole[1][rows])


def op_arguments(inputs):
    """Arguments of the op for a varlen call."""
    o, x = inputs.options, inputs.leaves
    left, right = o["window"] or (-1, -1)
    return {
        "q": x["query"],
        "k": x["key"],
        "v": x["value"],
        "sinks": x.get("sinks"),
        "alibi_slopes": x.get("alibi_slopes"),
        "cu_seqlens_q": o["cu_seqlens_q"],
        "cu_seqlens_k": o.get("cu_seqlens_k", o["cu_seqlens_q"]),
        "max_seqlen_q": o.get("max_seqlen_q"),
        "max_seqlen_k": o.get("max_seqlen_k"),
        "scale": o["scale"],
        "causal": o["causal"],
        "window_left": left,
        "window_right": right,
        "softcap": o["softcap"],
    }


@pytest.mark.parametrize("case", BLOCK_CASES, ids=ids(BLOCK_CASES))
def test_backward_of_query_blocks_sums_to_the_whole(device, case):
    op = op_arguments(make_varlen(case, device))
    out, lse, lse_lo, tiles = forward(**op)
    grad = torch.randn_like(out)
    whole = backward(grad, None, out, lse, lse_lo, tiles, **op)
    dk, dv, tokens = torch.zeros_like(whole[1]), torch.zeros_like(whole[2]), op["q"].size(0)
    for start in range(0, tokens, 83):
        rows = slice(start, start + 83)
        part = {**op, "q": op["q"][rows]}
        out, lse, lse_lo, tiles = forward(**part, q_offset=start)
        dq, dk_part, dv_part, *_ = backward(
            grad[rows], None, out, lse, lse_lo, tiles, **part, q_offset=start
        )
        assert_close(f"dq of rows from {start}", dq, whole[0][rows], ulps=50)
        dk, dv = dk + dk_part, dv + dv_part
    assert_close("dk", dk, whole[1], ulps=50)
    assert_close("dv", dv, whole[2], ulps=50)
