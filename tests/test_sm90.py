"""The kernels for Hopper: what they serve and refuse, shapes and features against the reference,
and the softmax without a maximum at the edges of its range.
"""

import re
from dataclasses import replace

import pytest
import torch
from cases import DTYPES, Case, draw, make
from compare import assert_bitwise, assert_close, check
from op_calls import forward
from test_attention import LENGTHS
from test_attention_layout import LAYOUTS

import flashbpt
from flashbpt.backend import BACKENDS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

INF, NAN = float("inf"), float("nan")
SM90 = BACKENDS["sm90"]
LOW = ["bf16", "fp16"]
KERNELS = [(dtype, dim) for dtype in LOW for dim in (64, 128, 256)]
PLAIN = Case(lq=300, lk=333, batch=2, heads=4, kv_heads=2, dim=128, dtype="bf16", lse=True)


def served(inputs, backward=False):
    return flashbpt.which_kernel(**inputs.leaves, **inputs.options, backward=backward)


def check_here(inputs):
    """On sm90, and gradients from its output and LSE by the backend that has a backward."""
    assert served(inputs).kernel == "sm90", str(served(inputs))
    assert served(inputs, backward=True).kernel == "sm80"
    check(inputs)


# Up to 1024 keys are served by blocks of one warpgroup where heads are no wider than 64. So many
# heads that keys need not be split.
MANY_KEYS, MANY_HEADS = 1200, 72


# ---- who is served
def test_rows_of_the_kernel_list(cuda):
    listed = {k["name"] for k in flashbpt._C.kernels() if k["backend"] == "sm90"}
    reached, mask = set(), torch.ones(300, 300, dtype=torch.bool, device=cuda)
    for dtype in LOW:
        for dim, dim_v in [(dim, dim) for dim in range(8, 264, 8)] + [(192, 128), (136, 8)]:
            x = torch.zeros(1, 2, 300, dim, dtype=DTYPES[dtype], device=cuda)
            v = torch.zeros(1, 2, 300, dim_v, dtype=DTYPES[dtype], device=cuda)
            for kind, options in (
                ("(_short)?", {"is_causal": True}),
                ("_terms", {"softcap": 3.0}),
                ("_terms", {"scale": -1.0}),
                ("_masks", {"attn_mask": mask}),
                ("_all", {"dropout_p": 0.1}),
                ("_all", {"attn_mask": mask, "softcap": 3.0}),
            ):
                choice = flashbpt.which_kernel(x, x, v, **options)
                assert choice.kernel == "sm90" and choice.config in listed
                assert re.fullmatch(rf"attn_fwd_{dtype}_d\d+{kind}", choice.config)
                reached.add(choice.config)
            keys, values = (t.new_zeros(1, 300, 2, t.shape[-1]) for t in (x, v))
            table = torch.zeros(1, 1, dtype=torch.int32, device=cuda)
            choice = flashbpt.which_kernel(
                x[0].transpose(0, 1),
                keys,
                values,
                table,
                table[0] + 300,
                op="paged_attention",
                cu_seqlens_q=torch.tensor([0, 300], dtype=torch.int32, device=cuda),
            )
            assert re.fullmatch(rf"attn_fwd_{dtype}_d\d+_pages", choice.config), str(choice)
            reached.add(choice.config)
        x = torch.zeros(1, 8, MANY_KEYS, 64, dtype=DTYPES[dtype], device=cuda)
        reached.add(flashbpt.which_kernel(x, x, x).config)
    assert reached == listed


X = {"lq": 200, "lk": 200, "dtype": "bf16", "dim": 64}
REFUSED = [
    (Case(**{**X, "dtype": "fp32"}), "bfloat16 and float16"),
    (Case(**{**X, "dim": 60}), "multiples of 8"),
    (Case(**{**X, "dim": 264}), "up to 256"),
    (Case(**X, mask="fp32:11qk"), "masks"),
    (Case(**X, mask="bool:11q1"), "masks"),
    (Case(**{**X, "lk": 201}, mask="bool:11qk"), "masks"),
    (Case(**{**X, "lk": 204}, mask="own:11qk"), "masks"),
    (Case(**X, mask="own:b11k"), "masks"),
    (Case(**{**X, "lq": 1, "lk": 5000}), "split keys"),
]


