"""Compute random words from a counter and a key by Philox.

The words depend only on counter and key, not on the device or the order of the computation.
"""

from torch import Tensor

LOW32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key after each round
_ROUNDS = 10

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Compute Philox4x32-10.

    Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"; Random123.

    Args:
        counter: four words in [0, 2^32), int64, of shapes that broadcast. The first and the third
            must not be constants of 2^31 or more in a compiled function: Inductor (torch 2.13)
            multiplies constants without wrapping around.
        key: two words of the same kind.

    Returns:
        Four words in [0, 2^32), int64.
    """
    # The words are in [0, 2^32) already, so these masks do not change them. Without the masks,
    # Inductor would multiply indices, such as those of `arange`, as 32-bit numbers on a GPU.
    c0 = counter[0] & LOW32
    c1 = counter[1]
    c2 = counter[2] & LOW32
    c3 = counter[3]
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products may overflow int64, so the mask also removes the sign bits that the shift copies
        # into the upper half.
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c2 = ((product1 >> 32) ^ (c1 ^ k0)) & LOW32, ((product0 >> 32) ^ (c3 ^ k1)) & LOW32
        c1, c3 = product1, product0
        k0, k1 = (k0 + _WEYL[0]) & LOW32, (k1 + _WEYL[1]) & LOW32
    return c0, c1 & LOW32, c2, c3 & LOW32
