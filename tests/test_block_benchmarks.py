"""The suite of transformer layers: its cases, that its layers are one function, that their memory
is counted right, and that it runs.
"""

import functools
import gc
import json

import pytest
import torch
from bench_cases import ROW, cases_of, options_of
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

PEERS = {"plain", "plain_flashbpt", "compile", "checkpoint", "checkpoint_chunked", "selective"}
COMPOSED = ("plain_flashbpt", "checkpoint", "checkpoint_chunked", "selective")


@pytest.fixture
def layers(bench, monkeypatch, one_thread):
    """The module, whose FFNs come in more than one chunk."""
    module = bench("block_layers")
    monkeypatch.setattr(module, "CHUNK", 24)
    gc.freeze()
    yield module
    gc.unfreeze()


def small(bench, tokens=64, kv_heads=4, **fields):
    module = bench("block_layers")
    shape = module.Shape("small", hidden=64, heads=4, kv_heads=kv_heads, ffn=96, head_dim=16)
    return bench("block_case").BlockCase(shape, tokens, **fields)


class LiveMemory(TorchDispatchMode):
    """Bytes of the tensors that operations made since it was entered and that are still alive."""

    def __init__(self):
        super().__init__()
        self.storages, self.highest = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                key = StorageWeakRef(storage)
                if storage.nbytes():
                    self.storages[key] = storage.nbytes()
        self.highest = max(self.highest, self.allocated())
        return out

    def allocated(self):
        self.storages = {ref: size for ref, size in self.storages.items() if not ref.expired()}
        return sum(self.storages.values())

    def reset_peak(self):
        self.highest = self.allocated()

    def peak(self):
        return self.highest


# ---- cases


def test_block_cases(bench):
    cases = cases_of(bench, "block")
    ffn, *of_7b, of_8b = cases
    assert ffn.ffn and ffn.peers == ("plain",) and ffn.row("time")["causal"] is False
    tokens = [(case.tokens, case.layers) for case in of_7b]
    assert tokens == [(n, layers) for n in (16384, 65536, 131072) for layers in (1, 4)]
    bars = {16384: 1.22, 65536: 1.12, 131072: 1.08}
    for case in of_7b:
        assert case.shape[1:] == (4096, 32, 32, 11008, 128)
        assert case.row("time")["plain_flashbpt_time"] == bars[case.tokens]
        assert "plain_flashbpt" in case.peers and {*case.peers, *case.kept} == PEERS
        assert not set(case.peers) & set(case.kept)
        most = case.row("peak").get("most")
        assert most == (13.5 if (case.tokens, case.layers) == (131072, 1) else None)
    assert of_8b.shape[1:] == (4096, 32, 8, 14336, 128) and of_8b.tokens == 131072
    rows = [case.row(kind) for case in cases for kind in case.kinds]
    assert len({(row["case"], row["seqlen"]) for row in rows}) == len(rows) == 2 * len(cases)
    assert {row["unit"] for row in rows if row["kind"] == "time"} == {"ms"}
    assert {row["unit"] for row in rows if row["kind"] != "time"} == {"GB"}
    (big,) = cases_of(bench, "block", big=True)[len(cases) :]
    assert big.tokens == 524288 and big.once and not big.peers and big.shape == of_8b.shape


def test_peers_have_names_of_results(bench):
    layers, report = bench("block_layers"), bench("report")
    assert set(layers.LAYERS) == {"flashbpt", *PEERS} and PEERS <= set(report.PEER_NAMES)
    assert set(layers.FFNS) == {"flashbpt", "plain"}


# ---- layers


def gradients_of(layer, case, inputs):
    y = layer(inputs.x, inputs.weights[0], inputs.rope)
    return torch.autograd.grad(y, (inputs.x, *inputs.weights[0]), inputs.grad), y


