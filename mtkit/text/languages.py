"""Properties of languages for splitting, joining and scoring: spaces between words, and BLEU's tokenizer.

Languages may be named as users do: zh, zh-CN, zh_Hant, cmn, zho_Hans, Chinese; case does not matter. Languages that are
not listed have spaces between words.
"""

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import PurePath

from mtkit.text.sentences import CODES

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
"""Languages by their codes of ISO 639-1 to -3 and English names; all written forms of Chinese are one language."""

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
"""Last parts of file names that may follow the language: train.en.txt.gz."""

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
"""Letters that only one language has; ideographs belong to Chinese if there is no kana."""

_KANA = 0.05
"""Minimum share of kana among ideographs and kana in Japanese."""

_LONG_WORD = 4.0
"""Mean characters between spaces above which a text in a script without spaces is not split into words."""

_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab", "th": "char", "lo": "char", "km": "char", "my": "char"}
_SPACED = frozenset({"ko"})
"""Languages with spaces, listed only for their tokenizer."""

_SUBTAG = re.compile(r"[A-Z]{2}|[0-9]{3}|[A-Za-z]{4}")
"""A region or a script after a language: CN, 419, Hant."""


_REGIONS = ("ar", "be", "br", "ca", "ch", "tw")
"""Regions of large languages that are also codes of languages, as in es-ar and zh-tw."""


def languages_of(direction: str) -> tuple[str, str]:
    """Split a direction into source and target language: en-zh-cn into en and zh-cn, en-US-zh into en-US and zh.

    A lower-case region after the source counts as the target, so en-us cannot be a direction's source.
    """
    source, *rest = direction.split("-")
    while len(rest) > 1 and _SUBTAG.fullmatch(rest[0]):
        source += f"-{rest.pop(0)}"
    return source, "-".join(rest)


def language_in(name: str) -> str | None:
    """Return the language code at the end of a file or column name, as en of train.en.gz and translation.en, or None.

    It follows the last dot, hyphen or underscore, or is the name: train.zh-CN, dev_de.txt, en.txt, jpn_Jpan.
    """
    parts = PurePath(name).name.split(".")
    while len(parts) > 1 and parts[-1].lower() in _NO_LANGUAGE:
        parts.pop()
    for written in (parts[-1], re.split("[-_]", parts[-1])[-1]):
        code = _CODE.fullmatch(written)
        if code and code[1] and code[1].lower() in _TWO_LETTERS.split():
            tag = code[2] or ""
            return code[1].lower() + f"-{tag.title() if len(tag) == 4 else tag.upper()}" * bool(tag)
        if code and code[3]:
            return written
    return None


def languages_in(source: str, target: str) -> tuple[str | None, str | None]:
    """Return the language codes at the ends of two names, as `language_in`; a pair that ends both, de-fr, is split.

    src.de-fr and tgt.de-fr are in German and in French, train.zh-CN in Chinese, and train.pt-br in Portuguese.
    """
    languages = language_in(source), language_in(target)
    first, _, second = (languages[0] or "").lower().partition("-")
    lower = re.search(f"{first}[-_]{second}", source) is not None
    is_pair = lower and second in _TWO_LETTERS.split() and second not in (first, *_REGIONS)
    return (first, second) if languages[0] == languages[1] and is_pair else languages


def script_language(lines: Sequence[str]) -> str | None:
    """Return the only language that uses the script of most letters; None if several languages use it."""
    text = "".join(lines)
    letters = Counter({language: len(letter.findall(text)) for language, letter in _SCRIPTS.items()})
    if letters["ja"] >= _KANA * (letters["ja"] + letters["zh"]) > 0:
        letters["ja"] += letters.pop("zh")
    language, most = letters.most_common(1)[0]
    return language if most > sum(map(str.isalpha, text)) / 2 else None


def language_of(name: str, lines: Sequence[str]) -> str | None:
    """Return the language of a text: a listed one that its name ends in, else of its script, else any name, or None.

    A listed language does not count if all letters are of other scripts: ref_my.txt is not in Burmese then.
    """
    named, text = language_in(name), "".join(lines)
    if not known_language(named):
        return script_language(lines) or named
    has_script = any(letter.search(text) for letter in _SCRIPTS.values())
    return named if has_script or not any(map(str.isalpha, text)) else None


def lacks_spaces(lines: Sequence[str]) -> bool:
    """Return whether a text is in a script without spaces between words and has none between words."""
    if has_spaces(script_language(lines)):
        return False
    words = [word for line in lines for word in line.split()]
    return sum(map(len, words)) > _LONG_WORD * len(words)


def known_language(language: str | None) -> str | None:
    """Return the two-letter code of a listed language, as zh for cmn_Hant; None for others and for Latin script."""
    main, *subtags = re.split("[-_]", (language or "").strip().lower())
    return None if "latn" in subtags else _LANGUAGES.get(main)


def is_language(name: str) -> bool:
    """Return whether a name is a code of two or three letters, with a region or script or without, or a known name."""
    main = re.split("[-_]", name.strip().lower())[0]
    known = main in _LANGUAGES or main in CODES or main in _TWO_LETTERS.split()
    return known or re.fullmatch("[a-z]{3}", main) is not None


def has_spaces(language: str | None) -> bool:
    """Return whether the language has spaces between words; None is an unknown language."""
    known = known_language(language)
    return known is None or known in _SPACED


def seam(language: str | None) -> str:
    """Return the text between two sentences: nothing in Chinese and Japanese, else a space (also in Thai and Lao)."""
    return "" if known_language(language) in ("zh", "ja") else " "


def bleu_tokenizer(language: str | None) -> str:
    """Return the name of sacrebleu's tokenizer for the language."""
    return _TOKENIZERS.get(known_language(language) or "", "13a")


@cache
def installed_tokenizer(language: str | None) -> str:
    """Return the name of sacrebleu's tokenizer for the language, or `char` if its dictionary is not installed."""
    from sacrebleu.metrics import BLEU

    tokenizer = bleu_tokenizer(language)
    try:
        BLEU(tokenize=tokenizer)
    except (ImportError, RuntimeError):
        return "char"
    return tokenizer
