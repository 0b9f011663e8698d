"""The benchmarks run, write what they promise, and compute their ratios the right way round."""

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from bench_cases import ROW, cases_of, options_of

from benchmarks.git_tree import git_tree

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
SUITES = ("cpu", "overhead")
HEADER = {"gpu", "driver", "torch", "csrc", "date"}


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


def test_a_part_writes_nothing(bench, monkeypatch, capsys):
    run = bench("run")
    written = []
    monkeypatch.setattr(run, "write", lambda *args: written.append(args))
    monkeypatch.setattr(run, "SUITES", {"cpu": FakeSuite})
    run.main(["--quick"])
    assert not written and "worst row: 0.500 of sdpa" in capsys.readouterr().out
    run.main(["--only", "c"])
    run.main(["--peer", "fa2"])
    assert not written  # nor a part
    run.main([])  # the whole suite: beside the sources, under the device's name
    ((path, header, rows),) = written
    assert path == BENCHMARKS / "results" / run.slug(header["gpu"]) / "cpu.json"
    assert [row["ratio"] for row in rows] == [2.0, 0.5]


class FakeSuite:
    """Two rows, of which the second is the worse."""

    @staticmethod
    def rows(options):
        shared = {"case": "c", "backend": "cpu", "dtype": "float32", "head_dim": 8, "seqlen": 8}
        shared |= {"causal": False, "direction": "fwd", "unit": "TFLOP/s", "sdpa": 1.0}
        yield {**shared, "flashbpt": 2.0}
        yield {**shared, "flashbpt": 0.5}

    @staticmethod
    def verdict(rows):
        return [f"{len(rows)} rows"]


# ---- suites of CUDA: their cases, and that these run, on the CPU with substitutes for the peers


CUDA_SUITES = ("dense", "varlen", "masks")


def varlen_by_sdpa(q, k, v, cu_q, cu_k, max_q, max_k, causal=False):
    sequences = zip(*(t.tensor_split(cu_q[1:-1].tolist()) for t in (q, k, v)))
    heads_first = ([t.transpose(0, 1) for t in sequence] for sequence in sequences)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return torch.cat([sdpa(*s, is_causal=causal).transpose(0, 1) for s in heads_first])


def fa3_by_sdpa(
    q,
    k,
    v,
    *,
    softmax_scale,
    num_splits,
    is_causal,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    window_size_left=-1,
    window_size_right=-1,
):
    """torch.ops.flash_attn_3.fwd, of the arguments that it is called with."""
    assert softmax_scale == pytest.approx(q.shape[-1] ** -0.5) and num_splits == 1
    if cu_seqlens_q is not None:
        assert (max_seqlen_q, max_seqlen_k) == (max(cu_seqlens_q.diff()), max(cu_seqlens_k.diff()))
        offsets = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return varlen_by_sdpa(q, k, v, *offsets, is_causal), None, None, None
    rows, keys = torch.arange(q.shape[1])[:, None], torch.arange(k.shape[1])
    right = 0 if is_causal else window_size_right
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    seen &= keys <= rows + right if right >= 0 else True
    seen &= keys >= rows - window_size_left if window_size_left >= 0 else True
    sdpa = torch.nn.functional.scaled_dot_product_attention
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(*heads_first, attn_mask=seen, enable_gqa=True).transpose(1, 2), None, None, None


