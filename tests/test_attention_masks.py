"""Boolean and additive masks of flashbpt.attention: broadcasting, strides, rows and tiles without
keys.
"""

from itertools import product

import pytest
import torch
from cases import Case, draw, ids, make
from compare import Inputs, check

import flashbpt

INF = float("inf")
ALL_DIMS = ["".join(letters) for letters in product("b1", "h1", "q1", "k1")]
SHORT_DIMS = ["k", "1", "qk", "q1", "1k", "11", "hqk", "1qk", "h1k", "hq1", "111"]


@pytest.mark.parametrize("dims", ALL_DIMS + SHORT_DIMS)
@pytest.mark.parametrize("kind", ["bool", "fp32"])
def test_every_broadcast(device, kind, dims):
    check(make(Case(lq=37, lk=70, heads=4, kv_heads=2, mask=f"{kind}:{dims}"), device))


@pytest.mark.parametrize("dims", ["bhqk", "b11k", "qk", "hq1", "1111"])
@pytest.mark.parametrize(
    "dtype, kind",
    [
        ("bf16", "own"),
        ("bf16", "fp32"),
        ("fp16", "own"),
        ("fp16", "fp32"),
        ("bf16", "bool"),
        ("fp64", "own"),
        ("fp64", "bool"),
    ],
)
def test_mask_dtypes(device, dtype, kind, dims):
    check(make(Case(lq=66, lk=130, mask=f"{kind}:{dims}", dtype=dtype, lse=True), device))


LONG = [
    Case(lq=257, lk=513, mask="bool:b1qk"),
    Case(lq=257, lk=513, mask="fp32:11qk", lse=True),
    Case(lq=64, lk=361, mask="fp32:bhqk"),
    Case(lq=300, lk=300, heads=6, kv_heads=1, mask="bool:h1k", lse=True),
    Case(lq=512, lk=128, heads=3, mask="fp32:b1qk", sinks=True),
]


@pytest.mark.parametrize("case", LONG, ids=ids(LONG))
def test_masks_over_several_tiles(device, case):
    check(make(case, device))


def with_mask(mask, device, lq, lk, grad_mask=None, dtype=torch.float32, **fields):
    """Inputs of a case of shape (lq, lk) with the given mask; grad_mask defaults to 'if it is
    floating'.
    """
    name = next(
        n
        for n, d in (
            ("fp32", torch.float32),
            ("bf16", torch.bfloat16),
            ("fp16", torch.float16),
            ("fp64", torch.float64),
        )
        if d == dtype
    )
    inputs = make(Case(lq=lq, lk=lk, dtype=name, **fields), device)
    inputs.leaves["attn_mask"] = mask.to(device)
    if grad_mask or (grad_mask is None and mask.is_floating_point()):
        inputs.grads += ("attn_mask",)
    return inputs


@pytest.mark.parametrize("expand", ["bhqk", "hqk", "qk", "bk", "q"])
@pytest.mark.parametrize("kind", ["bool", "fp32"])
def test_stride_zero(device, kind, expand):
    """A mask of full shape whose stride is 0 on the expanded dims; its gradient has the base's
    shape.
    """
    case = Case(lq=35, lk=66, mask=f"{kind}:" + "".join("1" if d in expand else d for d in "bhqk"))
    inputs = make(case, device)
    inputs.view = lambda leaves: {**leaves, "attn_mask": leaves["attn_mask"].expand(2, 2, 35, 66)}
    check(inputs)


def test_gradient_of_an_expanded_mask_leaf(device):
    """The mask itself is an expanded leaf: the gradient has its full shape, one value a score."""
    inputs = make(Case(lq=35, lk=66), device)
    inputs.leaves["attn_mask"] = torch.randn(1, 1, 1, 66, device=device).expand(2, 2, 35, 66)
    inputs.grads += ("attn_mask",)
    check(inputs)


