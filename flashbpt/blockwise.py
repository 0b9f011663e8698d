"""The Blockwise Parallel Transformer: a transformer block and its FFN, by blocks of rows."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch.utils.flop_counter import register_flop_formula

from flashbpt.arguments import check_dropout, window_limits, without_repeats
from flashbpt.backend import _State

_OPS = torch.ops.flashbpt

NORMS = ("rms", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROPES = (None, "half", "interleaved")
SAVES = ("x", "x+o", "all")


def blockwise_ffn(
    x,
    w_gate,
    w_up,
    w_down,
    *,
    b_gate=None,
    b_up=None,
    b_down=None,
    activation="silu",
    rows="auto",
):
    """activation(x Wg^T + bg) * (x Wu^T + bu) Wd^T + bd, a block of rows at a time.

    Keeps x alone for the backward, which computes the hidden activations again, a block of rows at
    a time and without the down projection. What has F columns exists for one block.

    Args:
        x: (..., H); fp32, bf16, fp16 or fp64. All weights have its dtype.
        w_gate: (F, H), or None for activation(x Wu^T + bu) Wd^T + bd.
        w_up: (F, H). w_down: (H, F).
        b_gate, b_up: (F,), b_down: (H,), or None.
        activation: "silu" (SwiGLU), "gelu" (GEGLU), "gelu_tanh" or "relu".
        rows: of a block, rounded up to a multiple of 16; "auto" takes half of them, at least 2048
            and at most 8192.

    Returns:
        (..., H) in x's dtype. Gradients flow to x and every weight, each returned once: those of
        weights are summed over blocks in fp32 (fp64 for fp64). There is no double backward.

    Raises:
        RuntimeError: for shapes, dtypes and devices that are not allowed.
        ValueError: for an unknown activation or malformed rows.

    Source: Blockwise Parallel Transformer (arXiv 2305.19370).
    """
    arguments = (*_autocast(x, w_gate, w_up, w_down, b_gate, b_up, b_down),)
    numbers = (_choice("activation", activation, ACTIVATIONS), _rows(rows))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments):
        if torch.compiler.is_compiling():
            arguments = without_repeats(arguments)
        return _Ffn.apply(*arguments, *numbers)
    return _OPS.blockwise_ffn_forward.default(*arguments, *numbers)


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
        2048 and at most 8192.
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
        _choice("norm", self.norm, NORMS)
        _choice("activation", self.activation, ACTIVATIONS)
        _choice("rope", self.rope, ROPES)
        _choice("save", self.save, SAVES)
        _choice("offload", self.offload, (None, "cpu"))
        _rows(self.rows)
        self.window_left()
        for p in (self.attention_dropout, self.residual_dropout):
            check_dropout(p)
        if self.heads < 1 or self.heads % self.kv_heads_():
            raise ValueError(
                f"kv_heads must divide heads, got {self.heads} heads and {self.kv_heads} kv_heads"
            )

    def kv_heads_(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    def window_left(self) -> int:
        if self.window is None or isinstance(self.window, int):
            return window_limits(None if self.window is None else (self.window, 0))[0]
        return window_limits(self.window)[0]


@dataclass
class BlockWeights:
    """The tensors of a transformer block, in the layout of torch.nn.Linear, (out, in).

    With H columns of x, F hidden ones of the FFN and heads of D columns; all of x's dtype. None
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


def transformer_block(x, weights, config, *, cos=None, sin=None, cu_seqlens=None, return_kv=False):
    """A pre-norm causal transformer block, a block of query rows at a time.

        h = x + dropout(attention(rope(norm1(x) Wq^T), ...) Wo^T + bo)
        y = h + dropout(ffn(norm2(h)))

    Keys and values of all tokens are made once; what belongs to queries, and what is as wide as the
    FFN, exists for one block of rows. For the backward x, attention's output and its LSE are kept
    (`config.save`); the rest is computed again, and the gradients of weights, keys and values are
    summed in fp32 (fp64 for fp64).

    Args:
        x: (B, S, H), or packed (T, H) with cu_seqlens; fp32, bf16, fp16 or fp64.
        weights: `BlockWeights`, all of x's dtype.
        config: `BlockConfig`.
        cos, sin: (positions, pairs), the rotary embedding's tables by position in a sequence;
            columns past 2 * pairs do not turn. Default: made from config.rope_theta in fp64.
        cu_seqlens: (N + 1,) int32 or int64, where packed sequences start and end, as in
            `flashbpt.varlen_attention`.
        return_kv: also return (keys, values), (B, S, Hkv, D) or (T, Hkv, D), as attention sees
            them, to fill a cache with; without gradients.

    Returns:
        y like x, or (y, (keys, values)). Gradients flow to x and every weight, each returned once.
        There is no double backward.

    Raises:
        RuntimeError: for shapes, dtypes and devices that are not allowed.
        ValueError: for unknown names in the config.

    Source: Blockwise Parallel Transformer (arXiv 2305.19370); FlashAttention-2 (2307.08691).
    """
    tensors = weights.tensors()
    for name in ("wq", "wk", "wv", "wo", "w_up", "w_down"):
        if getattr(weights, name) is None:
            raise RuntimeError(f"flashbpt: a transformer block needs the weight {name}, got None")
    if config.qk_norm != (weights.q_norm is not None) or config.qk_norm != (
        weights.k_norm is not None
    ):
        raise RuntimeError(
            f"flashbpt: qk_norm={config.qk_norm} goes with weights q_norm and k_norm "
            f"{'given' if config.qk_norm else 'None'}"
        )
    x, *tensors = _autocast(x, *tensors)
    state = None
    if config.attention_dropout > 0 or config.residual_dropout > 0:
        state = _OPS.draw_rng_state.default(x, 12)  # three sites of four words
    arguments = (x, *tensors, cos, sin, cu_seqlens, state, *_numbers(config))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        deterministic = config.deterministic
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if torch.compiler.is_compiling():
            arguments = (*without_repeats(arguments[:TENSORS]), *arguments[TENSORS:])
        into = [WEIGHTS.index(name) for name in weights.main_grad or ()]
        main = [weights.main_grad[WEIGHTS[i]] for i in into]
        y, keys, values = _TransformerBlock.apply(*arguments, return_kv, deterministic, into, main)
    else:
        y, keys, values = _OPS.transformer_block_forward.default(*arguments, False, return_kv)[:3]
    return (y, (keys, values)) if return_kv else y


