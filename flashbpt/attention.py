"""Dense attention: `attention` and the op behind it (autograd, fake kernels, FLOP formulas)."""

import torch
from torch.utils.flop_counter import register_flop_formula

from flashbpt.arguments import (
    autocast,
    broadcast_lead,
    check_dropout,
    four_dims,
    mask_to_four_dims,
    to_four_dims,
    window_limits,
    without_expansion,
    without_repeats,
)
from flashbpt.backend import _State
from flashbpt.derivatives import run_backward

_OPS = torch.ops.flashbpt
UPPER_LEFT, LOWER_RIGHT = "upper-left", "lower-right"


def attention(
    query,
    key,
    value,
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
    causal_align=UPPER_LEFT,
    return_lse=False,
    deterministic=None,
):
    """Scaled dot product attention, softmax(scale * Q K^T + terms) V, without the score matrix.

    Takes what torch.nn.functional.scaled_dot_product_attention takes and means the same by it; the
    keyword-only arguments are further. Terms apply in this order: scale, softcap, ALiBi, additive
    mask, then boolean mask, causal and window, then the sink.

    Args:
        query: (..., Hq, Lq, D), rank 2 or more, any strides; fp32, bf16, fp16 or fp64.
        key: (..., Hkv, Lk, D), leading dimensions broadcast against query's. Same dtype.
        value: (..., Hkv, Lk, Dv).
        attn_mask: broadcasts to (..., Hq, Lq, Lk). Boolean: True takes part. fp32 or query's dtype:
            added to the scores. Excludes is_causal.
        dropout_p: probability in [0, 1] of dropping a weight after the softmax, from the generator
            of torch; the same mask on every backend for one state.
        is_causal: query i sees the keys up to i (causal_align="upper-left"), or the last query the
            last key ("lower-right").
        scale: factor of Q K^T, default 1 / sqrt(D). 0 and negative values are values.
        enable_gqa: query head h reads key head h // (Hq / Hkv), for any integer ratio.
        window: (left, right), how many further keys are seen on each side of the aligned diagonal;
            -1 for no limit. With or without is_causal.
        softcap: scores become softcap * tanh(score / softcap); 0 for none.
        alibi_slopes: (Hq,) or (B, Hq); adds -slope * |q + diagonal - k|, the diagonal that of
            causal_align.
        sinks: (Hq,), one logit a head that joins the softmax's denominator and adds no value.
        causal_align: "upper-left" or "lower-right".
        return_lse: also return the log-sum-exp of the scores.
        deterministic: True for gradients that are bitwise equal over runs, False for the faster
            backward, None to follow torch.use_deterministic_algorithms. On a GPU the faster one
            adds up the query's gradient (and, for few heads, key's and value's) in whatever order
            blocks finish; the other gives them turns. The CPU is deterministic always.

    Returns:
        (..., Hq, Lq, Dv) in query's dtype and stride order; with return_lse a pair with the LSE
        (..., Hq, Lq): natural logarithm, fp32 (fp64 for fp64), sink included. A row without keys is
        0 with gradients 0 and LSE -inf, or the sink where there is one.

    Gradients flow to query, key, value, an additive mask (summed to its own shape), sinks and
    alibi_slopes, and through the returned LSE. There is no double backward.

    Precision: sums are kept in fp32 (fp64 for fp64). fp32 on a GPU has fp32's accuracy, or single
    TF32 products where torch allows them for matrix products (set_float32_matmul_precision,
    torch.backends.cuda.matmul) when the forward or the backward runs.

    Memory: nothing of the size Lq * Lk is kept. On a GPU the backward takes query's gradient in
    fp32, and for the gradient of a mask one fp32 tensor of the mask's shape. fp64 on a GPU, for
    gradcheck, holds all scores.

    Raises:
        RuntimeError: for shapes, dtypes, devices and values that are not allowed, in a sentence,
            and where no kernel serves the call; nothing falls back to another library.
        ValueError: for a malformed window or causal_align.

    Sources: FlashAttention (arXiv 2205.14135), FlashAttention-2 (2307.08691).
    """
    arguments, lead = prepare_attention(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        window,
        softcap,
        alibi_slopes,
        sinks,
        causal_align,
    )
    out, lse = run(arguments, deterministic)
    if lead is not None:
        out = out.reshape(*lead, *out.shape[-2:])
        lse = lse.reshape(*lead, lse.shape[-1])
    return (out, lse) if return_lse else out