def in_fp32(case):
    inputs = case.draw("cpu")
    inputs.x = inputs.x.detach().float().requires_grad_()
    inputs.grad = inputs.grad.float()
    kind = type(inputs.weights[0])
    inputs.weights = [kind(*(w.detach().float().requires_grad_() for w in inputs.weights[0]))]
    return inputs


@pytest.mark.parametrize("name", ("flashbpt", *COMPOSED))
def test_layers_are_one_function(bench, layers, name):
    case = small(bench)
    inputs = in_fp32(case)
    expected = gradients_of(layers.plain, case, inputs)
    torch.testing.assert_close(
        gradients_of(layers.LAYERS[name], case, inputs), expected, rtol=1e-4, atol=1e-4
    )


def test_layers_that_share_key_heads_are_one_function(bench, layers):
    case = small(bench, kv_heads=2)
    inputs = in_fp32(case)
    results = [gradients_of(f, case, inputs) for f in (layers.block, layers.plain_flashbpt)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_ffns_are_one_function(bench, layers):
    case = small(bench, ffn=True)
    inputs = in_fp32(case)
    results = [gradients_of(layers.FFNS[name], case, inputs) for name in ("flashbpt", "plain")]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_the_plain_layer(layers, bench):
    """By its formulas, in fp64; a turn keeps distances between positions."""
    case = small(bench, tokens=8)
    inputs = in_fp32(case)
    w, x = (type(inputs.weights[0])(*(t.double() for t in inputs.weights[0])), inputs.x.double())

    def norm(t, weight):
        return t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    def heads(t):
        return t.view(8, 4, 16)

    n = norm(x[0], w.norm1)
    q, k, v = heads(n @ w.wq.t()), heads(n @ w.wk.t()), heads(n @ w.wv.t())
    angle = torch.arange(8)[:, None] * 10000.0 ** (-torch.arange(8) / 8.0)
    turn = torch.polar(torch.ones(8, 8, dtype=torch.float64), angle.double())[:, None]
    q, k = (torch.complex(t[..., :8], t[..., 8:]) * turn for t in (q, k))
    scores = torch.einsum("ihd,jhd->hij", q, k.conj()).real / 4
    scores = scores.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf)
    out = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v).reshape(8, 64)
    h = x[0] + out @ w.wo.t()
    n = norm(h, w.norm2)
    gate = n @ w.w_gate.t()
    y = h + (gate * gate.sigmoid() * (n @ w.w_up.t())) @ w.w_down.t()
    got = layers.plain(inputs.x, inputs.weights[0], inputs.rope)
    torch.testing.assert_close(got[0].double(), y, rtol=1e-4, atol=1e-4)


def test_compile_is_of_the_plain_layer(layers, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or (lambda *a: a))
    layers._compiled.cache_clear()
    assert layers.compiled(1, 2, 3) == layers.compiled(1, 2, 3) == (1, 2, 3)
    assert compiled == [layers.plain]
    layers._compiled.cache_clear()


# ---- memory


def test_kept_memory_is_what_the_layers_keep(bench, layers):
    """Bytes a token: x; x and h; these, attention's output and its LSE; for flashbpt no h."""
    case = small(bench, layers=4, peers=("plain", *COMPOSED))
    row, predicted = kept_row(bench, case)
    hidden, lse = 2 * 64, 4 * 4
    bytes_kept = {
        "checkpoint": hidden,
        "checkpoint_chunked": 2 * hidden,
        "selective": 3 * hidden + lse,
        "flashbpt": 2 * hidden + lse,
    }
    for name, size in bytes_kept.items():
        assert row[name] == pytest.approx(size * case.tokens * 1e-9, rel=0.02), name
    assert row["flashbpt"] == pytest.approx(predicted, rel=0.02)
    # x, n, q, k, v, out, h, n and in the FFN gate, up, silu(gate) and their product.
    least = (12 * 64 + 4 * 64 + 8 * 96) * case.tokens * 1e-9
    assert min(row["plain"], row["plain_flashbpt"]) >= least


