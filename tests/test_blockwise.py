"""transformer_block against the same block in plain torch: in fp64 to rounding, in shorter types
with no more error than plain torch's own.
"""

from dataclasses import replace

import pytest
import torch
from block_cases import (
    FFN,
    HIDDEN,
    RMS,
    assert_same,
    inputs,
    leaves,
    make_weights,
    plain_block,
    run,
    to_dtype,
)

import flashbpt
from flashbpt import BlockConfig

CASES = {
    "llama": (RMS, {}),
    "mha_bias_layer_gelu": (
        BlockConfig(heads=4, norm="layer", activation="gelu", rope=None, rows=16),
        {"gated": False, "bias": True},
    ),
    "qk_norm_interleaved": (replace(RMS, qk_norm=True, rope="interleaved"), {"head_dim": 8}),
    "window_softcap_sinks": (
        replace(RMS, window=11, softcap=3.0, kv_heads=1, activation="gelu_tanh"),
        {"sinks": True},
    ),
    "geglu_bias": (replace(RMS, activation="gelu", scale=0.3), {"bias": True}),
    "relu": (replace(RMS, activation="relu"), {"gated": False}),
}


@pytest.mark.parametrize("save", ["x+o", "x", "all"])
@pytest.mark.parametrize("shape", [(1, 50), (3, 7), (2, 33)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fp64_equals_plain_torch(device, name, shape, save):
    config, options = CASES[name]
    config = replace(config, save=save)
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device, **options)
    x, grad = inputs(shape, device)
    assert_same(
        run(flashbpt.transformer_block, x, weights, config, grad),
        run(plain_block, x, weights, config, grad),
    )


@pytest.mark.parametrize("save", ["x+o", "all"])
@pytest.mark.parametrize("lens", [[50], [0, 17, 0, 1, 32, 0], [3, 20]], ids=str)
@pytest.mark.parametrize("name", ["llama", "qk_norm_interleaved", "window_softcap_sinks"])
def test_packed_sequences(device, name, lens, save):
    config, options = CASES[name]
    config = replace(config, save=save)
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device, **options)
    cu = torch.tensor([0, *torch.tensor(lens).cumsum(0)], dtype=torch.int32, device=device)
    x, grad = inputs((sum(lens),), device)
    assert_same(
        run(flashbpt.transformer_block, x, weights, config, grad, cu_seqlens=cu),
        run(plain_block, x, weights, config, grad, cu_seqlens=cu),
    )


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("attention, residual", [(0.3, 0.0), (0.0, 0.4), (0.2, 0.5), (0.0, 1.0)])
def test_dropout(device, attention, residual, packed):
    """The words of three sites; the backward draws the same ones."""
    config = replace(RMS, attention_dropout=attention, residual_dropout=residual)
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device, bias=True)
    x, grad = inputs((50,) if packed else (2, 37), device)
    cu = torch.tensor([0, 13, 13, 50], device=device) if packed else None
    torch.manual_seed(5)
    state = torch.ops.flashbpt.draw_rng_state(x, 12).tolist()
    torch.manual_seed(5)
    got = run(flashbpt.transformer_block, x, weights, config, grad, cu_seqlens=cu)
    assert_same(got, run(plain_block, x, weights, config, grad, cu_seqlens=cu, state=state))


