"""Appending to paged caches: slots, layouts, rotary positions, fp8, refusals."""

import pytest
import torch
from compare import assert_bitwise
from paged_cases import DTYPES, FP8

import flashbpt


def rotate(x, cos, sin, interleaved):
    """The definition, by complex numbers."""
    half = cos.shape[-1]
    turning, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = turning.unflatten(-1, (half, 2)) if interleaved else turning.unflatten(-1, (2, half)).mT
    angle = torch.complex(cos.double(), sin.double())[:, None]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    turned = turned.flatten(-2) if interleaved else turned.mT.flatten(-2)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "packed"])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_append(device, dtype, layout, index):
    pages, size, heads, dim, dim_v = 5, 3, 2, 32, 48 if layout != "packed" else 32
    fill = 99.0
    if layout == "packed":
        both = torch.full((pages, 2, size, heads, dim), fill, dtype=dtype, device=device)
        key_cache, value_cache = both[:, 0], both[:, 1]
    elif layout == "hnd":
        key_cache = torch.full((pages, heads, size, dim), fill, dtype=dtype, device=device)
        value_cache = torch.full((pages, heads, size, dim_v), fill, dtype=dtype, device=device)
        key_cache, value_cache = key_cache.transpose(1, 2), value_cache.transpose(1, 2)
    else:
        key_cache = torch.full((pages, size, heads, dim), fill, dtype=dtype, device=device)
        value_cache = torch.full((pages, size, heads, dim_v), fill, dtype=dtype, device=device)
    packed = torch.randn(6, heads, dim + dim_v, device=device).to(dtype)
    key, value = packed[..., :dim], packed[..., dim:]
    slots = torch.tensor([4, -1, 14, 0, -7, 5], dtype=index, device=device)
    version = key_cache._version
    flashbpt.append_paged_kv(key, value, key_cache, value_cache, slots)
    assert key_cache._version > version
    for cache, rows in ((key_cache, key), (value_cache, value)):
        expected = torch.full((pages * size, heads, cache.shape[-1]), fill, dtype=dtype)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[i].cpu()
        assert_bitwise("cache", cache.cpu().reshape(expected.shape), expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [32, 20])
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_append_rotates_keys(device, dtype, width, interleaved):
    angle = torch.rand(50, width // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    positions = torch.randint(50, (7,))
    key, value = torch.randn(2, 7, 2, 32).to(dtype)
    caches = [torch.zeros(2, 4, 2, 32, dtype=dtype, device=device) for _ in range(2)]
    flashbpt.append_paged_kv(
        key.to(device),
        value.to(device),
        *caches,
        torch.arange(7, device=device),
        cos=cos.to(device),
        sin=sin.to(device),
        positions=positions.to(device),
        interleaved=interleaved,
    )
    exact = rotate(key, cos[positions], sin[positions], interleaved)
    got = caches[0].cpu().flatten(0, 1)[:7]
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
    assert_bitwise("value", caches[1].cpu().flatten(0, 1)[:7], value)


@pytest.mark.parametrize("scales", [None, "scalar", "heads"])
@pytest.mark.parametrize("name", FP8)
def test_append_to_fp8(device, name, scales):
    fp8, largest = FP8[name], torch.finfo(FP8[name]).max
    key, value = torch.randn(2, 5, 3, 16, dtype=torch.bfloat16) * 3
    key[0, 0, :3] = torch.tensor([1e5, -1e5, 0.0])
    caches = [torch.zeros(2, 4, 3, 16, dtype=fp8, device=device) for _ in range(2)]
    scale = {None: None, "scalar": torch.tensor(0.37), "heads": torch.rand(3) + 0.2}[scales]
    options = (
        {}
        if scale is None
        else {
            "key_scale": scale.to(device),
            "value_scale": (scale * 2).to(device),
        }
    )
    slots = torch.tensor([7, 0, -1, 3, 2], device=device)
    flashbpt.append_paged_kv(key.to(device), value.to(device), *caches, slots, **options)
    for cache, rows, factor in ((caches[0], key, 1), (caches[1], value, 2)):
        units = rows.float() if scale is None else rows.float() / (scale * factor).reshape(-1, 1)
        right = units.clamp(-largest, largest).to(fp8).float()
        got = cache.cpu().float().flatten(0, 1)
        for i, slot in enumerate(slots.tolist()):
            if slot >= 0:
                assert_bitwise("cache", got[slot], right[i])
    assert (caches[0].cpu().float().flatten(0, 1)[[1, 4, 5, 6]] == 0).all()


@pytest.mark.parametrize(
    "match, changes",
    [
        ("below the 8 slots", {"slot_mapping": torch.tensor([0, 8])}),
        ("must have 2 elements", {"slot_mapping": torch.tensor([0])}),
        ("heads and widths", {"key": torch.zeros(2, 3, 16)}),
        ("come together", {"cos": torch.zeros(2, 8)}),
        ("a row a token", {"cos": torch.zeros(3, 8), "sin": torch.zeros(3, 8)}),
        ("at most half", {"cos": torch.zeros(2, 9), "sin": torch.zeros(2, 9)}),
        ("one dtype", {"value": torch.zeros(2, 2, 16).half()}),
    ],
)
def test_append_refusals(match, changes):
    caches = {"key_cache": torch.zeros(2, 4, 2, 16), "value_cache": torch.zeros(2, 4, 2, 16)}
    arguments = {
        "key": torch.ones(2, 2, 16),
        "value": torch.ones(2, 2, 16),
        "slot_mapping": torch.tensor([0, 1]),
        **caches,
        **changes,
    }
    with pytest.raises(RuntimeError, match=match):
        flashbpt.append_paged_kv(**arguments)
    assert all((t == 0).all() for t in caches.values())


def test_slots_are_checked_on_any_device(device):
    check = torch.ops.flashbpt.check_slot_mapping.default
    for slots in ([-1, 11], [-3], []):
        check(torch.tensor(slots, dtype=torch.int64, device=device), 12)
    with pytest.raises(RuntimeError, match="below the 12 slots of the cache.* got 12"):
        check(torch.tensor([-1, 12], device=device), 12)
