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
