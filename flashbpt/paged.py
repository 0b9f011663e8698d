"""Attention over paged KV caches: decode, chunked prefill, append, shared prefixes."""

import functools

import torch

from flashbpt.arguments import window_limits
from flashbpt.attention import accumulation_dtype
from flashbpt.backend import _State
from flashbpt.merge import merge_attention_states


class PageTable:
    """Where the keys of each request lie in a cache (pages, page_size, Hkv, D).

    One of three forms, each with a constructor; a plain block table may stand wherever a PageTable
    is taken. Integers are int32 or int64, on the cache's device. Entries past the used ones are
    never read and may hold anything.
    """

    __slots__ = ("entries", "indptr", "last_page_len", "page_size", "rows", "slots")

    def __init__(self, entries, *, rows=None, indptr=None, last_page_len=None, slots, page_size):
        self.entries = entries
        self.rows = rows
        self.indptr = indptr
        self.last_page_len = last_page_len
        self.slots = slots
        self.page_size = page_size

    @classmethod
    def from_block_table(cls, table, page_size):
        """table: (B, max_pages), pages of each request in order; rows may be strided.

        Source: vLLM's PagedAttention (Kwon et al., SOSP 2023), FlashAttention's page_table.
        """
        return cls(table, slots=False, page_size=page_size)

    @classmethod
    def from_token_table(cls, req_to_token, req_pool_indices):
        """req_to_token: (R, max_tokens), the slot page * page_size + offset of each token;
        req_pool_indices: (B,), the row of each request.

        Source: SGLang's RadixAttention (Zheng et al., 2024).
        """
        return cls(req_to_token, rows=req_pool_indices, slots=True, page_size=None)

    @classmethod
    def from_csr(cls, indptr, indices, last_page_len):
        """indptr: (B + 1,), indices: pages of all requests, last_page_len: (B,), 1 to page_size
        where a request has pages. The lengths follow from it: seq_lens may be None.

        Source: FlashInfer (Ye et al., arXiv:2501.01005).
        """
        return cls(indices, indptr=indptr, last_page_len=last_page_len, slots=False, page_size=None)

    @property
    def batch(self):
        if self.indptr is not None:
            return self.indptr.shape[0] - 1
        return (self.entries if self.rows is None else self.rows).shape[0]


def page_table(table, key_cache):
    """The table as a PageTable that fits the cache."""
    if not isinstance(table, PageTable):
        table = PageTable.from_block_table(table, key_cache.shape[1])
    if table.page_size not in (None, key_cache.shape[1]):
        raise RuntimeError(
            f"flashbpt: the page table is of pages of {table.page_size} tokens, but the pages of "
            f"key_cache {tuple(key_cache.shape)} have {key_cache.shape[1]}"
        )
    return table


def paged_attention(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    *,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    causal=True,
    scale=None,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    tree_mask=None,
    key_scale=None,
    value_scale=None,
    return_lse=False,
    out=None,
):
    """Attention of the newest rows of each request with its keys in a paged cache.

    Decode (one row a request), speculative decoding (a few), chunked prefill (many) and any mixture
    of them in one call. Lengths stay on the device: nothing is planned on the host, and a captured
    CUDA graph replays with other lengths and tables. For inference: no gradients.

    Args:
        query: (tokens, Hq, D), fp32, bf16, fp16 or fp64; one copy where its last stride is not 1.
        key_cache: (pages, page_size, Hkv, D) and value_cache: (pages, page_size, Hkv, Dv), any
            strides with unit last stride (both layouts, packed pairs, separate tensors), any page
            size; query's dtype, float8_e4m3fn or float8_e5m2 (on GPUs query is then multiplied
            as fp16). Query head h reads kv head h // (Hq / Hkv). What slots outside the used ones
            hold never matters.
        block_table: (B, max_pages) int32 or int64, or a `PageTable`.
        seq_lens: (B,) int32 or int64: keys of each request, those of its rows in query included
            (append them first). None with a CSR table.
        cu_seqlens_q: (B + 1,) int32 or int64, where the rows of each request start and end in
            query; without it every request has one row. Requests may have none.
        max_seqlen_q: rows of a request at most, a hint; None costs nothing.
        causal: lower-right: the last row of a request sees its last key.
        scale: default 1 / sqrt(D).
        window: (left, right): further keys on each side of a row's own, -1 no limit. Pages outside
            are not read.
        softcap: scores become softcap * tanh(score / softcap); 0 none.
        alibi_slopes: (Hq,) or (B, Hq); the term -slope * distance.
        sinks: (Hq,), a logit a head that joins the softmax denominator.
        tree_mask: bool, the requests' (n, n) squares one after the other, n the rows of a request:
            which of the newest n keys each row sees, instead of causal. Older keys are seen.
        key_scale, value_scale: fp32, a scalar or (Hkv,) on the device: what an element of the cache
            stands for is itself times this.
        out: (tokens, Hq, Dv) to write to.

    Returns:
        (tokens, Hq, Dv) in query's dtype; with return_lse a pair with the LSE (tokens, Hq), natural
        logarithm, fp32 (fp64 for fp64), sink included. Rows without keys and rows past the last
        request are 0 with LSE -inf, or the sink's.

    Raises RuntimeError for what is not allowed. What tables, lengths and cu_seqlens_q hold is
    checked on the CPU always, on the GPU after `flashbpt.set_debug_checks(True)`.

    Source: PagedAttention (Kwon et al., SOSP 2023), FlashInfer (Ye et al., arXiv:2501.01005).
    """
    arguments = prepare_paged(
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        tree_mask=tree_mask,
        key_scale=key_scale,
        value_scale=value_scale,
    )
    if _State.debug_checks and not query.is_cpu:
        torch.ops.flashbpt.check_paged_attention.default(*arguments)
    if out is None:
        out, lse = torch.ops.flashbpt.paged_attention.default(*arguments)
    else:
        lse = torch.ops.flashbpt.paged_attention_out.default(*arguments, out)
    return (out, lse) if return_lse else out


