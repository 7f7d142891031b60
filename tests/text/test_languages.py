import pytest

from mtkit.text.languages import (
    bleu_tokenizer,
    has_spaces,
    is_language,
    known_language,
    lacks_spaces,
    language_in,
    language_of,
    languages_in,
    languages_of,
    script_language,
    seam,
)
from tests.evaluation.unspaced import ENGLISH, RIGHT


@pytest.mark.parametrize(
    "language", ["zh", "ZH", "zh-cn", "zh_Hant", "zh-Hant-TW", "cmn", "yue", "zho_Hans", " zh ", "Chinese"]
)
def test_every_name_of_chinese_is_chinese(language: str) -> None:
    assert (known_language(language), bleu_tokenizer(language), has_spaces(language)) == ("zh", "zh", False)


@pytest.mark.parametrize(
    ("language", "tokenizer", "spaces"),
    [
        ("ja", "ja-mecab", False),
        ("jpn_Jpan", "ja-mecab", False),
        ("Japanese", "ja-mecab", False),
        ("ko", "ko-mecab", True),
        ("th", "char", False),
        ("lo", "char", False),
        ("km", "char", False),
        ("my", "char", False),
        ("de", "13a", True),
        ("zhuang", "13a", True),
        ("zh-Latn", "13a", True),
        ("", "13a", True),
        (None, "13a", True),
    ],
)
def test_tokenizer_and_spaces(language: str | None, tokenizer: str, spaces: bool) -> None:
    assert (bleu_tokenizer(language), has_spaces(language)) == (tokenizer, spaces)


def test_a_space_stands_between_sentences_but_in_chinese_and_japanese() -> None:
    assert [seam(language) for language in ("zh-TW", "jpn", "th", "km", "my", "ko", "de", None)] == ["", ""] + [" "] * 6


@pytest.mark.parametrize(
    ("direction", "languages"),
    [
        ("en-zh", ("en", "zh")),
        ("en-zh-cn", ("en", "zh-cn")),
        ("en-zh_Hant", ("en", "zh_Hant")),
        ("en-US-zh", ("en-US", "zh")),
        ("zh-Hans-CN-pt-BR", ("zh-Hans-CN", "pt-BR")),
        ("en-THAI", ("en", "THAI")),
        ("en", ("en", "")),
    ],
)
def test_a_direction_has_two_languages(direction: str, languages: tuple[str, str]) -> None:
    assert languages_of(direction) == languages


@pytest.mark.parametrize(
    ("names", "language"),
    [
        (
            [
                "train.en",
                "a/b.c/train.en.gz",
                "train.en.txt",
                "en.txt",
                "dev_en.txt",
                "dev-en",
                "translation.en",
                "T.EN",
            ],
            "en",
        ),
        (["corpus.de-en.de", "de", "de.tok.gz"], "de"),
        (["dev.zh-CN", "dev.zh_cn", "zh-CN.txt"], "zh-CN"),
        (["flores.zho_Hant", "zho_Hant"], "zho_Hant"),
        (["train.src", "train.tgt", "1", "source", "text", "train", "train.en/part", "manual.ids", ".", ""], None),
    ],
)
def test_names_of_files_and_columns_end_in_a_language(names: list[str], language: str | None) -> None:
    assert [language_in(name) for name in names] == [language] * len(names)


@pytest.mark.parametrize(
    ("source", "target", "languages"),
    [
        ("src.de-fr.txt", "tgt.de-fr.txt", ("de", "fr")),
        ("src.de_fr", "tgt.de_fr", ("de", "fr")),
        ("train.de", "train.fr", ("de", "fr")),
        ("a.zh-CN", "b.zh-CN", ("zh-CN", "zh-CN")),
        ("a.de-DE", "b.de-DE", ("de-DE", "de-DE")),
        ("src.pt-br", "tgt.pt-br", ("pt-BR", "pt-BR")),
        ("a.en-FR", "b.en-FR", ("en-FR", "en-FR")),
        ("a.pt-BR", "b.pt-PT", ("pt-BR", "pt-PT")),
        ("src.txt", "tgt.de-fr.txt", (None, "de-FR")),
        ("src", "", (None, None)),
    ],
)
def test_a_pair_of_languages_that_ends_both_names_is_split(
    source: str, target: str, languages: tuple[str | None, str | None]
) -> None:
    assert languages_in(source, target) == languages


def test_some_scripts_tell_the_language() -> None:
    for language, lines in RIGHT.items():
        assert script_language(lines) == language
        assert lacks_spaces(lines)
        assert not lacks_spaces([" ".join(line) for line in lines])
    assert script_language(["안녕하세요. 반갑습니다."]) == "ko"
    assert script_language(["GPU 和 CPU 2.5"]) is None
    assert script_language(["東京都新宿区西新宿二丁目の高層建築", "日本国憲法の前文"]) == "ja"
    assert script_language(["我们去东京银座的时候吃了" * 3, "の"]) == "zh"  # one kana in a Chinese text
    for lines in (ENGLISH, ["안녕하세요. 반갑습니다."], ["Он пришёл."], [], ["", "。"]):
        assert not lacks_spaces(lines)


def test_a_text_has_the_language_of_its_name_or_script() -> None:
    assert language_of("test.ja", ["東京"]) == "ja"
    assert language_of("test.en", ["東京"]) == language_of("", ["東京"]) == "zh"
    assert language_of("test.kr", ["한국어"]) == "ko"
    assert language_of("test.en", ENGLISH) == "en"
    assert language_of("reference", ENGLISH) is None
    assert language_of("ref.zh", ["请安装 Microsoft Visual Studio 2022。", "打开 Windows PowerShell"]) == "zh"
    assert language_of("ref.ko", ["1 2 3"]) == "ko"
    for name in ("test.ja-en", "ref.zh-en", "ref_my.txt", "ref.lo"):
        assert language_of(name, ENGLISH) is None


def test_codes_and_english_names_are_languages() -> None:
    assert all(map(is_language, ("de", "pt-BR", "zho_Hans", "Japanese", "german", "fil", "zh_Hant")))
    assert not any(map(is_language, ("japan", "xx", "", "日本語", "englisch")))
