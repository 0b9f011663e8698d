"""Attention over paged caches: page tables, layouts, mixed requests, terms, fp8, refusals."""

from dataclasses import replace

import pytest
import reference
import torch
from compare import assert_bitwise, assert_close
from paged_cases import DTYPES, FP8, Call, Case, check

import flashbpt
from flashbpt import PageTable
from flashbpt.paged import prepare_paged

MIXED = Case(lens=(20, 33, 12, 7, 140, 0, 3), rows=(20, 1, 5, 0, 3, 2, 6))
CASES = [
    Case(),
    *(Case(page_size=n, lens=(n, 2 * n, n + 1, 2 * n - 1, 1)) for n in (1, 3, 16, 64)),
    *(
        Case(table=t, index=i)
        for t in ("block", "token", "csr")
        for i in (torch.int32, torch.int64)
    ),
    Case(table="token", page_size=1),
    Case(table="token", page_size=8),
    *(Case(layout=layout) for layout in ("hnd", "packed", "mixed")),
    *(Case(heads=2 * r) for r in (1, 2, 3, 5, 7, 8, 12, 16)),
    Case(heads=32, kv_heads=1),
    Case(dim=32),
    Case(dim=80),
    Case(dim=128),
    Case(dim=256),
    Case(dim=192, dim_v=128),
    Case(dim=64, dim_v=96),
    Case(lens=(1, 3, 2000), heads=8),
    MIXED,
    replace(MIXED, causal=False),
    replace(MIXED, page_size=1, table="token"),
    replace(MIXED, table="csr", page_size=5),
    replace(MIXED, heads=14),
]
TERMS = [
    replace(MIXED, window=(9, -1)),
    replace(MIXED, window=(9, 4), causal=False),
    replace(MIXED, window=(0, 0), page_size=3),
    replace(MIXED, softcap=5.0),
    replace(MIXED, alibi="h"),
    replace(MIXED, alibi="bh", window=(20, -1)),
    replace(MIXED, sinks=True),
    replace(MIXED, sinks=True, softcap=3.0, alibi="h", window=(30, -1)),
    replace(MIXED, tree=True),
    replace(MIXED, tree=True, sinks=True, softcap=5.0),
    Case(lens=(300, 41, 5), window=(16, -1), page_size=4),
]
# Many rows a request: kernels that products bind.
CHUNKS = Case(lens=(200, 90, 300, 0, 70), rows=(150, 90, 100, 0, 75))
PREFILLS = [
    CHUNKS,
    replace(CHUNKS, dim=128, heads=8),
    replace(CHUNKS, dim=192, heads=6),
    replace(CHUNKS, dim=64, dim_v=96, kv_heads=4),
    replace(CHUNKS, table="token", page_size=1, index=torch.int64),
    replace(CHUNKS, table="csr", page_size=5, layout="hnd"),
    replace(CHUNKS, layout="packed", causal=False),
    replace(CHUNKS, window=(40, -1)),
    replace(CHUNKS, softcap=5.0, sinks=True),
    replace(CHUNKS, alibi="bh", window=(60, -1)),
    replace(CHUNKS, tree=True),
    replace(CHUNKS, sinks=True),
    # Few rows and many in one call, at both sides of the number that divides them.
    Case(lens=(200, 33, 300, 64, 5, 90), rows=(150, 33, 2, 32, 0, 1)),
]
# Few blocks of rows over many keys, which are split.
LONG = Case(lens=(3000, 70, 2500), rows=(90, 60, 1))
PREFILLS += [
    LONG,
    replace(LONG, dim=128, heads=8, sinks=True, table="token"),
    replace(LONG, window=(300, -1), softcap=5.0),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES + TERMS + PREFILLS, ids=str)
