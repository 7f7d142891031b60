"""Context of given translations: compared with the model's steps over pieces that are joined here."""

import json
from itertools import chain
from pathlib import Path

import pytest
import torch

from mtkit.decoding.contexts import Context, ContextCounts, ContextLimits, contexts_in_documents
from mtkit.decoding.engines.model_engine import ModelEngine
from mtkit.decoding.forced import Forced, force_lines
from mtkit.decoding.lines.source import Directions, SourceLines
from mtkit.recipe import DecodingSettings
from mtkit.runs import Run
from mtkit.text.tokenizer import BOS, BREAK, EOS
from tests.decoding.trained import LONGEST, make_run, sentences

LINES, TARGETS = ["The dog.", "A cat."], ["A tree.", "The old bird."]
PAIRS = [("One house.", "A red dog."), ("The cat.", "The cat."), ("A bird.", "One.")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), documents=22).run


def with_lengths(run: Run, folder: Path, *, sentences: dict[int, int], pieces: int) -> Run:
    """A copy of the run that was trained on lines with so many sentences, instead of `data.documents`."""
    lengths = {
        "bins": [{"longest": 20, "pairs": 200, "mean": 1.0, "spread": 0.1, "most": 2.0}],
        "percentiles": dict.fromkeys((50, 90, 95, 99, 100), pieces),
        "sentences": sentences,
    }
    folder.mkdir()
    for name in ("tokenizer", "checkpoints"):
        (folder / name).symlink_to((run.folder / name).resolve())
    recipe = run.recipe.model_dump(mode="json")
    recipe["data"]["documents"] = None
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    about = json.loads((run.folder / "run.json").read_text())
    direction = run.directions[0]
    (folder / "run.json").write_text(json.dumps({**about, "document_pieces": None, "lengths": {direction: lengths}}))
    return Run(folder)


def by_steps(run: Run, source: list[int], target: list[int]) -> list[float]:
    """The log-probability of each target piece in a search that is forced to take it."""
    model = run.load_model()
    with torch.inference_mode():
        encoded = model.encode(torch.tensor([source]), torch.ones(1, len(source), dtype=torch.bool))
        state, log_probs, last = model.start(encoded), [], BOS
        for piece in target:
            logits, state, _ = model.step(torch.tensor([[last]]), state)
            log_probs.append(float(logits.whole()[0, 0].log_softmax(-1)[piece]))
            last = piece
    return log_probs


def force(run: Run, contexts: list[Context], limits: ContextLimits | None, batch: int = 1000) -> list[Forced]:
    engine = ModelEngine(run.load_model(), DecodingSettings(batch_tokens=batch))
    return force_lines(engine, run.tokenizers, LINES, TARGETS, contexts, limits)


@pytest.mark.parametrize("batch", [1, 1000])
def test_only_the_last_line_counts_after_breaks(run: Run, batch: int) -> None:
    limits = ContextLimits.of([run], run.directions[0])
    assert limits == ContextLimits(None, 22)
    found = force(run, [PAIRS[:1], PAIRS[:2]], limits, batch)
    encode = run.tokenizers.source.encode, run.tokenizers.target.encode
    for forced, line, target, pairs in zip(found, LINES, TARGETS, (PAIRS[:1], PAIRS[:2]), strict=True):
        source, context = (
            list(chain.from_iterable([*encode[side](pair[side]), BREAK] for pair in pairs)) for side in range(2)
        )
        pieces = (*encode[1](target), EOS)
        expected = by_steps(run, [*source, *encode[0](line), EOS], [*context, *pieces])
        assert forced.pieces == pieces
        assert forced.log_probs == pytest.approx(expected[len(context) :], abs=1e-4)
        assert (forced.context, forced.cut) == (len(pairs), False)


def test_the_nearest_sentences_within_the_budget_are_kept(run: Run) -> None:
    """A line of a document in training would have room for them on both sides."""
    encode = run.tokenizers.source.encode, run.tokenizers.target.encode
    for budget in range(4, 24):
        (forced, _) = force(run, [PAIRS, []], ContextLimits(None, budget))
        sizes = [[len(encode[side](text[side])) for text in (*PAIRS, (LINES[0], TARGETS[0]))] for side in range(2)]
        fitting = [count for count in range(4) if all(sum(part[3 - count :]) + count <= budget for part in sizes)]
        assert forced.context == max(fitting, default=0)
        assert forced.cut == (forced.context < 3)
        (kept, _) = force(run, [PAIRS[3 - forced.context :], []], ContextLimits(None, 1000))
        assert forced.log_probs == pytest.approx(kept.log_probs, abs=1e-4)


def test_the_limits_of_the_model_cut_too(run: Run) -> None:
    (forced, _) = force(run, [PAIRS * 5, []], ContextLimits(None, 1000))
    encode, texts = run.tokenizers.target.encode, [target for _, target in PAIRS * 5] + TARGETS[:1]
    sizes = [sum(map(len, map(encode, texts[-count:]))) + count for count in range(1, 17)]  # breaks and end
    assert forced.cut
    assert forced.context == sum(size <= LONGEST for size in sizes) - 1 < 15


def test_sentences_without_text_are_no_context(run: Run) -> None:
    limits = ContextLimits(None, 22)
    blank: list[Context] = [[("", ""), PAIRS[0], ("A cat.", " ")], [(" ", "")]]
    (some, none), (kept, alone) = force(run, blank, limits), force(run, [PAIRS[:1], []], limits)
    assert some.log_probs == pytest.approx(kept.log_probs, abs=1e-4)
    assert none.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
    assert (some.context, none.context, none.cut) == (1, 0, False)


