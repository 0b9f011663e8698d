"""The Blockwise Parallel Transformer: a transformer block and its FFN, by blocks of rows."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from flashbpt.arguments import autocast, without_repeats
from flashbpt.attention import accumulation_dtype
from flashbpt.backend import _State
from flashbpt.block_config import ACTIVATIONS, NORMS, SAVES, WEIGHTS, choice, rows_asked
from flashbpt.derivatives import run_backward

_OPS = torch.ops.flashbpt


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
    arguments = autocast(x, w_gate, w_up, w_down, b_gate, b_up, b_down)
    numbers = (choice("activation", activation, ACTIVATIONS), rows_asked(rows))
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in arguments):
        if torch.compiler.is_compiling():
            arguments = without_repeats(arguments)
        return _Ffn.apply(*arguments, *numbers)
    return _OPS.blockwise_ffn_forward.default(*arguments, *numbers)


def transformer_block(x, weights, config, *, cos=None, sin=None, cu_seqlens=None, return_kv=False):
    """A pre-norm causal transformer block, a block of query rows at a time.

        h = x + dropout(attention(rope(norm1(x) Wq^T), ...) Wo^T + bo)
        y = h + dropout(ffn(norm2(h)))

    Keys and values of all tokens are made once; what belongs to queries, and what is as wide as the
    FFN, exists for one block of rows. For the backward x, attention's output and its LSE are kept
    (`config.save`); the rest is computed again, and the gradients of weights, keys and values are
    summed in fp32 (fp64 for fp64).

    Args:
        x: (B, S, H), or packed (T, H) with cu_seqlens; fp32, bf16, fp16 or fp64. Of the weights'
            dtype, or fp32 over weights in bf16 or fp16: the residual stream is then in fp32, as it
            is under autocast, which casts the matrices alone.
        weights: `BlockWeights`, of one dtype; norms and sinks may have another.
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
    x, tensors = _autocast_block(x, weights)
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
        into, main = _main_gradients(weights)
        results = _TransformerBlock.apply(*arguments, return_kv, deterministic, into, main)
        y, keys, values = results[:3]
    else:
        y, keys, values = _OPS.transformer_block_forward.default(*arguments, False, return_kv)[:3]
    return (y, (keys, values)) if return_kv else y


# --------------------------------------------------------------- arguments


def _autocast_block(x, weights):
    """(x, tensors): matrices in autocast's dtype, as it does to linear layers; the residual stream
    stays in fp32, and so do the norms.
    """
    names = [n for n in WEIGHTS if "norm" not in n and n != "sinks"]
    cast = dict(zip(names, autocast(x, *(getattr(weights, n) for n in names))[1:], strict=True))
    if x.dtype.itemsize == 2:
        (x,) = autocast(x)
    return x, [cast.get(n, getattr(weights, n)) for n in WEIGHTS]


def _main_gradients(weights):
    """(indices of weights, the tensors that their gradients are added into)"""
    given = weights.main_grad or {}
    for name, t in given.items():
        weight = getattr(weights, name) if name in WEIGHTS else None
        if weight is None:
            raise RuntimeError(
                f"flashbpt: main_grad was given for {name!r}, which is no weight here"
            )
        acc = accumulation_dtype(weight.dtype)
        if (t.shape, t.dtype, t.device) != (weight.shape, acc, weight.device):
            raise RuntimeError(
                f"flashbpt: main_grad of {name} must be {acc} {tuple(weight.shape)} on "
                f"{weight.device}, got {t.dtype} {tuple(t.shape)} on {t.device}"
            )
    return [WEIGHTS.index(name) for name in given], list(given.values())


def _numbers(config):
    """The op's options after its tensors."""
    return (
        config.heads,
        config.key_heads(),
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
        rows_asked(config.rows),
        _State.backend,
    )


# ---------------------------------------------------------------- autograd

DIFFERENTIABLE = 1 + len(WEIGHTS)  # x and the weights
TENSORS = DIFFERENTIABLE + 4  # and cos, sin, cu_seqlens, rng_state
ARGUMENTS = TENSORS + 17
SAVED = 9
FFN_TENSORS = 7
NO_DOUBLE_BACKWARD = (
    "flashbpt's transformer block and FFN have no double backward; write the layer with torch's "
    "own functions for it"
)


class _Ffn(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return _OPS.blockwise_ffn_forward.default(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:FFN_TENSORS])
        ctx.numbers = inputs[FFN_TENSORS:]

    @staticmethod
    def backward(ctx, grad):
        need = list(ctx.needs_input_grad[:FFN_TENSORS])
        arguments = (grad, *ctx.saved_tensors, *ctx.numbers, need)
        op = _OPS.blockwise_ffn_backward.default
        return *run_backward(op, arguments, NO_DOUBLE_BACKWARD), None, None


