"""Empty inputs, NaN and infinity, extreme scores, many heads."""

import pytest
import torch
from cases import Case, draw, make
from compare import Inputs, check

import flashbpt

INF, NAN = float("inf"), float("nan")

EMPTY = {
    "B=0": ((0, 2, 5, 8), (0, 2, 7, 8), (0, 2, 7, 3)),
    "Lq=0": ((2, 2, 0, 8), (2, 2, 7, 8), (2, 2, 7, 3)),
    "Lk=0": ((2, 2, 5, 8), (2, 2, 0, 8), (2, 2, 0, 3)),
    "Lq=Lk=0": ((2, 2, 0, 8), (2, 2, 0, 8), (2, 2, 0, 3)),
    "H=0": ((2, 0, 5, 8), (2, 0, 7, 8), (2, 0, 7, 3)),
    "D=0": ((2, 2, 5, 0), (2, 2, 7, 0), (2, 2, 7, 3)),
    "Dv=0": ((2, 2, 5, 8), (2, 2, 7, 8), (2, 2, 7, 0)),
    "D=Dv=0": ((2, 2, 5, 0), (2, 2, 7, 0), (2, 2, 7, 0)),
    "rank 2, Lk=0": ((5, 8), (0, 8), (0, 3)),
    "rank 3, N=0": ((0, 5, 8), (0, 7, 8), (0, 7, 3)),
    "all": ((0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", EMPTY)
def test_empty(device, case, dtype):
    """Defined results: zeros for rows without keys, the mean of v for D = 0, and a zero gradient
    for every input.
    """
    leaves = {
        name: draw(shape, dtype, device)
        for name, shape in zip(("query", "key", "value"), EMPTY[case], strict=True)
    }
    for causal in (False, True):
        got = check(Inputs(dict(leaves), {"is_causal": causal}, tuple(leaves), use_lse=True))
        if "Lk=0" in case:
            assert (got["out"] == 0).all() and (got["lse"] == -INF).all()


def test_empty_with_gqa_and_features(device):
    for heads, kv_heads, lk in ((0, 0, 7), (4, 2, 0), (4, 2, 7)):
        leaves = {
            "query": draw((0 if lk else 2, heads, 5, 8), torch.float32, device),
            "key": draw((0 if lk else 2, kv_heads, lk, 8), torch.float32, device),
            "value": draw((0 if lk else 2, kv_heads, lk, 8), torch.float32, device),
            "attn_mask": draw((5, lk), torch.float32, device),
            "sinks": draw((heads,), torch.float32, device),
        }
        check(Inputs(leaves, {"enable_gqa": True}, tuple(leaves), use_lse=True))


def test_no_keys_but_a_sink(device):
    leaves = {
        "query": draw((2, 3, 5, 8), torch.float32, device),
        "key": draw((2, 3, 0, 8), torch.float32, device),
        "value": draw((2, 3, 0, 8), torch.float32, device),
        "sinks": draw((3,), torch.float32, device),
    }
    got = check(Inputs(leaves, {}, tuple(leaves), use_lse=True))
    assert (got["out"] == 0).all()
    torch.testing.assert_close(got["lse"], leaves["sinks"].view(1, 3, 1).expand(2, 3, 5))


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_bad_query_row_stays_in_its_row(device, value):
    inputs = make(Case(lq=70, lk=66), device, grads=False)
    inputs.leaves["query"][1, 0, 65, 3] = value
    got = check(inputs)
    bad = torch.isnan(got["out"]).any(-1)
    assert bad.nonzero().tolist() == [[1, 0, 65]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_a_nan_query_row(device, dtype):
    """dq is NaN in that row only; dk and dv are NaN wherever the row looks."""
    inputs = make(Case(lq=70, lk=66, dtype=dtype, batch=2), device)
    inputs.leaves["query"][1, 0, 65, :] = NAN
    got = check(inputs)
    assert torch.isnan(got["dquery"]).any(-1).nonzero().tolist() == [[1, 0, 65]]
    assert torch.isfinite(got["dkey"][0]).all() and torch.isfinite(got["dvalue"][:, 1]).all()


@pytest.mark.parametrize("name", ["key", "value"])
def test_nan_in_the_last_key_reaches_the_row_that_sees_it(device, name):
    """Causal: only the last row of that head sees the key; other heads and batches stay clean."""
    inputs = make(Case(lq=600, lk=600, causal=True, batch=1), device, grads=False)
    clean = flashbpt.attention(**inputs.leaves, is_causal=True)
    inputs.leaves[name][0, 1, 599] = NAN
    out = flashbpt.attention(**inputs.leaves, is_causal=True)
    assert torch.isnan(out[0, 1, 599]).all()
    torch.testing.assert_close(out[:, 0], clean[:, 0], atol=0, rtol=0)


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("name", ["key", "value"])
def test_bad_keys_seen_by_every_row(device, name, value):
    inputs = make(Case(lq=70, lk=66, heads=3), device, grads=False)
    inputs.leaves[name][1, 2, 40, 5] = value
    if name == "key":  # a score of one sign: not 0 * inf
        inputs.leaves["query"][..., 5] = inputs.leaves["query"][..., 5].abs() + 0.1
    check(inputs)


def test_equal_scores_far_from_zero(device):
    q, k = (
        torch.full((1, 1, 3, 16), -122.0, device=device),
        torch.full((1, 1, 70, 16), 122.0, device=device),
    )
    v = draw((1, 1, 70, 16), torch.float32, device)
    out, lse = flashbpt.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, v.mean(-2, keepdim=True).expand_as(out), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        lse, torch.full((1, 1, 3), -4 * 122.0**2 + 4.2485, device=device), atol=1e-2, rtol=0
    )


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_scores_with_two_winners(device, sign):
    q = torch.full((1, 1, 2, 4), 70.0, device=device)
    k = torch.full((1, 1, 130, 4), -70.0, device=device) * sign
    k[0, 0, [3, 129]] *= -1.0 if sign > 0 else 0.5
    v = draw((1, 1, 130, 4), torch.float32, device)
    out, lse = flashbpt.attention(q, k, v, return_lse=True)
    keys = [3, 129] if sign > 0 else [j for j in range(130) if j not in (3, 129)]
    torch.testing.assert_close(
        out, v[:, :, keys].mean(-2, keepdim=True).expand_as(out), atol=1e-6, rtol=1e-5
    )
    assert torch.isfinite(lse).all() and abs(float(lse[0, 0, 0]) - 9800.0) < 6.0


def test_half_precision_scores_beyond_its_range(device):
    """q and k full of 256, E = 80: scores near 5.9e5 do not fit fp16."""
    q = torch.full((1, 2, 5, 80), 256.0, dtype=torch.float16, device=device)
    v = draw((1, 2, 70, 80), torch.float16, device)
    k = q[:, :, :1].expand(1, 2, 70, 80)
    out = flashbpt.attention(q, k, v)
    torch.testing.assert_close(
        out.double(), v.double().mean(-2, keepdim=True).expand_as(out), atol=2e-3, rtol=1e-2
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_peaked_softmax_keeps_finite_gradients(device, dtype):
    """Inputs ten times normal: weights are almost one-hot."""
    got = check(make(Case(lq=40, lk=40, batch=3, heads=4, dim=32, size=10.0, dtype=dtype), device))
    assert all(torch.isfinite(got[n]).all() for n in ("dquery", "dkey", "dvalue"))


def test_softcap_bounds_scores_and_their_gradient(device):
    check(make(Case(lq=130, lk=70, dim=64, size=4.0, softcap=20.0, dtype="bf16"), device))
    check(make(Case(lq=130, lk=70, dim=64, size=30.0, softcap=2.0), device))


def test_sinks_of_every_size(device):
    inputs = make(Case(lq=70, lk=66, heads=6, sinks=True, lse=True), device)
    inputs.leaves["sinks"] = torch.tensor([100.0, -100.0, 0.0, 1e4, -1e4, 20.0], device=device)
    got = check(inputs)
    assert (got["out"][:, 3] == 0).all()
    torch.testing.assert_close(got["lse"][:, 3], torch.full_like(got["lse"][:, 3], 1e4))


def test_sink_of_minus_infinity_is_no_sink(device):
    inputs = make(Case(lq=70, lk=66), device, grads=False)
    without = flashbpt.attention(**inputs.leaves)
    out = flashbpt.attention(**inputs.leaves, sinks=torch.full((2,), -INF, device=device))
    torch.testing.assert_close(out, without, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("largest_at", ["front", "back", "random"])
def test_running_maximum(device, largest_at):
    """Scores that rise, fall or jump along the keys: every rescaling of the accumulator is used."""
    inputs = make(Case(lq=66, lk=600, batch=1, size=1.0, lse=True), device)
    order = {
        "front": torch.linspace(5, 0, 600),
        "back": torch.linspace(0, 5, 600),
        "random": torch.rand(600) * 5,
    }[largest_at]
    inputs.leaves["query"] = inputs.leaves["query"].abs() + 0.1
    inputs.leaves["key"] = inputs.leaves["key"].abs() * order.to(device)[:, None]
    check(inputs)


def test_many_heads(device):
    inputs = make(Case(lq=3, batch=1, heads=65540, dim=8), device)
    check(inputs)


def test_large_batch(device):
    check(make(Case(lq=2, lk=3, batch=3001, heads=1, dim=8, dtype="bf16", causal=True), device))


def test_many_query_rows(device):
    check(make(Case(lq=70000, lk=4, batch=1, heads=1, dim=4), device))


def test_mean_far_from_zero(device):
    for dtype in ("fp32", "bf16"):
        check(make(Case(lq=140, lk=300, dim=32, mean=4.0, size=0.5, dtype=dtype, lse=True), device))


def test_zero_scale_with_infinite_scores_is_nan(device):
    """0 * inf is NaN in plain arithmetic, and stays visible."""
    q, k, v = (draw((1, 1, 4, 8), torch.float32, device) for _ in range(3))
    q[0, 0, 2, 0] = INF
    out = flashbpt.attention(q, k, v, scale=0.0)
    assert torch.isnan(out[0, 0, 2]).all() and torch.isfinite(out[0, 0, :2]).all()


def test_integer_scale(device):
    q, k, v = (draw((1, 2, 9, 8), torch.float32, device) for _ in range(3))
    torch.testing.assert_close(
        flashbpt.attention(q, k, v, scale=1), flashbpt.attention(q, k, v, scale=1.0), atol=0, rtol=0
    )
