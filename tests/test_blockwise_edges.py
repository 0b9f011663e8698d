"""transformer_block where calls are unusual: strides, padding, tables, second derivatives."""

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
)

import flashbpt
from flashbpt.block_config import _rows_of_a_block

STRIDES = {
    "sliced": lambda x: torch.cat([x, x], -1)[..., :HIDDEN],
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "expanded": lambda x: x[:1, :1].expand_as(x),
    "rows_apart": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
}


@pytest.mark.parametrize("save", ["x+o", "all"])
@pytest.mark.parametrize("name", STRIDES)
def test_any_strides(device, name, save):
    """Of x and of the gradient of y."""
    config = replace(RMS, save=save)
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device, bias=True)
    x, grad = (STRIDES[name](t) for t in inputs((2, 37), device))
    assert not x.is_contiguous()

    def strided(fn):
        def call(x, *rest):
            return fn(STRIDES[name](x), *rest)

        return call

    assert_same(
        run(strided(flashbpt.transformer_block), x, weights, config, grad),
        run(strided(plain_block), x, weights, config, grad),
    )


@pytest.mark.parametrize("save", ["x+o", "x", "all"])
def test_rows_past_the_last_sequence_never_matter(device, save):
    config = replace(RMS, save=save)
    weights = make_weights(config, HIDDEN, FFN, torch.float64, device, bias=True)
    cu = torch.tensor([0, 17, 17, 40], device=device)
    x, grad = inputs((60,), device)
    right = run(flashbpt.transformer_block, x[:40], weights, config, grad[:40], cu_seqlens=cu)
    x[40:], grad[40:] = torch.nan, torch.nan
    y, grads = run(flashbpt.transformer_block, x, weights, config, grad, cu_seqlens=cu)
    assert not y[40:].any() and not grads["x"][40:].any()
    assert_same((y[:40], {**grads, "x": grads["x"][:40]}), right)


def test_tables_for_packed_sequences(device):
    """As long as the longest sequence is enough, whatever comes after the last one."""
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    cu = torch.tensor([0, 17, 40], device=device)
    x, _ = inputs((90,), device)
    angle = torch.randn(23, 4, dtype=torch.float64, device=device)
    tables = {"cos": angle.cos(), "sin": angle.sin()}
    y = flashbpt.transformer_block(x, weights, RMS, cu_seqlens=cu, **tables)
    right = flashbpt.transformer_block(x[:40], weights, RMS, cu_seqlens=cu, **tables)
    torch.testing.assert_close(y[:40], right)
    short = {name: t[:20] for name, t in tables.items()}
    y = flashbpt.transformer_block(x, weights, RMS, cu_seqlens=cu, **short)
    assert y[37:40].isnan().all(), "a row without an angle has no value"
    torch.testing.assert_close(y[:37], right[:37])


@pytest.mark.parametrize("fn", ["block", "ffn"])
def test_double_backward_is_refused(device, fn):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    x = inputs((1, 20), device)[0].requires_grad_()
    if fn == "block":
        y = flashbpt.transformer_block(x, weights, RMS)
    else:
        y = flashbpt.blockwise_ffn(x, weights.w_gate, weights.w_up, weights.w_down)
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no double backward"):
        (y.sum() + dx.square().sum()).backward()


def test_functional_gradients(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    x, _ = inputs((1, 20), device)

    def loss(x):
        return flashbpt.transformer_block(x, weights, RMS).sum()

    right = run(flashbpt.transformer_block, x, weights, RMS)[1]["x"]
    torch.testing.assert_close(torch.func.grad(loss)(x), right)


def test_unused_keys_and_values_need_no_gradient(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float64, device)
    x = inputs((1, 20), device)[0].requires_grad_()
    y, (keys, _) = flashbpt.transformer_block(x, weights, RMS, return_kv=True)
    (y * keys.sum()).sum().backward()
    assert x.grad.isfinite().all()


def test_errors(device):
    weights = make_weights(RMS, HIDDEN, FFN, torch.float32, device)
    x = torch.zeros(8, HIDDEN, device=device)

    def refuse(words, x=x, weights=weights, config=RMS, **options):
        with pytest.raises(RuntimeError, match=words):
            flashbpt.transformer_block(x.requires_grad_(), weights, config, **options)

    cu = torch.tensor([0, 8], device=device)
    refuse("cu_seqlens must be one dimension", cu_seqlens=cu[None])
    refuse("cu_seqlens must be one dimension", cu_seqlens=cu[:0])
    refuse("cu_seqlens must be one dimension", cu_seqlens=cu.float())
    if torch.device(device).type == "cpu":
        refuse("cu_seqlens", cu_seqlens=cu + 1)
        refuse("cu_seqlens", cu_seqlens=cu * 2)
    whole = torch.ones(8, 2, dtype=torch.int32, device=device)
    refuse("cos and sin must be floating point", cu_seqlens=cu, cos=whole, sin=whole)
    main = {"wx": weights.wq}
    refuse("main_grad was given for 'wx'", weights=replace(weights, main_grad=main), cu_seqlens=cu)
    main = {"wq": torch.zeros(3, device=device)}
    given = replace(weights, main_grad=main)
    refuse("main_grad of wq must be .* got", weights=given, cu_seqlens=cu)
    with pytest.raises(ValueError, match="0 kv_heads"):
        flashbpt.BlockConfig(heads=4, kv_heads=0)


@pytest.mark.parametrize("tokens", [1, 15, 2048, 2049, 5000, 16384, 100000])
@pytest.mark.parametrize("rows", ["auto", 1, 100, 4096])
def test_rows_of_a_block_are_the_ops(rows, tokens):
    """block_memory's own count against the number of products that the op makes."""
    from flashbpt.blockwise import _OPS

    if tokens > 20000 and rows in (1, 100):
        tokens = 2000
    x, w = torch.zeros(tokens, 1), torch.zeros(1, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        _OPS.blockwise_ffn_forward(
            x, None, w, w, None, None, None, 0, 0 if rows == "auto" else rows
        )
    products = sum(e.count for e in recorded.key_averages() if e.key == "aten::mm")
    assert products == 2 * -(-tokens // _rows_of_a_block(rows, tokens))


def test_memory_of_what_waits_on_the_host():
    config = replace(RMS, heads=32, kv_heads=8, rows="auto")
    sizes = {"hidden": 4096, "ffn": 11008, "head_dim": 128}
    here = flashbpt.block_memory(config, 65536, **sizes)
    away = flashbpt.block_memory(replace(config, offload="cpu"), 65536, **sizes)
    assert away.kept == 4 * 65536 * 32 and away.peak < here.peak
    dropped = replace(config, attention_dropout=0.1)
    packed = flashbpt.block_memory(dropped, 65536, packed=True, **sizes)
    assert packed.peak > flashbpt.block_memory(dropped, 65536, **sizes).peak


def test_leaves_are_all_weights(device):
    """What the tests call all weights of a block is what the op takes."""
    config = replace(RMS, norm="layer", qk_norm=True)
    weights = make_weights(config, HIDDEN, FFN, torch.float32, device, bias=True, sinks=True)
    assert all(t is not None for t in weights.tensors()) and len(leaves(weights)) == 21
