"""`decode`: one query row a request, and four, over paged caches on CUDA, d 128, in TB/s.

TB/s count each byte of K and V once. `uniform` rows have requests of one length; `skewed` ones 60
short requests, of 1 to 2048 keys, and 4 of 32768. fp8 rows run against FlashInfer, in TB/s of their
own bytes, and against flashbpt on bf16 caches of the same numbers, in microseconds. All by replays
of CUDA graphs, as paged_case.py says, but for the host's time of a call beside SDPA's.
"""

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import torch
from options import Options
from paged_case import PagedCall, PagedCase, Run, backend, measure, paged
from paged_peers import paged_peers
from peers import flash_sdpa, sdpa
from report import Row, bar_line, ratio, target
from timing import alternate, host_budget, sm_mhz

HEADS = [(32, 32), (32, 8), (64, 8), (32, 1)]  # of queries, of keys
PAGE_SIZES = [16, 64]
UNIFORM = [  # requests, keys of each
    (1, 8192),
    (1, 131072),
    (8, 32768),
    (64, 2048),
    (64, 8192),
    (128, 1024),
    (256, 512),
]
FURTHER = [((32, 8), 64, 8192), ((32, 8), 128, 1024), ((64, 8), 8, 32768)]
FURTHER_PAGE_SIZE = 16
HOST = (4, 256)
QUICK = 1024  # times fewer keys

UNIFORM_WORST, MQA_MEAN, OTHERS_MEAN = 0.98, 1.20, 1.02  # of the best peer's rate
SKEWED_RATE, SKEWED_RATIO = 4.0, 1.15  # TB/s, or of the best peer's rate
SMALL_GQA_TIME = 0.9  # of the best peer's, one request of 8192 keys
FOUR_ROWS_WORST = 1.0
FP8_WORST = 1.7  # of the rate of bf16
HOST_TIME = 1.5  # of SDPA's


def rows(options: Options) -> Iterator[Row]:
    yield from measure(cases(options), options)
    if torch.cuda.is_available():
        yield from host_rows(options, "cuda")


def cases(options: Options) -> Iterator[PagedCase]:
    for heads, page_size in itertools.product(HEADS, PAGE_SIZES):
        case = functools.partial(_case, heads, page_size, ("fa3", "flashinfer", "flashinfer_tc"))
        for batch, keys in UNIFORM:
            yield case("uniform", "", uniform(batch, keys, options.quick))
        yield case("skewed", "skewed", skewed(options.quick))
    for heads, batch, keys in FURTHER:
        case = functools.partial(_case, heads, FURTHER_PAGE_SIZE)
        lens = uniform(batch, keys, options.quick)
        yield case(("fa3", "flashinfer_fa2"), "four_rows", "4 rows", lens, rows=4)
        fp8 = {"cache_dtype": torch.float8_e4m3fn}
        yield case(("flashinfer", "flashinfer_tc"), "fp8", "fp8", lens, **fp8)
        others = {"others": {"bf16_cache": bf16_cache}, "unit": "us"}
        yield case((), "fp8", "fp8", lens, **fp8, **others)


def uniform(batch: int, keys: int, quick: bool = False) -> list[int]:
    return [max(4, keys // QUICK)] * min(batch, 2) if quick else [keys] * batch


def skewed(quick: bool = False) -> list[int]:
    """The long requests are somewhere between the others, the same in every run."""
    generator = random.Random(0)
    scale, short, long = (QUICK, 6, 2) if quick else (1, 60, 4)
    lens = [generator.randint(1, 2048 // scale) for _ in range(short)] + [32768 // scale] * long
    generator.shuffle(lens)
    return lens


def _case(heads, page_size, peers, kind, name, lens, **rest) -> PagedCase:
    return PagedCase(
        **{
            "case": name,
            "heads": heads,
            "lens": lens,
            "page_size": page_size,
            "flashbpt": paged,
            "others": paged_peers(*peers),
            "unit": "TB/s",
            "extra": {"kind": kind},
            **rest,
        }
    )


def bf16_cache(call: PagedCall) -> Run:
    """flashbpt.paged_attention over the same numbers in bf16."""
    key, value = (t.to(torch.bfloat16) for t in (call.key_cache, call.value_cache))
    return paged(replace(call, key_cache=key, value_cache=value))


def host_rows(options: Options, device: str) -> Iterator[Row]:
    for heads in HEADS[:2]:
        lens = uniform(*HOST, options.quick)
        case = _case(heads, 16, (), "host", "host time", lens, unit="us")
        row = case.row() | {"bar": HOST_TIME}
        if options.wants(row):
            yield row | _host_time(case.draw(device)[0], options, device)


def _host_time(call: PagedCall, options: Options, device: str) -> Row:
    """Of a decode call, and of SDPA with the same query, keys and values as SDPA takes them."""
    key, value = (t.unflatten(0, (len(call.lens), -1)).transpose(1, 2) for t in call.packed())
    dense = call.query[:, :, None], key.contiguous(), value.contiguous()
    calls = {"flashbpt": paged(call), "peer": functools.partial(sdpa, *dense, enable_gqa=True)}
    with flash_sdpa(device), torch.no_grad():
        seconds = alternate(calls, host_budget(options.quick))
    times = {name: s and s * 1e6 for name, s in seconds.items()}
    return {
        "backend": backend(call),
        "flashbpt": times["flashbpt"],
        "fa2" if device == "cuda" else "sdpa": times["peer"],
        **({"sm_mhz": sm_mhz()} if device == "cuda" else {}),
    }


def verdict(rows: list[Row]) -> list[str]:
    def ratios(held, peer=None):
        return [r for row in held if (r := ratio(row, peer)) is not None]

    of = {
        kind: [row for row in rows if row["kind"] == kind]
        for kind in ("uniform", "skewed", "four_rows", "fp8", "host")
    }
    mqa = [row for row in of["uniform"] if row["heads"][1] == 1]
    others = [row for row in of["uniform"] if row["heads"][1] > 1]
    small_gqa = [
        row
        for row in others
        if row["heads"][0] > row["heads"][1] and (row["batch"], row["seqlen"]) == UNIFORM[0]
    ]
    # How near each row is to the one of its two targets that it is nearer to.
    near = [
        max(row["flashbpt"] / SKEWED_RATE, (ratio(row) or 0) / SKEWED_RATIO) for row in of["skewed"]
    ]
    return [
        *target("uniform MQA of the best peer", ratios(mqa), MQA_MEAN, UNIFORM_WORST),
        *target("other uniform of the best peer", ratios(others), OTHERS_MEAN, UNIFORM_WORST),
        *target(f"skewed of {SKEWED_RATE} TB/s or {SKEWED_RATIO} of the best peer", near, worst=1),
        *bar_line(
            "time of the best peer, one request of 8192 keys, GQA",
            [1 / r for r in ratios(small_gqa)],
            SMALL_GQA_TIME,
        ),
        *target("4 rows of the best peer", ratios(of["four_rows"]), worst=FOUR_ROWS_WORST),
        *target("fp8 of bf16", ratios(of["fp8"], "bf16_cache"), worst=FP8_WORST),
        *bar_line("host time of SDPA", [1 / r for r in ratios(of["host"])], HOST_TIME),
    ]
