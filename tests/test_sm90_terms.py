"""The kernels for Hopper: masks, dropout and packed sequences against the reference."""

from dataclasses import replace

import pytest
import reference
import torch
from cases import DTYPES, VarlenCase, cumulative, draw, ids, make, make_varlen
from compare import assert_bitwise, assert_close, check
from op_calls import forward, keep_mask
from test_sm90 import INF, KERNELS, LOW, NAN, PLAIN, SM90, check_here, rising

import flashbpt
from flashbpt.backend import BACKENDS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

TILES = [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]  # head dims of Q and K, and of V


# ---- masks and dropout
@pytest.mark.parametrize("dim, dim_v", TILES, ids=str)
@pytest.mark.parametrize(
    "mask",
    ["bool:11qk", "bool:bhqk", "bool:b11k", "bool:1h1k"] + ["own:11qk", "own:bhqk", "own:1hqk"],
)
def test_masks(cuda, mask, dim, dim_v):
    case = replace(PLAIN, lk=336, dim=dim, dim_v=dim_v, mask=mask)
    check_here(make(case, cuda))
    check_here(make(replace(case, dtype="fp16", window=(-1, 0), align="lower-right"), cuda))
    check_here(make(replace(case, window=(90, 60), sinks=True, scale=-0.2), cuda))


@pytest.mark.parametrize("dim, dim_v", TILES, ids=str)
def test_masks_with_other_terms(cuda, dim, dim_v):
    case = replace(PLAIN, lk=336, dim=dim, dim_v=dim_v)
    for kind in ("bool", "own"):
        check_here(make(replace(case, mask=f"{kind}:11qk", softcap=5.0), cuda))
        check_here(make(replace(case, mask=f"{kind}:b1qk", alibi="bh", window=(-1, 0)), cuda))


