"""What flashbpt is measured against: one dictionary, name -> function.

Every function takes (query, key, value, is_causal) with (batch, heads, length, dim) tensors and
returns the output. A peer that cannot be imported is None here and `null` in the results; one that
refuses a case raises RuntimeError, and is null in that row.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

Peer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], torch.Tensor]

# Bound here, so that a patch put in place later does not measure flashbpt against itself.
_SDPA = F.scaled_dot_product_attention


def sdpa(query, key, value, is_causal=False):
    """PyTorch's function with the backend that it chooses itself."""
    return _SDPA(query, key, value, is_causal=is_causal)


def _sdpa_with(backend: SDPBackend) -> Peer:
    def peer(query, key, value, is_causal=False):
        with sdpa_kernel(backend):
            return _SDPA(query, key, value, is_causal=is_causal)

    return peer


def _cuda_only(peer: Peer) -> Peer | None:
    return peer if torch.cuda.is_available() else None


PEERS: dict[str, Peer | None] = {
    "sdpa": sdpa,
    "math": _sdpa_with(SDPBackend.MATH),
    "fa2": _cuda_only(_sdpa_with(SDPBackend.FLASH_ATTENTION)),
    "efficient": _cuda_only(_sdpa_with(SDPBackend.EFFICIENT_ATTENTION)),
    "cudnn": _cuda_only(_sdpa_with(SDPBackend.CUDNN_ATTENTION)),
}
