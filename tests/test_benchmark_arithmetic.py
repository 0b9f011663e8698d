"""The arithmetic of the benchmarks: ratios, targets, and how a time is taken."""

import pytest
import torch

# ---- ratios


@pytest.mark.parametrize(
    "unit, flashbpt, peers, best, ratio",
    [
        ("TFLOP/s", 3.0, {"sdpa": 2.0, "fa2": 4.0}, "fa2", 0.75),
        ("us", 3.0, {"sdpa": 6.0, "fa2": 4.5}, "fa2", 1.5),
        ("GB", 4.0, {"checkpoint": 2.0, "selective": None}, "checkpoint", 0.5),
        ("ms", 4.0, {"sdpa": None}, None, None),
    ],
)
def test_ratio_to_the_best_peer(bench, unit, flashbpt, peers, best, ratio):
    report = bench("report")
    row = {"unit": unit, "flashbpt": flashbpt, **peers, "threads": 99.0}
    assert report.best_peer(row) == best
    assert report.ratio(row) == ratio


def test_geometric_mean(bench):
    assert bench("report").geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)


def test_ratio_to_a_named_peer(bench):
    report = bench("report")
    row = {"unit": "us", "flashbpt": 4.0, "cudnn": 2.0, "fa2": 8.0, "efficient": None}
    assert (report.ratio(row), report.ratio(row, "fa2")) == (0.5, 2.0)
    assert report.ratio(row, "efficient") is None and report.ratio(row, "fa3") is None


def test_targets(bench):
    target = bench("report").target
    assert target("t", [], mean=1.0) == []
    (line,) = target("t", [0.9, 0.9, 0.59], mean=0.7, worst=0.6)
    assert "3 rows" in line and "1 under it" in line and line.endswith("MISSED")
    for mean, worst, end in [(0.79, 0.5, "MISSED"), (0.78, 0.5, ", met"), (0, 0, ", met")]:
        (line,) = target("t", [0.9, 0.9, 0.59], mean, worst)
        assert line.endswith(end)


def test_bars(bench):
    bar_line = bench("report").bar_line
    assert bar_line("b", [], 1.0) == []
    for bar, end in [(1.25, ", met"), (1.24, "MISSED"), (None, "worst 1.25")]:
        (line,) = bar_line("b", [0.8, 1.25], bar)
        assert "mean 1.00" in line and line.endswith(end)


def test_summary_groups_rows_and_leaves_out_flashbpt_itself(bench):
    shared = {"dtype": "float32", "head_dim": 64, "unit": "TFLOP/s", "direction": "fwd"}
    rows = [
        {**shared, "flashbpt": 2.0, "fa2": 1.0, "cudnn": 4.0},
        {**shared, "flashbpt": 8.0, "fa2": 1.0, "cudnn": None},
        {**shared, "flashbpt": 3.0, "fa2": 1.0, "tf32": True},
        {**shared, "flashbpt": 9.0, "flag": 1.0, "bar": 1.25},
    ]
    head, first, second = bench("report").summary(rows).splitlines()
    assert head.split()[-6:] == ["cudnn", "fa2", "best", "peer", "worst", "row"]
    assert first.split() == "float32 64 fwd 2 0.5 4 2 0.5".split()
    assert second.split() == "float32 TF32 64 fwd 1 - 3 3 3".split()


# ---- paged caches


@pytest.mark.parametrize("keys, rows", [(7, 1), (7, 4), (7, 7), (1, 1)])
def test_operations_of_new_rows(bench, keys, rows):
    module = bench("paged_case")
    seen = sum(k <= keys - rows + r for r in range(rows) for k in range(keys))
    assert module.visible_keys(keys, rows) == seen
    case = paged_case(bench, lens=[keys, keys + 2], rows=rows, unit="TFLOP/s")
    more = module.visible_keys(keys + 2, rows)
    assert case.flop == 4 * 4 * 128 * (seen + more)
    assert case.value(1e-6) == pytest.approx(case.flop * 1e-6)


def paged_case(bench, **fields):
    module = bench("paged_case")
    fields = {"case": "", "heads": (4, 2), "lens": [8], "page_size": 4, **fields}
    return module.PagedCase(flashbpt=module.paged, others={}, **fields)


def test_bytes_of_keys_and_values(bench):
    case = paged_case(bench, lens=[5, 9], unit="TB/s")
    assert case.kv_bytes == (5 + 9) * 2 * 128 * 2 * 2
    assert case.value(2e-9) == pytest.approx(case.kv_bytes / 2e-9 * 1e-12)
    half = paged_case(bench, lens=[5, 9], cache_dtype=torch.float8_e4m3fn)
    assert half.kv_bytes * 2 == case.kv_bytes and half.value(3e-6) == pytest.approx(3.0)
    shared = paged_case(bench, lens=[5, 9], prefix=4)  # read once
    assert shared.kv_bytes * 14 == case.kv_bytes * (4 + 1 + 5)