@pytest.mark.parametrize("kind", ["bool", "fp32"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[..., 3:73],
        lambda x: x.transpose(-1, -2)[..., :70],
        lambda x: x[:, :, ::2, 5:75],
        lambda x: x[..., ::3][..., :70],
    ],
    ids=["offset", "transposed", "every second row", "every third key"],
)
def test_strides(device, kind, view):
    wide = torch.rand(2, 2, 220, 220)
    mask = view(wide if kind == "fp32" else wide < 0.6)[:, :, :40]
    check(with_mask(mask, device, 40, 70))


@pytest.mark.parametrize("dims", ["qk", "b1qk"])
def test_rows_without_keys(device, dims):
    case = Case(lq=150, lk=140, mask=f"bool:{dims}", lse=True)
    inputs = make(case, device)
    mask = inputs.leaves["attn_mask"]
    mask[..., [0, 5, 64, 149], :] = False
    mask[..., 70:135, :] = False
    got = check(inputs)
    for row in (0, 5, 64, 149, 100):
        assert (got["out"][:, :, row] == 0).all() and (got["dquery"][:, :, row] == 0).all()
        assert (got["lse"][:, :, row] == -INF).all()


def test_no_row_has_a_key(device):
    for mask in (
        torch.zeros(1, 80, dtype=torch.bool),
        torch.full((70, 80), -INF),
        torch.zeros(2, 1, 70, 1, dtype=torch.bool),
    ):
        got = check(with_mask(mask, device, 70, 80, heads=2))
        assert all((got[name] == 0).all() for name in ("out", "dquery", "dkey", "dvalue"))


def test_rows_without_keys_have_the_sink_as_lse(device):
    inputs = make(Case(lq=70, lk=66, mask="bool:11qk", sinks=True, lse=True), device)
    inputs.leaves["attn_mask"][..., 10:20, :] = False
    got = check(inputs)
    assert (got["out"][:, :, 10:20] == 0).all()
    torch.testing.assert_close(got["lse"][:, :, 15], inputs.leaves["sinks"].expand(2, -1))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_dead_rows_and_columns_of_tiles(device, kind):
    """Whole tiles without keys at the start, in the middle and at the end of a row."""
    seen = torch.zeros(300, 640, dtype=torch.bool)
    seen[:100, 600:] = True
    seen[100:200, 250:260] = True
    seen[200:280, :7] = True
    seen[280:, ::128] = True
    mask = seen if kind == "bool" else torch.zeros(300, 640).masked_fill(~seen, -INF)
    check(with_mask(mask, device, 300, 640, batch=1, lse=True))


@pytest.mark.parametrize("kind", ["bool", "additive"])
def test_band(device, kind):
    row = torch.arange(640)
    seen = (row[:, None] - row[None, :]).abs() <= 5
    mask = seen if kind == "bool" else torch.randn(640, 640).masked_fill(~seen, -INF)
    check(with_mask(mask, device, 640, 640, batch=1))


