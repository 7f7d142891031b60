"""Files of contrastive translations, in three formats."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from mtkit.errors import DataError, MtkitError
from mtkit.evaluation.contrastive.files import ContrastiveFile, Item

OURS = {"source": "It fell.", "right": "Er fiel.", "wrong": ["Sie fiel.", "Es fiel."]}

CONTRAPRO = [
    {
        "src segment": "I broke it.",
        "ref segment": "Ich zerbrach ihn.",
        "src pronoun": "it",
        "ref pronoun": "Er",
        "ante distance": distance,
        "intrasegmental": distance == 0,
        "corpus": "opensubs",
        "document id": "1921_12806.de",
        "segment id": 70,
        "src ante phrase": "the cup",
        "ref ante head gender": None,
        "errors": [
            {"contrastive": wrong, "replacement": "sie", "replacement gender": "Fem", "type": "pronominal coreference"}
            for wrong in ("Ich zerbrach sie.", "Ich zerbrach es.")[: 1 + number % 2]
        ],
    }
    for number, distance in enumerate((0, 1, 9))
]

LINGEVAL = [
    {
        "source": "The dogs sleep.",
        "reference": "Die Hunde schlafen.",
        "origin": "newstest2009.1",
        "errors": [
            {"type": "np_agreement", "contrastive": "Der Hunde schlafen.", "distance": 2, "frequency": 2020},
            {"type": "polarity_particle_nicht_ins", "contrastive": "Die Hunde schlafen nicht."},
            {"type": "subj_verb_agreement", "contrastive": "Die Hunde schläft.", "distance": 16, "frequency": 0},
        ],
    },
    {"source": "a", "reference": "b", "errors": [{"type": "x", "contrastive": "c", "distance": "0", "frequency": 6}]},
]


def items_of(path: Path, *contexts: Path) -> list[Item]:
    pair = (contexts[0], contexts[1]) if contexts else None
    found = list(ContrastiveFile(path, pair))
    assert ContrastiveFile(path, pair).count() == len(found)
    return found


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return path


def test_json_lines(tmp_path: Path) -> None:
    more = {
        "source": "他来了。",
        "right": "Er kam.\n",
        "wrong": "Sie\nkam.",
        "source_context": ["老人在家。", " "],
        "target_context": ["Der Alte ist da.", "x"],
        "labels": {"kind": "pronoun", "distance": 4, "plain": True, "share": 0.5, "unknown": None},
    }
    path = lines(tmp_path / "pairs.jsonl", OURS, more)
    expected = [
        Item(1, "It fell.", "Er fiel.", ("Sie fiel.", "Es fiel."), (), {}),
        Item(
            2,
            "他来了。",
            "Er kam.",
            ("Sie kam.",),
            (("老人在家。", "Der Alte ist da."),),
            {"kind": "pronoun", "distance": 4, "plain": True, "share": 0.5},
        ),
    ]
    assert items_of(path) == expected
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + path.read_bytes()))
    assert items_of(tmp_path / "pairs.jsonl.gz") == expected
    (tmp_path / "list.json").write_text("\ufeff \n" + json.dumps([OURS, more], indent=1))
    assert items_of(tmp_path / "list.json") == expected


def test_contrapro_with_its_contexts(tmp_path: Path) -> None:
    """The context files hold the context of each translation, right or wrong; here two sentences before each."""
    (tmp_path / "contrapro.json").write_text(json.dumps(CONTRAPRO, indent=2))
    alone = items_of(tmp_path / "contrapro.json")
    assert [item.context for item in alone] == [(), (), ()]
    assert [item.labels for item in alone] == [
        {"pronoun": "it:er", "distance": distance, "intrasegmental": inside}
        for distance, inside in ((0, True), (1, False), (">3", False))
    ]
    assert alone[1] == Item(
        2, "I broke it.", "Ich zerbrach ihn.", ("Ich zerbrach sie.", "Ich zerbrach es."), (), alone[1].labels
    )
    before = [("", "s1"), ("s2", "s3"), ("s4", "s5")]
    counts = [2, 3, 2]
    for side in ("en", "de"):
        text = "".join(
            f"{sentence and side + sentence}\n"
            for pair, count in zip(before, counts, strict=True)
            for sentence in pair * count
        )
        (tmp_path / side).write_text(text)
    found = items_of(tmp_path / "contrapro.json", tmp_path / "en", tmp_path / "de")
    assert [item.context for item in found] == [
        (("ens1", "des1"),),
        (("ens2", "des2"), ("ens3", "des3")),
        (("ens4", "des4"), ("ens5", "des5")),
    ]
    with (tmp_path / "de").open("a") as file:
        file.write("one more\n")
    with pytest.raises(DataError, match=r"en has 14 lines, .*de has 15, and .*contrapro\.json has 7 translations"):
        items_of(tmp_path / "contrapro.json", tmp_path / "en", tmp_path / "de")
    (tmp_path / "en").write_text("")
    (tmp_path / "de").write_text("")
    with pytest.raises(DataError, match="the same number of lines for each translation"):
        items_of(tmp_path / "contrapro.json", tmp_path / "en", tmp_path / "de")
    with pytest.raises(MtkitError, match="belong to ContraPro"):
        items_of(lines(tmp_path / "errors", {**OURS, "errors": [{"contrastive": "x"}]}), *[tmp_path / "one"] * 2)


def test_each_error_of_lingeval_is_a_segment(tmp_path: Path) -> None:
    (tmp_path / "lingeval97.json").write_text(json.dumps(LINGEVAL))
    found = items_of(tmp_path / "lingeval97.json")
    assert [item.number for item in found] == [1, 1, 1, 2]
    assert [(item.source, item.right) for item in found[:3]] == [("The dogs sleep.", "Die Hunde schlafen.")] * 3
    assert [item.wrong for item in found] == [
        ("Der Hunde schlafen.",),
        ("Die Hunde schlafen nicht.",),
        ("Die Hunde schläft.",),
        ("c",),
    ]
    assert [item.labels for item in found] == [
        {"type": "np_agreement", "distance": 2, "frequency": ">2k"},
        {"type": "polarity_particle_nicht_ins"},
        {"type": "subj_verb_agreement", "distance": ">15", "frequency": 0},
        {"type": "x", "distance": 0, "frequency": ">5"},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "line 2: not JSON .EOF"),
        ("", "line 2: not JSON .the line is empty"),
        ("[]", "line 2: not a JSON object"),
        ('{"source": NaN}', "line 2: not JSON"),
        ("[" * 5000, "line 2: not JSON"),
        ({"right": "a", "wrong": "b"}, "line 2: no 'source' among 'right', 'wrong'"),
        ({"source": "a", "wrong": "b"}, "line 2: no 'right' among"),
        ({"source": "a", "right": "b"}, "line 2: no 'wrong' among"),
        ({**OURS, "wrong": []}, "line 2: wrong is an empty list"),
        ({**OURS, "wrong": [1]}, "line 2: wrong is 1, not a text"),
        ({**OURS, "right": " "}, "line 2: right is ' ', not a text"),
        ({**OURS, "source": None}, "line 2: source is None, not a text"),
        ({**OURS, "right": "\ud800"}, "line 2: not JSON"),
        ({**OURS, "source_context": "a"}, "line 2: source_context and target_context must be lists"),
        ({**OURS, "source_context": ["a", "b"], "target_context": ["c"]}, "line 2: source_context has 2 sentences and"),
        ({**OURS, "source_context": ["a"]}, "line 2: source_context has 1 sentences and target_context has 0"),
        ({**OURS, "labels": ["a"]}, "line 2: labels must be an object"),
        ({**OURS, "labels": {"a": [1]}}, "line 2: the label 'a' must be a text, a number, true or false"),
        ({"src segment": "a", "ref segment": "b", "errors": []}, "line 2: no list of errors"),
        ({"source": "a", "reference": "b", "errors": [{"type": "c"}]}, "line 2: no 'contrastive' among 'type'"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = lines(tmp_path / "pairs.jsonl", OURS)
    with path.open("a") as file:
        file.write(f"{row if isinstance(row, str) else json.dumps(row)}\n")
    with pytest.raises(DataError, match=message) as raised:
        list(ContrastiveFile(path))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 500


def test_a_damaged_list_and_an_empty_file_are_named(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(json.dumps([OURS, {}]))
    with pytest.raises(DataError, match=r"list\.json, object 2: "):
        list(ContrastiveFile(path))
    path.write_text("[{}")
    with pytest.raises(DataError, match="is not a JSON list: EOF"):
        list(ContrastiveFile(path))
    for text in ("", "[]"):
        path.write_text(text)
        with pytest.raises(DataError, match="has no contrastive translations"):
            ContrastiveFile(path).count()
    with pytest.raises(DataError, match="no file"):
        ContrastiveFile(tmp_path / "nowhere").count()


def test_a_pipe_is_refused_because_the_file_is_read_several_times(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"is a pipe, .* write it to a file"):
        ContrastiveFile(tmp_path / "pipe").count()
