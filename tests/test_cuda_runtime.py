"""What the CUDA kernels promise beside their values: order of sums, streams, graphs, no waiting for
the GPU, memory that nobody has written, who serves a call and what is refused.
"""

from dataclasses import replace

import pytest
import torch
from cases import Case, VarlenCase, cumulative, draw, ids, make, make_varlen
from compare import assert_bitwise, assert_close, evaluate
from op_calls import backward, forward
from test_attention import FEATURES

import flashbpt

pytestmark = pytest.mark.gpu


def results(fn, inputs, **options):
    """{name: tensor} of one call; grad_out is drawn once."""
    if inputs.grad_out is None:
        shape = (*inputs.leaves["query"].shape[:-1], inputs.leaves["value"].size(-1))
        inputs.grad_out = draw(shape, inputs.dtype, "cpu").to(inputs.leaves["query"].device)
        inputs.grad_lse = torch.randn(shape[:-1], device=inputs.grad_out.device)
    got = evaluate(fn, replace(inputs, options={**inputs.options, **options}))
    got.pop("graph")
    return got


# --- the order of sums
LARGE = Case(lq=1000, lk=1100, batch=1, heads=2, dim=64, dtype="bf16")
ORDERED = [
    LARGE,
    replace(LARGE, causal=True, dtype="fp16", dim=128),
    replace(LARGE, heads=8, kv_heads=1, causal=True, align="lower-right", dim=128),
    replace(LARGE, mask="own:11qk", dim=256),
    replace(LARGE, batch=2, mask="fp32:b11k", alibi="bh", sinks=True),
    replace(LARGE, mask="bool:11qk", window=(700, 300), softcap=5.0),
    replace(LARGE, dtype="fp32"),
    replace(LARGE, lq=6000, lk=70, heads=1),
    replace(LARGE, dim=320),
    replace(LARGE, dim=256),
    replace(LARGE, dim=256, causal=True),
    replace(LARGE, mask="own:11qk", dim=128),
]
ORDERED_PACKED = [
    VarlenCase((700, 33, 0, 512, 1), heads=4, kv_heads=2, dim=64, dtype="bf16", causal=True),
    VarlenCase((900, 100), (50, 1000), dim=128, dtype="fp16", sinks=True, alibi="bh"),
]


@pytest.mark.parametrize("case", ORDERED + ORDERED_PACKED, ids=ids(ORDERED + ORDERED_PACKED))
def test_deterministic_gradients_are_bitwise_equal(cuda, case):
    """Over five runs; the faster default differs from them by rounding alone."""
    packed = isinstance(case, VarlenCase)
    fn = flashbpt.varlen_attention if packed else flashbpt.attention
    inputs = (make_varlen if packed else make)(case, cuda)
    first = results(fn, inputs, deterministic=True)
    for _ in range(4):
        again = results(fn, inputs, deterministic=True)
        for name in first:
            assert_bitwise(name, again[name], first[name])
    faster = results(fn, inputs, deterministic=False)
    for name in first:
        assert_close(name, faster[name], first[name], ulps=4, terms=1000)


# --- memory that nobody has written
@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize("number", range(len(FEATURES)), ids=ids(FEATURES))
def test_unwritten_memory_is_never_read(cuda, number, deterministic):
    """torch fills what `empty` gives with NaN where deterministic algorithms are asked for."""
    inputs = make(replace(FEATURES[number], dim=64, dim_v=None, dtype="bf16"), cuda)
    few = make(Case(lq=3, lk=5000, batch=1, heads=2, dim=64, sinks=True, dtype="bf16"), cuda)
    packed = VarlenCase((40, 0, 70), (90, 4, 300), extra=9, dtype="bf16", lse=True)
    inputs.options["deterministic"] = few.options["deterministic"] = deterministic
    torch.use_deterministic_algorithms(True)
    try:
        for fn, given in (
            (flashbpt.attention, inputs),
            (flashbpt.attention, few),
            (flashbpt.varlen_attention, make_varlen(packed, cuda)),
        ):
            got = results(fn, given)
            lse = got.pop("lse")
            assert not torch.isnan(lse).any()
            for name, x in got.items():
                assert torch.isfinite(x).all(), f"{name} is not finite"
    finally:
        torch.use_deterministic_algorithms(False)


# --- streams and waiting
def test_calls_run_on_the_current_stream(cuda):
    """Behind a slow producer on a stream of its own; the default stream has nothing to wait for."""
    shape = (2, 4, 300, 64)
    right = [draw(shape, torch.bfloat16, cuda) for _ in range(4)]
    leaves = [x.clone().requires_grad_() for x in right[:3]]
    out = flashbpt.attention(*leaves, is_causal=True)
    wanted = [out.detach(), *torch.autograd.grad(out, leaves, right[3])]
    late = [torch.full_like(x, float("nan")) for x in right]
    for x in late[:3]:
        x.requires_grad_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for x, y in zip(late, right, strict=True):
                x.copy_(y)
        out = flashbpt.attention(*late[:3], is_causal=True)
        got = [out.detach(), *torch.autograd.grad(out, late[:3], late[3])]
    stream.synchronize()
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, wanted, strict=True):
        assert_close(name, a, b, ulps=2)