@pytest.mark.parametrize("case, why", REFUSED, ids=[why for _, why in REFUSED])
def test_refusals(cuda, case, why):
    inputs = make(case, cuda, grads=False)
    choice = served(inputs)
    assert choice.kernel == "sm80" and why in choice.refused["sm90"]
    with flashbpt.use_backend("sm90"), pytest.raises(RuntimeError, match=f"(?s)no kernel.*{why}"):
        flashbpt.attention(**inputs.leaves, **inputs.options)


def test_refusals_of_layouts(cuda):
    x = torch.randn(2, 2, 100, 72, device=cuda).bfloat16()
    narrow, odd = x[..., :64], x.flatten()[1 : 1 + 12800].view(1, 2, 100, 64)
    assert flashbpt.which_kernel(narrow, narrow, narrow).kernel == "sm90"
    for t in (odd, narrow[:, :, :1].expand(2, 2, 100, 64), x[..., :64:2]):
        assert "copies want" in flashbpt.which_kernel(t, t, t).refused["sm90"]
    mask = torch.ones(100, 201, dtype=torch.bool, device=cuda)[:, 1:101]
    assert "masks" in flashbpt.which_kernel(narrow, narrow, narrow, mask).refused["sm90"]


def test_small_shared_memory(cuda):
    x = torch.randn(1, 2, MANY_KEYS, 64, device=cuda).bfloat16()
    flashbpt._C.limit_shared_memory(99 * 1024)
    try:
        assert "shared memory" in flashbpt.which_kernel(x, x, x).refused["sm90"]
    finally:
        flashbpt._C.limit_shared_memory(0)


# ---- shapes and features
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "dim, dim_v",
    [(8, 8), (24, 56), (64, 128), (72, 72), (80, 80), (96, 96), (128, 64), (192, 128), (200, 256)],
    ids=str,
)
def test_head_dims(cuda, dim, dim_v, dtype):
    check_here(make(replace(PLAIN, dim=dim, dim_v=dim_v, dtype=dtype), cuda))
    check_here(make(replace(PLAIN, dim=dim, dim_v=dim_v, dtype=dtype, causal=True), cuda))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_lengths(cuda, dtype, dim, causal):
    for lq, lk in [*LENGTHS, *([(65, 1025), (500, 1333)] if dim == 64 else [])]:
        align = "lower-right" if causal and (lq + lk) % 2 else "upper-left"
        case = replace(PLAIN, lq=lq, lk=lk, dim=dim, dtype=dtype, causal=causal, align=align)
        more = {"heads": MANY_HEADS, "kv_heads": 2} if lk > 1024 else {}
        check_here(make(replace(case, batch=1, **more), cuda))


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize(
    "window", [(0, 0), (3, 0), (-1, 40), (70, 70), (16, 300), (200, -1)], ids=str
)
def test_windows(cuda, window, dtype, dim):
    sizes = [("upper-left", 257, 300), ("lower-right", 700, 480)]
    if dim == 64:
        sizes.append(("lower-right", 500, MANY_KEYS))
    for align, lq, lk in sizes:
        case = Case(lq=lq, lk=lk, dim=dim, dtype=dtype, window=window, align=align, batch=1)
        if lk > 1024:
            case = replace(case, heads=MANY_HEADS, kv_heads=2)
        check_here(make(case, cuda))
        check_here(make(replace(case, causal=True, lse=True, sinks=True), cuda))


@pytest.mark.parametrize("ratio", [1, 2, 3, 8])
def test_grouped_queries(cuda, ratio):
    case = replace(PLAIN, heads=2 * ratio, kv_heads=2, dim=64, sinks=True)
    for causal in (False, True):
        check_here(make(replace(case, causal=causal), cuda))


@pytest.mark.parametrize("scale", [0.0, -0.2, 3.0])
@pytest.mark.parametrize("dtype", LOW)
def test_scales(cuda, scale, dtype):
    check_here(make(replace(PLAIN, dtype=dtype, scale=scale, causal=True, dim=64), cuda))


