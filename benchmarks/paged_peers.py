"""What flashbpt's paged attention is measured against, name -> function.

Every function takes a PagedCall, plans and allocates what the peer needs for it, and returns a
function without arguments that computes the output [tokens, Hq, D]. A peer that cannot be imported
is None here and `null` in the results; one that raises for a call is null in that row.

FlashInfer's wrappers plan for the very lengths that they run with, not for the bounds of a captured
graph; the graph of the benchmark holds their run alone.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable

import torch
from paged_case import PagedCall, Prepare, Run, pages_of

# FlashInfer recommends 128 MiB, which its tensor-core decode overflows where it splits the keys of
# 32 query heads to one; SGLang gives it as much as here.
WORKSPACE_BYTES = 512 << 20


def fa3(call: PagedCall) -> Run:
    """FlashAttention-3, its kernels choosing the split."""
    import flash_attn_3._C  # noqa: F401

    run = functools.partial(
        torch.ops.flash_attn_3.fwd,
        call.query.unflatten(0, (len(call.lens), call.rows)),
        call.key_cache,
        call.value_cache,
        page_table=call.block_table,
        seqused_k=call.seq_lens(),
        softmax_scale=call.query.shape[2] ** -0.5,
        is_causal=call.rows > 1,
        num_splits=0,
    )
    return lambda: run()[0].flatten(0, 1)


def flashinfer_decode(call: PagedCall, use_tensor_cores: bool) -> Run:
    import flashinfer

    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace(call.query.device), "NHD", use_tensor_cores=use_tensor_cores
    )
    wrapper.plan(*csr(call), *shape(call), **dtypes(call))
    return lambda: wrapper.run(call.query, (call.key_cache, call.value_cache))


def flashinfer_prefill(call: PagedCall, backend: str) -> Run:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        workspace(call.query.device), "NHD", backend=backend
    )
    rows = call.cu_seqlens_q().cpu()
    wrapper.plan(rows, *csr(call), *shape(call), causal=True, **dtypes(call))
    return lambda: wrapper.run(call.query, (call.key_cache, call.value_cache))


def flashinfer_cascade(call: PagedCall) -> Run:
    """The prefix as one request of all rows, then each request's own keys."""
    import flashinfer

    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace(call.query.device), "NHD")
    prefix = (
        torch.tensor([0, call.prefix_pages], dtype=torch.int32),
        call.block_table[0, : call.prefix_pages].cpu(),
        torch.tensor([call.page_size], dtype=torch.int32),
    )
    own = csr(call, first=call.prefix_pages)
    rows = call.cu_seqlens_q().cpu()
    levels = zip((rows[[0, -1]], *prefix), (rows, *own))
    wrapper.plan(*map(list, levels), *shape(call), **dtypes(call))
    return lambda: wrapper.run(call.query, (call.key_cache, call.value_cache))


@functools.cache
def workspace(device: torch.device) -> torch.Tensor:
    """What all of FlashInfer's wrappers share: they run one after the other."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def csr(call: PagedCall, first: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The table from column `first` on as FlashInfer takes it, on the host, where it plans."""
    pages = pages_of(call.lens, call.page_size)
    last = [n - (count - 1) * call.page_size for n, count in zip(call.lens, pages)]
    indices = [row[first:count] for row, count in zip(call.block_table.cpu(), pages)]
    indptr = [0, *itertools.accumulate(map(len, indices))]
    integers = functools.partial(torch.tensor, dtype=torch.int32)
    return integers(indptr), torch.cat(indices), integers(last)


def shape(call: PagedCall) -> tuple[int, int, int, int]:
    _, heads_q, head_dim = call.query.shape
    return heads_q, call.key_cache.shape[2], head_dim, call.page_size


def dtypes(call: PagedCall) -> dict[str, torch.dtype]:
    return {"q_data_type": call.query.dtype, "kv_data_type": call.key_cache.dtype}


def installed() -> dict[str, Prepare | None]:
    """The peers whose packages are here, and a GPU for them; they are loaded at the first call."""

    def peer(module: str, function: Callable, **options) -> Prepare | None:
        if not torch.cuda.is_available() or importlib.util.find_spec(module) is None:
            return None
        return functools.partial(function, **options)

    flashinfer = functools.partial(peer, "flashinfer")
    return {
        "fa3": peer("flash_attn_3", fa3),
        "flashinfer": flashinfer(flashinfer_decode, use_tensor_cores=False),
        "flashinfer_tc": flashinfer(flashinfer_decode, use_tensor_cores=True),
        "flashinfer_fa2": flashinfer(flashinfer_prefill, backend="fa2"),
        "cascade": flashinfer(flashinfer_cascade),
        "flat": flashinfer(flashinfer_decode, use_tensor_cores=True),
    }


PAGED_PEERS = installed()


def paged_peers(*names: str) -> dict[str, Prepare | None]:
    return {name: PAGED_PEERS[name] for name in names}
