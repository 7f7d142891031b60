"""An output file replaces no file that is needed."""

from pathlib import Path

import pytest

from mtkit.errors import MtkitError
from mtkit.storage.outputs import OTHER_COMPRESSION, check_outputs


@pytest.mark.parametrize("end", OTHER_COMPRESSION)
def test_a_name_of_another_compression_is_refused(end: str, tmp_path: Path) -> None:
    with pytest.raises(MtkitError, match=rf"out\.de\{end} would not be compressed: mtkit writes plain files and \.gz"):
        check_outputs([tmp_path / f"out.de{end}"])
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_is_read_is_refused(tmp_path: Path) -> None:
    text, link, out = tmp_path / "text", tmp_path / "link", tmp_path / "out"
    text.write_text("words")
    link.symlink_to(text)
    for output in (text, link, tmp_path / "." / "text"):
        with pytest.raises(MtkitError, match=r"would replace .*text, which is read"):
            check_outputs([out, output], [text])
    for end in (".partial", ".partial.jsonl", ".partial.lock"):
        with pytest.raises(MtkitError, match="which is read"):
            check_outputs([out], [tmp_path / f"out{end}"])
        with pytest.raises(MtkitError, match="cannot hold two outputs"):
            check_outputs([out, tmp_path / f"out{end}"])
    with pytest.raises(MtkitError, match="cannot hold two outputs"):
        check_outputs([text, link])
    check_outputs([out, Path("/dev/null"), Path("/dev/null")], [text, Path("/dev/null")])
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "text"]


@pytest.mark.parametrize(
    ("record", "path", "kept"),
    [
        ("run.json", "run.json", True),
        ("run.json", "checkpoints/update-00000001/model.safetensors", True),
        ("run.json", "translations/test.txt", True),
        ("run.json", "translations/test.json", True),
        ("run.json", "translations/testing.txt", False),
        ("run.json", "my.txt", False),
        ("prepared.json", "train.arrow", True),
        ("other.json", "run.json", False),
    ],
)
def test_an_output_that_is_a_file_of_a_run_is_refused(tmp_path: Path, record: str, path: str, kept: bool) -> None:
    (tmp_path / "run" / "translations").mkdir(parents=True)
    for name in (record, "translations/test.json"):
        (tmp_path / "run" / name).write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "run" / path)
    for output in (tmp_path / "run" / path, tmp_path / "link"):
        if kept:
            with pytest.raises(MtkitError, match=f"{output} is a file that mtkit keeps in .*run; give"):
                check_outputs([output])
        else:
            check_outputs([output])
