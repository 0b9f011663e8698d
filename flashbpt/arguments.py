"""What users pass, brought into the form that the ops take: ranks, broadcasting, numbers."""

import math
import operator

import torch


def autocast(*tensors):
    """The tensors, some of which may be None, in autocast's dtype where it is on for the first."""
    device_type = tensors[0].device.type
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)

    def cast(t):
        if t is None or not t.is_floating_point() or t.dtype == torch.float64:
            return t
        return t.to(dtype)

    return tuple(map(cast, tensors))


def window_limits(window):
    if window is None:
        return -1, -1
    try:
        left, right = window
        return operator.index(left), operator.index(right)
    except (TypeError, ValueError):
        raise ValueError(
            "window must be None or (left, right), whole numbers >= 0 or -1 for no limit, got "
            f"{window!r}"
        ) from None


def check_dropout(dropout_p):
    if not 0.0 <= dropout_p <= 1.0:
        raise RuntimeError(
            f"flashbpt: dropout probability has to be between 0 and 1, but got {dropout_p}"
        )


def four_dims(query, key, value, enable_gqa):
    """True for inputs that the op takes as they are: (B, H, L, D), nothing to broadcast."""
    q, k, v = query.shape, key.shape, value.shape
    return (
        len(q) == len(k) == len(v) == 4
        and q[0] == k[0] == v[0]
        and k[1] == v[1]
        and (enable_gqa or q[1] == k[1])
    )


def check_ranks(query, key, value):
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(
            "flashbpt: Expected query, key, and value to all be at least 2 dimensional, but got "
            f"query.dim: {query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()} instead."
        )


def lead_shapes(query, key, value):
    """The dimensions before (length, dim) of each, filled up with 1 to one rank, at least two."""
    check_ranks(query, key, value)
    rank = max(4, query.dim(), key.dim(), value.dim()) - 2
    return [(1,) * (rank + 2 - t.dim()) + tuple(t.shape[:-2]) for t in (query, key, value)]


def broadcast_or_raise(*shapes):
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise RuntimeError(
            "flashbpt: the leading dimensions of query, key and value must be equal or broadcast, "
            f"got {', '.join(str(tuple(s)) for s in shapes)} (a different number of heads needs "
            "enable_gqa=True)"
        ) from None


def broadcast_lead(query, key, value, enable_gqa):
    """Leading dimensions of the output."""
    lead_q, lead_k, lead_v = lead_shapes(query, key, value)
    if enable_gqa:
        lead = broadcast_or_raise(lead_q[:-1], lead_k[:-1], lead_v[:-1]) + lead_q[-1:]
    else:
        lead = broadcast_or_raise(lead_q, lead_k, lead_v)
    return lead[len(lead) + 2 - max(query.dim(), key.dim(), value.dim()) :]


def to_four_dims(query, key, value, attn_mask, enable_gqa):
    """Inputs of any rank and broadcasting as (B, H, L, D); key and value share a head count."""
    lead_q, lead_k, lead_v = lead_shapes(query, key, value)
    heads_k, heads_v = lead_k[-1], lead_v[-1]
    if enable_gqa:
        heads_q = lead_q[-1]
        if min(query.dim(), key.dim(), value.dim()) < 3:
            raise RuntimeError(
                "flashbpt: enable_gqa needs a dimension of heads, but got "
                f"query.dim: {query.dim()}, key.dim: {key.dim()} and value.dim: {value.dim()}"
            )
        if any(heads_q % n if n else heads_q for n in (heads_k, heads_v)):
            raise RuntimeError(
                "flashbpt: Number of heads in key and value must divide the number of heads in "
                f"query, but query has {heads_q}, key {heads_k} and value {heads_v}"
            )
        heads_kv = math.lcm(heads_k, heads_v)
    else:
        heads_q = broadcast_or_raise(lead_q, lead_k, lead_v)[-1]
        # One key head for all query heads is a group like any other: nothing is expanded.
        heads_kv = 1 if heads_k == heads_v == 1 else heads_q
    batch = broadcast_or_raise(lead_q[:-1], lead_k[:-1], lead_v[:-1])
    query = flatten_lead(query, batch, heads_q)
    key = flatten_lead(key, batch, heads_kv)
    value = flatten_lead(value, batch, heads_kv)
    if attn_mask is not None:
        attn_mask = flatten_mask(attn_mask, batch)
    return query, key, value, attn_mask


def flatten_lead(t, batch, heads):
    """(..., h, L, D) as (prod(batch), heads, L, D); heads repeat, the rest is expanded in place."""
    t = t[(None,) * (len(batch) + 3 - t.dim())]
    if t.shape[-3] not in (1, heads):
        t = t.repeat_interleave(heads // t.shape[-3], -3)
    t = t.expand(*batch, heads, *t.shape[-2:])
    return t if len(batch) == 1 else t.reshape(math.prod(batch), *t.shape[-3:])


def mask_to_four_dims(mask, rank):
    if mask.dim() > rank:
        raise RuntimeError(
            f"flashbpt: attn_mask of shape {tuple(mask.shape)} has more dimensions than the scores"
        )
    return mask[(None,) * (4 - mask.dim())]


def flatten_mask(mask, batch):
    """A mask of any rank as one of four dimensions, each of size 1 or full."""
    rank = len(batch) + 3
    mask = mask_to_four_dims(mask, rank)[(None,) * (rank - max(mask.dim(), 4))]
    if rank == 4:
        return mask
    if all(n == 1 for n in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    try:
        mask = mask.expand(*batch, *mask.shape[-3:])
    except RuntimeError:
        raise RuntimeError(
            f"flashbpt: attn_mask of shape {tuple(mask.shape)} does not broadcast to the leading "
            f"dimensions {tuple(batch)} of the scores"
        ) from None
    return mask.reshape(math.prod(batch), *mask.shape[-3:])


def without_expansion(mask, scores):
    """A mask with size 1 where it was expanded (stride 0) to a size of `scores`, its full shape.

    The kernels broadcast themselves, and look at what is repeated once.
    """
    for d, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
        if stride == 0 and 1 < size == scores[d]:
            mask = mask.narrow(d, 0, 1)
    return mask


def without_repeats(tensors):
    """Aliases for tensors that stand there twice, which a compiled Function refuses."""
    seen, out = [], []
    for t in tensors:
        repeated = t is not None and any(t is other for other in seen)
        out.append(t.view_as(t) if repeated else t)
        seen.append(t)
    return out
