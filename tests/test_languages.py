import pytest

from mtkit.languages import bleu_tokenizer, has_spaces, languages_of, listed, seam


@pytest.mark.parametrize("language", ["zh", "ZH", "zh-cn", "zh_Hant", "zh-Hant-TW", "cmn", "yue", "zho_Hans", " zh "])
def test_every_name_of_chinese_is_chinese(language: str) -> None:
    assert (listed(language), bleu_tokenizer(language), has_spaces(language)) == ("zh", "zh", False)


@pytest.mark.parametrize(
    ("language", "tokenizer", "spaces"),
    [
        ("ja", "ja-mecab", False),
        ("jpn_Jpan", "ja-mecab", False),
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
