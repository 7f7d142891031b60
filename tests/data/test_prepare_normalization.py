"""What text becomes on its way into pieces: the source may be folded, the target stays as it is."""

import json
from pathlib import Path

import pytest
import sentencepiece

from mtkit.data.prepare import prepare
from mtkit.data.prepared import open_prepared
from mtkit.data.record import fingerprint_of
from mtkit.data.report import summary
from mtkit.recipe.data import DataSettings
from mtkit.storage.files import write_json
from mtkit.text.characters import Folding
from mtkit.text.tokenizer import EOS, Tokenizers

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


def test_data_of_earlier_versions_is_read_as_it_was_written(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    prepare(settings)
    folder = tmp_path / "data"
    (folder / "tokenizer" / "folding.model").unlink()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([CHINESE, ENGLISH] * 30),
        model_prefix=str(folder / "tokenizer" / "joint"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        pad_id=0,
        unk_id=1,
        bos_id=2,
        eos_id=EOS,
        minloglevel=2,
    )
    (folder / "tokenizer" / "joint.vocab").unlink()
    record = json.loads((folder / "prepared.json").read_text())
    del record["normalization"]
    for side in record["sides"].values():
        for count in (side, *side["corpora"]):
            del count["altered"]
            count.pop("altered_line", None)
    record["fingerprint"] = fingerprint_of(record["identity"], folder / "tokenizer")
    write_json(folder / "prepared.json", record)
    tokenizers = Tokenizers.load(folder / "tokenizer")
    assert tokenizers.joint
    for each in (tokenizers.source, tokenizers.target):
        assert each.decode(each.encode("ﬁne！")) == "fine!"
    report = prepare(settings)
    assert report.unchanged
    assert "normalised too, by an earlier mtkit" in summary(report, 1_024)
    assert "normalisation nfkc of both sides" in summary(report, 1_024)
