"""torch.autograd.gradcheck in float64 for every differentiable input, one feature at a time and a
few together.
"""

import pytest
import torch
from cases import Case, VarlenCase, ids, make, make_varlen

import flashbpt

F64 = {"dtype": "fp64", "batch": 1}
SMALL = {"lq": 5, "lk": 6, "dim": 3, **F64}

CASES = [
    Case(**SMALL),
    Case(**SMALL, causal=True),
    Case(**SMALL, causal=True, align="lower-right"),
    Case(**SMALL, dim_v=4),
    Case(**SMALL, heads=4, kv_heads=2),
    Case(**SMALL, heads=3, kv_heads=1, causal=True),
    Case(**SMALL, scale=0.7),
    Case(**SMALL, scale=0.0),
    Case(**SMALL, scale=-0.5),
    Case(**SMALL, window=(1, 1)),
    Case(**SMALL, window=(2, 0), causal=True, align="lower-right"),
    Case(**SMALL, softcap=0.8),
    Case(**SMALL, alibi="h"),
    Case(**{**SMALL, "batch": 2}, alibi="bh", align="lower-right"),
    Case(**SMALL, sinks=True),
    Case(**SMALL, mask="own:bhqk"),
    Case(**SMALL, mask="own:11qk"),
    Case(**{**SMALL, "batch": 2}, mask="own:b11k"),
    Case(**SMALL, mask="own:1hq1"),
    Case(**SMALL, mask="own:k"),
    Case(**SMALL, mask="bool:bhqk"),
    Case(**SMALL, mask="bool:b11k"),
    Case(**{**SMALL, "lk": 1}),
    Case(**{**SMALL, "lq": 1}),
    Case(**{**SMALL, "dim": 1}),
    Case(**{**SMALL, "lq": 2, "lk": 66, "heads": 1}),
    Case(
        **{**SMALL, "lq": 4, "lk": 5, "batch": 2},
        heads=4,
        kv_heads=2,
        dim_v=2,
        softcap=1.5,
        alibi="bh",
        sinks=True,
        mask="own:b1qk",
    ),
    Case(
        **SMALL,
        heads=4,
        kv_heads=1,
        causal=True,
        align="lower-right",
        window=(3, -1),
        softcap=1.5,
        alibi="h",
        sinks=True,
    ),
    Case(**SMALL, mask="own:h1k", sinks=True, window=(4, 2)),
    Case(**SMALL, mask="bool:11qk", sinks=True, softcap=2.0),
]


def gradcheck(fn, inputs):
    leaves = {
        n: x.detach().clone().requires_grad_(n in inputs.grads) for n, x in inputs.leaves.items()
    }
    names = list(leaves)

    def outputs(*tensors):
        out, lse = fn(**dict(zip(names, tensors, strict=True)), **inputs.options, return_lse=True)
        return out, torch.where(torch.isfinite(lse), lse, torch.zeros_like(lse))

    assert torch.autograd.gradcheck(
        outputs, tuple(leaves.values()), atol=1e-6, rtol=1e-4, nondet_tol=1e-12
    )


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_attention(device, case):
    gradcheck(flashbpt.attention, make(case, device))


def test_broadcast_leading_dims(device):
    inputs = make(Case(**SMALL), device)
    inputs.leaves["query"] = torch.randn(2, 1, 4, 3, dtype=torch.float64, device=device)
    inputs.leaves["key"] = torch.randn(1, 3, 5, 3, dtype=torch.float64, device=device)
    inputs.leaves["value"] = torch.randn(3, 5, 2, dtype=torch.float64, device=device)
    gradcheck(flashbpt.attention, inputs)


def test_dropout_with_a_fixed_seed(device):
    inputs = make(Case(**SMALL, heads=4, kv_heads=2, sinks=True, mask="own:bhqk"), device)
    inputs.options["dropout_p"] = 0.4

    def seeded(*args, **kwargs):
        torch.manual_seed(5)
        return flashbpt.attention(*args, **kwargs)

    gradcheck(seeded, inputs)


VARLEN = [
    VarlenCase((3, 0, 4), dtype="fp64", dim=3),
    VarlenCase((3, 4), (5, 2), dtype="fp64", dim=3, causal=True),
    VarlenCase((2, 3), (0, 4), dtype="fp64", dim=3, extra=2),
    VarlenCase((3, 4), dtype="fp64", dim=3, dim_v=2, window=(1, 1)),
    VarlenCase((3, 4), dtype="fp64", dim=3, softcap=1.0),
    VarlenCase((3, 4), dtype="fp64", dim=3, sinks=True),
    VarlenCase((3, 4), (4, 4), dtype="fp64", dim=3, alibi="bh"),
    VarlenCase(
        (3, 0, 4),
        (4, 1, 5),
        heads=4,
        kv_heads=2,
        dtype="fp64",
        dim=3,
        causal=True,
        window=(2, -1),
        softcap=1.5,
        alibi="h",
        sinks=True,
    ),
]


@pytest.mark.parametrize("case", VARLEN, ids=ids(VARLEN))
def test_varlen_attention(device, case):
    gradcheck(flashbpt.varlen_attention, make_varlen(case, device))