def prepare_paged(
    query,
    key_cache,
    value_cache,
    block_table,
    seq_lens,
    *,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    causal=True,
    scale=None,
    window=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    tree_mask=None,
    key_scale=None,
    value_scale=None,
):
    """The arguments of the op for those of `paged_attention`."""
    table = page_table(block_table, key_cache)
    left, right = window_limits(window)
    return (
        query,
        key_cache,
        value_cache,
        table.entries,
        table.rows,
        table.indptr,
        table.last_page_len,
        table.slots,
        seq_lens,
        cu_seqlens_q,
        tree_mask,
        alibi_slopes,
        sinks,
        key_scale,
        value_scale,
        max_seqlen_q,
        scale,
        causal,
        left,
        right,
        softcap,
        _State.backend,
    )


@torch.library.register_fake("flashbpt::paged_attention")
def _paged_attention_fake(q, key_cache, value_cache, *options):
    out = q.new_empty(*q.shape[:2], value_cache.shape[3])
    return out, _fake_lse(q)


@torch.library.register_fake("flashbpt::check_paged_attention")
def _check_paged_attention_fake(*arguments):
    return None  # fake tables have no contents


@torch.library.register_fake("flashbpt::paged_attention_out")
def _paged_attention_out_fake(q, *options):
    return _fake_lse(q)


def _fake_lse(q):
    return q.new_empty(q.shape[:2], dtype=accumulation_dtype(q.dtype))


def append_paged_kv(
    key,
    value,
    key_cache,
    value_cache,
    slot_mapping,
    *,
    cos=None,
    sin=None,
    positions=None,
    interleaved=False,
    key_scale=None,
    value_scale=None,
):
    """Writes new keys and values into a paged cache, in place.

    Args:
        key: (tokens, Hkv, D) and value: (tokens, Hkv, Dv); fp32, bf16, fp16 or fp64.
        key_cache: (pages, page_size, Hkv, D) and value_cache: (pages, page_size, Hkv, Dv), as in
            `paged_attention`; key's dtype or fp8.
        slot_mapping: (tokens,) int32 or int64: token i goes to offset slot % page_size of page
            slot // page_size; negative skips it.
        cos, sin: (positions, R / 2): rotary embedding of the first R columns of each key on the
            way, as pairs (i, i + R / 2), or (2 i, 2 i + 1) with interleaved.
        positions: (tokens,) int32 or int64, the row of cos and sin of each token; None: its own.
        key_scale, value_scale: fp32, a scalar or (Hkv,) on the device: divided by before an
            element is stored. fp8 keeps its largest number where one is larger.

    Raises RuntimeError for what is not allowed; then nothing is written.

    Source: vLLM's reshape_and_cache, RoFormer (Su et al., arXiv:2104.09864).
    """
    if _State.debug_checks and not key.is_cpu:
        slots = key_cache.shape[:2].numel()
        torch.ops.flashbpt.check_slot_mapping.default(slot_mapping, slots)
    torch.ops.flashbpt.append_paged_kv.default(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        cos,
        sin,
        positions,
        interleaved,
        key_scale,
        value_scale,
    )


@torch.library.register_fake("flashbpt::check_slot_mapping")
def _check_slot_mapping_fake(slot_mapping, slots):
    return None  # a fake mapping has no contents


@torch.library.register_fake("flashbpt::append_paged_kv")
def _append_paged_kv_fake(*arguments):
    return None


