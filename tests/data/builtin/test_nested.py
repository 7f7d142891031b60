import statistics

import pytest

from mtkit.errors import RecipeError
from tests.data.builtin.drawing import pairs_of

PAIRS = ("()", "[]", "{}", "<>")


def reduced(text: str) -> str:
    """Remove pairs of brackets until there is none: nothing is left of a word of the Dyck language."""
    while any(pair in text for pair in PAIRS):
        for pair in PAIRS:
            text = text.replace(pair, "")
    return text


@pytest.mark.parametrize("kinds", [1, 2, 4])
def test_the_target_of_dyck_completes_the_source(kinds: int) -> None:
    words = set()
    for source, target in pairs_of("dyck", options={"kinds": kinds}) + pairs_of("dyck", "test-4x", 50):
        left = reduced("".join(source))
        assert left
        assert not set(left) & set(")]}>")
        assert len(target) == len(left)
        assert reduced("".join(source + target)) == ""
        words |= set(source)
    assert len(words) == 2 * max(kinds, 2)


def test_dyck_has_bounded_depth() -> None:
    deepest = 0
    for source, _ in pairs_of("dyck", options={"depth": 3}):
        open_ = 0
        for word in source:
            open_ += 1 if word in "([" else -1
            assert 0 <= open_ <= 3
            deepest = max(deepest, open_)
    assert deepest == 3


def value(source: list[str]) -> int:
    """The value of an expression by a stack."""
    functions = {
        "[MAX": max,
        "[MIN": min,
        "[MED": lambda values: int(statistics.median(values)),
        "[SM": lambda values: sum(values) % 10,
    }
    stack: list[list[int]] = [[]]
    operators = []
    for word in source:
        if word in functions:
            operators.append(functions[word])
            stack.append([])
        elif word == "]":
            values = stack.pop()
            assert 2 <= len(values) <= 5
            stack[-1].append(operators.pop()(values))
        else:
            stack[-1].append(int(word))
        assert len(operators) <= 5
    ((result,),) = stack
    return result


def test_the_target_of_listops_is_the_value() -> None:
    pairs = pairs_of("listops", size=2_000)
    for source, target in pairs:
        assert target == [str(value(source))]
    assert {len(source) for source, _ in pairs} == set(range(10, 41))
    assert {target[0] for _, target in pairs} == set("0123456789")
    words = [word for source, _ in pairs for word in source]
    assert min(words.count(operator) for operator in ("[MAX", "[MIN", "[MED", "[SM")) > 2_000


@pytest.mark.parametrize("word", ["[MED", "[SM"])
def test_the_test_checks_operators(word: str) -> None:
    wrong = {"[MED": ["[MED", "1", "4", "]"], "[SM": ["[SM", "9", "4", "]"]}
    assert value(wrong[word]) == {"[MED": 2, "[SM": 3}[word]


def test_short_expressions_are_refused_or_drawn() -> None:
    with pytest.raises(RecipeError, match="needs 4 words or more"):
        pairs_of("listops", shortest=3)
    lengths = {len(source) for source, _ in pairs_of("listops", size=300, shortest=4, longest=8)}
    assert lengths == {4, 5, 6, 7, 8}


def test_expressions_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"160 words do not fit easily"):
        pairs_of("listops", options={"depth": 2})