@pytest.mark.parametrize("softcap", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_softcap(cuda, softcap, dtype, dim):
    case = replace(PLAIN, dim=dim, dtype=dtype, softcap=softcap, size=2.0, sinks=True)
    check_here(make(case, cuda))
    check_here(make(replace(case, causal=True, window=(90, -1), scale=-0.3), cuda))


@pytest.mark.parametrize("align", ["upper-left", "lower-right"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_alibi(cuda, align, dtype, dim):
    """Keys from the diagonal outwards, in both directions."""
    case = replace(PLAIN, lq=300, lk=600, dim=dim, dtype=dtype, alibi="bh", align=align)
    for change in ({}, {"causal": True}, {"window": (200, 150)}, {"lq": 600, "lk": 300}):
        check_here(make(replace(case, **change), cuda))
    check_here(make(replace(case, alibi="h", softcap=5.0, sinks=True, scale=0.0), cuda))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_slopes(cuda, dtype, dim, causal):
    """None, small ones, and such that scores rise beyond what a reference bears."""
    case = replace(PLAIN, lq=300, lk=900, heads=4, kv_heads=2, dim=dim, dtype=dtype, alibi="h")
    inputs = make(replace(case, causal=causal, align="lower-right"), cuda)
    with torch.no_grad():
        inputs.leaves["alibi_slopes"].copy_(torch.tensor([0.0, 0.03, -0.25, 2.0]))
    check_here(inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(cuda, layout):
    """What the copies do not take goes to sm80, and is right too."""
    inputs = make(replace(PLAIN, dim=64, causal=True), cuda)
    for name in ("query", "key", "value"):
        inputs.leaves[name] = LAYOUTS[layout](inputs.leaves[name])
    check(inputs)


def test_heads_first_and_rows_first_are_both_served(cuda):
    shape = 2, 300, 6, 128
    rows_first = [draw(shape, torch.bfloat16, cuda).transpose(1, 2) for _ in range(3)]
    fused = draw((2, 300, 6, 3, 128), torch.bfloat16, cuda).unbind(3)
    for q, k, v in (rows_first, [x.transpose(1, 2) for x in fused]):
        assert flashbpt.which_kernel(q, k, v).kernel == "sm90"
        out = flashbpt.attention(q, k, v)
        assert out.stride() == torch.empty(shape).transpose(1, 2).stride()
        with flashbpt.use_backend("sm80"):
            wanted = flashbpt.attention(q, k, v)
        assert_close("out", out, wanted, ulps=2, terms=300)


def test_broadcast_heads_and_batches(cuda):
    inputs = make(replace(PLAIN, dim=64, kv_heads=4, causal=True), cuda, grads=False)
    for name, index in (("query", 0), ("key", slice(0, 1)), ("value", (slice(None), slice(0, 1)))):
        x = inputs.leaves[name]
        inputs.leaves[name] = x[index].expand(x.shape)
    check_here(inputs)


def test_more_tiles_than_the_gpu_has_multiprocessors(cuda):
    """Blocks that take several tiles each, the last of them of different lengths."""
    for causal in (False, True):
        case = Case(lq=700, batch=3, heads=48, kv_heads=16, dim=64, dtype="bf16", causal=causal)
        check_here(make(case, cuda))


# ---- the softmax without a maximum
def rising(heads, rows, keys, dim, block, step, dtype, device):
    """q and k whose scores rise by `step` from a block of keys to the next one."""
    q, k = (draw((1, heads, n, dim), dtype, device) for n in (rows, keys))
    q[..., 0] = 8
    k[..., 0] = (torch.arange(keys, device=device) // block * step / 8).to(dtype)
    return q, k


# block of keys, step, factor of the last third of V. A lane sums up to 32 columns of a row: 2^30 is
# exp(17.3) of each, 2^15 exp(6.9).
EXTREMES = {
    "rise of 50 a block": (128, 50.0, 1),
    "rise of 25 a block": (64, 25.0, 1),
    "fall of 50 a block": (64, -50.0, 1),
    "jump of 38 and then V of 1e22": (300, 38.0, 1e22),
    "jump under 2^30 and V of 1e22": (600, 16.0, 1e22),
    "jump over 2^30": (600, 19.0, 1),
    "jump under 2^15": (600, 6.0, 1),
    "jump over 2^15": (600, 8.0, 1),
}


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("what", EXTREMES)
def test_scores_that_leave_the_range_of_the_reference(cuda, what, dtype, dim, causal):
    block, step, factor = EXTREMES[what]
    low = DTYPES[dtype]
    for keys in (900, MANY_KEYS) if dim == 64 else (900,):
        inputs = make(replace(PLAIN, lq=150, lk=keys, dim=dim, dtype=dtype, causal=causal), cuda)
        heads = MANY_HEADS if keys > 1024 else 2
        q, k = rising(heads, 150, keys, dim, block, step, low, cuda)
        inputs.leaves |= {"query": q, "key": k, "value": draw((1, heads, keys, dim), low, cuda)}
        inputs.options |= {"scale": 1.0, "causal_align": "lower-right", "enable_gqa": False}
        if dtype == "bf16":
            inputs.leaves["value"][:, :, 600:] *= factor
        q[..., 1:] *= dim**-0.5
        check_here(inputs)


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("key", [0, 70, 332, -1])
@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
def test_a_key_of_nan_or_infinity(cuda, value, key, dtype, dim):
    """In the tile that is walked first, or later; key -1: in all of them."""
    for lk in (PLAIN.lk, MANY_KEYS) if dim == 64 else (PLAIN.lk,):
        more = {"heads": MANY_HEADS, "kv_heads": 2} if lk > 1024 else {}
        x = make(replace(PLAIN, lk=lk, dim=dim, dtype=dtype, **more), cuda, grads=False)
        q, k, v = (x.leaves[n] for n in ("query", "key", "value"))
        q[0, 0, 5] = q[0, 0, 5].abs()
        k[0, 0, slice(None) if key < 0 else key] = value
        for name, got, wanted in zip(("out", "lse"), *on_both(q, k, v), strict=True):
            assert torch.equal(got.isnan(), wanted.isnan()), name
            assert torch.equal(got.isinf(), wanted.isinf()), name
            finite = wanted.isfinite()
            assert_close(name, got[finite], wanted[finite], ulps=2, terms=300)


def on_both(q, k, v, **options):
    """(out, lse) of sm90, and of the CPU in fp64."""
    assert flashbpt.which_kernel(q, k, v, enable_gqa=True, **options).kernel == "sm90"
    options |= {"enable_gqa": True, "return_lse": True}
    right = flashbpt.attention(q.double().cpu(), k.double().cpu(), v.double().cpu(), **options)
    return flashbpt.attention(q, k, v, **options), [x.to(q.device) for x in right]


@pytest.mark.parametrize("sink", [1e4, -1e4, 0.0])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_sinks_far_from_the_scores(cuda, forced, sink, dtype, dim):
    """With keys, and in rows that have none."""
    q, k, v = (draw((1, 2, n, dim), DTYPES[dtype], cuda) for n in (400, 200, 200))
    sinks = torch.full((2,), sink, device=cuda)
    for align in ("upper-left", "lower-right"):
        options = {"is_causal": True, "causal_align": align, "sinks": sinks}
        out, lse = flashbpt.attention(q, k, v, **options, return_lse=True)
        options["sinks"] = sinks.double().cpu()
        x = (t.double().cpu() for t in (q, k, v))
        with flashbpt.use_backend("auto"):
            right, right_lse = flashbpt.attention(*x, **options, return_lse=True)
        assert_close("out", out, right.to(cuda), ulps=2, terms=300)
        assert_close("lse", lse, right_lse.to(cuda), ulps=4, terms=300)
        if align == "lower-right":
            assert (out[:, :, :199] == 0).all() and (lse[:, :, :199] == sink).all()


def test_rows_without_keys(cuda, forced):
    q, k, v = (draw((1, 2, n, 64), torch.bfloat16, cuda) for n in (400, 90, 90))
    v[:] = NAN  # reaches no row that does not see it
    options = {"is_causal": True, "causal_align": "lower-right", "return_lse": True}
    out, lse = flashbpt.attention(q, k, v, **options)
    assert (out[:, :, :310] == 0).all() and (lse[:, :, :310] == -INF).all()
    assert out[:, :, 310:].isnan().all()


# ---- the same bits every time
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_repeats(cuda, forced, dtype, dim, causal):
    q, k, v = (draw((2, 40, 700, dim), DTYPES[dtype], cuda, size=2.0) for _ in range(3))
    first = flashbpt.attention(q, k, v, is_causal=causal, return_lse=True)
    for _ in range(10):
        again = flashbpt.attention(q, k, v, is_causal=causal, return_lse=True)
        for name, a, b in zip(("out", "lse"), first, again, strict=True):
            assert_bitwise(name, a, b)


def test_streams_and_graphs(cuda, forced):
    """Blocks take tiles from counters of their stream, or of their graph."""
    q, k, v = (draw((2, 40, 500, 128), torch.bfloat16, cuda) for _ in range(3))
    wanted = flashbpt.attention(q, k, v, is_causal=True)
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in range(3)], []
    for _ in range(5):
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(flashbpt.attention(q, k, v, is_causal=True))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got += [flashbpt.attention(q, k, v, is_causal=True) for _ in range(3)]
    for x in got[-3:]:
        x.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for x in got:
        assert_bitwise("out", x, wanted)


def test_beside_paged_attention(cuda):
    """Its kernel has words of the stream too, and leaves other numbers in them."""
    q, k, v = (draw((2, 40, 500, 128), torch.bfloat16, cuda) for _ in range(3))
    assert flashbpt.which_kernel(q, k, v).kernel == "sm90"
    wanted = flashbpt.attention(q, k, v)
    row, cache = q[:, :, 0], draw((64, 64, 8, 128), torch.bfloat16, cuda)
    table = torch.arange(64, device=cuda).int().view(2, 32)
    lens = torch.tensor([2048, 1500], device=cuda).int()
    first = flashbpt.paged_attention(row, cache, cache, table, lens)
    for _ in range(3):
        assert_bitwise("out", flashbpt.attention(q, k, v), wanted)
        again = flashbpt.paged_attention(row, cache, cache, table, lens)
        assert_bitwise("paged", again, first)


def test_dropping_everything(cuda, forced):
    q, k, v = (draw((1, 2, 200, 64), torch.bfloat16, cuda) for _ in range(3))
    out, lse = flashbpt.attention(q, k, v, dropout_p=1.0, return_lse=True)
    assert (out == 0).all()
    assert_bitwise("lse", lse, flashbpt.attention(q, k, v, return_lse=True)[1])


def test_backward_of_what_was_forced(cuda, forced):
    """sm90 has none, and leaves it to sm80."""
    check(make(replace(PLAIN, dim=64), cuda))


# ---- blocks of queries and keys
@pytest.mark.parametrize(
    "limits",
    [
        {"causal": True},
        {"window_left": 70, "window_right": 40},
        {"window_left": 90, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("slopes", [False, True], ids=["", "alibi"])
def test_offsets(cuda, limits, slopes):
    """Rows of a block as in the whole; a block of keys as the whole with the others far away."""
    q, k, v = (draw((2, 4, n, 128), torch.bfloat16, cuda) for n in (700, 800, 800))
    more = {"backend": SM90, "diagonal": 100, **limits}
    if slopes:
        more["alibi_slopes"] = torch.tensor([0.5, 0.1, 0.01, 0.002], device=cuda)
    out, lse, *_ = forward(q=q, k=k, v=v, **more)
    for first, last in ((0, 130), (130, 500), (500, 700)):
        block = forward(q=q[:, :, first:last], k=k, v=v, q_offset=first, **more)
        assert_close("out", block[0], out[:, :, first:last], ulps=2, terms=300)
        assert_close("lse", block[1], lse[:, :, first:last], ulps=4, terms=300)
    parts = [
        forward(q=q, k=k[:, :, a:b], v=v[:, :, a:b], k_offset=a, **more)
        for a, b in ((0, 300), (300, 640), (640, 800))
    ]
    merged = flashbpt.merge_attention_states([x[0] for x in parts], [x[1] for x in parts])
    assert_close("out", merged[0], out, ulps=4, terms=300)
    assert_close("lse", merged[1], lse, ulps=4, terms=300)


def test_far_offsets(cuda):
    q, k, v = (draw((1, 2, 300, 64), torch.bfloat16, cuda) for _ in range(3))
    call = {"q": q, "k": k, "v": v, "backend": SM90}
    usual = forward(**call)
    for far in ({"diagonal": 2**40}, {"q_offset": 2**40}, {"q_offset": 2**30}):
        for name, a, b in zip(("out", "lse"), forward(causal=True, **far, **call), usual):
            assert_bitwise(name, a, b)
    for far in ({"diagonal": -(2**40)}, {"k_offset": 2**40}, {"k_offset": 2**30}):
        out, lse, *_ = forward(causal=True, **far, **call)
        assert (out == 0).all() and (lse == -INF).all()
    near = {"window_left": 5, "window_right": 9}
    wanted = forward(**near, **call)
    moved = forward(q_offset=2**40, k_offset=2**40, **near, **call)
    for name, a, b in zip(("out", "lse"), moved, wanted):
        assert_bitwise(name, a, b)
