"""Dropout on the GPU: the mask of the CPU for the same state, in forward and backward alike, on
every tile; the state that calls draw.
"""

import pytest
import reference
import torch
from cases import DTYPES, Case, VarlenCase, cumulative, ids, make, make_varlen
from compare import assert_close, check
from op_calls import backward, forward, keep_mask, with_dropout

import flashbpt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80_and_faster")]

KERNELS = [("bf16", 64), ("fp16", 128), ("bf16", 256), ("fp32", 64), ("fp32", 256), ("bf16", 512)]
STATES = [(0, 0), (-1, 0xFFFFFFFF), (0x123456789ABCDEF, 77 + (5 << 32)), (-(2**62), 2**31)]


def state_on(device, state):
    return torch.tensor(state, dtype=torch.int64, device=device)


# --- the mask, read off exactly
@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("state", STATES, ids=str)
def test_forward_and_backward_keep_the_same_weights(cuda, state, dtype, dim):
    """Equal scores, V = I: the output is the weights. grad_out = I: so is dV, transposed."""
    batch, heads, length, p = 2, 3, min(dim, 200), 0.4
    q = torch.zeros(batch, heads, length, dim, dtype=DTYPES[dtype], device=cuda)
    eye = torch.eye(length, dim, dtype=q.dtype, device=cuda).expand(batch, heads, length, dim)
    call = {"q": q, "k": q, "v": eye, "rng_state": state_on(cuda, state), "dropout_p": p}
    keep = keep_mask(state, p, (batch, heads, length, length))
    saved = forward(**call)
    assert torch.equal(saved[0][..., :length].cpu() != 0, keep)
    dv = backward(eye.contiguous(), None, *saved, **call)[2]
    assert torch.equal(dv[..., :length].mT.cpu() != 0, keep)
    kept = saved[0][..., :length].double().cpu()[keep]
    assert_close("weights", kept, torch.full_like(kept, 1 / (length * (1 - p))), dtype=q.dtype)


OFFSETS = {
    "rows": {"q_offset": 48},
    "keys": {"k_offset": 80},
    "heads": {"head_offset": 5, "total_heads": 11},
    "batches": {"batch_offset": 70000},
    "all": {"q_offset": 2**20, "k_offset": 4096, "head_offset": 3, "total_heads": 7,
            "batch_offset": 2**31},
}  # fmt: skip


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("name", OFFSETS)
def test_offsets(cuda, name, dtype, dim):
    offsets, length, p = OFFSETS[name], min(dim, 160), 0.6
    q = torch.zeros(2, 2, length, dim, dtype=DTYPES[dtype], device=cuda)
    eye = torch.eye(length, dim, dtype=q.dtype, device=cuda).expand(2, 2, length, dim).contiguous()
    state = (0x5DEECE66D, 12345)
    call = {"q": q, "k": q, "v": eye, "rng_state": state_on(cuda, state), "dropout_p": p, **offsets}
    order = ("batch_offset", "head_offset", "q_offset", "k_offset", "total_heads")
    keep = keep_mask(state, p, (2, 2, length, length), [offsets.get(n, 0) for n in order])
    saved = forward(**call)
    assert torch.equal(saved[0][..., :length].cpu() != 0, keep)
    dv = backward(eye, None, *saved, **call)[2]
    assert torch.equal(dv[..., :length].mT.cpu() != 0, keep)


@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_packed(cuda, dtype, dim):
    """batch is the sequence, rows and keys count from its first."""
    lens, p, state = (70, 0, 33, 128), 0.4, (99, 4)
    tokens, cu = sum(lens), cumulative(lens, device=cuda)
    q = torch.zeros(tokens, 2, dim, dtype=DTYPES[dtype], device=cuda)
    v = torch.zeros_like(q)
    for start, n in zip(cu.tolist(), lens, strict=False):
        n = min(n, dim)
        v[start : start + n, :, :n] = torch.eye(n, dtype=q.dtype, device=cuda)[:, None]
    call = {"q": q, "k": q, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "dropout_p": p,
            "rng_state": state_on(cuda, state)}  # fmt: skip
    saved = forward(**call)
    dv = backward(v, None, *saved, **call)[2]
    for i, (start, n) in enumerate(zip(cu.tolist(), lens, strict=False)):
        cols, rows = min(n, dim), slice(start, start + n)
        keep = keep_mask(state, p, (1, 2, n, n), (i, 0, 0, 0, 2))[0]
        assert torch.equal(saved[0][rows, :, :cols].cpu() != 0, keep[..., :cols].transpose(0, 1))
        seen = dv[rows, :, :cols].cpu() != 0  # [key, head, query]
        assert torch.equal(seen, keep[:, :cols].permute(2, 0, 1))


