"""Edges of the contract: limits near the largest integer, the generator of a refused call, rows
without keys whose LSE has a gradient, checks under torch.compile, sequences of uneven lengths.
"""

import sys

import pytest
import reference
import torch
import torch.nn.functional as F
from cases import VarlenCase, cumulative, generator_state, ids, make_varlen
from compare import assert_bitwise, assert_close, check
from op_calls import forward

import flashbpt

INF, NAN = float("inf"), float("nan")
HUGE = (2**60, 2**62, sys.maxsize)


def qkv(lq=20, lk=33, heads=4, kv_heads=4, grad=False, device="cpu"):
    return [
        torch.randn(2, h, n, 8, requires_grad=grad, device=device)
        for h, n in ((heads, lq), (kv_heads, lk), (kv_heads, lk))
    ]


# ---- limits as large as an integer can be


@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("huge", HUGE)
def test_a_huge_window_limit_is_no_limit(device, huge, causal):
    q, k, v = qkv(grad=True, device=device)

    def results(fn, *arguments, **options):
        out, lse = fn(*arguments, **options, return_lse=True, deterministic=True)
        grads = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
        return out.detach(), lse.detach(), *grads

    cu_q, cu_k = cumulative((20, 20), device=device), cumulative((33, 33), device=device)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
    for fn, arguments, options in (
        (flashbpt.attention, (q, k, v), {"is_causal": causal}),
        (flashbpt.varlen_attention, (*packed, cu_q, cu_k), {"causal": causal}),
    ):
        usual = results(fn, *arguments, **options)
        for window in ((-1, huge), (huge, -1), (huge, huge)):
            got = results(fn, *arguments, **options, window=window)
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, usual, strict=True):
                assert_bitwise(f"{fn.__name__}, window={window}: {name}", a, b)


@pytest.mark.parametrize("name", ["diagonal", "q_offset", "k_offset"])
@pytest.mark.parametrize("value", [*HUGE, -(2**60)])
def test_huge_offsets_are_refused(device, name, value):
    q, k, v = qkv(device=device)
    for limits in ({"causal": True}, {"window_left": 3, "window_right": 2}, {}):
        with pytest.raises(RuntimeError, match=str(value)):
            forward(q=q, k=k, v=v, **{name: value}, **limits)


def test_large_offsets_are_served(device):
    """Far beyond all keys: the lower-left half of a band sees everything, the other nothing."""
    q, k, v = qkv(device=device)
    usual = forward(q=q, k=k, v=v)
    for far in ({"diagonal": 2**40}, {"q_offset": 2**40}):
        for name, a, b in zip(("out", "lse"), forward(q=q, k=k, v=v, causal=True, **far), usual):
            assert_close(name, a, b)
    for far in ({"diagonal": -(2**40)}, {"k_offset": 2**40}):
        out, lse, *_ = forward(q=q, k=k, v=v, causal=True, **far)
        assert (out == 0).all() and (lse == -INF).all()


# ---- the random generator


def packed_qkv(device="cpu"):
    return [torch.randn(12, 4, 8, device=device) for _ in range(3)]


CU = cumulative((5, 7))


