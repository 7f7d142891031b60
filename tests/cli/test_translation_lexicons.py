"""`mtkit translate --shortlist`, as typed."""

from pathlib import Path

import pytest
import torch

from mtkit.decoding import lexicon
from mtkit.errors import MtkitError
from mtkit.text.tokenizer import EOS
from tests.cli.test_translate import lines_of, typed
from tests.decoding.trained import make_run


def test_a_shortlist_needs_a_lexicon_which_is_learned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path).run
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lexicon, "FREQUENT", 5)
    (tmp_path / "mtkit-data").rename(tmp_path / "elsewhere")
    plain = lines_of(typed("--input", "test.source"))
    given = ["--input", "test.source", "--shortlist", "1"]
    with pytest.raises(MtkitError, match=r"no prepared data in .*mtkit-data"):
        typed(*given)
    first = typed(*given, "--data", "elsewhere")
    assert "learned the lexicon from elsewhere" in first.stderr
    again = typed(*given)
    assert again.stdout == first.stdout
    assert "learned" not in again.stderr
    kept = lexicon.load_lexicon(run)
    assert kept is not None
    source = [
        torch.tensor([*run.tokenizers.source.encode(line), EOS])
        for line in Path("test.source").read_text().splitlines()
    ]
    may = "".join(map(run.tokenizers.target.piece, kept.cut(1).shortlist(torch.cat(source)).tolist()))
    assert set("".join(lines_of(first))) - {" "} <= set(may)
    assert lines_of(first) != plain
    with pytest.raises(MtkitError, match="--data applies to prepared data"):
        typed("--input", "test.source", "--data", "elsewhere")
    with pytest.raises(MtkitError, match="leave it out with --target"):
        typed(*given, "--target", "test.target")


def test_where_a_lexicon_cannot_be_kept_it_serves_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path)
    monkeypatch.chdir(tmp_path)

    def full(*_: object) -> None:
        raise MtkitError("cannot write lexicon.safetensors: No space left on device")

    monkeypatch.setattr(lexicon, "save_lexicon", full)
    result = typed("--input", "test.source", "--shortlist", "3")
    assert "No space left on device; the lexicon will be learned again next time" in result.stderr
    assert len(lines_of(result)) == 7
    assert not list(tmp_path.glob("mtkit-runs/*/lexicon*"))
