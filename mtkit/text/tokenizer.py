"""The tokenizer: a sentencepiece model trained on the training text, and what encodes and decodes with it."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from mtkit.errors import DataError
from mtkit.recipe.data import TokenizerSettings
from mtkit.storage.files import writing
from mtkit.text.characters import Folding, has_invisible
from mtkit.text.model_file import keeps_text

PAD, UNK, BOS, EOS = 0, 1, 2, 3
"""The ids of padding, unknown, beginning and end in every model."""

BREAK = 4
"""The id of the piece between the segments of a document. No text is cut into it."""

SPECIALS = ("< pad>", "< unk>", "< s>", "< /s>", "< break>")
"""How PAD, UNK, BOS, EOS and BREAK are spelt: as no text can, since spaces are rewritten first."""

TAGS = ("< 2{}>", ">>{}<<")
"""How the tag of a target language is spelt: mtkit's own, of the same manner, and that of OPUS-MT's models."""

_MULTIPLE = 8
"""Vocabularies are a multiple of it: matrix products over the vocabulary run at full speed on tensor cores."""

_THREADS = 4
"""Unigram training sums expected counts thread by thread, so another number of threads could give another model."""

_COVERAGE = 0.9999
"""Share of the text's characters that get a piece of their own; the rarest beyond it are written as bytes."""

_BYTES = 256
"""Values of a byte; a vocabulary with a piece for each of them leaves nothing unknown."""

_SPACE = "\u2581"
"""How sentencepiece writes a space."""

_LONGEST_LINE = 1 << 24
"""Bytes; sentencepiece leaves longer lines out of training (its default, 4,192, would drop most documents)."""


