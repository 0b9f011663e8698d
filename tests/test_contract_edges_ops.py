"""Edges of the contract, of the ops: tensors on the wrong device, packed blocks under dropout,
accumulators that overlap.
"""

import pytest
import torch
from cases import cumulative
from compare import assert_close
from op_calls import backward, backward_accumulate, forward

import flashbpt  # noqa: F401  (registers the ops)

# ---- devices


def all_tensors(packed, device="cpu"):
    """Every tensor argument of the forward, as far as they go together."""
    if packed:
        cu = cumulative((5, 7), device=device)
        names = {"q": (12, 4, 8), "k": (12, 4, 8), "v": (12, 4, 8)}
        more = {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    else:
        names = {"q": (2, 4, 20, 8), "k": (2, 4, 33, 8), "v": (2, 4, 33, 8)}
        more = {"mask": torch.randn(1, 1, 20, 33, device=device)}
    return {
        **{n: torch.randn(shape, device=device) for n, shape in names.items()},
        **more,
        "sinks": torch.randn(4, device=device),
        "alibi_slopes": torch.rand(4, device=device),
        "rng_state": torch.tensor([3, 4], device=device),
        "dropout_p": 0.5,
    }


TENSOR_NAMES = [
    (packed, name)
    for packed in (False, True)
    for name, x in all_tensors(packed).items()
    if isinstance(x, torch.Tensor) and name != "q"
]
STRAYS = pytest.mark.parametrize(
    "packed, name", TENSOR_NAMES, ids=[f"{'packed' if p else 'dense'}-{n}" for p, n in TENSOR_NAMES]
)


@pytest.fixture
def away(device):
    """Where a tensor is out of place: meta, or the CPU beside tensors of a GPU."""
    return "meta" if device == "cpu" else "cpu"


def refuses_devices(device, away):
    return pytest.raises(RuntimeError, match=rf"(?s){device}.*{away}|{away}.*{device}")


@STRAYS
def test_a_stray_tensor_of_the_forward(device, away, packed, name):
    arguments = all_tensors(packed, device)
    forward(**arguments)
    with refuses_devices(device, away):
        forward(**{**arguments, name: arguments[name].to(away)})


@STRAYS
def test_a_stray_tensor_of_the_backward(device, away, packed, name):
    arguments = all_tensors(packed, device)
    saved = forward(**arguments)
    grad = torch.randn_like(saved[0])
    stray = {**arguments, name: arguments[name].to(away)}
    with refuses_devices(device, away):
        backward(grad, None, *saved, **stray)
    dk, dv = (torch.zeros_like(arguments[n]) for n in ("k", "v"))
    with refuses_devices(device, away):
        backward_accumulate(grad, None, *saved, dk, dv, **stray)
    assert (dk == 0).all() and (dv == 0).all()


@pytest.mark.parametrize("name", ["grad_out", "grad_lse", "out", "lse", "lse_lo", "dk", "dv"])
def test_a_stray_tensor_of_the_saved_ones(device, away, name):
    arguments = all_tensors(False, device)
    names = ("out", "lse", "lse_lo", "mask_tiles")
    saved = dict(zip(names, forward(**arguments), strict=True))
    call = {
        "grad_out": torch.randn_like(saved["out"]),
        "grad_lse": torch.randn_like(saved["lse"]),
        **saved,
        **arguments,
    }
    sums = {n: torch.zeros_like(arguments[n[1]]) for n in ("dk", "dv")}
    both = {**call, **sums}
    both[name] = both[name].to(away)
    if name not in sums:
        with refuses_devices(device, away):
            backward(**{n: both[n] for n in call})
    with refuses_devices(device, away):
        backward_accumulate(**both)


# ---- packed blocks under dropout


def packed_dropout(device="cpu"):
    q, k, v = (torch.randn(100, 2, 8, device=device) for _ in range(3))
    cu = cumulative((40, 60), device=device)
    return {
        "q": q,
        "k": k,
        "v": v,
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "rng_state": torch.tensor([3, 4], device=device),
        "dropout_p": 0.4,
    }


@pytest.mark.parametrize("start", [16, 32, 40, 56, 88])
def test_packed_blocks_at_multiples_of_16_in_their_sequence(device, start):
    call = packed_dropout(device)
    whole = forward(**call)
    part = {**call, "q": call["q"][start:], "q_offset": start}
    out, lse, *rest = forward(**part)
    assert_close("out", out, whole[0][start:])
    assert_close("lse", lse, whole[1][start:])
    grad = torch.randn(100, 2, 8, device=device)
    wanted = backward(grad, None, *whole, **call)
    dq = backward(grad[start:], None, out, lse, *rest, **part)[0]
    assert_close("dq", dq, wanted[0][start:], ulps=20)


@pytest.mark.parametrize("start", [5, 8, 33, 45, 48, 64])
def test_packed_blocks_elsewhere_are_refused(start):
    """48 is a multiple of 16, but row 8 of its sequence."""
    call = packed_dropout()
    part = {**call, "q": call["q"][start:], "q_offset": start}
    with pytest.raises(RuntimeError, match="multiple of 16|multiples of 16"):
        forward(**part)
    part["dropout_p"] = 0.0
    usual = forward(**{**call, "dropout_p": 0.0})
    assert_close("out", forward(**part)[0], usual[0][start:])


# ---- accumulators


def accumulate(dk, dv):
    """A backward that adds into dk and dv, checked."""
    q, k, v = (torch.randn(2, 2, n, 8, device=dk.device) for n in (20, 30, 30))
    arguments = {"q": q, "k": k, "v": v}
    saved = forward(**arguments)
    grad = torch.randn_like(saved[0])
    before = dk.clone(), dv.clone()
    try:
        backward_accumulate(grad, None, *saved, dk, dv, **arguments)
    except RuntimeError:
        assert torch.equal(dk, before[0]) and torch.equal(dv, before[1])
        raise
    wanted = backward(grad, None, *saved, **arguments)
    assert_close("dk", dk, before[0] + wanted[1], ulps=20)
    assert_close("dv", dv, before[1] + wanted[2], ulps=20)


def test_accumulators_that_overlap_themselves_are_refused(device):
    for dims in ((2, 1, 30, 8), (1, 2, 30, 8), (2, 2, 1, 8), (2, 2, 30, 1)):
        expanded = torch.zeros(dims, device=device).expand(2, 2, 30, 8)
        fine = torch.zeros(2, 2, 30, 8, device=device)
        for pair in ((expanded, fine), (fine, expanded)):
            with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
                accumulate(*pair)


def test_one_tensor_for_both_accumulators_is_refused(device):
    both = torch.zeros(2, 2, 30, 8, device=device)
    storage = torch.zeros(2 * 2 * 30 * 8 + 4, device=device)
    shifted = [storage[i : i + 2 * 2 * 30 * 8].view(2, 2, 30, 8) for i in (0, 4)]
    for dk, dv in ((both, both), (both, both.view_as(both)), shifted):
        with pytest.raises(RuntimeError, match=r"overlap|single memory location"):
            accumulate(dk, dv)


def test_accumulators_side_by_side_in_one_storage_are_served(device):
    accumulate(*torch.randn(2, 2, 2, 30, 8, device=device).unbind(0))
    accumulate(*torch.randn(2, 2, 30, 2, 8, device=device).unbind(3))
    accumulate(*torch.randn(2, 30, 2, 16, device=device).transpose(1, 2).split(8, -1))
