"""The ops called by name, with the defaults that the public functions pass; calls whose dropout
mask is known beforehand.
"""

import math

import philox
import reference
import torch

import flashbpt  # noqa: F401 (registers the ops)

OPTIONS = {
    "mask": None,
    "sinks": None,
    "alibi_slopes": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "rng_state": None,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "scale": None,
    "causal": False,
    "window_left": -1,
    "window_right": -1,
    "softcap": 0.0,
    "dropout_p": 0.0,
    "q_offset": 0,
    "k_offset": 0,
    "batch_offset": 0,
    "head_offset": 0,
    "total_heads": 0,
    "diagonal": 0,
    "backend": 0,
}


def next_state(like, seed):
    """The state that the next call after torch.manual_seed(seed) draws; the seed is set again
    afterwards.
    """
    torch.manual_seed(seed)
    state = torch.ops.flashbpt.draw_rng_state(like, 4)
    torch.manual_seed(seed)
    return state.tolist()


def keep_mask(state, p, sizes, offsets=(0, 0, 0, 0, 0)):
    """The model's mask; where that would take long, the one of the CPU's op."""
    if math.prod(sizes) < 2**19:
        return torch.from_numpy(philox.keep_mask(state, p, sizes, offsets))
    return torch.ops.flashbpt.dropout_mask(torch.tensor(state), p, list(sizes), list(offsets))


def with_dropout(inputs, p, fn, seed=77):
    """Gives the inputs dropout p and the reference the mask of it; returns fn drawing that mask."""
    x = inputs.view(inputs.leaves)
    q, k, options = x["query"], x["key"], inputs.options
    state = next_state(q, seed)
    if "cu_seqlens_q" in options:
        spans_q = reference.spans(options["cu_seqlens_q"])
        spans_k = reference.spans(options.get("cu_seqlens_k", options["cu_seqlens_q"]))
        heads = q.size(1)
        keep = [
            keep_mask(state, p, (1, heads, b - a, d - c), (i, 0, 0, 0, heads))[0]
            for i, ((a, b), (c, d)) in enumerate(zip(spans_q, spans_k, strict=True))
        ]
    else:
        keep = keep_mask(state, p, (*q.shape[:3], k.size(2)))
    options["dropout_p"], inputs.reference_options["keep"] = p, keep

    def seeded(*args, **kwargs):
        torch.manual_seed(seed)
        return fn(*args, **kwargs)

    return seeded


def forward(**arguments):
    """(out, lse, lse_lo, mask_tiles)."""
    return torch.ops.flashbpt.attention_forward(**{**OPTIONS, **arguments})


def needs(arguments):
    """need flags for every gradient that the call has."""
    mask = arguments.get("mask")
    return (
        True,
        True,
        True,
        mask is not None and mask.is_floating_point(),
        arguments.get("sinks") is not None,
        arguments.get("alibi_slopes") is not None,
    )


def backward(
    grad_out, grad_lse, out, lse, lse_lo, mask_tiles, *, need=None, deterministic=False, **arguments
):
    """(dq, dk, dv, dmask, dsinks, dalibi); what is not needed is None."""
    return torch.ops.flashbpt.attention_backward(
        grad_out=grad_out,
        grad_lse=grad_lse,
        out=out,
        lse=lse,
        lse_lo=lse_lo,
        mask_tiles=mask_tiles,
        deterministic=deterministic,
        need=list(need or needs(arguments)),
        **{**OPTIONS, **arguments},
    )


def backward_accumulate(
    grad_out,
    grad_lse,
    out,
    lse,
    lse_lo,
    mask_tiles,
    dk,
    dv,
    *,
    need=None,
    deterministic=False,
    **arguments,
):
    """(dq, dmask, dsinks, dalibi); dk and dv are added into."""
    return torch.ops.flashbpt.attention_backward_accumulate(
        grad_out=grad_out,
        grad_lse=grad_lse,
        out=out,
        lse=lse,
        lse_lo=lse_lo,
        mask_tiles=mask_tiles,
        deterministic=deterministic,
        need=list(need or needs(arguments)),
        dk=dk,
        dv=dv,
        **{**OPTIONS, **arguments},
    )