def test_only_the_last_key(device):
    mask = torch.zeros(1, 257, dtype=torch.bool)
    mask[0, -1] = True
    inputs = with_mask(mask, device, 1, 257)
    got = check(inputs)
    torch.testing.assert_close(got["out"], inputs.leaves["value"][:, :, -1:], atol=0, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_left_padding_with_causal(device, dtype):
    """What a batch of prompts gives: boolean (B, 1, L, L), left padding and causal in one mask;
    padded rows are 0.
    """
    start = torch.tensor([0, 1, 17, 32])
    row = torch.arange(33)
    seen = (row[None, :] >= start[:, None])[:, None, None, :] & (row[:, None] >= row[None, :])
    inputs = make(Case(lq=33, batch=4, dtype=dtype, lse=True), device)
    inputs.leaves["attn_mask"] = seen.to(device)
    got = check(inputs)
    for b in range(4):
        assert (got["out"][b, :, : start[b]] == 0).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp64"])
def test_rows_filled_with_the_smallest_number(device, dtype):
    """finfo.min is not -inf: where it swallows the scores the row averages v, with the gradients of
    an average.
    """
    inputs = make(Case(lq=70, lk=150, batch=1, mask="own:11qk", dtype=dtype, lse=True), device)
    mask = inputs.leaves["attn_mask"] = torch.zeros_like(inputs.leaves["attn_mask"])
    smallest = torch.finfo(mask.dtype).min
    mask[..., 3, :] = smallest
    mask[..., 20:40, :100] = smallest
    mask[..., 66, :] = smallest
    mask[..., 66, 149] = -INF
    check(inputs)


def test_rows_near_the_smallest_number_have_the_gradient_of_their_row(device):
    """Every row at finfo.min: dq of a row of equal scores is that of a uniform average, not n times
    it.
    """
    q, k, v = (draw((1, 2, 5, 8), torch.float32, device) for _ in range(3))
    q = torch.zeros_like(q)
    mask = torch.full((5, 5), torch.finfo(torch.float32).min, device=device)
    got = check(
        Inputs(
            {"query": q, "key": k, "value": v, "attn_mask": mask},
            {},
            ("query", "key", "value", "attn_mask"),
        )
    )
    torch.testing.assert_close(got["out"], v.mean(-2, keepdim=True).expand_as(v))


@pytest.mark.parametrize("value", [-1e4, -1e9, -1e30, 1e4])
def test_large_finite_masks(device, value):
    mask = torch.zeros(2, 1, 1, 300)
    mask[0, ..., :280] = value
    mask[1, ..., 5:] = value
    check(with_mask(mask, device, 130, 300))


def test_plus_infinity_gives_nan_rows(device):
    mask = torch.zeros(40, 50)
    mask[7, 9] = INF
    mask[30, 40] = float("nan")
    inputs = with_mask(mask, device, 40, 50, grad_mask=False)
    inputs.grads = ()
    got = check(inputs)
    assert torch.isnan(got["out"]).all(-1).nonzero()[:, 2].unique().tolist() == [7, 30]


def test_true_mask_changes_nothing(device):
    inputs = make(Case(lq=130, lk=140), device)
    plain = flashbpt.attention(**inputs.leaves)
    for mask in (
        torch.ones(130, 140, dtype=torch.bool, device=device),
        torch.ones(1, dtype=torch.bool, device=device),
    ):
        torch.testing.assert_close(flashbpt.attention(**inputs.leaves, attn_mask=mask), plain)


@pytest.mark.parametrize("kind", ["bool", "fp32"])
def test_expanded_masks_are_broadcast(device, kind):
    """A mask that repeats memory is that mask; one that does not fit the scores is refused."""
    inputs = make(Case(lq=37, lk=50, heads=4, mask=f"{kind}:b11k"), device, grads=False)
    usual = flashbpt.attention(**inputs.leaves)
    mask = inputs.leaves["attn_mask"]
    inputs.leaves["attn_mask"] = mask.expand(2, 4, 37, 50)
    torch.testing.assert_close(flashbpt.attention(**inputs.leaves), usual)
    for shape in ((2, 3, 37, 50), (2, 4, 36, 50)):
        inputs.leaves["attn_mask"] = mask.expand(shape)
        with pytest.raises(RuntimeError, match="does not broadcast"):
            flashbpt.attention(**inputs.leaves)


@pytest.mark.parametrize(
    "view", [lambda m: m, lambda m: m[:, None], lambda m: m[:, None, None]], ids=["3d", "4d", "5d"]
)
def test_mask_rank_against_rank_of_the_query(device, view):
    """The mask broadcasts against the scores from the right, whatever the rank of q."""
    mask = view(torch.randn(2, 9, 11))
    lead = {3: (2,), 4: (2, 3), 5: (2, 4, 3)}[mask.dim()]
    leaves = {
        "query": draw((*lead, 9, 8), torch.float32, device),
        "key": draw((*lead, 11, 8), torch.float32, device),
        "value": draw((*lead, 11, 5), torch.float32, device),
        "attn_mask": mask.to(device),
    }
    check(Inputs(leaves, {}, tuple(leaves)))