@pytest.fixture
def no_waiting():
    """An error wherever torch waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else before)
    torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_waits_for_the_gpu(cuda, no_waiting, deterministic):
    dense = [make(replace(FEATURES[i], dim=64, dim_v=None, dtype="bf16"), cuda) for i in (3, 9, 10)]
    dense += [make(Case(lq=2, lk=4000, batch=1, dim=64, mask="bool:11qk", dtype="fp16"), cuda)]
    dense[0].options["dropout_p"] = 0.5
    packed = [
        make_varlen(replace(case, max_seqlens=False), cuda)
        for case in (*ORDERED_PACKED, VarlenCase((3, 70), index="int64", sinks=True))
    ]
    packed[0].options["dropout_p"] = 0.5
    calls = [(flashbpt.attention, x) for x in dense]
    calls += [(flashbpt.varlen_attention, x) for x in packed]
    for fn, inputs in calls:
        results(fn, inputs)  # draws what the call is given
    no_waiting(True)
    for fn, inputs in calls:
        results(fn, inputs, deterministic=deterministic)


# --- graphs
def captured(step):
    """(graph, results) of step, captured after a warm-up on a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    # The capture sets its generator's seed on its own stream, a replay on the current one.
    torch.cuda.synchronize()
    return graph, outputs


def test_replays_draw_the_states_of_eager_calls(cuda):
    """Two draws a replay, four numbers a thread each."""
    like = torch.zeros(1, device=cuda)
    graph, states = captured(lambda: [torch.ops.flashbpt.draw_rng_state(like, 4) for _ in "ab"])
    torch.manual_seed(2**33 + 1)
    for replay in range(3):
        graph.replay()
        wanted = [[2**33 + 1, 8 * replay], [2**33 + 1, 8 * replay + 4]]
        assert [state.tolist() for state in states] == wanted


@pytest.mark.parametrize("lq, lk", [(200, 128), (4, 6000)], ids=["", "split keys"])
def test_replays_draw_new_dropout_masks(cuda, lq, lk):
    """Each has the mask of an eager call at the same state, in forward and backward alike."""
    q = torch.zeros(1, 2, lq, 64, dtype=torch.bfloat16, device=cuda)
    k = torch.zeros(1, 2, lk, 64, dtype=torch.bfloat16, device=cuda)
    v, grad = draw(k.shape, k.dtype, cuda).requires_grad_(), draw(q.shape, q.dtype, cuda)

    def step():
        out = flashbpt.attention(q, k, v, dropout_p=0.5)
        return out, torch.autograd.grad(out, v, grad)[0]

    graph, (out, dv) = captured(step)
    torch.manual_seed(31)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append((out.clone(), dv.clone()))
    torch.manual_seed(31)
    for i, replay in enumerate(replays):
        for name, a, b in zip(("out", "dv"), replay, step(), strict=True):
            assert_close(f"{name} of replay {i}", a, b, ulps=2)
    assert not torch.equal(replays[0][0], replays[1][0])
    assert not torch.equal(replays[1][0], replays[2][0])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("max_seqlen", [None, 200])
def test_replays_follow_new_sequences(cuda, deterministic, max_seqlen):
    """The offsets change in place between replays; rows past the last sequence stay 0."""
    q, k, v = (draw((200, h, 64), torch.bfloat16, cuda).requires_grad_() for h in (4, 2, 2))
    grad = draw((200, 4, 64), torch.bfloat16, cuda)
    cu_q, cu_k = cumulative((40, 100), device=cuda), cumulative((90, 30), device=cuda)

    def step():
        out, lse = flashbpt.varlen_attention(
            q, k, v, cu_q, cu_k, max_seqlen, max_seqlen, causal=True, return_lse=True,
            deterministic=deterministic)  # fmt: skip
        return out, lse, *torch.autograd.grad((out, lse.nan_to_num(0, 0, 0)), (q, k, v),
                                              (grad, torch.ones_like(lse)))  # fmt: skip

    graph, outputs = captured(step)
    for lens_q, lens_k in (((40, 100), (90, 30)), ((0, 200), (1, 199)), ((150, 7), (0, 70))):
        cu_q.copy_(cumulative(lens_q))
        cu_k.copy_(cumulative(lens_k))
        graph.replay()
        for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), outputs, step(), strict=True):
            assert_close(name, a, b, ulps=2)
        assert (outputs[0][sum(lens_q) :] == 0).all()


def test_a_training_step_in_a_graph(cuda):
    """Every feature in one captured forward and backward, replayed on new inputs."""
    case = replace(FEATURES[10], dim=64, dtype="fp16", mask="bool:b1qk")
    inputs, other = make(case, cuda), make(case, cuda)
    results(flashbpt.attention, inputs)
    graph, got = captured(lambda: results(flashbpt.attention, inputs))
    for name, x in inputs.leaves.items():
        x.copy_(other.leaves[name])
    graph.replay()
    wanted = results(flashbpt.attention, inputs)
    for name in wanted:
        assert_close(name, got[name], wanted[name], ulps=2, terms=300)


