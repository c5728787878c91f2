"""The rows that Tessera's MaskedDataset draws for a seed, in numpy: so that a run of PyTorch learns from the same ones.

How: Philox 4x32-10 (core/tensor/philox.h) by the row's number gives its window and the key of its mask; the targets are the
first places of a permutation of the row under that key (core/data/permutation.h). Invariant: ids and targets are equal to
those of core/data/masked_dataset.cpp.
"""

import numpy as np

IGNORED = -100
SHUFFLE, WINDOW, MASK = (np.uint64(use << 56) for use in (0xD1, 0xD2, 0xD3))
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


def philox(key, high, low):
    """The first 64 bits of the block at counter (high, low) under key; u64, broadcast against each other."""
    key, high, low = np.broadcast_arrays(*(np.asarray(x, np.uint64) for x in (key, high, low)))
    k0, k1, c0, c1, c2, c3 = key & LOW, key >> WORD, low & LOW, low >> WORD, high & LOW, high >> WORD
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> WORD) ^ c1 ^ k0, p1 & LOW, (p0 >> WORD) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & LOW, (k1 + np.uint64(0xBB67AE85)) & LOW
    return c1 << WORD | c0


def uniform_below(n, seed, use, number):
    """Uniform in [0, n), n below 2^32: the high half of a 128-bit product."""
    bits, n = philox(seed, use, number), np.uint64(n)
    return ((bits >> WORD) * n + ((bits & LOW) * n >> WORD) >> WORD).astype(np.int64)


def permute(i, n, key):
    """Where places i [k] of [0, n) go under keys [B, 1]: [B, k]."""
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    below = (np.uint64(1) << half) - np.uint64(1)
    x = np.broadcast_to(np.asarray(i, np.uint64), np.broadcast_shapes(np.shape(i), key.shape))
    walking = np.ones(x.shape, bool)
    while walking.any():
        left, right = x >> half, x & below
        for turn in range(8):
            left, right = right, left ^ (philox(key, SHUFFLE | np.uint64(turn), right) & below)
        x = np.where(walking, left << half | right, x)
        walking = x >= n
    return x.astype(np.int64)


def rows(tokens, numbers, seed, length, vocabulary, cls, sep, mask, random_windows):
    """(inputs, targets), both i64 [B, length], of the rows with these numbers; tokens i64 [N]."""
    words, numbers = length - 2, np.asarray(numbers, np.uint64)
    count = max(1, round(0.15 * words))
    begin = uniform_below(len(tokens) - words + 1, seed, WINDOW, numbers)
    begin = begin if random_windows else numbers.astype(np.int64) * words
    inputs = np.empty((len(numbers), length), np.int64)
    inputs[:, 0], inputs[:, -1] = cls, sep
    inputs[:, 1:-1] = tokens[begin[:, None] + np.arange(words)]
    targets = np.full_like(inputs, IGNORED)
    key, k = philox(seed, MASK, numbers)[:, None], np.arange(count)
    row, place = np.arange(len(numbers))[:, None], 1 + permute(k, words, key)
    kept = targets[row, place] = inputs[row, place]
    fate, drawn = uniform_below(10, key, MASK, 2 * k), uniform_below(vocabulary, key, MASK, 2 * k + 1)
    inputs[row, place] = np.where(fate < 8, mask, np.where(fate == 8, drawn, kept))
    return inputs, targets
