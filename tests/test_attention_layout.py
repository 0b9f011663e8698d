"""Strides and ranks: any layout in, the query's stride order out, gradients for any grad_out."""

from itertools import permutations

import pytest
import torch
from cases import Case, draw, make
from compare import Inputs, assert_bitwise, check

import flashbpt

B, H, LQ, LK, D = 2, 3, 66, 70, 16


def blhd(x):
    """The same values, stored (B, L, H, D)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def last_dim_strided(x):
    wide = torch.zeros(*x.shape[:-1], 2 * x.size(-1), dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    return wide[..., ::2]


def lengths_last(x):
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def offset_slice(x):
    wide = torch.full(
        (x.size(0), x.size(1) + 2, x.size(2) + 3, x.size(3) + 5),
        float("nan"),
        dtype=x.dtype,
        device=x.device,
    )
    view = wide[:, 1:-1, 2:-1, 3:-2]
    view.copy_(x)
    return view


LAYOUTS = {
    "blhd": blhd,
    "last dim strided": last_dim_strided,
    "lengths last": lengths_last,
    "offset slice": offset_slice,
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("which", ["query", "key", "value", "all"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_input_layouts(device, layout, which, dtype):
    inputs = make(Case(lq=LQ, lk=LK, heads=H, causal=True, dtype=dtype), device)
    for name in ("query", "key", "value") if which == "all" else (which,):
        inputs.leaves[name] = LAYOUTS[layout](inputs.leaves[name])
    check(inputs)


@pytest.mark.parametrize("interleaved", [False, True], ids=["3,H,D", "H,3,D"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_packed_qkv(device, dtype, interleaved):
    """q, k, v are views of one leaf; the gradient lands in the leaf."""

    def view(leaves):
        packed = leaves["packed"]
        packed = (
            packed.unflatten(-1, (H, 3, D)).transpose(2, 3)
            if interleaved
            else packed.unflatten(-1, (3, H, D))
        )
        return dict(
            zip(
                ("query", "key", "value"),
                (x.transpose(1, 2) for x in packed.unbind(2)),
                strict=True,
            )
        )

    leaf = draw((B, LQ, 3 * H * D), torch.float32 if dtype == "fp32" else torch.bfloat16, device)
    check(Inputs({"packed": leaf}, {"is_causal": True}, ("packed",), view))


def test_key_and_value_share_storage(device):
    leaf = draw((B, 2, LK, 3 * D), torch.float32, device)
    q = draw((B, 2, LQ, 2 * D), torch.float32, device)

    def view(leaves):
        return {
            "query": leaves["q"],
            "key": leaves["latent"][..., : 2 * D],
            "value": leaves["latent"][..., D:],
        }

    check(Inputs({"q": q, "latent": leaf}, {}, ("q", "latent"), view))


@pytest.mark.parametrize(
    "dims", [(1,), (0,), (0, 1), (2,)], ids=["heads", "batch", "batch and heads", "length"]
)
@pytest.mark.parametrize("lk", [33, 70])
def test_expanded_keys_and_values(device, dims, lk):
    inputs = make(Case(lq=LQ, lk=lk, heads=H, lse=True), device)
    full = inputs.leaves["key"].shape
    for name in ("key", "value"):
        x = inputs.leaves[name]
        for dim in dims:
            x = x.narrow(dim, 0, 1)
        inputs.leaves[name] = x.clone()
    inputs.view = lambda leaves: {
        **leaves,
        "key": leaves["key"].expand(full),
        "value": leaves["value"].expand(full),
    }
    inputs.leaves["query"] = blhd(inputs.leaves["query"])
    check(inputs)


def test_expanded_query(device):
    inputs = make(Case(lq=1, lk=LK, heads=H), device)
    inputs.view = lambda leaves: {**leaves, "query": leaves["query"].expand(B, H, 9, D)}
    got = check(inputs)
    assert_no_overlap(got["out"])


def assert_no_overlap(x):
    assert all(stride != 0 for stride, n in zip(x.stride(), x.shape, strict=True) if n > 1), (
        x.stride()
    )


@pytest.mark.parametrize(
    "grad", ["expanded ones", "expanded over heads", "blhd", "last dim strided", "lengths last"]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_layout_of_grad_out(device, grad, dtype):
    inputs = make(Case(lq=LQ, lk=LK, heads=H, causal=True, dtype=dtype, lse=True), device)
    ones = torch.ones((), dtype=inputs.dtype, device=device)
    full = draw((B, H, LQ, D), inputs.dtype, device)
    inputs.grad_out = {
        "expanded ones": ones.expand(B, H, LQ, D),
        "expanded over heads": full[:, :1].expand(B, H, LQ, D),
        "blhd": blhd(full),
        "last dim strided": last_dim_strided(full),
        "lengths last": lengths_last(full),
    }[grad]
    check(inputs)


def test_sum_backward(device):
    q, k, v = (draw((B, H, LQ, D), torch.float32, device).requires_grad_() for _ in range(3))
    flashbpt.attention(q, k, v).sum().backward()
    dense = torch.autograd.grad(
        flashbpt.attention(q, k, v), (q, k, v), torch.ones(B, H, LQ, D, device=device)
    )
    for leaf, right in zip((q, k, v), dense, strict=True):
        torch.testing.assert_close(leaf.grad, right, atol=1e-6, rtol=1e-5)


def stride_order(x):
    return sorted(range(x.dim() - 1), key=lambda d: -x.stride(d))


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=lambda o: "".join(map(str, o)))
@pytest.mark.parametrize("dim_v", [16, 24])
def test_output_keeps_the_stride_order_of_the_query(device, order, dim_v):
    sizes = [B, H, LQ]
    stored = draw((*[sizes[d] for d in order], D), torch.float32, device)
    q = stored.permute(*[order.index(d) for d in range(3)], 3)
    k, v = (
        draw((B, H, LK, D), torch.float32, device),
        draw((B, H, LK, dim_v), torch.float32, device),
    )
    out = flashbpt.attention(q, k, v)
    assert stride_order(out) == stride_order(q) and out.stride(-1) == 1
    assert out.permute(*order, 3).is_contiguous()
    torch.testing.assert_close(out, flashbpt.attention(q.contiguous(), k, v), atol=0, rtol=0)


def test_output_of_packed_query_is_dense(device):
    """What models write: out.transpose(1, 2).view(B, L, H * D)."""
    packed = draw((B, LQ, 3, H, D), torch.float32, device)
    out = flashbpt.attention(*(x.transpose(1, 2) for x in packed.unbind(2)))
    flat = out.transpose(1, 2).view(B, LQ, H * D)
    assert flat.is_contiguous()


def test_output_never_has_the_stride_zero_of_the_query(device):
    k, v = draw((B, H, LK, D), torch.float32, device), draw((B, H, LK, D), torch.float32, device)
    for shape in ((1, H, LQ, D), (B, 1, LQ, D), (B, H, 1, D), (1, 1, 1, 1)):
        q = draw(shape, torch.float32, device).expand(B, H, LQ, D)
        out = flashbpt.attention(q, k, v)
        assert_no_overlap(out)
        torch.testing.assert_close(
            out, flashbpt.attention(q.contiguous(), k, v), atol=1e-6, rtol=1e-5
        )


RANKS = {
    "2": ((9, 8), (11, 8), (11, 5)),
    "3": ((4, 9, 8), (4, 11, 8), (4, 11, 5)),
    "5": ((2, 2, 3, 9, 8), (2, 2, 3, 11, 8), (2, 2, 3, 11, 5)),
    "6": ((2, 1, 2, 3, 9, 8), (2, 1, 2, 3, 11, 8), (2, 1, 2, 3, 11, 5)),
    "3 and 4": ((4, 9, 8), (3, 4, 11, 8), (3, 4, 11, 5)),
    "2 and 4": ((9, 8), (3, 4, 11, 8), (4, 11, 5)),
    "4 and 2": ((3, 4, 9, 8), (11, 8), (11, 5)),
    "batch of 1": ((1, 4, 9, 8), (3, 4, 11, 8), (3, 1, 11, 5)),
    "value only": ((4, 9, 8), (4, 11, 8), (3, 4, 11, 5)),
    "5 broadcast": ((2, 1, 3, 9, 8), (1, 4, 1, 11, 8), (2, 4, 3, 11, 5)),
}


@pytest.mark.parametrize("case", RANKS)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_ranks_and_broadcasting(device, case, causal):
    """Leading dims broadcast as in matmul; the gradient of a broadcast input is summed to its
    shape.
    """
    leaves = {
        name: draw(shape, torch.float32, device)
        for name, shape in zip(("query", "key", "value"), RANKS[case], strict=True)
    }
    check(Inputs(leaves, {"is_causal": causal}, tuple(leaves), use_lse=True))


def test_rank_five_with_gqa_and_mask(device):
    leaves = {
        "query": draw((2, 2, 6, 9, 8), torch.float32, device),
        "key": draw((2, 2, 3, 11, 8), torch.float32, device),
        "value": draw((2, 2, 3, 11, 8), torch.float32, device),
        "attn_mask": draw((2, 1, 6, 1, 11), torch.float32, device),
    }
    check(Inputs(leaves, {"enable_gqa": True}, tuple(leaves)))


@pytest.mark.parametrize("shape", [(9, 8), (4, 9, 8), (2, 2, 3, 9, 8)], ids=lambda s: str(len(s)))
def test_output_and_lse_shapes(device, shape):
    q, k, v = (
        draw(shape, torch.bfloat16, device),
        draw(shape, torch.bfloat16, device),
        draw((*shape[:-1], 5), torch.bfloat16, device),
    )
    out, lse = flashbpt.attention(q, k, v, return_lse=True)
    assert out.shape == v.shape and lse.shape == shape[:-1] and lse.dtype == torch.float32


def test_inputs_and_grad_out_are_not_modified(device):
    inputs = make(
        Case(
            lq=LQ, lk=LK, heads=4, kv_heads=2, mask="fp32:b1qk", sinks=True, alibi="h", dtype="bf16"
        ),
        device,
    )
    leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
    out, lse = flashbpt.attention(**leaves, **inputs.options, return_lse=True)
    tensors = {
        **leaves,
        "out": out,
        "lse": lse,
        "grad_out": torch.randn_like(out),
        "grad_lse": torch.randn_like(lse),
    }
    before = {n: (x._version, x.detach().clone()) for n, x in tensors.items()}
    for _ in range(2):
        torch.autograd.grad(
            (out, lse),
            list(leaves.values()),
            (tensors["grad_out"], tensors["grad_lse"]),
            retain_graph=True,
        )
    for name, x in tensors.items():
        version, value = before[name]
        assert x._version == version, f"{name} was written to"
        assert_bitwise(name, x.detach(), value)


def test_backward_twice_gives_the_same(device):
    inputs = make(Case(lq=LQ, lk=LK, heads=4, kv_heads=2, mask="fp32:b1qk", causal=False), device)
    leaves = {n: x.requires_grad_() for n, x in inputs.leaves.items()}
    out = flashbpt.attention(**leaves, **inputs.options, deterministic=True)
    grad_out = torch.randn_like(out)
    first = torch.autograd.grad(out, list(leaves.values()), grad_out, retain_graph=True)
    second = torch.autograd.grad(out, list(leaves.values()), grad_out)
    for name, a, b in zip(leaves, first, second, strict=True):
        assert_bitwise("d" + name, a, b)


def test_saved_tensors_may_come_back_elsewhere(device):
    """Hooks that move saved tensors hand them back with other strides and another alignment."""

    def shifted(x):
        wide = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
        wide[1:].copy_(x.reshape(-1))
        return wide[1:].view(x.shape)

    inputs = make(Case(lq=LQ, lk=LK, heads=4, kv_heads=2, mask="bool:bhqk"), device)
    inputs.leaves["query"] = blhd(inputs.leaves["query"])
    with torch.autograd.graph.saved_tensors_hooks(shifted, lambda x: x):
        check(inputs)