class Tokenizer:
    """One sentencepiece model: text to pieces and back.

    Text comes back as it was but for its spaces: a run of them becomes one, and those at the ends go. The character
    U+2581, by which sentencepiece marks a space, comes back as a space. Models of earlier versions normalise besides.
    """

    def __init__(self, processor: Any, folding: Folding | None = None) -> None:
        """`folding`: what is done to text before it is cut."""
        self._processor, self._folding = processor, folding
        self.size: int = processor.get_piece_size()
        """Pieces in the vocabulary, specials and bytes included; a multiple of 8."""
        self.is_byte = np.array([processor.is_byte(piece) for piece in range(self.size)])
        """(size,) True for the pieces that stand for one byte of a character outside the vocabulary."""
        self.begins_word = np.array([self.piece(piece).startswith(_SPACE) for piece in range(self.size)])
        """(size,) True for the pieces that begin with a space, as the first of each word does."""

    @cached_property
    def bytes(self) -> np.ndarray:
        """(size,) int64: the bytes of UTF-8 that each piece spells, without spaces; 0 of specials, tags and breaks."""
        is_text = [
            not (self._processor.is_control(each) or self._processor.is_unknown(each)) for each in range(self.size)
        ]
        spelt = [len(self.piece(each).replace(_SPACE, "").encode()) * is_text[each] for each in range(self.size)]
        return np.where(self.is_byte, 1, spelt)

    @cached_property
    def _spells_all(self) -> bool:
        """Whether the pieces of a text, joined, are the text but for its spaces and U+2581: nothing is rewritten."""
        return bool(self.is_byte.sum() == _BYTES) and keeps_text(self._processor.serialized_model_proto())

    @classmethod
    def load(cls, path: Path, folding: Folding | None = None) -> "Tokenizer":
        """The tokenizer saved at `path`. Raises: DataError where there is none, or it is damaged or not mtkit's."""
        if not path.is_file():
            raise DataError(f"no tokenizer at {path}; run `mtkit prepare` first")
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes())
            ids = (processor.pad_id(), processor.unk_id(), processor.bos_id(), processor.eos_id())
        except Exception as error:  # sentencepiece raises RuntimeError, TypeError or its own, by version
            raise DataError(f"{path} is not a readable sentencepiece model; run `mtkit prepare` again") from error
        if ids != (PAD, UNK, BOS, EOS):
            raise DataError(f"{path} was not made by mtkit: its pad, unk, bos and eos are {ids}, not 0, 1, 2 and 3")
        return cls(processor, folding)

    @property
    def processor(self) -> Any:
        """The sentencepiece processor, for what only it can do."""
        return self._processor

    def encode(self, text: str) -> list[int]:
        """The pieces of any text, without beginning and end; no text gives a special."""
        folded = text if self._folding is None else self._folding(text)
        return self._named(self._processor.encode(folded), folded)

    def normal(self, text: str) -> str:
        """The text as it is when it is cut into pieces: folded, and normalised by models of other versions."""
        text = text if self._folding is None else self._folding(text)
        normalised: str = self._processor.normalize(text)
        return normalised

    def cleans(self, text: str) -> bool:
        """Whether control or invisible characters of the text are dropped or become spaces before it is cut."""
        return self._folding is not None and has_invisible(text)

    def encode_lines(self, lines: Sequence[str], threads: int = -1) -> list[list[int]]:
        """The pieces of each line, by all processors or by so many threads."""
        folded = list(lines) if self._folding is None else self._folding.lines(lines)
        found = self._processor.encode(folded, num_threads=threads)
        if self.is_byte.sum() == _BYTES:  # what it could not cut is written as bytes
            return list(found)
        return [
            self._named(pieces, line) if UNK in pieces else pieces for pieces, line in zip(found, folded, strict=True)
        ]

    def _named(self, pieces: list[int], text: str) -> list[int]:
        """The pieces with what the model could not cut under its own number, where the vocabulary has it nevertheless.

        That of an imported model has: it serves two sentencepiece models.
        """
        if UNK not in pieces:
            return pieces
        spelt = self._processor.encode(text, out_type=str)
        number = self._processor.piece_to_id
        return [number(each) if piece == UNK else piece for piece, each in zip(pieces, spelt, strict=True)]

    def tag(self, direction: str) -> int:
        """The piece that asks for the target language of a direction, as `en-fr`; it goes before the source.

        Raises: DataError where the model was made for a single direction, or for others.
        """
        language = direction.partition("-")[2]
        for spelling in TAGS:
            piece: int = self._processor.piece_to_id(spelling.format(language))
            if piece != UNK and self._processor.is_control(piece):
                return piece
        raise DataError(f"this data has no direction {direction}: its tokenizer knows no target language {language}")

    def tags(self, directions: Sequence[str]) -> list[int]:
        """The tags of all directions; none where there is one and the model has no tag of its target language.

        Raises: DataError as `tag`.
        """
        if len(directions) == 1:
            with suppress(DataError):
                return [self.tag(directions[0])]
            return []
        return [self.tag(each) for each in directions]

    def piece(self, index: int) -> str:
        """A piece as sentencepiece spells it, U+2581 for a space."""
        text: str = self._processor.id_to_piece(index)
        return text

    def decode(self, ids: Sequence[int]) -> str:
        """One line of text from pieces: specials, tags and breaks go, bytes that are not UTF-8 become U+FFFD."""
        text: str = self._processor.decode([int(piece) for piece in ids if piece > EOS])
        return text.replace("\n", " ")

    def altered(self, lines: Sequence[str], pieces: Sequence[list[int]], threads: int = -1) -> list[bool]:
        """Whether each line does not come back from its pieces, its spaces aside."""
        doubtful = [row for row, line in enumerate(lines) if _SPACE in line or not self._spells_all]
        back: list[str] = self._processor.decode([pieces[row] for row in doubtful], num_threads=threads)
        changed = [False] * len(lines)
        for row, other in zip(doubtful, back, strict=True):
            line = lines[row]
            changed[row] = line != other and " ".join(filter(None, line.split(" "))) != other
        return changed


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizers of both sides; with a joint vocabulary they differ in that source text may be folded."""

    source: Tokenizer
    target: Tokenizer

    @cached_property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary; their models may still be two, which cut text in two ways."""
        one, other = self.source, self.target
        return one.processor is other.processor or (
            one.size == other.size and all(one.piece(each) == other.piece(each) for each in range(one.size))
        )

    @classmethod
    def load(cls, folder: Path) -> "Tokenizers":
        """From a folder with joint.model, or source.model and target.model; the source is folded by its folding.model.

        Raises: DataError.
        """
        folding, path = None, folder / "folding.model"
        if path.is_file():
            try:
                folding = Folding(path.read_bytes())
            except (RuntimeError, ValueError) as error:
                raise DataError(f"{path} is not a readable sentencepiece model; run `mtkit prepare` again") from error
        if (folder / "joint.model").is_file():
            joint = Tokenizer.load(folder / "joint.model")
            return cls(joint if folding is None else Tokenizer(joint.processor, folding), joint)
        return cls(Tokenizer.load(folder / "source.model", folding), Tokenizer.load(folder / "target.model"))