def kept_row(bench, case):
    memory, options = LiveMemory(), options_of(bench, quick=True)
    with memory:
        (_, row) = bench("block_case").measure([case], options, "cpu", memory)
    assert (row["kind"], row["unit"]) == ("kept", "GB")
    return row, row["predicted"]


def test_kept_memory_alone(bench, layers):
    """By a forward, the same as after a step."""
    timed = small(bench, layers=4, peers=("checkpoint", "selective"))
    alone = small(bench, layers=4, peers=("checkpoint",), kept=("selective", "compile"))
    (with_time, _), (without, _) = kept_row(bench, timed), kept_row(bench, alone)
    assert without["selective"] == with_time["selective"] > without["checkpoint"] > 0
    assert "compile" in without and "compile" not in with_time


def test_the_peak_counts_from_the_inputs_and_with_the_gradient(bench, layers):
    """A layer that makes y = 2 x: y, the gradient of y, that of x, and nothing else."""
    memory, case = LiveMemory(), small(bench)
    stack = bench("block_case").Stack(lambda x, w, rope: x * 2, case.draw("cpu"), memory)
    size = stack.inputs.x.nbytes
    with memory:
        other = torch.empty(1 << 20)
        for _ in range(2):
            stack.step()
            assert 3 * size <= stack.peak <= 3 * size + 64
    assert stack.kept is None and other is not None


def test_a_peak_row(bench, layers):
    memory, options = LiveMemory(), options_of(bench, quick=True)
    case = small(bench, tokens=96, peers=("plain", "checkpoint_chunked"))
    with memory:
        (_, row) = bench("block_case").measure([case], options, "cpu", memory)
    assert row["kind"] == "peak" and row["predicted"] > 0
    # What autograd keeps is there at once; chunks of a recomputed FFN are not.
    assert row["plain"] > row["checkpoint_chunked"] > 4 * 2 * 64 * 96 * 1e-9


# ---- measuring


def test_gradients_are_added_and_the_first_step_is_kept(bench, layers):
    case = small(bench)
    inputs = case.draw("cpu")
    stack = bench("block_case").Stack(layers.plain, inputs, None)
    inputs.weights[0].w_up.grad.fill_(7.0)  # of a candidate before
    stack.step()
    _, dx, *of_weights = first = stack.results
    assert torch.equal(of_weights[-2], inputs.weights[0].w_up.grad)
    stack.step()
    assert stack.results is first and torch.equal(dx, inputs.x.grad[0])
    torch.testing.assert_close(inputs.weights[0].w_up.grad, 2 * of_weights[-2])


def measured(bench, case, functions, monkeypatch, **options):
    for name, function in functions.items():
        monkeypatch.setitem(bench("block_layers").LAYERS, name, function)
    chosen = options_of(bench, quick=True, **options)
    return list(bench("block_case").measure([case], chosen, "cpu"))


def test_a_layer_that_does_not_fit_is_null(bench, layers, monkeypatch):
    def refuse(x, w, rope):
        raise torch.OutOfMemoryError("no memory")

    case = small(bench, peers=("plain", "checkpoint", "compile"))
    functions = {"flashbpt": layers.plain, "checkpoint": refuse, "compile": None}
    (row,) = measured(bench, case, functions, monkeypatch)
    assert row["flashbpt"] > 0 and row["plain"] > 0
    assert row["checkpoint"] is None and row["compile"] is None
    with pytest.raises(torch.OutOfMemoryError):
        measured(bench, case, {"flashbpt": refuse}, monkeypatch)


