"""merge_attention_states: values, special values, layouts, errors, gradients, torch.compile."""

import math

import pytest
import torch
from compare import assert_bitwise, assert_close

import flashbpt

INF = float("inf")
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture(params=["cpu", CUDA])
def device(request):
    if request.param == "cuda" and flashbpt._C.build_info()["cuda"] is None:
        pytest.skip("this build has no CUDA part")
    return request.param


def lse_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_states(n, shape, dtype, device="cpu", empty=0.25, poison=True):
    """n states of out shape `shape`: outs with a mean of 1, LSEs over a wide range, some empty."""
    outs, lses = [], []
    for _ in range(n):
        out = 1 + torch.randn(shape, dtype=lse_dtype(dtype), device=device)
        lse = 4 * torch.randn(shape[:-1], dtype=lse_dtype(dtype), device=device)
        no_keys = torch.rand(shape[:-1], device=device) < empty
        out = out.masked_fill(no_keys.unsqueeze(-1), math.nan if poison else 0.0)
        outs.append(out.to(dtype))
        lses.append(lse.masked_fill(no_keys, -INF))
    return outs, lses


def merge_by_formula(outs, lses, dtype):
    """The formula, as one weighted sum over the stacked states, computed in `dtype`."""
    out = torch.stack([o.to(dtype) for o in outs])
    lse = torch.stack([one.to(dtype) for one in lses])
    out = out.masked_fill((lse == -INF).unsqueeze(-1), 0)
    total = torch.logsumexp(lse, 0)
    weights = torch.exp(lse - total).masked_fill(lse == -INF, 0)
    return (weights.unsqueeze(-1) * out).sum(0), total


def check_values(outs, lses):
    dtype = outs[0].dtype
    out, lse = flashbpt.merge_attention_states(outs, lses)
    assert out.shape == outs[0].shape and out.dtype == dtype and out.is_contiguous()
    assert lse.shape == lses[0].shape and lse.dtype == lses[0].dtype and lse.is_contiguous()
    exact_out, exact_lse = merge_by_formula(outs, lses, torch.float64)
    plain_out, plain_lse = merge_by_formula(outs, lses, lse_dtype(dtype))
    assert_close("out", out, exact_out, plain_out.to(dtype))
    assert_close("lse", lse, exact_lse, plain_lse)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 5, 40, 300])
def test_values(n, dtype, device):
    check_values(*make_states(n, (2, 3, 7, 64), dtype, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, 3, 8, 40, 63, 65, 96, 128, 129, 256, 513, 3000])
def test_head_dims(dim, dtype, device):
    check_values(*make_states(3, (5, 3, dim), dtype, device))


@pytest.mark.parametrize("shape", [(64,), (1,), (7, 16), (2, 3, 2, 3, 2, 8), (1, 1, 1, 1)])
def test_any_leading_shape(shape, device):
    check_values(*make_states(4, shape, torch.float32, device))


@pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 5, 8), (0,), (0, 0), (4, 0)])
def test_empty_tensors(shape, device):
    outs, lses = make_states(2, shape, torch.float32, device, empty=0)
    out, lse = flashbpt.merge_attention_states(outs, lses)
    assert out.shape == shape and lse.shape == shape[:-1]
    torch.testing.assert_close(lse, torch.logsumexp(torch.stack(lses), 0))


def test_more_rows_than_a_grid_dimension_of_65535(device):
    check_values(*make_states(2, (70001, 3), torch.bfloat16, device))
    check_values(*make_states(2, (66000, 8), torch.bfloat16, device))


def test_one_state_comes_back_bit_for_bit(device):
    for dtype in DTYPES:
        outs, lses = make_states(1, (2, 5, 24), dtype, device, empty=0)
        out, lse = flashbpt.merge_attention_states(outs, lses)
        assert_bitwise("out", out, outs[0])
        assert_bitwise("lse", lse, lses[0])


