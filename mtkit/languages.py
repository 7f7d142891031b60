"""What cutting, joining and scoring must know of languages: which have no spaces between words, and how BLEU cuts them.

Languages come as users name them: zh, zh-CN, zh_Hant, cmn, zho_Hans; case does not matter. Of one that is not listed,
words have spaces between them.
"""

import re

_CODES = {
    "zh": "zh zho chi cmn yue wuu gan hsn lzh",
    "ja": "ja jpn",
    "ko": "ko kor",
    "th": "th tha",
    "lo": "lo lao",
    "km": "km khm",
    "my": "my mya bur",
}
_LANGUAGES = {code: language for language, codes in _CODES.items() for code in codes.split()}
"""Codes of ISO 639-1 to -3 by their language; the written forms of Chinese are one."""

_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", "th": "char", "lo": "char", "km": "char", "my": "char"}
_SPACED = frozenset({"ko"})
"""Listed because of their tokenizer alone."""

_SUBTAG = re.compile(r"[A-Z]{2}|[0-9]{3}|[A-Za-z]{4}")
"""A region or a script, as they stand behind a language: CN, 419, Hant."""


def languages_of(direction: str) -> tuple[str, str]:
    """Source and target language of a direction: en and zh-cn of en-zh-cn, en-US and zh of en-US-zh.

    Behind the source a region in lower case is taken for the target; en-us is no source language to give a direction.
    """
    source, *rest = direction.split("-")
    while len(rest) > 1 and _SUBTAG.fullmatch(rest[0]):
        source += f"-{rest.pop(0)}"
    return source, "-".join(rest)


def listed(language: str | None) -> str | None:
    """The two letters of a language that this file lists, as zh of cmn_Hant; None for others, and for Latin letters."""
    main, *subtags = re.split("[-_]", (language or "").strip().lower())
    return None if "latn" in subtags else _LANGUAGES.get(main)


def has_spaces(language: str | None) -> bool:
    """Whether there are spaces between words; None stands for a language that is not known."""
    known = listed(language)
    return known is None or known in _SPACED


def seam(language: str | None) -> str:
    """What stands between two sentences: a space, which ends those of Thai and Lao, nothing in Chinese and Japanese."""
    return "" if listed(language) in ("zh", "ja") else " "


def bleu_tokenizer(language: str | None) -> str:
    """sacrebleu's tokenizer for text in the language."""
    return _TOKENIZERS.get(listed(language) or "", "13a")
