"""The suites over paged caches: their cases, and that these run, with substitutes for the packages
of the peers.
"""

import gc
import importlib.machinery
import itertools
import json
import sys
import types

import pytest
import torch
from bench_cases import ROW, cases_of, options_of

SUITES = ("decode", "prefill", "shared_prefix")


def attend(query, key, value, causal):
    """[rows, Hq, D] over [keys, Hkv, D]; causal: the last row sees the last key."""
    mask = None
    if causal:
        mask = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    q, k, v = (t.to(query.dtype).transpose(0, 1) for t in (query, key, value))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return sdpa(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


def fa3_forward(q, k, v, *, page_table, seqused_k, softmax_scale, is_causal, num_splits):
    assert softmax_scale == pytest.approx(q.shape[3] ** -0.5) and num_splits == 0
    outs = []
    for rows, table, length in zip(q, page_table, seqused_k):
        pages = table[: -(-int(length) // k.shape[1])].long()
        keys, values = (cache[pages].flatten(0, 1)[:length] for cache in (k, v))
        outs.append(attend(rows, keys, values, is_causal))
    return torch.stack(outs), None


class Wrapper:
    """One of FlashInfer's: what it plans are levels of (rows' indptr, indptr, indices, last)."""

    def __init__(self, workspace, layout, **options):
        assert workspace.dtype == torch.uint8 and layout == "NHD"
        self.options = options

    def planned(self, levels, shape, causal=False, *, q_data_type, kv_data_type):
        assert all(t.dtype == torch.int32 for level in levels for t in level)
        self.levels, self.causal = levels, causal
        self.expected = *shape, q_data_type, kv_data_type

    def keys(self, cache, row):
        parts = []
        for rows, indptr, indices, last in self.levels:
            request = int((rows <= row).sum()) - 1
            pages = indices[indptr[request] : indptr[request + 1]].long()
            length = (len(pages) - 1) * cache.shape[1] + int(last[request])
            parts.append(cache[pages].flatten(0, 1)[:length])
        return torch.cat(parts)

    def run(self, q, caches):
        (_, size, heads, _), key = caches[0].shape, caches[0]
        assert self.expected == (q.shape[1], heads, q.shape[2], size, q.dtype, key.dtype)
        ends = self.levels[-1][0].tolist()
        return torch.cat(
            [
                attend(q[first:end], *(self.keys(c, first) for c in caches), self.causal)
                for first, end in itertools.pairwise(ends)
            ]
        )


class Decode(Wrapper):
    def plan(self, indptr, indices, last, *shape, **dtypes):
        rows = torch.arange(len(indptr), dtype=torch.int32)
        self.planned([(rows, indptr, indices, last)], shape, **dtypes)


class Prefill(Wrapper):
    def plan(self, rows, indptr, indices, last, *shape, causal, **dtypes):
        assert self.options == {"backend": "fa2"}
        self.planned([(rows, indptr, indices, last)], shape, causal, **dtypes)


class Cascade(Wrapper):
    def __init__(self, levels, workspace, layout):
        super().__init__(workspace, layout)

    def plan(self, rows, indptr, indices, last, *shape, **dtypes):
        self.planned(list(zip(rows, indptr, indices, last)), shape, **dtypes)


@pytest.fixture
def paged_peers(bench, monkeypatch, one_thread):
    """The module, which finds packages that attend by SDPA, and a GPU."""
    flashinfer = {
        "BatchDecodeWithPagedKVCacheWrapper": Decode,
        "BatchPrefillWithPagedKVCacheWrapper": Prefill,
        "MultiLevelCascadeAttentionWrapper": Cascade,
    }
    for name, content in {
        "flashinfer": flashinfer,
        "flash_attn_3": {},
        "flash_attn_3._C": {},
    }.items():
        module = types.ModuleType(name)
        vars(module).update(content, __spec__=importlib.machinery.ModuleSpec(name, None))
        monkeypatch.setitem(sys.modules, name, module)
    fa3 = types.SimpleNamespace(fwd=fa3_forward)
    monkeypatch.setattr(torch.ops, "flash_attn_3", fa3, raising=False)
    module = bench("paged_peers")
    with monkeypatch.context() as seen:
        seen.setattr(torch.cuda, "is_available", lambda: True)
        found = module.installed()
    monkeypatch.setattr(module, "PAGED_PEERS", found)
    monkeypatch.setattr(module, "workspace", lambda device: torch.zeros(16, dtype=torch.uint8))
    gc.freeze()
    yield module
    gc.unfreeze()


def test_decode_cases(bench):
    cases = cases_of(bench, "decode")
    kinds = {}
    for case in cases:
        kinds.setdefault(case.extra["kind"], []).append(case)
    counts = {"uniform": 4 * 2 * 7, "skewed": 4 * 2, "four_rows": 3, "fp8": 2 * 3}
    assert {kind: len(held) for kind, held in kinds.items()} == counts
    # Megabytes, as in the table of the peers.
    table = {
        ((32, 32), 64, 8192): 8590,
        ((32, 8), 1, 131072): 537,
        ((64, 8), 1, 8192): 34,
        ((32, 1), 8, 32768): 134,
        ((32, 1), 256, 512): 67,
    }
    uniform = {(c.heads, len(c.lens), c.lens[0]): c for c in kinds["uniform"]}
    assert len(uniform) == 4 * 7
    for shape, megabytes in table.items():
        assert uniform[shape].kv_bytes / 1e6 == pytest.approx(megabytes, abs=0.5)
    assert max(case.kv_bytes for case in cases) < 8.6e9
    for case in kinds["skewed"]:
        *short, a, b, c, d = sorted(case.lens)
        assert len(short) == 60 and max(short) <= 2048 and a == b == c == d == 32768
        assert case.lens == kinds["skewed"][0].lens  # the same in every run
    assert {case.rows for case in kinds["four_rows"]} == {4}
    for case in cases:
        assert case.graph and case.head_dim == 128
        beside = {"four_rows": {"fa3", "flashinfer_fa2"}, "fp8": {"flashinfer", "flashinfer_tc"}}
        beside = beside.get(case.extra["kind"], {"fa3", "flashinfer", "flashinfer_tc"})
        assert set(case.others) == ({"bf16_cache"} if case.unit == "us" else beside)
        keys = sum(case.lens) * case.heads[1] * 256
        assert case.kv_bytes == (keys if case.extra["kind"] == "fp8" else 2 * keys)


def test_prefill_and_shared_prefix_cases(bench):
    cases = cases_of(bench, "prefill")
    shapes = [(c.heads, len(c.lens), c.rows, c.lens[0], c.page_size) for c in cases]
    assert shapes[::2] == bench("suites.prefill").SHAPES  # against the peers, at the table's pages
    assert [(*shape[:4], 16) for shape in shapes[::2]] == shapes[1::2]  # against flashbpt itself
    for peers, itself in zip(cases[::2], cases[1::2]):
        assert (peers.unit, set(peers.others)) == ("TFLOP/s", {"fa3", "flashinfer_fa2"})
        assert (itself.unit, set(itself.others)) == ("us", {"page64", "contiguous"})
        assert itself.extra == {"bar": 1.08}
    assert cases[6].flop == 2 * 16384 * 16385 * 32 * 128  # as dense causal attention

    *cascade, single = cases_of(bench, "shared_prefix")
    shapes = [(c.heads, len(c.lens), c.prefix, c.lens[0] - c.prefix) for c in cascade]
    assert shapes == [
        ((32, 8), 64, 32768, 512),
        ((32, 8), 256, 8192, 256),
        ((32, 32), 64, 8192, 512),
    ]
    assert [case.extra["cascade_time"] for case in cascade] == [0.6, 0.6, 0.85]
    assert len(single.lens) == 1 and set(single.others) == {"own_flat"}


@pytest.mark.parametrize("suite", SUITES)
def test_paged_suites_run(bench, paged_peers, suite):
    """Every kind of row: measured, equal to its peers' results, complete, printable."""
    report, module = bench("report"), bench(f"suites.{suite}")
    options = options_of(bench, quick=True)
    cases = list(module.cases(options))
    if suite == "decode":  # those of several requests: all kinds, heads and page sizes
        cases = [case for case in cases if len(case.lens) > 1]
    rows = list(bench("paged_case").measure(cases, options, device="cpu"))
    if suite == "decode":
        rows += module.host_rows(options, "cpu")
    for row, case in zip(rows, cases):
        assert all(row[name] > 0 for name in case.others), row
    for row in rows:
        row["ratio"] = report.ratio(row)
        for key, kind in ROW.items():
            assert isinstance({"suite": suite, **row}[key], kind), (key, row)
        assert row["unit"] in report.HIGHER_IS_BETTER and row["ratio"] > 0
        assert row["backend"] == "cpu"
    assert json.loads(json.dumps(rows)) == rows
    text = report.table(rows)
    assert all(row["case"] in text for row in rows)
    verdict = "\n".join(module.verdict(rows))
    expected = {"decode": (5, 1), "prefill": (1, 2), "shared_prefix": (0, 4)}
    assert (verdict.count("target:"), verdict.count("bar:")) == expected[suite]


def test_a_paged_peer_may_be_absent_or_refuse(bench, paged_peers, monkeypatch, capsys):
    def refuse(call):
        raise ValueError("group size 32")

    monkeypatch.setitem(paged_peers.PAGED_PEERS, "flashinfer", refuse)
    monkeypatch.setitem(paged_peers.PAGED_PEERS, "flashinfer_tc", None)
    options, measure = options_of(bench, quick=True), bench("paged_case").measure
    cases = cases_of(bench, "decode", quick=True)[:1]
    (row,) = measure(cases, options, device="cpu")
    assert (row["flashinfer"], row["flashinfer_tc"]) == (None, None) and row["fa3"] > 0
    assert "flashinfer refuses 32/32 B1 page 16: group size 32" in capsys.readouterr().err
    (row,) = measure(cases, options_of(bench, quick=True, peers=["fa2"]), device="cpu")
    assert "fa3" not in row
    cases[0].flashbpt = refuse
    with pytest.raises(ValueError, match="group size"):
        next(measure(cases, options, device="cpu"))


def test_a_wrong_paged_result_is_no_measurement(bench, paged_peers, monkeypatch):
    monkeypatch.setitem(paged_peers.PAGED_PEERS, "fa3", lambda call: lambda: call.query)
    case, *_ = cases_of(bench, "decode", quick=True)
    with pytest.raises(AssertionError, match="flashbpt is [0-9.e+]+ from fa3 in .*'32/32 B1"):
        next(bench("paged_case").measure([case], options_of(bench, quick=True), device="cpu"))
