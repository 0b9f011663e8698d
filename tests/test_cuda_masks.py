"""Masks on the GPU: the classification of their pieces, tiles that are skipped, full or mixed,
every layout, and the gradient of additive masks.
"""

from dataclasses import replace

import pytest
import torch
from cases import Case, draw, make
from compare import assert_close, check
from op_calls import forward, with_dropout
from test_attention_masks import ALL_DIMS
from test_cuda_attention import FULL

import flashbpt

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sm80_and_faster")]

INF, NAN = float("inf"), float("nan")
ROWS, COLS = 64, 16  # of a piece of mask_tiles


def spread(kinds, rows, cols, shape):
    """kinds (..., r, c) repeated so that each covers rows x cols of a mask of the given shape."""
    return kinds.repeat_interleave(rows, -2).repeat_interleave(cols, -1)[
        ..., : shape[-2], : shape[-1]
    ]


def pieces_of(shape, rows, cols):
    return (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))


def patchy(*shape):
    """bool: tiles of 128 x 128 empty, full or mixed; in mixed ones pieces empty, full or random."""
    tiles = spread(torch.randint(0, 3, pieces_of(shape, 128, 128)), 128, 128, shape)
    pieces = spread(torch.randint(0, 3, pieces_of(shape, ROWS, COLS)), ROWS, COLS, shape)
    fine = torch.where(pieces == 2, torch.rand(shape) < 0.5, pieces == 1)
    return torch.where(tiles == 2, fine, tiles == 1)


# --- the op's mask_tiles
def expected_tiles(mask):
    """Two bits a piece: any element true, all true; elements past the end count neither way."""
    tiles = []
    for fill, reduce in ((False, torch.any), (True, torch.all)):
        padded = torch.nn.functional.pad(
            mask, (0, -mask.size(-1) % COLS, 0, -mask.size(-2) % ROWS), value=fill
        )
        pieces = padded.unflatten(-1, (-1, COLS)).unflatten(-3, (-1, ROWS))
        tiles.append(reduce(reduce(pieces, -1), -2))
    return tiles[0].byte() | tiles[1].byte() << 1


def tiles_of(mask, batch=2, heads=3, lq=1, lk=1):
    q = torch.zeros(batch, heads, lq, 8, device=mask.device)
    k = torch.zeros(batch, heads, lk, 8, device=mask.device)
    return forward(q=q, k=k, v=k, mask=mask)[3]


@pytest.mark.parametrize("lq, lk", [(1, 1), (63, 15), (64, 16), (65, 17), (200, 333), (300, 16)])
@pytest.mark.parametrize("dims", ALL_DIMS)
def test_pieces_of_every_broadcast(cuda, dims, lq, lk):
    shape = [n if d != "1" else 1 for n, d in zip((2, 3, lq, lk), dims, strict=True)]
    mask = patchy(*shape)
    tiles = tiles_of(mask.to(cuda), lq=lq, lk=lk)
    assert torch.equal(tiles.cpu(), expected_tiles(mask))


VIEWS = {
    "rows apart": lambda x: x[..., 3:336],
    "odd pitch": lambda x: x[..., :333],
    "transposed": lambda x: x.transpose(-1, -2)[..., :333],
    "every second row": lambda x: x[:, :, ::2, :333],
    "every second key": lambda x: x[..., ::2][..., :333],
    "heads last": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[..., :333],
    "expanded rows": lambda x: x[:, :, :1, :333].expand(2, 3, 200, 333),
    "expanded keys": lambda x: x[..., :1].expand(2, 3, 700, 333),
    "expanded heads": lambda x: x[:, :1, :, :333].expand(2, 3, 700, 333),
}


@pytest.mark.parametrize("view", VIEWS)
def test_pieces_of_any_strides(cuda, view):
    wide = patchy(2, 3, 700, 700)
    mask = VIEWS[view](wide)[:, :, :200]
    tiles = tiles_of(VIEWS[view](wide.to(cuda))[:, :, :200], lq=200, lk=333)
    assert torch.equal(tiles.cpu(), expected_tiles(mask))


def test_no_other_mask_has_pieces(cuda):
    q = torch.zeros(1, 1, 70, 8, device=cuda)
    assert forward(q=q, k=q, v=q)[3].numel() == 0
    assert forward(q=q, k=q, v=q, mask=torch.zeros(1, 1, 70, 70, device=cuda))[3].numel() == 0


# --- values and gradients
KERNELS = [("bf16", 64), ("bf16", 128), ("fp16", 256), ("fp32", 64), ("bf16", 320)]


def with_mask(mask, device, **fields):
    inputs = make(Case(lq=mask.size(-2), lk=mask.size(-1), **fields), device)
    inputs.leaves["attn_mask"] = mask.to(device)
    if mask.is_floating_point():
        inputs.grads += ("attn_mask",)
    return inputs


@pytest.mark.parametrize("dtype, dim", KERNELS)
@pytest.mark.parametrize("lk", [1, 33, 64, 129, 500, 700])
def test_empty_full_and_mixed_tiles(cuda, lk, dtype, dim):
    for lead, lq in (((2, 2), 1), ((1, 1), 65), ((2, 1), 128), ((1, 2), 300)):
        check(with_mask(patchy(*lead, lq, lk), cuda, dtype=dtype, dim=dim, lse=True))


@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_tiles_on_a_full_gpu(cuda, dtype, dim):
    for lead, lq in (((4, 1), 300), ((1, 36), 129), ((1, 1), 200)):
        check(with_mask(patchy(*lead, lq, 400), cuda, dtype=dtype, dim=dim, **FULL))