@pytest.mark.parametrize("interleaved", [False, True])
def test_given_tables(device, interleaved):
    """Fewer pairs than columns: the others do not turn; more positions than rows."""
    config = replace(RMS, rope="interleaved" if interleaved else "half")
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device)
    x, grad = inputs((2, 37), device)
    angle = torch.randn(60, 3, dtype=torch.float64, device=device)
    options = {"cos": angle.cos(), "sin": angle.sin()}
    assert_same(
        run(flashbpt.transformer_block, x, weights, config, grad, **options),
        run(plain_block, x, weights, config, grad, **options),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", [name for name in CASES if name != "relu"])  # it has a kink
def test_no_more_error_than_plain_torch(device, name, dtype):
    config, options = CASES[name]
    config = replace(config, rows=64)
    weights = make_weights(config, HIDDEN, FFN, dtype, device, **options)
    x, grad = inputs((2, 150), device, dtype)
    exact = run(plain_block, x.double(), to_dtype(weights, torch.float64), config, grad.double())
    plain = run(plain_block, x, weights, config, grad)
    got = run(flashbpt.transformer_block, x, weights, config, grad)
    eps = torch.finfo(dtype).eps
    results = [{"y": y, **grads} for y, grads in (exact, plain, got)]
    # Some gradients are sums that cancel (of bk without rope exactly): their terms' size counts.
    size = max((float(t.norm()) for n, t in results[0].items() if n in ("bk", "bv")), default=0.0)
    for name, right in results[0].items():
        error_plain, error = (float((r[name].double() - right).norm()) for r in results[1:])
        # The errors of few elements are as random as the elements; fp32 sums in other orders.
        factor = 1.4 if right.numel() > 1000 and dtype != torch.float32 else 3.0
        assert error <= factor * error_plain + eps * max(float(right.norm()), size), name


def test_blocks_agree(device):
    """1, 4 and 16 blocks of rows give what one gives, to the rounding of fp32 sums."""
    config = replace(RMS, rows=256)
    weights = make_weights(config, HIDDEN, FFN, torch.float32, device)
    x, grad = inputs((1, 256), device, torch.float32)
    whole = run(flashbpt.transformer_block, x, weights, config, grad)
    for rows in (64, 16):
        blocks = run(flashbpt.transformer_block, x, weights, replace(config, rows=rows), grad)
        assert_same(blocks, whole, factor=2e-5)


def test_deterministic_runs_are_bitwise_equal(device):
    config = replace(RMS, deterministic=True)
    weights = make_weights(config, HIDDEN, FFN, torch.bfloat16, device)
    x, grad = inputs((2, 100), device, torch.bfloat16)
    y, grads = run(flashbpt.transformer_block, x, weights, config, grad)
    again, grads_again = run(flashbpt.transformer_block, x, weights, config, grad)
    assert torch.equal(y, again)
    assert all(torch.equal(grads[n], grads_again[n]) for n in grads)


@pytest.mark.parametrize("only", [["x"], ["wq"], ["wo"], ["w_down"], ["norm2", "bk"], ["sinks"]])
@pytest.mark.parametrize("save", ["x", "x+o", "all"])
def test_only_some_want_gradients(device, only, save):
    config = replace(RMS, save=save)
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device, bias=True, sinks=True)
    x, grad = inputs((2, 20), device)
    right = run(plain_block, x, weights, config, grad)[1]
    for name, t in leaves(weights).items():
        t.requires_grad_(name in only)
    x.requires_grad_("x" in only)
    y = flashbpt.transformer_block(x, weights, config)
    y.backward(grad)
    for name, t in {"x": x, **leaves(weights)}.items():
        assert (t.grad is not None) == (name in only), name
        if name in only:
            torch.testing.assert_close(t.grad, right[name], msg=name)


