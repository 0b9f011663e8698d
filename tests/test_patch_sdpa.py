"""patch_sdpa(): who gets a call, what comes back, and that nothing stays behind."""

import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from sdpa_spy import ORIGINAL, fallbacks_of, inputs, nothing_stays_behind, served
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import TorchFunctionMode

import flashbpt.integrations.sdpa as shim_module
from flashbpt import patch_sdpa

__all__ = ["nothing_stays_behind", "served"]  # fixtures


# ---- putting it there and taking it away


def test_function_form_and_undo(served):
    q, k, v = inputs()
    expected = ORIGINAL(q, k, v, is_causal=True)
    handle = patch_sdpa()
    assert F.scaled_dot_product_attention is not ORIGINAL and handle.active
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, is_causal=True), expected)
    assert len(served) == 1
    handle.undo()
    assert F.scaled_dot_product_attention is ORIGINAL and not handle.active
    F.scaled_dot_product_attention(q, k, v)
    assert len(served) == 1
    handle.undo()  # twice does nothing
    assert F.scaled_dot_product_attention is ORIGINAL


def test_context_manager_undoes_after_an_exception(served):
    q, k, v = inputs()
    with pytest.raises(ZeroDivisionError):
        with patch_sdpa() as handle:
            F.scaled_dot_product_attention(q, k, v)
            raise ZeroDivisionError
    assert len(served) == 1 and not handle.active
    assert F.scaled_dot_product_attention is ORIGINAL


@pytest.mark.parametrize("first_out", [0, 1])
def test_nested_patches_undo_in_any_order(served, first_out):
    q, k, v = inputs()
    handles = [patch_sdpa(), patch_sdpa()]
    function = F.scaled_dot_product_attention
    F.scaled_dot_product_attention(q, k, v)
    assert len(served) == 1  # once, not once a patch
    handles[first_out].undo()
    assert F.scaled_dot_product_attention is function
    F.scaled_dot_product_attention(q, k, v)
    assert len(served) == 2
    handles[1 - first_out].undo()
    assert F.scaled_dot_product_attention is ORIGINAL


def test_patch_again_after_undo_uses_the_same_function():
    with patch_sdpa():
        first = F.scaled_dot_product_attention
    with patch_sdpa():
        assert F.scaled_dot_product_attention is first  # so a compiled graph stays valid


@pytest.mark.parametrize("undo_wrapper_first", [True, False])
def test_a_foreign_wrapper_on_top_survives(served, undo_wrapper_first):
    q, k, v = inputs()
    handle = patch_sdpa()
    below = F.scaled_dot_product_attention
    seen = []

    @functools.wraps(below)
    def wrapper(*args, **kwargs):
        seen.append(1)
        return below(*args, **kwargs)

    F.scaled_dot_product_attention = wrapper
    F.scaled_dot_product_attention(q, k, v)
    assert (len(seen), len(served)) == (1, 1)
    if undo_wrapper_first:
        F.scaled_dot_product_attention = below
        handle.undo()
    else:
        handle.undo()
        assert F.scaled_dot_product_attention is wrapper
        F.scaled_dot_product_attention(q, k, v)
        assert (len(seen), len(served)) == (2, 1)  # the shim below passes through
        with patch_sdpa():  # over the wrapper, which calls the shim below
            F.scaled_dot_product_attention(q, k, v)
            assert (len(seen), len(served)) == (2, 2)
        assert F.scaled_dot_product_attention is wrapper
        F.scaled_dot_product_attention = below  # the wrapper takes itself away
        with patch_sdpa():
            F.scaled_dot_product_attention(q, k, v)
        assert len(served) == 3
    assert F.scaled_dot_product_attention is ORIGINAL


def test_names_bound_before_are_not_reached(served):
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = inputs()
    with patch_sdpa():
        scaled_dot_product_attention(q, k, v)
    assert len(served) == 0


def test_threads(served):
    q, k, v = inputs(1, 2, 8, 8)
    errors = []

    def work():
        try:
            for _ in range(50):
                with patch_sdpa():
                    F.scaled_dot_product_attention(q, k, v)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(served) == 200


# ---- calls as SDPA takes them


