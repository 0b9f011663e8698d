"""Attention the slow way, as the tests' truth.

`attention` takes the arguments of `flashbpt.attention` and always returns `(out, lse)`. It holds
the whole score matrix, runs in float64 unless told otherwise and is differentiable by torch's own
autograd. With `product=torch.bfloat16, softmax=torch.float32` the same lines are the plain
composition of that dtype (products in the dtype, softmax in fp32, weights rounded back), whose
error is the yardstick of `compare`.

Order of terms: scale, softcap, ALiBi, additive mask; then boolean mask, causal and window; then
the sink.
"""

import math
from itertools import pairwise

import torch

INF = float("inf")


def visible_keys(lq, lk, causal=False, window=None, diagonal=0, device=None):
    """bool (lq, lk): the keys that causal and window leave to each query."""
    row = torch.arange(lq, device=device).view(-1, 1) + diagonal
    key = torch.arange(lk, device=device).view(1, -1)
    seen = torch.ones(lq, lk, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= row
    left, right = window if window is not None else (-1, -1)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen


def repeat_heads(x, heads):
    """kv heads (dim -3) repeated so that query head h reads kv head h // ratio."""
    if x.size(-3) == heads:
        return x
    assert x.size(-3) and heads % x.size(-3) == 0, (x.shape, heads)
    return x.repeat_interleave(heads // x.size(-3), -3)


def alibi_term(slopes, lq, lk, diagonal):
    """-slope * |row + diagonal - key|, slopes (Hq,) or (B, Hq)."""
    row = torch.arange(lq, device=slopes.device).view(-1, 1) + diagonal
    distance = (row - torch.arange(lk, device=slopes.device).view(1, -1)).abs()
    return -slopes[..., None, None] * distance


def scores(q, k, attn_mask, scale, softcap, alibi_slopes, seen, diagonal, product, softmax):
    """The masked score matrix (..., Lq, Lk) in the softmax dtype."""
    if scale is None:
        scale = 1.0 / math.sqrt(q.size(-1)) if q.size(-1) else 1.0
    s = torch.matmul(q.to(product), k.to(product).transpose(-1, -2)).to(softmax) * scale
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s + alibi_term(alibi_slopes.to(softmax), s.size(-2), s.size(-1), diagonal)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        s = s.masked_fill(~attn_mask, -INF)
    elif attn_mask is not None:
        s = s + attn_mask.to(softmax)
    return s.masked_fill(~seen, -INF)


def softmax_with_sink(s, sinks):
    """(weights, lse); the sink joins the denominator; a row without keys has weights 0."""
    column = s.shape[:-1] + (1,)
    top = torch.cat([s.detach(), s.new_full(column, -INF)], -1).amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(s.dtype).view(-1, 1, 1).expand(column)
        top = torch.maximum(top, sink.detach())
    top = torch.where(top == -INF, torch.zeros_like(top), top)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    empty = total == 0
    safe = torch.where(empty, torch.ones_like(total), total)
    lse = torch.where(empty, torch.full_like(total, -INF), top + torch.log(safe))
    return e / safe, lse.squeeze(-1)


def attention(
    q,
    k,
    v,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    *,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    causal_align="upper-left",
    keep=None,
    product=torch.float64,
    softmax=torch.float64,
    return_lse=True,
):
    """(out, lse). `keep`: boolean dropout mask (..., Lq, Lk), kept weights are scaled by 1 / (1 -
    p).
    """
    assert return_lse and (keep is not None or not dropout_p)
    if enable_gqa:
        k, v = repeat_heads(k, q.size(-3)), repeat_heads(v, q.size(-3))
    lq, lk = q.size(-2), k.size(-2)
    diagonal = lk - lq if causal_align == "lower-right" else 0
    seen = visible_keys(lq, lk, is_causal, window, diagonal, q.device)
    s = scores(q, k, attn_mask, scale, softcap, alibi_slopes, seen, diagonal, product, softmax)
    weights, lse = softmax_with_sink(s, sinks)
    if keep is not None:
        weights = (
            weights * keep.to(weights.device) / (1.0 - dropout_p)
            if dropout_p < 1
            else weights * 0.0
        )
    out = torch.matmul(weights.to(product), v.to(product))
    return out, lse.expand(out.shape[:-1])


def spans(cu_seqlens):
    """[(start, end)] of the sequences of a cu_seqlens tensor."""
    edges = cu_seqlens.tolist()
    return list(pairwise(edges))


def varlen_attention(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    causal=False,
    dropout_p=0.0,
    alibi_slopes=None,
    keep=None,
    return_lse=True,
    **options,
):
    """Packed (T, H, D) attention, one sequence after the other; (out (T, Hq, Dv), lse (T, Hq)).

    Causal, window and ALiBi are aligned lower-right in each sequence. Rows after cu_seqlens_q[-1]
    have output 0 and LSE -inf. `keep`: a list, one (Hq, lq, lk) mask a sequence.
    """
    outs, lses = [], []
    spans_q = spans(cu_seqlens_q)
    spans_k = spans_q if cu_seqlens_k is None else spans(cu_seqlens_k)
    for i, ((q0, q1), (k0, k1)) in enumerate(zip(spans_q, spans_k, strict=True)):
        slopes = (
            alibi_slopes[i]
            if alibi_slopes is not None and alibi_slopes.dim() == 2
            else alibi_slopes
        )
        out, lse = attention(
            q[q0:q1].transpose(0, 1),
            k[k0:k1].transpose(0, 1),
            v[k0:k1].transpose(0, 1),
            dropout_p=dropout_p,
            is_causal=causal,
            enable_gqa=True,
            causal_align="lower-right",
            alibi_slopes=slopes,
            keep=None if keep is None else keep[i],
            **options,
        )
        outs.append(out.transpose(0, 1))
        lses.append(lse.transpose(0, 1))
    rest = q.size(0) - spans_q[-1][1]
    product, softmax = options.get("product", torch.float64), options.get("softmax", torch.float64)
    outs.append(torch.zeros(rest, q.size(1), v.size(2), dtype=product, device=q.device))
    lses.append(torch.full((rest, q.size(1)), -INF, dtype=softmax, device=q.device))
    return torch.cat(outs), torch.cat(lses)
