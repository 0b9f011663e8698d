"""Attention over paged caches in CUDA graphs and on several streams."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from compare import assert_bitwise, assert_close
from paged_cases import Call, Case

import flashbpt


@pytest.mark.gpu
@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (32, 1)])
def test_graph_replays_with_other_lengths_and_tables(cuda, heads, kv_heads):
    """Each replay is what a call of its own gives, whatever the lengths at the capture were."""
    case = Case(lens=(700, 3, 40), heads=heads, kv_heads=kv_heads, dtype="bf16", dim=128)
    calls = [
        Call(replace(case, lens=lens), cuda)
        for lens in ((700, 3, 40), (1, 700, 0), (5, 5, 690), (350, 350, 1))
    ]
    width = max(call.table.shape[1] for call in calls)
    pages = max(call.key_cache.shape[0] for call in calls)
    shape = (pages, *calls[0].key_cache.shape[1:])
    keys, values = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=cuda) for _ in "kv")
    table = torch.zeros(3, width, dtype=torch.int32, device=cuda)
    lens = torch.zeros(3, dtype=torch.int32, device=cuda)
    query = torch.zeros(calls[0].query.shape, dtype=torch.bfloat16, device=cuda)

    def place(call):
        for to, rows in ((keys, call.key_cache), (values, call.value_cache)):
            to[: rows.shape[0]] = rows
        table[:, : call.table.shape[1]] = call.table
        lens.copy_(call.lens)
        query.copy_(call.query)

    def run():
        return flashbpt.paged_attention(query, keys, values, table, lens, return_lse=True)

    place(calls[0])
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for call in calls:
        place(call)
        graph.replay()
        for name, a, b in zip(("out", "lse"), got, run(), strict=True):
            assert_bitwise(name, a, b)
        exact, exact_lse = call.expected()
        plain, plain_lse = call.expected(product=torch.bfloat16, softmax=torch.float32)
        assert_close("out", got[0].cpu(), exact, plain.to(torch.bfloat16))
        assert_close("lse", got[1].cpu(), exact_lse, plain_lse.float())


def pairs_of_calls(cuda, count):
    """Pairs of a function that attends into `out`, and what it must give: much of it is joined."""
    for i in range(count):
        call = Call(Case(lens=(3000, 40, 800 + i), heads=32, kv_heads=1, dtype="bf16"), cuda)
        out = torch.zeros_like(call.run()[0])
        call.query = call.query.to(cuda)

        def run(call=call, out=out):
            call.run(out=out)

        yield run, out, call.run()[0]


@pytest.mark.gpu
def test_streams_do_not_share_barriers(cuda):
    """Calls on two streams at a time, of which each has blocks that wait for each other."""
    calls = list(pairs_of_calls(cuda, 2))
    torch.cuda.synchronize()
    for _ in range(50):
        for (run, out, _), stream in zip(calls, (torch.cuda.Stream(), torch.cuda.Stream())):
            with torch.cuda.stream(stream):
                out.zero_()
                run()
        torch.cuda.synchronize()
        for _, out, expected in calls:
            assert_bitwise("out", out, expected)


@pytest.mark.gpu
def test_graphs_do_not_share_barriers(cuda):
    """Graphs that were captured on one stream run side by side."""
    calls = list(pairs_of_calls(cuda, 2))
    graphs = []
    for run, _, _ in calls:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for _ in range(20):
                run()
    for _ in range(10):
        for graph, (_, out, _) in zip(graphs, calls, strict=True):
            with torch.cuda.stream(torch.cuda.Stream()):
                out.zero_()
                graph.replay()
        torch.cuda.synchronize()
        for _, out, expected in calls:
            assert_bitwise("out", out, expected)


@pytest.mark.gpu
def test_barriers_of_a_graph_go_with_it(cuda):
    run, out, expected = next(pairs_of_calls(cuda, 1))
    used = []
    for _ in range(300):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        out.zero_()
        graph.replay()
        assert_bitwise("out", out, expected)
        del graph
        used.append(torch.cuda.memory_allocated())
    assert used[-1] <= used[0] + (1 << 20)  # 300 graphs at a time would hold 4.8 MB


@pytest.mark.gpu
def test_the_first_call_may_be_captured(cuda):
    """Nothing was prepared by a call outside the graph."""
    code = """
import torch, flashbpt
g = torch.Generator("cuda").manual_seed(0)
query = torch.randn(1, 32, 128, device="cuda", dtype=torch.bfloat16, generator=g)
keys, values = torch.randn(2, 64, 64, 1, 128, device="cuda", dtype=torch.bfloat16, generator=g)
table = torch.arange(64, device="cuda")[None]
lens = torch.tensor([4000], device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = flashbpt.paged_attention(query, keys, values, table, lens)
graph.replay()
assert torch.equal(out, flashbpt.paged_attention(query, keys, values, table, lens))
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
def test_graph_replays_with_other_rows(cuda):
    """cu_seqlens_q moves between the requests, to where decoding and prefill meet and past it."""
    call = Call(Case(lens=(300, 200, 90), rows=(70, 40, 10), dtype="bf16"), cuda)
    query, cu = call.query.to(cuda), call.options.pop("cu_seqlens_q")

    def run():
        return call.run(cu_seqlens_q=cu)

    run()
    graph = torch.cuda.CUDAGraph()
    call.query = query
    with torch.cuda.graph(graph):
        got = run()
    for rows in ((70, 40, 10), (1, 1, 80), (118, 1, 1), (0, 33, 32), (0, 0, 0)):
        cu.copy_(torch.tensor([0, *torch.tensor(rows).cumsum(0)]))
        graph.replay()
        for name, a, b in zip(("out", "lse"), got, run(), strict=True):
            assert_bitwise(name, a, b)
        call.rows, call.query = rows, query[: sum(rows)].cpu()
        if sum(rows):
            exact, exact_lse = call.expected()
            plain, plain_lse = call.expected(product=torch.bfloat16, softmax=torch.float32)
            n = sum(rows)
            assert_close("out", got[0][:n].cpu(), exact, plain.to(torch.bfloat16))
            assert_close("lse", got[1][:n].cpu(), exact_lse, plain_lse.float())
        assert (got[0][sum(rows) :] == 0).all() and (got[1][sum(rows) :] == -torch.inf).all()
        call.query = query