# --- who serves a call
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_which_kernel_names_a_row_of_the_kernel_list(cuda, dtype, backward):
    listed = {kernel["name"] for kernel in flashbpt._C.kernels()}
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    with flashbpt.use_backend("sm80"):
        for dim in (8, 64, 100, 128, 256, 512):
            x = torch.zeros(1, 2, 300, dim, dtype=dtype, device=cuda)
            for options in ({}, {"softcap": 3.0}, {"attn_mask": torch.zeros(1, device=cuda)}):
                choice = flashbpt.which_kernel(x, x, x, backward=backward, **options)
                assert choice.kernel == "sm80" and choice.config in listed
                assert choice.config.startswith(f"attn_{'bwd' if backward else 'fwd'}_{short}_d")


def test_double_goes_to_aten(cuda):
    x = torch.zeros(1, 2, 30, 8, dtype=torch.float64, device=cuda)
    choice = flashbpt.which_kernel(x, x, x)
    assert choice.kernel == "aten" and "float32" in choice.refused["sm80"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_heads_that_are_too_wide_are_refused(cuda, dtype):
    q, k = torch.randn(2, 1, 2, 20, 513, device=cuda).to(dtype)
    assert flashbpt.which_kernel(q[..., :512], k[..., :512], k[..., :512])
    for key, value in ((k, k[..., :8]), (k[..., :8], k)):
        query = q[..., : key.size(-1)]
        assert not flashbpt.which_kernel(query, key, value)
        with pytest.raises(RuntimeError, match="(?s)no kernel.*512"):
            flashbpt.attention(query, key, value)
        with flashbpt.use_backend("aten"):
            assert flashbpt.attention(query, key, value).shape == value.shape


def test_the_cpu_does_not_serve_the_gpu(cuda):
    x = torch.randn(1, 2, 20, 8, device=cuda)
    with flashbpt.use_backend("cpu"):
        with pytest.raises(
            RuntimeError, match="(?s)no kernel.*cpu: the tensors are not on the CPU"
        ):
            flashbpt.attention(x, x, x)
        flashbpt.attention(x.cpu(), x.cpu(), x.cpu())
    with flashbpt.use_backend("sm80"), pytest.raises(RuntimeError, match="no kernel"):
        flashbpt.attention(x.cpu(), x.cpu(), x.cpu())


@pytest.mark.parametrize("number", range(len(FEATURES)), ids=ids(FEATURES))
def test_what_the_forward_saves_means_the_same_on_the_cpu(cuda, number):
    """Out, LSE and its low part of the CPU go into the backward of the GPU, and the other way."""
    case = FEATURES[number]
    inputs = make(case, "cpu", grads=False)
    x, (left, right) = inputs.leaves, case.window or (-1, -1)
    mask = x.get("attn_mask")
    call = {
        "q": x["query"], "k": x["key"], "v": x["value"], "sinks": x.get("sinks"),
        "mask": mask if mask is None else mask[(None,) * (4 - mask.dim())],
        "alibi_slopes": x.get("alibi_slopes"), "scale": case.scale, "causal": case.causal,
        "window_left": left, "window_right": right, "softcap": case.softcap,
        "diagonal": case.full_lk - case.lq if case.align == "lower-right" else 0,
    }  # fmt: skip
    there = {n: t.to(cuda) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    saved, saved_there = forward(**call), forward(**there)
    grad, grad_lse = torch.randn(saved[0].shape), torch.randn(saved[1].shape)
    wanted = backward(grad, grad_lse, *saved, **call)
    grads_there = grad.to(cuda), grad_lse.to(cuda)
    for got in (
        backward(*grads_there, *(t.to(cuda) for t in saved), **there),
        backward(grad, grad_lse, *(t.cpu() for t in saved_there), **call),
    ):
        for name, a, b in zip(("dq", "dk", "dv", "dmask", "dsinks", "dalibi"), got, wanted):
            if b is not None:
                assert_close(name, a, b, ulps=400, terms=5000)


def test_patch_sdpa(cuda):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (draw((2, 4, 100, 64), torch.float16, cuda) for _ in range(3))
    mask = torch.rand(100, 100, device=cuda) < 0.5
    plain = [sdpa(q, k, v, is_causal=True), sdpa(q, k, v, attn_mask=mask)]
    with flashbpt.patch_sdpa() as handle:
        patched = torch.nn.functional.scaled_dot_product_attention
        got = [patched(q, k, v, is_causal=True), patched(q, k, v, attn_mask=mask)]
        with pytest.warns(UserWarning, match="512"):
            wide = patched(*(x.repeat(1, 1, 1, 9) for x in (q, k, v)))
    assert sum(handle.fallbacks.values()) == 1 and wide.size(-1) == 576
    for a, b in zip(got, plain, strict=True):
        assert_close("out", a, b, ulps=2)
