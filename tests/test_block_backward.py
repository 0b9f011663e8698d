"""attention_backward_accumulate: the backward of a Blockwise Parallel Transformer, one block of
query rows at a time.
"""

import pytest
import torch
from cases import Case, ids, make
from compare import accumulator, assert_close
from op_calls import backward, backward_accumulate, forward

CASES = [
    Case(lq=256, lk=256, causal=True, heads=2),
    Case(lq=256, lk=200, heads=6, kv_heads=2, dtype="bf16", dim=32),
    Case(
        lq=300, lk=320, causal=True, align="lower-right", window=(70, -1), alibi="bh", softcap=5.0
    ),
    Case(lq=320, lk=130, mask="bool:b1qk", sinks=True),
    Case(lq=256, lk=100, mask="fp32:bhqk", dim_v=24),
    Case(lq=256, lk=100, mask="fp32:b11k", dtype="fp16"),
    Case(lq=64, lk=48, mask="own:11q1", dtype="fp64", heads=4, kv_heads=1),
    Case(lq=512, lk=300, heads=2, kv_heads=1, dim=64, dtype="bf16", sinks=True, batch=1),
    Case(lq=512, lk=384, dim=128, dtype="fp16", causal=True, align="lower-right", batch=1),
    Case(lq=256, lk=200, dim=256, mask="bool:11qk", window=(99, 60), dtype="bf16", batch=1),
    Case(lq=256, lk=140, dim=96, mask="own:1hqk", alibi="h", batch=1),
]


def op_arguments(case, device):
    """(arguments of the op, grad_out, grad_lse)."""
    inputs = make(case, device, grads=False)
    x, (left, right) = inputs.leaves, case.window or (-1, -1)
    mask = x.get("attn_mask")
    arguments = {
        "q": x["query"],
        "k": x["key"],
        "v": x["value"],
        "mask": mask if mask is None else mask[(None,) * (4 - mask.dim())],
        "sinks": x.get("sinks"),
        "alibi_slopes": x.get("alibi_slopes"),
        "scale": case.scale,
        "causal": case.causal,
        "window_left": left,
        "window_right": right,
        "softcap": case.softcap,
        "diagonal": case.full_lk - case.lq if case.align == "lower-right" else 0,
    }
    out = torch.randn(*x["query"].shape[:-1], x["value"].size(-1), device=device).to(
        x["query"].dtype
    )
    return (
        arguments,
        out,
        torch.randn(x["query"].shape[:-1], device=device).to(accumulator(out.dtype)),
    )


def block_of(arguments, rows):
    """The same call for some query rows; a mask that has the rows is cut too."""
    mask = arguments["mask"]
    if mask is not None and mask.size(2) > 1:
        mask = mask[:, :, rows]
    return {**arguments, "q": arguments["q"][:, :, rows], "mask": mask, "q_offset": rows.start}


def edges_of(rows, blocks):
    step = -(-rows // blocks)
    step = -(-step // 16) * 16
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


@pytest.mark.parametrize("blocks", [1, 4, 16])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_blocks_agree_with_the_whole(device, case, blocks):
    """dq and dmask rows of each block, and dk, dv, dsinks, dalibi summed over blocks."""
    arguments, grad, grad_lse = op_arguments(case, device)
    whole = backward(grad, grad_lse, *forward(**arguments), **arguments)
    total = accumulator(grad.dtype)
    dk, dv = (
        torch.zeros(x.shape, dtype=total, device=device) for x in (arguments["k"], arguments["v"])
    )
    dq, sums = [], [None, None, None]
    for rows in edges_of(case.lq, blocks):
        block = block_of(arguments, rows)
        part = backward_accumulate(
            grad[:, :, rows], grad_lse[:, :, rows], *forward(**block), dk, dv, **block
        )
        dq.append(part[0])
        for i, x in enumerate(part[1:]):
            split = i == 0 and x is not None and arguments["mask"].size(2) > 1
            sums[i] = x if sums[i] is None else torch.cat([sums[i], x], 2) if split else sums[i] + x
    got = (torch.cat(dq, 2), dk, dv, *sums)
    for name, a, b in zip(("dq", "dk", "dv", "dmask", "dsinks", "dalibi"), got, whole, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert_close(
                name, a, b, ulps=2 if case.dtype in ("bf16", "fp16") else 60, dtype=grad.dtype
            )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
def test_added_into_what_is_there(device, dtype):
    """dk and dv are updated in place, in fp32 (fp64 for fp64) whatever the inputs' dtype, at their
    own strides.
    """
    arguments, grad, _ = op_arguments(
        Case(lq=70, lk=90, heads=4, kv_heads=2, causal=True, dtype=dtype), device
    )
    saved, total = forward(**arguments), accumulator(grad.dtype)
    zero = [torch.zeros(2, 2, 90, 16, dtype=total, device=device) for _ in range(2)]
    dq = backward_accumulate(grad, None, *saved, *zero, deterministic=True, **arguments)[0]
    start = [
        torch.randn(2, 90, 2, 16, dtype=total, device=device).transpose(1, 2) for _ in range(2)
    ]
    into = [x.clone() for x in start]
    versions = [x._version for x in into]
    again = backward_accumulate(grad, None, *saved, *into, deterministic=True, **arguments)[0]
    assert torch.equal(dq, again)
    for name, a, b, c in zip(("dk", "dv"), into, start, zero, strict=True):
        torch.testing.assert_close(a, b + c, msg=lambda m, n=name: f"{n}: {m}")
        assert a._version > versions.pop(0)


def test_needed_gradients_only(device):
    """What is not needed comes back undefined, and dk, dv stay as they were when they are not
    needed.
    """
    arguments, grad, _ = op_arguments(Case(lq=70, lk=90, sinks=True, alibi="h"), device)
    saved = forward(**arguments)
    dk, dv = (torch.full((2, 2, 90, 16), 7.0, device=device) for _ in range(2))
    dq, dmask, dsinks, dalibi = backward_accumulate(
        grad, None, *saved, dk, dv, need=(False, False, True, False, True, False), **arguments
    )
    assert dq is None and dmask is None and dalibi is None and dsinks is not None
    assert (dk == 7).all() and not (dv == 7).all()
    for i in range(6):
        need = tuple(j == i for j in range(6))
        if i == 3:
            continue
        got = backward(grad, None, *saved, need=need, **arguments)
        assert [x is not None for x in got] == list(need)


@pytest.mark.parametrize("wrong", ["dtype", "shape", "device"])
def test_wrong_accumulators_are_refused(device, wrong):
    arguments, grad, _ = op_arguments(Case(lq=20, lk=30, dtype="bf16"), device)
    dk, dv = (torch.zeros(2, 2, 30, 16, device=device) for _ in range(2))
    dk = {"dtype": dk.bfloat16(), "shape": dk[:, :, 1:], "device": dk.to("meta")}[wrong]
    with pytest.raises(RuntimeError, match=r"dk|device|meta"):
        backward_accumulate(grad, None, *forward(**arguments), dk, dv, **arguments)