@pytest.mark.parametrize("n", [1, 2, 33, 70])
def test_all_states_empty(n, device):
    outs = [torch.full((3, 4, 16), math.nan, device=device, dtype=torch.float16)] * n
    lses = [torch.full((3, 4), -INF, device=device)] * n
    out, lse = flashbpt.merge_attention_states(outs, lses)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -INF))


@pytest.mark.parametrize("full", [0, 3, 31, 32, 63, 64, 69])
def test_one_state_with_keys_among_many_without(full, device):
    outs, lses = make_states(70, (2, 6, 16), torch.float32, device, empty=1)
    outs[full], lses[full] = torch.randn_like(outs[0]), torch.randn_like(lses[0]) - 500
    out, lse = flashbpt.merge_attention_states(outs, lses)
    torch.testing.assert_close(out, outs[full])
    torch.testing.assert_close(lse, lses[full])


@pytest.mark.parametrize("value", [1e4, -1e4, 3e38, -3e38])
def test_large_lse_neither_overflows_nor_vanishes(value, device):
    outs, lses = make_states(3, (4, 8), torch.float32, device, empty=0)
    lses = [torch.full_like(one, value) for one in lses]
    out, lse = flashbpt.merge_attention_states(outs, lses)
    torch.testing.assert_close(out, torch.stack(outs).mean(0))
    torch.testing.assert_close(lse, lses[0] + math.log(3))


@pytest.mark.parametrize("n, at", [(1, 0), (3, 0), (3, 2), (70, 1), (70, 40), (70, 69)])
def test_nan_and_infinite_lse_stay_in_their_row(n, at, device):
    outs, lses = make_states(n, (4, 5, 8), torch.float32, device)
    lses[at][0, 1] = math.nan
    lses[at][2, 3] = INF
    for one in lses:
        one[1, 1] = -INF
    lses[at][1, 1] = math.nan
    outs[at][2, 3] = 1.0
    out, lse = flashbpt.merge_attention_states(outs, lses)
    assert lse[0, 1].isnan() and out[0, 1].isnan().all()
    assert lse[1, 1].isnan() and out[1, 1].isnan().all()
    assert lse[2, 3] == INF and out[2, 3].isnan().all()
    rest = torch.ones(4, 5, dtype=torch.bool, device=device)
    rest[0, 1] = rest[1, 1] = rest[2, 3] = False
    exact_out, exact_lse = merge_by_formula(outs, lses, torch.float64)
    torch.testing.assert_close(out[rest].double(), exact_out[rest], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse[rest].double(), exact_lse[rest], rtol=1e-5, atol=1e-5)


def test_nan_in_an_out_row_with_keys_stays_in_its_column(device):
    outs, lses = make_states(3, (4, 8), torch.float32, device, empty=0)
    outs[1][2, 5] = math.nan
    lses[1][2] = -1e4  # its weight is 0 by underflow, but it has keys
    out, _ = flashbpt.merge_attention_states(outs, lses)
    wrong = torch.zeros(4, 8, dtype=torch.bool, device=device)
    wrong[2, 5] = True
    assert torch.equal(out.isnan(), wrong)


def layouts():
    def expanded(x):
        return x[:1].expand_as(x)

    def bhsd_in_bshd(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def sliced(x):
        wide = x.new_full((*x.shape[:-1], x.shape[-1] + 8), math.nan)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    def misaligned(x):
        flat = x.new_empty(x.numel() + 1)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)

    def columns_apart(x):
        return x.repeat_interleave(2, -1)[..., ::2]

    def columns_outermost(x):
        return x.movedim(-1, 0).contiguous().movedim(0, -1)

    def reversed_dims(x):
        return x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))

    return [expanded, bhsd_in_bshd, sliced, misaligned, columns_apart, columns_outermost,
            reversed_dims]  # fmt: skip


