"""One row over a paged cache: what runs in it, and how it is measured.

A row draws calls over one pool of random keys and values, so many that together they fill the L2
twice; pages come in random order, and no page is in two calls. Every candidate is prepared for each
call before the timing: there the peers plan. Then the candidates run in turns. With `graph` each
runs as a CUDA graph of GRAPH_CALLS calls or more, as the graph of a model's step holds a call a
layer; the time of a call launched alone, in microseconds, is in the row as `eager_us`. Without, and
on the CPU, calls are launched one by one. After the timing the results are compared.

TB/s count each byte of K and V once. TFLOP/s count 4 * Hq * D operations for each pair of a row and
a key that it sees, the last row of a request seeing all keys.
"""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from attention_case import SECONDS, TOLERANCE, compare
from options import Options
from report import Row
from timing import Budget, alternate, copies, sm_mhz

import flashbpt

GRAPH_CALLS = 8
EAGER_SECONDS = 0.02  # a candidate


@dataclass
class PagedCall:
    """One call: a query, a cache and where the keys of each request lie in it."""

    query: torch.Tensor  # [tokens, Hq, D], as many rows of each request
    key_cache: torch.Tensor  # [pages, page_size, Hkv, D]
    value_cache: torch.Tensor
    block_table: torch.Tensor  # int32 [B, most pages of a request], 0 past its pages
    lens: list[int]  # keys of each request, those of its rows included
    prefix: int = 0  # of these the first ones, the same in all requests; whole pages

    @property
    def rows(self) -> int:
        return len(self.query) // len(self.lens)

    @property
    def page_size(self) -> int:
        return self.key_cache.shape[1]

    @property
    def prefix_pages(self) -> int:
        return self.prefix // self.page_size

    def integers(self, values: Iterable[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=self.query.device)

    def seq_lens(self) -> torch.Tensor:
        return self.integers(self.lens)

    def cu_seqlens_q(self) -> torch.Tensor:
        return self.integers(range(0, len(self.query) + 1, self.rows))

    def slots(self) -> torch.Tensor:
        """Where the keys of all requests lie, one request after the other."""
        offset = torch.arange(self.page_size, device=self.query.device)
        slots = (self.block_table[:, :, None] * self.page_size + offset).flatten(1)
        column = torch.arange(slots.shape[1], device=self.query.device)
        return slots[column < self.seq_lens()[:, None]]

    def packed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all requests, [sum of lens, Hkv, D]."""
        slots = self.slots()
        return self.key_cache.flatten(0, 1)[slots], self.value_cache.flatten(0, 1)[slots]


Run = Callable[[], torch.Tensor]
Prepare = Callable[[PagedCall], Run]


@dataclass
class PagedCase:
    """One row before it is measured; everything has head dim D for keys and values."""

    case: str
    heads: tuple[int, int]  # of queries, of keys
    lens: list[int]
    page_size: int
    flashbpt: Prepare
    others: dict[str, Prepare | None]  # what runs beside it
    unit: str = "us"
    rows: int = 1
    prefix: int = 0
    head_dim: int = 128
    cache_dtype: torch.dtype = torch.bfloat16
    graph: bool = True
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of the row

    def row(self) -> Row:
        requests = f"{self.heads[0]}/{self.heads[1]} B{len(self.lens)} page {self.page_size}"
        return {
            "case": f"{requests}, {self.case}" if self.case else requests,
            "dtype": str(self.cache_dtype).removeprefix("torch."),
            "head_dim": self.head_dim,
            "seqlen": max(self.lens),
            "causal": True,
            "direction": "fwd",
            "unit": self.unit,
            "heads": list(self.heads),
            "batch": len(self.lens),
            "page_size": self.page_size,
            **self.extra,
        }

    @property
    def kv_bytes(self) -> int:
        keys = self.prefix + sum(n - self.prefix for n in self.lens)
        return keys * self.heads[1] * 2 * self.head_dim * self.cache_dtype.itemsize

    @property
    def flop(self) -> int:
        pairs = sum(visible_keys(n, self.rows) for n in self.lens)
        return 4 * self.heads[0] * self.head_dim * pairs

    def value(self, seconds: float) -> float:
        """A call's time in the row's unit."""
        if self.unit == "us":
            return seconds * 1e6
        return {"TB/s": self.kv_bytes, "TFLOP/s": self.flop}[self.unit] / seconds * 1e-12

    def draw(self, device: str) -> list[PagedCall]:
        """Calls over one pool of pages, none of them in two."""
        shared = self.prefix // self.page_size
        own = pages_of([n - self.prefix for n in self.lens], self.page_size)
        of_a_call = shared + sum(own)
        page = (self.page_size, self.heads[1], self.head_dim)
        size = 2 * of_a_call * torch.Size(page).numel() * self.cache_dtype.itemsize
        count = copies(size, device)
        random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        caches = [random(count * of_a_call, *page).to(self.cache_dtype) for _ in range(2)]
        calls = []
        for ids in torch.randperm(count * of_a_call, dtype=torch.int32).split(of_a_call):
            query = random(len(self.lens) * self.rows, self.heads[0], self.head_dim)
            table = block_table(ids, own, shared).to(device)
            calls.append(PagedCall(query, *caches, table, self.lens, self.prefix))
        return calls


def pages_of(lens: list[int], page_size: int) -> list[int]:
    return [-(-n // page_size) for n in lens]


def visible_keys(keys: int, rows: int) -> int:
    """Over all rows, when the last of them sees all keys, and each other row one fewer."""
    return rows * (keys - rows) + rows * (rows + 1) // 2


def block_table(ids: torch.Tensor, pages: list[int], shared: int = 0) -> torch.Tensor:
    """The pages `ids` in turn: first those that are shared, then each request's."""
    prefix, *own = ids.split([shared, *pages])
    table = torch.zeros(len(pages), shared + max(pages), dtype=torch.int32)
    table[:, :shared] = prefix
    for row, held in zip(table[:, shared:], own):
        row[: len(held)] = held
    return table


def repaged(call: PagedCall, page_size: int) -> PagedCall:
    """The same keys in pages of another size, in random order."""
    pages = pages_of(call.lens, page_size)
    table = block_table(torch.randperm(sum(pages), dtype=torch.int32), pages)
    shape = sum(pages), page_size, *call.key_cache.shape[2:]
    caches = [call.key_cache.new_zeros(shape) for _ in range(2)]
    moved = PagedCall(call.query, *caches, table.to(call.query.device), call.lens)
    slots = moved.slots()
    for cache, packed in zip(caches, call.packed()):
        cache.view(-1, *shape[2:])[slots] = packed
    return moved


def paged(call: PagedCall) -> Run:
    """flashbpt.paged_attention."""
    rows = {}
    if call.rows > 1:
        rows = {"cu_seqlens_q": call.cu_seqlens_q(), "max_seqlen_q": call.rows}
    return functools.partial(
        flashbpt.paged_attention,
        call.query,
        call.key_cache,
        call.value_cache,
        call.block_table,
        call.seq_lens(),
        **rows,
    )


def measure(cases: Iterable[PagedCase], options: Options, device: str = "cuda") -> Iterator[Row]:
    if device == "cuda" and not torch.cuda.is_available():
        return
    for case in cases:
        if options.wants(case.row()):
            yield _measure(case, options, device)


def _measure(case: PagedCase, options: Options, device: str) -> Row:
    torch.cuda.empty_cache()
    row, calls = case.row(), case.draw(device)
    graph = case.graph and device == "cuda"
    others = options.wanted_peers(case.others)
    candidates = {}
    for name, prepare in {"flashbpt": case.flashbpt, **others}.items():
        try:
            if prepare is not None:
                candidates[name] = _Candidate(prepare, calls, graph)
        except Exception as error:  # of whatever kind a peer's package has
            if name == "flashbpt":
                raise
            print(f"{name} refuses {row['case']}: {error}", file=sys.stderr)
    one = {name: candidate.one for name, candidate in candidates.items()}
    replay = {name: candidate.replay for name, candidate in candidates.items()}
    each, clock = [(i,) for i in range(len(calls))], "events" if device == "cuda" else "host"
    if graph:
        alone = alternate(one, _budget(options, EAGER_SECONDS * len(one)), each, clock)
        row["eager_us"] = {name: s and s * 1e6 for name, s in alone.items()}
        seconds = alternate(replay, _budget(options, SECONDS[device] * len(one)), clock=clock)
        seconds = {name: s and s / graph_calls(len(calls)) for name, s in seconds.items()}
        results = {name: (replay[name](),) for name, s in seconds.items() if s}
    else:
        seconds = alternate(one, _budget(options, SECONDS[device] * len(one)), each, clock)
        results = {name: (one[name](0),) for name, s in seconds.items() if s}
    sm_clock = {"sm_mhz": sm_mhz()} if device == "cuda" else {}
    compare(results, TOLERANCE[torch.bfloat16], row)
    values = {name: case.value(s) for name, s in seconds.items() if s}
    row |= {"backend": backend(calls[0]), "flashbpt": values["flashbpt"]}
    return {**row, **{name: values.get(name) for name in others}, **sm_clock}


def _budget(options: Options, seconds: float) -> Budget:
    if options.quick:
        return Budget(seconds=0.0, min_rounds=2)
    return Budget(seconds=seconds, max_rounds=200)


class _Candidate:
    """A function prepared for all the calls of a row."""

    def __init__(self, prepare: Prepare, calls: list[PagedCall], graph: bool):
        self.runs = [prepare(call) for call in calls]
        for run in self.runs:  # whoever refuses does so here
            run()
        self.graph = torch.cuda.CUDAGraph() if graph else None
        if graph:
            with torch.cuda.graph(self.graph):
                for i in range(graph_calls(len(calls))):
                    self.result = self.one(i % len(calls))

    def one(self, i: int) -> torch.Tensor:
        return self.runs[i]()

    def replay(self) -> torch.Tensor:
        """Runs the graph; returns what the last of its calls computes."""
        self.graph.replay()
        return self.result


def graph_calls(calls: int) -> int:
    """Of a graph: each of the calls in turn, GRAPH_CALLS or more."""
    return calls * -(-GRAPH_CALLS // calls)


def backend(call: PagedCall) -> str | None:
    """What serves a call of flashbpt.paged_attention."""
    run = paged(call)
    try:
        return flashbpt.which_kernel(*run.args, op="paged_attention", **run.keywords).kernel
    except ValueError:  # this which_kernel does not know the op
        return "sm80" if call.query.is_cuda else "cpu"
