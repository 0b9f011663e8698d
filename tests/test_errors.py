"""Refusals: SDPA's exception type, the value seen and what is allowed; nothing is written to an
input.
"""

import pytest
import torch
from cases import cumulative

import flashbpt

NAN, INF = float("nan"), float("inf")
# Errors in arguments that scaled_dot_product_attention does not have.
OWN = (RuntimeError, ValueError, TypeError)


def qkv(lq=6, lk=9, heads=4, kv_heads=4, dim=8, dtype=torch.float32):
    return [
        torch.randn(2, h, n, dim).to(dtype)
        for h, n in ((heads, lq), (kv_heads, lk), (kv_heads, lk))
    ]


def refused(fn, arguments, options, kind, *said):
    """fn raises kind, the message holds each of said (of an alternative 'a|b', one), and no input
    was written to.
    """
    tensors = [
        x
        for x in (*arguments, *options.values())
        if isinstance(x, torch.Tensor) and x.device.type != "meta"
    ]
    before = [(x._version, x.clone()) for x in tensors]
    state = torch.get_rng_state()
    with pytest.raises(kind) as error:
        fn(*arguments, **options)
    message = str(error.value)
    for part in said:
        assert any(p.lower() in message.lower() for p in str(part).split("|")), (
            f"{part!r} is not in: {message}"
        )
    assert len(message) < 1500 and "INTERNAL ASSERT" not in message, message
    assert torch.equal(state, torch.get_rng_state()), "the random generator moved"
    for x, (version, value) in zip(tensors, before, strict=True):
        assert x._version == version and torch.equal(
            torch.nan_to_num(x), torch.nan_to_num(value)
        ), "an input was written to"


Q, K, V = qkv()
M = torch.ones(6, 9, dtype=torch.bool)

# name: (tensors, options, what the message must hold)
SDPA_ERRORS = {
    "rank 1": ((Q[0, 0, 0], K, V), {}, ("2", "1")),
    "rank 0": ((torch.tensor(1.0), K, V), {}, ("2", "0")),
    "rank 1 value": ((Q, K, V[0, 0, 0]), {}, ("2", "1")),
    "key dtype": ((Q, K.double(), V), {}, ("same dtype", "double|float64", "float")),
    "value dtype": ((Q, K, V.bfloat16()), {}, ("same dtype", "bfloat16", "float")),
    "integers": ((Q.int(), K.int(), V.int()), {}, ("int", "float32", "bfloat16")),
    "complex": ((Q.cfloat(), K.cfloat(), V.cfloat()), {}, ("complex", "float32", "bfloat16")),
    "bool": ((Q > 0, K > 0, V > 0), {}, ("bool", "float32")),
    "key device": ((Q, K.to("meta"), V), {}, ("meta", "cpu")),
    "value device": ((Q, K, V.to("meta")), {}, ("meta", "cpu")),
    "mask device": ((Q, K, V), {"attn_mask": M.to("meta")}, ("meta", "cpu")),
    "query dim": ((Q[..., :7], K, V), {}, ("7", "8")),
    "key length": ((Q, K[:, :, :8], V), {}, ("8", "9")),
    "heads without the flag": ((Q, K[:, :2], V[:, :2]), {}, ("4", "2")),
    "more kv heads": ((Q[:, :2], K, V), {"enable_gqa": True}, ("heads", "4", "2")),
    "ratio": ((Q, K[:, :3], V[:, :3]), {"enable_gqa": True}, ("must divide", "3", "4")),
    "value ratio": ((Q, K[:, :2], V[:, :3]), {"enable_gqa": True}, ("must divide", "3", "4")),
    "no kv heads": ((Q, K[:, :0], V[:, :0]), {"enable_gqa": True}, ("heads", "0", "4")),
    "gqa of rank 2": ((Q[0, 0], K[0, 0], V[0, 0]), {"enable_gqa": True}, ("3|head|rank", "2")),
    "batch": ((Q, torch.randn(3, 4, 9, 8), torch.randn(3, 4, 9, 8)), {}, ("2", "3")),
    "mask int": ((Q, K, V), {"attn_mask": M.int()}, ("bool", "float", "int")),
    "mask uint8": (
        (Q, K, V),
        {"attn_mask": M.byte()},
        ("bool", "float", "byte|uint8|unsigned char"),
    ),
    "mask fp64": ((Q, K, V), {"attn_mask": M.double()}, ("bool", "float", "double|float64")),
    "mask fp16": ((Q, K, V), {"attn_mask": M.half()}, ("bool", "float", "half|float16|c10::Half")),
    "mask length": ((Q, K, V), {"attn_mask": M[:, :8]}, ("8", "9")),
    "mask rows": ((Q, K, V), {"attn_mask": M[:5]}, ("5", "6")),
    "mask heads": ((Q, K, V), {"attn_mask": M.expand(3, 6, 9)}, ("3", "4")),
    "mask enlarges the batch": (
        (Q[:1], K[:1], V[:1]),
        {"attn_mask": M.expand(5, 1, 6, 9)},
        ("5", "1"),
    ),
    "mask enlarges the rank": (
        (Q[0, 0], K[0, 0], V[0, 0]),
        {"attn_mask": M.expand(5, 6, 9)},
        ("5", "6", "9"),
    ),
    "mask rank 5": ((Q, K, V), {"attn_mask": M.expand(2, 2, 4, 6, 9)}, ("2, 2, 4, 6, 9",)),
    "mask with causal": (
        (Q, K, V),
        {"attn_mask": M, "is_causal": True},
        ("Explicit attn_mask should not be set when is_causal=True",),
    ),
    "dropout above 1": ((Q, K, V), {"dropout_p": 1.5}, ("1.5", "0", "1")),
    "dropout below 0": ((Q, K, V), {"dropout_p": -0.25}, ("-0.25", "0", "1")),
    "dropout NaN": ((Q, K, V), {"dropout_p": NAN}, ("nan", "0", "1")),
}


