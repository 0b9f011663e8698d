"""Transformer layers: flashbpt's and those composed of PyTorch's operations, over the same weights.

Each is a pre-norm decoder layer without biases: RMSNorm, causal attention under rotary embeddings,
a gated FFN. A function of LAYERS takes (x [B, S, hidden], Weights, Rope) and returns the next x;
one of FFNS takes (x, FfnWeights, Rope) and is the FFN alone, which has no use for the last. None
stands for what does not run on this machine.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peers import sdpa
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flashbpt

EPS = 1e-5
ROPE_THETA = 10000.0
CHUNK = 8192  # rows of a chunked FFN
ATEN = torch.ops.aten
# What `selective` keeps: SDPA's output and its log-sum-exp.
KEPT_OPS = [
    ATEN._scaled_dot_product_cudnn_attention.default,
    ATEN._scaled_dot_product_flash_attention.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
]


class Shape(NamedTuple):
    name: str
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int = 128


class Weights(NamedTuple):
    """As torch.nn.Linear has them, [out, in]."""

    norm1: torch.Tensor
    wq: torch.Tensor
    wk: torch.Tensor
    wv: torch.Tensor
    wo: torch.Tensor
    norm2: torch.Tensor
    w_gate: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor


class FfnWeights(NamedTuple):
    w_gate: torch.Tensor
    w_up: torch.Tensor
    w_down: torch.Tensor


class Rope(NamedTuple):
    """fp32 [S, head_dim / 2], a column for each pair of columns that turns."""

    cos: torch.Tensor
    sin: torch.Tensor


Layer = Callable[[torch.Tensor, Weights, Rope], torch.Tensor]


def draw_weights(shape: Shape, device: str, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Leaves with gradients of zeros; products keep the size of what they take."""

    def leaf(t):
        t = t.to(dtype).requires_grad_()
        t.grad = torch.zeros_like(t)
        return t

    def norm():
        return leaf(1 + 0.1 * torch.randn(shape.hidden, device=device))

    def linear(columns_out, columns_in):
        return leaf(torch.randn(columns_out, columns_in, device=device) * columns_in**-0.5)

    queries, keys = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
    return Weights(
        norm1=norm(),
        wq=linear(queries, shape.hidden),
        wk=linear(keys, shape.hidden),
        wv=linear(keys, shape.hidden),
        wo=linear(shape.hidden, queries),
        norm2=norm(),
        w_gate=linear(shape.ffn, shape.hidden),
        w_up=linear(shape.ffn, shape.hidden),
        w_down=linear(shape.hidden, shape.ffn),
    )


def make_rope(tokens: int, head_dim: int, device: str) -> Rope:
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    positions = torch.arange(tokens, device=device, dtype=torch.float64)
    angle = torch.outer(positions, ROPE_THETA**-exponent)
    return Rope(angle.cos().float(), angle.sin().float())


# ---- the parts, in PyTorch's operations


def turn(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Heads [B, S, heads, head_dim] at their positions; column j turns with j + head_dim / 2."""
    cos, sin = (t[:, None] for t in rope)
    first, second = x.float().chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.cat(turned, dim=-1).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def attend(x: torch.Tensor, w: Weights, rope: Rope, attention: Callable = sdpa) -> torch.Tensor:
    """x and its attention: the first half of a layer."""
    head_dim = 2 * rope.cos.shape[1]
    n = rms_norm(x, w.norm1)
    q, k, v = (F.linear(n, m).unflatten(-1, (-1, head_dim)) for m in (w.wq, w.wk, w.wv))
    heads_first = (t.transpose(1, 2) for t in (turn(q, rope), turn(k, rope), v))
    out = attention(*heads_first, is_causal=True)
    return x + F.linear(out.transpose(1, 2).flatten(2), w.wo)


def gated(x: torch.Tensor, w: Weights | FfnWeights) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, w.w_gate)) * F.linear(x, w.w_up), w.w_down)


def feed_forward(h: torch.Tensor, w: Weights) -> torch.Tensor:
    """h and its FFN: the second half."""
    return h + gated(rms_norm(h, w.norm2), w)


def chunked_feed_forward(h: torch.Tensor, w: Weights) -> torch.Tensor:
    """Chunks of rows, each computed again in the backward."""
    parts = [checkpoint(feed_forward, p, w, use_reentrant=False) for p in h.split(CHUNK, dim=1)]
    return torch.cat(parts, dim=1)


# ---- layers


def plain(x, w, rope):
    """By autograd, with the attention that PyTorch has."""
    return feed_forward(attend(x, w, rope), w)


def plain_flashbpt(x, w, rope):
    """The same with flashbpt.attention."""
    attention = functools.partial(flashbpt.attention, enable_gqa=True)
    return feed_forward(attend(x, w, rope, attention), w)


@functools.cache
def _compiled() -> Layer:
    return torch.compile(plain)


def compiled(x, w, rope):
    return _compiled()(x, w, rope)


def checkpointed(x, w, rope):
    """Keeps x."""
    return checkpoint(plain, x, w, rope, use_reentrant=False)


def checkpointed_chunked(x, w, rope):
    """Keeps x and h; no FFN of all rows at once."""
    return chunked_feed_forward(checkpoint(attend, x, w, rope, use_reentrant=False), w)


def selective(x, w, rope):
    """Keeps attention's output too, so that the backward runs no attention again."""
    contexts = functools.partial(create_selective_checkpoint_contexts, KEPT_OPS)
    h = checkpoint(attend, x, w, rope, use_reentrant=False, context_fn=contexts)
    return chunked_feed_forward(h, w)


def block(x, w, rope):
    """flashbpt.transformer_block, which makes its rotary embeddings itself."""
    head_dim = 2 * rope.cos.shape[1]
    heads, kv_heads = (len(m) // head_dim for m in (w.wq, w.wk))
    return flashbpt.transformer_block(
        x, flashbpt.BlockWeights(**w._asdict()), block_config(heads, kv_heads)
    )


def block_config(heads: int, kv_heads: int):
    return flashbpt.BlockConfig(heads=heads, kv_heads=kv_heads, eps=EPS, rope_theta=ROPE_THETA)


def _cuda_only(layer: Layer) -> Layer | None:
    return layer if torch.cuda.is_available() else None


LAYERS: dict[str, Layer | None] = {
    "flashbpt": block,
    "plain": plain,
    "plain_flashbpt": plain_flashbpt,
    "compile": _cuda_only(compiled),  # on a CPU it would compile for a minute
    "checkpoint": checkpointed,
    "checkpoint_chunked": checkpointed_chunked,
    "selective": selective,
}
FFNS: dict[str, Callable] = {
    "flashbpt": lambda x, w, rope: flashbpt.blockwise_ffn(x, *w),
    "plain": lambda x, w, rope: gated(x, w),
}
