"""`prefill`: new rows over paged caches on CUDA, d 128, causal, in TFLOP/s and microseconds.

The new rows of a request see its keys up to their own, which are the last. TFLOP/s count
4 * Hq * D operations for each pair of a row and a key that it sees, against the peers. In
microseconds pages of 16 run against pages of 64 and against flashbpt.varlen_attention, to which the
same keys come packed.
"""

import itertools
from collections.abc import Iterator

from options import Options
from paged_case import PagedCall, PagedCase, Run, measure, paged, repaged
from paged_peers import paged_peers
from report import Row, bar_line, ratio, target

import flashbpt

SHAPES = [  # heads, requests, new rows and keys of each, page size
    ((32, 8), 4, 4096, 4096, 16),
    ((32, 8), 1, 2048, 32768, 16),
    ((32, 8), 16, 1024, 1024, 64),
    ((32, 32), 1, 16384, 16384, 16),
    ((32, 8), 64, 128, 4096, 16),
]
QUICK = 64  # times fewer rows and keys
FA2_WORST = 1.0  # of the rate of FlashInfer's
PAGE_16_TIME = 1.08  # of pages of 64, and of packed keys


def rows(options: Options) -> Iterator[Row]:
    return measure(cases(options), options)


def cases(options: Options) -> Iterator[PagedCase]:
    for heads, batch, new, keys, page_size in SHAPES:
        if options.quick:
            batch, new, keys = min(batch, 2), new // QUICK, keys // QUICK
        shape = heads, [keys] * batch, new
        yield _case(*shape, page_size, "TFLOP/s", paged_peers("fa3", "flashinfer_fa2"))
        yield _case(*shape, 16, "us", {"page64": page64, "contiguous": contiguous}, PAGE_16_TIME)


def _case(heads, lens, new, page_size, unit, others, bar=None) -> PagedCase:
    return PagedCase(
        case=f"{new} new rows",
        heads=heads,
        lens=lens,
        page_size=page_size,
        flashbpt=paged,
        others=others,
        unit=unit,
        rows=new,
        graph=False,
        extra={} if bar is None else {"bar": bar},
    )


def page64(call: PagedCall) -> Run:
    return paged(repaged(call, 64))


def contiguous(call: PagedCall) -> Run:
    """flashbpt.varlen_attention over the same keys."""
    key, value = call.packed()
    offsets = call.cu_seqlens_q(), call.integers([0, *itertools.accumulate(call.lens)])
    lengths = call.rows, max(call.lens)
    return lambda: flashbpt.varlen_attention(
        call.query, key, value, *offsets, *lengths, causal=True
    )


def verdict(rows: list[Row]) -> list[str]:
    fa2 = [r for row in rows if (r := ratio(row, "flashinfer_fa2")) is not None]
    lines = target("of FlashInfer's fa2", fa2, worst=FA2_WORST)
    for other, what in (("page64", "pages of 64"), ("contiguous", "packed keys")):
        times = [1 / ratio(row, other) for row in rows if row.get(other)]
        lines += bar_line(f"pages of 16, time of {what}", times, PAGE_16_TIME)
    return lines
