"""What a transformer block is made of: its config, its weights, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from flashbpt.arguments import check_dropout, window_limits

NORMS = ("rms", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROPES = (None, "half", "interleaved")
SAVES = ("x", "x+o", "all")


def choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return allowed.index(value)


def rows_asked(rows):
    if rows == "auto":
        return 0
    if not isinstance(rows, int) or rows < 1:
        raise ValueError(f'rows must be "auto" or a whole number from 1 on, got {rows!r}')
    return rows


@dataclass(frozen=True)
class BlockConfig:
    """What a transformer block computes, and how.

    heads, kv_heads: of queries, and of keys and values (default: the same number).
    norm: "rms" or "layer", before attention and before the FFN; eps: its epsilon.
    activation: of the FFN, "silu", "gelu", "gelu_tanh" or "relu"; gated where there is a w_gate.
    rope: None, "half" (pairs of columns (j, j + D / 2)) or "interleaved" ((2 j, 2 j + 1)), with
        angles position * rope_theta ** (-2 j / D) unless cos and sin are given.
    qk_norm: RMSNorm of each head of queries and keys before rope (weights q_norm, k_norm).
    window: how many keys before its own a query sees, or (left, right) of which causal leaves the
        left; None for all.
    softcap, scale: of the scores, as in `flashbpt.attention`.
    attention_dropout, residual_dropout: probabilities, of attention's weights and of what is added
        to the residual stream.
    save: what is kept for the backward: "x+o" (x, attention's output and its LSE), "x" (attention
        is computed again) or "all" (what every product made: nothing is multiplied again).
    offload: None, or "cpu": x and attention's output wait for the backward in pinned memory.
    rows: of a block, rounded up to a multiple of 16; "auto" takes half of the tokens, at least
        2048 and at most 8192. Packed sequences with attention_dropout are one block.
    deterministic: as in `flashbpt.attention`.
    """

    heads: int
    kv_heads: int | None = None
    norm: str = "rms"
    eps: float = 1e-5
    activation: str = "silu"
    rope: str | None = "half"
    rope_theta: float = 10000.0
    qk_norm: bool = False
    window: int | tuple[int, int] | None = None
    softcap: float = 0.0
    scale: float | None = None
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    save: str = "x+o"
    offload: str | None = None
    rows: int | str = "auto"
    deterministic: bool | None = None

    def __post_init__(self):
        choice("norm", self.norm, NORMS)
        choice("activation", self.activation, ACTIVATIONS)
        choice("rope", self.rope, ROPES)
        choice("save", self.save, SAVES)
        choice("offload", self.offload, (None, "cpu"))
        rows_asked(self.rows)
        self.window_left()
        for p in (self.attention_dropout, self.residual_dropout):
            check_dropout(p)
        if self.heads < 1 or self.key_heads() < 1 or self.heads % self.key_heads():
            raise ValueError(
                f"kv_heads must divide heads, got {self.heads} heads and {self.kv_heads} kv_heads"
            )

    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def window_left(self) -> int:
        if self.window is None or isinstance(self.window, int):
            return window_limits(None if self.window is None else (self.window, 0))[0]
        return window_limits(self.window)[0]


@dataclass
class BlockWeights:
    """The tensors of a transformer block, in the layout of torch.nn.Linear, (out, in).

    With H columns of x, F hidden ones of the FFN and heads of D columns; of one dtype. None
    stands for what is not there: norms without weights multiply by 1, and without w_gate the FFN is
    not gated. main_grad: fp32 tensors (fp64 for fp64) by the names of weights; the gradients of
    those are added into them instead of being returned.
    """

    norm1: torch.Tensor | None = None  # (H,)
    norm1_bias: torch.Tensor | None = None
    wq: torch.Tensor | None = None  # (Hq * D, H)
    bq: torch.Tensor | None = None
    wk: torch.Tensor | None = None  # (Hkv * D, H)
    bk: torch.Tensor | None = None
    wv: torch.Tensor | None = None  # (Hkv * D, H)
    bv: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # (D,)
    k_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None  # (Hq,)
    wo: torch.Tensor | None = None  # (H, Hq * D)
    bo: torch.Tensor | None = None
    norm2: torch.Tensor | None = None  # (H,)
    norm2_bias: torch.Tensor | None = None
    w_gate: torch.Tensor | None = None  # (F, H)
    b_gate: torch.Tensor | None = None
    w_up: torch.Tensor | None = None  # (F, H)
    b_up: torch.Tensor | None = None
    w_down: torch.Tensor | None = None  # (H, F)
    b_down: torch.Tensor | None = None
    main_grad: dict[str, torch.Tensor] | None = None

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of the op's schema."""
        return tuple(getattr(self, name) for name in WEIGHTS)


WEIGHTS = tuple(f.name for f in fields(BlockWeights) if f.name != "main_grad")


@dataclass(frozen=True)
class BlockMemory:
    """Bytes. kept: from the forward to the backward of a block, x included. peak: above weights and
    x while one block's forward and backward run, with y and its gradient.
    """

    kept: int
    peak: int


def block_memory(
    config,
    tokens,
    *,
    hidden,
    ffn,
    head_dim=None,
    gated=True,
    dtype=torch.bfloat16,
    x_dtype=None,
    sequences=1,
    packed=False,
):
    """What `transformer_block` keeps, and takes at most, for `tokens` tokens in `sequences` of one
    length, or packed. With config.offload on the GPU alone.

    dtype is the weights'; x_dtype, of the residual stream, theirs unless given. Counts tensors, not
    what the allocator rounds them up to: `BlockMemory`, in bytes.
    """
    element, wide = dtype.itemsize, (x_dtype or dtype).itemsize
    acc = max(element, 4)
    heads, kv_heads = config.heads, config.key_heads()
    head_dim = head_dim or hidden // heads
    width_q, width_kv = heads * head_dim, kv_heads * head_dim
    hidden_parts = 2 if gated else 1
    x, out = wide * tokens * hidden, element * tokens * width_q
    lse = acc * tokens * heads
    if config.save == "x":
        out = lse = 0
    waits = x + out if config.offload else 0  # on the host
    kept = x + out + lse - waits
    extra = 0
    if config.save == "all":
        per_token = element * (width_q + 2 * width_kv + hidden_parts * ffn) + wide * hidden
        extra = tokens * per_token
        kept += extra
    length = tokens if packed else tokens // max(sequences, 1)
    rows = _rows_of_a_block(config.rows, tokens)
    if packed and config.attention_dropout:
        rows = tokens
    group = length * max(rows // max(length, 1), 1)  # tokens whose keys are there together
    rows = min(rows, group)
    kv = 2 * element * group * width_kv
    kv_gradients = 2 * acc * group * width_kv
    weights = hidden * (2 * width_q + 2 * width_kv + (hidden_parts + 1) * ffn + 2)
    of_ffn = (
        element * rows * ((hidden_parts + 1) * ffn + 3 * hidden + width_q) + wide * rows * hidden
    )
    of_attention = rows * (element * (3 * hidden + 3 * width_q) + 2 * wide * hidden + acc * width_q)
    backward = 3 * x + kv + kv_gradients + acc * weights + max(of_ffn, of_attention)
    # Of what waits on the host a block is there, and the next one.
    there = 2 * rows * (wide * hidden + element * width_q) if config.offload else out
    return BlockMemory(kept, backward + there + lse + extra)


def _rows_of_a_block(rows, tokens):
    """block_rows in csrc/blockwise_ffn.cpp."""
    if rows == "auto":
        rows = min(max((tokens + 1) // 2, 2048), 8192)
    return min(-(-rows // 16) * 16, tokens)