def test_positional_and_keyword_arguments(served):
    q, k, v = inputs(2, 4, 12, 8, keys=20)
    kv = k[:, :2], v[:, :2]
    mask = torch.randn(12, 20)
    calls = [
        ((q, k, v), {}),
        ((q, k, v, mask), {}),
        ((q, k, v, mask, 0.0, False), {"scale": 0.3}),
        ((q, k, v, None, 0.0, True), {}),
        ((q, *kv), {"enable_gqa": True, "is_causal": True}),
        ((), {"query": q, "key": k, "value": v, "attn_mask": mask > 0, "scale": -0.1}),
    ]
    with patch_sdpa() as handle:
        for args, kwargs in calls:
            out = F.scaled_dot_product_attention(*args, **kwargs)
            torch.testing.assert_close(out, ORIGINAL(*args, **kwargs))
    assert len(served) == len(calls) and not handle.fallbacks


def test_dropout_is_served(served):
    q, k, v = inputs()
    with patch_sdpa():
        torch.manual_seed(3)
        first = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4)
        torch.manual_seed(3)
        assert torch.equal(first, F.scaled_dot_product_attention(q, k, v, None, 0.4))
        assert not torch.equal(first, F.scaled_dot_product_attention(q, k, v, None, 0.4))
    assert len(served) == 3


@pytest.mark.parametrize("call", ["few", "many", "unknown", "positional scale", "not tensors"])
def test_wrong_calls_raise_what_the_original_raises(call):
    q, k, v = inputs()
    args, kwargs = {
        "few": ((q, k), {}),
        "many": ((q, k, v, None, 0.0, False, None, False, 1), {}),
        "unknown": ((q, k, v), {"window": (1, 1)}),
        "positional scale": ((q, k, v, None, 0.0, False, 0.5), {}),
        "not tensors": (([1.0], k, v), {}),
    }[call]
    with pytest.raises(TypeError):
        ORIGINAL(*args, **kwargs)
    with patch_sdpa() as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TypeError):
            F.scaled_dot_product_attention(*args, **kwargs)
    assert not handle.fallbacks


def test_autocast(served):
    q, k, v = inputs()
    with patch_sdpa(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.scaled_dot_product_attention(q, k.bfloat16(), v)
        expected = ORIGINAL(q, k.bfloat16(), v)
    assert out.dtype == torch.bfloat16 and len(served) == 1
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


# ---- the MATH backend


def test_math_goes_to_the_original(served):
    q, k, v = inputs(dtype=torch.bfloat16)
    with patch_sdpa() as handle:
        with sdpa_kernel(SDPBackend.MATH):
            reference = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert len(served) == 0
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert len(served) == 1
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            F.scaled_dot_product_attention(q, k, v)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(q, k, v)
    assert len(served) == 3 and not handle.fallbacks
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.equal(reference, ORIGINAL(q, k, v, is_causal=True))


def test_a_blanket_patch_does_not_compare_flashbpt_with_itself(monkeypatch):
    """PyTorch's own tests compare a call with the same call under MATH: a fault must show there."""
    attention = shim_module.attention
    monkeypatch.setattr(shim_module, "attention", lambda *a, **kw: attention(*a, **kw) * 1.01)
    q, k, v = inputs()
    with patch_sdpa():
        tested = F.scaled_dot_product_attention(q, k, v)
        with sdpa_kernel(SDPBackend.MATH):
            reference = F.scaled_dot_product_attention(q, k, v)
    assert not torch.allclose(tested, reference, rtol=1e-3)
    torch.testing.assert_close(tested, reference * 1.01)


def test_double_backward_needs_math():
    q, k, v = inputs(1, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    with patch_sdpa():
        with sdpa_kernel(SDPBackend.MATH):
            assert torch.autograd.gradgradcheck(F.scaled_dot_product_attention, (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        with pytest.raises(RuntimeError, match="MATH"):
            (grad,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
            grad.sum().backward()


# ---- CausalBias


@pytest.mark.parametrize("lengths", [(16, 16), (8, 16), (16, 8), (1, 7)])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(served, lengths, make):
    q, k, v = inputs(2, 4, lengths[0], 8, keys=lengths[1], requires_grad=True)
    bias = make(*lengths)
    expected = ORIGINAL(q, k, v, attn_mask=bias._materialize())
    grad_out = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (q, k, v), grad_out)
    with patch_sdpa() as handle:
        for out in (
            F.scaled_dot_product_attention(q, k, v, bias),
            F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=None),
        ):
            torch.testing.assert_close(out, expected)
            grads = torch.autograd.grad(out, (q, k, v), grad_out)
            torch.testing.assert_close(grads, expected_grads)
        with sdpa_kernel(SDPBackend.MATH):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)
    lower = make is causal_lower_right and lengths[0] != lengths[1]
    assert served.served == ["lower-right" if lower else "upper-left"] * 2
    assert not handle.fallbacks


def test_causal_bias_keeps_pytorchs_rules(served):
    q, k, v = inputs(1, 2, 8, 8, keys=16)
    bias = causal_lower_right(8, 16)
    with patch_sdpa():
        with pytest.raises(ValueError, match="CausalBias should not be used with causal=True"):
            F.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
        with pytest.raises(RuntimeError):  # a bias made for other lengths
            F.scaled_dot_product_attention(q, k, v, causal_lower_right(8, 12))
        served.refusal = NotImplementedError("not today")
        expected = ORIGINAL(q, k, v, bias._materialize())
        with pytest.warns(UserWarning, match="not today"):
            torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)
    # Undone, PyTorch's own handling of the bias is back.
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)


