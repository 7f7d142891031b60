"""The exponential in float32 against that in float64."""

import numpy as np

from mtkit.attention.kernels.cpu.machine_code import exponential


def test_it_is_the_exponential() -> None:
    x = np.concatenate([-np.logspace(-8, np.log10(87), 400), -np.linspace(0, 87, 401)]).astype(np.float32)
    found = np.array([exponential(each) for each in x], dtype=np.float64)
    expected = np.exp(x.astype(np.float64))
    # the product with log2(e) is rounded, which counts for more where it is larger
    assert (abs(found - expected) <= expected * (2e-7 + 1e-7 * abs(x))).all()
    assert exponential(np.float32(0)) == 1


def test_far_below_it_is_next_to_nothing() -> None:
    for x in (-88.0, -1e4, -1e30, -np.inf):
        assert 0 <= exponential(np.float32(x)) <= 2.0**-126


def test_nan_stays() -> None:
    assert np.isnan(exponential(np.float32(np.nan)))
