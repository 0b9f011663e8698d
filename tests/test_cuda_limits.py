"""Shapes at the limits of the CUDA kernels: few queries and many keys, few keys and many queries,
more heads than a grid dimension counts, more elements than 32 bits count, and their memory.
"""

from dataclasses import replace
from functools import partial

import pytest
import reference
import torch
from cases import Case, VarlenCase, cumulative, draw, ids, make, make_varlen
from compare import assert_close, check, evaluate
from op_calls import backward, forward, with_dropout

import flashbpt

pytestmark = pytest.mark.gpu

INF = float("inf")

# --- few queries, many keys: the keys are split over blocks and the parts merged
DECODE = Case(lq=1, lk=20000, batch=1, heads=2, dim=64, dtype="bf16", lse=True)
SPLIT = [
    DECODE,
    replace(DECODE, lq=16, lk=5000, heads=8, kv_heads=1, causal=True, align="lower-right"),
    replace(DECODE, lq=7, heads=4, kv_heads=2, sinks=True, alibi="h", softcap=8.0),
    replace(DECODE, lq=3, batch=2, window=(1000, 0), align="lower-right", sinks=True),
    replace(DECODE, lq=16, window=(30, 30), align="lower-right"),
    replace(DECODE, lq=5, mask="bool:bhqk"),
    replace(DECODE, lq=5, mask="bool:b11k", sinks=True),
    replace(DECODE, lq=4, mask="own:1h1k", kv_heads=1),
    replace(DECODE, lq=2, mask="fp32:11qk", alibi="bh"),
    replace(DECODE, lq=1, lk=4097, heads=16, kv_heads=1, alibi="bh"),
]
SPLIT_KERNELS = [("bf16", 64), ("fp16", 128), ("fp32", 64), ("bf16", 256), ("fp32", 320)]


@pytest.mark.parametrize("dtype, dim", SPLIT_KERNELS)
@pytest.mark.parametrize("number", range(len(SPLIT)), ids=ids(SPLIT))
def test_few_queries_many_keys(cuda, number, dtype, dim):
    case = SPLIT[number]
    lk = case.lk if dim == 64 else case.lk // 4
    check(make(replace(case, dtype=dtype, dim=dim, lk=lk), cuda))


