"""Export of runs in formats that Hugging Face transformers, CTranslate2 or Argos Translate loads without mtkit.

An export is checked: the library must find the tokens of mtkit's greedy search in float32.
"""

import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mtkit.decoding.engines.selection import unsupported_part
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.interchange import argos, huggingface
from mtkit.interchange.card import card
from mtkit.interchange.huggingface import CLASSES, CTRANSLATE2, HUGGINGFACE, models, spelled, tag_of
from mtkit.model.network import Network
from mtkit.recipe import DecodingSettings, Recipe
from mtkit.runs import Run
from mtkit.storage.files import write_text, writing
from mtkit.text.text_files import Lines
from mtkit.text.tokenizer import BOS, BREAK, EOS, PAD, UNK

MARKS = {"huggingface": HUGGINGFACE, "ctranslate2": CTRANSLATE2, "argos": CTRANSLATE2}
"""{format: its library's spelling of the special pieces}."""

LIBRARIES = {"huggingface": "transformers", "ctranslate2": "ctranslate2", "argos": "ctranslate2"}
"""{format: the library that loads the model}."""

COMPARED = 50
"""Lines whose tokens are compared."""

TOLERATED = 0.1
"""Share of lines that may differ: if two pieces are equally likely within rounding, libraries choose differently."""

LACKS = {"huggingface": ("coverage_penalty", "mbr"), "ctranslate2": ("no_repeat_ngram", "epsilon", "mbr")}
"""{format: decoding settings that its library does not support, or computes otherwise}; Argos Translate has its own
search settings."""


@dataclass(frozen=True)
class Agreement:
    """Result of comparing the tokens of lines."""

    lines: int
    differing: list[str]
    """Positions of the differences, as "line 3 from token 5"."""

    def __str__(self) -> str:
        if not self.differing:
            return f"all tokens of {self.lines} lines equal mtkit's greedy search in float32"
        return f"{len(self.differing)} of {self.lines} lines have other tokens than mtkit: {self.differing[0]}"


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    folder: Path
    checkpoint: str
    agreement: Agreement | None
    """None if the library that reads the folder is not installed."""
    caution: str
    """Warning of what the library loses or cannot do; usually empty."""

    @property
    def compared(self) -> str:
        """Result of the token comparison, as text for users."""
        return "its tokens were not compared" if self.agreement is None else str(self.agreement)


def export_run(run: Run, to: str, folder: Path, *, checkpoint: str = "best") -> Exported:
    """Write a new folder in the format "huggingface" or "ctranslate2", or a file in the format "argos".

    Weights are float32, and the library's tokens are compared with mtkit's.

    Raises: MtkitError if the format does not support a part of the model, or if the folder exists; nothing is written.
    """
    if to not in MARKS:
        raise MtkitError(f"no format {shown(to)}{did_you_mean(to, list(MARKS))}; there are: {', '.join(MARKS)}")
    if folder.exists():
        raise MtkitError(f"{folder} exists; choose another folder, or remove it")
    check, write = (huggingface.check, huggingface.write) if to == "huggingface" else (_check, _write)
    run.check_packages()
    check(run.recipe)
    if to == "argos":
        argos.check(run)
    name = run.checkpoint(checkpoint).name
    translator = Translator([run], checkpoint=name, device="cpu", dtype="float32")
    with writing(folder) as place, TemporaryDirectory(dir=place.parent) as scratch:
        temporary = Path(scratch) / "model" if to == "argos" else place
        temporary.mkdir()
        write(run, translator.network, temporary)
        caution = huggingface.caution(run.recipe) if to == "huggingface" else ""
        caution = argos.caution(run) if to == "argos" else caution
        caution = "; ".join(filter(None, (_lost_settings(run.recipe, to), caution)))
        exported = Exported(folder, name, compare(run, translator, temporary, to), caution)
        tag = tag_of(run, spelled(run.tokenizers.source, MARKS[to]))
        write_text(temporary / "README.md", card(run, name, to, exported.compared, tag, caution))
        if to == "argos":
            argos.pack(run, temporary, place)
    return exported


def _lost_settings(recipe: Recipe, to: str) -> str:
    """Return a warning that names the decoding settings which the library lacks; empty if it has all."""
    chosen = recipe.decoding
    lost = [name for name in LACKS.get(to, ()) if getattr(chosen, name) and not chosen.without_effect([name])]
    names = " and ".join(f"decoding.{name} = {getattr(chosen, name)}" for name in lost)
    return f"{LIBRARIES[to]} lacks, or computes otherwise: {names}; translations may differ" if lost else ""


def _check(recipe: Recipe) -> None:
    """Raises: MtkitError if CTranslate2 does not support a part of the model, or is not installed."""
    if (part := unsupported_part(recipe)) is not None:
        raise MtkitError(f"CTranslate2's format has no {part}")
    if find_spec("ctranslate2") is None:
        raise MtkitError("the package ctranslate2 writes its format: pip install 'mtkit[ctranslate2]'")


