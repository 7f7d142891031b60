"""Translating lines: N in, N out, the same whatever the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit.decoding.contract import SourceBatch, StoppedError
from mtkit.decoding.engines.model_engine import SEARCHES, ModelEngine
from mtkit.decoding.lines.source import SourceLines
from mtkit.decoding.translate import translate_lines
from mtkit.decoding.translation import Translation, join_parts
from mtkit.errors import MtkitError
from mtkit.model.network import Model
from mtkit.model.transformer import Transformer
from mtkit.recipe import DecodingSettings
from mtkit.text.tokenizer import EOS, Tokenizers
from tests.decoding.tiny import TinyModel
from tests.decoding.trained import LONGEST, make_run, sentences, three_threads

SENTENCE = "The old dog sees a small house near the tree, and one bird."
AWKWARD = [
    "",
    "   \t ",
    "\u2028",
    "A cat\u2028finds\u0085one\x0bbird\x0c.",
    "\x00\x07\x1b",
    "ein\rzwei",
    "🦖 漢字 Ωμέγα",
    SENTENCE * 8,
    "x" * 300,
    "\u200b",
    "The dog.",
    "▁▁▁",
    "<s> </s> <pad>",
]

Translate = Callable[..., list[list[Translation]]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Transformer, Tokenizers]:
    run = make_run(tmp_path_factory.mktemp("run")).run
    return run.load_model(), run.tokenizers


@pytest.fixture
def translate(parts: tuple[Transformer, Tokenizers]) -> Translate:
    model, tokenizers = parts

    def call(lines: list[str], *, on_progress: Any = lambda lines: None, **settings: Any) -> list[list[Translation]]:
        return translate_lines(
            ModelEngine(model, DecodingSettings.model_validate(settings)), tokenizers, lines, on_progress=on_progress
        )

    return call


@pytest.mark.parametrize(
    "line",
    ["The\tdog.", "The dog.\u200b", "\ufeffThe dog.", "The d\u00adog.", "The\x85dog.\x00", "\u202aThe dog.\u202c"],
)
def test_invisible_characters_change_no_translation_and_are_noted(translate: Translate, line: str) -> None:
    (plain,), (found,) = translate(["The dog.", line])
    assert (found.pieces, found.parts) == (plain.pieces, 1)
    assert (plain.cleaned, found.cleaned) == (False, True)


@pytest.mark.parametrize("line", ["\u200b", "\ufeff", "\u00ad", " \u3000\u00a0\t", "\u200d\u200e\u2060", "\x00\x07"])
def test_a_line_that_shows_nothing_is_blank(translate: Translate, line: str) -> None:
    found = translate([line, f"{line}The dog.", "。"], method="greedy")
    assert [(each.text, each.parts) for each in found[0]] == [("", 0)]
    assert all(each[0].parts == 1 for each in found[1:])


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_a_translation_that_is_no_longer_wanted_stops_at_the_next_step(
    parts: tuple[Transformer, Tokenizers], method: str
) -> None:
    model, tokenizers = parts
    engine = ModelEngine(model, DecodingSettings.model_validate({"method": method}))
    calls = iter([False, False, True])  # before the batch, and at the first two steps
    with pytest.raises(StoppedError):
        translate_lines(engine, tokenizers, [SENTENCE], stopped=lambda: next(calls))
    assert not list(calls)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_as_many_lines_come_out_as_went_in(translate: Translate, method: str) -> None:
    seen: list[int] = []
    found = translate(AWKWARD * 3, method=method, on_progress=seen.append)
    assert len(found) == len(AWKWARD) * 3
    assert sum(seen) == len(found)
    for line, each in zip(AWKWARD * 3, found, strict=True):
        assert len(each) == 1
        assert "\n" not in each[0].text
        if not line.strip():
            assert each[0] == Translation("", 0.0, 0.0, (), parts=0)
        elif each[0].parts:
            assert each[0].pieces[-1] == EOS
            assert each[0].log_prob < 0


def test_long_lines_are_translated_in_parts(translate: Translate) -> None:
    whole, each = translate([SENTENCE * 3, SENTENCE], length_penalty=1.0, beam=2)
    assert whole[0].parts > 1
    assert each[0].parts == 1
    spaced = translate([" ".join([SENTENCE] * 3)], length_penalty=1.0, beam=2)[0][0]
    assert spaced.text == " ".join([each[0].text] * 3)
    assert spaced.log_prob == pytest.approx(3 * each[0].log_prob, abs=1e-4)
    assert spaced.score == pytest.approx(each[0].score, abs=1e-4)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_a_line_gets_the_same_whatever_the_batch(translate: Translate, method: str) -> None:
    lines = sentences(40, seed=5) + AWKWARD
    kept = {} if method == "greedy" else {"n_best": 3, "beam": 3}
    one, many = (translate(lines, method=method, batch_tokens=size, **kept) for size in (1, 10_000))
    for alone, together in zip(one, many, strict=True):
        for a, b in zip(alone, together, strict=True):
            assert a.pieces == b.pieces
            assert a.score == pytest.approx(b.score, abs=1e-4)
    assert len({each[0].text for each in many}) > 10


def test_a_sampled_line_is_drawn_by_its_number(parts: tuple[Transformer, Tokenizers]) -> None:
    (model, tokenizers), lines = parts, ["The dog."] * 9
    engine = ModelEngine(model, DecodingSettings(method="sample"))

    def pieces(lines: list[str], numbers: list[int] | None = None) -> list[tuple[int, ...]]:
        return [each[0].pieces for each in translate_lines(engine, tokenizers, SourceLines(lines, numbers=numbers))]

    whole, rows = pieces(lines), [7, 2, 8]
    assert len({*whole}) > 1
    assert pieces(lines[:3], rows) == [whole[row] for row in rows]


@pytest.mark.parametrize("how", [{"method": "greedy"}, {"n_best": 3, "beam": 3}, {"method": "sample", "n_best": 2}])
def test_a_line_gets_the_same_from_several_threads(translate: Translate, how: dict[str, Any]) -> None:
    lines = sentences(40, seed=5) + AWKWARD
    one = translate(lines, **how, batch_tokens=100)
    with three_threads():
        several = translate(lines, **how, batch_tokens=100)
    for alone, beside in zip(one, several, strict=True):
        for a, b in zip(alone, beside, strict=True):
            assert a.pieces == b.pieces
            assert a.score == pytest.approx(b.score, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_several_threads_compute_in_the_type_asked_for(
    parts: tuple[Transformer, Tokenizers], dtype: torch.dtype
) -> None:
    model, tokenizers = parts
    lines, settings = sentences(40, seed=5), DecodingSettings(batch_tokens=1)  # each alone: in int8 others have a say
    engine = ModelEngine(model, settings, dtype)
    whole = translate_lines(ModelEngine(model, settings), tokenizers, lines)
    one = translate_lines(engine, tokenizers, lines)
    with three_threads():
        several = translate_lines(engine, tokenizers, lines)
    assert [each[0].score for each in several] == pytest.approx([each[0].score for each in one], abs=1e-4)
    assert [each[0].score for each in several] != pytest.approx([each[0].score for each in whole], abs=1e-4)


def test_n_best_are_different_and_ordered(translate: Translate) -> None:
    for each in translate(sentences(10, seed=6), n_best=4, beam=4):
        assert len({translation.pieces for translation in each}) == 4
        scores = [translation.score for translation in each]
        assert scores == sorted(scores, reverse=True)


def test_translations_of_a_line_of_several_parts_are_ordered_by_the_scores_of_the_whole() -> None:
    def part(*given: tuple[float, int]) -> list[Translation]:
        return [Translation(f"{each}", each / size, each, (7,) * (size - 1) + (EOS,)) for each, size in given]

    found = join_parts([part((-10.0, 20), (-1.2, 2)), part((-1.0, 10), (-1.1, 10))], DecodingSettings(n_best=2), " ")
    assert [each.text for each in found] == ["-1.2 -1.1", "-10.0 -1.0"]
    assert [each.score for each in found] == pytest.approx([-2.3 / 12, -11 / 30])


def test_the_model_goes_back_to_training(parts: tuple[Transformer, Tokenizers]) -> None:
    model, tokenizers = parts
    for training in (True, False):
        model.train(training)
        translate_lines(ModelEngine(model, DecodingSettings()), tokenizers, ["The dog."])
        assert model.training == training
    loss = model(torch.tensor([[5, EOS]]), torch.tensor([[2, 5]])).hidden.sum()
    loss.backward()  # what decoding cached inside the model can still be trained through


def test_coverage_needs_a_model_with_weights(parts: tuple[Transformer, Tokenizers]) -> None:
    (model, tokenizers), blind = parts, TinyModel()
    blind.has_weights = False
    with pytest.raises(MtkitError, match="cross attention"):
        translate_lines(ModelEngine(blind, DecodingSettings(coverage_penalty=0.2)), tokenizers, ["a"])
    with pytest.raises(MtkitError, match="beam"):
        translate_lines(ModelEngine(model, DecodingSettings(method="greedy", coverage_penalty=0.2)), tokenizers, ["a"])
    plain, covered = (
        translate_lines(ModelEngine(model, each), tokenizers, sentences(6, 7))
        for each in (DecodingSettings(coverage_penalty=weight, beam=4, n_best=4) for weight in (0.0, 0.3))
    )
    without, beside = (
        [each.score - each.log_prob / len(each.pieces) for translations in found for each in translations]
        for found in (plain, covered)
    )
    assert max(map(abs, without)) < 1e-5
    assert max(beside) < 1e-5  # a hypothesis that has attended to everything pays nothing
    assert min(beside) < -0.01


def test_lower_precision_decodes(parts: tuple[Transformer, Tokenizers]) -> None:
    (model, tokenizers), lines = parts, sentences(5, 8)
    full = translate_lines(ModelEngine(model, DecodingSettings()), tokenizers, lines)
    half = translate_lines(ModelEngine(model, DecodingSettings(), torch.bfloat16), tokenizers, lines)
    for a, b in zip(full, half, strict=True):
        assert a[0].score == pytest.approx(b[0].score, abs=0.2)
    assert full != half


def test_limits_are_the_models(translate: Translate) -> None:
    for each in translate(sentences(20, 9)):
        assert len(each[0].pieces) <= LONGEST


def test_a_translation_that_is_cut_says_so(translate: Translate) -> None:
    lines = sentences(20, 9)
    free, short = translate(lines), translate([*lines, SENTENCE * 8], max_pieces=3)
    assert all(len(each[0].pieces) <= 3 * max(1, each[0].parts) for each in short)
    assert sum(each[0].cut for each in free) < sum(each[0].cut for each in short)
    assert short[-1][0].parts > 1
    assert short[-1][0].cut
    for each in short:
        assert each[0].parts > 1 or each[0].cut == (len(each[0].pieces) == 3)


def test_no_lines(translate: Translate, tmp_path: Path) -> None:
    assert translate([]) == []


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_the_gpu_gives_what_the_cpu_gives(tmp_path: Path, method: str) -> None:
    run = make_run(tmp_path).run
    settings = DecodingSettings.model_validate({"method": method, "batch_tokens": 10_000})
    lines = sentences(40, seed=5) + AWKWARD
    here, there = (
        translate_lines(ModelEngine(run.load_model(device=device), settings), run.tokenizers, lines)
        for device in ("cpu", "cuda")
    )
    for cpu, gpu in zip(here, there, strict=True):
        assert cpu[0].pieces == gpu[0].pieces
        assert cpu[0].score == pytest.approx(gpu[0].score, abs=1e-3)


@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_a_batch_that_memory_does_not_hold_is_translated_in_halves(
    translate: Translate, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    search, sizes = SEARCHES[method], list[int]()

    def short(model: Model, batch: SourceBatch, settings: DecodingSettings) -> Any:
        sizes.append(len(batch.source))
        if len(batch.source) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return search(model, batch, settings)

    lines = sentences(11, seed=5)
    whole = translate(lines, method=method)
    monkeypatch.setitem(SEARCHES, method, short)
    assert [each[0].text for each in translate(lines, method=method)] == [each[0].text for each in whole]
    assert sizes[:3] == [11, 6, 3]


def test_a_single_segment_that_memory_does_not_hold_is_one_clear_error(
    translate: Translate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(SEARCHES, "greedy", short)
    with pytest.raises(MtkitError, match=r"does not hold the model and a single segment to translate"):
        translate([SENTENCE] * 3, method="greedy")
