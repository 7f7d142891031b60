"""Converts a run's vocabularies to other libraries' spelling, and its sentencepiece models to theirs."""

from collections.abc import Sequence

from mtkit.data.subword.folding import Folding
from mtkit.data.subword.model_file import ModelFile, charsmap_of
from mtkit.data.tokenizer import BOS, EOS, PAD, SPECIALS, TAGS, UNK, Tokenizer
from mtkit.errors import MtkitError
from mtkit.runs import Run

HUGGINGFACE = {PAD: "<pad>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""Spelling of the special pieces in Hugging Face transformers."""

CTRANSLATE2 = {PAD: "<blank>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""Spelling of the special pieces in CTranslate2."""


def spelled(tokenizer: Tokenizer, marks: dict[int, str]) -> list[str]:
    """Return a vocabulary's pieces (V), special ones spelt as in `marks`; for Hugging Face, language tags as >>de<<.

    Raises: MtkitError if two pieces would have the same spelling.
    """
    pieces = [marks.get(each, tokenizer.piece(each)) for each in range(tokenizer.size)]
    if marks is HUGGINGFACE:
        opening, closing = TAGS[0].split("{}")
        pieces = [
            TAGS[1].format(each.removeprefix(opening).removesuffix(closing))
            if each.startswith(opening) and each not in SPECIALS
            else each
            for each in pieces
        ]
    if len(set(pieces)) < len(pieces):
        twice = next(each for place, each in enumerate(pieces) if each in pieces[:place])
        raise MtkitError(f"the vocabulary has a piece of text {twice}, which stands for a mark in that format")
    return pieces


def models(run: Run) -> dict[str, bytes]:
    """Return {file name: sentencepiece model} for source.spm and target.spm; source.spm includes the run's folding.

    Raises: MtkitError if the run has a folding and its source model also has normalisation rules.
    """
    source, target = (
        each.processor.serialized_model_proto() for each in (run.tokenizers.source, run.tokenizers.target)
    )
    folding = run.folder / "tokenizer" / "folding.model"
    if folding.is_file() and (charsmap := charsmap_of(Folding(folding.read_bytes()).whole_model)):
        model = ModelFile.read(source)
        if model.charsmap:
            raise MtkitError(f"{run.folder} folds its source text by two rules, and a sentencepiece model holds one")
        source = model.with_charsmap(charsmap).written()
    return {"source.spm": source, "target.spm": target}


def tag_of(run: Run, pieces: Sequence[str]) -> str | None:
    """Return the tag to put before a source for the run's first direction; None if it needs none."""
    tags = run.tokenizers.source.tags(run.directions)
    return pieces[tags[0]] if tags else None