def prepare_attention(
    query,
    key,
    value,
    attn_mask=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    enable_gqa=False,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    causal_align=UPPER_LEFT,
):
    """The arguments of `attention` as those of the op: four dimensions, one dtype, plain numbers.

    Returns them and the leading dimensions of the output, None where they are query's own.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError(
            "flashbpt: Explicit attn_mask should not be set when is_causal=True, got a mask of "
            f"shape {tuple(attn_mask.shape)}; give one of the two"
        )
    check_dropout(dropout_p)
    query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    lead = None
    if not four_dims(query, key, value, enable_gqa):
        lead = broadcast_lead(query, key, value, enable_gqa)
        query, key, value, attn_mask = to_four_dims(query, key, value, attn_mask, enable_gqa)
    if attn_mask is not None and attn_mask.dim() != 4:
        attn_mask = mask_to_four_dims(attn_mask, query.dim())
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = without_expansion(attn_mask, (*query.shape[:3], key.shape[2]))
    if causal_align == UPPER_LEFT:
        diagonal = 0
    elif causal_align == LOWER_RIGHT:
        diagonal = key.shape[2] - query.shape[2]
    else:
        raise ValueError(
            f"causal_align must be {UPPER_LEFT!r} or {LOWER_RIGHT!r}, got {causal_align!r}"
        )
    left, right = window_limits(window)
    return (
        query,
        key,
        value,
        attn_mask,
        sinks,
        alibi_slopes,
        None,  # cu_seqlens_q
        None,  # cu_seqlens_k
        None,  # rng_state: drawn when the call runs
        None,  # max_seqlen_q
        None,  # max_seqlen_k
        scale,
        is_causal,
        left,
        right,
        softcap,
        dropout_p,
        0,  # q_offset
        0,  # k_offset
        0,  # batch_offset
        0,  # head_offset
        0,  # total_heads: query's own
        diagonal,
        _State.backend,
    ), lead


def run(arguments, deterministic=None):
    """(out, lse) of the op, through autograd where an input wants a gradient."""
    if arguments[DROPOUT_P] > 0.0:
        arguments = with_dropout_state(arguments)
    transforms = not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()
    if transforms or (torch.is_grad_enabled() and wants_grad(*arguments[:DIFFERENTIABLE])):
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        if torch.compiler.is_compiling():
            tensors = without_repeats(arguments[:TENSORS])
            return _Attention.apply(*tensors, *arguments[TENSORS:], deterministic)[:2]
        if transforms:
            return _Attention.apply(*arguments, deterministic)[:2]
        rest = (*arguments[DIFFERENTIABLE:], deterministic)
        return _EagerAttention.apply(*arguments[:DIFFERENTIABLE], rest)
    return _OPS.attention_forward.default(*arguments)[:2]


def with_dropout_state(arguments):
    """The same with a state from torch's generator, which a refused call leaves alone."""
    if not torch.compiler.is_compiling():
        kernel = _OPS.attention_kernel.default(*arguments, False)  # refuses what is not allowed
        if kernel.startswith("none"):
            return arguments  # for the op to refuse
    state = _OPS.draw_rng_state.default(arguments[0], 4)
    return *arguments[:RNG_STATE], state, *arguments[RNG_STATE + 1 :]


def wants_grad(q, k, v, mask, sinks, alibi_slopes):
    return (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (mask is not None and mask.requires_grad)
        or (sinks is not None and sinks.requires_grad)
        or (alibi_slopes is not None and alibi_slopes.requires_grad)
    )


# ---------------------------------------------------------------- autograd