@pytest.mark.parametrize("name", SDPA_ERRORS)
def test_what_sdpa_refuses(name):
    arguments, options, said = SDPA_ERRORS[name]
    refused(flashbpt.attention, arguments, options, RuntimeError, *said)


@pytest.mark.parametrize("name", SDPA_ERRORS)
def test_refused_with_gradients_too(name):
    arguments, options, said = SDPA_ERRORS[name]
    arguments = [x.detach().requires_grad_() if x.is_floating_point() else x for x in arguments]
    refused(flashbpt.attention, arguments, options, RuntimeError, *said)


OWN_ERRORS = {
    "softcap negative": ({"softcap": -1.0}, ("softcap", "-1")),
    "softcap NaN": ({"softcap": NAN}, ("softcap", "nan")),
    "softcap inf": ({"softcap": INF}, ("softcap", "inf")),
    "window of one": ({"window": (3,)}, ("window", "3")),
    "window of three": ({"window": (1, 2, 3)}, ("window", "1, 2, 3")),
    "window scalar": ({"window": 5}, ("window", "5")),
    "window below -1": ({"window": (-2, 0)}, ("window", "-2", "-1")),
    "window right below -1": ({"window": (0, -7)}, ("window", "-7", "-1")),
    "window not whole": ({"window": (1.5, 0)}, ("window", "1.5")),
    "sinks per kv head": ({"sinks": torch.zeros(2)}, ("sinks", "2", "4")),
    "sinks of rank 2": ({"sinks": torch.zeros(2, 4)}, ("sinks", "2, 4", "4")),
    "sinks int": ({"sinks": torch.zeros(4, dtype=torch.int32)}, ("sinks", "int", "float32")),
    "sinks device": ({"sinks": torch.zeros(4, device="meta")}, ("sinks", "meta", "cpu")),
    "slopes length": ({"alibi_slopes": torch.zeros(3)}, ("alibi_slopes", "3", "4")),
    "slopes batch": ({"alibi_slopes": torch.zeros(3, 4)}, ("alibi_slopes", "3, 4", "2, 4")),
    "slopes rank": ({"alibi_slopes": torch.zeros(1, 2, 4)}, ("alibi_slopes", "1, 2, 4")),
    "slopes int": (
        {"alibi_slopes": torch.zeros(4, dtype=torch.int64)},
        ("alibi_slopes", "long|int64", "float32"),
    ),
    "align": (
        {"causal_align": "lower-left"},
        ("causal_align", "lower-left", "upper-left", "lower-right"),
    ),
}


@pytest.mark.parametrize("name", OWN_ERRORS)
def test_own_arguments(name):
    options, said = OWN_ERRORS[name]
    refused(flashbpt.attention, (Q, K, V), options, OWN, *said)


def packed(tokens_q=12, tokens_k=12, heads=4, kv_heads=4, dtype=torch.float32):
    return [
        torch.randn(n, h, 8).to(dtype)
        for n, h in ((tokens_q, heads), (tokens_k, kv_heads), (tokens_k, kv_heads))
    ]


TQ, TK, TV = packed()
CU = cumulative((5, 7))

