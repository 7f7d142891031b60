"""Translation memories: what a tree of all elements has, and what is refused."""

import gzip
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from mtkit.errors import DataError
from mtkit.recipe.data import Corpus
from mtkit.text.corpora import read_corpus
from mtkit.text.text_files import Repairs
from mtkit.text.tmx import tmx_rows

HEAD = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE tmx SYSTEM "http://nowhere.invalid/tmx14.dtd">
<tmx version="1.4">
"""
UNITS = """<header srclang="en"/><body>
<tu><note>no</note><tuv xml:lang="en-GB"><seg>A &amp; B</seg></tuv><tuv xml:lang="de"><seg>A &#38; B</seg></tuv></tu>
<tu><tuv xml:lang="EN"><prop>x</prop><seg>Two <bpt i="1">&lt;b></bpt>big<ept i="1">&lt;/b></ept> dogs</seg></tuv>
<tuv xml:lang="de-AT"><seg>Zwei <hi>große</hi><ph><sub>alt</sub></ph> Hunde</seg></tuv></tu>
<tu><tuv xml:lang="en"><seg>only one</seg></tuv><tuv xml:lang="fr"><seg>une seule</seg></tuv></tu>
<tu><tuv lang="en"><seg>老狗\nan old dog </seg></tuv>
<tuv lang="de-AT"><seg>nein</seg></tuv><tuv lang="de"><seg>ja</seg></tuv></tu>
<tu><tuv xml:lang="de"><seg></seg></tuv><tuv xml:lang="en_US"><seg>x</seg></tuv></tu>
</body></tmx>
"""
EXPECTED = [
    (5, ["A & B", "A & B"]),
    (6, ["Two big dogs", "Zwei große Hunde"]),
    (9, ["老狗 an old dog ", "ja"]),
    (12, ["x", ""]),
]


def written(folder: Path, text: str, name: str = "memory.tmx") -> Path:
    path = folder / name
    content = text.encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("name", ["memory.tmx", "memory.tmx.gz"])
@pytest.mark.parametrize("buffer", [1, 7, 1 << 16])
def test_units_with_both_languages_are_pairs(
    tmp_path: Path, name: str, buffer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtkit.text.tmx._BUFFER", buffer)
    corpus, repairs = Corpus(file=written(tmp_path, HEAD + UNITS, name), source="en", target="de"), Repairs()
    assert [(line, [source, target]) for line, source, target, _ in read_corpus(corpus, repairs)] == EXPECTED
    assert repairs.inner_newlines == 1
    reversed_pairs = read_corpus(Corpus(file=corpus.file, source="de", target="en"))
    assert [[pair.target, pair.source] for pair in reversed_pairs] == [texts for _, texts in EXPECTED]
    assert [pair.source for pair in read_corpus(corpus, rows=range(1, 3))] == ["Two big dogs", "老狗 an old dog "]


def test_a_language_is_neither_part_of_another_code_nor_found_twice(tmp_path: Path) -> None:
    texts = [("est", "koer"), ("es", "perro"), ("es-MX", "can"), ("es", "chucho"), ("en", "dog"), ("en-GB", "hound")]
    unit = "".join(f'<tuv xml:lang="{code}"><seg>{text}</seg></tuv>' for code, text in texts)
    path = written(tmp_path, f"<tmx><body><tu>{unit}</tu></body></tmx>")
    for languages, pair in ((["es", "en"], ["perro", "dog"]), (["est", "en_gb"], ["koer", "hound"])):
        assert [found for _, found in tmx_rows(path, languages, Repairs())] == [pair]
    with pytest.raises(DataError, match="no unit with e and en"):
        list(tmx_rows(path, ["e", "en"], Repairs()))


def test_a_long_memory_has_the_text_of_its_tree(tmp_path: Path) -> None:
    units = "".join(
        f"<tu><tuv xml:lang='en'><seg>dog {number} &lt; {'ä' * (number % 900)}</seg></tuv>"
        f"<tuv xml:lang='de'><seg>Hund {number}</seg></tuv></tu>\n"
        for number in range(3_000)
    )
    path = written(tmp_path, f"<tmx><body>{units}</body></tmx>")
    tree = [segment.text for segment in ElementTree.parse(path).iter("seg")]
    assert [text for _, texts in tmx_rows(path, ["en", "de"], Repairs()) for text in texts] == tree


def test_other_encodings_are_those_that_the_file_names(tmp_path: Path) -> None:
    path = tmp_path / "memory.tmx"
    for encoding in ("UTF-16", "ISO-8859-1"):
        path.write_bytes(f'<?xml version="1.0" encoding="{encoding}"?>{UNITS_WITH_UMLAUT}'.encode(encoding))
        assert [texts for _, texts in tmx_rows(path, ["en", "de"], Repairs())] == [["bear", "Bär"]]


UNITS_WITH_UMLAUT = (
    "<tmx><tu><tuv xml:lang='en'><seg>bear</seg></tuv><tuv xml:lang='de'><seg>Bär</seg></tuv></tu></tmx>"
)
SECRET = '<!DOCTYPE tmx [<!ENTITY secret SYSTEM "file:///etc/passwd">]>\n<tmx><tu><tuv xml:lang="en"><seg>&secret;'
LAUGHS = '<!DOCTYPE tmx [\n<!ENTITY a "ha">\n<!ENTITY b "&a;&a;">]>\n<tmx><tu><tuv xml:lang="en"><seg>&b;'
PARAMETER = '<!DOCTYPE tmx [<!ENTITY % file SYSTEM "file:///etc/passwd"> %file;]>\n<tmx></tmx>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SECRET, "line 1: the entity secret is not one of XML's five"),
        (LAUGHS, "line 2: the entity a is not"),
        (PARAMETER, "line 1: the entity file is not"),
        (HEAD + UNITS.replace("A &amp; B", "caf&eacute;"), "line 5: the entity eacute is not"),
        (HEAD + UNITS.replace("</tuv>", "</tu>", 1), r"line 5: not XML \(mismatched tag\)"),
        (HEAD + UNITS[:400], r"line \d+: not XML \((no element found|unclosed token)\)"),
        ("", r"line 1: not XML \(no element found\)"),
        ("plain text\n", r"line 1: not XML \(syntax error\)"),
        ('<?xml version="1.0" encoding="GB2312"?><tmx></tmx>', "in an encoding that cannot be read.*iconv"),
        ('<?xml version="1.0" encoding="foo"?><tmx></tmx>', "in an encoding that cannot be read.*iconv"),
        (HEAD + "</tmx>", "no unit with en and de; it has no translation units"),
        (HEAD + UNITS.replace('"de', '"es').replace('"fr', '"da'), "it has the languages en-gb, es, en, es-at, da"),
    ],
)
def test_what_is_no_memory_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"memory.tmx.*{message}") as raised:
        list(tmx_rows(written(tmp_path, text), ["en", "de"], Repairs()))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("more", [{"documents": "empty-lines"}, {"scores": "m.scores", "least_score": 0.5}])
def test_a_memory_has_neither_documents_nor_scores(tmp_path: Path, more: dict[str, Any]) -> None:
    corpus = Corpus(file=written(tmp_path, HEAD + UNITS), source="en", target="de", **more)
    with pytest.raises(
        DataError, match=f"memory has no {next(iter(more))}; leave {next(iter(more))} of the corpus out"
    ):
        list(read_corpus(corpus))