@dataclass(frozen=True)
class BlockMemory:
    """Bytes. kept: from the forward to the backward of a block, x included. peak: above weights and
    x while one block's forward and backward run, with y and its gradient.
    """

    kept: int
    peak: int


def block_memory(
    config, tokens, *, hidden, ffn, head_dim=None, gated=True, dtype=torch.bfloat16, sequences=1
):
    """What `transformer_block` keeps, and takes at most, for `tokens` tokens in `sequences` of one
    length.

    Counts tensors, not what the allocator rounds them up to: `BlockMemory`, in bytes.
    """
    element = torch.empty((), dtype=dtype).element_size()
    acc = max(element, 4)
    heads, kv_heads = config.heads, config.kv_heads_()
    head_dim = head_dim or hidden // heads
    width_q, width_kv = heads * head_dim, kv_heads * head_dim
    hidden_parts = 2 if gated else 1
    x, out = element * tokens * hidden, element * tokens * width_q
    lse = acc * tokens * heads
    kept = x + {"x": 0, "x+o": out + lse, "all": out + lse}[config.save]
    extra = 0
    if config.save == "all":
        per_token = width_q + 2 * width_kv + hidden + hidden_parts * ffn
        extra = element * tokens * per_token
        kept += extra
    length = tokens // max(sequences, 1)
    rows = _rows_of_a_block(config.rows, tokens)
    group = length * max(rows // max(length, 1), 1)  # tokens whose keys are there together
    rows = min(rows, group)
    kv = 2 * element * group * width_kv
    kv_gradients = 2 * acc * group * width_kv
    weights = hidden * (2 * width_q + 2 * width_kv + (hidden_parts + 1) * ffn + 2)
    of_ffn = element * rows * ((hidden_parts + 1) * ffn + 4 * hidden + width_q)
    of_attention = element * rows * (5 * hidden + 3 * width_q) + acc * rows * width_q
    backward = 3 * x + kv + kv_gradients + acc * weights + max(of_ffn, of_attention)
    if config.save != "x":
        backward += out + lse
    return BlockMemory(kept, backward + extra)


def _rows_of_a_block(rows, tokens):
    """block_rows in csrc/blockwise_ffn.cpp."""
    if rows == "auto":
        rows = min(max((tokens + 1) // 2, 2048), 8192)
    return min(-(-rows // 16) * 16, tokens)


# --------------------------------------------------------------- arguments


def _choice(name, value, allowed):
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return allowed.index(value)


def _rows(rows):
    if rows == "auto":
        return 0
    if not isinstance(rows, int) or rows < 1:
        raise ValueError(f'rows must be "auto" or a whole number from 1 on, got {rows!r}')
    return rows


def _autocast(*tensors):
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype)
        for t in tensors
    )


def _numbers(config):
    """The op's options after its tensors."""
    return (
        config.heads,
        config.kv_heads_(),
        NORMS.index(config.norm),
        config.eps,
        ACTIVATIONS.index(config.activation),
        config.rope is not None,
        config.rope == "interleaved",
        config.rope_theta,
        config.scale,
        config.window_left(),
        config.softcap,
        config.attention_dropout,
        config.residual_dropout,
        SAVES.index(config.save),
        config.offload is not None,
        _rows(config.rows),
        _State.backend,
    )


# ---------------------------------------------------------------- autograd

DIFFERENTIABLE = 1 + len(WEIGHTS)  # x and the weights
TENSORS = DIFFERENTIABLE + 4  # and cos, sin, cu_seqlens, rng_state
ARGUMENTS = TENSORS + 17
SAVED = 9
FFN_TENSORS = 7


class _Ffn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        ctx.save_for_backward(*arguments[:FFN_TENSORS])
        ctx.numbers = arguments[FFN_TENSORS:]
        return _OPS.blockwise_ffn_forward.default(*arguments)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        need = list(ctx.needs_input_grad[:FFN_TENSORS])
        grads = _OPS.blockwise_ffn_backward.default(grad, *ctx.saved_tensors, *ctx.numbers, need)
        return *grads, None, None


class _TransformerBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        (*inputs, return_kv, deterministic, into, main) = arguments
        y, keys, values, *saved = _OPS.transformer_block_forward.default(*inputs, True, return_kv)
        x = saved[-1] if saved[-1].numel() else inputs[0]  # it may wait on the host
        ctx.save_for_backward(x, *inputs[1:TENSORS], *saved[:-1], saved[-1][:0])
        ctx.numbers, ctx.deterministic = inputs[TENSORS:], deterministic
        ctx.into, ctx.main = into, main
        ctx.mark_non_differentiable(keys, values)
        return y, keys, values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _keys, _values):
        tensors = ctx.saved_tensors
        need = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        arguments = (grad, *tensors[:TENSORS], *ctx.numbers, *tensors[TENSORS:])
        arguments = (*arguments, ctx.deterministic, need)
        if ctx.into:
            grads = _OPS.transformer_block_backward_accumulate.default(
                *arguments, ctx.main, ctx.into
            )
        else:
            grads = _OPS.transformer_block_backward.default(*arguments)
        return *grads, *[None] * (ARGUMENTS - DIFFERENTIABLE + 4)


# ------------------------------------------------------------ fake kernels


@torch.library.register_fake("flashbpt::blockwise_ffn_forward")
def _ffn_forward_fake(x, *_):
    return x.new_empty(x.shape)


@torch.library.register_fake("flashbpt::blockwise_ffn_backward")
def _ffn_backward_fake(grad, *rest):
    tensors, need = rest[:FFN_TENSORS], rest[-1]
    return tuple(
        t.new_empty(t.shape) if wanted and t is not None else None
        for t, wanted in zip(tensors, need, strict=True)
    )


@torch.library.register_fake("flashbpt::transformer_block_forward")
def _block_forward_fake(*arguments):
    x, w = arguments[0], dict(zip(WEIGHTS, arguments[1:DIFFERENTIABLE], strict=True))
    packed = arguments[TENSORS - 2] is not None
    heads, kv_heads = arguments[TENSORS], arguments[TENSORS + 1]
    save, offload = SAVES[arguments[ARGUMENTS - 4]], arguments[ARGUMENTS - 3]
    keep, return_kv = arguments[ARGUMENTS:]
    host = keep and offload and x.device.type == "cuda"
    tokens = x.shape[:-1].numel()
    dim = w["wq"].shape[0] // heads

    def rows(wanted, *sizes, dtype=None, device=None):
        if not wanted:
            return x.new_empty(0)
        return x.new_empty(sizes, dtype=dtype, device=device)

    kv = (*x.shape[:-1], kv_heads, dim)
    lse = (tokens, heads) if packed else (x.shape[0], heads, x.shape[1])
    some, everything = keep and save != "x", keep and save == "all"
    ffn = w["w_up"].shape[0]
    acc = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        x.new_empty(x.shape),
        rows(return_kv, *kv),
        rows(return_kv, *kv),
        rows(some, tokens, heads * dim, device="cpu" if host else None),
        rows(some, *lse, dtype=acc),
        rows(everything, tokens, heads * dim),
        rows(everything, tokens, kv_heads * dim),
        rows(everything, tokens, kv_heads * dim),
        rows(everything, tokens, x.shape[-1]),
        rows(everything and w["w_gate"] is not None, tokens, ffn),
        rows(everything, tokens, ffn),
        rows(host, *x.shape, device="cpu" if host else None),
    )


def _block_backward_fake(grad, *rest):
    need = rest[ARGUMENTS + SAVED + 1]
    return tuple(
        t.new_empty(t.shape) if wanted and t is not None else None
        for t, wanted in zip(rest[:DIFFERENTIABLE], need, strict=True)
    )


@torch.library.register_fake("flashbpt::transformer_block_backward")
def _block_backward_only_fake(*arguments):
    return _block_backward_fake(*arguments)


@torch.library.register_fake("flashbpt::transformer_block_backward_accumulate")
def _block_backward_accumulate_fake(*arguments):
    *rest, _main, into = arguments
    grads = _block_backward_fake(*rest)
    return tuple(None if i - 1 in into else g for i, g in enumerate(grads))


# ------------------------------------------------------------ FLOP formulas


def _products(*weights):
    return sum(2 * w[0] * w[1] for w in weights if w is not None)


@register_flop_formula(_OPS.blockwise_ffn_forward)
def _ffn_flops(x, w_gate, w_up, w_down, *_, out_shape=None, **__):
    return _tokens(x) * _products(w_gate, w_up, w_down)


@register_flop_formula(_OPS.blockwise_ffn_backward)
def _ffn_backward_flops(grad, x, w_gate, w_up, w_down, *_, out_shape=None, **__):
    return _tokens(x) * (2 * _products(w_gate, w_up, w_down) + _products(w_gate, w_up))


def _tokens(shape):
    n = 1
    for size in shape[:-1]:
        n *= size
    return n
