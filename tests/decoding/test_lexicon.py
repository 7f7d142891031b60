"""Lexicons, by Model 1's equations written as loops, and what shortlists made of them let come."""

import errno
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.decoding import ibm_model_1
from mtkit.decoding import lexicon as module
from mtkit.decoding.engines.model_engine import SEARCHES, Ensemble, ModelEngine
from mtkit.decoding.files import translate_side
from mtkit.decoding.held_out import held_out
from mtkit.decoding.ibm_model_1 import ITERATIONS
from mtkit.decoding.lexicon import (
    FILE,
    Lexicon,
    learn_lexicon,
    load_lexicon,
    save_lexicon,
    training_text,
)
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.translation import Translation
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError, RunError
from mtkit.model.network import Model
from mtkit.model.transformer import Transformer
from mtkit.recipe import DecodingSettings, make_recipe
from mtkit.text.tokenizer import BREAK, EOS, PAD, Tokenizers
from tests.decoding.tiny import batch_of, random_sources
from tests.decoding.trained import Trained, make_run, sentences

FEW = 6
"""Frequent pieces, so that there are rare ones in a small vocabulary."""


@pytest.fixture(autouse=True)
def _few_are_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FREQUENT", FEW)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"))


def apart(folder: Path, lines: Sequence[str] | None = None) -> Prepared:
    """Prepared data with a vocabulary for each side, which have some pieces in common."""
    folder.mkdir()
    lines = lines or sentences(80, seed=3)
    (folder / "source").write_text("".join(f"{line}\n" for line in lines))
    (folder / "target").write_text("".join(f"{line[::-1]}\n" for line in lines))
    corpora = [{"source": str(folder / "source"), "target": str(folder / "target")}]
    tokenizer, cleaning = {"vocabulary": 320, "joint": False}, {"overlap": False}
    recipe = make_recipe(
        {
            "data": {
                "folder": str(folder / "data"),
                "train": corpora,
                "valid": corpora,
                "tokenizer": tokenizer,
                "cleaning": cleaning,
            }
        }
    )
    prepare(recipe.data)
    return open_prepared(recipe.data.folder)


def model_1(prepared: Prepared) -> dict[int, dict[int, float]]:
    """t(y | x) of all training pairs, as {x: {y: t}}."""
    side = prepared.train
    pairs = [
        ([*side.source[row].tolist(), EOS], side.target[row].tolist())  # EOS is the paper's empty word
        for row in range(len(side))
    ]
    likely: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(ITERATIONS):
        counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for xs, ys in pairs:
            for y in ys:
                total = sum(likely[x][y] for x in xs)
                for x in xs:
                    counts[x][y] += likely[x][y] / total
        likely = {x: {y: count / sum(its.values()) for y, count in its.items()} for x, its in counts.items()}
    return likely


@pytest.mark.parametrize("joint", [True, False])
def test_translations_are_the_likeliest_by_model_1(trained: Trained, tmp_path: Path, joint: bool) -> None:
    prepared = trained.prepared if joint else apart(tmp_path / "apart")
    found, expected = learn_lexicon(prepared), model_1(prepared)
    frequent = found.frequent.tolist()
    for x in range(prepared.tokenizers.source.size):
        row = found.translations[x, 1:].tolist()
        given = [y for y in row if y != PAD]
        assert row == given + [PAD] * (len(row) - len(given))
        its = {y: likely for y, likely in expected.get(x, {}).items() if y not in frequent}
        assert len(given) == len(set(given)) == min(len(its), module.MOST)
        best = sorted(its.values(), reverse=True)[: len(given)]
        np.testing.assert_allclose([its[y] for y in given], best, rtol=1e-9)


def test_the_frequent_ones_are_counted(trained: Trained) -> None:
    side = trained.prepared.train
    counts = np.bincount(np.concatenate([side.target[row] for row in range(len(side))]))
    found = learn_lexicon(trained.prepared).frequent.tolist()
    assert [counts[piece] for piece in found] == sorted(counts, reverse=True)[:FEW]


def test_names_have_the_piece_that_is_spelt_the_same(tmp_path: Path) -> None:
    prepared = apart(tmp_path / "apart")
    source, target = prepared.tokenizers.source, prepared.tokenizers.target
    names = {target.piece(y): y for y in range(target.size)}
    same = learn_lexicon(prepared).translations[:, 0].tolist()
    assert same == [names.get(source.piece(x), PAD) for x in range(source.size)]
    assert PAD in same[BREAK + 1 :]
    assert any(x != y != PAD for x, y in enumerate(same))