def shared_prefix_attention(
    query,
    key_cache,
    value_cache,
    levels,
    *,
    cu_seqlens_q=None,
    causal=True,
    scale=None,
    window=None,
    softcap=0.0,
    return_lse=False,
):
    """Attention of requests that share prefixes, each prefix read once.

    Args:
        query, key_cache, value_cache, cu_seqlens_q, causal, scale, window, softcap, return_lse: as
            in `paged_attention`.
        levels: list of (table, seq_lens, group_indptr), the widest prefix first, the requests' own
            keys last. Row g of a level's table (a block table or a `PageTable`) holds the keys that
            the requests [group_indptr[g], group_indptr[g + 1]) have in common there, seq_lens[g] of
            them; group_indptr: int32 or int64, from 0 to the number of requests. The last level has
            a row a request, and None for group_indptr; with causal it must hold the keys of the
            request's own rows at least.

    Returns as `paged_attention` over the keys of all levels, one after the other.

    Source: FlashInfer's cascade attention (Ye et al., arXiv:2501.01005), Hydragen (Juravsky et al.,
    arXiv:2402.05099).
    """
    if not levels:
        raise RuntimeError("flashbpt: levels is empty; the requests' own keys are the last level")
    *prefixes, (own_table, own_lens, own_groups) = levels
    if own_groups is not None:
        raise RuntimeError(
            "flashbpt: the last level holds each request's own keys and takes no group_indptr, got "
            f"{tuple(own_groups.shape)}"
        )
    attend = functools.partial(
        paged_attention,
        query,
        key_cache,
        value_cache,
        scale=scale,
        softcap=softcap,
        return_lse=True,
    )
    own = {"cu_seqlens_q": cu_seqlens_q, "causal": causal, "window": window}
    if window is not None and prefixes:
        # How far a prefix's keys are from a row depends on the row's request.
        out, lse = attend(*flat_table(levels, key_cache), **own)
    else:
        states = []
        for table, lens, groups in prefixes:
            rows = groups if cu_seqlens_q is None else cu_seqlens_q[groups.long()]
            states.append(attend(table, lens, cu_seqlens_q=rows, causal=False))
        states.append(attend(own_table, own_lens, **own))
        out, lse = merge_attention_states(*zip(*states, strict=True)) if prefixes else states[0]
    return (out, lse) if return_lse else out


def flat_table(levels, key_cache):
    """The keys of all levels of each request as one token table, and their numbers (B,)."""
    page_size = key_cache.shape[1]
    tables = [page_table(table, key_cache) for table, _, _ in levels]
    batch = tables[-1].batch
    request = torch.arange(batch, device=key_cache.device)
    parts = []
    for table, (_, lens, groups) in zip(tables, levels, strict=True):
        row = request
        if groups is not None:
            row = torch.searchsorted(groups.long().contiguous(), request, right=True) - 1
        if lens is None:
            lens = lengths(table, page_size)
        if groups is not None and not lens.shape[0]:
            continue  # nobody shares anything here
        # A row past the groups has no prefix here.
        there = row < lens.shape[0]
        row = row.clamp(max=max(lens.shape[0] - 1, 0))
        parts.append((slots_of(table, row, page_size), torch.where(there, lens.long()[row], 0)))
    ends = torch.stack([n for _, n in parts]).cumsum(0)
    width = sum(slots.shape[1] for slots, _ in parts)
    column = torch.arange(width, device=key_cache.device)
    flat = torch.zeros(batch, width, dtype=torch.int64, device=key_cache.device)
    for (slots, n), end in zip(parts, ends, strict=True):
        begin = (end - n)[:, None]
        inside = (column >= begin) & (column < end[:, None])
        at = (column - begin).clamp(0, max(slots.shape[1] - 1, 0))
        if slots.shape[1]:
            flat = torch.where(inside, slots.gather(1, at), flat)
    return PageTable.from_token_table(flat, request), ends[-1]


def lengths(table, page_size):
    """Keys of each request of a CSR table."""
    pages = table.indptr.diff()
    return torch.where(pages > 0, (pages - 1) * page_size + table.last_page_len, 0)


def slots_of(table, row, page_size):
    """(len(row), width): slots of the keys of the given rows, whatever lies past their ends."""
    if table.indptr is not None:
        first = table.indptr.long()[row][:, None]
        total = table.entries.shape[0]
        column = torch.arange(total, device=row.device)
        entries = table.entries.long()[(first + column).clamp(max=max(total - 1, 0))]
    else:
        entries = table.entries[row if table.rows is None else table.rows.long()[row]].long()
    if table.slots:
        return entries
    offset = torch.arange(page_size, device=row.device)
    return (entries[:, :, None] * page_size + offset).flatten(1)
