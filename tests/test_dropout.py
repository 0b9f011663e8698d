"""Dropout: the Philox mask and its layout, its effect on values and gradients, its state."""

import numpy as np
import philox
import pytest
import reference
import torch
from cases import Case, VarlenCase, generator_state, ids, make, make_varlen
from compare import assert_bitwise, assert_close, check
from op_calls import backward, forward, next_state, with_dropout
from torch.utils.checkpoint import checkpoint

import flashbpt

ZERO_WORDS = (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)
ONES_WORDS = (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)


def dropout_mask(state, p, sizes, offsets=(0, 0, 0, 0, 0), device="cpu"):
    offsets = [*offsets[:4], offsets[4] or sizes[1]]
    state = torch.tensor(state, dtype=torch.int64, device=device)
    return torch.ops.flashbpt.dropout_mask(state, p, list(sizes), offsets)


def random_state():
    return [int(x) for x in torch.randint(-(2**63), 2**63 - 1, (2,), dtype=torch.int64)]


# --- the generator
def test_known_answers_of_the_model():
    assert tuple(int(x) for x in philox.philox((0, 0, 0, 0), (0, 0))) == ZERO_WORDS
    ones = philox.LOW
    assert tuple(int(x) for x in philox.philox((ones,) * 4, (ones,) * 2)) == ONES_WORDS


@pytest.mark.parametrize("word", range(4))
def test_known_answers_of_the_op(device, word):
    """The word at (q, k) is read exactly from the mask: at p = word / 2^32 it is kept, one step
    above it is dropped.
    """
    at, value = (0, 0, 8 * (word // 2), 8 * (word % 2)), ZERO_WORDS[word]
    for p, kept in ((value / 2**32, True), ((value + 1) / 2**32, False)):
        assert bool(dropout_mask((0, 0), p, (1, 1, 16, 16), device=device)[at]) == kept


def test_op_at_the_largest_counters(device):
    """Seed, offset and plane all ones, and the last rows that 32 bits can count."""
    state, offsets, sizes = (
        (-1, 0xFFFFFFFF),
        (0xFFFFFFFF, 0, 0xFFFFFFE0, 0xFFFFFFF0, 1),
        (1, 1, 32, 16),
    )
    for p in (0.3, 0.7):
        got = dropout_mask(state, p, sizes, offsets, device)
        np.testing.assert_array_equal(got.cpu().numpy(), philox.keep_mask(state, p, sizes, offsets))


def test_rows_beyond_32_bits_are_right_or_refused(device):
    state, offsets, sizes = random_state(), (0, 0, 2**33, 16, 1), (1, 1, 32, 32)
    try:
        got = dropout_mask(state, 0.5, sizes, offsets, device)
    except RuntimeError as refused:
        assert str(2**33) in str(refused)
    else:
        np.testing.assert_array_equal(
            got.cpu().numpy(), philox.keep_mask(state, 0.5, sizes, offsets)
        )


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1), (2, 3, 17, 33), (3, 2, 40, 64), (1, 5, 130, 7)], ids=str
)
def test_op_against_the_model(device, sizes):
    for p in (0.1, 0.5, 0.97):
        state = random_state()
        for offsets in ((0, 0, 0, 0, 0), (5, 3, 16, 4096, 11), (2**31, 0, 2**20, 32, 7)):
            got = dropout_mask(state, p, sizes, offsets, device)
            assert got.dtype == torch.bool and tuple(got.shape) == sizes
            np.testing.assert_array_equal(
                got.cpu().numpy(), philox.keep_mask(state, p, sizes, offsets)
            )


def test_only_the_low_32_bits_of_the_offset_count(device):
    sizes, state = (1, 2, 32, 32), random_state()
    other = [state[0], (state[1] & 0xFFFFFFFF) | (5 << 32)]
    assert torch.equal(
        dropout_mask(state, 0.5, sizes, device=device),
        dropout_mask(other, 0.5, sizes, device=device),
    )


@pytest.mark.parametrize("p", [0.0, 2.0**-33, 2.0**-32, 0.5, 1 - 2.0**-32, 1 - 2.0**-33, 1.0])
def test_threshold_edges(device, p):
    """T = ceil(p * 2^32): any p above 0 drops word 0, and T = 2^32 drops everything."""
    state = random_state()
    np.testing.assert_array_equal(
        dropout_mask(state, p, (1, 2, 64, 64), device=device).cpu().numpy(),
        philox.keep_mask(state, p, (1, 2, 64, 64)),
    )
    if p == 0:
        assert dropout_mask(state, p, (1, 2, 64, 64), device=device).all()
    if philox.threshold(p) >= 2**32:
        assert not dropout_mask(state, p, (1, 2, 64, 64), device=device).any()