def test_a_wrong_layer_is_no_measurement(bench, layers, monkeypatch):
    case = small(bench, peers=("plain",))
    wrong = {"flashbpt": layers.plain, "plain": lambda x, w, rope: layers.attend(x, w, rope)}
    with pytest.raises((AssertionError, RuntimeError), match="flashbpt is .* from plain"):
        measured(bench, case, wrong, monkeypatch)
    unturned = functools.partial(layers.Rope, sin=torch.zeros(64, 8))
    wrong["plain"] = lambda x, w, rope: layers.plain(x, w, unturned(torch.ones(64, 8)))
    with pytest.raises(AssertionError, match="flashbpt is .* from plain"):
        measured(bench, case, wrong, monkeypatch)


def test_only_and_peer_choose_layers(bench, layers, monkeypatch):
    case = small(bench, peers=("plain", "checkpoint"))
    use = {"flashbpt": layers.plain}
    assert measured(bench, case, use, monkeypatch, only=["S 128 "]) == []
    assert measured(bench, case, use, monkeypatch, only=["peak"]) == []  # which the CPU has not
    (row,) = measured(bench, case, use, monkeypatch, only=["1 layer .*S 64 "], peers=["checkpoint"])
    assert row["checkpoint"] > 0 and "plain" not in row


def test_one_step_is_timed_without_a_warm_up(bench, layers, monkeypatch):
    calls = []

    def counted(x, w, rope):
        calls.append(1)
        return layers.plain(x, w, rope)

    (row,) = measured(bench, small(bench, once=True), {"flashbpt": counted}, monkeypatch)
    assert len(calls) == 1 and row["flashbpt"] > 0


# ---- the matrix products


def test_products(bench):
    module = bench("suites.block")
    cases = list(module.products(options_of(bench)))
    assert len({case.row()["case"] for case in cases}) == len(cases) == 3 + 3 + 2 + 3
    sizes = {"wq": (4096, 4096), "w_up": (11008, 4096), "w_down": (4096, 11008)}
    for case in cases:
        assert case.size == sizes[case.weight] and case.rows == 8192
    linear = bench("linear_case")
    for case in linear.linear_cases(module.QUICK_SHAPES["7B"], 32):
        a, b, ours, theirs = case.draw("cpu")
        assert a.shape[0] * a.shape[1] * b.shape[1] == 32 * case.size[0] * case.size[1]
        ours, theirs = (call(a, b, ours, theirs) for call in case.calls.values())
        # Sums in another order may round to the next number.
        torch.testing.assert_close(ours.bfloat16(), theirs, rtol=2**-7, atol=1e-3)
        twice = case.calls["flashbpt"](a, b, ours.clone(), theirs)
        adds = case.product in ("input gradient added", "weight gradient")
        torch.testing.assert_close(twice, (2 if adds else 1) * ours, rtol=1e-2, atol=1e-2)
        assert ours.dtype == (torch.float32 if case.product == "weight gradient" else a.dtype)


def test_rate_of_a_product(bench, monkeypatch):
    linear = bench("linear_case")
    monkeypatch.setattr(linear, "alternate", lambda calls, *_, **__: dict.fromkeys(calls, 2e-6))
    case = linear.LinearCase("wq", (8, 16), "forward", rows=32, head_dim=4)
    (row,) = linear.measure_linear([case], options_of(bench, quick=True), "cpu")
    assert row["flashbpt"] == row["plain"] == pytest.approx(2 * 32 * 8 * 16 / 2e-6 * 1e-12)
    (row,) = linear.measure_linear([case], options_of(bench, peers=["compile"]), "cpu")
    assert "plain" not in row


# ---- the suite