def test_calls_share_a_pool_and_no_page(bench, monkeypatch):
    module = bench("paged_case")
    monkeypatch.setattr(module, "copies", lambda size, device: 3)
    case = paged_case(bench, lens=[9, 5], prefix=4)
    calls = case.draw("cpu")
    assert len({call.key_cache.data_ptr() for call in calls}) == 1 and len(calls) == 3
    used = []
    for call in calls:
        assert call.block_table.shape == (2, 3) and call.block_table[1, 2] == 0
        assert call.block_table[0, 0] == call.block_table[1, 0]
        used += call.block_table[0].tolist() + call.block_table[1, 1:2].tolist()
    assert sorted(used) == list(range(len(calls[0].key_cache))) == list(range(3 * 4))


def test_keys_in_other_pages_and_as_flashinfer_takes_them(bench):
    module, peers = bench("paged_case"), bench("paged_peers")
    (call,) = paged_case(bench, lens=[9, 12, 1]).draw("cpu")
    key, value = call.packed()
    assert len(key) == 22 and torch.equal(key[8], call.key_cache[call.block_table[0, 2], 0])
    moved = module.repaged(call, 8)
    assert moved.key_cache.shape == (2 + 2 + 1, 8, 2, 128)
    assert all(map(torch.equal, moved.packed(), (key, value)))
    indptr, indices, last = peers.csr(call)
    assert (indptr.tolist(), last.tolist()) == ([0, 3, 6, 7], [1, 4, 1])
    assert torch.equal(indices[3:6], call.block_table[1])
    indptr, indices, last = peers.csr(call, first=1)
    assert (indptr.tolist(), last.tolist()) == ([0, 2, 4, 4], [1, 4, 1])


def test_a_graph_holds_every_call_as_often(bench):
    calls = bench("paged_case").graph_calls
    assert [calls(n) for n in (1, 3, 8, 30)] == [8, 9, 8, 30]


def test_decode_targets(bench):
    def row(kind, heads=(32, 8), batch=8, seqlen=32768, **values):
        return {"kind": kind, "heads": list(heads), "batch": batch, "seqlen": seqlen, **values}

    def line(start, *rows):
        lines = bench("suites.decode").verdict(list(rows))
        (found,) = [line for line in lines if line.startswith(start)]
        return found

    rate, time = {"unit": "TB/s"}, {"unit": "us"}
    others, mqa = "target: other uniform", "target: uniform MQA"
    for speeds, end in [((0.99, 1.1), ", met"), ((0.97, 1.2), "MISSED"), ((1.0, 1.0), "MISSED")]:
        rows = [row("uniform", **rate, flashbpt=s, fa3=1.0, flashinfer=0.5) for s in speeds]
        assert line(others, *rows).endswith(end)
    for speeds, end in [((0.99, 1.5), ", met"), ((1.1, 1.1), "MISSED")]:
        rows = [row("uniform", (32, 1), **rate, flashbpt=s, fa3=1.0) for s in speeds]
        assert line(mqa, *rows).endswith(end)
    for ours, peer, end in [(4.0, 4.2, ", met"), (3.5, 3.0, ", met"), (3.5, 3.2, "MISSED")]:
        assert line("target: skewed", row("skewed", **rate, flashbpt=ours, fa3=peer)).endswith(end)
    for ours, end in [(1.12, ", met"), (1.1, "MISSED")]:
        small = row("uniform", batch=1, seqlen=8192, **rate, flashbpt=ours, fa3=1.0)
        assert line("bar: time of the best peer, one", small).endswith(end)
    for ours, end in [(1.0, ", met"), (0.99, "MISSED")]:
        four = row("four_rows", **rate, flashbpt=ours, fa3=1.0, flashinfer_fa2=None)
        assert line("target: 4 rows", four).endswith(end)
    for ours, end in [(1.0, ", met"), (1.1, "MISSED")]:
        fp8 = row("fp8", **time, flashbpt=ours, bf16_cache=1.75)
        beside = row("fp8", **rate, flashbpt=1.0, flashinfer=2.0)
        assert line("target: fp8", fp8, beside).endswith(end) and "1 rows" in line(
            "target: fp8", fp8
        )
        host = row("host", **time, flashbpt=1.45 * ours, fa2=1.0)
        assert line("bar: host time", host).endswith(end)
    for missing in ("target: other", "target: uniform", "bar: time of the best"):
        alone = [row("uniform", **rate, flashbpt=1.0, fa3=None)]
        assert not any(one.startswith(missing) for one in bench("suites.decode").verdict(alone))


@pytest.mark.gpu
def test_a_row_is_measured_by_graphs(bench):
    case = paged_case(bench, lens=[256, 40], page_size=16, unit="TB/s")
    case.others = {"own_flat": case.flashbpt}
    options = bench("options").Options(quick=True)
    (row,) = bench("paged_case").measure([case], options)
    assert set(row["eager_us"]) == {"flashbpt", "own_flat"} and row["own_flat"] > 0
    calls = case.draw("cuda")
    candidate = bench("paged_case")._Candidate(case.flashbpt, calls, graph=True)
    last = (bench("paged_case").graph_calls(len(calls)) - 1) % len(calls)
    for _ in range(2):
        calls[last].query.normal_()
        torch.testing.assert_close(candidate.replay(), candidate.one(last))


