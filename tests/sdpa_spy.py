"""What the tests of patch_sdpa share: a spy on flashbpt.attention, inputs, a clean-up."""

import pytest
import torch
import torch.nn.functional as F

import flashbpt.integrations.sdpa as shim_module

ORIGINAL = F.scaled_dot_product_attention


class Served:
    """Counts the calls that flashbpt.attention served, and may refuse them first."""

    def __init__(self, attention):
        self.attention = attention
        self.served = []  # the keyword causal_align of each call
        self.refusal = None

    def __call__(self, *args, **kwargs):
        if self.refusal is not None:
            raise self.refusal
        out = self.attention(*args, **kwargs)
        self.served.append(kwargs.get("causal_align"))
        return out

    def __len__(self):
        return len(self.served)


@pytest.fixture
def served(monkeypatch):
    spy = Served(shim_module.attention)
    monkeypatch.setattr(shim_module, "attention", spy)
    return spy


@pytest.fixture(autouse=True)
def nothing_stays_behind():
    assert F.scaled_dot_product_attention is ORIGINAL
    torch._dynamo.reset()
    yield
    left = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = ORIGINAL
    assert left is ORIGINAL


def inputs(*shape, dtype=torch.float32, keys=None, requires_grad=False, seed=0):
    shape = shape or (2, 4, 24, 16)
    generator = torch.Generator().manual_seed(seed)
    key_shape = (*shape[:-2], keys or shape[-2], shape[-1])

    def draw(shape):
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(requires_grad)

    return draw(shape), draw(key_shape), draw(key_shape)


def fallbacks_of(handle):
    return sum(handle.fallbacks.values())
