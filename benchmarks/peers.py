"""What flashbpt is measured against, name -> function.

Every function of PEERS takes (query, key, value, is_causal, attn_mask, enable_gqa) with (batch,
heads, length, dim) tensors and returns the output; FlashAttention-3 takes a window too. One of
VARLEN_PEERS takes packed (tokens, heads, dim) tensors, the offsets and lengths of queries and keys,
and causal. A peer that cannot be imported is None here and `null` in the results; one that refuses
a case raises RuntimeError, and is null in that row.
"""

import contextlib
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

Peer = Callable[..., torch.Tensor]

# Bound here, so that a patch put in place later does not measure flashbpt against itself.
_SDPA = F.scaled_dot_product_attention


def sdpa(query, key, value, is_causal=False, attn_mask=None, enable_gqa=False):
    """PyTorch's function with the backend that it chooses itself."""
    return _SDPA(query, key, value, attn_mask=attn_mask, is_causal=is_causal, enable_gqa=enable_gqa)


def flash_sdpa(device: str) -> contextlib.AbstractContextManager:
    """Inside it SDPA is FlashAttention-2 on CUDA; around the timing, as it takes host time."""
    if device != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def _sdpa_with(backend: SDPBackend) -> Peer:
    def peer(query, key, value, is_causal=False, attn_mask=None, enable_gqa=False):
        with sdpa_kernel(backend):
            return sdpa(query, key, value, is_causal, attn_mask, enable_gqa)

    return peer


def _varlen_fa2(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
):
    offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen_attn(query, key, value, *offsets, window_size=(-1, 0 if causal else -1))


def _fa3_forward(query, key, value, **options):
    """FlashAttention-3's forward; of a wheel without a backward."""
    import flash_attn_3._C  # noqa: F401

    scale = query.size(-1) ** -0.5
    out = torch.ops.flash_attn_3.fwd(
        query, key, value, softmax_scale=scale, num_splits=1, **options
    )
    return out[0]


def _fa3(query, key, value, is_causal=False, attn_mask=None, enable_gqa=False, window=(-1, -1)):
    """It takes fewer heads of keys as they are."""
    rows_first = (x.transpose(1, 2) for x in (query, key, value))
    left, right = window
    out = _fa3_forward(
        *rows_first, is_causal=is_causal, window_size_left=left, window_size_right=right
    )
    return out.transpose(1, 2)


def _varlen_fa3(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=False
):
    return _fa3_forward(
        query,
        key,
        value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        is_causal=causal,
    )


def _cuda_only(peer: Peer) -> Peer | None:
    return peer if torch.cuda.is_available() else None


def _installed_fa3(peer: Peer) -> Peer | None:
    return _cuda_only(peer) if importlib.util.find_spec("flash_attn_3") else None


PEERS: dict[str, Peer | None] = {
    "sdpa": sdpa,
    "math": _sdpa_with(SDPBackend.MATH),
    "fa2": _cuda_only(_sdpa_with(SDPBackend.FLASH_ATTENTION)),
    "efficient": _cuda_only(_sdpa_with(SDPBackend.EFFICIENT_ATTENTION)),
    "cudnn": _cuda_only(_sdpa_with(SDPBackend.CUDNN_ATTENTION)),
    "fa3": _installed_fa3(_fa3),
}
VARLEN_PEERS: dict[str, Peer | None] = {
    "fa3": _installed_fa3(_varlen_fa3),
    "fa2": _cuda_only(_varlen_fa2),
}
