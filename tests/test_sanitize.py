"""A small call of every CUDA kernel: what `make sanitize` runs under compute-sanitizer."""

import pytest
import torch

import flashbpt

pytestmark = [pytest.mark.gpu, pytest.mark.sanitize]


@pytest.mark.parametrize("states", [1, 3, 9])
@pytest.mark.parametrize("dim", [1, 40, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_merge_states(dtype, dim, states):
    acc = torch.float64 if dtype == torch.float64 else torch.float32
    outs = [torch.randn(3, 5, dim).to(dtype) for _ in range(states)]
    lses = [torch.randn(3, 5, dtype=acc) for _ in range(states)]
    lses[-1][1] = -torch.inf
    expected = flashbpt.merge_attention_states(outs, lses)
    seen = flashbpt.merge_attention_states([t.cuda() for t in outs], [t.cuda() for t in lses])
    for on_gpu, on_cpu in zip(seen, expected):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu)
