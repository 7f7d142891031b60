"""Sentence splitting by marks and the text around them, with abbreviations by language."""

import re
from itertools import pairwise
from unicodedata import category, combining, normalize

from mtkit.text.characters import DROPPED

ABBREVIATIONS = {
    language: frozenset(words.split())
    for language, words in {
        "": "dr prof st",
        "en": "mr mrs ms messrs dr prof st gen col capt lt sgt maj cmdr rev hon gov sen rep pres supt mt ft vs viz "
        "cf approx ca ver inc ltd co corp bros dept est al ave blvd rd",
        "de": "dr prof hr fr frl dipl ing st str bzw vgl ca evtl ggf inkl exkl zzgl sog bspw max min mind geb gest "
        "gegr jh jhd mio mrd tel abs art aufl bd hrsg verf zit ebd",
        "fr": "mm mme mlle mgr me dr pr st ste cf ex env av apr tél vol chap",
        "es": "sr sra srta sres dr dra prof lic ing ud uds vd vds d dña av avda pág cía gral cnel aprox",
        "it": "sig sigg dott dr prof avv ing arch on rag geom st cfr pag es ca sen",
        "pt": "sr sra srta dr dra prof eng exmo exma av pág aprox ltda cia",
        "nl": "dhr mevr mw dr drs ir mr prof st bijv bv ca enz evt incl excl resp zgn blz jl",
        "sv": "dr prof st bl ca dvs etc fr hr kl resp t.ex jfr",
        "da": "dr prof hr fr frk st bl ca dvs evt f.eks kl jf",
        "nb": "dr prof st bl ca dvs evt f.eks kl jf hr fr",
        "fi": "esim ks mm nk prof tri ts vrt yms",
        "pl": "dr prof mgr inż hab św ul al np tzn tzw tj im ks wg zob",
        "cs": "dr prof ing mgr bc doc st sv např tzn tzv tj resp ul čl srov",
        "sk": "dr prof ing mgr bc doc sv napr tzn tzv tj resp ul čl porov",
        "hu": "dr prof id ifj pl kb ún ill stb vö",
        "ro": "dl dna dra dr prof ing str bd nr cca",
        "tr": "dr prof doç sn av yrd örn bkz vb vs cad sok mah",
        "ru": "г гг ул пр просп пл им др проф акад гр тов стр рис табл см ср млн млрд тыс руб коп напр св",
        "uk": "м вул пл ім др проф акад стор рис табл див пор млн млрд тис грн напр св",
        "el": "κ κκ κα δρ καθ π.χ βλ αρ σελ",
    }.items()
}
ABBREVIATIONS |= dict.fromkeys(("zh", "ja", "ko", "th", "lo", "km", "my"), ABBREVIATIONS["en"])
"""Abbreviations whose full stop does not end a sentence: lower case, without the last full stop; "" is for all
languages. Latin words in scripts of Asia are taken to be English. Single letters are handled elsewhere. A word that as
often ends a sentence as not, as etc, is left out."""

BEFORE_NUMBERS = (
    "no nos nr núm num n.º nº art arts abb abs bd bl ch chap fig figs ex eq sec sect tab vol p pp pg pag pág s str kap "
    "teil ca rs jan feb mar apr jun jul aug sep sept oct okt nov dec dez № рис стр табл гл"
)
"""Words whose full stop does not end a sentence if a number follows, in any language: No. 5, Fig. 2, Jan. 1."""

ORDINALS = "de da nb nn sv fi is et lv cs sk sl hr sr bs hu pl tr eu lb hsb"
"""Languages that write a full stop after ordinal numbers: am 3. Oktober, Friedrich II."""

