"""The benchmarks run, write what they promise, and compute their ratios the right way round."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.git_tree import git_tree

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SUITES = ("cpu", "overhead")
HEADER = {"gpu", "driver", "torch", "csrc", "date"}
ROW = {
    "suite": str,
    "case": str,
    "backend": str,
    "dtype": str,
    "head_dim": int,
    "seqlen": int,
    "causal": bool,
    "direction": str,
    "unit": str,
    "flashbpt": float,
}


@pytest.fixture(scope="module")
def bench():
    """The modules of benchmarks/, by name, as run.py imports them."""
    former = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = former
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(BENCHMARKS)):
                del sys.modules[name]


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Both suites with --quick as a user runs them: (printed text, results by suite)."""
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCHMARKS / "run.py"), "--quick", "--out", str(out)]
    for suite in SUITES:
        command += ["--suite", suite]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # no barriers to wait at on a busy machine
    done = subprocess.run(command, capture_output=True, text=True, cwd=out, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    files = {path.stem: path for path in out.glob("*/*.json")}
    assert set(files) == set(SUITES)
    assert len({path.parent for path in files.values()}) == 1
    return done.stdout, {name: json.loads(path.read_text()) for name, path in files.items()}


@pytest.mark.parametrize("suite", SUITES)
def test_results_have_the_documented_format(quick, bench, suite):
    report = bench("report")
    result = quick[1][suite]
    assert set(result) == {"header", "rows"} and set(result["header"]) == HEADER
    assert result["header"]["torch"] == torch.__version__
    assert result["rows"]
    for row in result["rows"]:
        for key, kind in ROW.items():
            assert isinstance(row[key], kind), (key, row)
        assert row["suite"] == suite
        assert row["unit"] in report.HIGHER_IS_BETTER
        assert row["direction"] in ("fwd", "bwd", "fwd+bwd")
        assert getattr(torch, row["dtype"]).is_floating_point
        assert row["flashbpt"] > 0
        assert ("sm_mhz" in row) == (row["backend"] != "cpu")
        assert any(row.get(name, 0) > 0 for name in report.PEER_NAMES)
        assert row["ratio"] == pytest.approx(report.ratio(row))


def test_cpu_suite_covers_its_cases(quick):
    rows = quick[1]["cpu"]["rows"]
    assert {row["backend"] for row in rows} == {"cpu"}
    assert {row["unit"] for row in rows} == {"TFLOP/s"}
    for key, values in {
        "dtype": {"float32", "bfloat16"},
        "causal": {False, True},
        "direction": {"fwd", "fwd+bwd"},
    }.items():
        assert {row[key] for row in rows} == values
    cases = [(r["dtype"], r["head_dim"], r["seqlen"], r["causal"], r["direction"]) for r in rows]
    assert len(set(cases)) == len(cases) == 2 * 2 * 2 * len({row["seqlen"] for row in rows})


def test_overhead_suite_covers_its_modes(quick):
    rows = [row for row in quick[1]["overhead"]["rows"] if row["backend"] == "cpu"]
    assert {row["unit"] for row in rows} == {"us"}
    barred = {(row["mode"], row["bar"]) for row in rows if row["bar"] is not None}
    assert barred == {("no grad", 1.5), ("with grad", 2.0), ("backward", 1.7)}
    assert any("varlen_attention" in row["case"] for row in rows)


@pytest.mark.parametrize("suite", SUITES)
def test_the_worst_row_is_printed_last(quick, suite):
    text, results = quick
    tables = text.split("geometric mean of ")
    worst = min(row["ratio"] for row in results[suite]["rows"])
    after = tables[1 + SUITES.index(suite)]
    assert after.splitlines()[1].startswith(f"worst row: {worst:.3f}")
    for row in results[suite]["rows"]:
        assert row["case"] in text


def test_quick_alone_writes_nothing(bench, monkeypatch, capsys):
    run = bench("run")
    written = []
    monkeypatch.setattr(run, "write", lambda *args: written.append(args))
    monkeypatch.setattr(run, "SUITES", {"cpu": FakeSuite})
    run.main(["--quick"])
    assert not written and "worst row: 0.500 of sdpa" in capsys.readouterr().out
    run.main([])  # without --quick: beside the sources, under the device's name
    ((path, header, rows),) = written
    assert path == BENCHMARKS / "results" / run.slug(header["gpu"]) / "cpu.json"
    assert [row["ratio"] for row in rows] == [2.0, 0.5]


class FakeSuite:
    """Two rows, of which the second is the worse."""

    @staticmethod
    def rows(quick):
        shared = {"case": "c", "backend": "cpu", "dtype": "float32", "head_dim": 8, "seqlen": 8}
        shared |= {"causal": False, "direction": "fwd", "unit": "TFLOP/s", "sdpa": 1.0}
        yield {**shared, "flashbpt": 2.0}
        yield {**shared, "flashbpt": 0.5}

    @staticmethod
    def verdict(rows):
        return [f"{len(rows)} rows"]


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


def test_cpu_targets(bench):
    cpu = bench("suites.cpu")
    rows = [{"unit": "TFLOP/s", "flashbpt": f, "sdpa": 1.0} for f in (0.9, 0.9, 0.59)]
    mean, worst = cpu.verdict(rows)
    assert "MISSED" in mean and "MISSED" in worst and "1 of 3" in worst
    mean, worst = cpu.verdict(rows[:2])
    assert "met" in mean and "met" in worst


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
    assert seen == [0, 1, 2, 0, 1]


def test_a_peer_may_refuse_and_flashbpt_may_not(bench):
    timing = bench("timing")

    def refuse():
        raise NotImplementedError("no kernel")

    budget = timing.Budget(seconds=0.0, min_rounds=1)
    assert timing.alternate({"flashbpt": lambda: None, "fa3": refuse}, budget)["fa3"] is None
    with pytest.raises(NotImplementedError):
        timing.alternate({"flashbpt": refuse}, budget)


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
    assert sum(t.numel() * t.element_size() for (t,) in inputs) >= 2 * l2
    candidates = {
        "flashbpt": lambda x: x + 1,
        "sdpa": lambda x: (x + 1) + 1,
    }
    budget = timing.Budget(seconds=0.2, calls=10)
    seconds = timing.alternate(candidates, budget, inputs, clock="events")
    assert 1.3 < seconds["sdpa"] / seconds["flashbpt"] < 3


# ---- the header


def git(*arguments, cwd=ROOT):
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, cwd=cwd)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def test_the_tree_hash_is_git_s(tmp_path):
    """The hash of a folder with what git sorts and counts in its own way, and that of csrc."""
    if git("--version") is None:
        pytest.skip("no git")
    folder = tmp_path / "sources"
    for name in ("a.h", "a/b.cpp", "a/deep/c.cu", "a-b/d.h", "a0", "Z"):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")
    (folder / "empty" / "too").mkdir(parents=True)
    (folder / "Z").chmod(0o755)
    git("init", "--quiet", cwd=folder)
    git("-c", "core.autocrlf=false", "add", "--all", cwd=folder)
    expected = git("write-tree", cwd=folder)
    shutil.rmtree(folder / ".git")
    assert git_tree(folder) == expected

    committed = git("rev-parse", "HEAD:csrc")
    if committed and git("status", "--porcelain", "--ignored", "csrc") == "":
        assert git_tree(ROOT / "csrc") == committed


def test_the_header_names_what_was_measured(bench):
    header = bench("run").header()
    assert set(header) == HEADER
    assert header["csrc"] == git_tree(ROOT / "csrc")


def test_names_of_results_are_plain(bench):
    run = bench("run")
    assert run.slug("NVIDIA H200 (SXM)") == "nvidia-h200-sxm"
    assert run.device_name()
