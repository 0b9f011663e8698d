"""Philox4x32-7 in numpy and the layout of the dropout mask, written from the definition.

Philox: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. One call of the
generator gives the four words of the score positions {q, q + 8} x {k, k + 8}:

    key      seed low, seed high
    counter  offset low 32 bits, (batch + batch_offset) * total_heads + head + head_offset,
             (q / 16) * 8 + q % 8, (k / 16) * 8 + k % 8
    word     2 * ((q / 8) % 2) + (k / 8) % 2
"""

import math

import numpy as np

LOW = 0xFFFFFFFF
MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter, key, rounds=7):
    """Four uint64 arrays (each below 2^32) from four counter words and two key words; arrays
    broadcast.
    """
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) for c in counter)
    k0, k1 = (int(k) & LOW for k in key)
    for _ in range(rounds):
        product0, product1 = c0 * np.uint64(MULTIPLIER[0]), c2 * np.uint64(MULTIPLIER[1])
        high0, low0 = product0 >> np.uint64(32), product0 & np.uint64(LOW)
        high1, low1 = product1 >> np.uint64(32), product1 & np.uint64(LOW)
        c0, c1, c2, c3 = high1 ^ c1 ^ np.uint64(k0), low1, high0 ^ c3 ^ np.uint64(k1), low0
        k0, k1 = (k0 + WEYL[0]) & LOW, (k1 + WEYL[1]) & LOW
    return c0, c1, c2, c3


def words(state, sizes, offsets):
    """uint64 (B, H, Lq, Lk): the random word of every score position."""
    seed, offset = (int(x) for x in state)
    batch, head, lq, lk = sizes
    batch_offset, head_offset, q_offset, k_offset, total_heads = (int(x) for x in offsets)
    row = (np.arange(lq, dtype=np.uint64) + np.uint64(q_offset))[:, None]
    key = (np.arange(lk, dtype=np.uint64) + np.uint64(k_offset))[None, :]
    which = 2 * (row // 8 % 2) + key // 8 % 2
    counter_q = (row // 16 * 8 + row % 8) & np.uint64(LOW)
    counter_k = (key // 16 * 8 + key % 8) & np.uint64(LOW)
    result = np.empty((batch, head, lq, lk), dtype=np.uint64)
    for b in range(batch):
        for h in range(head):
            plane = ((b + batch_offset) * total_heads + h + head_offset) & LOW
            four = philox((offset & LOW, plane, counter_q, counter_k), (seed, seed >> 32))
            result[b, h] = np.choose(
                which.astype(np.int64), [np.broadcast_to(w, (lq, lk)) for w in four]
            )
    return result


def threshold(p):
    """T = ceil(p * 2^32): a word below T is dropped."""
    return math.ceil(p * 2.0**32)


def keep_mask(state, p, sizes, offsets=(0, 0, 0, 0, 0)):
    """bool (B, H, Lq, Lk), True where the weight is kept. total_heads 0 means the H of `sizes`."""
    batch_offset, head_offset, q_offset, k_offset, total_heads = offsets
    offsets = (batch_offset, head_offset, q_offset, k_offset, total_heads or sizes[1])
    return words(state, sizes, offsets) >= np.uint64(threshold(p))
