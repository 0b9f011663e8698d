"""blockwise_ffn against the same in plain torch."""

import pytest
import torch
from block_cases import plain_ffn

import flashbpt
from flashbpt import BlockConfig, BlockWeights

HIDDEN, FFN = 24, 40
NAMES = ("w_gate", "w_up", "w_down", "b_gate", "b_up", "b_down")


def make(shape, device, dtype=torch.float64, gated=True, bias=False):
    sizes = {"w_gate": (FFN, HIDDEN), "w_up": (FFN, HIDDEN), "w_down": (HIDDEN, FFN)}
    sizes |= {"b_gate": (FFN,), "b_up": (FFN,), "b_down": (HIDDEN,)} if bias else {}
    if not gated:
        sizes = {n: s for n, s in sizes.items() if "gate" not in n}
    tensors = {n: torch.randn(s, dtype=torch.float64) / 4 for n, s in sizes.items()}
    tensors["x"] = torch.randn(*shape, HIDDEN, dtype=torch.float64)
    return {n: t.to(device, dtype).requires_grad_() for n, t in tensors.items()}


def ours(t, activation="silu", rows="auto"):
    arguments = {n: t.get(n) for n in NAMES}
    return flashbpt.blockwise_ffn(t["x"], **arguments, activation=activation, rows=rows)


def plain(t, activation="silu"):
    config = BlockConfig(heads=1, activation=activation)
    return plain_ffn(t["x"], BlockWeights(**{n: t.get(n) for n in NAMES}), config)


def both(t, grad=None, **options):
    """{name: (ours, plain)} of the output and all gradients."""
    results = []
    for fn, more in ((ours, options), (plain, {k: v for k, v in options.items() if k != "rows"})):
        out = fn(t, **more)
        g = torch.ones_like(out) if grad is None else grad
        wanted = {n: x for n, x in t.items() if x.requires_grad}
        grads = torch.autograd.grad(out, list(wanted.values()), g)
        results.append({"out": out, **dict(zip(wanted, grads, strict=True))})
    return {n: (a, results[1][n]) for n, a in results[0].items()}


@pytest.mark.parametrize("rows", [16, "auto"])
@pytest.mark.parametrize("gated, bias", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_equals_plain_torch(device, activation, gated, bias, rows):
    t = make((3, 19), device, gated=gated, bias=bias)
    grad = torch.randn_like(t["x"])
    for name, (got, right) in both(t, grad, activation=activation, rows=rows).items():
        torch.testing.assert_close(got, right, rtol=1e-10, atol=1e-10, msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_no_more_error_than_plain_torch(device, dtype):
    t = make((500,), device, dtype, bias=True)
    wide = {n: x.detach().double().requires_grad_() for n, x in t.items()}
    grad = torch.randn_like(t["x"])
    exact = {n: right.detach() for n, (_, right) in both(wide, grad.double()).items()}
    eps = torch.finfo(dtype).eps
    for name, (got, right) in both(t, grad, rows=64).items():
        error, error_plain = (
            float((r.detach().double() - exact[name]).norm()) for r in (got, right)
        )
        factor = 3.0 if dtype == torch.float32 else 1.4
        assert error <= factor * error_plain + eps * float(exact[name].norm()), name


@pytest.mark.parametrize("shape", [(), (1,), (0,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_any_rank(device, shape):
    for name, (got, right) in both(make(shape, device), rows=16).items():
        torch.testing.assert_close(got, right, msg=name)


def test_any_strides(device):
    t = make((40,), device)
    turned = {n: x.detach().t().contiguous().t().requires_grad_() for n, x in t.items()}
    grad = torch.ones((), dtype=torch.float64, device=device).expand(40, HIDDEN)
    for name, (got, right) in both(turned, grad).items():
        torch.testing.assert_close(got, right, msg=name)


@pytest.mark.parametrize("only", [["x"], ["w_up"], ["w_down"], ["w_gate", "b_down"]])
def test_only_some_want_gradients(device, only):
    t = make((40,), device, bias=True)
    for name, x in t.items():
        x.requires_grad_(name in only)
    ours(t, rows=16).sum().backward()
    assert [n for n, x in t.items() if x.grad is not None] == [n for n in t if n in only]
    for name, (got, right) in both(t).items():
        torch.testing.assert_close(got, right, msg=name)


def test_autocast_compile_and_no_grad(device):
    t = make((40,), device, torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        out = ours(t)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and t["w_up"].grad.dtype == torch.float32
    with torch.no_grad():
        right = ours(t)
    assert not right.requires_grad
    compiled = torch.compile(lambda t: ours(t) * 2, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(t), 2 * right)


def test_opcheck(device):
    t = {n: x.detach() for n, x in make((20,), device, torch.float32, bias=True).items()}
    arguments = (t["x"], *(t[n] for n in NAMES), 0, 16)
    ops = torch.ops.flashbpt
    torch.library.opcheck(ops.blockwise_ffn_forward.default, arguments)
    torch.library.opcheck(
        ops.blockwise_ffn_backward.default, (torch.ones_like(t["x"]), *arguments, [True] * 7)
    )


def test_errors(device):
    t = make((8,), device, torch.float32)

    def refuse(words, error=RuntimeError, **changes):
        options = {k: changes.pop(k) for k in ("activation", "rows") if k in changes}
        with pytest.raises(error, match=words):
            ours({**t, **changes}, **options)

    refuse("w_down must have shape", w_down=t["w_up"])
    refuse("w_up must have the dtype", w_up=t["w_up"].double())
    refuse("one at least", x=torch.zeros(3, 0, device=device))
    refuse("'swish'", ValueError, activation="swish")
    refuse("got -1", ValueError, rows=-1)
