"""What text becomes on its way into pieces: the source may be folded, the target stays as it is."""

from pathlib import Path

import pytest

from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.report import summary
from mtkit.recipe.data import DataSettings
from mtkit.text.characters import Folding

CHINESE, ENGLISH = "他说：“{}只狗，好！”（第２页…）", "He said: “{} dogs, ﬁne!” (page ２…)"


def settings_of(folder: Path, tokenizer: dict[str, object] | None = None, odd: str = "") -> DataSettings:
    """Both directions between two languages, with full-width and other wide characters on both sides."""
    for name, count in (("train", 60), ("valid", 5)):
        for language, text in (("zh", CHINESE), ("en", ENGLISH)):
            lines = [
                text.format(number + 1000 * (name == "valid")) + odd * (name == "valid" and number == 2)
                for number in range(count)
            ]
            (folder / f"{name}.{language}").write_text("".join(line + "\n" for line in lines))

    def corpora(name: str) -> list[dict[str, str]]:
        paths = {language: str(folder / f"{name}.{language}") for language in ("zh", "en")}
        return [
            {"source": paths[one], "target": paths[other], "direction": f"{one}-{other}"}
            for one, other in (("zh", "en"), ("en", "zh"))
        ]

    given = {"vocabulary": 400, **(tokenizer or {})}
    data = {"folder": folder / "data", "train": corpora("train"), "valid": corpora("valid"), "tokenizer": given}
    return DataSettings.model_validate(data)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("rule", ["nfkc", "identity"])
def test_a_language_is_folded_where_it_is_the_source_and_kept_where_it_is_the_target(
    tmp_path: Path, rule: str, joint: bool
) -> None:
    prepare(settings_of(tmp_path, {"joint": joint, "normalization": rule}))
    prepared = open_prepared(tmp_path / "data")
    assert bool(list((tmp_path / "data").rglob("joint.model"))) == joint
    folding = Folding("nfkc") if rule == "nfkc" else str
    assert folding(CHINESE) == (CHINESE if rule == "identity" else "他说:“{}只狗,好!”(第2页...)")
    source, target = prepared.tokenizers.source, prepared.tokenizers.target
    both = [(CHINESE, ENGLISH)] * 60 + [(ENGLISH, CHINESE)] * 60
    for row, (one, other) in enumerate(both):
        number = row % 60
        assert source.decode(prepared.train.source[row].tolist()) == folding(one.format(number))
        assert target.decode(prepared.train.target[row].tolist()) == other.format(number)
    assert not target.is_byte[prepared.train.target[60]].any(), "its punctuation has pieces"
    assert prepared.valid.target_text is not None
    assert prepared.valid.target_text[0] == ENGLISH.format(1000)
    # new text goes the way that the prepared text went
    assert source.encode(CHINESE.format(3)) == prepared.train.source[3].tolist()[1:]
    assert "targets: all can be decoded" in summary(prepare(prepared.settings), 1_024)


def test_targets_that_do_not_come_back_are_counted_with_an_example(tmp_path: Path) -> None:
    report = prepare(settings_of(tmp_path, {"byte_fallback": False}, odd=" ☃"))
    sides = report.record["sides"]
    assert (sides["train"]["altered"], sides["valid"]["altered"]) == (0, 2)
    line = next(each for each in summary(report, 1_024).split("\n") if each.startswith("targets"))
    assert line.startswith("targets that decoding their pieces alters: 2 in valid; as line 3 of valid, '")
    assert "☃', which becomes" in line
    assert line.endswith(") '")
