"""torch.compile of flashbpt's functions: one graph, dynamic shapes, eager's results."""

import pytest
import torch
from cases import Case, VarlenCase, cumulative, ids, make, make_varlen
from compare import assert_bitwise
from test_attention_layout import blhd

import flashbpt


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class CountingBackend:
    """aot_eager that counts how often it compiles.

    The first call may compile twice: Dynamo restarts when a float turns out to be a constant.
    """

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


def results(fn, inputs, seed=3):
    """[out, lse, gradients...] of one call."""
    leaves = {
        n: x.detach().clone(memory_format=torch.preserve_format).requires_grad_(n in inputs.grads)
        for n, x in inputs.leaves.items()
    }
    torch.manual_seed(seed)
    out, lse = fn(**leaves, **inputs.options, return_lse=True)
    torch.manual_seed(seed)
    loss = (out * torch.randn(out.shape).to(out)).sum() + torch.nan_to_num(lse, 0.0, 0.0, 0.0).sum()
    return [out, lse, *torch.autograd.grad(loss, [leaves[n] for n in inputs.grads])]


def assert_same(got, wanted):
    """Bit by bit, but for gradients on a GPU, which blocks add up in any order."""
    for i, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.stride() == b.stride(), f"result {i}: strides {a.stride()}, eager {b.stride()}"
        if i < 2 or a.is_cpu:
            assert_bitwise(f"result {i}", a.detach(), b.detach())
        else:
            torch.testing.assert_close(a, b)


CASES = [
    Case(lq=20),
    Case(lq=20, lk=33, causal=True, heads=4, kv_heads=2, dtype="bf16"),
    Case(lq=20, mask="bool:b1qk"),
    Case(lq=20, mask="fp32:1h1k"),
    Case(lq=20, lk=33, sinks=True, alibi="bh", softcap=4.0, window=(9, 3), align="lower-right"),
]


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_fullgraph_equals_eager(device, case, dynamic):
    inputs = make(case, device)
    inputs.leaves["query"] = blhd(inputs.leaves["query"])
    compiled = torch.compile(
        flashbpt.attention, fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    assert_same(results(compiled, inputs), results(flashbpt.attention, inputs))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fullgraph_varlen(device, dynamic):
    for case in (
        VarlenCase((20, 0, 7), causal=True),
        VarlenCase((20, 7), (3, 9), heads=4, kv_heads=2, max_seqlens=False),
    ):
        inputs = make_varlen(case, device)
        compiled = torch.compile(
            flashbpt.varlen_attention, fullgraph=True, backend="aot_eager", dynamic=dynamic
        )
        assert_same(results(compiled, inputs), results(flashbpt.varlen_attention, inputs))


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no grad", "grad"])
def test_one_tensor_in_several_roles(device, requires_grad):
    """Self-attention as users write it: attention(x, x, x)."""
    compiled = torch.compile(flashbpt.attention, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 2, 20, 8, device=device, requires_grad=requires_grad)
    out, right = compiled(x, x, x), flashbpt.attention(x, x, x)
    assert_bitwise("out", out.detach(), right.detach())
    if requires_grad:
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, right)]
        torch.testing.assert_close(*grads)


def test_dropout_follows_the_generator(device):
    inputs = make(Case(lq=20), device)
    inputs.options["dropout_p"] = 0.5
    compiled = torch.compile(flashbpt.attention, fullgraph=True, backend="aot_eager")
    first = results(compiled, inputs)
    assert_same(first, results(flashbpt.attention, inputs))
    assert not torch.equal(first[0], results(compiled, inputs, seed=4)[0])


