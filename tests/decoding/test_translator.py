"""Runs loaded to translate: what they must share, and what tells two translations apart."""

import json
from pathlib import Path

import pytest
import torch

from mtkit.data.lengths import lengths_of
from mtkit.decoding.files import translate_side
from mtkit.decoding.glossary import Glossary
from mtkit.decoding.held_out import held_out
from mtkit.decoding.lexicon import Lexicon
from mtkit.decoding.lines.documents import document_pieces, joins_documents
from mtkit.decoding.lines.segments import Source
from mtkit.decoding.lines.source import TrainedOn
from mtkit.decoding.translator import Translator
from mtkit.errors import MtkitError, RunError
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import PAD
from tests.decoding.trained import LONGEST, Trained, make_run, sentences, three_threads


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"), directions=("en-de", "en-fr"), documents=20)


def twin(run: Run, folder: Path, **about: object) -> Run:
    """A copy of a run that says something else of itself."""
    folder.mkdir()
    for name in ("checkpoints", "tokenizer", "recipe.yaml"):
        (folder / name).symlink_to(run.folder / name)
    (folder / "run.json").write_text(json.dumps(run.about | about))
    return Run(folder)


def test_runs_of_an_ensemble_know_the_same_pieces_and_directions(trained: Trained, tmp_path: Path) -> None:
    settings = DecodingSettings()
    assert len(Translator([trained.run, twin(trained.run, tmp_path / "two")], settings).runs) == 2
    with pytest.raises(MtkitError, match="same directions"):
        Translator([trained.run, twin(trained.run, tmp_path / "other", directions=["en-de"])], settings)
    with pytest.raises(MtkitError, match="different tokenizers"):
        Translator([trained.run, make_run(tmp_path / "three").run], settings)


def test_lines_are_joined_where_all_runs_can(trained: Trained, tmp_path: Path) -> None:
    budget = trained.run.document_pieces
    assert budget is not None
    less, none = (twin(trained.run, tmp_path / str(pieces), document_pieces=pieces) for pieces in (budget - 5, None))
    assert document_pieces([trained.run, less]) == budget - 5
    assert document_pieces([trained.run, none]) is None


def test_lines_and_sides_get_the_same(trained: Trained) -> None:
    translator = Translator([trained.run], DecodingSettings(method="greedy"))
    side = held_out(trained.prepared)
    assert side.documents is not None
    found, _, path = translate_side(translator, side, joined=True)
    lines = translator.source(side.sources[7:], direction="en-fr", documents=side.documents.ids[7:])
    french = translator.translate(lines)
    assert [each[0].text for each in found[7:]] == [each[0].text for each in french]
    assert [each[0].together for each in found[7:]] == [each[0].together for each in french]
    assert any(each[0].together > 1 for each in french)
    assert path.read_text() == "".join(f"{each[0].text}\n" for each in found)
    alone, _, _ = translate_side(translator, side, joined=False)
    assert not any(each[0].together > 1 for each in alone)


def test_the_settings_can_join_more_lines_than_training(trained: Trained) -> None:
    usual = Translator([trained.run], DecodingSettings(method="greedy"))
    wide = usual.with_settings(DecodingSettings(method="greedy", document_pieces=LONGEST - 1, context=1))
    assert usual.document_pieces == trained.run.document_pieces < LONGEST - 1 == wide.document_pieces
    lines = sentences(12, 4)

    def windows(translator: Translator) -> list[list[int]]:
        text = translator.source(lines, direction="en-fr", documents=[1] * 12)
        return [window.lines for window in Source(text, trained.prepared.tokenizers.source, LONGEST).windows()]

    narrow = usual.with_settings(DecodingSettings(method="greedy", document_pieces=12))
    assert max(map(len, windows(narrow))) < max(map(len, windows(usual)))
    assert all(
        len(window) == 1 for window in windows(usual.with_settings(DecodingSettings(document_pieces=1))) or [[0]]
    )
    limits = (usual.context_limits("en-fr"), wide.context_limits("en-fr"))
    assert [limit and limit.pieces for limit in limits] == [20, LONGEST - 1]
    side = held_out(trained.prepared).lines(wide.settings).documents  # as validation in training joins them
    assert side is not None
    assert (side.pieces, side.context) == (LONGEST - 1, 1)
    with pytest.raises(MtkitError, match=rf"document_pieces = {LONGEST} .* give at most {LONGEST - 1}"):
        usual.with_settings(DecodingSettings(document_pieces=LONGEST))
    with pytest.raises(MtkitError, match=rf"document_pieces = {LONGEST} "):
        Translator([trained.run], DecodingSettings(document_pieces=LONGEST))
    with pytest.raises(MtkitError, match="document_pieces = 9 is for lines of a document: leave out --sentences"):
        joins_documents([trained.run], False, DecodingSettings(document_pieces=9), say=print)


