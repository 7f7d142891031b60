"""Lexicons, by Model 1's equations written as loops, and what shortlists made of them let come."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mtkit.data.prepare import prepare
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.data.tokenizer import BREAK, EOS, PAD
from mtkit.decoding import lexicon as module
from mtkit.decoding.ensemble import Ensemble
from mtkit.decoding.lexicon import FILE, ITERATIONS, Lexicon, learn, lexicon_of
from mtkit.decoding.search import Model
from mtkit.decoding.translate import SEARCHES, translate_lines
from mtkit.decoding.translator import Translator
from mtkit.errors import DataError, MtkitError, RunError
from mtkit.model.transformer import Transformer
from mtkit.recipe import DecodingSettings, make_recipe
from tests.decoding.tiny import batch_of, random_sources
from tests.decoding.trained import Trained, make_run, sentences

FEW = 6
"""Frequent pieces, so that there are rare ones in a small vocabulary."""


@pytest.fixture(scope="module", autouse=True)
def _few_are_frequent() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(module, "FREQUENT", FEW)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return make_run(tmp_path_factory.mktemp("run"))


def apart(folder: Path) -> Prepared:
    """Prepared data with a vocabulary for each side, which have some pieces in common."""
    folder.mkdir()
    lines = sentences(80, seed=3)
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
    found, expected = learn(prepared), model_1(prepared)
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
    found = learn(trained.prepared).frequent.tolist()
    assert [counts[piece] for piece in found] == sorted(counts, reverse=True)[:FEW]


def test_names_have_the_piece_that_is_spelt_the_same(tmp_path: Path) -> None:
    prepared = apart(tmp_path / "apart")
    source, target = prepared.tokenizers.source, prepared.tokenizers.target
    names = {target.piece(y): y for y in range(target.size)}
    same = learn(prepared).translations[:, 0].tolist()
    assert same == [names.get(source.piece(x), PAD) for x in range(source.size)]
    assert PAD in same[BREAK + 1 :]
    assert any(x != y != PAD for x, y in enumerate(same))


def test_of_much_text_every_nth_pair_is_learned_from(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    side = trained.prepared.train
    cells = (side.source.lengths.astype(int) + 1) * side.target.lengths
    monkeypatch.setattr(module, "CELLS", int(cells.sum()) - 1)
    counts = np.bincount(np.concatenate([side.target[row] for row in range(0, len(side), 2)]))
    found = learn(trained.prepared).frequent.tolist()
    assert [counts[piece] for piece in found] == sorted(counts, reverse=True)[:FEW]


def test_a_shortlist_has_what_may_come() -> None:
    lexicon = Lexicon(
        translations=torch.tensor([[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 30, 31], [0, 0, 0], [5, 20, 21], [6, 22, PAD]]),
        frequent=torch.tensor([12, 11], dtype=torch.int32),
    )
    always = [*range(BREAK + 1), 11, 12]
    assert lexicon.shortlist(torch.tensor([[5, EOS], [EOS, PAD]]), 1).tolist() == sorted([*always, 5, 20, 30])
    assert lexicon.shortlist(torch.tensor([[6, 5, EOS]]), 2).tolist() == sorted([*always, 5, 6, 20, 21, 22, 30, 31])


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
    found = SEARCHES[chosen.method](model, replace(batch, pieces=pieces), chosen).named(pieces)
    for network in networks:
        mask(network, pieces)
    expected = SEARCHES[chosen.method](model, batch, chosen)
    assert found.pieces.tolist() == expected.pieces.tolist()
    torch.testing.assert_close(found.log_probs, expected.log_probs)
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.pieces.max() > len(pieces)  # ids, not places


def test_lines_hold_only_what_is_on_the_shortlist_of_their_batch(trained: Trained) -> None:
    model, tokenizers, lines = trained.run.load_model(), trained.run.tokenizers, sentences(12, seed=5)
    lexicon, settings = learn(trained.prepared), DecodingSettings(shortlist=2)
    source = [[*tokenizers.source.encode(line), EOS] for line in lines]
    may = {int(piece) for each in source for piece in lexicon.shortlist(torch.tensor(each), 2)}
    found = translate_lines(model, tokenizers, lines, settings, lexicon=lexicon)
    free = translate_lines(model, tokenizers, lines, settings)
    assert {piece for best, *_ in found for piece in best.pieces} <= may
    assert not {piece for best, *_ in free for piece in best.pieces} <= may


def test_a_run_keeps_its_lexicon(trained: Trained, tmp_path: Path) -> None:
    run, told = make_run(tmp_path / "one").run, []
    with pytest.raises(DataError, match="no prepared data"):
        lexicon_of(run, tmp_path / "nowhere")
    with pytest.raises(MtkitError, match=r"other pieces.*--data"):
        lexicon_of(run, apart(tmp_path / "apart").folder)
    first = lexicon_of(run, tmp_path / "one" / "mtkit-data", lambda *done: told.append(done))
    assert told == [(step, 1 + ITERATIONS) for step in range(1 + ITERATIONS)]
    again = lexicon_of(run, tmp_path / "nowhere")
    assert torch.equal(first.translations, again.translations)
    assert torch.equal(first.frequent, again.frequent)
    (run.folder / FILE).write_bytes(b"half")
    with pytest.raises(RunError, match=FILE):
        lexicon_of(run, tmp_path / "nowhere")


def test_with_a_shortlist_batches_decide_a_translation(trained: Trained) -> None:
    lexicon = learn(trained.prepared)

    def identity(lexicon: Lexicon | None, **settings: int) -> dict[str, object]:
        return Translator([trained.run], DecodingSettings.model_validate(settings), lexicon=lexicon).identity

    assert identity(lexicon, shortlist=5, batch_tokens=50) != identity(lexicon, shortlist=5)
    assert identity(lexicon, batch_tokens=50) == identity(None)