# ---- timing


def test_candidates_alternate_and_the_warm_up_is_not_counted(bench, monkeypatch):
    timing = bench("timing")
    calls = []
    clock = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: next(clock) * 10**9)
    budget = timing.Budget(seconds=0.0, min_rounds=4, calls=2)
    candidates = {"flashbpt": lambda: calls.append("a"), "sdpa": lambda: calls.append("b")}
    seconds = timing.alternate(candidates, budget)
    assert "".join(calls) == "ab" + "aabb" + "bbaa" + "aabb" + "bbaa"
    assert seconds == {"flashbpt": 0.5, "sdpa": 0.5}  # one tick a sample of two calls


def test_rounds_end_with_the_budget(bench):
    timing = bench("timing")
    counted = []
    budget = timing.Budget(seconds=60.0, min_rounds=1, max_rounds=7)
    timing.alternate({"flashbpt": lambda: counted.append(1)}, budget)
    assert len(counted) == 1 + 7


def test_the_warm_up_of_a_budget_comes_first_and_is_not_counted(bench, monkeypatch):
    timing = bench("timing")
    calls, now = [], [0.0]

    def call(name):
        calls.append(name)
        now[0] += 0.01

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: int(now[0] * 1e9))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    budget = timing.Budget(seconds=0.0, min_rounds=1, warm_up=0.05)
    candidates = {"flashbpt": lambda: call("a"), "sdpa": lambda: call("b")}
    seconds = timing.alternate(candidates, budget)
    assert "".join(calls) == "ab" + "ab" * 3 + "ab"
    assert seconds == pytest.approx({"flashbpt": 0.01, "sdpa": 0.01})


def test_the_median_ignores_a_disturbed_sample(bench, monkeypatch):
    timing = bench("timing")
    durations = iter([5, 900, 4])
    now = [0, 0]

    def perf_counter_ns():
        now[0] += 1
        if now[0] % 2 == 0:
            now[1] += next(durations)
        return now[1]

    monkeypatch.setattr(timing.time, "perf_counter_ns", perf_counter_ns)
    budget = timing.Budget(seconds=0.0, min_rounds=3)
    assert timing.alternate({"flashbpt": lambda: None}, budget)["flashbpt"] == pytest.approx(5e-9)


def test_inputs_rotate(bench):
    timing = bench("timing")
    seen = []
    budget = timing.Budget(seconds=0.0, min_rounds=2, calls=2)
    timing.alternate({"flashbpt": seen.append}, budget, inputs=[(0,), (1,), (2,)])
    assert seen == [0, 1, 2] + [0, 1, 2, 0]  # the warm-up, then in turns


def test_a_peer_may_refuse_and_flashbpt_may_not(bench):
    timing = bench("timing")

    def refuse():
        raise NotImplementedError("no kernel")

    budget = timing.Budget(seconds=0.0, min_rounds=1)
    assert timing.alternate({"flashbpt": lambda: None, "fa3": refuse}, budget)["fa3"] is None
    with pytest.raises(NotImplementedError):
        timing.alternate({"flashbpt": refuse}, budget)


@pytest.mark.gpu
def test_the_clock_is_read(bench):
    assert 100 < bench("timing").sm_mhz() < 5000


def test_peers_are_functions_or_none_and_never_flashbpt(bench, monkeypatch):
    import flashbpt
    import flashbpt.integrations.sdpa as shim_module

    peers, report = bench("peers"), bench("report")
    assert set(peers.PEERS) <= set(report.PEER_NAMES)
    q, k, v = (torch.randn(1, 2, 8, 16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    monkeypatch.setattr(shim_module, "attention", None)  # whoever reaches flashbpt fails
    with flashbpt.patch_sdpa():
        for name in ("sdpa", "math"):
            torch.testing.assert_close(peers.PEERS[name](q, k, v, True), expected)


@pytest.mark.gpu
def test_events_measure_the_gpu(bench):
    timing = bench("timing")
    inputs = timing.rotated(lambda: (torch.randn(1 << 22, device="cuda"),), "cuda")
    l2 = torch.cuda.get_device_properties().L2_cache_size
    size = inputs[0][0].numel() * 4
    assert 2 * l2 <= len(inputs) * size < 2 * l2 + size
    candidates = {
        "flashbpt": lambda x: x + 1,
        "sdpa": lambda x: (x + 1) + 1,
    }
    budget = timing.Budget(seconds=0.2, calls=10)
    seconds = timing.alternate(candidates, budget, inputs, clock="events")
    assert 1.3 < seconds["sdpa"] / seconds["flashbpt"] < 3