def test_of_much_text_every_nth_pair_is_learned_from(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    side = trained.prepared.train
    cells = (side.source.lengths.astype(int) + 1) * side.target.lengths
    monkeypatch.setattr(ibm_model_1, "CELLS", int(cells.sum()) - 1)
    counts = np.bincount(np.concatenate([side.target[row] for row in range(0, len(side), 2)]))
    found = learn_lexicon(trained.prepared).frequent.tolist()
    assert [counts[piece] for piece in found] == sorted(counts, reverse=True)[:FEW]


def test_a_shortlist_has_what_may_come() -> None:
    lexicon = Lexicon(
        translations=torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 30, 31], [0, 0, 0], [5, 20, 21], [6, 22, PAD]]),
        frequent=torch.tensor([12, 11], dtype=torch.int32),
    )
    always = [*range(BREAK + 1), 11, 12]
    assert lexicon.cut(1).shortlist(torch.tensor([[5, EOS], [EOS, PAD]])).tolist() == sorted([*always, 5, 20, 30])
    assert lexicon.shortlist(torch.tensor([[6, 5, EOS]])).tolist() == sorted([*always, 5, 6, 20, 21, 22, 30, 31])
    assert (lexicon.each, lexicon.cut(1).each, lexicon.cut(7).each) == (2, 1, 2)


def test_names_can_be_copied_between_separate_vocabularies(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    lines = [" ".join("".join(draw.choice(["ba", "na", "da"], 3)) for _ in range(5)) for _ in range(80)]
    prepared = apart(tmp_path / "apart", lines)
    source, target = prepared.tokenizers.source, prepared.tokenizers.target
    lexicon = learn_lexicon(prepared).cut(1)
    names = ["nabanadaba", "abanabad", "Ωμέγα"]
    rows = [torch.tensor([*source.encode(f"bana {name}."), EOS]) for name in names]
    for may_copy in (lexicon, replace(lexicon, separate=None)):
        alone = [set(may_copy.shortlist(row[None]).tolist()) for row in rows]
        copied = [set(target.encode(name)) <= pieces for name, pieces in zip(names, alone, strict=True)]
        assert all(copied) == (may_copy is lexicon)
    together = lexicon.shortlist(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)).tolist()
    assert {piece for name in names for piece in target.encode(name)} <= set(together)


def test_ctranslate2_leaves_shortlists_of_separate_vocabularies_to_the_own_search(trained: Trained) -> None:
    pytest.importorskip("ctranslate2")
    lexicon, said = replace(learn_lexicon(trained.prepared).cut(2), separate=trained.run.tokenizers), list[str]()
    translator = Translator([trained.run], DecodingSettings(), engine="auto")
    assert translator.engine.program != "mtkit"
    translator.shorten(lexicon, said.append)
    assert translator.engine.program == "mtkit"
    assert translator.about["engine"] == "mtkit"
    assert ["separate vocabularies" in each for each in said] == [True]
    with pytest.raises(MtkitError, match="--engine ctranslate2 cannot copy names"):
        Translator([trained.run], DecodingSettings(), engine="ctranslate2").shorten(lexicon)


def mask(model: Transformer, pieces: Tensor) -> None:
    """Let no piece outside `pieces` come, in the slow and plain way."""
    never = torch.ones(len(model.output_weight), dtype=torch.bool)
    never[pieces] = False
    model.__dict__["logits"] = lambda hidden: Transformer.logits(model, hidden).masked_fill(never, -torch.inf)


@torch.no_grad()
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {"method": "greedy"},
        {"method": "beam", "beam": 4, "no_repeat_ngram": 2},
        {"method": "beam", "beam": 3, "coverage_penalty": 0.3},
        {"method": "sample", "n_best": 3, "top_p": 0.9},
    ],
)
def test_searches_find_what_they_find_where_no_other_piece_is_likely(
    trained: Trained, tmp_path: Path, settings: dict[str, object], several: bool
) -> None:
    runs = [trained.run, make_run(tmp_path / "two", seed=2).run] if several else [trained.run]
    networks = [run.load_model() for run in runs]
    model: Model = Ensemble(networks) if several else networks[0]
    chosen = DecodingSettings.model_validate(settings)
    size = trained.prepared.tokenizers.target.size
    batch = batch_of(random_sources(9, seed=1, vocabulary=size), 12)
    pieces = torch.cat([torch.arange(BREAK + 1), torch.arange(BREAK + 1, size, 7)])
    found = SEARCHES[chosen.method](model, replace(batch, pieces=pieces), chosen).with_ids(pieces)
    for network in networks:
        mask(network, pieces)
    expected = SEARCHES[chosen.method](model, batch, chosen)
    assert found.pieces.tolist() == expected.pieces.tolist()
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.pieces.max() > len(pieces)  # ids, not places