def train_tokenizer(
    path: Path, lines: Iterable[str], settings: TokenizerSettings, languages: Sequence[str] = ()
) -> Tokenizer:
    """Train a sentencepiece model on `lines`, which may be gone through more than once, and write it to `path`.

    It has a tag for each of the target `languages`, in their order.

    The vocabulary is the asked one rounded down to a multiple of 8, or the largest such that the text supports.
    The same lines and settings give the same file, on any number of processors.

    Raises: DataError where the vocabulary is too small for the text's characters, or the text for any vocabulary.
    """
    size = max(settings.vocabulary, _MULTIPLE) // _MULTIPLE * _MULTIPLE
    model, supported = _attempt(lines, settings, size, languages)
    lowered = supported is not None
    while supported is not None:
        size = min(supported, size - 1) // _MULTIPLE * _MULTIPLE
        model, supported = _attempt(lines, settings, size, languages)
    if lowered and settings.kind == "bpe":
        model, _ = _attempt(lines, settings, min(size, _reached(model, lines)), languages)
    with writing(path) as temporary:
        temporary.write_bytes(model)
    return Tokenizer.load(path)


def _reached(model: bytes, lines: Iterable[str]) -> int:
    """The size that cuts `lines` as this BPE model does, without the merges behind the last one that they use.

    Ids are in the order of the merges, the single characters behind them; a small corpus is in whole words long
    before sentencepiece runs out of pairs to merge.
    """
    tokenizer = Tokenizer(sentencepiece.SentencePieceProcessor(model_proto=model))
    characters = sum(len(tokenizer.piece(index)) == 1 for index in range(tokenizer.size))
    merges = tokenizer.size - characters
    processor = tokenizer.processor
    others = [processor.is_byte(piece) or processor.is_control(piece) for piece in range(merges)]
    last = max((piece for line in lines for piece in tokenizer.encode(line) if piece < merges), default=0)
    return -(-(max(last, sum(others)) + 1 + characters) // _MULTIPLE) * _MULTIPLE


def _attempt(
    lines: Iterable[str], settings: TokenizerSettings, size: int, languages: Sequence[str]
) -> tuple[bytes, int | None]:
    """A model of `size` pieces; or no model and the size that sentencepiece says the text supports."""
    model, failed = io.BytesIO(), list[BaseException]()

    def given() -> Iterator[str]:
        """The lines; what stops them, an error or Ctrl-C, is kept, for sentencepiece makes another of it."""
        try:
            yield from lines
        except (Exception, KeyboardInterrupt) as error:
            failed.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=given(),
            model_writer=model,
            model_type=settings.kind,
            vocab_size=size,
            normalization_rule_name="identity",
            byte_fallback=settings.byte_fallback,
            character_coverage=_COVERAGE,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            # names that no text can spell, since spaces are rewritten first: "<s>" in a text stays plain text
            pad_piece=SPECIALS[PAD],
            unk_piece=SPECIALS[UNK],
            bos_piece=SPECIALS[BOS],
            eos_piece=SPECIALS[EOS],
            control_symbols=[SPECIALS[BREAK], *(TAGS[0].format(language) for language in languages)],
            max_sentence_length=_LONGEST_LINE,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        reason = str(error)
        if high := re.search(r"size too high .*<= (\d+)", reason):
            return b"", int(high[1])
        low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason)
        if low and size < settings.vocabulary // _MULTIPLE * _MULTIPLE:  # it was lowered to what the text supports
            raise DataError(
                f"the training text is too small for a {settings.kind} vocabulary: it does not support the "
                f"{low[1]} pieces that its characters alone need; give more text"
            ) from error
        if low:
            least = -(-int(low[1]) // _MULTIPLE) * _MULTIPLE
            raise DataError(
                f"data.tokenizer.vocabulary = {settings.vocabulary} is too small for this text: its characters alone "
                f"need {low[1]} pieces; choose {least} or more (--vocabulary)"
            ) from error
        if "isfinite" in reason:
            longest = max((word for line in lines for word in line.split()), key=len)
            raise DataError(
                f"no {settings.kind} vocabulary can be made from the training text: it has a word of {len(longest):,} "
                f"letters, {longest[:20]!r}..., too long to be scored; choose bpe (--tokenizer bpe), or break it up"
            ) from error
        nothing = any(each in reason for each in ("sentences_.empty()", "all_chars_count"))
        detail = "no usable text" if nothing else reason.rsplit("] ", 1)[-1].strip() or reason.strip()
        raise DataError(f"no {settings.kind} vocabulary can be made from the training text: {detail}") from error
    return model.getvalue(), None