VARLEN_ERRORS = {
    "starts above 0": ((TQ, TK, TV, torch.tensor([1, 5, 12])), {}, ("cu_seqlens_q", "0", "1")),
    "starts below 0": ((TQ, TK, TV, torch.tensor([-3, 5, 12])), {}, ("cu_seqlens_q", "0", "-3")),
    "k starts above 0": (
        (TQ, TK, TV, CU, torch.tensor([2, 5, 12], dtype=torch.int32)),
        {},
        ("cu_seqlens_k", "0", "2"),
    ),
    "decreases": (
        (TQ, TK, TV, torch.tensor([0, 9, 7, 12])),
        {},
        ("cu_seqlens_q", "9", "7", "decrease"),
    ),
    "k decreases": (
        (TQ, TK, TV, CU, torch.tensor([0, 9, 7], dtype=torch.int32)),
        {},
        ("cu_seqlens_k", "9", "7", "decrease"),
    ),
    "past the tokens": ((TQ, TK, TV, torch.tensor([0, 5, 13])), {}, ("cu_seqlens_q", "13", "12")),
    "k past the tokens": (
        (TQ, TK, TV, CU, torch.tensor([0, 5, 40], dtype=torch.int32)),
        {},
        ("cu_seqlens_k", "40", "12"),
    ),
    "float": ((TQ, TK, TV, CU.float()), {}, ("cu_seqlens_q", "float", "int32", "int64")),
    "int16": ((TQ, TK, TV, CU.short()), {}, ("cu_seqlens_q", "short|int16", "int32", "int64")),
    "rank 2": ((TQ, TK, TV, CU[None]), {}, ("cu_seqlens_q", "1, 3")),
    "rank 0": ((TQ, TK, TV, CU[0]), {}, ("cu_seqlens_q",)),
    "empty": ((TQ, TK, TV, CU[:0]), {}, ("cu_seqlens_q", "0")),
    "lengths differ": ((TQ, TK, TV, CU, cumulative((12,))), {}, ("cu_seqlens", "2", "1")),
    "device": ((TQ, TK, TV, CU.to("meta")), {}, ("cu_seqlens_q", "meta", "cpu")),
    "4-D": ((TQ[None], TK[None], TV[None], CU), {}, ("tokens, heads|(tokens", "4|1, 12, 4, 8")),
    "key dtype": ((TQ, TK.half(), TV, CU), {}, ("same dtype", "half|float16")),
    "integers": ((TQ.int(), TK.int(), TV.int(), CU), {}, ("int", "float32")),
    "ratio": ((TQ, TK[:, :3], TV[:, :3], CU), {}, ("heads", "3", "4")),
    "key and value heads": ((TQ, TK[:, :2], TV, CU), {}, ("heads", "2", "4")),
    "head dim": ((TQ, TK[..., :7], TV, CU), {}, ("7", "8")),
    "tokens": ((TQ, TK[:11], TV, CU), {}, ("11", "12")),
    "dropout": ((TQ, TK, TV, CU), {"dropout_p": 2.0}, ("2", "0", "1")),
    "dropout NaN": ((TQ, TK, TV, CU), {"dropout_p": NAN}, ("nan",)),
    "softcap": ((TQ, TK, TV, CU), {"softcap": -3.0}, ("softcap", "-3")),
    "window": ((TQ, TK, TV, CU), {"window": (0, -9)}, ("window", "-9")),
    "sinks": ((TQ, TK, TV, CU), {"sinks": torch.zeros(5)}, ("sinks", "5", "4")),
    "slopes": (
        (TQ, TK, TV, CU),
        {"alibi_slopes": torch.zeros(3, 4)},
        ("alibi_slopes", "3, 4", "2, 4"),
    ),
}


@pytest.mark.parametrize("name", VARLEN_ERRORS)
def test_varlen(name):
    arguments, options, said = VARLEN_ERRORS[name]
    refused(
        flashbpt.varlen_attention,
        arguments,
        options,
        OWN if name in ("window",) else RuntimeError,
        *said,
    )


def test_index_types_of_the_two_offsets_may_differ_or_are_refused():
    """int32 beside int64 is either read right or refused, never read as the other type."""
    usual = flashbpt.varlen_attention(TQ, TK, TV, CU, CU)
    try:
        mixed = flashbpt.varlen_attention(TQ, TK, TV, CU, CU.long())
    except RuntimeError as error:
        assert "int" in str(error)
    else:
        torch.testing.assert_close(mixed, usual, atol=0, rtol=0)


def test_too_small_max_seqlen_is_refused_or_ignored():
    """A maximum below the longest sequence never cuts rows off without a word."""
    usual = flashbpt.varlen_attention(TQ, TK, TV, CU)
    try:
        got = flashbpt.varlen_attention(TQ, TK, TV, CU, max_seqlen_q=3, max_seqlen_k=3)
    except RuntimeError as error:
        assert "max_seqlen" in str(error)
    else:
        torch.testing.assert_close(got, usual, atol=0, rtol=0)


def test_unknown_arguments_are_not_swallowed():
    with pytest.raises(TypeError, match="window_size"):
        flashbpt.attention(Q, K, V, window_size=(1, 1))
    with pytest.raises(TypeError):
        flashbpt.attention(Q, K, V, None, 0.0, False, None, False, (1, 1))


def test_wrong_grad_out_is_refused_by_the_op():
    from op_calls import backward, forward

    x = {"q": Q, "k": K, "v": V}
    saved = forward(**x)
    for grad in (
        torch.randn(2, 4, 5, 8),
        torch.randn(2, 4, 6, 8).double(),
        torch.randn(2, 4, 6, 8, device="meta"),
    ):
        with pytest.raises((RuntimeError, NotImplementedError)):
            backward(grad, None, *saved, **x)
    with pytest.raises(RuntimeError):
        backward(torch.randn(2, 4, 6, 8), torch.randn(2, 4, 5), *saved, **x)