@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_pieces_under_windows_groups_and_dropout(cuda, dtype, dim):
    case = {"dtype": dtype, "dim": dim, "heads": 4, "kv_heads": 2, "sinks": True}
    check(with_mask(patchy(1, 4, 300, 400), cuda, window=(150, 80), **case))
    check(with_mask(patchy(2, 1, 200, 300), cuda, window=(-1, 0), align="lower-right", **case))
    inputs = with_mask(patchy(2, 1, 200, 300), cuda, **case)
    check(inputs, with_dropout(inputs, 0.3, flashbpt.attention))


@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_padding(cuda, dtype, dim):
    """(B, 1, 1, S) with padding at either end; one batch element has no key at all."""
    lengths = torch.tensor([0, 1, 16, 333, 500])
    column = torch.arange(500)
    for mask in (column < lengths[:, None], column >= 500 - lengths[:, None]):
        mask = mask[:, None, None].expand(5, 1, 150, 500)
        inputs = with_mask(mask, cuda, batch=5, dtype=dtype, dim=dim, lse=True)
        inputs.leaves["attn_mask"] = inputs.leaves["attn_mask"][:, :, :1]
        got = check(inputs)
        assert (got["out"][0] == 0).all() and (got["dquery"][0] == 0).all()


@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_a_mask_that_is_causal_in_content_is_the_flag(cuda, dtype, dim):
    inputs = make(Case(lq=300, lk=400, dim=dim, dtype=dtype), cuda, grads=False)
    mask = torch.ones(300, 400, dtype=torch.bool, device=cuda).tril()
    flag = flashbpt.attention(**inputs.leaves, is_causal=True, return_lse=True)
    got = flashbpt.attention(**inputs.leaves, attn_mask=mask, return_lse=True)
    for name, a, b in zip(("out", "lse"), got, flag, strict=True):
        assert_close(name, a, b)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("kind", ["bool", "own", "fp32"])
@pytest.mark.parametrize("view", VIEWS)
def test_strides(cuda, view, kind, dtype):
    """The gradient is that of the view's own elements, the expanded ones apart."""
    inputs = make(Case(lq=200, lk=333, heads=3, dim=64, dtype=dtype), cuda)
    if kind == "bool":
        wide = patchy(2, 3, 700, 700).to(cuda)
    else:
        wide = draw((2, 3, 700, 700), inputs.dtype if kind == "own" else torch.float32, cuda)
        inputs.grads += ("attn_mask",)
    inputs.leaves["attn_mask"] = VIEWS[view](wide)[:, :, :200]
    check(inputs)


@pytest.mark.parametrize("offset", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("kind", ["bool", "own", "fp32"])
def test_alignment(cuda, kind, offset):
    """Every offset and pitch of the mask's rows; NaN around an additive one."""
    for pitch in (333, 334, 336, 352):
        inputs = make(Case(lq=70, lk=333, dim=64, dtype="bf16", mask=f"{kind}:bhqk"), cuda)
        mask = inputs.leaves["attn_mask"]
        wide = torch.full((offset + 4 * 70 * pitch,), True if kind == "bool" else NAN,
                          dtype=mask.dtype, device=cuda)  # fmt: skip
        strides = (2 * 70 * pitch, 70 * pitch, pitch, 1)
        view = wide.as_strided((2, 2, 70, 333), strides, offset)
        inputs.leaves["attn_mask"] = view.copy_(mask)
        check(inputs)


@pytest.mark.parametrize("dims", ALL_DIMS)
@pytest.mark.parametrize("dtype, kind", [("bf16", "own"), ("bf16", "fp32"), ("fp32", "fp32")])
def test_gradient_of_every_broadcast(cuda, dims, dtype, kind):
    """Summed to the mask's own shape, over several tiles, groups of heads and batches."""
    case = Case(lq=150, lk=210, heads=4, kv_heads=2, dim=64, dtype=dtype, mask=f"{kind}:{dims}")
    check(make(replace(case, alibi="bh", softcap=5.0, lse=True), cuda))
    inputs = make(replace(case, window=(90, 100), batch=3), cuda)
    check(inputs, with_dropout(inputs, 0.2, flashbpt.attention))


@pytest.mark.parametrize("dims", ["bhqk", "1hqk", "11qk", "b11k"])
@pytest.mark.parametrize("dtype, dim", [("bf16", 64), ("fp16", 128), ("fp32", 64)])
def test_gradient_of_many_tiles(cuda, dims, dtype, dim):
    """More tiles than blocks: a block walks over several that add to one piece or to their own."""
    case = Case(lq=700, lk=900, batch=2, heads=36, kv_heads=4, dtype=dtype, dim=dim)
    inputs = make(replace(case, mask=f"own:{dims}"), cuda)
    inputs.grads = ("attn_mask",)
    check(inputs)


@pytest.mark.parametrize("slopes", ["h", "bh"])
@pytest.mark.parametrize("dtype, dim", KERNELS)
def test_gradient_of_the_slopes(cuda, dtype, dim, slopes):
    for fields in (
        {"causal": True, "align": "lower-right"},
        {"window": (50, 20), "sinks": True},
        {"mask": "bool:b1qk", "softcap": 4.0},
    ):
        case = Case(lq=300, lk=250, heads=4, kv_heads=1, dtype=dtype, dim=dim, alibi=slopes)
        check(make(replace(case, lse=True, **fields), cuda))
