"""Transformer blocks to test: weights, the same block in plain torch, and its error's measure."""

import math
from dataclasses import replace

import philox
import reference
import torch
import torch.nn.functional as F

import flashbpt
from flashbpt.block_config import WEIGHTS

RMS = flashbpt.BlockConfig(heads=4, kv_heads=2, rows=16)
HIDDEN, FFN = 32, 56

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def make_weights(
    config, hidden, ffn, dtype, device, *, head_dim=None, gated=True, bias=False, sinks=False
):
    """Random weights with gradients, scaled so that activations stay near 1."""
    head_dim = head_dim or hidden // config.heads
    q, kv = config.heads * head_dim, (config.kv_heads or config.heads) * head_dim
    shapes = {
        "norm1": (hidden,),
        "wq": (q, hidden),
        "wk": (kv, hidden),
        "wv": (kv, hidden),
        "wo": (hidden, q),
        "norm2": (hidden,),
        "w_up": (ffn, hidden),
        "w_down": (hidden, ffn),
    }
    if gated:
        shapes["w_gate"] = (ffn, hidden)
    if config.qk_norm:
        shapes |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if sinks:
        shapes["sinks"] = (config.heads,)
    if bias:
        shapes |= {"bq": (q,), "bk": (kv,), "bv": (kv,), "bo": (hidden,)}
        shapes |= {"b_up": (ffn,), "b_down": (hidden,)}
        if gated:
            shapes["b_gate"] = (ffn,)
    if bias and config.norm == "layer":
        shapes |= {"norm1_bias": (hidden,), "norm2_bias": (hidden,)}
    made = {}
    for name, shape in shapes.items():
        t = torch.randn(shape, dtype=torch.float64) / (
            math.sqrt(shape[-1]) if len(shape) > 1 else 4
        )
        if "norm" in name and "bias" not in name:
            t = 1 + t
        made[name] = t.to(device, dtype).requires_grad_()
    return flashbpt.BlockWeights(**made)


def leaves(weights):
    return {name: t for name in WEIGHTS if (t := getattr(weights, name)) is not None}


def to_dtype(weights, dtype):
    """The same numbers in another type, as leaves of their own."""
    return replace(
        weights, **{n: t.detach().to(dtype).requires_grad_() for n, t in leaves(weights).items()}
    )


def norm(x, config, weight, bias):
    wide = x if x.dtype == torch.float64 else x.float()
    if config.norm == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + config.eps)
    if weight is not None:
        out = out * weight
    if bias is not None:
        out = out + bias
    return out.to(x.dtype)


def tables(config, positions, head_dim):
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=positions.device)
    angle = positions.double()[:, None] * config.rope_theta ** (-2 * pairs / head_dim)
    return angle.cos(), angle.sin()


def turn(x, cos, sin, interleaved):
    """x (..., S, H, D)."""
    pairs = cos.shape[-1]
    wide = x if x.dtype == torch.float64 else x.float()
    cos, sin = cos.to(wide.dtype)[:, None], sin.to(wide.dtype)[:, None]
    turned, rest = wide[..., : 2 * pairs], wide[..., 2 * pairs :]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1).to(x.dtype)


