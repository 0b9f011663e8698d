"""I/O-aware attention for PyTorch: fused, packed and paged attention, merging of partials.

Public names only; each is documented where it is defined.
"""

from flashbpt import _loader

_loader.load()

from flashbpt import kv_cache, nn  # noqa: E402
from flashbpt.attention import attention  # noqa: E402
from flashbpt.backend import KernelChoice, set_debug_checks, use_backend, which_kernel  # noqa: E402
from flashbpt.block_config import (  # noqa: E402
    BlockConfig,
    BlockMemory,
    BlockWeights,
    block_memory,
)
from flashbpt.blockwise import blockwise_ffn, transformer_block  # noqa: E402
from flashbpt.merge import merge_attention_states  # noqa: E402
from flashbpt.paged import (  # noqa: E402
    PageTable,
    append_paged_kv,
    paged_attention,
    shared_prefix_attention,
)
from flashbpt.varlen import varlen_attention  # noqa: E402
from flashbpt.version import __version__  # noqa: E402

__all__ = [
    "BlockConfig",
    "BlockMemory",
    "BlockWeights",
    "KernelChoice",
    "PageTable",
    "__version__",
    "append_paged_kv",
    "attention",
    "block_memory",
    "blockwise_ffn",
    "kv_cache",
    "merge_attention_states",
    "nn",
    "paged_attention",
    "patch_sdpa",
    "set_debug_checks",
    "shared_prefix_attention",
    "transformer_block",
    "use_backend",
    "varlen_attention",
    "which_kernel",
]


def __getattr__(name):
    # Imported at first use: it loads torch.compile's machinery, which takes seconds.
    if name == "patch_sdpa":
        from flashbpt.integrations.sdpa import patch_sdpa

        return patch_sdpa
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
