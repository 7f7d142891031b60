"""Whether an exported model gives the tokens of the run that it was made of, in greedy search in float32."""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError
from mtkit.interchange.huggingface import CLASSES, CTRANSLATE2, HUGGINGFACE, spelled, tag_of
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.readers import Lines
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, UNK

LINES = 50
"""Lines that are compared."""

TOLERATED = 0.1
"""Share of lines that may differ: where two pieces are as likely within rounding, libraries choose differently."""


@dataclass(frozen=True)
class Agreement:
    """The tokens of some lines, compared."""

    lines: int
    differing: list[str]
    """Which line differs, and where."""

    def __str__(self) -> str:
        if not self.differing:
            return f"all tokens of {self.lines} lines are those of mtkit's greedy search in float32"
        return f"{len(self.differing)} of {self.lines} lines have other tokens than mtkit: {self.differing[0]}"


def compare(run: Run, translator: Translator, folder: Path, to: str) -> Agreement | None:
    """The run beside what the library in question makes of `folder`; None where the library is not installed.

    `translator` is of the run alone, by mtkit's own engine on the CPU in float32. Raises: MtkitError where too many
    lines differ, which is a defect.
    """
    if find_spec({"huggingface": "transformers", "ctranslate2": "ctranslate2"}[to]) is None:
        return None
    greedy = DecodingSettings.model_validate(
        {**translator.settings.model_dump(), "method": "greedy", "no_repeat_ngram": 0, "coverage_penalty": 0.0}
    )
    lines = _lines(run)
    way = run.directions[0] if len(run.directions) > 1 else None
    found = [each for each, *_ in translator.with_settings(greedy).lines(lines, direction=way)]
    kept = [place for place, each in enumerate(found) if each.parts == 1 and each.pieces]
    names = spelled(run.tokenizers.target, CTRANSLATE2 if to == "ctranslate2" else HUGGINGFACE)
    own = [[names[piece] for piece in found[place].pieces if piece != EOS] for place in kept]
    longest = min(max(map(len, own), default=0) + 8, run.recipe.model.max_length)
    tokens = _with_ctranslate2 if to == "ctranslate2" else _with_transformers
    theirs = tokens(run, folder, [lines[place] for place in kept], longest)
    # a translation at its maximum length ends there, which the other library does not know
    theirs = [
        other[: len(one)] if found[place].cut else other for place, one, other in zip(kept, own, theirs, strict=True)
    ]
    differing = [
        f"line {place + 1} from token {_first_difference(one, other) + 1}"
        for place, one, other in zip(kept, own, theirs, strict=True)
        if one != other
    ]
    agreement = Agreement(len(kept), differing)
    if len(differing) > TOLERATED * len(kept):
        raise MtkitError(f"{agreement}; this is a defect of mtkit, and nothing was written")
    return agreement


def _lines(run: Run) -> list[str]:
    """Sources of the run's translations; where it has none, lines of random pieces."""
    for path in sorted((run.folder / "translations").glob("*.source.txt")):
        if found := [each for each in Lines(path) if each.strip()]:
            return found[:LINES]
    draw, tokenizer = random.Random(1), run.tokenizers.source
    pieces = range(BREAK + 1, tokenizer.size)
    return [tokenizer.decode(draw.choices(pieces, k=draw.randint(2, 12))) for _ in range(LINES)]


def _with_ctranslate2(run: Run, folder: Path, lines: Sequence[str], longest: int) -> list[list[str]]:
    import ctranslate2
    import sentencepiece
    import torch

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    tag = tag_of(run, spelled(run.tokenizers.source, CTRANSLATE2))
    sources = [[*([tag] if tag else []), *model.encode(line, out_type=str)] for line in lines]
    threads = torch.get_num_threads()
    program = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=threads)
    torch.set_num_threads(threads)  # the line above changes them
    found = program.translate_batch(
        sources,
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=longest,
        suppress_sequences=[[CTRANSLATE2[each]] for each in (PAD, UNK, BOS)],
    )
    return [each.hypotheses[0] for each in found]


def _with_transformers(run: Run, folder: Path, lines: Sequence[str], longest: int) -> list[list[str]]:
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model: Any = getattr(transformers, CLASSES[run.recipe.model.norm][1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it recommends sacremoses, which it does not call
        model = model.from_pretrained(folder).float().eval()
        tokenizer = transformers.MarianTokenizer.from_pretrained(folder)
    tag = tag_of(run, spelled(run.tokenizers.source, HUGGINGFACE))
    marks, found = {*HUGGINGFACE}, list[list[str]]()
    names = spelled(run.tokenizers.target, HUGGINGFACE)
    for line in lines:  # one by one: no padding decides their last digits
        inputs = tokenizer([f"{tag} {line}" if tag else line], return_tensors="pt")
        with torch.no_grad():
            pieces = model.generate(**inputs, num_beams=1, do_sample=False, max_length=longest, no_repeat_ngram_size=0)
        found.append([names[each] for each in pieces[0].tolist() if each not in marks])
    return found


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