_THREE_LETTERS = (
    "eng en deu de ger de fra fr fre fr spa es ita it por pt nld nl dut nl swe sv dan da nob nb nor nb fin fi pol pl "
    "ces cs cze cs slk sk slo sk hun hu ron ro rum ro tur tr rus ru ukr uk ell el gre el zho zh chi zh cmn zh jpn ja "
    "kor ko tha th"
)
_NAMES = (
    "english en german de french fr spanish es italian it portuguese pt dutch nl swedish sv danish da norwegian nb "
    "finnish fi polish pl czech cs slovak sk hungarian hu romanian ro turkish tr russian ru ukrainian uk greek el "
    "chinese zh japanese ja korean ko thai th"
)
_OTHERS = f"{_THREE_LETTERS} {_NAMES} no nb".split()
CODES = dict(zip(_OTHERS[::2], _OTHERS[1::2], strict=True))
"""Other codes and the English names of these languages."""


_WIDE = "。！？｡।॥؟։።፧။។៕།༎"
"""Marks that end a sentence even if no space follows."""

_CLOSING = r"\"'”’»«›‹)\]}」』）】》〉〕］｝＂＇"
_DOUBLE = "‼⁇⁈⁉"
"""Pairs of ! and ? in one character."""
_CONTINUES = _WIDE + _DOUBLE + ",;:.!?…۔．\u037e)\\]}%‰‱、，！？；：）」』】》〉〕］｝،؛"
"""Characters that begin no sentence: if one of them follows a mark, the sentence continues."""

# atomic groups: with possessive quantifiers of groups, Python 3.11.2 raises SystemError or matches wrongly
_CLOSES = (
    rf"(?>(?:[{_CLOSING}]|</[A-Za-z][^<>]*+>|(?<![{_WIDE}”])“)*)"  # “ closes „Ja.“ and opens 他走了。“你好。”“不好。”
)
_TAG = r"</?[A-Za-z][^<>]*+>|&(?:#\w++|\w{2}\w*+);"
"""Tags and entities of HTML: marks in them end no sentence."""
_END = re.compile(
    rf"(?P<tag>{_TAG})|(?P<mark>[{_WIDE}][{_WIDE}{_DOUBLE}.!?…]*+|[{_DOUBLE}.!?…۔．]++|[;\u037e])"
    rf"(?P<closing>{_CLOSES})[{DROPPED}\ufe0f]*+(?P<space>\s*+)"  # ‼\ufe0f is drawn as an emoji
)
_UNSPOKEN = rf"{_TAG}|(?:[:;=][-'^]?[()\[\]DPpOo/|\\*3]|(?<!\w)[xX]D)(?!\w)"
"""Tags and entities of HTML, and emoticons: letters in them are no text."""
_NO_TEXT = re.compile(_UNSPOKEN)
_OPENED = re.compile(rf"(?>(?:{_UNSPOKEN}|_|[^\w{_CONTINUES}])*)")
"""Text before the first word of a sentence: quotes, brackets, bullets, symbols, invisible characters."""
_SPACED_QUOTE = re.compile(r"»\s*+")
_HIRAGANA, _JAPANESE_OR_CHINESE = re.compile("[\u3041-\u309f]"), re.compile("[\u3041-\u30ff\u3400-\u9fff]")
_ASIAN = re.compile("[\u3000-\u9fff\uac00-\ud7af\uff00-\uffef]")
"""Characters of Chinese, Japanese and Korean text, which may precede a Latin word without a space."""
_INITIALS = re.compile(r"(?:[^\W\d_]{1,3}\.)*[^\W\d_]|(?:[^\W\d_]{1,3}\.)+[^\W\d_]{1,3}")
_ORDINAL = re.compile(r"\d{1,2}|[IVXL]+")

_MARKS = frozenset(_WIDE + _DOUBLE + ".!?…۔．;\u037e")
_AT_THE_END = "".join(_MARKS) + "\"'”’»«›‹“)]}」』）】》〉〕］｝＂＇ \u00a0\n"

_BEFORE_NUMBERS, _ORDINALS = frozenset(BEFORE_NUMBERS.split()), frozenset(ORDINALS.split())