# ---- __torch_function__


class Tagged(torch.Tensor):
    """A subclass that answers SDPA itself and leaves the rest to torch."""

    seen: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            cls.seen.append((args, kwargs))
            return "answered by the subclass"
        return super().__torch_function__(func, types, args, kwargs)


class Plain(torch.Tensor):
    """A subclass with torch's default __torch_function__."""


class Watch(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((args, kwargs))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("position", range(4))
def test_a_subclass_gets_the_call(served, position):
    tensors = [*inputs(2, 4, 16, 16), torch.randn(16, 16)]
    tensors[position] = tensors[position].as_subclass(Tagged)
    Tagged.seen.clear()
    with patch_sdpa():
        out = F.scaled_dot_product_attention(*tensors, scale=0.5)
    assert out == "answered by the subclass" and len(served) == 0
    ((args, kwargs),) = Tagged.seen
    given = [*args, kwargs["attn_mask"]]
    assert all(a is b for a, b in zip(given, tensors)) and kwargs["scale"] == 0.5


def test_a_default_subclass_is_kept(served):
    q, k, v = inputs()
    with patch_sdpa():
        out = F.scaled_dot_product_attention(q.as_subclass(Plain), k, v)
    assert type(out) is Plain and len(served) == 1
    torch.testing.assert_close(out.as_subclass(torch.Tensor), ORIGINAL(q, k, v))


def test_a_mode_gets_the_call_and_hands_it_on(served):
    q, k, v = inputs(2, 4, 8, 8, keys=16)
    bias = causal_lower_right(8, 16)
    nested = nested_jagged()
    with patch_sdpa(), Watch() as mode:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        F.scaled_dot_product_attention(q, k, v, bias)
        with pytest.warns(UserWarning, match="nested"):
            assert F.scaled_dot_product_attention(nested, nested, nested).is_nested
    assert len(mode.seen) == 3 and served.served == ["upper-left", "lower-right"]
    assert mode.seen[0][1]["is_causal"] is True and mode.seen[1][1]["attn_mask"] is bias
    torch.testing.assert_close(out, ORIGINAL(q, k, v, is_causal=True))


def test_a_default_device_is_a_mode_too(served):
    q, k, v = inputs()
    with patch_sdpa(), torch.device("cpu"):
        out = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(out, ORIGINAL(q, k, v))
    assert len(served) == 1


def test_fx_records_the_public_name(served):
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    q, k, v = inputs()
    with patch_sdpa():
        traced = torch.fx.symbolic_trace(Module())
        traced(q, k, v)
        assert len(served) == 1
    assert "torch.nn.functional.scaled_dot_product_attention(" in traced.code
    traced(q, k, v)  # undone: the recorded shim passes through
    assert len(served) == 1


# ---- what flashbpt refuses


def nested_jagged():
    rows = [torch.ones(3, 2, 8), torch.ones(5, 2, 8)]
    return torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)