def _write(run: Run, model: Network, folder: Path) -> None:
    """Write CTranslate2's files and the sentencepiece models into an existing folder."""
    from mtkit.decoding.engines.ctranslate2_conversion import convert

    converted, tokenizers = folder / "converted", run.tokenizers
    convert(model, converted, (spelled(tokenizers.source, CTRANSLATE2), spelled(tokenizers.target, CTRANSLATE2)))
    for file in converted.iterdir():
        file.rename(folder / file.name)
    converted.rmdir()
    for name, content in models(run).items():
        (folder / name).write_bytes(content)


def compare(run: Run, translator: Translator, folder: Path, to: str) -> Agreement | None:
    """Compare mtkit's tokens with the format's library; return None if the library is not installed.

    `translator` translates with only this run, by mtkit's engine on the CPU in float32. Raises: MtkitError if too many
    lines differ, which is a defect.
    """
    if find_spec(LIBRARIES[to]) is None:
        return None
    single = {"method": "greedy", "n_best": 1, "mbr": None, "samples": None}
    greedy = DecodingSettings.model_validate(
        {**translator.settings.model_dump(), **single, "no_repeat_ngram": 0, "coverage_penalty": 0.0}
    )
    lines = _sources(run)
    direction = run.directions[0] if len(run.directions) > 1 else None
    translations = [best for best, *_ in translator.with_settings(greedy).translate(lines, direction=direction)]
    places = [place for place, best in enumerate(translations) if best.parts == 1 and best.pieces]
    names = spelled(run.tokenizers.target, MARKS[to])
    ours = [[names[piece] for piece in translations[place].pieces if piece != EOS] for place in places]
    longest = min(max(map(len, ours), default=0) + 8, run.recipe.model.max_length)
    tokens = _with_transformers if to == "huggingface" else _with_ctranslate2
    theirs = tokens(run, folder, [lines[place] for place in places], longest)
    differing = []
    for place, one, other in zip(places, ours, theirs, strict=True):
        # a translation at mtkit's maximum length ends there; the other library has another maximum
        compared = other[: len(one)] if translations[place].cut else other
        if one != compared:
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, compared, strict=False)))
            differing.append(f"line {place + 1} from token {same + 1}")
    agreement = Agreement(len(places), differing)
    if len(differing) > TOLERATED * len(places):
        raise MtkitError(f"{agreement}; this is a defect of mtkit, and nothing was written")
    return agreement


def _sources(run: Run) -> list[str]:
    """Return sources of the run's translations; if it has none, lines of random pieces."""
    for path in sorted((run.folder / "translations").glob("*.source.txt")):
        if lines := [line for line in Lines(path) if line.strip()]:
            return lines[:COMPARED]
    draw, tokenizer = random.Random(1), run.tokenizers.source
    pieces = range(BREAK + 1, tokenizer.size)
    texts = (tokenizer.decode(draw.choices(pieces, k=draw.randint(2, 12))) for _ in range(COMPARED))
    return [text.replace("\0", " ") for text in texts]  # sentencepiece's own rules keep this character; mtkit's do not


def _with_ctranslate2(run: Run, folder: Path, lines: Sequence[str], longest: int) -> list[list[str]]:
    import ctranslate2
    import sentencepiece
    import torch

    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "source.spm"))
    tag = tag_of(run, spelled(run.tokenizers.source, CTRANSLATE2))
    sources = [[*([tag] if tag else []), *model.encode(line, out_type=str)] for line in lines]
    names = spelled(run.tokenizers.target, CTRANSLATE2)
    threads = torch.get_num_threads()
    program = ctranslate2.Translator(str(folder), device="cpu", compute_type="float32", intra_threads=threads)
    torch.set_num_threads(threads)  # the line above changes them
    results = program.translate_batch(
        sources,
        beam_size=1,
        min_decoding_length=0,
        max_decoding_length=longest,
        # mtkit makes no breaks in the translation of one line
        suppress_sequences=[[names[piece]] for piece in (PAD, UNK, BOS, BREAK)],
    )
    return [result.hypotheses[0] for result in results]


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
    names = spelled(run.tokenizers.target, HUGGINGFACE)
    translations = []
    for line in lines:  # one by one, because padding would change the last digits
        inputs = tokenizer([f"{tag} {line}" if tag else line], return_tensors="pt")
        with torch.no_grad():
            pieces = model.generate(**inputs, num_beams=1, do_sample=False, max_length=longest, no_repeat_ngram_size=0)
        translations.append([names[piece] for piece in pieces[0].tolist() if piece not in HUGGINGFACE])
    return translations
