from tests.data.builtin.drawing import pairs_of


def test_counting_counts_every_symbol() -> None:
    for source, target in pairs_of("counting", "test-4x", options={"vocabulary": 3}):
        text = " ".join(target)
        for symbol, following in (("a", "b"), ("b", "c"), ("c", None)):
            number = text.partition(f"{symbol} ")[2].partition(f" {following}")[0].replace(" ", "")
            assert int(number) == source.count(symbol)


def test_majority_is_the_only_most_frequent_symbol() -> None:
    answers = set()
    for source, target in pairs_of("majority", options={"vocabulary": 3}):
        (answer,) = target
        assert all(source.count(answer) > source.count(other) for other in set("abc") - {answer})
        answers.add(answer)
    assert answers == set("abc")