@pytest.mark.parametrize("lay", layouts(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_strides(lay, dtype, device):
    outs, lses = make_states(3, (2, 3, 5, 16), dtype, device)
    outs = [lay(outs[0]), outs[1], lay(outs[2])]
    lses = [lses[0], lay(lses[1]), lses[2]]
    lses[0] = lses[0].masked_fill(outs[0][..., 0].isnan(), -INF)
    before = [t.clone() for t in outs + lses]
    check_values(outs, lses)
    for was, now in zip(before, outs + lses):
        assert_bitwise("input", was, now)


def test_leading_dimensions_that_do_not_fold(device):
    shape = (2, 3, 2, 3, 2, 8)
    outs, lses = make_states(3, shape, torch.bfloat16, device)
    order = (4, 0, 2, 3, 1, 5)
    inverse = [order.index(i) for i in range(6)]
    outs[1] = outs[1].permute(order).contiguous().permute(inverse)
    assert not outs[1].is_contiguous() and outs[1].shape == shape
    check_values(outs, lses)


def test_slices_of_one_tensor(device):
    outs, lses = make_states(4, (6, 3, 32), torch.bfloat16, device)
    stacked = torch.stack(outs), torch.stack(lses)
    expected = flashbpt.merge_attention_states(outs, lses)
    between = torch.stack(outs, 1).unbind(1), torch.stack(lses, 1).unbind(1)
    for given in (stacked, between):
        got = flashbpt.merge_attention_states(*given)
        assert_bitwise("out", got[0], expected[0])
        assert_bitwise("lse", got[1], expected[1])


def test_groups_of_states_lose_nothing(device):
    """300 equal LSEs, outs that cancel in pairs: rounding between groups would leave a rest."""
    outs, lses = [], []
    for i in range(300):
        outs.append(torch.full((3, 8), 1.0 if i < 150 else -1.0, device=device).bfloat16())
        lses.append(torch.zeros(3, device=device))
    outs[7] = outs[7] + 2.0**-6
    out, _ = flashbpt.merge_attention_states(outs, lses)
    torch.testing.assert_close(out, torch.full_like(out, 2.0**-6 / 300), rtol=2e-2, atol=0)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_softmax_split_over_keys_merges_to_the_whole(parts, device):
    q, k, v = (torch.randn(2, 3, n, 16, device=device, dtype=torch.float64) for n in (5, 23, 23))

    def attend(k, v):
        scores = q @ k.transpose(-1, -2)
        return scores.softmax(-1) @ v, scores.logsumexp(-1)

    pieces = [attend(*kv) for kv in zip(k.tensor_split(parts, 2), v.tensor_split(parts, 2))]
    out, lse = flashbpt.merge_attention_states([o for o, _ in pieces], [s for _, s in pieces])
    whole_out, whole_lse = attend(k, v)
    torch.testing.assert_close(out, whole_out)
    torch.testing.assert_close(lse, whole_lse)


def test_merging_is_associative(device):
    outs, lses = make_states(6, (4, 3, 8), torch.float64, device)
    at_once = flashbpt.merge_attention_states(outs, lses)
    left = flashbpt.merge_attention_states(outs[:2], lses[:2])
    right = flashbpt.merge_attention_states(outs[2:], lses[2:])
    in_steps = flashbpt.merge_attention_states(*zip(left, right))
    torch.testing.assert_close(in_steps, at_once)


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
ERRORS = {
    "no states": ([], [], "outs is empty; at least one state is needed"),
    "lengths": ([((2, 4), F32)] * 2, [((2,), F32)], "same length, but got 2 outs and 1 lses"),
    "rank": ([((), F32)], [((), F32)], r"at least one dimension \(..., D\), .* shape \[\]"),
    "dtype": ([((2, 4), torch.int64)], [((2,), F32)], "float16 or float64, but outs.0. is Long"),
    "complex": ([((2, 4), torch.complex64)], [((2,), F32)], "but outs.0. is ComplexFloat"),
    "shapes": ([((2, 4), F32), ((2, 5), F32)], [((2,), F32)] * 2,
               r"one shape, but outs.1. is \[2, 5\] and outs.0. is \[2, 4\]"),
    "broadcast": ([((2, 4), F32), ((1, 4), F32)], [((2,), F32)] * 2, r"outs.1. is \[1, 4\]"),
    "mixed dtypes": ([((2, 4), F32), ((2, 4), BF16)], [((2,), F32)] * 2,
                     "one dtype, but outs.1. is BFloat16 and outs.0. is Float"),
    "lse shape": ([((2, 4), F32)], [((2, 1), F32)], r"dimension, \[2\], but lses.0. is \[2, 1"),
    "lse dtype": ([((2, 4), BF16)], [((2,), BF16)], "Float where outs are BFloat16, .* BFloat16"),
    "fp32 lse": ([((2, 4), F64)], [((2,), F32)], "Double where outs are Double, but .* Float"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("grad", [False, True])
def test_errors(case, grad, device):
    outs, lses, message = ERRORS[case]
    outs = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in outs]
    lses = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in lses]
    if grad:
        for t in outs + lses:
            t.requires_grad_(t.is_floating_point())
    with pytest.raises(RuntimeError, match="merge_attention_states: .*" + message):
        flashbpt.merge_attention_states(outs, lses)


@pytest.mark.gpu
def test_error_of_mixed_devices():
    outs, lses = make_states(2, (2, 4), torch.float32, "cuda")
    for other in (([outs[0], outs[1].cpu()], lses), (outs, [lses[0], lses[1].cpu()])):
        with pytest.raises(RuntimeError, match=r"on one device, but outs.0. is on cuda:0, .* cpu"):
            flashbpt.merge_attention_states(*other)


def with_grad(states):
    return [t.clone().requires_grad_() for t in states]


def merged_from_flat(*states):
    n = len(states) // 2
    return flashbpt.merge_attention_states(states[:n], states[n:])


@pytest.mark.parametrize("n, dim", [(1, 3), (2, 4), (5, 2), (2, 0)])
def test_gradcheck(n, dim, device):
    outs, lses = make_states(n, (2, 3, dim), torch.float64, device, empty=0)
    states = with_grad(outs + lses)
    assert torch.autograd.gradcheck(merged_from_flat, states)
    assert torch.autograd.gradgradcheck(merged_from_flat, states)


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_against_the_formula(through, dtype, device):
    """Half the states empty and poisoned, one row without any keys."""
    outs, lses = make_states(4, (3, 5, 16), dtype, device, empty=0.5)
    for out, lse in zip(outs, lses):
        out[1, 2], lse[1, 2] = math.nan, -INF
    grad_out = torch.randn_like(outs[0].float())
    grad_lse = torch.randn_like(lses[0].float())

    def grads(merge, work_dtype=None):
        states = outs + lses
        states = with_grad(states if work_dtype is None else [t.to(work_dtype) for t in states])
        out, lse = merge(states[:4], states[4:])
        total = 0
        if through != "lse":
            total = total + (out.to(lse.dtype) * grad_out.to(dtype).to(lse.dtype)).sum()
        if through != "out":
            # A row without keys has LSE -inf in any case: no gradient may come from there.
            total = total + (lse * grad_lse.to(lse.dtype)).masked_fill(lse == -INF, 0).sum()
        return torch.autograd.grad(total, states, materialize_grads=True)

    def formula(outs, lses):
        out = torch.stack(outs)
        lse = torch.stack(lses)
        some = (lse != -INF).any(0)
        out = out.masked_fill((lse == -INF).unsqueeze(-1), 0)
        weights = torch.where(some, lse, torch.zeros_like(lse)).softmax(0)
        weights = torch.where(some, weights, torch.zeros_like(weights))
        total = torch.where(some, lse, torch.zeros_like(lse)).logsumexp(0).masked_fill(~some, -INF)
        return (weights.unsqueeze(-1) * out).sum(0), total

    exact = grads(formula, torch.float64)
    plain = grads(formula, lse_dtype(dtype))
    for i, got in enumerate(grads(flashbpt.merge_attention_states)):
        state = (outs + lses)[i]
        assert got.dtype == state.dtype
        # That of an LSE sums grad_out * out of its own state and of all four, 16 columns each.
        terms = 16 if i < 4 else 5 * 16
        assert_close(f"gradient {i}", got, exact[i], plain[i].to(got.dtype), ulps=2.0, terms=terms)
        no_keys = lses[i % 4] == -INF
        assert not got[no_keys].any(), "an empty state has a gradient"


def test_gradient_to_some_of_the_states_only(device):
    outs, lses = make_states(3, (4, 8), torch.float64, device, empty=0)
    every = with_grad(outs + lses)
    out, lse = merged_from_flat(*every)
    expected = torch.autograd.grad(out.sin().sum() + lse.sum(), every)
    for wanted in ([0], [1, 4], [5], [2, 3]):
        states = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(outs + lses)]
        out, lse = merged_from_flat(*states)
        (out.sin().sum() + lse.sum()).backward()
        for i, t in enumerate(states):
            assert (t.grad is not None) == (i in wanted)
            if t.grad is not None:
                torch.testing.assert_close(t.grad, expected[i])


def test_no_graph_without_need(device):
    outs, lses = make_states(2, (4, 8), torch.float32, device)
    assert flashbpt.merge_attention_states(outs, lses)[0].grad_fn is None
    states = with_grad(outs + lses)
    with torch.no_grad():
        assert merged_from_flat(*states)[0].grad_fn is None
    assert merged_from_flat(*states)[0].grad_fn is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck(dtype, device):
    op = torch.ops.flashbpt.merge_attention_states.default
    shapes = [(2, 3, 4, 8), (5, 2, 7), (0, 8), (3, 0)]
    for shape in shapes if dtype == torch.float32 else shapes[1:2]:
        torch.library.opcheck(op, make_states(3, shape, dtype, device, poison=False))
    outs, lses = make_states(2, (2, 3, 4), dtype, device, poison=False)
    outs = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in outs]
    torch.library.opcheck(op, (outs, lses))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(grad, dynamic, device):
    torch._dynamo.reset()
    compiled = torch.compile(merged_from_flat, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (4, 9):
        outs, lses = make_states(3, (tokens, 2, 8), torch.float32, device, poison=False)
        states = with_grad(outs + lses) if grad else outs + lses
        got, expected = compiled(*states), merged_from_flat(*states)
        torch.testing.assert_close(got, expected)
        if grad:
            got = torch.autograd.grad(got[0].sum() + got[1].exp().sum(), states)
            expected = torch.autograd.grad(expected[0].sum() + expected[1].exp().sum(), states)
            torch.testing.assert_close(got, expected)


def test_bitwise_repeats(device):
    outs, lses = make_states(37, (50, 3, 64), torch.bfloat16, device)
    first = flashbpt.merge_attention_states(outs, lses)
    for _ in range(3):
        again = flashbpt.merge_attention_states(outs, lses)
        assert_bitwise("out", again[0], first[0])
        assert_bitwise("lse", again[1], first[1])


@pytest.mark.gpu
def test_offsets_past_32_bits():
    """2.2e9 elements of out: the last rows must be merged, not some that a short offset reaches."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GB of free GPU memory")
    rows, dim = (1 << 21) + (1 << 17), 1000
    row = torch.randn(1, dim, device="cuda").bfloat16()
    big = torch.zeros(rows, dim, device="cuda", dtype=torch.bfloat16)
    big[-1] = 3.0
    lses = [torch.zeros(rows, device="cuda"), torch.zeros(rows, device="cuda")]
    out, lse = flashbpt.merge_attention_states([big, row.expand(rows, dim)], lses)
    torch.testing.assert_close(out[0].float(), row[0].float() / 2, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(out[-1].float(), (3 + row[0].float()) / 2, rtol=1e-2, atol=1e-3)
    assert torch.equal(lse, torch.full_like(lse, math.log(2)))