def block_masks(rows, keys, device):
    """Boolean masks by name: tiles of them are empty, partial and full in all orders."""
    q, k = torch.arange(rows, device=device)[:, None], torch.arange(keys, device=device)
    return {
        "diagonal": q >= k,
        "every third block": (k // 128 % 3 == 1).expand(rows, keys),
        "blocks": (q // 64 + k // 64) % 5 == 0,
        "last key": (k == keys - 1).expand(rows, keys),
        "one key of each row": k == (q * 37) % keys,
        "some rows nothing": (q % 100 < 60).expand(rows, keys),
        "nothing": (k < 0).expand(rows, keys),
        "half": (k < keys // 2).expand(rows, keys),
        "tail": (k >= keys - 3).expand(rows, keys),
    }


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("name", block_masks(1, 1, "cpu"))
def test_tiles_of_masks(cuda, name, dtype, dim):
    """More than 32 tiles, which a warp looks at together."""
    case = replace(PLAIN, batch=1, heads=24, kv_heads=12, lq=310, lk=4600, dim=dim, dtype=dtype)
    inputs = make(case, cuda)
    inputs.leaves["attn_mask"] = block_masks(310, 4600, cuda)[name].contiguous()
    check_here(inputs)


HIDDEN = {"-inf": -INF, "-1e4": -1e4, "finfo.min": None}


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("what", HIDDEN)
def test_biases_that_hide_what_comes_first(cuda, what, dtype, dim):
    """And whole rows; then scores near -200."""
    low = DTYPES[dtype]
    hidden = torch.finfo(low).min if HIDDEN[what] is None else HIDDEN[what]
    inputs = make(replace(PLAIN, batch=1, lq=200, lk=704, dim=dim, dtype=dtype), cuda)
    bias = torch.full((200, 704), -200.0, dtype=low, device=cuda)
    bias[:, :450] = hidden
    bias[70:75] = hidden
    bias[3, 600] = 1e4
    bias[150, 5] = -1e4
    inputs.leaves["attn_mask"] = bias
    check_here(inputs)


@pytest.mark.parametrize("dtype, dim", [(d, n) for d in LOW for n in (64, 96, 128, 192, 256)])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_dropout_keeps_what_its_state_says(cuda, causal, dtype, dim):
    """Equal scores, V = I: the output is the weights."""
    dim_v, rows, p, state = 128 if dim == 192 else dim, 300, 0.3, (77, 2**32 + 5)
    low = DTYPES[dtype]
    q, k = (torch.zeros(2, 3, n, dim, dtype=low, device=cuda) for n in (rows, dim_v))
    eye = torch.eye(dim_v, dtype=low, device=cuda).expand(2, 3, dim_v, dim_v).contiguous()
    call = {"dropout_p": p, "rng_state": torch.tensor(state, device=cuda), "backend": SM90}
    out, lse, *_ = forward(q=q, k=k, v=eye, causal=causal, **call)
    keep = keep_mask(state, p, (2, 3, rows, dim_v)).to(cuda)
    seen = torch.ones(rows, dim_v, dtype=torch.bool, device=cuda)
    seen = seen.tril() if causal else seen
    count = seen.sum(-1, keepdim=True)
    assert_close("out", out, (keep & seen) / (count * (1 - p)), ulps=2)
    assert_close("lse", lse, count[:, 0].log().expand(2, 3, rows), ulps=2, terms=300)


def test_dropout_where_the_reference_jumps(cuda):
    """Tiles that have to be done again drop the same weights."""
    q, k = rising(2, 300, 900, 128, 64, 30.0, torch.bfloat16, cuda)
    v = draw((1, 2, 900, 128), torch.bfloat16, cuda)
    call = {"q": q, "k": k, "v": v, "scale": 1.0, "dropout_p": 0.5, "causal": True, "diagonal": 600}
    call["rng_state"] = torch.tensor([1, 2], device=cuda)
    got, wanted = (forward(backend=BACKENDS[name], **call) for name in ("sm90", "sm80"))
    for name, a, b in zip(("out", "lse"), got, wanted):
        assert_close(name, a, b, ulps=4, terms=300)


# ---- packed sequences
PACKED = [
    VarlenCase((300, 1, 0, 129, 128, 700), causal=True, lse=True, extra=70),
    VarlenCase((300, 1, 0, 129, 128), (70, 400, 9, 0, 1000), lse=True, extra=3),
    VarlenCase((300, 40, 129), (70, 400, 333), causal=True, sinks=True, lse=True),
    VarlenCase((257, 63, 64, 65), window=(100, 20), heads=6, kv_heads=2, index="int64"),
    VarlenCase((257, 63, 300), (300, 63, 900), alibi="bh", causal=True, lse=True),
    VarlenCase((257, 300), softcap=4.0, scale=-0.3, alibi="h", window=(-1, 90)),
    VarlenCase((1,) * 200, causal=True),
]


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("dim, dim_v", TILES, ids=str)
@pytest.mark.parametrize("case", PACKED, ids=ids(PACKED))
def test_packed(cuda, case, dim, dim_v, dtype):
    inputs = make_varlen(replace(case, dim=dim, dim_v=dim_v, dtype=dtype), cuda)
    choice = flashbpt.which_kernel(**inputs.leaves, **inputs.options, op="varlen_attention")
    assert choice.kernel == "sm90", str(choice)
    check(inputs, flashbpt.varlen_attention, reference.varlen_attention)


def test_packed_without_any_keys(cuda):
    inputs = make_varlen(VarlenCase((70, 33), (0, 0), dim=64, dtype="bf16", sinks=True), cuda)
    check(inputs, flashbpt.varlen_attention, reference.varlen_attention)


@pytest.mark.parametrize("alibi", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_packed_neighbours_of_nan(cuda, forced, dim, alibi):
    """What follows a sequence is in its last tile, and reaches no result."""
    lens = (200, 77, 130, 333, 5)
    q, k, v = (draw((sum(lens) + 90, 2, dim), torch.bfloat16, cuda) for _ in range(3))
    cu = cumulative(lens, device=cuda)
    more = {"causal": True}
    if alibi:
        more["alibi_slopes"] = torch.tensor([0.5, 0.01], device=cuda)
    wanted = flashbpt.varlen_attention(q, k, v, cu, **more)
    bad = [0, 2, 4]  # sequences, and what comes after the last one
    rows = torch.cat([torch.arange(cu[b], cu[b + 1]) for b in bad] + [torch.arange(sum(lens), 835)])
    for t in (q, k, v):
        t[rows.to(cuda)] = NAN
    got = flashbpt.varlen_attention(q, k, v, cu, **more)
    for b in (1, 3):
        assert_bitwise("out", got[cu[b] : cu[b + 1]], wanted[cu[b] : cu[b + 1]])
    assert (got[sum(lens) :] == 0).all()


def test_packed_dropout_and_blocks_of_rows(cuda):
    lens, p = (300, 1, 130, 513), 0.4
    cu, rows = cumulative(lens, device=cuda), sum(lens)
    q, k, v = (draw((rows, 4, 128), torch.bfloat16, cuda) for _ in range(3))
    call = {"k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}
    call |= {"dropout_p": p, "rng_state": torch.tensor([5, 6], device=cuda)}
    got, wanted = (forward(q=q, backend=BACKENDS[name], **call) for name in ("sm90", "sm80"))
    for name, a, b in zip(("out", "lse"), got, wanted):
        assert_close(name, a, b, ulps=4, terms=300)
    call |= {"dropout_p": 0.0, "backend": SM90}
    whole = forward(q=q, **call)
    for first, last in ((0, 128), (128, 320), (320, rows)):
        block = forward(q=q[first:last], q_offset=first, **call)
        for name, a, b in zip(("out", "lse"), block, whole):
            assert_close(name, a, b[first:last], ulps=2, terms=300)