_LONGEST_WORD = 20
"""Characters before a full stop that may be an abbreviation."""


def sentences(text: str, language: str | None) -> list[str]:
    """Split a text into sentences, each with its trailing spaces; joined they are the text. None: unknown language.

    A sentence ends at . ! ? … and the marks of other scripts, closing quotes and brackets included. A space must follow
    marks of Latin script, and then no lower-case letter, unless the text has no other letters. A full stop ends no
    sentence after an abbreviation, initials, the number of a list item, or an ordinal in languages that write them so.
    Each sentence has a letter, unless the text has none: symbols, numbers, HTML tags and emoticons between two marks
    belong to the sentence before them. Text in NFD and in NFC has the same sentences.
    """
    if _MARKS.isdisjoint(text.rstrip(_AT_THE_END)):  # most segments have a mark only at their end
        return [text] if text else []
    main = re.split("[-_]", (language or "").strip().lower())[0]
    code, lowercase = CODES.get(main, main), text.islower()
    cuts, position, opened = [0], 0, 0
    while (end := _END.search(text, position)) is not None:
        position = end.end()
        if end["tag"]:
            continue
        if code == "fr" and end["space"] and (quote := _SPACED_QUOTE.match(text, position)) is not None:
            position = quote.end()
        if position > opened:  # otherwise the mark is in an emoticon that was read already
            opened = _after_opening(text, position)
        if opened < len(text) and _is_end(text, end, text[opened], cuts[-1], code, lowercase):
            cuts.append(position)
    starts, has_letter = [0], False
    for start, stop in pairwise([*cuts, len(text)]):
        letter = any(map(str.isalpha, _NO_TEXT.sub("", text[start:stop])))
        if letter and has_letter:
            starts.append(start)
        has_letter |= letter
    return [text[start:stop] for start, stop in pairwise([*starts, len(text)])]


def _after_opening(text: str, position: int) -> int:
    """Return the place of the first word, or of a character that begins no sentence, from `position` on."""
    opened = _OPENED.match(text, position)
    return position if opened is None else opened.end()


def _is_end(text: str, end: re.Match[str], following: str, begin: int, code: str, lowercase: bool) -> bool:
    """Return whether a sentence that begins at `begin` ends with a mark, and `following` begins the next one."""
    if end["mark"] in (";", "\u037e") and code != "el":
        return False
    quoted = bool(end["closing"]) and _HIRAGANA.match(following) is not None  # 「はい。」と言う
    if following in _CONTINUES:
        return False
    if not end["space"]:
        wide = end["mark"][0] in _WIDE or (
            end["mark"].strip(_DOUBLE + "!?．") == "" and _JAPANESE_OR_CHINESE.match(following)
        )
        return bool(wide) and not quoted
    if end["mark"][0] in _WIDE:
        return True
    if following.islower() and not lowercase:
        return False
    preceding = text[max(begin, end.start() - _LONGEST_WORD) : end.start()]
    return end["mark"] != "." or bool(end["closing"]) or not _continues(preceding, following, code)


def _continues(preceding: str, following: str, code: str) -> bool:
    """Return whether a full stop between these belongs to an abbreviation, or to a number that ends no sentence."""
    preceding = "".join(char for char in normalize("NFC", preceding) if not combining(char) and category(char) != "Cf")
    words = preceding.split()
    if not words or preceding[-1].isspace():
        return False
    word = words[-1].strip("\"'“‘„«»([{-–—「『（")
    latin = _ASIAN.split(word)[-1]
    lower = latin.lower()
    return (
        _INITIALS.fullmatch(latin if following.isascii() else word) is not None
        or (word.isdigit() and word == preceding.strip())
        or (code in _ORDINALS and _ORDINAL.fullmatch(word) is not None)
        or lower in ABBREVIATIONS[""]
        or lower in ABBREVIATIONS.get(code, ())
        or (lower in _BEFORE_NUMBERS and following.isdigit())
    )
