"""Training of a sentencepiece model on text."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece

from mtkit.errors import DataError
from mtkit.recipe.data import TokenizerSettings
from mtkit.storage.files import writing
from mtkit.text.model_file import ModelFile
from mtkit.text.tokenizer import BOS, BREAK, BYTES, EOS, PAD, SPECIALS, TAGS, UNK, Tokenizer

_UNUSED = "< unused{}>"
"""The text of a piece that only makes the vocabulary size a multiple of 8."""

_MULTIPLE = 8
"""Vocabulary sizes are multiples of it, so that products over the vocabulary run at full speed on tensor cores."""

_THREADS = 4
"""Threads of training. Unigram training sums expected counts per thread, so their number can change the model."""

_COVERAGE = 0.9999
"""Share of the text's characters that have their own piece; the rarest are written as bytes."""

_LONGEST_PIECE = 7_999
"""Bytes; sentencepiece loads no model with a longer piece."""

_LONGEST_LINE = 1 << 24
"""Bytes; training ignores longer lines (sentencepiece's default, 4,192, would ignore most documents)."""


def train_tokenizer(
    path: Path, lines: Iterable[str], settings: TokenizerSettings, languages: Sequence[str] = ()
) -> Tokenizer:
    """Train a sentencepiece model on `lines`, which may be iterated several times, and write it to `path`.

    It has a tag for each target language of `languages`, in their order. The vocabulary size of the settings is rounded
    down to a multiple of 8, or to the largest one that the text supports. A model of words has the most frequent ones;
    if it has all words of the text, its size is rounded up with unused pieces. The same lines and settings give the
    same file, on any number of processors.

    Raises: DataError if the vocabulary is too small for the text's characters, or the text for any vocabulary.
    """
    size = _rounded_down(max(settings.vocabulary, _MULTIPLE))
    control = [SPECIALS[BREAK], *(TAGS[0].format(language) for language in languages)]
    if settings.kind == "words":
        _check_room(settings, 4 + len(control))
    model, supported = _attempt(lines, settings, size, control)
    lowered = supported is not None
    if supported is not None and settings.kind == "words":  # a lower size would leave words out
        control += [_UNUSED.format(number) for number in range(-supported % _MULTIPLE)]
        size = _rounded_up(supported)
        model, supported = _attempt(lines, settings, size, control)
    while supported is not None:
        size = _rounded_down(min(supported, size - 1))
        model, supported = _attempt(lines, settings, size, control)
    if lowered and settings.kind == "bpe":
        model, _ = _attempt(lines, settings, min(size, _reached(model, lines)), control)
    with writing(path) as temporary:
        temporary.write_bytes(model)
    return Tokenizer.load(path)


def _rounded_down(size: int) -> int:
    return size // _MULTIPLE * _MULTIPLE


def _rounded_up(size: int) -> int:
    return -(-size // _MULTIPLE) * _MULTIPLE


def _check_room(settings: TokenizerSettings, specials: int) -> None:
    """Raises: DataError if a vocabulary of words has no room for a word."""
    needed = specials + BYTES * settings.byte_fallback
    if _rounded_down(settings.vocabulary) <= needed:
        bytes_ = f", {BYTES} of them for bytes (data.tokenizer.byte_fallback: false saves these)"
        raise DataError(
            f"data.tokenizer.vocabulary = {settings.vocabulary} is too small for words: there are {needed} special "
            f"pieces{bytes_ * settings.byte_fallback}; choose {_rounded_down(needed) + _MULTIPLE} or more "
            "(--vocabulary)"
        )


def _check_words(model: bytes) -> None:
    """Raises: DataError if a word of the model is too long for sentencepiece to load it."""
    longest = max((piece.text for piece in ModelFile.read(model).pieces), key=lambda text: len(text.encode()))
    if (size := len(longest.encode())) > _LONGEST_PIECE:
        raise DataError(
            f"no words vocabulary can be made from the training text: it has a word of {size:,} bytes, "
            f"{longest[1:21]!r}...; choose bpe (--tokenizer bpe), or break it up"
        )


def _reached(model: bytes, lines: Iterable[str]) -> int:
    """Return the vocabulary size without the merges after the last one that `lines` use.

    Ids are in the order of merges, single characters last. A small corpus consists of complete words long before
    sentencepiece runs out of pairs to merge.
    """
    tokenizer = Tokenizer(sentencepiece.SentencePieceProcessor(model_proto=model))
    characters = sum(len(tokenizer.piece(index)) == 1 for index in range(tokenizer.size))
    merges = tokenizer.size - characters
    processor = tokenizer.processor
    others = sum(processor.is_byte(piece) or processor.is_control(piece) for piece in range(merges))
    last = max((piece for line in lines for piece in tokenizer.encode(line) if piece < merges), default=0)
    return _rounded_up(max(last, others) + 1 + characters)


def _attempt(
    lines: Iterable[str], settings: TokenizerSettings, size: int, control: list[str]
) -> tuple[bytes, int | None]:
    """Train a model of `size` pieces, `control` among them; if the text supports fewer, return only their number."""
    model, failed = io.BytesIO(), list[BaseException]()

    def watched_lines() -> Iterator[str]:
        try:
            yield from lines
        except (Exception, KeyboardInterrupt) as error:  # sentencepiece would raise another error
            failed.append(error)
            raise

    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=watched_lines(),
            model_writer=model,
            model_type="word" if settings.kind == "words" else settings.kind,
            vocab_size=size,
            normalization_rule_name="identity",
            byte_fallback=settings.byte_fallback,
            character_coverage=1.0 if settings.kind == "words" else _COVERAGE,
            pad_id=PAD,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            pad_piece=SPECIALS[PAD],
            unk_piece=SPECIALS[UNK],
            bos_piece=SPECIALS[BOS],
            eos_piece=SPECIALS[EOS],
            control_symbols=control,
            max_sentence_length=_LONGEST_LINE,
            num_threads=_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        if high := re.search(r"size too high .*<= (\d+)", str(error)):
            return b"", int(high[1])
        raise _training_error(str(error), lines, settings, size) from error
    if settings.kind == "words":
        _check_words(model.getvalue())
    return model.getvalue(), None


def _training_error(reason: str, lines: Iterable[str], settings: TokenizerSettings, size: int) -> DataError:
    """Explain why sentencepiece could not train a model of `size` pieces."""
    low = re.search(r"smaller than required_chars\. \d+ vs (\d+)", reason)
    if low and size < _rounded_down(settings.vocabulary):  # the size was lowered to what the text supports
        return DataError(
            f"the training text is too small for a {settings.kind} vocabulary: it does not support the "
            f"{low[1]} pieces that its characters need; give more text"
        )
    if low:
        return DataError(
            f"data.tokenizer.vocabulary = {settings.vocabulary} is too small for this text: its characters need "
            f"{low[1]} pieces; choose {_rounded_up(int(low[1]))} or more (--vocabulary)"
        )
    if "isfinite" in reason:
        longest = max((word for line in lines for word in line.split()), key=len)
        return DataError(
            f"no {settings.kind} vocabulary can be made from the training text: it has a word of {len(longest):,} "
            f"letters, {longest[:20]!r}..., too long to be scored; choose bpe (--tokenizer bpe), or break it up"
        )
    empty = any(text in reason for text in ("sentences_.empty()", "all_chars_count"))
    detail = "no usable text" if empty else reason.rsplit("] ", 1)[-1].strip() or reason.strip()
    return DataError(f"no {settings.kind} vocabulary can be made from the training text: {detail}")
