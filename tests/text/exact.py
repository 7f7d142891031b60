"""How likely each cut of a word is, counted out by following every branch; and how well draws go with that."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from math import exp

import numpy as np
import torch
from sentencepiece import set_random_generator_seed

from mtkit.text.tokenizer import Tokenizer

Cut = tuple[str, ...]


def scores_of(tokenizer: Tokenizer) -> dict[str, float]:
    """The score of each piece of text, straight from sentencepiece."""
    processor = tokenizer.processor
    text = [each for each in range(tokenizer.size) if not (processor.is_control(each) or processor.is_unknown(each))]
    return {tokenizer.piece(each): processor.get_score(each) for each in text if not processor.is_byte(each)}


def by_dropout(word: str, scores: Mapping[str, float], dropout: float) -> dict[Cut, float]:
    """Merges of a word looked at from the best on, each left out for good with some probability."""

    @cache
    def of(pieces: Cut, left_out: frozenset[tuple[int, int]]) -> dict[Cut, float]:
        """`left_out`: begin and end of the pairs that are not merged any more."""
        ends = np.cumsum([len(piece) for piece in pieces]).tolist()
        possible = []
        for place, (one, other) in enumerate(pairwise(pieces)):
            span = (ends[place] - len(one), ends[place + 1], ends[place])
            if one + other in scores and span not in left_out:
                possible.append((-scores[one + other], place, span))
        if not possible:
            return {pieces: 1.0}
        _, place, span = min(possible)
        joined = (*pieces[:place], pieces[place] + pieces[place + 1], *pieces[place + 2 :])
        total: dict[Cut, float] = defaultdict(float)
        for share, branch in ((1 - dropout, of(joined, left_out)), (dropout, of(pieces, left_out | {span}))):
            for cut, probability in branch.items():
                total[cut] += share * probability
        return total

    return of(tuple(word), frozenset())


def by_unigram(word: str, scores: Mapping[str, float], alpha: float) -> dict[Cut, float]:
    """Every way to cut a word, by the product of its pieces' probabilities to a power."""

    def ways(rest: str) -> Iterable[tuple[Cut, float]]:
        if not rest:
            yield (), 0.0
        for end in range(1, len(rest) + 1):
            if rest[:end] in scores:
                for cut, score in ways(rest[end:]):
                    yield (rest[:end], *cut), scores[rest[:end]] + score

    weights = {cut: exp(alpha * score) for cut, score in ways(word)}
    total = sum(weights.values())
    return {cut: weight / total for cut, weight in weights.items()}


def by_sentencepiece(tokenizer: Tokenizer, word: str, alpha: float) -> list[Cut]:
    """What sentencepiece's own sampling makes of a word, 3,000 times from one seed."""
    set_random_generator_seed(1)
    options = {"out_type": str, "enable_sampling": True, "alpha": alpha, "nbest_size": -1}
    return [tuple(tokenizer.processor.encode(word, **options)) for _ in range(3_000)]


def goes_with(drawn: Iterable[Cut], exact: Mapping[Cut, float]) -> bool:
    """Whether draws may come from a distribution: at least one in a million such draws has as large a chi-square."""
    counts = Counter(drawn)
    if set(counts) - set(exact):
        return False
    total, square, cells, rare, rare_count = sum(counts.values()), 0.0, 0, 0.0, 0
    for cut, probability in exact.items():
        if probability * total < 5:
            rare, rare_count = rare + probability, rare_count + counts[cut]
        else:
            square += (counts[cut] - probability * total) ** 2 / (probability * total)
            cells += 1
    if rare * total >= 5:
        square += (rare_count - rare * total) ** 2 / (rare * total)
        cells += 1
    freedom = max(cells - 1, 1)
    as_large = torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(square / 2.0).double())
    return bool(as_large > 1e-6)
