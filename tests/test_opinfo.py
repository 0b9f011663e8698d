"""PyTorch's own samples for scaled_dot_product_attention, against the maths in float64.

The samples with dropout run without it: no two dropout generators agree. torch builds a sample
with another value width and never yields it, so a set with Dv != D is made here.
"""

import pytest
import torch
from compare import Inputs, check

import flashbpt

pytest.importorskip("expecttest", reason="torch's OpInfo database imports it")
from torch.testing._internal.common_methods_invocations import op_db

SDPA = next(op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def as_inputs(sample):
    options = {n: x for n, x in sample.kwargs.items() if n != "attn_mask"}
    options["dropout_p"] = 0.0
    leaves = dict(zip(("query", "key", "value"), (sample.input, *sample.args), strict=True))
    if sample.kwargs.get("attn_mask") is not None:
        leaves["attn_mask"] = sample.kwargs["attn_mask"]
    return Inputs(leaves, options, tuple(leaves))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_samples_of_torch(device, dtype):
    samples = list(SDPA.sample_inputs(device, dtype, requires_grad=True))
    assert len(samples) >= 20 and any(s.kwargs.get("attn_mask") is not None for s in samples)
    for number, sample in enumerate(samples):
        try:
            check(as_inputs(sample))
        except AssertionError as wrong:
            raise AssertionError(f"sample {number}: {sample.summary()}: {wrong}") from wrong


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("dim_v", [1, 5, 16, 24])
def test_value_width_differs(device, dtype, dim_v):
    batch, heads, lq, lk, dim = 4, 4, 3, 6, 8
    for lead in ((batch,), (batch, heads), (2, batch, heads)):
        for causal, mask in ((False, False), (True, False), (False, True)):
            leaves = {
                "query": torch.randn(*lead, lq, dim),
                "key": torch.randn(*lead, lk, dim),
                "value": torch.randn(*lead, lk, dim_v),
            }
            if mask:
                leaves["attn_mask"] = torch.randn(lq, lk)
            leaves = {n: x.to(device=device, dtype=dtype) for n, x in leaves.items()}
            check(Inputs(leaves, {"is_causal": causal}, tuple(leaves)))


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_noncontiguous_samples(device, dtype):
    for sample in SDPA.sample_inputs(device, dtype, requires_grad=True):
        check(as_inputs(sample.noncontiguous()))


def test_error_inputs_raise_the_same_type(device):
    """Calls that torch's function refuses are refused with an exception of the same kind."""
    q, k = torch.randn(2, 4, 3, 8, device=device), torch.randn(2, 4, 6, 8, device=device)
    calls = {
        "rank": ((q[0, 0, 0], k, k), {}),
        "dtype": ((q, k.double(), k), {}),
        "device": ((q, k.to("meta"), k), {}),
        "mask dtype": (
            (q, k, k),
            {"attn_mask": torch.ones(3, 6, dtype=torch.int32, device=device)},
        ),
        "mask shape": ((q, k, k), {"attn_mask": torch.ones(3, 7, dtype=torch.bool, device=device)}),
        "mask and causal": (
            (q, k, k),
            {"attn_mask": torch.ones(3, 6, dtype=torch.bool, device=device), "is_causal": True},
        ),
        "gqa heads": ((q, k[:, :3], k[:, :3]), {"enable_gqa": True}),
        "heads": ((q, k[:, :2], k[:, :2]), {}),
        "dim": ((q, k[..., :7], k), {}),
        "length": ((q, k, k[:, :, :5]), {}),
        "dropout": ((q, k, k), {"dropout_p": 1.5}),
        "integers": ((q.int(), k.int(), k.int()), {}),
    }
    for name, (args, kwargs) in calls.items():
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            pytest.raises(Exception) as torchs,
        ):
            torch.nn.functional.scaled_dot_product_attention(*args, **kwargs)
        with pytest.raises(Exception) as ours:
            flashbpt.attention(*args, **kwargs)
        wanted = RuntimeError if isinstance(torchs.value, RuntimeError) else torchs.type
        assert isinstance(ours.value, wanted), (
            f"{name}: {ours.type.__name__}, torch raises {torchs.type.__name__}"
        )
