"""Calls of paged attention as data, their tensors, and what they should give.

Every cache is poisoned: slots that hold no key are NaN, entries past the used pages are huge or
negative.
"""

from dataclasses import dataclass

import reference
import torch
from cases import cumulative
from compare import assert_close

import flashbpt
from flashbpt import PageTable

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class Case:
    lens: tuple = (1, 17, 40, 0, 7)  # keys of each request
    rows: tuple | None = None  # new rows of each; None: one, without cu_seqlens_q
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    dim_v: int | None = None
    page_size: int = 16
    dtype: str = "fp32"
    cache: str | None = None  # fp8
    scales: str | None = None  # "scalar" or "heads"
    table: str = "block"  # "token", "csr"
    index: torch.dtype = torch.int32
    layout: str = "nhd"  # "hnd", "packed", "mixed"
    causal: bool = True
    window: tuple | None = None
    softcap: float = 0.0
    alibi: str | None = None  # "h" or "bh"
    sinks: bool = False
    tree: bool = False

    def __str__(self):
        default = Case()
        return ",".join(
            f"{name}={value}".replace(" ", "").replace("torch.", "")
            for name, value in vars(self).items()
            if value != getattr(default, name)
        )


class Call:
    """A case's tensors, and what each request should see."""

    def __init__(self, case, device):
        self.case, self.device = case, device
        dtype, size = DTYPES[case.dtype], case.page_size
        dim_v = case.dim_v or case.dim
        counts = [-(-n // size) for n in case.lens]
        spare = 3
        pages = sum(counts) + spare
        order = torch.randperm(pages)
        ids, at = [], 0
        for n in counts:
            ids.append(order[at : at + n])
            at += n
        self.slots = [
            (page[:, None] * size + torch.arange(size)).flatten()[:n]
            for page, n in zip(ids, case.lens, strict=True)
        ]
        self.keys = torch.full((pages * size, case.kv_heads, case.dim), torch.nan)
        self.values = torch.full((pages * size, case.kv_heads, dim_v), torch.nan)
        used = torch.cat(self.slots)
        for t in (self.keys, self.values):
            t[used] = torch.randn(len(used), *t.shape[1:])
        stored = FP8[case.cache] if case.cache else dtype
        self.scale = {}
        for name, t in (("key", self.keys), ("value", self.values)):
            if case.scales:
                shape = () if case.scales == "scalar" else (case.kv_heads,)
                scale = self.scale[f"{name}_scale"] = torch.rand(shape) + 0.5
                t.copy_((t / scale.reshape(-1, 1)).to(stored).float())
            else:
                t.copy_(t.to(stored).float())
        self.key_cache, self.value_cache = self.caches(pages, size, stored)
        rows = case.rows or (1,) * len(case.lens)
        self.rows = rows
        self.query = torch.randn(sum(rows), case.heads, case.dim).to(dtype)
        self.table = self.page_table(ids, counts, pages)
        self.lens = torch.tensor(case.lens, dtype=case.index, device=device)
        self.options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
        if case.rows is not None:
            self.options["cu_seqlens_q"] = cumulative(rows, case.index, device)
        if case.alibi:
            shape = (case.heads,) if case.alibi == "h" else (len(rows), case.heads)
            self.options["alibi_slopes"] = torch.rand(shape, device=device)
        if case.sinks:
            self.options["sinks"] = torch.randn(case.heads, device=device)
        if case.tree:
            squares = [torch.rand(n, n) < 0.6 for n in rows]
            self.trees = squares
            self.options["tree_mask"] = torch.cat([s.flatten() for s in squares]).to(device)
        self.options.update({name: s.to(device) for name, s in self.scale.items()})

    def caches(self, pages, size, stored):
        case = self.case
        shape = (pages, size, case.kv_heads)
        keys = self.keys.view(*shape, -1).to(stored)
        values = self.values.view(*shape, -1).to(stored)
        if case.layout == "packed":
            both = torch.stack([keys.view(torch.uint8), values.view(torch.uint8)], 1)
            both = both.to(self.device).view(stored)
            return both[:, 0], both[:, 1]
        keys, values = keys.to(self.device), values.to(self.device)

        def heads_first(t):
            return t.transpose(1, 2).contiguous().transpose(1, 2)

        if case.layout == "hnd":
            return heads_first(keys), heads_first(values)
        if case.layout == "mixed":
            return keys, heads_first(values)
        return keys, values

    def page_table(self, ids, counts, pages):
        case, device = self.case, self.device
        if case.table == "csr":
            last = [(n - 1) % case.page_size + 1 if n else 5 for n in case.lens]
            return PageTable.from_csr(
                cumulative(counts, case.index, device),
                torch.cat(ids).to(case.index).to(device),
                torch.tensor(last, dtype=case.index, device=device),
            )
        poison = torch.tensor([-1, 2**30, -(2**31)])
        if case.table == "token":
            width = max(case.lens) + 3
            table = poison[torch.randint(3, (2 * len(ids), width))]
            rows = torch.randperm(2 * len(ids))[: len(ids)]
            for row, slots in zip(rows, self.slots, strict=True):
                table[row, : len(slots)] = slots
            return PageTable.from_token_table(
                table.to(case.index).to(device), rows.to(case.index).to(device)
            )
        wide = poison[torch.randint(3, (len(ids), max(counts) + 5))]
        for row, page in zip(wide, ids, strict=True):
            row[2 : 2 + len(page)] = page
        return wide.to(case.index).to(device)[:, 2:-1]  # a slice: rows are strided

    def expected(self, product=torch.float64, softmax=torch.float64):
        case = self.case
        outs, lses, at = [], [], 0
        for i, (slots, n) in enumerate(zip(self.slots, self.rows, strict=True)):
            q = self.query[at : at + n].to(torch.float64)
            k, v = self.keys[slots].double(), self.values[slots].double()
            k = k * self.scale["key_scale"].reshape(-1, 1) if case.scales else k
            v = v * self.scale["value_scale"].reshape(-1, 1) if case.scales else v
            more = {}
            if case.alibi:
                slopes = self.options["alibi_slopes"].cpu().double()
                more["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[i : i + 1]
            if case.sinks:
                more["sinks"] = self.options["sinks"].cpu()
            if case.tree:
                seen = torch.ones(n, len(slots), dtype=torch.bool)
                own = min(n, len(slots))
                seen[:, len(slots) - own :] = self.trees[i][:, n - own :]
                more["attn_mask"] = seen
            out, lse = reference.attention(
                q.transpose(0, 1)[None],
                k.transpose(0, 1)[None],
                v.transpose(0, 1)[None],
                is_causal=case.causal and not case.tree,
                enable_gqa=True,
                causal_align="lower-right",
                window=case.window,
                softcap=case.softcap,
                product=product,
                softmax=softmax,
                **more,
            )
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0].transpose(0, 1))
            at += n
        return torch.cat(outs), torch.cat(lses)

    def run(self, **more):
        seq_lens = None if self.case.table == "csr" else self.lens
        return flashbpt.paged_attention(
            self.query.to(self.device),
            self.key_cache,
            self.value_cache,
            self.table,
            seq_lens,
            return_lse=True,
            **{**self.options, **more},
        )


def check(case, device):
    call = Call(case, device)
    out, lse = call.run()
    exact, exact_lse = call.expected()
    dtype = DTYPES[case.dtype]
    product = torch.float32 if case.cache or case.scales else dtype
    plain, plain_lse = call.expected(product=product, softmax=torch.float32)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert_close("out", out.cpu(), exact, plain.to(dtype))
    assert_close("lse", lse.cpu(), exact_lse, plain_lse.float())