@pytest.mark.parametrize("dtype, dim", SPLIT_KERNELS)
def test_dropout_over_split_keys(cuda, dtype, dim):
    for heads, kv_heads, lq in ((2, 2, 1), (8, 1, 5)):
        case = replace(DECODE, lq=lq, lk=5000, heads=heads, kv_heads=kv_heads, sinks=True)
        inputs = make(replace(case, dtype=dtype, dim=dim), cuda)
        check(inputs, with_dropout(inputs, 0.3, flashbpt.attention))


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("seen", ["none", "first", "last", "middle"])
def test_split_keys_that_the_mask_hides(cuda, seen, sink):
    """Parts without any key weigh nothing; where no part has one, the sink is the LSE."""
    inputs = make(replace(DECODE, lq=4, dtype="fp16", sinks=sink), cuda)
    mask = torch.zeros(4, 20000, dtype=torch.bool, device=cuda)
    if seen != "none":
        key = {"first": 0, "last": 19999, "middle": 9001}[seen]
        mask[1:, key], mask[2, key // 2] = True, True
    inputs.leaves["attn_mask"] = mask
    got = check(inputs)
    assert (got["out"][:, :, 0] == 0).all()
    if not sink:
        assert (got["lse"][:, :, 0] == -INF).all()


PACKED_SPLIT = [
    VarlenCase((1, 0, 4), (9000, 5, 3000), heads=2, causal=True, lse=True, extra=3),
    VarlenCase((2, 1), (7000, 1), heads=8, kv_heads=1, sinks=True, alibi="bh", lse=True),
    VarlenCase((1, 3), (0, 8000), heads=2, window=(500, 0), sinks=True, lse=True),
]


@pytest.mark.parametrize("dtype, dim", SPLIT_KERNELS)
@pytest.mark.parametrize("number", range(len(PACKED_SPLIT)), ids=ids(PACKED_SPLIT))
def test_packed_few_queries_many_keys(cuda, number, dtype, dim):
    case = VarlenCase(**{**vars(PACKED_SPLIT[number]), "dtype": dtype, "dim": dim})
    check(make_varlen(case, cuda), flashbpt.varlen_attention, reference.varlen_attention)


# --- few keys, many queries: in the backward several blocks share the queries of one key tile
FEW_KEYS = [
    Case(lq=5000, lk=40, batch=1, heads=1, dim=64, lse=True),
    Case(lq=3000, lk=100, batch=1, heads=6, kv_heads=1, dim=64, sinks=True),
    Case(lq=3000, lk=70, batch=1, heads=2, dim=64, mask="own:bhqk", alibi="h"),
    Case(lq=3000, lk=70, batch=2, heads=1, dim=64, mask="bool:11qk", window=(2900, 10)),
]


@pytest.mark.parametrize("dtype, dim", SPLIT_KERNELS)
@pytest.mark.parametrize("number", range(len(FEW_KEYS)), ids=ids(FEW_KEYS))
def test_few_keys_many_queries(cuda, number, dtype, dim):
    case = replace(FEW_KEYS[number], dtype=dtype, dim=dim)
    case = replace(case, lq=case.lq if dim <= 128 else case.lq // 3)
    check(make(case, cuda))
    inputs = make(replace(case, lq=case.lq // 2), cuda)
    check(inputs, with_dropout(inputs, 0.2, flashbpt.attention))


# --- grids
MANY = [
    Case(lq=2, lk=3, batch=66000, heads=1, dim=8, dtype="bf16", mask="own:b1qk", lse=True),
    Case(lq=2, lk=3, batch=33000, heads=4, kv_heads=2, dim=8, dtype="fp16", mask="bool:b111"),
    Case(lq=3, lk=2, batch=1, heads=65600, kv_heads=8200, dim=8, sinks=True, alibi="h", lse=True),
    Case(lq=2, lk=2, batch=8193, heads=8, dim=4, alibi="bh", mask="fp32:11qk", causal=False),
]


@pytest.mark.parametrize("case", MANY, ids=ids(MANY))
def test_more_batch_heads_than_a_grid_dimension(cuda, case):
    check(make(case, cuda))


def test_more_sequences_than_a_grid_dimension(cuda):
    """Sequences of two tokens are a dense batch; with empty ones between them nothing changes."""
    n = 66000
    q, k, v = (torch.randn(n, 2, h, 16, device=cuda, dtype=torch.float16) for h in (4, 2, 2))
    grad = torch.randn_like(q)
    dense = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    right = flashbpt.attention(*dense, is_causal=True, enable_gqa=True)
    wanted = torch.autograd.grad(right, dense, grad.transpose(1, 2))
    cu = 2 * torch.arange(n + 1, dtype=torch.int32, device=cuda)
    packed = [x.flatten(0, 1).detach().requires_grad_() for x in (q, k, v)]
    for offsets in (cu, cu.repeat_interleave(2)):
        out = flashbpt.varlen_attention(*packed, offsets, causal=True)
        assert_close("out", out, right.transpose(1, 2).flatten(0, 1))
        got = torch.autograd.grad(out, packed, grad.flatten(0, 1))
        for name, a, b in zip("qkv", got, wanted, strict=True):
            assert_close("d" + name, a, b.transpose(1, 2).flatten(0, 1), ulps=2)


# --- more than 2^31 elements
DIM = 64
PAST = 2**31 // DIM + 4096  # rows of DIM elements, the last ones past 2^31


def low(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def slices_of(rows):
    """The first rows, those around element 2^31, and the last ones."""
    edge = rows - 4096
    return [slice(0, 80), slice(edge - 40, edge + 40), slice(rows - 80, rows)]


def test_offsets_of_queries_past_32_bits(cuda, big):
    big(40)
    q, k, v = low(1, 1, PAST, DIM), low(1, 1, 48, DIM), low(1, 1, 48, DIM)
    call = {"k": k, "v": v}
    saved = forward(q=q, **call)
    grad = low(1, 1, PAST, DIM)
    dq, dk, dv, *_ = backward(grad, None, *saved, q=q, **call)
    assert torch.isfinite(dk).all() and torch.isfinite(dv).all()
    for rows in slices_of(PAST):
        part = q[:, :, rows].contiguous()
        alone = forward(q=part, **call)
        assert_close("out", saved[0][:, :, rows], alone[0])
        assert_close("lse", saved[1][:, :, rows], alone[1])
        wanted = backward(grad[:, :, rows].contiguous(), None, *alone, q=part, **call)
        assert_close("dq", dq[:, :, rows], wanted[0], ulps=2)


def test_offsets_of_keys_past_32_bits(cuda, big):
    """All scores are 0 but those of four keys, which take all the weight.

    They stand out by column 0, where gradients cancel to rounding and are not compared.
    """
    big(40)
    where = torch.tensor([3, PAST - 4097, PAST - 4096, PAST - 1], device=cuda)
    q = low(1, 1, 4, DIM)
    k, v = (torch.zeros(1, 1, PAST, DIM, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    k[:, :, where], v[:, :, where] = low(4, DIM), low(4, DIM)
    q[..., 0], k[:, :, where, 0] = 16.0, 20.0
    call = {"q": q}
    saved = forward(k=k, v=v, **call)
    grad = low(1, 1, 4, DIM)
    got = backward(grad, None, *saved, k=k, v=v, **call)
    few = {"k": k[:, :, where].contiguous(), "v": v[:, :, where].contiguous()}
    alone = forward(**few, **call)
    wanted = backward(grad, None, *alone, **few, **call)
    assert_close("out", saved[0], alone[0], ulps=2)
    assert_close("dq", got[0][..., 1:], wanted[0][..., 1:], ulps=8)
    for name, a, b in zip(("dk", "dv"), got[1:3], wanted[1:3], strict=True):
        assert_close(name, a[:, :, where], b, ulps=8)
        a[:, :, where] = 0
        assert float(a.abs().max()) < 1e-6, f"{name} of keys without weight"


@pytest.mark.parametrize("kind", ["bool", "bf16"])
def test_offsets_of_masks_past_32_bits(cuda, big, kind):
    big(40)
    rows = 46400  # its square is above 2^31
    q, k, v = low(1, 1, rows, DIM), low(1, 1, rows, DIM), low(1, 1, rows, DIM)
    mask = torch.rand(rows, rows, device=cuda, dtype=torch.bfloat16)
    mask = (mask < 0.5 if kind == "bool" else mask)[None, None]
    saved = forward(q=q, k=k, v=v, mask=mask)
    grad = low(1, 1, rows, DIM)
    need = (True, False, False, kind != "bool", False, False)
    dq, _, _, dmask, *_ = backward(grad, None, *saved, q=q, k=k, v=v, mask=mask, need=need)
    for part in (slice(0, 64), slice(23200, 23264), slice(rows - 64, rows)):
        call = {"q": q[:, :, part].contiguous(), "k": k, "v": v,
                "mask": mask[:, :, part].contiguous()}  # fmt: skip
        alone = forward(**call)
        assert_close("out", saved[0][:, :, part], alone[0])
        wanted = backward(grad[:, :, part].contiguous(), None, *alone, need=need, **call)
        assert_close("dq", dq[:, :, part], wanted[0], ulps=4)
        if kind != "bool":
            assert_close("dmask", dmask[:, :, part], wanted[3], ulps=4)


def test_offsets_of_packed_tokens_past_32_bits(cuda, big):
    big(40)
    heads, length = 8, 1024
    count = 2**31 // (heads * length * DIM) + 2
    q, k, v = (low(count * length, h, DIM) for h in (heads, 1, 1))
    cu = length * torch.arange(count + 1, dtype=torch.int32, device=cuda)
    call = {"causal": True, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
    saved = forward(q=q, k=k, v=v, **call)
    grad = low(*q.shape)
    got = backward(grad, None, *saved, q=q, k=k, v=v, **call)
    call["cu_seqlens_q"] = call["cu_seqlens_k"] = cumulative((length,), device=cuda)
    for i in (0, count - 3, count - 1):
        rows = slice(i * length, (i + 1) * length)
        part = {n: x[rows].contiguous() for n, x in {"q": q, "k": k, "v": v}.items()}
        alone = forward(**part, **call)
        assert_close("out", saved[0][rows], alone[0])
        wanted = backward(grad[rows].contiguous(), None, *alone, **part, **call)
        for name, a, b in zip(("dq", "dk", "dv"), got[:3], wanted[:3], strict=True):
            assert_close(name, a[rows], b, ulps=4)


# --- memory
def growth(fn):
    """Peak GPU memory of fn above what was there, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def test_memory_is_linear_in_the_length(cuda):
    """One head of 32768 rows, D 16: scores in bytes would be 1 GiB. q, k, v: 1 MiB each."""
    q, k, v = (low(1, 1, 32768, 16).requires_grad_() for _ in range(3))
    mask = torch.zeros(1, 1, 1, 32768, device=cuda, requires_grad=True)
    for options in (
        {"is_causal": True},
        {"window": (100, 100)},
        {"dropout_p": 0.5},
        {"attn_mask": mask},
        {"attn_mask": mask.detach() == 0},
    ):
        call = partial(flashbpt.attention, q, k, v, **options)
        assert growth(call) < 4
        assert growth(lambda call=call: call().sum().backward()) < 16


def test_groups_and_strides_take_no_copies(cuda):
    """The output and the LSE alone: keys stay unexpanded, tensors of unit last stride in place."""
    packed = low(2, 4096, 16 + 2, 64)
    q, k, v = (x.transpose(1, 2) for x in packed.split((16, 1, 1), 2))
    out_and_lse = (q.numel() * 2 + q.numel() // 64 * 4) / 2**20
    call = partial(flashbpt.attention, key=k, value=v, enable_gqa=True, return_lse=True)
    assert growth(lambda: call(q)) < out_and_lse + 0.5
    strided = low(2, 16, 4096, 128)[..., ::2]
    assert growth(lambda: call(strided)) < 2 * out_and_lse + 0.5  # one copy of the query


def test_no_gradient_no_memory_for_it(cuda):
    """Backward for dv alone allocates neither dq nor its accumulator."""
    inputs = make(Case(lq=4096, lk=64, heads=8, batch=1, dim=64, dtype="bf16"), cuda)
    inputs.grads, inputs.grad_out = ("value",), draw((1, 8, 4096, 64), torch.bfloat16, cuda)
    evaluate(flashbpt.attention, inputs)
    q_mib = inputs.leaves["query"].numel() * 2 / 2**20
    assert growth(lambda: evaluate(flashbpt.attention, inputs)) < 1.5 * q_mib
