"""Exponential function, in operations that compilers vectorise."""

import numpy as np

from mtkit.compiled.machine_code import of_bits, part

LOG2_E = np.float32(1.4426950408889634)
LEAST_POWER = np.float32(-126)
"""Exponent of the least normal float32; smaller exponents are raised to it."""

EXPONENT_BITS, EXPONENT_OF_ONE = np.int32(23), np.int32(127)
"""Position of the exponent's lowest bit in a float32, and the biased exponent of 1."""

# 2^f for f from -0.5 to 0.5 is 1 + f times a polynomial of degree 5, interpolated at Chebyshev nodes
C6, C5, C4, C3, C2, C1, C0 = (
    np.float32(each)
    for each in (1.54531629e-4, 1.33908634e-3, 9.61808256e-3, 5.55035711e-2, 2.40226508e-1, 6.93147188e-1, 1.0)
)


@part
def exponential(x: np.float32) -> np.float32:
    """Return exp(x) for x <= 0, with a relative error of at most 2e-7 + 1e-7 |x|."""
    exponent = max(x * LOG2_E, LEAST_POWER)
    whole = np.int32(exponent - np.float32(0.5))  # the nearest integer, as conversion truncates towards zero
    f = exponent - np.float32(whole)
    power = of_bits(np.int32((whole + EXPONENT_OF_ONE) << EXPONENT_BITS))
    return ((((((C6 * f + C5) * f + C4) * f + C3) * f + C2) * f + C1) * f + C0) * power
