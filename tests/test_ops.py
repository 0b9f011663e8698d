"""The ops as torch sees them: opcheck, fakes and strides, refusal of grad, autocast, FLOPs, meta,
control functions.
"""

import pytest
import torch
from cases import Case, VarlenCase, cumulative, make, make_varlen
from compare import assert_close
from op_calls import OPTIONS, backward, forward, needs
from test_attention_layout import blhd, last_dim_strided, lengths_last
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import flashbpt

OPS = torch.ops.flashbpt
FUNCTIONAL = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")


def tensors(
    device, dtype=torch.float32, heads=4, kv_heads=2, lq=9, lk=13, dim_v=8, layout=lambda x: x
):
    shapes = {"q": (2, heads, lq, 8), "k": (2, kv_heads, lk, 8), "v": (2, kv_heads, lk, dim_v)}
    return {n: layout(torch.randn(s, device=device).to(dtype)) for n, s in shapes.items()}


def op_samples(device):
    """Argument sets of attention_forward that differ in what the op returns or reads."""
    x, half = tensors(device), tensors(device, torch.bfloat16, dim_v=5)
    mask = torch.rand(2, 1, 9, 13, device=device) < 0.7
    packed = {n: torch.randn(22, h, 8, device=device) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    cu = cumulative((9, 0, 13), device=device)
    state = torch.tensor([3, 4], device=device)
    return {
        "plain": x,
        "bf16, causal, window": {**half, "causal": True, "window_left": 4},
        "bool mask": {**x, "mask": mask},
        "additive mask": {**x, "mask": torch.randn(1, 4, 1, 13, device=device)},
        "sinks, slopes, softcap": {
            **x,
            "sinks": torch.randn(4, device=device),
            "alibi_slopes": torch.rand(2, 4, device=device),
            "softcap": 3.0,
        },
        "dropout": {**x, "rng_state": state, "dropout_p": 0.5},
        "blhd": tensors(device, layout=blhd),
        "strided": tensors(device, layout=last_dim_strided),
        "no keys": tensors(device, lk=0),
        "no rows": tensors(device, lq=0),
        "packed": {
            **packed,
            "cu_seqlens_q": cu,
            "cu_seqlens_k": cu,
            "max_seqlen_q": 13,
            "max_seqlen_k": 13,
            "causal": True,
        },
        "packed, no maxima": {**packed, "cu_seqlens_q": cu.long(), "cu_seqlens_k": cu.long()},
        "one row": tensors(device, lq=1, layout=blhd),
    }


SAMPLES = list(op_samples("cpu"))


def backward_call(arguments, with_lse):
    saved = forward(**arguments)
    names = ("out", "lse", "lse_lo", "mask_tiles")
    grad = torch.randn_like(saved[0])
    return {
        "grad_out": grad,
        "grad_lse": torch.randn_like(saved[1]) if with_lse else None,
        **dict(zip(names, saved, strict=True)),
        **OPTIONS,
        **arguments,
        "deterministic": False,
        "need": list(needs(arguments)),
    }


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_forward(device, name):
    opcheck(
        OPS.attention_forward.default,
        (),
        {**OPTIONS, **op_samples(device)[name]},
        test_utils=FUNCTIONAL,
    )


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck_backward(device, name):
    call = backward_call(op_samples(device)[name], with_lse=name != "plain")
    opcheck(OPS.attention_backward.default, (), call, test_utils=FUNCTIONAL)


@pytest.mark.parametrize("name", ["plain", "bf16, causal, window", "additive mask", "packed"])
def test_opcheck_backward_accumulate(device, name):
    call = backward_call(op_samples(device)[name], with_lse=True)
    call.update(
        dk=torch.zeros(call["k"].shape, device=device),
        dv=torch.zeros(call["v"].shape, device=device),
    )
    opcheck(OPS.attention_backward_accumulate.default, (), call, test_utils=FUNCTIONAL)


def test_opcheck_partial_needs(device):
    for need in (
        (True, False, False, False, False, False),
        (False, True, True, False, False, False),
    ):
        call = {**backward_call(op_samples(device)["plain"], False), "need": list(need)}
        opcheck(OPS.attention_backward.default, (), call, test_utils=FUNCTIONAL)


def test_opcheck_dropout_mask(device):
    state = torch.tensor([5, 6], device=device)
    opcheck(
        OPS.dropout_mask.default,
        (state, 0.3, [2, 3, 17, 20], [0, 0, 16, 32, 3]),
        test_utils=FUNCTIONAL,
    )


def test_opcheck_draw_rng_state(device):
    """Random by nature: equal results cannot be asked for; schema and fake can."""
    opcheck(
        OPS.draw_rng_state.default,
        (torch.zeros(1, device=device), 4),
        test_utils=("test_schema", "test_faketensor"),
    )


def test_only_the_draw_is_tagged_random():
    for name in (
        "attention_forward",
        "attention_backward",
        "attention_backward_accumulate",
        "dropout_mask",
        "draw_rng_state",
    ):
        tagged = torch.Tag.nondeterministic_seeded in getattr(OPS, name).default.tags
        assert tagged == (name == "draw_rng_state"), name


def test_autograd_is_registered_at_an_autograd_key(device):
    x = tensors(device)
    leaves = {n: t.requires_grad_() for n, t in x.items()}
    opcheck(
        OPS.attention_forward.default,
        (),
        {**OPTIONS, **leaves},
        test_utils="test_autograd_registration",
    )
    with torch.no_grad():
        call = backward_call(x, True)
    call["grad_out"].requires_grad_()
    opcheck(OPS.attention_backward.default, (), call, test_utils="test_autograd_registration")


LAYOUTS = {
    "bhld": lambda x: x,
    "blhd": blhd,
    "last dim strided": last_dim_strided,
    "lengths last": lengths_last,
    "hbld": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "packed": lambda x: torch.cat([x, x, x], -1)[..., 8:16],
    "expanded heads": lambda x: x[:, :1].expand(x.shape),
    "expanded rows": lambda x: x[:, :, :1].expand(x.shape),
    "one batch": lambda x: x[:1],
    "one row": lambda x: blhd(x[:, :, :1]),
    "one head": lambda x: blhd(x)[:, :2][:, :1],
}


def describe(x):
    return None if x is None else (tuple(x.shape), tuple(x.stride()), x.dtype, x.device.type)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", ["op", "public"])
def test_fakes_have_the_strides_of_the_real_thing(device, layout, function):
    for dim_v, lq in ((8, 9), (5, 9), (8, 1)):
        x = tensors(device, kv_heads=4, dim_v=dim_v, lq=lq, layout=LAYOUTS["bhld"])
        x["q"] = LAYOUTS[layout](x["q"])
        x["k"], x["v"] = (t[: x["q"].size(0), : x["q"].size(1)] for t in (x["k"], x["v"]))
        x["mask"] = torch.randn(x["q"].size(2), 13, device=device)[None, None]
        with FakeTensorMode() as mode:
            fake = {n: mode.from_tensor(t) for n, t in x.items()}
        if function == "op":
            real_out = forward(**x)
            with mode:
                fake_out = forward(**fake)
        else:
            real_out = public_with_gradients(x)
            with mode:
                fake_out = public_with_gradients(fake)
        for i, (a, b) in enumerate(zip(real_out, fake_out, strict=True)):
            assert describe(a) == describe(b), f"result {i}, dim_v {dim_v}"


@pytest.mark.parametrize("dims", [(2, 4, 130, 33), (1, 1, 1, 33), (2, 1, 130, 1), (1, 4, 64, 16)])
def test_fake_pieces_of_a_boolean_mask_on_a_gpu(dims):
    """64 rows x 16 keys each, of the mask's own sizes; no other mask has them."""
    with FakeTensorMode():
        x = {n: torch.empty(2, 4, lens, 8, device="cuda") for n, lens in (("q", 130), ("k", 33))}
        x["v"], mask = x["k"], torch.empty(dims, dtype=torch.bool, device="cuda")
        tiles = forward(**x, mask=mask)[3]
        empty = [forward(**x)[3], forward(**x, mask=mask.float())[3]]
    shape = (*dims[:2], -(-dims[2] // 64), -(-dims[3] // 16))
    assert describe(tiles)[::2] == (shape, torch.uint8)
    assert all(describe(t)[::2] == ((0,), torch.uint8) for t in empty)


def public_with_gradients(x):
    leaves = [t.detach().requires_grad_() for t in x.values()]
    out, lse = flashbpt.attention(*leaves[:3], attn_mask=leaves[3][0, 0], return_lse=True)
    return [out, lse, *torch.autograd.grad(out.sum() + lse.sum(), leaves)]


def test_meta_device():
    q, k = (
        torch.empty(2, 6, 9, 8, device="meta", dtype=torch.bfloat16),
        torch.empty(2, 3, 11, 8, device="meta", dtype=torch.bfloat16),
    )
    out, lse = flashbpt.attention(
        blhd(q).requires_grad_(), k, k[..., :5], enable_gqa=True, return_lse=True, is_causal=True
    )
    assert describe(out) == ((2, 6, 9, 5), (270, 5, 30, 1), torch.bfloat16, "meta")
    assert describe(lse)[0] == (2, 6, 9) and lse.dtype == torch.float32
    cu = torch.empty(4, dtype=torch.int32, device="meta")
    packed = flashbpt.varlen_attention(
        *(torch.empty(20, 2, 8, device="meta") for _ in range(3)), cu
    )
    assert describe(packed)[0] == (20, 2, 8)


@pytest.mark.parametrize("name", ["q", "k", "v", "mask", "sinks", "alibi_slopes"])
def test_the_op_refuses_inputs_that_require_grad(device, name):
    x = {
        **tensors(device),
        "mask": torch.randn(1, 1, 9, 13, device=device),
        "sinks": torch.randn(4, device=device),
        "alibi_slopes": torch.rand(4, device=device),
    }
    x[name] = x[name].requires_grad_()
    with pytest.raises(RuntimeError, match=r"flashbpt\.attention"):
        forward(**x)
    with torch.no_grad():
        assert not forward(**x)[0].requires_grad


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_double_backward_names_the_alternative(device, packed):
    inputs = make_varlen(VarlenCase((5, 7)), device) if packed else make(Case(lq=5), device)
    leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
    out = (flashbpt.varlen_attention if packed else flashbpt.attention)(**leaves, **inputs.options)
    with pytest.raises(RuntimeError, match="MATH"):
        gradients = torch.autograd.grad(out.sum(), list(leaves.values()), create_graph=True)
        torch.autograd.grad(sum(g.square().sum() for g in gradients), list(leaves.values()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("api", ["torch.func.jvp", "dual tensors", "beside a leaf"])
def test_forward_mode_is_refused(device, api):
    """A tangent is never dropped without a word."""
    x, tangent = torch.randn(2, 1, 1, 4, 8, device=device).unbind(0)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"(?i)jvp|forward.mode"):
        if api == "torch.func.jvp":
            torch.func.jvp(lambda q: flashbpt.attention(q, x, x), (x,), (tangent,))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            key = x.clone().requires_grad_() if api == "beside a leaf" else x
            flashbpt.attention(dual, key, x)


@pytest.mark.filterwarnings("ignore")
def test_vmap_equals_a_batch(device):
    q, k = torch.randn(3, 2, 4, 8, device=device), torch.randn(3, 2, 5, 8, device=device)
    got = torch.func.vmap(lambda a, b: flashbpt.attention(a, b, b, is_causal=True))(q, k)
    torch.testing.assert_close(got, flashbpt.attention(q, k, k, is_causal=True))


def test_torch_func_grad(device):
    """torch.func.grad either gives the gradient or says that it cannot."""
    q, k = torch.randn(1, 2, 4, 8, device=device), torch.randn(1, 2, 5, 8, device=device)
    leaf = q.clone().requires_grad_()
    (right,) = torch.autograd.grad(flashbpt.attention(leaf, k, k).square().sum(), leaf)
    torch.testing.assert_close(
        torch.func.grad(lambda x: flashbpt.attention(x, k, k).square().sum())(q), right
    )


# --- autocast
def test_autocast_mixes_dtypes_like_sdpa(device):
    q, k = (torch.randn(2, 2, 9, 8, device=device, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 2, 9, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    mask = torch.randn(9, 9, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flashbpt.attention(q, k, v, mask)
        right = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(out, right, atol=3e-2, rtol=3e-2)
    out.float().sum().backward()
    assert q.grad.dtype == torch.float32 and v.grad.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="dtype"):
        flashbpt.attention(q, k, v)


def test_autocast_casts_the_mask(device):
    """The result is that of a call with everything in the autocast dtype, mask included."""
    q, k, v = (torch.randn(1, 2, 9, 8, device=device) for _ in range(3))
    mask = torch.randn(9, 9, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flashbpt.attention(q, k, v, mask)
    low = [x.bfloat16() for x in (q, k, v, mask)]
    torch.testing.assert_close(out, flashbpt.attention(*low), atol=0, rtol=0)


def test_autocast_leaves_float64_and_boolean_masks_alone(device):
    q = torch.randn(1, 2, 9, 8, device=device, dtype=torch.float64)
    mask = torch.rand(9, 9, device=device) < 0.8
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flashbpt.attention(q, q, q, mask)
        low = flashbpt.attention(q.float(), q.float(), q.float(), mask)
    torch.testing.assert_close(out, flashbpt.attention(q, q, q, mask), atol=0, rtol=0)
    assert low.dtype == torch.bfloat16


def test_autocast_varlen(device):
    inputs = make_varlen(VarlenCase((5, 9), causal=True), device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = flashbpt.varlen_attention(**inputs.leaves, **inputs.options)
    low = {n: x.bfloat16() for n, x in inputs.leaves.items()}
    torch.testing.assert_close(
        out, flashbpt.varlen_attention(**low, **inputs.options), atol=0, rtol=0
    )


# --- FLOPs
@pytest.mark.parametrize(
    "shape",
    [
        ((2, 4, 20, 16), (2, 4, 30, 16), (2, 4, 30, 16)),
        ((1, 6, 33, 8), (1, 2, 20, 8), (1, 2, 20, 24)),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_flop_counter_agrees_with_sdpa(device, shape, causal):
    """Two products forward, five backward; causal is not discounted."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = (torch.randn(s, device=device, requires_grad=True) for s in shape)
    with FlopCounterMode(display=False) as counter:
        out = flashbpt.attention(q, k, v, is_causal=causal, enable_gqa=True)
    # Older torch counts equal head counts alone; a shared head saves no product.
    shape = [(*shape[0][:2], *s[2:]) for s in shape]
    assert counter.get_total_flops() == sdpa_flop_count(*shape)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() == sdpa_backward_flop_count(out.shape, *shape)


# --- which, use
def test_which_kernel_names_the_kernel_and_why_not_the_others():
    x = torch.randn(1, 2, 9, 8)
    said = str(flashbpt.which_kernel(x, x, x, is_causal=True))
    assert "cpu" in said and "sm90" in said and "sm80" in said
    assert len(said) > 40, "no reasons"
    varlen = str(flashbpt.which_kernel(x[0], x[0], x[0], cumulative((2,)), op="varlen_attention"))
    assert "cpu" in varlen


def test_which_kernel_refuses_what_attention_refuses():
    x = torch.randn(1, 2, 9, 8)
    with pytest.raises(RuntimeError):
        flashbpt.which_kernel(x, x[..., :7], x)


def test_use_backend():
    x = torch.randn(1, 2, 9, 8)
    usual = flashbpt.attention(x, x, x)
    try:
        flashbpt.use_backend("cpu")
        torch.testing.assert_close(flashbpt.attention(x, x, x), usual, atol=0, rtol=0)
        flashbpt.use_backend("sm90")
        with pytest.raises(RuntimeError, match="sm90"):
            flashbpt.attention(x, x, x)
    finally:
        flashbpt.use_backend("auto")
    torch.testing.assert_close(flashbpt.attention(x, x, x), usual, atol=0, rtol=0)
    with pytest.raises((ValueError, RuntimeError), match=r"(?s)sm91.*sm80"):
        flashbpt.use_backend("sm91")


def test_a_backward_follows_the_setting_of_its_forward():
    x = torch.randn(1, 2, 9, 8, requires_grad=True)
    out = flashbpt.attention(x, x, x)
    (right,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    try:
        flashbpt.use_backend("sm90")
        (got,) = torch.autograd.grad(out.sum(), x)
    finally:
        flashbpt.use_backend("auto")
    assert_close("dq", got, right)


def test_debug_checks_do_not_change_results(device):
    inputs = make_varlen(VarlenCase((5, 9), causal=True), device)
    usual = flashbpt.varlen_attention(**inputs.leaves, **inputs.options)
    flashbpt.set_debug_checks(True)
    try:
        torch.testing.assert_close(
            flashbpt.varlen_attention(**inputs.leaves, **inputs.options), usual, atol=0, rtol=0
        )
        bad = {**inputs.options, "cu_seqlens_q": cumulative((5, 99), device=device)}
        with pytest.raises(RuntimeError, match="104"):
            flashbpt.varlen_attention(**inputs.leaves, **bad)
    finally:
        flashbpt.set_debug_checks(False)


def test_backward_of_the_op_with_nothing_needed(device):
    x = tensors(device)
    saved = forward(**x)
    assert all(
        g is None
        for g in backward(torch.randn_like(saved[0]), None, *saved, need=(False,) * 6, **x)
    )