def test_runs_of_whole_documents_get_one_text(run: Run, tmp_path: Path) -> None:
    whole = with_lengths(run, tmp_path / "whole", sentences={1: 50, 3: 50}, pieces=22)
    limits = ContextLimits.of([whole], whole.directions[0])
    assert limits == ContextLimits((" ", " "), 22, 3)
    found = force(whole, [PAIRS[:1], PAIRS], limits)
    for forced, line, target, pairs in zip(found, LINES, TARGETS, (PAIRS[:1], PAIRS[1:]), strict=True):
        befores, translated = zip(*pairs, strict=True)
        source = [*whole.tokenizers.source.encode(" ".join([*befores, line])), EOS]
        joined = [*whole.tokenizers.target.encode(" ".join([*translated, target])), EOS]
        assert forced.log_probs == pytest.approx(by_steps(whole, source, joined)[-len(forced.pieces) :], abs=1e-4)
        assert forced.pieces == (*whole.tokenizers.target.encode(target), EOS)
    assert [line.cut for line in found] == [False, True]  # three sentences are usual
    short = ContextLimits((" ", " "), 8)
    assert [line.context for line in force(whole, [PAIRS, PAIRS], short)] == [1, 1]


def test_text_without_spaces_is_joined_as_it_is_written(run: Run) -> None:
    """Pieces may then spell the end of the context and the beginning of the line: they count as the line's."""
    (forced, _) = force(run, [[("The d", "A tree")], []], ContextLimits(("", ""), 22))
    joined = run.tokenizers.target.encode("A treeA tree.")
    before = run.tokenizers.target.encode("A tree")
    shared = next((at for at, piece in enumerate(before) if joined[at] != piece), len(before))
    assert forced.pieces == (*joined[shared:], EOS)


def test_runs_of_single_sentences_have_no_context(run: Run, tmp_path: Path) -> None:
    single = with_lengths(run, tmp_path / "single", sentences={1: 96, 3: 4}, pieces=22)
    direction = run.directions[0]
    assert ContextLimits.of([single], direction) is None
    assert ContextLimits.of([run, single], direction) is None
    assert ContextLimits.of([run, run], direction) == ContextLimits.of([run], direction)
    assert force(single, [PAIRS, PAIRS], None)[0].context == 0


def test_tags_precede_each_line(tmp_path: Path) -> None:
    run = make_run(tmp_path, documents=22, directions=("en-de", "en-fr")).run
    engine, limits = ModelEngine(run.load_model(), DecodingSettings()), ContextLimits.of([run], "en-fr")
    lines = SourceLines(LINES[:1], Directions(run.directions, [1]))
    seen: list[torch.Tensor] = []
    log_probs = ModelEngine.log_probs
    try:
        ModelEngine.log_probs = (  # type: ignore[method-assign]
            lambda self, source, target, **more: seen.append(source) or log_probs(self, source, target, **more)
        )
        force_lines(engine, run.tokenizers, lines, TARGETS[:1], [PAIRS[:1]], limits)
    finally:
        ModelEngine.log_probs = log_probs  # type: ignore[method-assign]
    encode, tag = run.tokenizers.source.encode, run.tokenizers.source.tag("en-fr")
    assert seen[0].tolist() == [[tag, *encode(PAIRS[0][0]), BREAK, tag, *encode(LINES[0]), EOS]]


def test_lines_of_a_document_precede_each_other() -> None:
    sources, targets = list("abcdef"), list("uvwxyz")
    found = contexts_in_documents(sources, targets, [1, 1, 1, 2, 2, 1], 100)
    assert ["".join(chain.from_iterable(context)) for context in found] == ["", "au", "aubv", "", "dx", ""]
    assert [len(context) for context in contexts_in_documents(sources, targets, [1] * 6, 4)] == [0, 1, 2, 3, 3, 3]
    assert contexts_in_documents([], [], [], 4) == []


def test_counts_are_kept_and_told() -> None:
    lines = [Forced((EOS,), (0.0,), context=size, cut=cut) for size, cut in ((0, False), (2, False), (1, True))]
    counts = ContextCounts.of(lines) + ContextCounts.of(lines[:2])
    assert counts == ContextCounts(3, 5, 1)
    assert ContextCounts.restored(counts.state()) == counts
    assert "contexts were cut to their nearest sentences (1)" in str(counts.message(ContextLimits(None, 22)))
    assert ContextCounts.of(lines[:2]).message(ContextLimits(None, 22)) is None
    with pytest.raises(ValueError, match="version"):
        ContextCounts.restored([1])


def test_contexts_do_not_depend_on_the_chunk(run: Run) -> None:
    """The result for a line is the same among other lines."""
    texts, limits = sentences(9, 3), ContextLimits(None, 22)
    contexts = contexts_in_documents(texts, texts, [0] * 9, 22)
    engine = ModelEngine(run.load_model(), DecodingSettings(batch_tokens=60))
    together = force_lines(engine, run.tokenizers, texts, texts, contexts, limits)
    for number, line in enumerate(together):
        (alone,) = force_lines(engine, run.tokenizers, [texts[number]], [texts[number]], [contexts[number]], limits)
        assert line.log_probs == pytest.approx(alone.log_probs, abs=1e-4)