@pytest.mark.parametrize("backward_too", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("op", ["attention", "varlen_attention"])
def test_which_kernel_draws_nothing(device, op, backward_too):
    arguments = qkv(device=device)
    if op == "varlen_attention":
        arguments = [*packed_qkv(device), CU.to(device)]
    state = generator_state(device)
    choice = flashbpt.which_kernel(*arguments, op=op, backward=backward_too, dropout_p=0.5)
    assert torch.equal(state, generator_state(device))
    assert choice


DENSE_REFUSALS = {
    "head dim": (lambda q, k, v: (q, k[..., :7], v), {}),
    "key length": (lambda q, k, v: (q, k[:, :, 1:], v), {}),
    "dtype": (lambda q, k, v: (q, k.half(), v), {}),
    "device": (lambda q, k, v: (q, k, v.to("meta")), {}),
    "mask": (None, {"attn_mask": torch.ones(20, 32, dtype=torch.bool)}),
    "mask dtype": (None, {"attn_mask": torch.ones(20, 33, dtype=torch.int32)}),
    "sinks": (None, {"sinks": torch.zeros(3)}),
    "slopes": (None, {"alibi_slopes": torch.zeros(3)}),
    "softcap": (None, {"softcap": -1.0}),
    "window": (None, {"window": (-2, 0)}),
    "causal_align": (None, {"causal_align": "middle"}),
}


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("name", DENSE_REFUSALS)
def test_a_refused_call_draws_nothing(device, name, grad):
    change, options = DENSE_REFUSALS[name]
    arguments = qkv(grad=grad, device=device)
    if change is not None:
        arguments = change(*arguments)
    state = generator_state(device)
    with pytest.raises((RuntimeError, ValueError)):
        flashbpt.attention(*arguments, dropout_p=0.5, **on(device, options))
    assert torch.equal(state, generator_state(device))


def on(device, options):
    return {n: x.to(device) if isinstance(x, torch.Tensor) else x for n, x in options.items()}


VARLEN_REFUSALS = {
    "head dim": (lambda q, k, v, cu: (q, k[..., :7], v, cu), {}),
    "values": (lambda q, k, v, cu: (q, k, v[1:], cu), {}),
    "cu_seqlens dtype": (lambda q, k, v, cu: (q, k, v, cu.float()), {}),
    "sinks": (None, {"sinks": torch.zeros(3)}),
    "window": (None, {"window": (0, -2)}),
}
# What is refused for what cu_seqlens holds, which a call on a GPU does not read.
VARLEN_CONTENTS = {
    "tokens": (lambda q, k, v, cu: (q, k[1:], v[1:], cu), {}),
    "cu_seqlens": (lambda q, k, v, cu: (q, k, v, cu + 1), {}),
}


@pytest.mark.parametrize("name", [*VARLEN_REFUSALS, *VARLEN_CONTENTS])
def test_a_refused_packed_call_draws_nothing(device, name):
    change, options = {**VARLEN_REFUSALS, **VARLEN_CONTENTS}[name]
    arguments = (*packed_qkv(device), CU.to(device))
    if change is not None:
        arguments = change(*arguments)
    state = generator_state(device)
    flashbpt.set_debug_checks(name in VARLEN_CONTENTS)
    try:
        with pytest.raises((RuntimeError, ValueError)):
            flashbpt.varlen_attention(*arguments, dropout_p=0.5, **on(device, options))
    finally:
        flashbpt.set_debug_checks(False)
    assert torch.equal(state, generator_state(device))


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_no_kernel_draws_nothing(device, grad):
    q, k, v = qkv(grad=grad, device=device)
    state = generator_state(device)
    with flashbpt.use_backend("sm90"), pytest.raises(RuntimeError, match="no kernel"):
        flashbpt.attention(q, k, v, dropout_p=0.5)
    assert torch.equal(state, generator_state(device))


def test_a_call_that_patch_sdpa_hands_on_draws_once():
    q, k, v = qkv()
    torch.manual_seed(5)
    usual, state = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5), torch.get_rng_state()
    torch.manual_seed(5)
    with flashbpt.patch_sdpa(), flashbpt.use_backend("sm90"), pytest.warns(UserWarning):
        got = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    assert_bitwise("out", got, usual)
    assert torch.equal(state, torch.get_rng_state())


# ---- rows without keys

EMPTY_ROWS = (0, 37, 99)


def leaves_with_empty_rows(kind):
    """{argument: tensor}: three rows of a hundred see no key."""
    q, k, v = qkv(100, 70, kv_heads=2)
    seen = torch.rand(100, 70) < 0.6
    seen[list(EMPTY_ROWS)] = False
    leaves = {"query": q, "key": k, "value": v}
    if kind == "additive":
        leaves["attn_mask"] = torch.randn(100, 70).masked_fill(~seen, -INF)
    else:
        leaves["attn_mask"] = seen
    if kind == "everything":
        leaves["alibi_slopes"] = torch.rand(4)
        leaves["sinks"] = torch.full((4,), -INF)
    return leaves


