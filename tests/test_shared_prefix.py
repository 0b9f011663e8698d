"""Shared prefixes: as attention over each request's whole chain of keys."""

from dataclasses import dataclass

import pytest
import reference
import torch
from cases import cumulative
from compare import assert_close
from paged_cases import DTYPES, Call, Case

import flashbpt
from flashbpt import PageTable


@dataclass(frozen=True)
class Prefix:
    groups: tuple = (2, 3, 0, 1)  # requests that share a prefix
    prefix: tuple = (20, 7, 9, 0)
    own: tuple = (5, 0, 17, 3, 40, 6)
    rows: tuple | None = None
    common: int | None = None  # keys before, shared by all requests
    window: tuple | None = None
    softcap: float = 0.0
    causal: bool = True
    table: str = "block"


PREFIXES = [
    Prefix(),
    Prefix(rows=(5, 0, 2, 3, 9, 1)),
    Prefix(rows=(1, 0, 2, 3, 9, 1), softcap=5.0),
    Prefix(common=30),
    Prefix(common=30, rows=(5, 0, 2, 3, 9, 1), table="csr"),
    Prefix(common=30, rows=(5, 0, 2, 3, 9, 1), window=(12, -1)),
    Prefix(rows=(5, 0, 2, 3, 9, 1), window=(25, -1), table="csr"),
    Prefix(rows=(1, 1, 2, 3, 9, 1), causal=False, table="token"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", PREFIXES, ids=lambda c: str(c)[7:-1].replace(" ", ""))
def test_shared_prefix(device, case, dtype):
    size, heads, dim = 4, 4, 32
    pools = (
        [case.prefix, case.own] if case.common is None else [(case.common,), case.prefix, case.own]
    )
    lens = [n for pool in pools for n in pool]
    call = Call(Case(lens=tuple(lens), page_size=size, dim=dim, dtype=dtype), "cpu")
    rows = case.rows or (1,) * len(case.own)
    query = torch.randn(sum(rows), heads, dim).to(DTYPES[dtype])
    levels, at, slots = [], 0, []
    for pool in pools:
        some = call.slots[at : at + len(pool)]
        slots.append(some)
        pages = [s[::size] // size for s in some]
        if case.table == "csr":
            last = torch.tensor([(n - 1) % size + 1 for n in pool], device=device)
            counts = cumulative([len(p) for p in pages], torch.int64, device)
            table, n = PageTable.from_csr(counts, torch.cat(pages).to(device), last), None
        else:
            entries = some if case.table == "token" else pages
            width = max(map(len, entries)) + 1
            table = torch.full((len(pool), width), -1)
            for row, e in zip(table, entries, strict=True):
                row[: len(e)] = e
            table = table.to(device)
            if case.table == "token":
                table = PageTable.from_token_table(table, torch.arange(len(pool), device=device))
            n = torch.tensor(pool, device=device)
        levels.append((table, n))
        at += len(pool)
    groups = [cumulative(case.groups, torch.int32, device), None]
    if case.common is not None:
        groups.insert(0, torch.tensor([0, len(case.own)], device=device))
    levels = [(*level, g) for level, g in zip(levels, groups, strict=True)]
    out, lse = flashbpt.shared_prefix_attention(
        query.to(device),
        call.key_cache.to(device),
        call.value_cache.to(device),
        levels,
        cu_seqlens_q=None if case.rows is None else cumulative(rows, torch.int32, device),
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        return_lse=True,
    )
    group_of = [g for g, n in enumerate(case.groups) for _ in range(n)]
    row = 0
    for i, n in enumerate(rows):
        chain = [slots[-2][group_of[i]], slots[-1][i]]
        if case.common is not None:
            chain.insert(0, slots[0][0])
        mine = torch.cat(chain)
        options = {
            "is_causal": case.causal,
            "enable_gqa": True,
            "causal_align": "lower-right",
            "window": case.window,
            "softcap": case.softcap,
        }
        q = query[row : row + n].transpose(0, 1)[None]
        k, v = (t[mine].transpose(0, 1)[None] for t in (call.keys, call.values))
        exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), **options)
        plain, plain_lse = reference.attention(
            q, k, v, product=DTYPES[dtype], softmax=torch.float32, **options
        )
        got = out[row : row + n].cpu().transpose(0, 1)[None]
        # Each level's output is rounded before the merge.
        assert_close(f"out {i}", got, exact, plain.to(DTYPES[dtype]), ulps=3)
        assert_close(f"lse {i}", lse[row : row + n].cpu().T[None], exact_lse, plain_lse.float())
        row += n


@pytest.mark.parametrize("window", [None, (3, -1)])
@pytest.mark.parametrize("requests", [0, 2])
def test_levels_without_groups(device, requests, window):
    """A level that nobody shares, and no request at all, change nothing."""
    query = torch.randn(requests, 4, 32, device=device)
    caches = [torch.randn(3, 8, 2, 32, device=device) for _ in "kv"]
    table = torch.arange(requests, device=device)[:, None]
    lens = torch.full((requests,), 5, device=device)
    nobody = (table[:0], lens[:0], torch.zeros(1, dtype=torch.int64, device=device))
    levels = [nobody, (table, lens, None)]
    got = flashbpt.shared_prefix_attention(query, *caches, levels, window=window)
    torch.testing.assert_close(
        got, flashbpt.paged_attention(query, *caches, table, lens, window=window)
    )
