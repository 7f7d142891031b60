"""The pieces of a run's vocabularies as other libraries spell them, and its sentencepiece models as they cut text."""

from collections.abc import Sequence

from mtkit.data.subword.folding import Folding
from mtkit.data.subword.model_file import ModelFile, charsmap_of
from mtkit.data.tokenizer import BOS, EOS, PAD, SPECIALS, TAGS, UNK, Tokenizer
from mtkit.errors import MtkitError
from mtkit.runs import Run

HUGGINGFACE = {PAD: "<pad>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""How Hugging Face spells the special pieces."""

CTRANSLATE2 = {PAD: "<blank>", UNK: "<unk>", BOS: "<s>", EOS: "</s>"}
"""How CTranslate2 does."""


def spelled(tokenizer: Tokenizer, marks: dict[int, str]) -> list[str]:
    """Each piece of a vocabulary (V), the special ones as in `marks`; for Hugging Face tags of languages as >>de<<.

    Raises: MtkitError where two pieces are then spelt alike.
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
    """The sentencepiece models by their file names, source.spm and target.spm; the source's folds text itself.

    Raises: MtkitError where it has rules of its own besides.
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
    """The piece that goes before a source for the run's first direction; None where it needs none."""
    tags = run.tokenizers.source.tags(run.directions)
    return pieces[tags[0]] if tags else None