def test_nothing_given_is_written(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    x, grad = inputs((1, 40), device, torch.float32)
    tensors = [x.requires_grad_(), *leaves(weights).values()]
    before = [t.detach().clone() for t in (*tensors, grad)]
    y = flashbpt.transformer_block(x, weights, RMS)
    one = torch.autograd.grad(y, tensors, grad, retain_graph=True)
    two = torch.autograd.grad(y, tensors, grad)
    assert all(torch.equal(a, b) for a, b in zip(before, (*tensors, grad), strict=True))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_main_grad(device):
    """Gradients are added into given fp32 tensors; those weights get none of their own."""
    weights = make_weights(RMS, HIDDEN, FFN, torch.bfloat16, device)
    x, grad = inputs((1, 40), device, torch.bfloat16)
    right = run(flashbpt.transformer_block, x, weights, RMS, grad)[1]
    start = {n: torch.randn(getattr(weights, n).shape, device=device) for n in ("w_up", "norm1")}
    main = {n: t.clone() for n, t in start.items()}
    y = flashbpt.transformer_block(x.requires_grad_(), replace(weights, main_grad=main), RMS)
    y.backward(grad)
    assert x.grad is not None and weights.w_up.grad is None and weights.norm1.grad is None
    for n in main:
        torch.testing.assert_close(main[n] - start[n], right[n].float(), rtol=0.02, atol=0.02)
        assert main[n]._version > 0
    torch.testing.assert_close(weights.wq.grad, right["wq"])


def test_hooks_run_once(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    calls = dict.fromkeys(leaves(weights), 0)
    for name, t in leaves(weights).items():
        t.register_hook(lambda g, n=name: calls.update({n: calls[n] + 1}))
    flashbpt.transformer_block(
        inputs((2, 70), device, torch.float32)[0], weights, RMS
    ).sum().backward()
    assert set(calls.values()) == {1}


def test_no_grad_keeps_nothing_and_checkpoint_agrees(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    x, grad = inputs((2, 37), device)
    right = run(flashbpt.transformer_block, x, weights, RMS, grad)
    with torch.no_grad():
        assert torch.equal(flashbpt.transformer_block(x, weights, RMS), right[0])

    def checkpointed(x, weights, config):
        return torch.utils.checkpoint.checkpoint(
            flashbpt.transformer_block, x, weights, config, use_reentrant=False
        )

    assert_same(run(checkpointed, x, weights, RMS, grad), right)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_return_kv(device, packed):
    """Keys as attention sees them: those of a longer sequence begin with those of a shorter one."""
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    x, _ = inputs((40,) if packed else (1, 40), device)
    cu = torch.tensor([0, 40], device=device) if packed else None
    y, (keys, values) = flashbpt.transformer_block(x, weights, RMS, cu_seqlens=cu, return_kv=True)
    assert keys.shape == values.shape == (*x.shape[:-1], 2, 8)
    assert not keys.requires_grad and y.requires_grad
    shorter = x[..., :23, :]
    cu_shorter = torch.tensor([0, 23], device=device) if packed else None
    _, parts = flashbpt.transformer_block(
        shorter, weights, RMS, cu_seqlens=cu_shorter, return_kv=True
    )
    for part, t in zip(parts, (keys, values), strict=True):
        torch.testing.assert_close(part, t[..., :23, :, :])
    torch.testing.assert_close(y, flashbpt.transformer_block(x, weights, RMS, cu_seqlens=cu))


@pytest.mark.parametrize("save", ["x+o", "x", "all"])
@pytest.mark.parametrize("residual", [0.0, 0.3])
def test_residual_stream_in_fp32(device, residual, save):
    """x in fp32 over weights of 16 bits: errors of plain torch's own, in fp32 what is added up."""
    config = replace(RMS, qk_norm=True, residual_dropout=residual, save=save, rows=64)
    weights = make_weights(config, HIDDEN, FFN, torch.bfloat16, device, bias=True)
    norms = {
        n: t.detach().float().requires_grad_() for n, t in leaves(weights).items() if "norm" in n
    }
    weights = replace(weights, **norms)
    x, grad = inputs((2, 150), device, torch.float32)
    torch.manual_seed(3)
    state = torch.ops.flashbpt.draw_rng_state(x, 12).tolist()
    torch.manual_seed(3)
    y, grads = run(flashbpt.transformer_block, x, weights, config, grad)
    assert y.dtype == grads["x"].dtype == grads["norm1"].dtype == torch.float32
    assert grads["wq"].dtype == torch.bfloat16
    wide = to_dtype(weights, torch.float64)
    options = {"state": state if residual else None}
    exact = run(plain_block, x.double(), wide, config, grad.double(), **options)
    plain = run(plain_block, x, weights, config, grad, **options)
    results = [{"y": y, **grads} for y, grads in (exact, plain, (y, grads))]
    for name, right in results[0].items():
        error_plain, error = (float((r[name].double() - right).norm()) for r in results[1:])
        factor = 1.4 if right.numel() > 1000 else 3.0
        assert error <= factor * error_plain + 0.008 * float(right.norm()), name


def test_autocast(device):
    """Matrices are cast, the residual stream stays in fp32: the numbers of a plain layer."""
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    x, grad = inputs((1, 40), device, torch.float32)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        y = flashbpt.transformer_block(x, weights, RMS)
    y.backward(grad)
    assert y.dtype == weights.wq.grad.dtype == torch.float32
    half = {n: t.detach().bfloat16() for n, t in leaves(weights).items() if "norm" not in n}
    cast = replace(weights, **half)
    torch.testing.assert_close(y, flashbpt.transformer_block(x, cast, RMS), rtol=0, atol=0)


def test_compile(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    x, grad = inputs((2, 37), device)

    def step(x, weights, config):
        return flashbpt.transformer_block(x * 1.5, weights, config) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert_same(run(compiled, x, weights, RMS, grad), run(step, x, weights, RMS, grad))


def test_tied_weights(device):
    weights = make_weights(replace(RMS, kv_heads=4), HIDDEN, FFN, torch.float64, device)
    x, grad = inputs((1, 20), device)
    apart = run(plain_block, x, weights, replace(RMS, kv_heads=4), grad)[1]
    tied = replace(weights, wk=weights.wq, norm2=weights.norm1)
    y = flashbpt.transformer_block(x, tied, replace(RMS, kv_heads=4))
    same = run(plain_block, x, to_dtype(tied, torch.float64), replace(RMS, kv_heads=4), grad)[1]
    y.backward(grad)
    torch.testing.assert_close(weights.wq.grad, same["wq"] + same["wk"])
    assert not torch.allclose(weights.wq.grad, apart["wq"] + apart["wk"])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_no_rows(device, shape):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    x = torch.zeros(*shape, HIDDEN, device=device, requires_grad=True)
    y = flashbpt.transformer_block(x, weights, RMS)
    y.sum().backward()
    assert y.shape == x.shape and x.grad.shape == x.shape
    assert not weights.wq.grad.any()


@pytest.mark.parametrize("save", ["x", "x+o", "all"])
def test_flop_counts(device, save):
    """Products and attention as torch counts them for the plain layer, and what is made again."""
    from torch.utils.flop_counter import FlopCounterMode

    config = replace(RMS, save=save)
    weights = make_weights(config, HIDDEN, FFN, torch.float32, device)
    x, grad = inputs((2, 40), device, torch.float32)
    counts = {}
    for fn in (plain_block, flashbpt.transformer_block):
        with FlopCounterMode(display=False) as counter:
            run(fn, x, weights, config, grad)
        counts[fn] = counter.get_total_flops()
    w = leaves(weights)
    made = {n: 2 * 80 * w[n].numel() for n in ("wq", "wk", "wv", "wo", "w_gate", "w_up")}
    attention = 2 * 2 * 40 * 40 * HIDDEN  # one of its products
    again = {"all": 0, "x+o": sum(made.values()), "x": sum(made.values()) + 2 * attention}[save]
    # Plain attention keeps its scores; ours makes them again.
    assert counts[flashbpt.transformer_block] == counts[plain_block] + attention + again


def test_opcheck(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    x, grad = inputs((2, 20), device, torch.float32)
    from flashbpt.blockwise import SAVED, _numbers

    tensors = [t if t is None else t.detach() for t in weights.tensors()]
    arguments = (x, *tensors, None, None, None, None, *_numbers(replace(RMS, save="all")))
    ops = torch.ops.flashbpt
    torch.library.opcheck(ops.transformer_block_forward.default, (*arguments, True, True))
    saved = ops.transformer_block_forward.default(*arguments, True, True)[3:]
    assert len(saved) == SAVED
    torch.library.opcheck(
        ops.transformer_block_backward.default,
        (grad, *arguments, *saved, True, [t is not None for t in (x, *tensors)]),
    )


ERRORS = {
    "kv_heads": (lambda: BlockConfig(heads=4, kv_heads=3), ValueError, "4 heads and 3"),
    "norm": (lambda: BlockConfig(heads=4, norm="batch"), ValueError, "'batch'"),
    "rows": (lambda: BlockConfig(heads=4, rows=0), ValueError, "got 0"),
    "dropout": (lambda: BlockConfig(heads=4, residual_dropout=1.5), RuntimeError, "1.5"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_config_errors(name):
    make, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        make()


def test_call_errors(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    x = torch.zeros(1, 8, HIDDEN, device=device)

    def refuse(words, x=x, weights=weights, config=RMS, **options):
        with pytest.raises(RuntimeError, match=words):
            flashbpt.transformer_block(x, weights, config, **options)

    refuse("x must be", x=x[0])
    refuse("wk must have shape", weights=replace(weights, wk=weights.wk[:5]))
    refuse("w_up must have the dtype", weights=replace(weights, w_up=weights.w_up.double()))
    refuse("x must have the weights' dtype", x=x.double())
    refuse("needs the weight wv", weights=replace(weights, wv=None))
    refuse("q_norm and k_norm", config=replace(RMS, qk_norm=True))
    refuse("cos and sin go together", cos=torch.zeros(8, 2, device=device))
    table = torch.zeros(4, 2, device=device)
    refuse("4 positions, but x has 8", cos=table, sin=table)
    refuse("rope is off", config=replace(RMS, rope=None), cos=table, sin=table)
    refuse(
        "b_gate was given without",
        weights=replace(weights, w_gate=None, b_gate=torch.zeros(FFN, device=device)),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [512, "auto"])
def test_errors_on_a_gpu_are_at_most_those_of_autograd(cuda, rows):
    """bf16, wide enough that errors are averages: x and every weight against fp64."""
    config = BlockConfig(heads=8, kv_heads=4, rows=rows, qk_norm=True)
    weights = make_weights(config, 1024, 2816, torch.bfloat16, cuda)
    x = torch.randn(1, 4096, 1024, device=cuda).bfloat16()
    grad = torch.randn_like(x)
    exact = run(plain_block, x.double(), to_dtype(weights, torch.float64), config, grad.double())
    plain = run(plain_block, x, weights, config, grad)
    got = run(flashbpt.transformer_block, x, weights, config, grad)
    for name, right in exact[1].items():
        error_plain, error = (float((r[1][name] - right).norm()) for r in (plain, got))
        assert error <= 1.02 * error_plain, f"{name}: {error / error_plain:.3f} of autograd's"


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["x", "x+o", "all"])
def test_block_memory_is_what_the_allocator_says(cuda, save):
    config = BlockConfig(heads=8, kv_heads=2, rows=1024, save=save)
    hidden, ffn, tokens = 1024, 4096, 8192
    weights = make_weights(config, hidden, ffn, torch.bfloat16, cuda)
    x = torch.randn(1, tokens, hidden, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)
    flashbpt.transformer_block(x, weights, config).backward(grad)  # cuBLAS takes its workspace
    for t in (x, *leaves(weights).values()):
        t.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = flashbpt.transformer_block(x, weights, config)
    kept = torch.cuda.memory_allocated() - before - y.nbytes + x.nbytes
    y.backward(grad)
    peak = torch.cuda.max_memory_allocated() - before + grad.nbytes
    predicted = flashbpt.block_memory(config, tokens, hidden=hidden, ffn=ffn)
    assert abs(kept / predicted.kept - 1) < 0.01, (kept, predicted)
    assert abs(peak / predicted.peak - 1) < 0.1, (peak, predicted)


@pytest.mark.gpu
@pytest.mark.parametrize("save", ["x", "x+o"])
def test_offload_gives_the_same_and_keeps_nothing_on_the_gpu(cuda, save):
    config = BlockConfig(heads=8, kv_heads=2, rows=256, save=save, deterministic=True)
    weights = make_weights(config, 512, 1024, torch.bfloat16, cuda)
    x = torch.randn(1, 2000, 512, device=cuda).bfloat16()
    grad = torch.randn_like(x)
    away = replace(config, offload="cpu")
    right = run(flashbpt.transformer_block, x, weights, config, grad)
    for _ in range(3):  # memory given back early would be another call's by then
        got = run(flashbpt.transformer_block, x, weights, away, grad)
        assert torch.equal(got[0], right[0])
        assert all(torch.equal(got[1][n], right[1][n]) for n in right[1])
    leaf = x.clone().requires_grad_()
    before = torch.cuda.memory_allocated()
    y = flashbpt.transformer_block(leaf * 1, weights, away)
    lse = 4 * 2000 * 8 if save == "x+o" else 0
    assert torch.cuda.memory_allocated() - before <= y.nbytes + lse + 2**17