# --- values and gradients
CASES = [
    Case(lq=300, lk=257, causal=True, heads=4, kv_heads=1),
    Case(lq=130, lk=300, heads=6, kv_heads=2, mask="own:b1qk", sinks=True, alibi="h", lse=True),
    Case(lq=130, lk=200, heads=2, mask="bool:bhqk", window=(90, 40), softcap=5.0, lse=True),
]


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("number", range(len(CASES)), ids=ids(CASES))
def test_values_and_gradients(cuda, number, dtype, dim):
    for p in (0.1, 0.75):
        inputs = make(Case(**{**vars(CASES[number]), "dtype": dtype, "dim": dim}), cuda)
        check(inputs, with_dropout(inputs, p, flashbpt.attention))


VARLEN = [
    VarlenCase((129, 5, 0, 64), causal=True, heads=4, kv_heads=2, lse=True),
    VarlenCase((40, 70), (300, 33), window=(100, 20), alibi="bh", sinks=True, extra=7),
]


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("number", range(len(VARLEN)), ids=ids(VARLEN))
def test_packed_values_and_gradients(cuda, number, dtype, dim):
    case = VarlenCase(**{**vars(VARLEN[number]), "dtype": dtype, "dim": dim})
    inputs = make_varlen(case, cuda)
    fn = with_dropout(inputs, 0.3, flashbpt.varlen_attention)
    check(inputs, fn, reference.varlen_attention)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_cpu_gives_the_same(cuda, packed):
    """One state on both devices: outputs and gradients agree in fp32."""
    if packed:
        q, k, v = (torch.randn(n, 4, 40) for n in (110, 150, 150))
        more = {"cu_seqlens_q": cumulative((40, 70)), "cu_seqlens_k": cumulative((90, 60))}
    else:
        q, k, v = (torch.randn(2, 4, n, 40) for n in (110, 150, 150))
        more = {"causal": True}
    call = {"q": q, "k": k, "v": v, "rng_state": torch.tensor([7, 9]), **more}
    grad = torch.randn_like(q)
    results = []
    for device in ("cpu", cuda):
        here = {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in call.items()}
        here["dropout_p"] = 0.3
        saved = forward(**here)
        results.append([*saved[:2], *backward(grad.to(device), None, *saved, **here)[:3]])
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True):
        assert_close(name, b, a, ulps=20)


# --- the state
def test_the_state_is_that_of_the_generator(cuda):
    """The seed, and the offset before the call; four draws a thread further after it."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    torch.manual_seed(2**40 + 5)
    like, seen = torch.zeros(1, device=cuda), []
    for _ in range(3):
        seen.append(generator.get_offset())
        state = torch.ops.flashbpt.draw_rng_state(like, 4)
        assert state.dtype == torch.int64 and state.device == like.device
        assert state.tolist() == [2**40 + 5, seen[-1]]
    assert seen == sorted(set(seen)) and all(offset % 4 == 0 for offset in seen)


def test_the_generator_of_the_cpu_stays(cuda):
    x = torch.randn(1, 2, 20, 8, device=cuda)
    before = torch.get_rng_state()
    flashbpt.attention(x, x, x, dropout_p=0.5)
    assert torch.equal(before, torch.get_rng_state())


def test_state_of_another_kind_is_refused(cuda):
    x = torch.randn(1, 2, 20, 8, device=cuda)
    for state in (torch.tensor([1, 2]), state_on(cuda, (1, 2)).int(), state_on(cuda, (1, 2, 3))):
        with pytest.raises(RuntimeError, match="rng_state"):
            forward(q=x, k=x, v=x, rng_state=state, dropout_p=0.5)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_rate(cuda, p):
    """Over 16 million weights, and over columns and rows apart."""
    x = torch.zeros(4, 8, 1024, 64, dtype=torch.bfloat16, device=cuda)
    v = torch.zeros_like(x)
    v[..., 0] = 1.0  # a row's output counts what it keeps
    out = flashbpt.attention(x, x, v, dropout_p=p)[..., 0].double()
    kept = out * (1 - p)  # the share of its 1024 weights that a row keeps
    n = 1024 * kept.numel()
    rounding = 2**-9
    assert abs(kept.mean() - (1 - p)) < 6 * (p * (1 - p) / n) ** 0.5 + rounding / 100
    assert (kept - (1 - p)).abs().max() < 7 * (p * (1 - p) / 1024) ** 0.5 + rounding