# --- values and gradients
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_mask_recovered_with_identity_values(device, p):
    """q = 0 and v = I: the output is the weights themselves, each 0 or 1 / (lk (1 - p))."""
    batch, heads, lq, lk = 2, 3, 130, 100
    q, k = (
        torch.zeros(batch, heads, lq, 8, device=device),
        torch.randn(batch, heads, lk, 8, device=device),
    )
    v = torch.eye(lk, device=device).expand(batch, heads, lk, lk)
    state = next_state(q, 1234)
    weights = flashbpt.attention(q, k, v, dropout_p=p)
    keep = torch.from_numpy(philox.keep_mask(state, p, (batch, heads, lq, lk))).to(device)
    assert torch.equal(weights != 0, keep)
    torch.testing.assert_close(
        weights[keep], torch.full_like(weights[keep], 1 / (lk * (1 - p))), atol=0, rtol=1e-5
    )
    rate, n = 1 - keep.double().mean().item(), keep.numel()
    assert abs(rate - p) < 5 * (p * (1 - p) / n) ** 0.5


CASES = [
    Case(lq=130, lk=70, lse=True),
    Case(lq=300, lk=257, causal=True, heads=3, batch=1, dtype="bf16", dim=32),
    Case(
        lq=70,
        lk=90,
        heads=6,
        kv_heads=2,
        mask="fp32:b1qk",
        sinks=True,
        alibi="h",
        softcap=5.0,
        lse=True,
    ),
    Case(lq=65, lk=300, causal=True, align="lower-right", window=(100, -1), dtype="fp16", dim=64),
    Case(lq=20, lk=33, heads=4, kv_heads=1, dim_v=24, mask="bool:bhqk", dtype="fp64", lse=True),
    Case(lq=513, lk=40, heads=1, batch=3, mask="own:b11k", dtype="bf16"),
    Case(lq=40, lk=600, heads=4, kv_heads=2, batch=1, lse=True),
]


@pytest.mark.parametrize("p", [0.1, 0.75])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_values_and_gradients_match_the_mask(device, case, p):
    """Output and every gradient are those of the composition with exactly the Philox mask; the LSE
    is undropped.
    """
    inputs = make(case, device)
    check(inputs, with_dropout(inputs, p, flashbpt.attention))


@pytest.mark.parametrize(
    "shape", [(40, 8), (6, 40, 8), (2, 3, 40, 8), (2, 2, 3, 40, 8)], ids=lambda s: str(len(s))
)
def test_mask_of_other_ranks_counts_the_planes_in_order(device, shape):
    q, k = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    v = torch.eye(40, device=device).expand(*shape[:-2], 40, 40)
    state = next_state(q, 5)
    weights = flashbpt.attention(q, k, v, dropout_p=0.5)
    planes = int(np.prod(shape[:-2]))
    keep = philox.keep_mask(state, 0.5, (1, planes, 40, 40)).reshape(*shape[:-2], 40, 40)
    np.testing.assert_array_equal((weights != 0).cpu().numpy(), keep)


VARLEN = [
    VarlenCase((33, 0, 70, 1), lse=True),
    VarlenCase((20, 100), (50, 64), heads=4, kv_heads=2, causal=True, extra=5),
    VarlenCase((300,), dtype="bf16", causal=True, dim=32),
]


@pytest.mark.parametrize("case", VARLEN, ids=ids(VARLEN))
def test_packed_rows_count_from_their_sequence(device, case):
    """batch = sequence, rows and keys local to it."""
    inputs = make_varlen(case, device)
    fn = with_dropout(inputs, 0.4, flashbpt.varlen_attention)
    check(inputs, fn, reference.varlen_attention)


def test_p_zero_draws_nothing(device):
    inputs = make(Case(lq=70), device)
    torch.manual_seed(3)
    before = generator_state(device)
    out = flashbpt.attention(**inputs.leaves, dropout_p=0.0)
    assert torch.equal(before, generator_state(device))
    assert_bitwise("out", out, flashbpt.attention(**inputs.leaves))


def test_tiny_p_changes_nothing(device):
    """p = 1e-11 drops one weight in 2^32 and scales by 1 + 1e-11."""
    inputs = make(Case(lq=70, dtype="bf16"), device)
    torch.manual_seed(11)
    assert_close(
        "out",
        flashbpt.attention(**inputs.leaves, dropout_p=1e-11),
        flashbpt.attention(**inputs.leaves),
    )


