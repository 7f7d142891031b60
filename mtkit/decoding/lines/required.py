"""Translation with a glossary: the search requires the terms that plain translations lack."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mtkit.decoding.contract import Term
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.lines.joined import Translate
from mtkit.decoding.lines.segments import Segment
from mtkit.decoding.translation import Translation


def translate_with_terms(
    translate: Translate, glossary: Glossary, segments: Sequence[Segment]
) -> Iterator[list[tuple[int, list[Translation]]]]:
    """Translate segments, and those whose translations lack terms again, with these terms required.

    A term that the model writes anyway is not required: the search looks for its pieces, and would write it twice where
    other pieces spell it, as 東京で spells 東京. The translations that lack the fewest terms are kept.
    """
    required: dict[int, tuple[Term, ...]] = dict.fromkeys(range(len(segments)), ())
    translated: dict[int, list[Translation]] = {}
    while required:
        indices, lacking = list(required), dict[int, tuple[Term, ...]]()
        for batch in translate([replace(segments[index], terms=required[index]) for index in indices]):
            for index, translations in ((indices[place], translations) for place, translations in batch):
                known, terms = translated.get(index, []), segments[index].terms
                pieces = {translation.pieces for translation in known}
                both = [*known, *(translation for translation in translations if translation.pieces not in pieces)]
                both.sort(key=lambda translation: -translation.score)
                translated[index] = fewest_missed_first(both, terms, glossary)[: len(translations)]
                missed = {term for translation in translations for term in glossary.missed(terms, translation.text)}
                if not missed.issubset(required[index]):
                    lacking[index] = tuple(term for term in terms if term in missed.union(required[index]))
            yield [(indices[place], translated[indices[place]]) for place, _ in batch if indices[place] not in lacking]
        required = lacking


def fewest_missed_first(
    translations: Sequence[Translation], terms: Sequence[Term], glossary: Glossary
) -> list[Translation]:
    """Sort translations by the number of terms that their text lacks; of equal ones, the order stays."""
    return sorted(translations, key=lambda translation: sum(glossary.missed(terms, translation.text).values()))