# Arguments of attention_forward: tensors that may want a gradient come first, then tensors that do
# not, then numbers.
DIFFERENTIABLE = 6  # q, k, v, mask, sinks, alibi_slopes
TENSORS = 9  # and cu_seqlens_q, cu_seqlens_k, rng_state
RNG_STATE = 8
DROPOUT_P = 16
ARGUMENTS = 24
NO_DOUBLE_BACKWARD = (
    "flashbpt has no double backward; use "
    "torch.nn.functional.scaled_dot_product_attention under "
    "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) for it"
)


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments):
        return _OPS.attention_forward.default(*arguments[:ARGUMENTS])

    @staticmethod
    def setup_context(ctx, inputs, output):
        save_for_backward(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])

    @staticmethod
    def backward(ctx, grad_out, grad_lse, *_):
        grads = gradients(ctx, grad_out, grad_lse)
        return *grads, *[None] * (ARGUMENTS + 1 - DIFFERENTIABLE)


class _EagerAttention(torch.autograd.Function):
    """_Attention outside of transforms and compilation.

    This form and few arguments take a third of the host time; the results are the same.
    """

    @staticmethod
    def forward(ctx, q, k, v, mask, sinks, alibi_slopes, rest):
        inputs = (q, k, v, mask, sinks, alibi_slopes, *rest)
        output = _Attention.forward(*inputs)
        save_for_backward(ctx, inputs, output)
        return output[:2]

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        return *gradients(ctx, grad_out, grad_lse), None


def save_for_backward(ctx, inputs, output):
    # lse_lo and mask_tiles are empty where no mask asked for them.
    extra = output[2:] if inputs[3] is not None else (None, None)
    ctx.save_for_backward(*inputs[:TENSORS], *output[:2], *extra)
    ctx.options = inputs[TENSORS:]
    ctx.set_materialize_grads(False)


def gradients(ctx, grad_out, grad_lse):
    """Of q, k, v, mask, sinks and alibi_slopes; None for what does not need one."""
    saved = ctx.saved_tensors
    q, k, v, *tensors = saved[:TENSORS]
    out, lse, lse_lo, mask_tiles = saved[TENSORS:]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    arguments = (grad_out, grad_lse, q, k, v, out, lse, lse_lo, mask_tiles, *tensors)
    arguments = (*arguments, *ctx.options, list(ctx.needs_input_grad[:DIFFERENTIABLE]))
    return run_backward(_OPS.attention_backward.default, arguments, NO_DOUBLE_BACKWARD)


# ------------------------------------------------------------ fake kernels


TENSOR_NAMES = (
    "query key value attn_mask sinks alibi_slopes cu_seqlens_q cu_seqlens_k rng_state "
    "grad_out grad_lse out lse lse_lo mask_tiles dk dv"
).split()


def check_devices(query, *others):
    """What the kernels check; a tensor on meta among others comes here instead of there.

    others: tensors or None, in the order of TENSOR_NAMES after query.
    """
    for name, t in zip(TENSOR_NAMES[1:], others, strict=False):
        if t is not None and t.device != query.device:
            raise RuntimeError(
                "flashbpt: Expected query, key, value and all other tensors to have the same "
                f"device type, but query is on {query.device} and {name} on {t.device}"
            )


def empty_in_stride_order(like, sizes, dtype=None):
    """[sizes] with the dimensions in the stride order of `like`, the last one innermost."""
    order = list(range(like.dim()))
    strides = like.stride()
    if not any(s == 0 and n > 1 for s, n in zip(strides, like.shape, strict=True)):
        order = [*sorted(order[:-1], key=lambda d: -strides[d]), order[-1]]
    step, out = 1, [0] * len(order)
    for d in reversed(order):
        out[d] = step
        step = step * max(sizes[d], 1)
    return torch.empty_strided(sizes, out, dtype=dtype or like.dtype, device=like.device)


