"""Attention over packed sequences of different lengths."""

import torch

from flashbpt.arguments import autocast, check_dropout, window_limits
from flashbpt.attention import run
from flashbpt.backend import _State


def varlen_attention(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    causal=False,
    dropout_p=0.0,
    scale=None,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    return_lse=False,
    deterministic=None,
):
    """Attention of each packed sequence with itself, or with the keys of the same index.

    Args:
        query: (Tq, Hq, D), any strides; fp32, bf16, fp16 or fp64.
        key: (Tk, Hkv, D) and value: (Tk, Hkv, Dv); query head h reads head h // (Hq / Hkv).
        cu_seqlens_q: (B + 1,) int32 or int64, where each sequence starts and ends in query: from 0,
            not decreasing, at most Tq. Sequences may be empty.
        cu_seqlens_k: the same for key and value; default cu_seqlens_q.
        max_seqlen_q, max_seqlen_k: longest lengths, a hint; None costs nothing.
        causal: lower-right: the last query of a sequence sees its last key.
        alibi_slopes: (Hq,) or (B, Hq), along the same diagonal.
        Everything else as in `flashbpt.attention`.

    Returns:
        (Tq, Hq, Dv) in query's dtype and stride order; with return_lse a pair with the LSE
        (Tq, Hq), fp32 (fp64 for fp64). Rows past the last sequence are 0 with LSE -inf and
        gradients 0, and what they hold is never read.

    Raises RuntimeError for what is not allowed. On the CPU the contents of cu_seqlens are checked
    always, on the GPU after `flashbpt.set_debug_checks(True)`.

    Source: FlashAttention's flash_attn_varlen_func, with dropout keyed by sequence.
    """
    arguments = prepare_varlen(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        dropout_p=dropout_p,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
    )
    out, lse = run(arguments, deterministic)
    return (out, lse) if return_lse else out


def prepare_varlen(
    query,
    key,
    value,
    cu_seqlens_q,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    *,
    causal=False,
    dropout_p=0.0,
    scale=None,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
):
    """The arguments of `varlen_attention` as those of the op."""
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if max_seqlen_k is None and cu_seqlens_k is cu_seqlens_q:
        max_seqlen_k = max_seqlen_q
    packed = query.dim() == key.dim() == 3  # or the op refuses the call
    if packed and (query.is_cpu or _State.debug_checks):
        check = torch.ops.flashbpt.check_cu_seqlens.default
        cu_seqlens_q, cu_seqlens_k = (
            check(cu_seqlens_q, query.shape[0], "cu_seqlens_q"),
            check(cu_seqlens_k, key.shape[0], "cu_seqlens_k"),
        )
    check_dropout(dropout_p)
    query, key, value = autocast(query, key, value)
    left, right = window_limits(window)
    return (
        query,
        key,
        value,
        None,  # mask
        sinks,
        alibi_slopes,
        cu_seqlens_q,
        cu_seqlens_k,
        None,  # rng_state: drawn when the call runs
        max_seqlen_q,
        max_seqlen_k,
        scale,
        causal,
        left,
        right,
        softcap,
        dropout_p,
        0,  # q_offset
        0,  # k_offset
        0,  # batch_offset
        0,  # head_offset
        0,  # total_heads: query's own
        0,  # diagonal: lower-right, sequence by sequence
        _State.backend,
    )


@torch.library.register_fake("flashbpt::check_cu_seqlens")
def _check_cu_seqlens_fake(cu_seqlens, tokens, name):
    return cu_seqlens.new_empty(cu_seqlens.shape)  # fake offsets have no contents to check
