"""The ops called by name, with the defaults that the public functions pass."""

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