def test_paged_attention(device, case, dtype):
    check(replace(case, dtype=dtype), device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill_by_sm80(cuda, case, dtype):
    """Where faster kernels would serve it."""
    with flashbpt.use_backend("sm80"):
        check(replace(case, dtype=dtype), cuda)


@pytest.mark.parametrize("cache", FP8)
@pytest.mark.parametrize("scales", [None, "scalar", "heads"])
@pytest.mark.parametrize("case", [Case(dtype="bf16"), replace(MIXED, dtype="fp16")], ids=str)
def test_fp8_caches(device, case, scales, cache):
    for layout in ("nhd", "hnd", "packed"):
        check(replace(case, cache=cache, scales=scales, layout=layout), device)


def test_rows_past_the_last_request_are_zero(device):
    call = Call(MIXED, device)
    call.query = torch.cat([call.query, torch.full((3, *call.query.shape[1:]), torch.nan)])
    out, lse = call.run()
    assert (out[-3:] == 0).all() and (lse[-3:] == -torch.inf).all()
    assert_bitwise("out", out[:-3], Call.run(call)[0][:-3])


def test_out(device):
    call = Call(MIXED, device)
    expected, lse = call.run()
    wide = torch.full((expected.shape[0], 2 * expected.shape[1], expected.shape[2]), 7.0)
    wide = wide.to(device)
    out = wide[:, ::2]
    got, got_lse = call.run(out=out)
    assert got is out
    assert_bitwise("out", out, expected)
    assert_bitwise("lse", got_lse, lse)
    assert (wide[:, 1::2] == 7).all()


def test_query_strides(device):
    call = Call(Case(lens=(9, 30, 2)), device)
    expected = call.run()[0]
    packed = torch.randn(3, 4 * 64 + 2 * 2 * 64)
    packed[:, : 4 * 64] = call.query.flatten(1)
    call.query = packed[:, : 4 * 64].view(3, 4, 64)
    assert_close("out", call.run()[0].cpu(), expected.cpu().double(), expected.cpu())


def test_query_columns(device):
    call = Call(Case(lens=(9, 30, 2), dtype="bf16"), device)
    expected, lse = call.run()
    call.query = call.query.mT.contiguous().mT
    got, got_lse = call.run()
    assert_bitwise("out", got, expected)
    assert_bitwise("lse", got_lse, lse)


@pytest.mark.parametrize("rows", [None, (150, 90, 40)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_left_of_the_window_may_be_gone(device, page_size, rows):
    left, lens = 16, (300, 110, 45)
    case = Case(lens=lens, rows=rows, window=(left, -1), page_size=page_size, dtype="bf16")
    call = Call(case, device)
    expected, _ = call.run()
    for i, (n, count) in enumerate(zip(lens, call.rows, strict=True)):
        gone = max(n - count - left, 0) // page_size
        pages = call.table[i, :gone].long()
        for cache in (call.key_cache, call.value_cache):
            cache[pages] = torch.nan
        call.table[i, :gone] = 2**30
    assert_bitwise("out", call.run()[0], expected)


def test_nan_in_a_key_reaches_its_rows_alone(device):
    call = Call(Case(lens=(9000, 40), heads=8, dtype="bf16"), device)
    page, offset = call.table[0, 8000 // 16], 8000 % 16
    call.key_cache[page.long(), offset, 0] = torch.nan
    out, lse = call.run()
    assert out[0, :4].isnan().all() and lse[0, :4].isnan().all()
    assert out[0, 4:].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize("shape", [(3, 0, 0, 64), (3, 4, 2, 0), (0, 4, 2, 64)])
def test_empty(device, shape):
    tokens, heads, kv_heads, dim_v = shape
    query = torch.randn(tokens, heads, 64, device=device)
    keys = torch.randn(4, 8, kv_heads, 64, device=device)
    values = torch.randn(4, 8, kv_heads, dim_v, device=device)
    table = torch.zeros(tokens, 2, dtype=torch.int32, device=device)
    lens = torch.full((tokens,), 9, device=device)
    out, lse = flashbpt.paged_attention(query, keys, values, table, lens, return_lse=True)
    assert out.shape == (tokens, heads, dim_v) and lse.shape == (tokens, heads)
    assert lse.isfinite().all()


def test_pages_may_repeat(device):
    """Two requests share a page, one holds it twice."""
    keys, values = torch.randn(2, 3, 4, 2, 32, device=device)
    table = torch.tensor([[1, 0, 1], [1, 2, -1]], device=device)
    lens = torch.tensor([12, 7], device=device)
    query = torch.randn(2, 2, 32, device=device)
    got = flashbpt.paged_attention(query, keys, values, table, lens)
    for row, pages, n in ((0, [1, 0, 1], 12), (1, [1, 2], 7)):
        k, v = (t[pages].flatten(0, 1)[:n].transpose(0, 1)[None].cpu() for t in (keys, values))
        exact, _ = reference.attention(query[row].cpu()[None, :, None].double(), k, v)
        assert_close("out", got[row].cpu(), exact[0, :, 0], exact[0, :, 0].float())


# ------------------------------------------------------------------------------------- CUDA kernels


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (8, 2), (32, 1), (10, 2)])
@pytest.mark.parametrize(
    "lens", [(20000,), (9000, 3, 0, 700), tuple(range(1, 301)), (512,) * 70], ids=len
)
def test_work_split_over_blocks(cuda, lens, heads, kv_heads):
    for dim in (64, 128):
        case = Case(lens=lens, heads=heads, kv_heads=kv_heads, dim=dim, sinks=True, dtype="bf16")
        check(case, cuda)


@pytest.mark.gpu
def test_lse_of_split_keys_without_values(cuda):
    query = torch.randn(1, 32, 64, device=cuda, dtype=torch.bfloat16)
    keys, values = (torch.randn(250, 16, 1, n, device=cuda, dtype=query.dtype) for n in (64, 64))
    table = torch.arange(250, device=cuda)[None]
    lens = torch.tensor([3999], device=cuda)
    for _ in range(3):
        _, lse = flashbpt.paged_attention(query, keys, values, table, lens, return_lse=True)
        nothing = values[..., :0]
        out, got = flashbpt.paged_attention(query, keys, nothing, table, lens, return_lse=True)
        assert out.shape == (1, 32, 0)
        assert_bitwise("lse", got, lse)


@pytest.mark.gpu
def test_too_much_work(cuda):
    query = torch.randn(1, 4, 32, device=cuda, dtype=torch.bfloat16)
    cache = torch.randn(1, 1 << 16, 1, 32, device=cuda, dtype=torch.bfloat16)
    table = torch.zeros(1, 1 << 21, device=cuda, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="page table of 137438953472 keys a request"):
        flashbpt.paged_attention(query, cache, cache, table, torch.tensor([5], device=cuda))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_small_shared_memory(cuda, small_rows, dim):
    for dtype in ("bf16", "fp16"):
        check(replace(MIXED, dim=dim, dtype=dtype), cuda)
        check(Case(lens=(3000, 5), heads=8, dim=dim, dtype=dtype), cuda)
        check(replace(CHUNKS, dim=dim, dtype=dtype), cuda)


@pytest.mark.parametrize(
    "case, kernel",
    [
        (Case(dim=128), "paged_decode_fp32_d128"),
        (Case(dtype="bf16", dim=80), "paged_decode_bf16_d128"),
        (Case(dtype="bf16", heads=32, kv_heads=1), "paged_decode_bf16_d64_tall"),
        (Case(dtype="bf16", cache="e5m2", dim=256), "paged_decode_e5m2_d256"),
        (replace(CHUNKS, dtype="fp16"), "paged_prefill_fp16_d64"),
        (replace(CHUNKS, dtype="fp16", softcap=1.0), "paged_prefill_fp16_d64_terms"),
        (replace(CHUNKS, dtype="bf16", tree=True), "paged_decode_bf16_d64_tall"),
    ],
    ids=str,
)
def test_which_kernel(device, case, kernel):
    call = Call(case, device)
    choice = flashbpt.which_kernel(
        call.query.to(device),
        call.key_cache,
        call.value_cache,
        call.table,
        call.lens,
        op="paged_attention",
        **call.options,
    )
    if device == "cpu":
        assert choice.kernel == "cpu" and choice.refused["sm80"] == "the tensors are not on a GPU"
    elif choice.kernel == "sm90":
        assert choice.config == kernel.replace("paged_prefill", "attn_fwd") + "_pages"
    else:
        assert (choice.kernel, choice.config) == ("sm80", kernel)


def test_forced_backend(device):
    call = Call(Case(), device)
    other = "sm80" if device == "cpu" else "cpu"
    with flashbpt.use_backend(other), pytest.raises(RuntimeError, match="no kernel serves"):
        call.run()


# ---------------------------------------------------------------------------------------- refusals


def refused(match, **changes):
    call = Call(MIXED, "cpu")
    arguments = {
        "query": call.query,
        "key_cache": call.key_cache,
        "value_cache": call.value_cache,
        "block_table": call.table,
        "seq_lens": call.lens,
        **call.options,
    }
    arguments.update({name: make(call) for name, make in changes.items()})
    with pytest.raises(RuntimeError, match=match):
        flashbpt.paged_attention(**arguments)


@pytest.mark.parametrize(
    "match, changes",
    [
        (r"\(tokens, heads, dim\), got \[37, 256\]", {"query": lambda c: c.query.flatten(1)}),
        ("same head dim, got 32 and 64", {"query": lambda c: c.query[..., :32]}),
        ("divide the number of heads", {"query": lambda c: c.query[:, :3]}),
        ("must have query's dtype, Double, or be", {"query": lambda c: c.query.double()}),
        (
            "must have one dtype",
            {"value_cache": lambda c: c.value_cache.to(torch.float8_e4m3fn)},
        ),
        ("same pages, page size and heads", {"value_cache": lambda c: c.value_cache[1:]}),
        ("must have stride 1", {"key_cache": lambda c: c.key_cache.repeat(1, 1, 1, 2)[..., ::2]}),
        ("block_table must be int32 or int64", {"block_table": lambda c: c.table.float()}),
        ("block_table must have 2 dimensions", {"block_table": lambda c: c.table[0]}),
        ("seq_lens must have 7 elements, got 6", {"seq_lens": lambda c: c.lens[1:]}),
        ("seq_lens must be int32 or int64", {"seq_lens": lambda c: c.lens.float()}),
        ("seq_lens is needed", {"seq_lens": lambda c: None}),
        ("cu_seqlens_q must have 8 elements", {"cu_seqlens_q": lambda c: torch.tensor([0, 1])}),
        ("one row a request, got 37 rows and 7", {"cu_seqlens_q": lambda c: None}),
        ("softcap must be finite", {"softcap": lambda c: -1.0}),
        ("window must be", {"window": lambda c: (-2, 0)}),
        (r"sinks must be \(query heads,\)", {"sinks": lambda c: torch.zeros(3)}),
        ("alibi_slopes must be", {"alibi_slopes": lambda c: torch.zeros(2, 4)}),
        ("tree_mask must be a bool vector", {"tree_mask": lambda c: torch.zeros(9)}),
        ("squares of all requests", {"tree_mask": lambda c: torch.ones(9).bool()}),
        ("scale of key_cache", {"key_scale": lambda c: torch.ones(3)}),
        ("out must be", {"out": lambda c: c.query[:, :, :3]}),
        ("pages of 8 tokens", {"block_table": lambda c: PageTable.from_block_table(c.table, 8)}),
    ],
)
def test_refusals(match, changes):
    refused(match, **changes)


def outside(call):
    slots = torch.zeros(3, 200, dtype=torch.int64, device=call.device)
    return PageTable.from_token_table(slots, torch.full((7,), 3, device=call.device))


CONTENTS = [
    ("which take 9 entries", {"block_table": lambda c: c.table[:, :8]}),
    ("lies in slot", {"block_table": lambda c: c.table + 1000}),
    ("0 keys or more", {"seq_lens": lambda c: c.lens - 5}),
    ("not decrease", {"cu_seqlens_q": lambda c: torch.arange(8, device=c.device).flip(0)}),
    ("must be rows of req_to_token", {"block_table": outside}),
]


@pytest.mark.parametrize("match, changes", CONTENTS)
def test_refused_contents(match, changes):
    refused(match, **changes)


@pytest.mark.parametrize("match, changes", CONTENTS)
def test_contents_are_checked_on_any_device(device, match, changes):
    call = Call(MIXED, device)
    arguments = {"block_table": call.table, "seq_lens": call.lens, **call.options}

    def check(**arguments):
        given = call.query.to(device), call.key_cache, call.value_cache
        torch.ops.flashbpt.check_paged_attention.default(*prepare_paged(*given, **arguments))

    check(**arguments)
    with pytest.raises(RuntimeError, match=match):
        check(**arguments | {name: make(call) for name, make in changes.items()})


@pytest.mark.gpu
def test_debug_checks(cuda):
    call = Call(MIXED, cuda)
    expected, _ = call.run()
    flashbpt.set_debug_checks(True)
    try:
        assert_bitwise("out", call.run()[0], expected)
        call.table = call.table + 1000
        with pytest.raises(RuntimeError, match="lies in slot"):
            call.run()
        rows = torch.zeros(2, 2, 64, device=cuda)
        cache = torch.zeros(3, 4, 2, 64, device=cuda)
        with pytest.raises(RuntimeError, match="below the 12 slots of the cache.* got 12"):
            slots = torch.tensor([-1, 12], device=cuda)
            flashbpt.append_paged_kv(rows, rows, cache, cache, slots)
    finally:
        flashbpt.set_debug_checks(False)
    assert (cache == 0).all()


def test_no_gradient():
    call = Call(Case(), "cpu")
    call.query.requires_grad_()
    with pytest.raises(RuntimeError, match="for inference"):
        call.run()
    with torch.no_grad():
        call.run()