def residual_keep(state, site, tokens, width, p):
    """bool (tokens, width) of the dropout on what is added to the residual stream."""
    columns = -(-width // 4)
    seed, offset = state
    token = torch.arange(tokens).numpy().astype("uint64")[:, None]
    column = torch.arange(columns).numpy().astype("uint64")[None]
    counter = ((offset + 4 * site) & philox.LOW, 0, token, column)
    words = [
        torch.from_numpy(w.astype("int64")) for w in philox.philox(counter, (seed, seed >> 32))
    ]
    words = torch.stack([w.expand(tokens, columns) for w in words], -1).flatten(1)[:, :width]
    return words >= philox.threshold(p)


def drop(x, keep, p):
    if keep is None:
        return x
    keep = keep.view(x.shape).to(x.device)
    return torch.where(keep, x / (1 - p) if p < 1 else x * 0, torch.zeros_like(x))


def plain_block(x, w, config, *, cos=None, sin=None, cu_seqlens=None, state=None):
    """The block in x's dtype by torch's autograd; state: of dropout, (seed, offset)."""
    packed = cu_seqlens is not None
    tokens, hidden = x.reshape(-1, x.shape[-1]).shape
    heads = config.heads
    dim = w.wq.shape[0] // heads
    if packed:
        spans = reference.spans(cu_seqlens)
        positions = torch.zeros(tokens, dtype=torch.long, device=x.device)
        for begin, end in spans:
            positions[begin:end] = torch.arange(end - begin, device=x.device)
    else:
        positions = torch.arange(x.shape[1], device=x.device)
    n1 = norm(x, config, w.norm1, w.norm1_bias).to(w.wq.dtype)  # x may be wider
    q, k, v = (
        F.linear(n1, weight, bias).unflatten(-1, (-1, dim))
        for weight, bias in ((w.wq, w.bq), (w.wk, w.bk), (w.wv, w.bv))
    )
    if config.qk_norm:
        rms = replace(config, norm="rms")
        q, k = norm(q, rms, w.q_norm, None), norm(k, rms, w.k_norm, None)
    if config.rope is not None:
        if cos is None:
            c, s = tables(config, positions, dim)
        else:
            c, s = cos[positions].to(x.device), sin[positions].to(x.device)
        q, k = (turn(t, c, s, config.rope == "interleaved") for t in (q, k))
    wide = torch.float64 if w.wq.dtype == torch.float64 else torch.float32
    p = config.attention_dropout
    options = {
        "dropout_p": p,
        "window": None if config.window_left() < 0 else (config.window_left(), 0),
        "softcap": config.softcap,
        "scale": config.scale,
        "sinks": w.sinks,
        "product": w.wq.dtype,
        "softmax": wide,
    }
    if packed:
        keep = None
        if p:
            keep = [
                torch.from_numpy(
                    philox.keep_mask(state, p, (1, heads, e - b, e - b), (i, 0, 0, 0, heads))
                )[0]
                for i, (b, e) in enumerate(spans)
            ]
        out = reference.varlen_attention(q, k, v, cu_seqlens, causal=True, keep=keep, **options)[0]
        if len(out) < tokens:
            out = F.pad(out, (0, 0, 0, 0, 0, tokens - len(out)))
    else:
        keep = None
        if p:
            sizes = (len(x), heads, x.shape[1], x.shape[1])
            keep = torch.from_numpy(philox.keep_mask(state, p, sizes))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = reference.attention(q, k, v, is_causal=True, enable_gqa=True, keep=keep, **options)[0]
        out = out.transpose(1, 2)
    r = config.residual_dropout
    keeps = [residual_keep(state, site, tokens, hidden, r) if r else None for site in (1, 2)]
    z = F.linear(out.flatten(-2).to(w.wo.dtype), w.wo, w.bo)
    h = x + drop(z, keeps[0], r)
    n2 = norm(h, config, w.norm2, w.norm2_bias).to(w.wq.dtype)
    return h + drop(plain_ffn(n2, w, config), keeps[1], r)


def plain_ffn(x, w, config):
    activation = ACTIVATIONS[config.activation]
    up = F.linear(x, w.w_up, w.b_up)
    if w.w_gate is None:
        return F.linear(activation(up), w.w_down, w.b_down)
    return F.linear(activation(F.linear(x, w.w_gate, w.b_gate)) * up, w.w_down, w.b_down)


def run(fn, x, weights, config, grad=None, **options):
    """(y, gradients by name) of a call with leaves of its own."""
    x = x.detach().requires_grad_()
    y = fn(x, weights, config, **options)
    grad = torch.ones_like(y) if grad is None else grad.to(y.dtype)
    tensors = {"x": x, **leaves(weights)}
    grads = torch.autograd.grad(y, list(tensors.values()), grad)
    return y.detach(), dict(zip(tensors, grads, strict=True))


def assert_same(got, right, factor=1e-11):
    (y, grads), (y_right, grads_right) = got, right
    assert set(grads) == set(grads_right)
    for name, a, b in [("y", y, y_right), *((n, grads[n], grads_right[n]) for n in grads)]:
        assert a.shape == b.shape and a.dtype == b.dtype, name
        assert (a - b).abs().max() <= factor * max(1.0, b.abs().max()), name


def inputs(shape, device, dtype=torch.float64):
    x = torch.randn(*shape, HIDDEN, dtype=torch.float64, device=device).to(dtype)
    return x, torch.randn_like(x)