def accumulation_dtype(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_additive(mask):
    return mask is not None and mask.dtype != torch.bool


@torch.library.register_fake("flashbpt::attention_forward")
def _attention_forward_fake(q, k, v, mask, *rest):
    check_devices(q, k, v, mask, *rest[: TENSORS - 4])
    out = empty_in_stride_order(q, (*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty(q.shape[:-1], dtype=accumulation_dtype(q.dtype))
    lse_lo = torch.empty_like(lse) if is_additive(mask) else lse.new_empty(0)
    tiles = 0  # as MaskTiles in csrc/sm80/attn_params.h says
    if mask is not None and mask.dtype == torch.bool and q.device.type == "cuda":
        tiles = (*mask.shape[:2], (mask.shape[2] + 63) // 64, (mask.shape[3] + 15) // 16)
    return out, lse, lse_lo, q.new_empty(tiles, dtype=torch.uint8)


def backward_fake(saved, options, need, *accumulators):
    """(dq, dmask, dsinks, dalibi), None where not needed."""
    grad_out, grad_lse, q, k, v, *others = saved
    check_devices(q, k, v, *options[: TENSORS - 3], grad_out, grad_lse, *others, *accumulators)
    mask, sinks, alibi_slopes = options[:3]

    def like(wanted, t):
        return t.new_empty(t.shape) if wanted and t is not None else None

    return (
        empty_in_stride_order(q, q.shape) if need[0] else None,
        like(need[3] and is_additive(mask), mask),
        like(need[4], sinks),
        like(need[5], alibi_slopes),
    )


SAVED = 9  # tensors before the options in the schemas of the backwards


@torch.library.register_fake("flashbpt::attention_backward")
def _attention_backward_fake(*arguments):
    saved, (*options, _deterministic, need) = arguments[:SAVED], arguments[SAVED:]
    dq, dmask, dsinks, dalibi = backward_fake(saved, options, need)
    k, v = saved[3:5]
    dk = empty_in_stride_order(k, k.shape) if need[1] else None
    dv = empty_in_stride_order(v, v.shape) if need[2] else None
    return dq, dk, dv, dmask, dsinks, dalibi


@torch.library.register_fake("flashbpt::attention_backward_accumulate")
def _attention_backward_accumulate_fake(*arguments):
    saved, (*options, _deterministic, need, dk, dv) = arguments[:SAVED], arguments[SAVED:]
    return backward_fake(saved, options, need, dk, dv)


@torch.library.register_fake("flashbpt::draw_rng_state")
def _draw_rng_state_fake(like, increment):
    return like.new_empty(2, dtype=torch.int64)


@torch.library.register_fake("flashbpt::dropout_mask")
def _dropout_mask_fake(rng_state, p, sizes, offsets):
    return rng_state.new_empty(sizes, dtype=torch.bool)


# ------------------------------------------------------------ FLOP formulas


def scores_of(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    """How many scores a call computes, masks not discounted (as torch counts SDPA)."""
    if cu_seqlens_q is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    if type(cu_seqlens_q) is torch.Tensor and not cu_seqlens_q.is_meta:
        return q.shape[1] * int((cu_seqlens_q.diff() * cu_seqlens_k.diff()).sum())
    if max_seqlen_q is not None and max_seqlen_k is not None:
        return q.shape[1] * (cu_seqlens_q.shape[0] - 1) * max_seqlen_q * max_seqlen_k
    return q.shape[1] * q.shape[0] * k.shape[0]


@register_flop_formula(_OPS.attention_forward, get_raw=True)
def attention_flops(q, k, v, mask, sinks, alibi, cu_q, cu_k, rng, max_q, max_k, *_, **__):
    return 2 * scores_of(q, k, cu_q, cu_k, max_q, max_k) * (q.shape[-1] + v.shape[-1])


@register_flop_formula(_OPS.attention_backward, get_raw=True)
def attention_backward_flops(
    grad_out, grad_lse, q, k, v, out, lse, lse_lo, tiles, mask, sinks, alibi, *options, **__
):
    cu_q, cu_k, _, max_q, max_k = options[:5]
    return 2 * scores_of(q, k, cu_q, cu_k, max_q, max_k) * (3 * q.shape[-1] + 2 * v.shape[-1])


register_flop_formula(_OPS.attention_backward_accumulate, get_raw=True)(attention_backward_flops)