def test_lines_hold_only_what_is_on_the_shortlist_of_their_batch(trained: Trained) -> None:
    model, tokenizers, lines = trained.run.load_model(), trained.run.tokenizers, sentences(12, seed=5)
    lexicon, settings = learn_lexicon(trained.prepared).cut(2), DecodingSettings()
    engine = ModelEngine(model, settings, lexicon=lexicon)
    found = translate_lines(engine, tokenizers, lines)
    assert only_of(lexicon, tokenizers, lines, found)
    assert not only_of(lexicon, tokenizers, lines, translate_lines(replace(engine, lexicon=None), tokenizers, lines))


def test_a_translator_shortens_lines_and_sides(trained: Trained) -> None:
    translator, side = Translator([trained.run], DecodingSettings()), held_out(trained.prepared)
    assert translator.about["shortlist"] is None
    lexicon, tokenizers = learn_lexicon(trained.prepared).cut(2), trained.run.tokenizers
    assert not only_of(lexicon, tokenizers, side.sources, translator.translate(side.sources))
    translator.shorten(lexicon)
    for found in (translator.translate(side.sources), translate_side(translator, side, joined=False)[0]):
        assert only_of(lexicon, tokenizers, side.sources, found)
    assert translator.about["shortlist"] == 2


def only_of(
    lexicon: Lexicon, tokenizers: Tokenizers, lines: Sequence[str], found: Sequence[Sequence[Translation]]
) -> bool:
    """Whether all pieces of the translations are on the shortlist of all lines."""
    source = [torch.tensor([*tokenizers.source.encode(line), EOS]) for line in lines]
    may = lexicon.shortlist(torch.cat(source)).tolist()
    return {piece for best, *_ in found for piece in best.pieces} <= set(may)


def test_pairs_that_are_too_long_are_left_out(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    side = trained.prepared.train
    longest = np.maximum(side.source.lengths, side.target.lengths)
    limit = int(np.median(longest))
    monkeypatch.setattr(ibm_model_1, "LONGEST", limit)
    counts = np.bincount(np.concatenate([side.target[row] for row in np.flatnonzero(longest <= limit)]))
    found = learn_lexicon(trained.prepared).frequent.tolist()
    assert [counts[piece] for piece in found] == sorted(counts, reverse=True)[:FEW]
    monkeypatch.setattr(ibm_model_1, "LONGEST", 1)
    with pytest.raises(DataError, match="too long to learn a lexicon from"):
        learn_lexicon(trained.prepared)


def test_a_run_keeps_its_lexicon(trained: Trained, tmp_path: Path) -> None:
    run, told = make_run(tmp_path / "one").run, []
    assert load_lexicon(run) is None
    with pytest.raises(MtkitError, match=r"no prepared data in .*nowhere.*--data"):
        training_text(run, tmp_path / "nowhere")
    with pytest.raises(MtkitError, match=r"other pieces.*--data"):
        training_text(run, apart(tmp_path / "apart").folder)
    learned = learn_lexicon(
        training_text(run, tmp_path / "one" / "mtkit-data"),
        lambda items, what, total: told.append((what, total)) or items,
    )
    assert told == [("learning the lexicon", ITERATIONS)]
    save_lexicon(run, learned)
    again = load_lexicon(run)
    assert again is not None
    assert again.fingerprint == learned.fingerprint != learned.cut(1).fingerprint
    assert torch.equal(learned.translations, again.translations)
    assert torch.equal(learned.frequent, again.frequent)


@pytest.mark.parametrize("damage", ["half", "other names", "other shape"])
def test_a_damaged_lexicon_is_named(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path / "one").run
    path, table = run.folder / FILE, torch.zeros(3, 2, dtype=torch.int32)
    if damage == "half":
        path.write_bytes(b"half")
    else:
        save_file({"translations": table, "frequent" if damage == "other shape" else "often": table[0].clone()}, path)
    with pytest.raises(RunError, match=f"{FILE} is damaged.*delete it"):
        load_lexicon(run)


def test_a_lexicon_of_another_account_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: Path, mode: str = "r") -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    run = make_run(tmp_path / "one").run
    (run.folder / FILE).touch()
    monkeypatch.setattr(Path, "open", denied)  # the root user reads anything
    with pytest.raises(RunError, match=f"cannot read .*{FILE}: Permission denied; "):
        load_lexicon(run)


def test_a_shortlist_and_its_length_decide_a_translation(trained: Trained) -> None:
    def identity(lexicon: Lexicon | None) -> dict[str, object]:
        translator = Translator([trained.run], DecodingSettings())
        if lexicon is not None:
            translator.shorten(lexicon)
        return translator.identity

    lexicon = learn_lexicon(trained.prepared)
    assert identity(lexicon) != identity(lexicon.cut(5))
    assert identity(lexicon) != identity(None)
