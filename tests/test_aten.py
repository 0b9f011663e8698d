"""The aten backend: all scores in memory, forced here, on any device and in any dtype."""

import pytest
import reference
import torch
from cases import Case, VarlenCase, ids, make, make_varlen
from compare import assert_close, check
from op_calls import OPTIONS, backward, backward_accumulate, forward
from test_gradcheck import gradcheck

import flashbpt

ATEN = flashbpt.backend.BACKENDS["aten"]

EVERYTHING = {"softcap": 3.0, "alibi": "bh", "sinks": True, "lse": True, "window": (20, 9)}
CASES = [
    Case(lq=70, lk=90, causal=True, lse=True),
    Case(lq=33, lk=20, heads=6, kv_heads=2, dim_v=24, mask="fp32:b1qk", **EVERYTHING),
    Case(lq=20, lk=33, heads=4, kv_heads=1, mask="bool:bhqk", dtype="bf16", **EVERYTHING),
    Case(lq=40, lk=30, mask="own:1h1k", dtype="fp16", align="lower-right", window=(9, 0)),
    Case(lq=9, lk=12, heads=3, mask="own:b1qk", dtype="fp64", **EVERYTHING),
    Case(lq=9, lk=0, sinks=True, lse=True),
    Case(lq=0, lk=9, kv_heads=1),
    Case(lq=5, lk=9, dim=600, dim_v=3),
]
VARLEN = [
    VarlenCase((33, 0, 20, 1), lse=True, sinks=True),
    VarlenCase((9, 30, 4), (20, 0, 7), heads=4, kv_heads=2, causal=True, alibi="bh", extra=5),
    VarlenCase((17, 5), dtype="bf16", softcap=2.0, window=(4, 2), alibi="h", index="int64"),
]


@pytest.fixture(autouse=True)
def forced():
    with flashbpt.use_backend("aten"):
        yield


def seeded(function, p):
    def run(*args, **kwargs):
        torch.manual_seed(77)
        return function(*args, **kwargs, dropout_p=p)

    return run


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_dense(device, case):
    inputs = make(case, device)
    assert flashbpt.which_kernel(**inputs.leaves, **inputs.options).kernel == "aten"
    check(inputs)


@pytest.mark.parametrize("case", VARLEN, ids=ids(VARLEN))
def test_packed(device, case):
    check(make_varlen(case, device), flashbpt.varlen_attention, reference.varlen_attention)


@pytest.mark.parametrize("p", [0.3, 1.0])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_dropout_is_that_of_the_cpu(p, packed):
    case = VARLEN[0] if packed else CASES[1]
    inputs = (make_varlen if packed else make)(case, "cpu")
    function = flashbpt.varlen_attention if packed else flashbpt.attention
    results = []
    for backend in ("aten", "cpu"):
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.leaves.items()}
        with flashbpt.use_backend(backend):
            out, lse = seeded(function, p)(**leaves, **inputs.options, return_lse=True)
        seen = torch.isfinite(lse)
        loss = (out * torch.cos(out.detach())).sum() + lse[seen].sum()
        results.append([out, lse, *torch.autograd.grad(loss, list(leaves.values()))])
    for i, (got, expected) in enumerate(zip(*results, strict=True)):
        torch.testing.assert_close(got, expected, msg=lambda m, i=i: f"result {i}: {m}")


def test_double_on_every_device(device):
    """What auto takes aten for on a GPU."""
    case = Case(lq=4, lk=5, dim=3, heads=4, kv_heads=2, dtype="fp64", sinks=True, mask="own:b1qk")
    gradcheck(seeded(flashbpt.attention, 0.4), make(case, device))
    packed = VarlenCase((3, 0, 4), (4, 1, 5), dtype="fp64", dim=3, alibi="bh", causal=True)
    gradcheck(flashbpt.varlen_attention, make_varlen(packed, device))


def test_blocks_of_queries_add_up(device):
    q = torch.randn(2, 4, 48, 8, device=device)
    k, v = (torch.randn(2, 2, 40, 8, device=device) for _ in range(2))
    grad = torch.randn_like(q)
    call = {"k": k, "v": v, "causal": True, "backend": ATEN}
    dq, dk, dv, *_ = backward(grad, None, *forward(q=q, **call), q=q, **call)
    sums = torch.zeros_like(dk), torch.zeros_like(dv)
    for rows in (slice(0, 16), slice(16, 48)):
        part = {"q": q[:, :, rows], "q_offset": rows.start, **call}
        saved = forward(**part)
        got, *_ = backward_accumulate(grad[:, :, rows], None, *saved, *sums, **part)
        assert_close("dq", got, dq[:, :, rows], ulps=20)
    assert_close("dk", sums[0], dk, ulps=20)
    assert_close("dv", sums[1], dv, ulps=20)


def test_by_itself_it_serves_double_on_a_gpu_alone():
    assert OPTIONS["backend"] == 0
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    with flashbpt.use_backend("auto"):
        choice = flashbpt.which_kernel(x, x, x)
    assert choice.kernel == "cpu" and "float64 on a GPU" in choice.refused["aten"]
