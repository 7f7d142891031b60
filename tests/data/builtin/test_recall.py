import numpy as np
import pytest

from mtkit.errors import RecipeError
from tests.data.builtin.drawing import pairs_of


def test_the_answers_of_mqar_are_the_values_of_the_queried_keys() -> None:
    for source, target in pairs_of("mqar") + pairs_of("mqar", "test-4x", 20):
        middle = source.index("|")
        value_of = dict(zip(source[:middle:2], source[1:middle:2], strict=True))
        queries = [word for word in source[middle + 1 :] if word != "_"]
        assert [value_of[key] for key in queries] == target
        assert sorted(queries) == sorted(value_of)  # each key once
        assert len(set(value_of.values())) == len(value_of) == middle // 2
        assert len(source) - middle - 1 == 2 * len(queries)


def test_the_lengths_of_mqar_are_pairs() -> None:
    assert {len(target) for _, target in pairs_of("mqar", shortest=3, longest=5)} == {3, 4, 5}
    assert {len(target) for _, target in pairs_of("mqar", "test-2x", shortest=3, longest=5)} == {6, 7, 8, 9, 10}


@pytest.mark.parametrize("power", [0.01, 0.5, 1.0])
def test_the_places_of_queries_follow_numpys_draws_by_the_power_law(power: float) -> None:
    """The i-th query slot in the order of the draws; the paper's code draws with numpy.random.choice."""
    pairs, slots, draws = 4, 12, 4_000
    ours = np.zeros((pairs, slots))
    for source, _ in pairs_of("mqar", size=draws, shortest=4, longest=4, options={"slots": 3, "power": power}):
        middle = source.index("|")
        for pair, key in enumerate(source[:middle:2]):
            ours[pair, source[middle + 1 :].index(key)] += 1 / draws
    generator, expected = np.random.default_rng(1), np.zeros((pairs, slots))
    weights = np.arange(1, slots + 1) ** (power - 1)
    for _ in range(draws):
        drawn = generator.choice(slots, size=pairs, replace=False, p=weights / weights.sum())
        expected[range(pairs), drawn] += 1 / draws
    np.testing.assert_allclose(ours, expected, atol=0.04)  # 4 deviations of the difference
    assert (ours[0, 0] > 2 * ours[0, 6]) == (power < 0.6)


def test_mqar_needs_as_many_keys_as_pairs() -> None:
    with pytest.raises(RecipeError, match=r"16 pairs .*\.vocabulary = 32 or more"):
        pairs_of("mqar", longest=4, options={"vocabulary": 31})
    assert pairs_of("mqar", longest=4, options={"vocabulary": 32})


def test_selective_copy_repeats_what_is_no_noise() -> None:
    pairs = pairs_of("selective-copy", options={"content": 5})
    assert all(target == [word for word in source if word != "_"] for source, target in pairs)
    assert {len(target) for _, target in pairs} == {5}
    assert {len(source) for source, _ in pairs} == set(range(16, 65))
    places = np.mean([[word != "_" for word in source[:16]] for source, _ in pairs if len(source) == 64], axis=0)
    assert places.max() < 0.6


def test_a_short_selective_copy_has_no_noise() -> None:
    assert {len(target) for _, target in pairs_of("selective-copy", shortest=6, longest=8)} == {6, 7, 8}
