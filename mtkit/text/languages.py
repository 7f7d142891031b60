"""What cutting, joining and scoring must know of languages: which have no spaces between words, and how BLEU cuts them.

Languages come as users name them: zh, zh-CN, zh_Hant, cmn, zho_Hans, Chinese; case does not matter. Of one that is not
listed, words have spaces between them.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import PurePath

_CODES = {
    "zh": "zh zho chi cmn yue wuu gan hsn lzh cn chinese mandarin cantonese",
    "ja": "ja jpn jp japanese",
    "ko": "ko kor korean",
    "th": "th tha thai",
    "lo": "lo lao",
    "km": "km khm khmer",
    "my": "my mya bur burmese",
}
_LANGUAGES = {code: language for language, codes in _CODES.items() for code in codes.split()}
"""Codes of ISO 639-1 to -3 and English names by their language; the written forms of Chinese are one."""

_TWO_LETTERS = (
    "aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da de dv dz ee "
    "el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz ia id ie ig ii ik io is "
    "it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln lo lt lu lv mg mh mi mk ml mn mr ms "
    "mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si "
    "sk sl sm sn so sq sr ss st su sv sw ta te tg th ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh "
    "yi yo za zh zu"
)
"""ISO 639-1."""

_CODE = re.compile(r"([A-Za-z]{2})(?:[-_]([A-Za-z]{4}|[A-Za-z]{2}|[0-9]{3}))?|([a-z]{3})(?:_([A-Z][a-z]{3}))")
_NO_LANGUAGE = frozenset({"gz", "txt", "tok", "raw", "clean", "lines"})
"""Last parts of file names behind the language: train.en.txt.gz."""

_SCRIPTS = {
    "ja": re.compile("[\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f]"),
    "zh": re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "ko": re.compile("[\u1100-\u11ff\u3131-\u318e\uac00-\ud7a3]"),
    "th": re.compile("[\u0e00-\u0e7f]"),
    "lo": re.compile("[\u0e80-\u0eff]"),
    "km": re.compile("[\u1780-\u17ff]"),
    "my": re.compile("[\u1000-\u109f]"),
    "el": re.compile("[\u0370-\u03ff\u1f00-\u1fff]"),
}
"""Letters that only one language has, or in the case of ideographs, that belong to Chinese if there is no kana."""

_KANA = 0.05
"""Least share of kana among ideographs and kana in Japanese."""

_LONG_WORD = 4.0
"""Mean characters between spaces from which on a text without spaces between words is not cut into words."""

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


def language_in(name: str) -> str | None:
    """The language code that a file or column name ends in, as en of train.en.gz and translation.en; None if none.

    It is after the last dot, hyphen or underscore, or is the whole name: train.zh-CN, dev_de.txt, en.txt, jpn_Jpan.
    """
    parts = PurePath(name).name.split(".")
    while len(parts) > 1 and parts[-1].lower() in _NO_LANGUAGE:
        parts.pop()
    for written in (parts[-1], re.split("[-_]", parts[-1])[-1]):
        found = _CODE.fullmatch(written)
        if found and found[1] and found[1].lower() in _TWO_LETTERS.split():
            tag = found[2] or ""
            return found[1].lower() + f"-{tag.title() if len(tag) == 4 else tag.upper()}" * bool(tag)
        if found and found[3]:
            return written
    return None


def script_language(lines: Sequence[str]) -> str | None:
    """Return the only language with the script of most letters in a text; None if several languages use that script."""
    text = "".join(lines)
    letters = Counter({language: len(each.findall(text)) for language, each in _SCRIPTS.items()})
    if letters["ja"] >= _KANA * (letters["ja"] + letters["zh"]) > 0:
        letters["ja"] += letters.pop("zh")
    language, most = letters.most_common(1)[0]
    return language if most > sum(map(str.isalpha, text)) / 2 else None


def lacks_spaces(lines: Sequence[str]) -> bool:
    """Whether a text is in a script without spaces between words and has none there."""
    if has_spaces(script_language(lines)):
        return False
    words = [word for line in lines for word in line.split()]
    return sum(map(len, words)) > _LONG_WORD * len(words)


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