@pytest.mark.parametrize("value", [NAN, INF, -INF, 1.0])
@pytest.mark.parametrize("kind", ["boolean", "additive", "everything"])
def test_any_lse_cotangent_of_a_row_without_keys(device, kind, value):
    """All gradients are those of the other rows alone; such a row's own are 0."""
    leaves = leaves_with_empty_rows(kind)
    rows = [i for i in range(100) if i not in EMPTY_ROWS]
    floats = [n for n, x in leaves.items() if x.is_floating_point()]
    out_grad, lse_grad = torch.randn(2, 4, 100, 8), torch.randn(2, 4, 100)

    exact = {n: x.double().requires_grad_() if n in floats else x for n, x in leaves.items()}
    slopes = exact.get("alibi_slopes")
    mask = exact["attn_mask"]
    if slopes is not None:  # the distances are those of the whole, so the bias goes in by hand
        bias = reference.alibi_term(slopes, 100, 70, 0)[:, rows]
        mask = bias.masked_fill(~mask[rows], -INF)
    else:
        mask = mask[rows]
    out, lse = reference.attention(
        exact["query"][:, :, rows], exact["key"], exact["value"], mask, enable_gqa=True
    )
    cotangents = out_grad[:, :, rows].double(), lse_grad[:, :, rows].double()
    wanted = torch.autograd.grad(
        (out, lse), [exact[n] for n in floats], cotangents, allow_unused=True
    )

    lse_grad[:, :, list(EMPTY_ROWS)] = value
    mine = {n: x.to(device, copy=True).requires_grad_(n in floats) for n, x in leaves.items()}
    out, lse = flashbpt.attention(**mine, enable_gqa=True, return_lse=True)
    cotangents = out_grad.to(device), lse_grad.to(device)
    got = torch.autograd.grad((out, lse), [mine[n] for n in floats], cotangents)
    for name, a, b in zip(floats, got, wanted, strict=True):
        assert torch.isfinite(a).all(), f"d{name} is not finite"
        assert_close(f"d{name}", a, torch.zeros_like(a) if b is None else b, ulps=60, terms=400)
    for i in EMPTY_ROWS:
        assert (got[0][:, :, i] == 0).all()


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 130, 320])  # 130 and 320: wider than a kernel's tile
def test_any_out_cotangent_of_a_row_without_keys(device, dim, dtype, value):
    """Gradients are those of a cotangent that is 0 there, whatever arrives for its output."""
    mask = torch.rand(70, 90) < 0.5
    mask[EMPTY_ROWS[0]] = False
    q, k, v = (torch.randn(1, 2, n, dim, dtype=dtype, device=device) for n in (70, 90, 90))
    out_grad = torch.randn(1, 2, 70, dim, dtype=dtype, device=device)

    def gradients(at_the_empty_row):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flashbpt.attention(*leaves, mask.to(device))
        grad = out_grad.clone()
        grad[:, :, EMPTY_ROWS[0]] = at_the_empty_row
        return torch.autograd.grad(out, leaves, grad)

    for name, a, b in zip("qkv", gradients(value), gradients(0.0), strict=True):
        assert torch.isfinite(a).all(), f"d{name} is not finite"
        assert_close(f"d{name}", a, b, ulps=8, terms=90)


@pytest.mark.parametrize("value", [NAN, INF])
def test_any_cotangent_of_packed_rows_without_keys(device, value):
    """Of output and LSE: a sequence without keys, and rows after the last sequence."""
    q, k, v, out_grad = (torch.randn(n, h, 8, device=device) for n, h in
                         ((12, 4), (7, 2), (7, 2), (12, 4)))  # fmt: skip
    cu_q, cu_k = cumulative((4, 6), device=device), cumulative((0, 7), device=device)
    lse_grad = torch.randn(12, 4, device=device)
    gradients = []
    for fill in (0.0, value):
        for x in (out_grad, lse_grad):
            x[:4] = x[10:] = fill
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        results = flashbpt.varlen_attention(
            *leaves, cu_q, cu_k, return_lse=True, deterministic=True
        )
        gradients.append(torch.autograd.grad(results, leaves, (out_grad, lse_grad)))
    for name, b, a in zip("qkv", *gradients, strict=True):
        assert torch.isfinite(b).all()
        assert_bitwise(f"d{name}", a, b)


def test_losses_that_are_nan_at_an_lse_of_minus_infinity(device):
    """torch's own backward of them hands NaN to the row, which the loss does not read."""
    mask = torch.ones(4, 4, dtype=torch.bool, device=device).tril(-1)
    weight = torch.tensor([0.0, 1.0, 1.0, 1.0], device=device)
    for loss in (
        lambda lse: torch.logaddexp(lse, lse)[..., 1:].sum(),
        lambda lse: (weight * lse.square().nan_to_num(0, 0, 0)).sum(),
    ):
        q, k, v = (torch.randn(1, 2, 4, 8, requires_grad=True, device=device) for _ in range(3))
        lse = flashbpt.attention(q, k, v, mask, return_lse=True)[1]
        got = torch.autograd.grad(loss(lse), (q, k))
        exact = [x.detach().double().requires_grad_() for x in (q, k)]
        lse = reference.attention(exact[0][:, :, 1:], exact[1], v.detach().double(), mask[1:])[1]
        padded = torch.cat([torch.zeros_like(lse[..., :1]), lse], -1)
        wanted = torch.autograd.grad(loss(padded), exact)
        for name, a, b in zip(("dq", "dk"), got, wanted, strict=True):
            assert_close(name, a, b, ulps=20)