def test_nested_tensors_go_to_the_original(served):
    nested = nested_jagged()
    with patch_sdpa() as handle:
        with pytest.warns(UserWarning, match="nested"):
            out = F.scaled_dot_product_attention(nested, nested, nested)
    expected = ORIGINAL(nested, nested, nested)
    for mine, theirs in zip(out.unbind(), expected.unbind()):
        torch.testing.assert_close(mine, theirs)
    assert len(served) == 0 and handle.fallbacks == {"nested tensors are not supported": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_go_to_the_original():
    rows = [torch.ones(2, 3, 8), torch.ones(2, 5, 8)]
    nested = torch.nested.nested_tensor(rows)
    with patch_sdpa() as handle, pytest.warns(UserWarning, match="flashbpt refuses .*nested"):
        assert F.scaled_dot_product_attention(nested, nested, nested).is_nested
    assert fallbacks_of(handle) == 1


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError, TypeError, ValueError])
def test_one_warning_a_reason_and_a_count_a_call(served, kind):
    q, k, v = inputs()
    served.refusal = kind("head dimension 4096 is above 512")
    with patch_sdpa() as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            out = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(out, ORIGINAL(q, k, v), rtol=0, atol=0)
        served.refusal = kind("head dimension 2048 is above 512")  # the same reason
        F.scaled_dot_product_attention(q, k, v)
        served.refusal = kind("no kernel for torch.float8_e4m3fn")
        F.scaled_dot_product_attention(q, k, v)
        served.refusal = None
        F.scaled_dot_product_attention(q, k, v)
    assert handle.fallbacks == {
        "head dimension # is above #": 4,
        "no kernel for torch.float8_e4m3fn": 1,
    }
    assert len(caught) == 2 and all(w.filename == __file__ for w in caught)
    assert "head dimension 4096 is above 512" in str(caught[0].message)
    assert "5 fallbacks" in repr(handle)


def test_every_patch_counts_for_itself(served):
    q, k, v = inputs()
    served.refusal = RuntimeError("no")
    with patch_sdpa() as outer, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        F.scaled_dot_product_attention(q, k, v)
        with patch_sdpa() as inner:
            F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    assert (outer.fallbacks["no"], inner.fallbacks["no"]) == (3, 1)
    assert len(caught) == 1


def test_where_both_refuse_the_original_speaks():
    q, k, v = inputs()
    bad = [
        (q, k, v.double()),
        (q[0, 0, 0], k, v),
        (q, k, v, torch.ones(24, 24, dtype=torch.int32)),
        (q, k[..., :8], v),
        (q, k[:, :3], v[:, :3]),
    ]
    with patch_sdpa() as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        for args in bad:
            with pytest.raises(Exception) as theirs:
                ORIGINAL(*args)
            with pytest.raises(type(theirs.value)) as ours:
                F.scaled_dot_product_attention(*args)
            assert str(ours.value) == str(theirs.value)
            assert ours.value.__context__ is None
    assert not handle.fallbacks


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("out of memory"),
        RuntimeError("x INTERNAL ASSERT FAILED at y"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 1 bytes"),
        AssertionError("a fault"),
        KeyError("a fault"),
    ],
)
def test_failures_are_not_refusals(served, failure):
    q, k, v = inputs()
    served.refusal = failure
    with patch_sdpa() as handle:
        with pytest.raises(type(failure)) as raised:
            F.scaled_dot_product_attention(q, k, v)
    assert raised.value is failure and not handle.fallbacks


def test_real_refusals_reach_the_original():
    """Different head counts of key and value: PyTorch's composition takes them."""
    q = torch.randn(1, 4, 6, 8)
    k, v = torch.randn(1, 2, 6, 8), torch.randn(1, 4, 6, 8)
    expected = ORIGINAL(q, k, v, enable_gqa=True)
    with patch_sdpa() as handle, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(out, expected)
    assert len(caught) == fallbacks_of(handle)  # served or refused: never in silence


def test_vmap():
    q, k, v = inputs(3, 2, 4, 8, 8)
    with patch_sdpa(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = torch.func.vmap(F.scaled_dot_product_attention)(q, k, v)
    torch.testing.assert_close(out, ORIGINAL(q, k, v))
