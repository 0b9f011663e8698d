"""Values and gradients of flashbpt.attention against the reference: dtypes, shapes, features."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import reference
import torch
from cases import Case, ids, make
from compare import assert_bitwise, check, evaluate, with_cotangents

import flashbpt

EVERY_DTYPE = ["fp32", "bf16", "fp16", "fp64"]

# Around tile edges, crossed so that each edge meets a short, a long and an equal other side.
LENGTHS = [
    (1, 1),
    (1, 2),
    (2, 1),
    (1, 257),
    (257, 1),
    (63, 65),
    (64, 64),
    (65, 63),
    (64, 255),
    (255, 256),
    (256, 257),
    (257, 255),
    (511, 64),
    (63, 512),
    (512, 511),
    (513, 513),
    (2, 513),
    (513, 2),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("lq, lk", LENGTHS, ids=lambda n: str(n))
def test_lengths(device, lq, lk, causal):
    check(make(Case(lq=lq, lk=lk, causal=causal, batch=1, lse=True), device))


@pytest.mark.parametrize(
    "lq, lk", [(5, 3), (64, 65), (257, 256), (300, 513), (513, 300), (1, 700)], ids=lambda n: str(n)
)
def test_lengths_lower_right(device, lq, lk):
    check(make(Case(lq=lq, lk=lk, causal=True, align="lower-right", batch=1, lse=True), device))


DTYPE_CASES = [
    Case(lq=129, dim=64),
    Case(lq=129, dim=64, causal=True),
    Case(lq=65, lk=300, dim=32, mean=1.0),
    Case(lq=300, lk=65, dim=80, causal=True, align="lower-right", lse=True),
    Case(lq=33, dim=64, heads=6, kv_heads=2, causal=True, size=3.0, lse=True),
    Case(lq=70, dim=40, dim_v=24, mask="own:bhqk"),
    Case(lq=70, dim=24, mask="bool:bhqk", mean=0.5),
    Case(
        lq=257,
        dim=16,
        window=(40, 0),
        causal=True,
        softcap=15.0,
        sinks=True,
        alibi="h",
        size=2.0,
        lse=True,
    ),
]


@pytest.mark.parametrize("dtype", EVERY_DTYPE)
@pytest.mark.parametrize("number", range(len(DTYPE_CASES)), ids=ids(DTYPE_CASES))
def test_dtypes(device, dtype, number):
    case = DTYPE_CASES[number]
    check(make(Case(**{**vars(case), "dtype": dtype}), device))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("ratio", [1, 2, 3, 5, 7, 12])
def test_grouped_queries(device, ratio, dtype):
    check(
        make(
            Case(lq=65, lk=130, heads=2 * ratio, kv_heads=2, dtype=dtype, causal=True, lse=True),
            device,
        )
    )


@pytest.mark.parametrize(
    "kv", [(2, 4), (4, 2), (1, 6), (12, 3)], ids=lambda n: "x".join(map(str, n))
)
def test_key_and_value_head_counts_may_differ(device, kv):
    inputs = make(Case(lq=34, lk=65, heads=12, kv_heads=kv[0]), device)
    inputs.leaves["value"] = torch.randn(2, kv[1], 65, 16, device=device)
    inputs.options["enable_gqa"] = True
    check(inputs)


def test_one_head_broadcasts_without_the_flag(device):
    inputs = make(Case(lq=40, heads=5, kv_heads=1), device)
    inputs.options["enable_gqa"] = False
    check(inputs)


HEAD_DIMS = [
    (1, 1),
    (7, 7),
    (33, 33),
    (64, 64),
    (72, 72),
    (80, 80),
    (128, 128),
    (256, 256),
    (300, 300),
    (16, 24),
    (32, 8),
    (64, 1),
    (1, 64),
    (192, 128),
    (128, 512),
]


@pytest.mark.parametrize("dim, dim_v", HEAD_DIMS, ids=lambda n: str(n))
def test_head_dims(device, dim, dim_v):
    check(make(Case(lq=66, lk=129, dim=dim, dim_v=dim_v, batch=1, causal=True), device))


@pytest.mark.parametrize(
    "dim, dim_v", [(72, 72), (104, 104), (33, 20), (256, 256)], ids=lambda n: str(n)
)
def test_head_dims_bf16(device, dim, dim_v):
    check(make(Case(lq=130, lk=129, dim=dim, dim_v=dim_v, batch=1, dtype="bf16"), device))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dim_zero_gives_the_mean_of_v(device, causal):
    inputs = make(Case(lq=5, lk=7, dim=0, dim_v=3, causal=causal, lse=True), device)
    got = check(inputs)
    if not causal:
        mean = inputs.leaves["value"].mean(-2, keepdim=True).expand_as(got["out"])
        torch.testing.assert_close(got["out"], mean)


WINDOWS = [
    (0, 0),
    (3, 0),
    (0, 3),
    (-1, 2),
    (2, -1),
    (70, 70),
    (16, 300),
    (300, 16),
    (1000, 1000),
    (-1, -1),
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{w[0]},{w[1]}")
def test_windows(device, window, causal):
    check(make(Case(lq=257, lk=300, window=window, causal=causal, batch=1, lse=True), device))


@pytest.mark.parametrize("lq, lk", [(300, 65), (65, 300)], ids=lambda n: str(n))
@pytest.mark.parametrize("window", [(20, 5), (0, -1), (-1, 0)], ids=lambda w: f"{w[0]},{w[1]}")
def test_windows_lower_right(device, window, lq, lk):
    check(make(Case(lq=lq, lk=lk, window=window, align="lower-right", batch=1, lse=True), device))


def test_window_with_a_mask(device):
    check(
        make(
            Case(lq=130, lk=140, window=(30, 40), mask="bool:bhqk", align="lower-right", lse=True),
            device,
        )
    )
    check(make(Case(lq=130, lk=140, window=(-1, 0), mask="fp32:bhqk", lse=True), device))


FEATURES = [
    Case(lq=130, softcap=5.0, size=3.0, lse=True),
    Case(lq=66, lk=300, softcap=20.0, size=6.0, causal=True),
    Case(lq=130, alibi="h", heads=4, causal=True, lse=True),
    Case(lq=130, alibi="bh", heads=4, lse=True),
    Case(lq=65, lk=130, alibi="bh", align="lower-right", causal=True),
    Case(lq=130, lk=65, alibi="h", align="lower-right"),
    Case(lq=130, sinks=True, lse=True),
    Case(lq=65, lk=130, heads=6, kv_heads=2, sinks=True, causal=True, lse=True),
    Case(lq=70, lk=40, sinks=True, mask="bool:bhqk", lse=True),
    Case(
        lq=90,
        lk=600,
        heads=6,
        kv_heads=3,
        dim=24,
        dim_v=40,
        causal=True,
        align="lower-right",
        window=(60, -1),
        softcap=8.0,
        alibi="bh",
        sinks=True,
        size=2.0,
        lse=True,
    ),
    Case(
        lq=129,
        heads=4,
        kv_heads=2,
        mask="fp32:bhqk",
        window=(64, 10),
        softcap=8.0,
        alibi="h",
        sinks=True,
        lse=True,
    ),
    Case(lq=90, scale=0.0, lse=True),
    Case(lq=90, scale=0.0, mask="bool:bhqk"),
    Case(lq=90, scale=-0.3, size=3.0, lse=True),
    Case(lq=90, scale=-0.3, mask="bool:bhqk"),
    Case(lq=90, scale=-2.0, causal=True, softcap=4.0),
    Case(lq=90, scale=3.0, dim=8, size=2.0),
]


@pytest.mark.parametrize("case", FEATURES, ids=ids(FEATURES))
def test_features(device, case):
    check(make(case, device))


LOW_FEATURES = [FEATURES[0], FEATURES[3], FEATURES[7], FEATURES[9], FEATURES[10], FEATURES[13]]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("number", range(len(LOW_FEATURES)), ids=ids(LOW_FEATURES))
def test_features_in_low_precision(device, number, dtype):
    check(make(Case(**{**vars(LOW_FEATURES[number]), "dtype": dtype}), device))


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "sinks", "alibi_slopes"])
@pytest.mark.parametrize("lse", [False, True], ids=["out", "out+lse"])
def test_only_one_input_requires_grad(device, name, lse):
    inputs = make(
        Case(lq=66, lk=70, heads=4, kv_heads=2, mask="fp32:bhqk", sinks=True, alibi="h", lse=lse),
        device,
    )
    inputs.grads = (name,)
    check(inputs)


def test_gradient_through_the_lse_alone(device):
    inputs = make(Case(lq=66, lk=70, heads=4, kv_heads=2, sinks=True), device)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.leaves.items()}
    doubles = {name: x.double().cpu().requires_grad_() for name, x in inputs.leaves.items()}
    weight = torch.randn(2, 4, 66)
    _, lse = flashbpt.attention(**leaves, **inputs.options, return_lse=True)
    (lse * weight.to(device)).sum().backward()
    _, right = reference.attention(
        *(doubles[n] for n in ("query", "key", "value")), sinks=doubles["sinks"], enable_gqa=True
    )
    (right * weight).sum().backward()
    for name, x in leaves.items():
        if name == "value":
            assert x.grad is None or (x.grad == 0).all()
            continue
        torch.testing.assert_close(
            x.grad.double().cpu(),
            doubles[name].grad,
            atol=1e-5,
            rtol=1e-4,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_without_return_lse_the_result_is_one_tensor(device):
    inputs = make(Case(lq=20, sinks=True), device)
    out = flashbpt.attention(**inputs.leaves, **inputs.options)
    assert type(out) is torch.Tensor and not out.requires_grad
    assert_bitwise(
        "out", out, flashbpt.attention(**inputs.leaves, **inputs.options, return_lse=True)[0]
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_grad_modes(device, mode):
    leaves = {
        n: x.requires_grad_() for n, x in make(Case(lq=70, causal=True), device).leaves.items()
    }
    with mode():
        out = flashbpt.attention(**leaves, is_causal=True)
    assert not out.requires_grad and out.is_inference() == (mode is torch.inference_mode)
    assert_bitwise("out", out.clone(), flashbpt.attention(**leaves, is_causal=True).detach())


def test_positional_arguments_are_those_of_sdpa(device):
    q, k, v = (torch.randn(2, 2, 9, 8, device=device) for _ in range(3))
    mask = torch.rand(9, 9, device=device) < 0.7
    mask[:, 0] = True
    sdpa = torch.nn.functional.scaled_dot_product_attention
    torch.testing.assert_close(
        flashbpt.attention(q, k, v, mask, 0.0, False), sdpa(q, k, v, mask, 0.0, False)
    )
    torch.testing.assert_close(
        flashbpt.attention(q, k, v, None, 0.0, True, 0.2), sdpa(q, k, v, None, 0.0, True, scale=0.2)
    )


DETERMINISTIC = Case(
    lq=300, lk=257, heads=6, kv_heads=2, dim=40, mask="fp32:11qk", sinks=True, alibi="bh", lse=True
)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deterministic_runs_repeat_bitwise(device, dtype):
    inputs = make(Case(**{**vars(DETERMINISTIC), "dtype": dtype}), device)
    inputs.options["deterministic"] = True
    inputs = with_cotangents(inputs, evaluate(flashbpt.attention, replace(inputs, grads=())))
    first = evaluate(flashbpt.attention, inputs)
    for _ in range(3):
        again = evaluate(flashbpt.attention, inputs)
        for name in first.keys() - {"graph"}:
            assert_bitwise(name, first[name], again[name])


def test_torch_deterministic_algorithms(device):
    inputs = make(Case(lq=130, kv_heads=1), device)
    torch.use_deterministic_algorithms(True)
    try:
        check(inputs)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing_but_rounding(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(
            make(
                Case(
                    lq=300,
                    lk=70,
                    heads=3,
                    kv_heads=1,
                    mask="fp32:1h1k",
                    sinks=True,
                    alibi="h",
                    lse=True,
                ),
                "cpu",
            )
        )
    finally:
        torch.set_num_threads(before)


MEMORY = """
import sys
import torch, flashbpt

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

def run(s, backward, **options):
    q, k, v = (torch.randn(1, 1, s, 16, requires_grad=backward) for _ in range(3))
    out = flashbpt.attention(q, k, v, **options)
    if backward:
        out.sum().backward()

for arguments in ({"dropout_p": 0.5}, {"is_causal": True}, {"attn_mask": torch.zeros(1)}):
    run(512, True, **arguments)
before = peak()
run(16384, True, is_causal=True)
run(4096, True)
run(4096, True, attn_mask=torch.zeros(1, 1, 1, 4096, requires_grad=True))
run(4096, True, dropout_p=0.5)
print((peak() - before) / 2**20)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads the peak from /proc")
def test_memory_is_linear_in_the_length():
    """One head of 16384 rows, D = 16: fp32 scores would be 1 GiB, a matrix of bytes 256 MiB.

    Then other kinds of call, shorter: scores of 64 MiB.
    """
    root = os.path.dirname(os.path.dirname(os.path.abspath(flashbpt.__file__)))
    env = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", MEMORY]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    growth = float(done.stdout)
    assert growth < 48, f"peak memory grew by {growth:.0f} MiB"