@pytest.mark.parametrize("p", [1.0, 1 - 2.0**-33])
def test_p_one_gives_zeros_and_the_usual_lse(device, p):
    inputs = make(Case(lq=70, lk=66, heads=4, kv_heads=2, sinks=True, causal=True), device)
    leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
    out, lse = flashbpt.attention(**leaves, **inputs.options, dropout_p=p, return_lse=True)
    _, usual = flashbpt.attention(**leaves, **inputs.options, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, usual)
    for name, gradient in zip(
        leaves, torch.autograd.grad(out, list(leaves.values()), torch.randn_like(out)), strict=True
    ):
        assert gradient is not None and (gradient == 0).all(), name


def test_p_one_gives_zeros_whatever_the_values_hold(device):
    q, k, v = (torch.randn(1, 2, 40, 8, device=device, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        v[..., 3, :] = torch.inf
        v[..., 5, :] = torch.nan
    out = flashbpt.attention(q, k, v, dropout_p=1.0)
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out, (q, k, v), torch.randn_like(out)):
        assert (gradient == 0).all()


def test_p_one_still_passes_the_gradient_of_the_lse(device):
    q, k, v = (torch.randn(1, 2, 40, 8, device=device, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, 2, 40, device=device)
    _, lse = flashbpt.attention(q, k, v, dropout_p=1.0, return_lse=True)
    got = torch.autograd.grad(lse, (q, k), weight)
    _, lse = flashbpt.attention(q, k, v, return_lse=True)
    for a, b in zip(got, torch.autograd.grad(lse, (q, k), weight), strict=True):
        torch.testing.assert_close(a, b)


def test_rate_over_many_weights(device):
    """A mean over 4 million weights, and over every row and column block apart."""
    for p in (0.1, 0.5, 0.9):
        keep = dropout_mask(random_state(), p, (2, 2, 1024, 1024), device=device).double()
        for n, x in (
            (keep.numel(), keep.mean()),
            (2 * 2 * 1024, keep.mean((0, 1, 3))),
            (2 * 2 * 1024, keep.mean((0, 1, 2))),
        ):
            assert ((1 - x - p).abs() < 6 * (p * (1 - p) / n) ** 0.5).all()


# --- the state
def test_same_seed_same_result_and_two_calls_differ(device):
    inputs = make(Case(lq=70), device)
    torch.manual_seed(1)
    first, second = (flashbpt.attention(**inputs.leaves, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert_bitwise("out", flashbpt.attention(**inputs.leaves, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_draw_rng_state_advances_the_generator(device):
    like = torch.zeros(1, device=device)
    torch.manual_seed(8)
    states = [torch.ops.flashbpt.draw_rng_state(like, 4) for _ in range(50)]
    assert all(s.dtype == torch.int64 and s.shape == (2,) for s in states)
    assert len({tuple(s.tolist()) for s in states}) == 50
    torch.manual_seed(8)
    assert torch.equal(torch.ops.flashbpt.draw_rng_state(like, 4), states[0])


def test_draws_interleave_with_those_of_torch(device):
    """Attention takes its part of the generator's stream: what follows differs from what would have
    come without it.
    """
    x = torch.randn(1, 1, 20, 8, device=device)
    torch.manual_seed(8)
    plain = torch.rand(4, device=device)
    torch.manual_seed(8)
    flashbpt.attention(x, x, x, dropout_p=0.5)
    after = torch.rand(4, device=device)
    assert not torch.equal(plain, after)
    torch.manual_seed(8)
    flashbpt.attention(x, x, x, dropout_p=0.1)
    assert torch.equal(after, torch.rand(4, device=device))


def test_backward_draws_nothing(device):
    q = torch.randn(1, 1, 20, 8, device=device, requires_grad=True)
    out = flashbpt.attention(q, q, q, dropout_p=0.5)
    before = generator_state(device)
    out.sum().backward()
    assert torch.equal(before, generator_state(device))


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoint_recomputes_the_same_mask(device, reentrant):
    leaves = [torch.randn(2, 2, 70, 16, device=device, requires_grad=True) for _ in range(3)]

    def block(q, k, v):
        return flashbpt.attention(q, k, v, dropout_p=0.5).square()

    torch.manual_seed(21)
    right = block(*leaves)
    right_grads = torch.autograd.grad(right.sum(), leaves)
    torch.manual_seed(21)
    out = checkpoint(block, *leaves, use_reentrant=reentrant)
    torch.rand(100, device=device)
    out.sum().backward()
    assert_bitwise("out", out.detach(), right.detach())
    for name, leaf, wanted in zip("qkv", leaves, right_grads, strict=True):
        torch.testing.assert_close(leaf.grad, wanted, msg=lambda m, n=name: f"d{n}: {m}")


# --- blocks of one mask
def whole_call(device, dtype=torch.float32):
    q = torch.randn(3, 4, 96, 16, device=device, dtype=dtype)
    k, v = (
        torch.randn(3, 4, 80, 16, device=device, dtype=dtype),
        torch.randn(3, 4, 80, 16, device=device, dtype=dtype),
    )
    state = torch.tensor(random_state(), device=device)
    return {"q": q, "k": k, "v": v, "rng_state": state, "dropout_p": 0.4, "total_heads": 4}


BLOCKS = {
    "query rows": {"q_offset": 48},
    "batch": {"batch_offset": 1},
    "heads": {"head_offset": 2},
    "together": {"q_offset": 16, "batch_offset": 2, "head_offset": 3},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_offsets_select_a_block_of_the_same_mask(device, name):
    """Rows, heads or batches of a call, computed alone with their offset, are those of the whole
    call.
    """
    offsets, call = BLOCKS[name], whole_call(device)
    whole = forward(**call)[0]
    b, h, r = (offsets.get(n, 0) for n in ("batch_offset", "head_offset", "q_offset"))
    part = {
        **call,
        "q": call["q"][b:, h:, r:],
        "k": call["k"][b:, h:],
        "v": call["v"][b:, h:],
        **offsets,
    }
    assert_close("out", forward(**part)[0], whole[b:, h:, r:])


def test_key_offset_selects_a_block_of_the_same_mask(device):
    """Two halves of the keys with one mask, merged by their LSE, are the whole."""
    call = whole_call(device)
    whole, whole_lse, *_ = forward(**call)
    halves = [
        forward(**{**call, "k": call["k"][:, :, s], "v": call["v"][:, :, s]}, k_offset=s.start)
        for s in (slice(0, 48), slice(48, 80))
    ]
    lses = torch.stack([lse for _, lse, *_ in halves])
    weights = (lses - torch.logsumexp(lses, 0)).exp()[..., None]
    assert_close(
        "out", sum(w * out for w, (out, *_) in zip(weights, halves, strict=True)), whole, ulps=10
    )
    assert_close("lse", torch.logsumexp(lses, 0), whole_lse, ulps=10)


def test_offsets_of_causal_blocks(device):
    """k + k_offset <= q + q_offset + diagonal, under the same mask."""
    call = {**whole_call(device), "causal": True}
    whole = forward(**call)[0]
    part = {
        **call,
        "q": call["q"][:, :, 32:64],
        "k": call["k"][:, :, :64],
        "v": call["v"][:, :, :64],
        "q_offset": 32,
    }
    assert_close("out", forward(**part)[0], whole[:, :, 32:64])


def test_backward_of_a_block_uses_the_same_mask(device):
    call = whole_call(device)
    grad = torch.randn(3, 4, 96, 16, device=device)
    whole = backward(grad, None, *forward(**call), **call)
    dk, dv = torch.zeros_like(whole[1]), torch.zeros_like(whole[2])
    for start in (0, 16, 64):
        rows = slice(start, {0: 16, 16: 64, 64: 96}[start])
        part = {**call, "q": call["q"][:, :, rows], "q_offset": start}
        dq, dk_part, dv_part, *_ = backward(grad[:, :, rows], None, *forward(**part), **part)
        assert_close("dq", dq, whole[0][:, :, rows], ulps=20)
        dk, dv = dk + dk_part, dv + dv_part
    assert_close("dk", dk, whole[1], ulps=20)
    assert_close("dv", dv, whole[2], ulps=20)


@pytest.mark.parametrize("name", ["q_offset", "k_offset"])
@pytest.mark.parametrize("value", [8, 1, 33])
def test_misaligned_offsets_are_refused_with_dropout(device, name, value):
    call = whole_call(device)
    with pytest.raises(RuntimeError, match=rf"(?s){value}.*16|16.*{value}"):
        forward(**call, **{name: value})
    del call["rng_state"]
    forward(**{**call, "dropout_p": 0.0}, **{name: value})


def test_missing_state_is_refused(device):
    call = whole_call(device)
    with pytest.raises(RuntimeError, match="rng_state"):
        forward(**{**call, "rng_state": None})
