"""The converted model computes what mtkit's does, and is converted once for the same weights."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mtkit.decoding.lexicon import Lexicon
from mtkit.runs import Run
from mtkit.text.tokenizer import BOS, BREAK, EOS
from mtkit.training.checkpoint import write_checkpoint
from tests.decoding.engines.plain import V, recipe_of, shifted_model
from tests.decoding.trained import make_run

pytestmark = pytest.mark.peer
ctranslate2 = pytest.importorskip("ctranslate2")


@pytest.mark.parametrize(
    ("attention", "options", "changes"),
    [
        ("full", {}, {}),
        ("full", {}, {"norm": "post"}),
        ("full", {}, {"activation": "gelu"}),
        ("full", {}, {"activation": "swiglu"}),
        ("full", {}, {"positions": "none"}),
        ("full", {}, {"positions": "learned"}),
        ("full", {}, {"positions": "sinusoidal-cat"}),
        ("full", {}, {"tie": "none"}),
        ("full", {}, {"tie": "decoder"}),
        ("multi-query", {}, {}),
        ("grouped-query", {}, {}),
        ("full", {"encoder.projection": "grouped-query", "decoder.projection": "multi-query"}, {}),
        ("grouped-query", {"cross.kv_heads": 1}, {}),
        ("full", {"positions": "rotary"}, {"positions": "none"}),
        ("full", {"positions": {"name": "rotary", "half": True}}, {"positions": "none"}),
        ("full", {"decoder.positions": "rotary"}, {"positions": "none"}),
        ("multi-query", {"positions": "rotary"}, {"positions": "none"}),
        ("multi-query", {"positions": "rotary"}, {"positions": "none", "d_model": 20}),
    ],
    ids=str,
)
def test_it_gives_the_same_probabilities(
    attention: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    from mtkit.decoding.engines.ctranslate2_conversion import convert, token

    model = shifted_model(recipe_of(attention, options, **changes))
    convert(model, tmp_path / "model")
    source, target = [5, 9, 30, 7, EOS], [8, 21, 6, 33]
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    (scored,) = translator.score_batch([list(map(token, source))], [list(map(token, target))])
    with torch.no_grad():
        hidden = model(torch.tensor([source]), torch.tensor([[BOS, *target]])).hidden[0]
        log_probs = (hidden @ model.output_weight.T).log_softmax(-1)
    expected = log_probs[range(5), [*target, EOS]]
    torch.testing.assert_close(torch.tensor(scored.log_probs), expected, atol=1e-4, rtol=1e-4)


def test_its_names_of_pieces_go_both_ways() -> None:
    from mtkit.decoding.engines.ctranslate2_conversion import piece, token

    assert [piece(token(each)) for each in range(V)] == list(range(V))
    assert len({token(each) for each in range(V)}) == V


def test_its_vocabulary_map_lets_come_what_a_shortlist_does(tmp_path: Path) -> None:
    from mtkit.decoding.engines.ctranslate2_conversion import convert, piece, token, vocabulary_map

    convert(shifted_model(recipe_of()), tmp_path / "model")
    translations = torch.zeros(V, 3, dtype=torch.int32)
    translations[5], translations[9] = torch.tensor([5, 20, 21]), torch.tensor([9, 22, 0])
    lexicon = Lexicon(translations, torch.tensor([30, 31], dtype=torch.int32))
    (tmp_path / "model" / "vmap.txt").write_text(vocabulary_map(lexicon.cut(1)))
    translator = ctranslate2.Translator(str(tmp_path / "model"), compute_type="float32", intra_threads=1)
    source = [[token(each) for each in (5, 9, EOS)]]
    # At this temperature every piece that may come is about as likely as another, so that 40 hypotheses hold them all.
    drawing = {"sampling_topk": 0, "sampling_temperature": 100, "num_hypotheses": 40, "max_decoding_length": 20}
    free, short = (
        translator.translate_batch(source, beam_size=1, use_vmap=each, **drawing)[0].hypotheses
        for each in (False, True)
    )
    may = set(lexicon.cut(1).shortlist(torch.tensor([[5, 9, EOS]])).tolist())
    assert set(range(BREAK + 1)) <= may
    assert {piece(name) for each in short for name in each} == may - {EOS}
    assert not {piece(name) for each in free for name in each} <= may


CHECKPOINT = "update-00000010"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return make_run(tmp_path).run


def there(run: Run) -> list[Path]:
    return sorted((run.folder / "ctranslate2").iterdir())


def converted(run: Run, checkpoint: str = CHECKPOINT, say: list[str] | None = None) -> dict[str, bytes]:
    from mtkit.decoding.engines import ctranslate2_conversion

    return ctranslate2_conversion.converted(
        run, checkpoint, run.load_model(checkpoint), say=[].append if say is None else say.append
    )


def other_weights(run: Run, checkpoint: str = CHECKPOINT) -> None:
    path = run.weights(checkpoint)
    write_checkpoint(path.parent, {"model": {name: value + 1.0 for name, value in load_file(path).items()}}, {})


def test_a_model_is_converted_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from mtkit.decoding.engines import ctranslate2_conversion

    first = converted(run)
    assert "model.bin" in first
    (folder,) = there(run)
    assert folder.name.startswith(f"{CHECKPOINT}-")
    monkeypatch.setattr(ctranslate2_conversion, "convert", None)
    assert converted(run) == first


def test_other_weights_are_converted_anew_and_what_is_stale_goes(run: Run) -> None:
    first = converted(run)
    checkpoints = run.folder / "checkpoints"
    another = checkpoints / "update-00000020"
    write_checkpoint(another, {"model": load_file(run.weights(CHECKPOINT))}, {})
    assert converted(run, another.name)["model.bin"] == first["model.bin"]
    assert len(there(run)) == 2
    other_weights(run)
    assert converted(run)["model.bin"] != first["model.bin"]
    assert len(there(run)) == 2  # those of the same checkpoint have been replaced
    shutil.rmtree(another)
    other_weights(run)
    converted(run)
    assert [each.name.rpartition("-")[0] for each in there(run)] == [CHECKPOINT]


def test_two_processes_and_a_removed_folder_do_no_harm(run: Run) -> None:
    first = converted(run)
    (folder,) = there(run)
    (folder / "model.bin").unlink()  # as another process does that takes it for stale
    assert converted(run) == first
    begun = folder.parent / ".update-00000010-0.0123456789abcdef.tmp"
    begun.mkdir()  # another process is writing
    other_weights(run)
    converted(run)
    assert begun in there(run)


@pytest.mark.parametrize("name", ["model.bin", "config.json", "shared_vocabulary.json", "sha256.json"])
def test_a_damaged_conversion_is_made_anew(run: Run, name: str) -> None:
    first, said = converted(run), list[str]()
    (folder,) = there(run)
    for content in (b"", b"[]", first["model.bin"][:-1]):
        (folder / name).write_bytes(content)
        assert converted(run, say=said) == first
    assert len(said) == 3
    assert f"{folder} is damaged" in said[0]
    assert converted(run, say=said) == first
    assert len(said) == 3


@pytest.mark.skipif(os.geteuid() == 0, reason="the root user writes anywhere")
def test_a_run_that_cannot_be_written_to_is_converted_each_time(run: Run) -> None:
    run.folder.chmod(0o500)
    said: list[str] = []
    try:
        assert converted(run, say=said) == converted(run)
    finally:
        run.folder.chmod(0o700)
    assert "converted again next time" in said[0]


def test_where_a_file_is_in_the_way_the_model_is_converted_each_time(run: Run) -> None:
    (run.folder / "ctranslate2").write_text("")
    said: list[str] = []
    assert "model.bin" in converted(run, say=said)
    assert "converted again next time" in said[0]


def test_a_moving_average_is_what_is_converted(run: Run) -> None:
    first = converted(run)
    path = run.weights(CHECKPOINT)
    weights = load_file(path)
    averaged = {name: torch.zeros_like(value) for name, value in weights.items()}
    write_checkpoint(path.parent, {"model": weights, "ema": averaged}, {})
    assert converted(run)["model.bin"] != first["model.bin"]


def test_only_conversions_are_removed_and_none_through_a_link(run: Run) -> None:
    converted(run)
    (old,) = there(run)
    named = old.with_name("update-00000005-0123456789abcdef")
    for folder in (old.with_name("my-thesis"), named):
        folder.mkdir()
        (folder / "thesis.tex").write_text("years of work")
    other_weights(run)
    converted(run)
    assert {each.name for each in there(run)} >= {"my-thesis", named.name}
    assert not old.exists()
    home = run.folder / "home"
    (run.folder / "ctranslate2").rename(home)
    (run.folder / "ctranslate2").symlink_to(home)
    before, said = sorted(home.rglob("*")), list[str]()
    other_weights(run)
    converted(run, say=said)
    assert sorted(home.rglob("*")) == before
    assert "ctranslate2 is a link, and mtkit writes only real files" in said[0]