# ---- compiled packed calls


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize(
    "cu_q, cu_k, said",
    [
        ([0, 5, 40], [0, 5, 12], "cu_seqlens_q.*40"),
        ([0, 5, 12], [0, 5, 40], "cu_seqlens_k.*40"),
        ([0, 9, 7], [0, 5, 12], "cu_seqlens_q.*decrease"),
        ([1, 5, 12], [0, 5, 12], "cu_seqlens_q.*start"),
    ],
)
def test_compiled_calls_check_cu_seqlens(cu_q, cu_k, said, grad):
    torch._dynamo.reset()
    x = torch.randn(12, 2, 8, requires_grad=grad)

    def call(x, cu_q, cu_k):
        return flashbpt.varlen_attention(x, x, x, cu_q, cu_k, causal=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    fine = torch.tensor([0, 5, 12])
    assert_bitwise("out", compiled(x, fine, fine).detach(), call(x, fine, fine).detach())
    for fn in (call, compiled):
        with pytest.raises(RuntimeError, match=f"(?s){said}"):
            fn(x, torch.tensor(cu_q), torch.tensor(cu_k))


# ---- sequences of very different lengths

UNEVEN = [
    VarlenCase((700, 5, 0, 64, 3), heads=2, kv_heads=1, causal=True, lse=True),
    VarlenCase((3, 33, 400), (700, 0, 90), heads=4, kv_heads=2, sinks=True, alibi="h"),
]


@pytest.fixture(params=[2, 5])
def threads(request):
    former = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(former)


@pytest.mark.parametrize("case", UNEVEN, ids=ids(UNEVEN))
def test_one_long_sequence_on_several_threads(case, threads):
    inputs = make_varlen(case, "cpu")
    first = check(inputs, flashbpt.varlen_attention, reference.varlen_attention)
    inputs.grad_out = torch.randn(first["out"].shape)
    inputs.use_lse = False

    def gradients():
        leaves = {n: x.detach().clone().requires_grad_() for n, x in inputs.leaves.items()}
        out = flashbpt.varlen_attention(**leaves, **inputs.options)
        return torch.autograd.grad(out, list(leaves.values()), inputs.grad_out)

    usual = gradients()
    for _ in range(3):
        for name, a, b in zip(inputs.leaves, gradients(), usual, strict=True):
            assert_bitwise(f"d{name}, again", a, b)


# ---- merging, and the backend setting


@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
def test_compiled_merge_of_one_state_twice(grad):
    torch._dynamo.reset()
    out, lse = torch.randn(2, 5, 8), torch.randn(2, 5)
    other = torch.randn(2, 5, 8), torch.randn(2, 5)

    def merged(out, lse, other_out, other_lse):
        return flashbpt.merge_attention_states([out, out, other_out], [lse, lse, other_lse])

    results = []
    for fn in (merged, torch.compile(merged, fullgraph=True, backend="aot_eager")):
        states = [x.clone().requires_grad_(grad) for x in (out, lse, *other)]
        got = fn(*states)
        loss = got[0].square().sum() + got[1].sum()
        results.append([*got, *(torch.autograd.grad(loss, states) if grad else ())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def works():
    """Whether the CPU serves a call: under "auto" and "cpu", and not under the other two."""
    x = torch.zeros(1, 1, 2, 8)
    return bool(flashbpt.which_kernel(x, x, x))


def test_use_backend_enters_again():
    cpu, sm90 = flashbpt.use_backend("cpu"), flashbpt.use_backend("sm90")
    try:
        assert not works()
        for _ in range(2):
            with cpu:
                assert works()
                with sm90:
                    assert not works()
                    with cpu:
                        assert works()
                    assert not works()
                assert works()
            assert not works()  # what was set when the block began
    finally:
        flashbpt.use_backend("auto")


def test_use_backend_puts_back_what_was_there():
    with flashbpt.use_backend("sm90"):
        assert not works()
    assert works()
    again = flashbpt.use_backend("sm90")
    with again:
        pass
    assert works()
    with again:
        assert not works()
        flashbpt.use_backend("auto")
        assert works()
    assert works()
    with pytest.raises(ZeroDivisionError), again:
        raise ZeroDivisionError
    assert works()
