"""Languages that the settings do not name: told by file names, by the script, and said in one line."""

from pathlib import Path
from typing import Any

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.report import summary
from mtkit.recipe.data import DataSettings
from mtkit.text.readers.facts import with_languages

TEXT = {
    "en": [f"Line {number} is English, with words." for number in range(40)],
    "ja": [f"{number}番の犬が木の下で家を見ています。" for number in range(40)],
    "zh": [f"第{number}只老狗在树下看见了一座小房子。" for number in range(40)],
}


def settings(folder: Path, source: tuple[str, str], target: tuple[str, str], **more: Any) -> DataSettings:
    """Settings of a corpus, for training and validation, of files of these names and languages."""
    for name, language in (source, target):
        (folder / name).write_text("".join(f"{line}\n" for line in TEXT[language]))
    corpus = {"source": folder / source[0], "target": folder / target[0]}
    return DataSettings.model_validate(
        {"folder": folder / "data", "train": corpus, "valid": corpus, "cleaning": {"overlap": False}, **more}
    )


@pytest.mark.parametrize(
    ("source", "target", "more", "direction", "said"),
    [
        (("a.en", "en"), ("a.ja", "ja"), {}, "en-ja", "source en (from the name a.en), target ja (from the name a.ja)"),
        (("a.ja", "ja"), ("a.en", "en"), {}, "ja-en", "source ja (from the name a.ja), target en"),
        (("a.zh-CN.txt", "zh"), ("b.txt", "en"), {}, "zh-CN-de", "target de (by default); name others"),
        (("a.src", "en"), ("a.tgt", "zh"), {}, "en-zh", "target zh (from the script of "),
        (("a.src", "ja"), ("a.tgt", "zh"), {}, "ja-zh", "source ja (from the script of "),
        (("a.src", "en"), ("a.tgt", "en"), {}, "en-de", "source en (by default), target de (by default)"),
        (
            ("a.en", "en"),
            ("a.ja", "ja"),
            {"target_language": "japanese"},
            "en-japanese",
            "source en (from the name a.en)",
        ),
        (("a.ja", "ja"), ("a.en", "en"), {"source_language": "x", "target_language": "y"}, "x-y", None),
    ],
)
def test_languages_come_from_names_or_scripts(
    tmp_path: Path,
    source: tuple[str, str],
    target: tuple[str, str],
    more: dict[str, str],
    direction: str,
    said: str | None,
) -> None:
    found, lines = with_languages(settings(tmp_path, source, target, **more))
    assert found.directions == [direction]
    assert len(lines) == (said is not None)
    assert said is None or said in lines[0]
    assert with_languages(found) == (found, [])


def test_text_without_spaces_and_files_the_wrong_way_round_are_warned_of(tmp_path: Path) -> None:
    given = settings(tmp_path, ("a.en", "en"), ("a.ja", "ja"), target_language="de")
    _, (_, warning) = with_languages(given)
    assert "a.ja has no spaces between words" in warning
    turned = {"source": tmp_path / "a.ja", "target": tmp_path / "a.en"}
    _, (_, *warnings) = with_languages(
        DataSettings.model_validate(
            {**given.model_dump(exclude={"target_language", "source_language"}), "valid": turned}
        )
    )
    assert [each.startswith("warning: valid has ") for each in warnings] == [True]


def test_text_with_directions_and_columns_of_tables_need_no_guess(tmp_path: Path) -> None:
    table = {"file": tmp_path / "a.tsv", "source": "text.en", "target": "text.zh"}
    (tmp_path / "a.tsv").write_text(
        "text.en\ttext.zh\n" + "".join(f"{a}\t{b}\n" for a, b in zip(TEXT["en"], TEXT["zh"], strict=True))
    )
    found, lines = with_languages(DataSettings.model_validate({"train": table, "valid": table}))
    assert found.directions == ["en-zh"]
    assert len(lines) == 1
    for corpus in ({**table, "direction": "en-zh"}, None):
        given = DataSettings.model_validate({"train": corpus, "valid": corpus} if corpus else {})
        assert with_languages(given) == (given, [])


def test_prepared_data_has_the_languages_and_says_so_once_more(tmp_path: Path) -> None:
    given = settings(tmp_path, ("a.en", "en"), ("a.ja", "ja"), tokenizer={"vocabulary": 400})
    for unchanged in (False, True):
        report = prepare(given)
        assert report.unchanged == unchanged
        assert summary(report, 100).splitlines()[1].startswith("languages: source en (from the name a.en), target ja ")
        assert report.record["settings"]["target_language"] == "ja"