def test_the_block_suite_runs(bench, layers, monkeypatch):
    report, module = bench("report"), bench("suites.block")
    for name in ("is_available", "is_initialized"):  # other tests of the process may have had one
        monkeypatch.setattr(torch.cuda, name, lambda: False)
    options = options_of(bench, quick=True, big=True)
    rows = list(module.rows(options))
    products, timed = rows[:11], rows[11:]
    assert {row["kind"] for row in products} == {"linear"}
    assert {row["kind"] for row in timed} == {"time"}
    assert len(timed) == len(list(module.cases(options))) == 1 + 6 + 1 + 1
    for row in rows:
        row["ratio"] = report.ratio(row)
        for key, kind in ROW.items():
            assert isinstance({"suite": "block", **row}[key], kind), (key, row)
        assert row["unit"] in report.HIGHER_IS_BETTER and row["backend"] == "cpu"
        assert row["flashbpt"] > 0
        peers = {name for name in report.PEER_NAMES if name in row} - {"compile"}
        assert all(row[name] > 0 for name in peers) and (peers or row["seqlen"] == 512)
    assert json.loads(json.dumps(rows)) == rows
    text = report.table(rows)
    assert all(row["case"] in text for row in rows)
    verdict = "\n".join(module.verdict(rows))
    assert (verdict.count("bar: time of plain_flashbpt"), verdict.count("target:")) == (6, 1)
    assert list(module.rows(options_of(bench))) == []  # a CPU measures no such layer


def test_block_targets(bench):
    module = bench("suites.block")

    def line(start, **values):
        row = {"case": "c", "seqlen": 131072, **values}
        (found,) = [text for text in module.verdict([row]) if text.startswith(start)]
        return found

    for ours, end in [(1.08, ", met"), (1.09, "MISSED")]:
        time = {"kind": "time", "unit": "ms", "plain_flashbpt_time": 1.08}
        assert line("bar: time", **time, flashbpt=ours, plain_flashbpt=1.0).endswith(end)
    assert module.verdict([{"case": "c", "seqlen": 1, **time, "flashbpt": 1.0}]) == []
    for ours, end in [(1.0, ", met"), (1.01, "MISSED")]:
        kept = {"kind": "kept", "unit": "GB", "predicted": 1.0}
        row = {**kept, "flashbpt": ours, "plain_flashbpt": 9.0, "plain": 8.0}
        assert line("target: plain_flashbpt's kept", **row).endswith(end)
        assert f"worst {1 / ours:.2f}" in line("bar: predicted kept", **row)
    for ours, end in [(13.5, ", met"), (13.6, "MISSED")]:
        peak = {"kind": "peak", "unit": "GB", "most": 13.5, "predicted": 13.0}
        assert line("bar: GB", **peak, flashbpt=ours, plain=27.0).endswith(end)
    for ours, end in [(0.95, ", met"), (0.94, "MISSED")]:
        linear = {"kind": "linear", "unit": "TFLOP/s", "flashbpt": ours, "plain": 1.0}
        assert line("target: matrix products", **linear).endswith(end)


@pytest.mark.gpu
def test_layers_on_a_gpu(bench, layers):
    """All layers and all their rows, and that the memory of torch's allocator is counted right."""
    module = bench("block_case")
    shape = layers.Shape("small", hidden=512, heads=4, kv_heads=4, ffn=1024)
    peers = tuple(name for name in layers.LAYERS if name != "flashbpt")
    tokens = 32768  # the allocator may give a megabyte more than is asked for
    one, four = (module.BlockCase(shape, tokens, layers=n, peers=peers) for n in (1, 4))
    memory, options = module.CudaMemory(), options_of(bench, quick=True)
    rows = list(module.measure([one, four], options, "cuda", memory))
    assert [row["kind"] for row in rows] == ["time", "peak", "time", "kept"]
    for row in rows:
        assert all(row[name] > 0 for name in ("flashbpt", *peers)), row
    kept = rows[-1]
    x, lse = 2 * 512 * tokens * 1e-9, 4 * 4 * tokens * 1e-9
    assert kept["checkpoint"] == pytest.approx(x, rel=0.05)
    assert kept["checkpoint_chunked"] == pytest.approx(2 * x, rel=0.05)
    assert kept["flashbpt"] == pytest.approx(2 * x + lse, rel=0.05)
    assert kept["selective"] == pytest.approx(3 * x + lse, rel=0.05)
    assert kept["plain"] > 6 * x
