"""Parts of a file: each line in one of them, and a join that leaves none out."""

import json
import os
from pathlib import Path

import pytest

from mtkit.decoding.lines.parts import begin_part, join_parts, part_lines
from mtkit.errors import DataError, MtkitError
from mtkit.storage.jobs import Part
from mtkit.text.text_files import Lines, Span
from tests.damage import WRONG, check_damages

TEXTS = [
    b"",
    b"\n",
    b"a\nb\n",
    b"a\nb",
    b"\n\n\nlong line, longer than its part\n\nx",
    "犬が木を見る。猫。\n\n\u2028a\u2029\x85\r\n字\r\n".encode(),
    "\ufeffa\n\ufeffb\n".encode(),
]


def translate(source: Path, out: Path, part: Part, about: object = 1) -> bool:
    """Each line of a part, numbered."""
    span = part_lines(source, part)
    if not begin_part(part, source, span, [out], {"about": about}):
        return False
    lines = [f"{number} {line}\n" for number, line in enumerate(Lines(source, span=span), start=span.before)]
    part.output(out).write_text("".join(lines), newline="")
    return True


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes("".join(f"line {number} 木\n" for number in range(20)).encode())
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
@pytest.mark.parametrize("parts", [1, 2, 3, 7, 60])
def test_each_line_is_in_the_part_where_it_begins(tmp_path: Path, out: Path, text: bytes, parts: int) -> None:
    source = tmp_path / "text"
    source.write_bytes(text)
    lines = text.split(b"\n")[: -1 if text.endswith(b"\n") or not text else None]
    begins = [sum(len(line) + 1 for line in lines[:number]) for number in range(len(lines))]
    for number in range(1, parts + 1):
        low, high = len(text) * (number - 1) // parts, len(text) * number // parts
        own = [place for place, begin in enumerate(begins) if low <= begin < high]
        span = part_lines(source, Part(number, parts))
        assert list(Lines(source, span=span)) == [list(Lines(source))[place] for place in own]
        if own:
            assert span.before == own[0]
        assert translate(source, out, Part(number, parts))
    assert join_parts(source, [out]) == (parts, len(lines))
    assert out.read_bytes().decode() == "".join(f"{at} {line}\n" for at, line in enumerate(Lines(source)))


def test_a_span_ends_where_a_block_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"aa\nbb\ncc\ndd\n")
    for size in range(1, 8):
        monkeypatch.setattr("mtkit.text.text_files._BLOCK", size)
        assert list(Lines(path, span=Span(3, 9, 1))) == ["bb", "cc"]


def test_a_finished_part_is_not_made_again_unless_of_something_else(source: Path, out: Path) -> None:
    part = Part(2, 3)
    assert translate(source, out, part)
    assert not translate(source, out, part)
    assert translate(source, out, part, about=2)
    source.write_bytes(source.read_bytes().replace(b"line 9", b"l1ne 9"))
    assert translate(source, out, part, about=2)
    part.output(out).unlink()
    assert translate(source, out, part, about=2)
    part.record(out).write_text("{")
    assert translate(source, out, part, about=2)


def test_a_part_without_one_of_its_outputs_is_made_again(source: Path, out: Path) -> None:
    part, outputs = Part(2, 3), [out, out.with_name("links")]
    span = part_lines(source, part)

    def begins() -> bool:
        return begin_part(part, source, span, outputs, {"about": 1})

    assert begins()
    for missing in (*outputs, None):
        for output in outputs:
            part.output(output).unlink(missing_ok=True)
            if output != missing:
                part.output(output).touch()
        assert begins() == (missing is not None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("missing", "of 3 parts of .*, 1 are missing or not finished: 2; translate with --part 2/3"),
        ("about", "part 2/3 was made with another model or other settings"),
        ("short", "out.part-2-of-3 has 6 lines, and its part of .* 7"),
        ("text", "part 2/3 was made of other text"),
        ("longer", "has grown"),
        ("record", r"out.part-2-of-3.json is damaged \(.*\); translate that part again with --part 2/3"),
        ("division", "has parts of 3 and of 4"),
    ],
)
def test_a_join_names_what_is_wrong_and_writes_nothing(source: Path, out: Path, wrong: str, message: str) -> None:
    for number in (1, 2, 3):
        translate(source, out, Part(number, 3))
    second = Part(2, 3).output(out)
    if wrong == "missing":
        second.unlink()
    elif wrong == "about":
        translate(source, out, Part(2, 3), about=2)
    elif wrong == "short":
        second.write_bytes(b"".join(second.read_bytes().splitlines(keepends=True)[:-1]))
    elif wrong == "text":
        source.write_bytes(source.read_bytes().replace(b"line 9", b"l1ne 9"))
    elif wrong == "longer":
        with source.open("ab") as file:
            file.write(b"more\n")
    elif wrong == "record":
        Part(2, 3).record(out).write_text("{}")
    else:
        translate(source, out, Part(1, 4))
    with pytest.raises(DataError, match=message) as raised:
        join_parts(source, [out])
    assert "\n" not in str(raised.value)
    assert not out.exists()


def test_a_damaged_record_of_a_part_is_named_and_replaced(source: Path, out: Path) -> None:
    for number in (1, 2, 3):
        translate(source, out, Part(number, 3))
    record = Part(2, 3).record(out)
    whole = record.read_bytes()
    assert check_damages(record, lambda: join_parts(source, [out]), names=Path("part 2/3")) > 40
    for wrong in WRONG:
        record.write_text(json.dumps(json.loads(whole) | {"begin": wrong}))
        assert translate(source, out, Part(2, 3))
        assert record.read_bytes() == whole


def test_what_cannot_be_parted_is_named(tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(b"")
    with pytest.raises(DataError, match="gunzip"):
        part_lines(tmp_path / "text.gz", Part(1, 2))
    with pytest.raises(DataError, match="no file"):
        part_lines(tmp_path / "nowhere", Part(1, 2))
    for name in ("0/2", "3/2", "2", "a/b", "1/2/3", "-1/2"):
        with pytest.raises(MtkitError, match="the second of eight is --part 2/8"):
            Part.named(name)
    assert str(Part.named("2/8")) == "2/8"


@pytest.mark.parametrize("name", ["out.part-2-of-3", "out.part-2-of-3.json"])
@pytest.mark.parametrize("kind", ["text", "link", "pipe"])
def test_what_mtkit_did_not_write_stays(source: Path, out: Path, name: str, kind: str) -> None:
    theirs, kept = out.with_name(name), out.with_name("kept")
    kept.write_text("years of work\n")
    if kind == "text":
        theirs.write_text("years of work\n")
    elif kind == "link":
        theirs.symlink_to(kept)
    else:
        os.mkfifo(theirs)
    with pytest.raises(MtkitError, match=f"{name} .*(move it away|remove it)$"):
        translate(source, out, Part(2, 3))
    assert theirs.is_fifo() or theirs.read_text() == "years of work\n"
    assert kept.read_text() == "years of work\n"
