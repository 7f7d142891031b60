import numpy as np

from mtkit.text.segments import mixed, uniform


def test_neighbouring_numbers_mix_to_unlike_ones() -> None:
    values = mixed(np.arange(10_000, dtype=np.uint64))
    assert len(np.unique(values)) == 10_000
    for bit in range(64):
        share = float(((values >> np.uint64(bit)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 0.03


def test_draws_are_even_and_differ_from_key_to_key_and_number_to_number() -> None:
    keys = np.arange(20_000, dtype=np.uint64)
    first, second = uniform(keys, 0), uniform(mixed(keys), 1)
    for draws in (first, second):
        assert draws.min() >= 0
        assert draws.max() < 1
        counts, _ = np.histogram(draws, bins=50, range=(0, 1))
        assert np.abs(counts - 400).max() < 6 * 20
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.03