@pytest.mark.parametrize("mark", [False, True], ids=["dynamic=True", "mark_dynamic"])
@pytest.mark.parametrize(
    "features",
    [
        Case(),
        Case(causal=True, align="lower-right", heads=4, kv_heads=2, mask=""),
        Case(mask="fp32:11qk"),
    ],
    ids=lambda c: c.id,
)
def test_a_second_length_does_not_recompile(device, features, mark):
    backend = CountingBackend()
    compiled = torch.compile(
        flashbpt.attention, fullgraph=True, backend=backend, dynamic=None if mark else True
    )
    first = None
    for lq, lk in ((20, 33), (70, 40), (129, 300), (21, 22)):
        inputs = make(Case(**{**vars(features), "lq": lq, "lk": lk}), device)
        leaves = {n: x.clone().requires_grad_() for n, x in inputs.leaves.items()}
        if mark:
            for name, x in leaves.items():
                torch._dynamo.mark_dynamic(x, 2)
                if name == "attn_mask":
                    torch._dynamo.mark_dynamic(x, 3)
        out = compiled(**leaves, **inputs.options)
        eager = flashbpt.attention(**inputs.leaves, **inputs.options)
        assert_bitwise("out", out.detach(), eager.detach())
        out.sum().backward()
        first = first or backend.graphs
        assert backend.graphs == first, f"compiled again for lengths {lq} and {lk}"


def test_a_second_number_of_tokens_does_not_recompile(device):
    backend = CountingBackend()
    compiled = torch.compile(
        flashbpt.varlen_attention, fullgraph=True, backend=backend, dynamic=True
    )
    first = None
    for lens in ((20, 7), (9, 40), (130, 2)):
        x = torch.randn(sum(lens), 2, 8, device=device)
        cu = cumulative(lens, device=device)
        out = compiled(x, x, x, cu, max_seqlen_q=max(lens), max_seqlen_k=max(lens), causal=True)
        assert_bitwise("out", out, flashbpt.varlen_attention(x, x, x, cu, causal=True))
        first = first or backend.graphs
        assert backend.graphs == first, f"compiled again for lengths {lens}"


def inductor_works(device):
    try:
        fn = torch.compile(lambda x: (x + 1).relu(), backend="inductor")
        ones = torch.ones(8, device=device)
        return torch.equal(fn(ones), 2 * ones)
    except Exception:
        return False


def test_inductor(device):
    """A projection around attention: Inductor keeps the op's strides and gives eager's numbers."""
    if not inductor_works(device):
        pytest.skip("torch's Inductor finds no working compiler")

    def layer(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        out = flashbpt.attention(q, k, v, is_causal=True, dropout_p=0.0)
        return out.transpose(1, 2).flatten(2).tanh()

    x, w = torch.randn(2, 20, 16, device=device), torch.randn(16, 48, device=device)
    gradients = []
    for fn in (layer, torch.compile(layer, fullgraph=True, backend="inductor", dynamic=True)):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        out = fn(*leaves)
        gradients.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for got, wanted in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_export(device):
    class Layer(torch.nn.Module):
        def forward(self, q, k):
            return flashbpt.attention(q, k, k, is_causal=True)

    q, k = torch.randn(2, 2, 20, 8, device=device), torch.randn(2, 2, 33, 8, device=device)
    length = torch.export.Dim("length", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(Layer(), (q, k), dynamic_shapes=({2: length}, None))
        longer = torch.randn(2, 2, 51, 8, device=device)
        torch.testing.assert_close(
            program.module()(longer, k),
            flashbpt.attention(longer, k, k, is_causal=True),
            atol=0,
            rtol=0,
        )


def test_selective_checkpoint_sees_the_op(device):
    """A policy that keys on the op saves its output: the forward op runs once, though the region is
    recomputed.
    """
    from torch.utils.checkpoint import (
        CheckpointPolicy,
        checkpoint,
        create_selective_checkpoint_contexts,
    )

    seen = []

    def policy(ctx, op, *args, **kwargs):
        if op == torch.ops.flashbpt.attention_forward.default:
            seen.append(ctx.is_recompute)
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    def block(x):
        return flashbpt.attention(x.sin(), x.cos(), x, dropout_p=0.5).square()

    x = torch.randn(1, 2, 20, 8, device=device, requires_grad=True)
    torch.manual_seed(2)
    (right,) = torch.autograd.grad(block(x).sum(), x)
    torch.manual_seed(2)
    out = checkpoint(
        block,
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    (got,) = torch.autograd.grad(out.sum(), x)
    assert seen, "the policy never saw flashbpt::attention_forward"
    torch.testing.assert_close(got, right)
