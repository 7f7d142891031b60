"""Numbers that look random and are a function of other numbers: SplitMix64 (Steele et al., OOPSLA 2014)."""

import numpy as np


def mixed(values: np.ndarray) -> np.ndarray:
    """Each uint64 as another that looks random, one to one."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform(keys: np.ndarray, number: int | np.ndarray) -> np.ndarray:
    """The `number`-th draw of each uint64 key, a float64 from 0 to below 1."""
    return (mixed(keys + np.asarray(number, dtype=np.uint64)) >> np.uint64(11)) * 2.0**-53
