"""The demo's model: a byte-level GPT whose layers are plain or blockwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attention = Callable[..., Tensor]

BYTES = 256  # the vocabulary


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the course of a run; a checkpoint resumes only under equal settings."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    context: int
    batch: int
    steps: int
    lr: float
    warmup_steps: int = 50
    final_lr: float = 0.05  # share of the peak
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads) or self.heads % self.kv_heads:
            raise SystemExit(
                "width must be a multiple of 2 * heads and heads of kv heads, "
                f"got width {self.width}, heads {self.heads}, kv heads {self.kv_heads}"
            )


def rotary_tables(length: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine (length, head_dim / 2) of the angles at each position."""
    half = head_dim // 2
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv:2104.09864): the two halves of a head turn together."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)), for x (B, S, width)."""

    def __init__(self, s: Settings, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.head_dim = s.width // s.heads
        self.qkv_widths = [s.width, s.kv_heads * self.head_dim, s.kv_heads * self.head_dim]
        hidden = -(-8 * s.width // 3 // 32) * 32  # SwiGLU's usual 8/3, in steps of 32
        self.attention_norm = nn.RMSNorm(s.width)
        self.qkv = nn.Linear(s.width, sum(self.qkv_widths), bias=False)
        self.proj = nn.Linear(s.width, s.width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(s.width)
        self.gate_up = nn.Linear(s.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, s.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, S, head_dim)
            for t in self.qkv(self.attention_norm(x)).split(self.qkv_widths, dim=-1)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o = self.attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.proj(o.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.feed_forward_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def to_blockwise(block: Block, rows: int | str = "auto") -> nn.Module:
    """The same layer as a flashbpt.nn.TransformerBlock, with the same weights."""
    import flashbpt

    width, _, kv_width = block.qkv_widths
    layer = flashbpt.nn.TransformerBlock(
        width,
        width // block.head_dim,
        kv_heads=kv_width // block.head_dim,
        ffn_dim=block.down.in_features,
        eps=torch.finfo(torch.float32).eps,  # torch's where none is given
        rope="half",
        rows=rows,
    )
    return layer.load_from(block)


def plain_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a GPT of blockwise layers by the names that they have in a plain one."""
    fused = {"attention_norm": ["norm1"], "qkv": ["wq", "wk", "wv"], "proj": ["wo"]}
    fused |= {"feed_forward_norm": ["norm2"], "gate_up": ["w_gate", "w_up"], "down": ["w_down"]}
    layers = sorted({name.rpartition(".")[0] for name in state if name.startswith("blocks.")})
    plain = {name: value for name, value in state.items() if not name.startswith("blocks.")}
    for layer in layers:
        for name, parts in fused.items():
            plain[f"{layer}.{name}.weight"] = torch.cat([state[f"{layer}.{p}"] for p in parts])
    return plain


class GPT(nn.Module):
    """Bytes (B, S) to logits (B, S, 256); one matrix serves the embedding and the head."""

    def __init__(self, s: Settings, attention: Attention, blockwise: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, s.width)
        self.blocks = nn.ModuleList(Block(s, attention) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width)
        for name, p in self.named_parameters():
            if p.ndim == 2:  # keeps the variance through a matrix, and over the sum of all blocks
                summands = 2 * s.layers if name.endswith(("proj.weight", "down.weight")) else 1
                nn.init.normal_(p, std=(p.shape[1] * summands) ** -0.5)
        if blockwise:
            self.blocks = nn.ModuleList(map(to_blockwise, self.blocks))
        cos, sin = rotary_tables(s.context, s.width // s.heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos=cos, sin=sin)
        # Under autocast blockwise layers hand on its dtype, plain ones the embedding's.
        return F.linear(self.norm(x.float()), self.embedding.weight)
