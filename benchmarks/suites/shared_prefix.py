"""`shared_prefix`: one query row a request over a prefix that all share, on CUDA, in microseconds.

d 128, pages of 16, by replays of CUDA graphs. Against FlashInfer's cascade, FlashInfer and FA3 over
the flat table, in which the prefix's pages are those of every request, and, where nobody shares it,
flashbpt.paged_attention over that table.
"""

import functools
from collections.abc import Iterator

from options import Options
from paged_case import PagedCall, PagedCase, Run, measure, paged
from paged_peers import paged_peers
from report import Row, bar_line, ratio

import flashbpt

PAGE_SIZE = 16
SHAPES = [  # heads, requests, keys of the prefix, further keys of each, of cascade's time at most
    ((32, 8), 64, 32768, 512, 0.6),
    ((32, 8), 256, 8192, 256, 0.6),
    ((32, 32), 64, 8192, 512, 0.85),
]
SINGLE = ((32, 8), 1, 32768, 512)
# Never slower than flat: two medians of one kernel differ by as much.
SINGLE_TIME = 1.02
QUICK = 256  # times fewer keys


def rows(options: Options) -> Iterator[Row]:
    return measure(cases(options), options)


def cases(options: Options) -> Iterator[PagedCase]:
    peers = paged_peers("cascade", "flat", "fa3")
    for *shape, most in SHAPES:
        yield _case(*shape, peers, options.quick, {"cascade_time": most})
    yield _case(*SINGLE, {"own_flat": paged}, options.quick, {"bar": SINGLE_TIME})


def _case(heads, batch, prefix, own, others, quick, extra) -> PagedCase:
    if quick:
        batch, prefix, own = min(batch, 3), prefix // QUICK, own // QUICK
    return PagedCase(
        case=f"prefix {prefix} own {own}",
        heads=heads,
        lens=[prefix + own] * batch,
        page_size=PAGE_SIZE,
        flashbpt=shared,
        others=others,
        prefix=prefix,
        extra=extra,
    )


def shared(call: PagedCall) -> Run:
    """flashbpt.shared_prefix_attention."""
    prefix = call.block_table[:1, : call.prefix_pages].contiguous()
    own = call.block_table[:, call.prefix_pages :].contiguous()
    own_lens = call.integers(n - call.prefix for n in call.lens)
    levels = [
        (prefix, call.integers([call.prefix]), call.integers([0, len(call.lens)])),
        (own, own_lens, None),
    ]
    return functools.partial(
        flashbpt.shared_prefix_attention, call.query, call.key_cache, call.value_cache, levels
    )


def verdict(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        if row.get("cascade"):
            what = f"time of cascade, {row['case']}"
            lines += bar_line(what, [1 / ratio(row, "cascade")], row["cascade_time"])
    single = [1 / ratio(row, "own_flat") for row in rows if row.get("own_flat")]
    return lines + bar_line("time of the flat table, one request", single, SINGLE_TIME)
