"""TER's edits against sacrebleu's own."""

import random

import pytest
from sacrebleu.metrics import TER
from sacrebleu.metrics.lib_ter import translation_edit_rate

from mtkit.evaluation.scores import make_metric
from mtkit.text.ter_edits import count_edits


def _shuffled(words: list[str], draw: random.Random) -> list[str]:
    """Return the words with a part moved and some replaced."""
    first, last = sorted(draw.sample(range(len(words) + 1), 2)) if words else (0, 0)
    rest = words[:first] + words[last:]
    place = draw.randrange(len(rest) + 1)
    moved = rest[:place] + words[first:last] + rest[place:]
    return [word if draw.random() < 0.8 else "other" for word in moved]


@pytest.mark.parametrize(("longest", "vocabulary", "segments"), [(4, 2, 300), (12, 5, 60), (25, 100, 30), (70, 400, 4)])
def test_the_edits_of_random_segments_are_sacrebleus(longest: int, vocabulary: int, segments: int) -> None:
    draw = random.Random(longest)
    for segment in range(segments):
        reference = [str(draw.randrange(vocabulary)) for _ in range(draw.randrange(longest + 1))]
        hypothesis = _shuffled(reference, draw)
        if segment % 3 == 0:
            hypothesis = [str(draw.randrange(vocabulary)) for _ in range(draw.randrange(longest + 1))]
        assert count_edits(hypothesis, reference) == translation_edit_rate(hypothesis, reference)[0]


@pytest.mark.parametrize(("words", "others"), [(3, 200), (200, 3), (1, 60), (60, 60), (0, 5), (5, 0)])
def test_the_edits_of_lengths_that_differ_much_are_sacrebleus(words: int, others: int) -> None:
    hypothesis, reference = ([f"{kind}{place % 40}" for place in range(n)] for kind, n in (("a", words), ("b", others)))
    assert count_edits(hypothesis, reference) == translation_edit_rate(hypothesis, reference)[0]
    assert count_edits(reference[-30:], reference) == translation_edit_rate(reference[-30:], reference)[0]


def test_the_statistics_and_the_signature_of_several_references_are_sacrebleus() -> None:
    hypotheses = ["the cat sat on the mat", "A dog", ""]
    references = [["on the mat sat the cat", "a dog barks", "nothing"], ["a cat sat there", "", ""]]
    ours, theirs = make_metric("TER"), TER()
    assert ours._extract_corpus_statistics(hypotheses, references) == theirs._extract_corpus_statistics(
        hypotheses, references
    )
    assert str(ours.corpus_score(hypotheses, references)) == str(theirs.corpus_score(hypotheses, references))
    assert str(ours.get_signature()) == str(theirs.get_signature())
