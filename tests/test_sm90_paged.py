"""Prefill over paged caches by the Hopper forward (csrc/sm90/attn_fwd)."""

from dataclasses import replace

import pytest
import torch
from cases import cumulative
from compare import assert_bitwise
from paged_cases import Call, Case, check

import flashbpt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("forced")]

CHUNKS = Case(lens=(200, 90, 300, 0, 70), rows=(150, 90, 100, 0, 75), dtype="bf16", heads=8)
MIXED = Case(lens=(700, 5500, 2100), rows=(400, 900, 2100), dtype="bf16", heads=16, kv_heads=8)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("dim, dim_v", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("page_size", [1, 4, 5, 16, 96, 256])
def test_page_sizes(page_size, dim, dim_v, dtype):
    case = replace(CHUNKS, page_size=page_size, dim=dim, dim_v=dim_v, dtype=dtype)
    check(case, "cuda")
    check(replace(case, causal=False, window=(40, 30)), "cuda")


@pytest.mark.parametrize(
    "changes",
    [
        {"table": "token", "page_size": 1, "index": torch.int64},
        {"table": "token", "page_size": 16},
        {"table": "csr", "page_size": 24, "layout": "hnd"},
        {"layout": "packed", "causal": False},
        {"layout": "mixed", "page_size": 48},
        {"dim": 72, "dim_v": 40},
        {"heads": 14},
        {"heads": 32, "kv_heads": 1},
        {"window": (40, -1), "page_size": 8},
        {"sinks": True},
    ],
    ids=str,
)
def test_tables_and_layouts(changes):
    check(replace(CHUNKS, **changes), "cuda")


def test_rows_that_decoding_takes():
    check(Case(lens=(200, 33, 300, 64, 5, 90), rows=(150, 33, 2, 32, 0, 1), dtype="bf16"), "cuda")


def test_fewer_keys_than_rows():
    check(replace(CHUNKS, lens=(100, 300, 0, 40), rows=(150, 300, 90, 70)), "cuda")


@pytest.mark.parametrize("page_size, dim", [(16, 128), (1, 64), (64, 256)])
def test_sequences_of_different_lengths(page_size, dim):
    check(replace(MIXED, page_size=page_size, dim=dim), "cuda")


@pytest.mark.parametrize("page_size", [16, 5])
def test_heads_in_sections(page_size):
    """Keys of all heads exceed a third of the L2 cache: heads go 22 or 16 at a time."""
    case = Case(lens=(90, 5500), rows=(90, 5500), dtype="bf16", dim=128, heads=44, kv_heads=22)
    call = Call(replace(case, page_size=page_size), "cuda")
    results = call.run()
    with flashbpt.use_backend("sm80"):
        for name, got, right in zip(("out", "lse"), results, call.run(), strict=True):
            torch.testing.assert_close(got, right, rtol=0.02, atol=0.02, msg=name)


def test_out():
    call = Call(CHUNKS, "cuda")
    expected, lse = call.run()
    for width, stride in ((64, 96), (64, 72)):
        wide = torch.full((*expected.shape[:2], stride), 7.0, dtype=torch.bfloat16, device="cuda")
        got, got_lse = call.run(out=wide[..., :width])
        assert_bitwise("out", got, expected)
        assert_bitwise("lse", got_lse, lse)
        assert (wide[..., width:] == 7).all()
    odd = torch.empty(*expected.shape[:2], 65, dtype=torch.bfloat16, device="cuda")[..., :64]
    with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
        call.run(out=odd)
    with flashbpt.use_backend("auto"):
        torch.testing.assert_close(call.run(out=odd)[0], expected, rtol=0.02, atol=0.02)


def test_queries_of_a_fused_projection_and_rows_past_the_last_request():
    call = Call(CHUNKS, "cuda")
    expected, lse = call.run()
    tokens, heads, dim = call.query.shape
    fused = torch.randn(tokens + 70, heads * dim + 2 * 2 * dim).bfloat16()
    fused[tokens:] = torch.nan
    fused[:tokens, : heads * dim] = call.query.flatten(1)
    call.query = fused.cuda()[:, : heads * dim].view(-1, heads, dim)
    out, more_lse = call.run()
    assert_bitwise("out", out[:tokens], expected)
    assert_bitwise("lse", more_lse[:tokens], lse)
    assert (out[tokens:] == 0).all() and (more_lse[tokens:] == -torch.inf).all()


def test_as_packed_keys():
    """The same tiles in the same order: the same bits."""
    call = Call(replace(MIXED, dim=128), "cuda")
    slots = torch.cat(call.slots)
    keys = call.keys[slots].to("cuda", torch.bfloat16)
    values = call.values[slots].to("cuda", torch.bfloat16)
    out, lse = flashbpt.varlen_attention(
        call.query.cuda(),
        keys,
        values,
        call.options["cu_seqlens_q"],
        cumulative(call.case.lens, torch.int32, "cuda"),
        max(call.rows),
        max(call.case.lens),
        causal=True,
        return_lse=True,
    )
    paged_out, paged_lse = call.run()
    assert_bitwise("out", paged_out, out)
    assert_bitwise("lse", paged_lse, lse)
    for _ in range(3):
        assert_bitwise("again", call.run()[0], paged_out)


@pytest.mark.parametrize("page_size", [1, 16, 256])
def test_entries_that_no_row_sees_are_not_read(page_size):
    """Left of the window and past the keys entries lead nowhere."""
    case = replace(CHUNKS, lens=(600, 500), rows=(150, 90), window=(40, -1), page_size=page_size)
    case = replace(case, heads=64)  # so many that keys need not be split
    call = Call(case, "cuda")
    expected = call.run()
    for i, (length, rows) in enumerate(zip(case.lens, case.rows, strict=True)):
        gone = max(length - rows - 40, 0) // page_size
        call.table[i, :gone] = torch.tensor([2**31 - 1, -(2**31)])[torch.arange(gone) % 2].cuda()
    for one, other in zip(call.run(), expected, strict=True):
        assert_bitwise("result", one, other)


def test_empty_heads_and_caches_are_not_for_it():
    call = Call(CHUNKS, "cuda")
    call.value_cache = call.value_cache[..., :0]
    with pytest.raises(RuntimeError, match="not empty"):
        call.run()
    call = Call(CHUNKS, "cuda")
    call.key_cache, call.value_cache = call.key_cache[:0], call.value_cache[:0]
    with pytest.raises(RuntimeError, match="not empty"):
        call.run()


REFUSED = [
    ({"tree": True}, "tree_mask"),
    ({"cache": "e4m3"}, "caches of the query's type"),
    ({"dim": 60}, "multiples of 8"),
    ({"softcap": 3.0}, "no softcap"),
    ({"alibi": "h"}, "no softcap"),
    ({"rows": None}, "few rows"),
    ({"lens": (9000,), "rows": (100,), "heads": 2}, "does not split keys"),
]


@pytest.mark.parametrize("changes, why", REFUSED, ids=str)
def test_refusals(changes, why):
    call = Call(replace(CHUNKS, **changes), "cuda")
    with pytest.raises(RuntimeError, match=why):
        call.run()
    with flashbpt.use_backend("auto"):
        call.run()