@pytest.fixture
def cuda_peers(bench, monkeypatch, one_thread):
    peers = bench("peers")
    for name in ("fa2", "efficient", "cudnn"):
        monkeypatch.setitem(peers.PEERS, name, peers.sdpa)
    monkeypatch.setitem(peers.VARLEN_PEERS, "fa2", varlen_by_sdpa)
    for name in ("flash_attn_3", "flash_attn_3._C"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    fa3 = types.SimpleNamespace(fwd=fa3_by_sdpa)
    monkeypatch.setattr(torch.ops, "flash_attn_3", fa3, raising=False)
    monkeypatch.setitem(peers.PEERS, "fa3", peers._fa3)
    monkeypatch.setitem(peers.VARLEN_PEERS, "fa3", peers._varlen_fa3)
    gc.freeze()
    yield
    gc.unfreeze()


def test_dense_cases(bench):
    cases = [case for case in cases_of(bench, "dense") if "kind" not in case.extra]
    keys = [(c.dtype, c.head_dim, c.seqlen, c.causal, c.direction, c.tf32) for c in cases]
    assert len(set(keys)) == len(keys) == 3 * 6 * 2 * 3 + 2 * 4 * 2 * 2 * 2
    for case in cases:
        batch, heads = (int(n) for n in re.match(r"B(\d+) H(\d+)", case.case).groups())
        assert batch * case.seqlen == 16384 and heads * case.head_dim == 2048
        whole = 4 * 16384 * case.seqlen * 2048
        assert case.forward_flop == (whole / 2 if case.causal else whole)
        assert case.kwargs == {"is_causal": case.causal}
        half = case.dtype == torch.bfloat16
        fa3 = {"fa3"} if case.direction == "fwd" else set()
        assert set(case.others) == (
            {"fa2", "cudnn", "efficient"} | fa3 if half else {"efficient", "math"}
        )
        assert (case.tf32 is None) == half
    bfloat16, both = cases_of(bench, "dense"), cases_of(bench, "dense", fp16=True)
    further = len(bfloat16) - len(cases)
    assert len(both) == len(bfloat16) + 108 + further
    assert sum(c.dtype == torch.float16 for c in both) == 108 + further


def test_dense_cases_of_a_kind(bench):
    """Forwards with shapes of their own, none of them like a row without a kind."""
    rows, kinds = set(), {}
    for case in cases_of(bench, "dense"):
        rows.add(bench("report").describe(case.row()))
        if "kind" not in case.extra:
            continue
        kinds.setdefault(case.extra["kind"], []).append(case)
        assert (case.direction, case.dtype, case.tf32) == ("fwd", torch.bfloat16, None)
        query, key, value = case.make("meta")
        batch, heads, seqlen, head_dim = query.shape
        assert (seqlen, head_dim) == (case.seqlen, case.head_dim) and batch * seqlen == 16384
        gqa = f"/{key.shape[1]}" if key.shape[1] != heads else ""
        assert re.match(rf"B{batch} H{heads}{gqa}(,|$)", case.case)
        assert case.kwargs.get("enable_gqa", False) == bool(gqa)
        assert key.shape[:3] == value.shape[:3] == (batch, key.shape[1], seqlen)
        assert case.draw("meta")[0].shape == (batch, heads, seqlen, value.shape[3])
        whole = 2 * batch * heads * seqlen * seqlen * (head_dim + value.shape[3])
        if case.extra["kind"] != "window":
            assert case.forward_flop == (whole / 2 if case.causal else whole)
    assert len(rows) == len(cases_of(bench, "dense"))
    counts = {"short": 3 * 2 * 2, "gqa": 2 * 8 * 2, "head_dim": 3 * 2 * 2, "window": 1}
    assert {kind: len(cases) for kind, cases in kinds.items()} == counts
    assert {case.make("meta")[1].shape[1] for case in kinds["gqa"]} == {8}
    values = {(c.head_dim, c.make("meta")[2].shape[3]) for c in kinds["head_dim"]}
    assert values == {(80, 80), (96, 96), (192, 128)}
    for case in kinds["head_dim"]:
        assert case.case.endswith("H16, d 192, 128 values" if case.head_dim == 192 else "H16")
    (window,) = kinds["window"]
    seen = torch.ones(16384, 16384, dtype=torch.bool).tril().triu(-1024).sum()
    assert window.forward_flop == 4 * 16 * 128 * int(seen)
    assert window.kwargs == {"is_causal": True, "window": (1024, 0)} and "1024" in window.case


def test_dense_targets(bench):
    def row(case="B8 H16", **values):
        shape = {"dtype": "bfloat16", "head_dim": 128, "seqlen": 2048, "direction": "fwd"}
        return {"case": case, "backend": "sm90", "unit": "TFLOP/s", **shape, **values}

    def line(start, *rows):
        lines = bench("suites.dense").verdict(list(rows))
        (found,) = [line for line in lines if line.startswith(f"target: {start}")]
        return found

    best, main = "sm90 of the best of fa3 and cudnn", row(flashbpt=1.1, cudnn=1.0)
    for kind, start in [
        ("short", f"{best}, short"),
        ("gqa", f"{best}, shared heads"),
        ("head_dim", "sm90 of its best peer, other head dims"),
    ]:
        for ours, end in [(1.0, ", met"), (0.99, "MISSED")]:
            other = row(kind=kind, flashbpt=ours, fa3=0.5, cudnn=1.0, fa2=None, efficient=9.0)
            refused = row(kind=kind, flashbpt=0.1, fa3=None, cudnn=None)
            found = line(start, main, other, refused)
            assert found.endswith(end) and " 1 rows" in found
            found = line("sm90 of its best peer, bfloat16", main, other)
            assert found.endswith(", met") and " 1 rows" in found
    for ours, end in [(1.0, ", met"), (0.99, "MISSED")]:
        assert line("sm90 of fa3, window", row(kind="window", flashbpt=ours, fa3=1.0)).endswith(end)


def test_varlen_cases(bench):
    lengths = bench("suites.varlen").lengths()
    assert {sum(seqlens) for seqlens in lengths.values()} == {32768}
    assert set(lengths["all 512"]) == {512}
    longest, *short = sorted(lengths["one long, many short"], reverse=True)
    assert longest == 16384 and max(short) <= 512
    longest, *short = sorted(lengths["mean 1K, tail to 16K"], reverse=True)
    assert longest == 16384 and max(short) < 4096
    assert 900 < 32768 / (1 + len(short)) < 1150 and sorted(short)[len(short) // 2] < 512
    assert lengths == bench("suites.varlen").lengths()  # the same in every run
    cases = cases_of(bench, "varlen")
    assert len(cases) == 2 * 5 * 2 * 3
    for case in cases:
        assert set(case.others) == {"fa2"} | ({"fa3"} if case.direction == "fwd" else set())
        seqlens = lengths[case.case.split(":")[0]]
        flop = sum(4 * 2048 * n * n for n in seqlens)
        assert case.forward_flop == (flop / 2 if case.causal else flop)
        assert case.seqlen == max(seqlens)
        query, *_, longest = case.make("meta")
        assert query.shape == (32768, 2048 // case.head_dim, case.head_dim)
        assert longest == max(seqlens)


def test_varlen_targets(bench):
    def lines(case, ours, direction="fwd", backend="sm90"):
        row = {"case": case, "backend": backend, "direction": direction, "unit": "TFLOP/s"}
        rows = [{**row, "flashbpt": ours, "fa2": 0.5, "fa3": 1.0}]
        return [line for line in bench("suites.varlen").verdict(rows) if "fa3" in line]

    heavy = "mean 1K, tail to 16K: 32 sequences, H16"
    for ours, end in [(1.05, ", met"), (1.04, "MISSED")]:
        every, one = lines(heavy, ours)
        assert every.startswith("target: sm90 of fa3, fwd, 1 rows") and one.endswith(end)
    assert len(lines("all 512: 64 sequences, H16", 1.0)) == 1
    assert not lines(heavy, 1.0, direction="bwd") and not lines(heavy, 1.0, backend="sm80")


def test_masks_cases(bench):
    cases = cases_of(bench, "masks")
    rows = [case.row() for case in cases]
    names = {(row["case"], row["head_dim"], row["seqlen"], row["direction"]) for row in rows}
    assert {(c.head_dim, c.seqlen) for c in cases} == {
        (d, s) for d in (64, 128) for s in (2048, 8192)
    }
    by_other = {}
    for case in cases:
        ((other, _),) = case.others.items()
        by_other.setdefault(other, []).append(case)
        assert (case.forward_flop is not None) == (other == "efficient")
        query, *_ = case.make("meta")
        assert query.shape == (2, 2048 // case.head_dim, case.seqlen, case.head_dim)
        for value in case.keywords("meta").values():
            assert not isinstance(value, torch.Tensor) or value.shape == (query.shape[1],)
    counts = {"efficient": 3 * 8 + 4, "flag": 8, "unmasked": 8, "no_dropout": 4, "no_bias_grad": 4}
    counts |= dict.fromkeys(("no_bias", "no_softcap", "no_sinks", "no_alibi"), 1)
    assert {other: len(held) for other, held in by_other.items()} == counts
    assert len(names) == len(rows) - 8 - 4 - 1  # two rows of what runs against two others
    forwards = {"no_bias": 0.6, "no_softcap": 0.85, "no_sinks": 0.95, "no_alibi": 0.95}
    for other, rate in forwards.items():
        (case,) = by_other[other]
        assert (case.direction, case.head_dim, case.seqlen) == ("fwd", 128, 8192)
        assert case.extra["bar"] == pytest.approx(1 / rate)
    for other, fwd, both in [
        ("flag", 1 / 0.85, 1.25),
        ("unmasked", 0.6, 0.62),
        ("no_dropout", 1 / 0.75, 1.35),
    ]:
        bars = {(case.direction, case.extra["bar"]) for case in by_other[other]}
        assert bars == {("fwd", fwd), ("fwd+bwd", both)}
    keywords = {k: v for case in cases for k, v in case.keywords("cpu").items()}
    assert set(keywords) == {"dropout_p", "softcap", "sinks", "alibi_slopes"}
    slopes = keywords["alibi_slopes"]
    assert slopes[-1] == 2**-8 and slopes[1] / slopes[0] == pytest.approx(2**-0.5)


@pytest.mark.parametrize("suite", CUDA_SUITES)
def test_cuda_suites_run(bench, cuda_peers, suite):
    """Every kind of row: measured, compared with its peers, complete, printable."""
    report, measure = bench("report"), bench("attention_case").measure
    options = options_of(bench, quick=True)
    rows = list(measure(cases_of(bench, suite, quick=True), options, device="cpu"))
    for row in rows:
        row["ratio"] = report.ratio(row)
        for key, kind in ROW.items():
            assert isinstance({"suite": suite, **row}[key], kind), (key, row)
        assert row["unit"] in report.HIGHER_IS_BETTER and row["ratio"] > 0
    assert json.loads(json.dumps(rows)) == rows
    text = report.table(rows)
    for name in {name for row in rows for name in row if name in report.SELF_NAMES}:
        assert name in text
    for row in rows:
        row["backend"] = "sm80"
    verdict = "\n".join(bench(f"suites.{suite}").verdict(rows))
    expected = {"dense": (6 + 4, 0), "varlen": (3, 0), "masks": (2, 11)}
    assert (verdict.count("target:"), verdict.count("bar:")) == expected[suite]


def test_directions_measure_what_they_say(bench):
    """A backward alone runs no forward once it is measured, and a forward keeps no graph."""
    case = next(c for c in cases_of(bench, "dense", quick=True) if c.direction == "bwd")
    grad, *inputs = case.draw("cpu")
    called = []

    def attention(q, k, v):
        called.append(torch.is_grad_enabled())
        return q * k * v

    call = bench("attention_case")._call
    forward, backward, both = (call(attention, d, 3) for d in ("fwd", "bwd", "fwd+bwd"))
    assert not forward(grad, *inputs)[0].requires_grad and called == [False]
    dq, dk, dv = backward(grad, *inputs)
    backward(grad, *inputs)
    assert called == [False, True]
    q, k, v = inputs
    torch.testing.assert_close((dq, dk, dv), (grad * k * v, grad * q * v, grad * q * k))
    out, *gradients = both(grad, *inputs)
    assert called == [False, True, True] and out.requires_grad
    torch.testing.assert_close(gradients, [dq, dk, dv])


def test_a_wrong_result_is_no_measurement(bench, cuda_peers, monkeypatch):
    monkeypatch.setitem(bench("peers").PEERS, "fa2", lambda q, k, v, is_causal: q)
    measure = bench("attention_case").measure
    options = options_of(bench, quick=True, peers=["fa2"])
    with pytest.raises(AssertionError, match="flashbpt is [0-9.e+]+ from fa2 in .*'B2 H4'"):
        next(measure(cases_of(bench, "dense", quick=True), options, device="cpu"))


def test_fp32_rows_run_under_the_precision_setting_that_they_name(bench, cuda_peers, monkeypatch):
    matmul = torch.backends.cuda.matmul
    seen = []

    def sdpa(q, k, v, is_causal):
        seen.append(matmul.allow_tf32)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)

    monkeypatch.setitem(bench("peers").PEERS, "math", sdpa)
    former, matmul.allow_tf32 = matmul.allow_tf32, True
    cases = [c for c in cases_of(bench, "dense", quick=True) if c.tf32 is not None][:2]
    for case in cases:
        seen.clear()
        rows = list(bench("attention_case").measure([case], options_of(bench, quick=True), "cpu"))
        assert set(seen) == {case.tf32} == {rows[0]["tf32"]}
        assert matmul.allow_tf32 is True
    matmul.allow_tf32 = former
    assert {case.tf32 for case in cases} == {False, True}


def test_only_and_peer_choose(bench, cuda_peers):
    cases = cases_of(bench, "dense")
    only = options_of(bench, [r"d (64|128) S (2048|8192) ", r" bwd$", "bfloat16"])
    wanted = [case for case in cases if only.wants(case.row())]
    assert len(wanted) == 2 * 2 * 2 and {case.direction for case in wanted} == {"bwd"}
    options = options_of(bench, ["d 64 S 64 full fwd$"], quick=True, peers=["fa2"])
    measure = bench("attention_case").measure
    rows = list(measure(cases_of(bench, "dense", quick=True), options, device="cpu"))
    assert [("fa2" in row, "cudnn" in row) for row in rows] == [(True, False)] + [
        (False, False)
    ] * 2


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
