from pathlib import Path

from mtkit.data.encode import write_side
from mtkit.data.tokenizer import Tokenizers, train_tokenizer
from mtkit.data_settings import TokenizerSettings
from tests.data.conftest import WritePair


def test_what_is_written_is_counted(tmp_path: Path, write_pair: WritePair) -> None:
    tokenizer = train_tokenizer(tmp_path / "model", ["two dogs", "zwei Hunde"] * 20, TokenizerSettings())
    pair = write_pair("side", "two dogs\n\ndogs 日\n".encode(), b"zwei Hunde\nzwei\nHunde")
    tokenizers = Tokenizers(tokenizer, tokenizer)
    train = write_side(tmp_path, "train", pair, tokenizers, 3, lambda items, what, total: items)
    assert (train.lines, train.rows, train.empty) == (3, 2, 1)
    assert (train.words["source"], train.words["target"]) == (4, 3)
    assert train.bytes == {"source": 3, "target": 0}
    assert train.unknown == {"source": 0, "target": 0}
    valid = write_side(tmp_path, "valid", pair, tokenizers, 3, lambda items, what, total: items)
    assert (valid.rows, valid.empty, valid.words["target"]) == (3, 1, 4)


def test_progress_goes_through_every_line(tmp_path: Path, write_pair: WritePair) -> None:
    tokenizer = train_tokenizer(
        tmp_path / "model", ["two dogs see a house", "zwei Hunde sehen ein Haus"] * 20, TokenizerSettings()
    )
    shown = []

    def progress(items, what, total):  # type: ignore[no-untyped-def]
        for item in items:
            shown.append((what, total))
            yield item

    pair = write_pair("side", b"a\nb\nc\n", b"a\nb\nc\n")
    write_side(tmp_path, "valid", pair, Tokenizers(tokenizer, tokenizer), 3, progress)
    assert shown == [("encoding valid", 3)] * 3