def test_what_decides_a_translation_is_its_identity(trained: Trained, tmp_path: Path) -> None:
    one = Translator([trained.run], DecodingSettings()).identity
    assert Translator([twin(trained.run, tmp_path / "moved")], DecodingSettings()).identity == one
    assert Translator([trained.run], DecodingSettings(beam=2)).identity != one
    lengths = {name: each.model_dump(mode="json") for name, each in lengths_of(trained.prepared, 24).items()}
    assert Translator([twin(trained.run, tmp_path / "new", lengths=lengths)], DecodingSettings()).identity != one
    assert Translator([trained.run], DecodingSettings(batch_tokens=50)).identity == one
    with three_threads():
        assert Translator([trained.run], DecodingSettings()).identity == one
    assert Translator([trained.run], DecodingSettings(), dtype="bfloat16").identity != one
    other = make_run(tmp_path / "other", directions=("en-de", "en-fr"), documents=20, seed=2).run
    assert Translator([other], DecodingSettings()).identity != one


def test_a_checkpoint_that_a_training_drops_is_still_known(tmp_path: Path) -> None:
    run = make_run(tmp_path).run
    translator = Translator([run], DecodingSettings(method="greedy"))
    before = translator.identity
    for each in (run.folder / "checkpoints").glob("*/model.safetensors"):
        each.unlink()
    assert translator.identity == before
    assert len(translator.translate(sentences(2, 1))) == 2


def test_an_ensemble_knows_its_training_pairs_where_all_do(trained: Trained, tmp_path: Path) -> None:
    lengths = {name: each.model_dump(mode="json") for name, each in lengths_of(trained.prepared, 24).items()}
    one, two = (twin(trained.run, tmp_path / name, lengths=lengths) for name in ("one", "two"))
    assert one.lengths == list(lengths_of(trained.prepared, 24).values())
    assert TrainedOn.of([one, two]).models == [one.lengths, two.lengths]
    assert TrainedOn.of([one, trained.run]) == TrainedOn()  # which has no lengths
    for damaged in ({"en-de": lengths["en-de"]}, {"en-de": 3, "en-fr": 4}, [1]):
        with pytest.raises(RunError, match="lengths"):
            TrainedOn.of([twin(trained.run, tmp_path / f"damaged {len(str(damaged))}", lengths=damaged)])


def test_the_first_line_counts_for_sampling(trained: Trained) -> None:
    translator = Translator([trained.run], DecodingSettings(method="sample"))
    lines = sentences(6, seed=1)
    whole = translator.translate(lines, direction="en-de")
    rest, alone = (
        translator.translate(translator.source(lines[3:], direction="en-de", first=first)) for first in (3, 0)
    )
    assert [best.pieces for best, *_ in rest] == [best.pieces for best, *_ in whole[3:]]
    assert [best.pieces for best, *_ in alone] != [best.pieces for best, *_ in whole[3:]]


def test_weights_without_a_checksum_are_said_not_to_be_verified(tmp_path: Path) -> None:
    run, said = make_run(tmp_path).run, list[str]()
    Translator([run], say=said.append)
    assert said == []
    (run.checkpoint() / "state.json").unlink()
    Translator([run], say=said.append)
    assert said == [f"{run.weights()} was not verified: it has no state.json with its checksum"]


def test_what_does_not_combine_with_a_glossary_is_refused_before_and_after_it(trained: Trained) -> None:
    target, size = trained.run.tokenizers.target, trained.run.tokenizers.source.size
    glossary = Glossary([("dog", "bird", "entry 1")], target)
    lexicon = Lexicon(torch.full((size, 3), PAD, dtype=torch.int32), torch.arange(20, 30, dtype=torch.int32))
    first, then = (Translator([trained.run], DecodingSettings(beam=2)) for _ in range(2))
    first.require(glossary)
    then.shorten(lexicon)
    for call in (lambda: first.shorten(lexicon), lambda: then.require(glossary)):
        with pytest.raises(MtkitError, match="a shortlist leaves out pieces"):
            call()
    for settings, message in (
        (DecodingSettings(beam=2, no_repeat_ngram=1), "no_repeat_ngram = 1 may forbid a term"),
        (DecodingSettings(method="greedy"), "a glossary needs beam search"),
    ):
        with pytest.raises(MtkitError, match=message):
            first.with_settings(settings)
        with pytest.raises(MtkitError, match=message):
            Translator([trained.run], settings).require(glossary)
    ((best,),) = first.with_settings(DecodingSettings(beam=3)).translate(["The dog."], direction="en-de")
    assert (best.terms, best.missed) == (1, 0)


@pytest.mark.peer
def test_a_lexicon_stays_when_another_engine_takes_over(trained: Trained) -> None:
    pytest.importorskip("ctranslate2")
    translator = Translator([trained.run], DecodingSettings(beam=2), engine="auto")
    pieces = trained.run.tokenizers.source.size
    lexicon = Lexicon(torch.full((pieces, 3), PAD, dtype=torch.int32), torch.arange(20, 30, dtype=torch.int32))
    translator.shorten(lexicon)
    other = translator.with_settings(DecodingSettings(beam=2, no_repeat_ngram=2))
    assert (translator.about["engine"] != "mtkit", other.about["engine"]) == (True, "mtkit")
    assert other.engine.lexicon is lexicon