class _TransformerBlock(torch.autograd.Function):
    """The op's arguments, then return_kv, deterministic, and what main_grads there are: indices of
    weights and tensors. Results beside y are not differentiable.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        inputs, return_kv = arguments[:ARGUMENTS], arguments[ARGUMENTS]
        return _OPS.transformer_block_forward.default(*inputs, True, return_kv)

    @staticmethod
    def setup_context(ctx, inputs, output):
        saved = output[-SAVED:]
        x = saved[-1] if saved[-1].numel() else inputs[0]  # it may wait on the host
        ctx.save_for_backward(x, *inputs[1:TENSORS], *saved[:-1], saved[-1][:0])
        ctx.numbers = inputs[TENSORS:ARGUMENTS]
        ctx.deterministic, ctx.into, ctx.main = inputs[ARGUMENTS + 1 :]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad, *_):
        tensors = ctx.saved_tensors
        if grad is None:
            return (None,) * (ARGUMENTS + 4)
        need = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        arguments = (grad, *tensors[:TENSORS], *ctx.numbers, *tensors[TENSORS:])
        arguments = (*arguments, ctx.deterministic, need)
        op = _OPS.transformer_block_backward.default
        if ctx.into:
            op = _OPS.transformer_block_backward_accumulate.default
            arguments = (*arguments, ctx.main, ctx.into)
        grads = run_backward(op, arguments, NO_DOUBLE_BACKWARD)
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

    def rows(wanted, *sizes, dtype=w["wq"].dtype, device=None):
        if not wanted:
            return x.new_empty(0)
        return x.new_empty(sizes, dtype=dtype, device=device)

    kv = (*x.shape[:-1], kv_heads, dim)
    lse = (tokens, heads) if packed else (x.shape[0], heads, x.shape[1])
    some, everything = keep and save != "x", keep and save == "all"
    ffn = w["w_up"].shape[0]
    acc = accumulation_dtype(w["wq"].dtype)
    return (
        x.new_empty(x.shape),
        rows(return_kv, *kv),
        rows(return_kv, *kv),
        rows(some, tokens, heads * dim, device="cpu" if host else None),
        rows(some, *lse, dtype=acc),
        rows(everything, tokens, heads * dim),
        rows(everything, tokens, kv_heads * dim),
        rows(everything, tokens, kv_heads * dim),
        rows(everything, tokens, x.shape[-1], dtype=x.dtype),
        rows(everything and w["w_gate"] is not None, tokens, ffn),
        rows(everything, tokens, ffn),
        rows(host, *x.shape, dtype=x.dtype, device="cpu" if host else None),
    )


@torch.library.register_fake("flashbpt::transformer_block_backward")
def _block_backward_fake(grad, *rest):
    need = rest[ARGUMENTS + SAVED + 1]
    x, *weights = rest[:DIFFERENTIABLE]
    x = grad.new_empty(x.shape, dtype=x.dtype)  # the given one may wait on the host
    return tuple(
        t.new_empty(t.shape) if wanted and t is not None else None
        for t, wanted in zip((x, *weights), need, strict=True)
    )


@torch.library.register_fake("flashbpt::transformer_block_backward_accumulate")
def _block_backward_accumulate_fake(*arguments):
    *rest, _main, into = arguments
    grads = _block_backward_fake(*rest)
    return tuple(None if i - 1 in into else g for i, g in enumerate(grads))


# ------------------------------------------------------------ FLOP formulas


def _products(tokens, *weights):
    return sum(2 * tokens * w.shape[0] * w.shape[1] for w in weights if w is not None)


def _tokens(x):
    return x.shape[:-1].numel()


@register_flop_formula(_OPS.blockwise_ffn_forward, get_raw=True)
def _ffn_flops(x, w_gate, w_up, w_down, *_, **__):
    return _products(_tokens(x), w_gate, w_up, w_down)


@register_flop_formula(_OPS.blockwise_ffn_backward, get_raw=True)
def _ffn_backward_flops(grad, x, w_gate, w_up, w_down, *_, **__):
    again = _products(_tokens(x), w_gate, w_up)
    return again + 2 * _products(_tokens(x), w_gate, w_up, w_down)


def _block_products(x, w):
    """(of queries, keys, values and output; of the FFN's hidden columns; of its down projection)"""
    tokens = _tokens(x)
    return (
        _products(tokens, w["wq"], w["wk"], w["wv"], w["wo"]),
        _products(tokens, w["w_gate"], w["w_up"]),
        _products(tokens, w["w_down"]),
    )


def _attention_product(x, w, cu_seqlens):
    """One product of attention with all pairs of rows, masks not discounted (as torch counts)."""
    if cu_seqlens is None:
        pairs = x.shape[0] * x.shape[1] ** 2
    elif cu_seqlens.is_meta or type(cu_seqlens) is not torch.Tensor:
        pairs = x.shape[0] ** 2
    else:
        pairs = int(cu_seqlens.diff().square().sum())
    return 2 * pairs * w["wq"].shape[0]


@register_flop_formula(_OPS.transformer_block_forward, get_raw=True)
def _block_flops(*arguments, **_):
    x, w = arguments[0], dict(zip(WEIGHTS, arguments[1:DIFFERENTIABLE], strict=True))
    attention = _attention_product(x, w, arguments[TENSORS - 2])
    return sum(_block_products(x, w)) + 2 * attention


def _block_backward_flops(grad, *arguments, **_):
    x, w = arguments[0], dict(zip(WEIGHTS, arguments[1:DIFFERENTIABLE], strict=True))
    projections, hidden, down = _block_products(x, w)
    attention = _attention_product(x, w, arguments[TENSORS - 2])
    save = SAVES[arguments[ARGUMENTS - 4]]
    flops = 2 * (projections + hidden + down) + 5 * attention
    if save != "all":
        flops += projections + hidden
    return flops + (2 * attention if save == "x" else 0)


for _op in (_OPS.transformer_block_backward, _OPS.transformer_block_backward_accumulate):
    register_flop_formula(_op, get_raw=True)(_block_backward_flops)
