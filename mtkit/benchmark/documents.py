"""Benchmark of document decoding: models that differ in the decoder's attentions, on documents of growing length.

Weights are untrained, and no hypothesis ends before its limit, so that all models take the same number of steps. The
results are tables and bars for people, and JSON for programs.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor

from mtkit.attention.registry import find
from mtkit.benchmark.attention import options_of
from mtkit.benchmark.report import Bars, about, aligned, times
from mtkit.decoding.contract import SourceBatch
from mtkit.decoding.engines.model_engine import decoding_with, find_dtype
from mtkit.decoding.search.beam import beam_search
from mtkit.decoding.step_graphs import StepGraphs
from mtkit.device import hardware, wait
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.network import Logits, Model, Network
from mtkit.recipe import AttentionSettings, Recipe
from mtkit.text.tokenizer import EOS

ROLES = ("decoder", "cross")
LAST = 50
"""Number of last pieces of a document over which the time at its end is averaged; half of a shorter document."""

WARM_UP = 64
"""Maximum pieces of the document that each model decodes first, untimed."""


@dataclass(frozen=True)
class DocumentSetting:
    """Settings that all models share: the recipe except its attention, and the vocabulary."""

    recipe: Recipe
    vocabulary: int
    beam: int
    arithmetic: str
    """A dtype of `mtkit translate`."""
    repeats: int
    device: torch.device
    options: Mapping[str, Any]
    documents: int = 1
    """Number of documents in a batch."""


@dataclass(frozen=True)
class MeasuredDocument:
    """Results of one model on documents of `length` source and target pieces: the best of all repeats."""

    attention: str
    roles: tuple[str, ...]
    """Roles of the mechanism; the other roles are `full`."""
    length: int
    seconds: float
    """Seconds per document, including the encoder."""
    last: float
    """Seconds per piece over the last pieces."""


@dataclass(frozen=True)
class DocumentBenchmark:
    """Results by length, then in the order of the names."""

    setting: DocumentSetting
    lengths: tuple[int, ...]
    rows: list[MeasuredDocument]

    @property
    def names(self) -> list[str]:
        """Mechanisms, `full` first."""
        return list(dict.fromkeys(row.attention for row in self.rows))

    def row(self, name: str, length: int) -> MeasuredDocument:
        """Return the results of one mechanism at one length."""
        return next(row for row in self.rows if (row.attention, row.length) == (name, length))


def measure_documents(
    names: Sequence[str],
    lengths: Sequence[int],
    setting: DocumentSetting,
    *,
    on_progress: Callable[[int, int], object] = lambda done, total: None,
) -> DocumentBenchmark:
    """Decode documents of each length with `full` and each mechanism in turns, after a warm-up.

    A mechanism fills the decoder and cross roles that it supports, including extensions. `on_progress` receives the
    number of decoded batches and of all batches.

    Raises: MtkitError for an invalid name, option or length, and for a mechanism that supports neither role.
    """
    lengths = tuple(sorted(set(lengths)))
    if not lengths or lengths[0] < 2:
        raise MtkitError("lengths are whole numbers from 2 on, the pieces of a document")
    names = list(dict.fromkeys(["full", *names]))
    roles = {name: tuple(role for role in ROLES if role in find(name).roles) for name in names}
    for name, its in roles.items():
        if not its:
            raise MtkitError(f"{name} can play neither the decoder nor the cross role")
    options = options_of(names, setting.options)
    models = {name: _model(name, roles[name], options[name], lengths[-1], setting) for name in names}
    for model in models.values():
        _decode(model, _documents(min(lengths[0], WARM_UP), setting), setting)
    rows: list[MeasuredDocument] = []
    done, total = 0, len(lengths) * len(names) * setting.repeats
    for length in lengths:
        batch = _documents(length, setting)
        whole, last = dict.fromkeys(names, math.inf), dict.fromkeys(names, math.inf)
        for _ in range(setting.repeats):
            for name, model in models.items():
                seconds, at_end = _decode(model, batch, setting)
                whole[name], last[name] = min(whole[name], seconds), min(last[name], at_end)
                done += 1
                on_progress(done, total)
        rows += [MeasuredDocument(name, roles[name], length, whole[name], last[name]) for name in names]
    return DocumentBenchmark(setting, lengths, rows)


def pieces_at_end(length: int) -> int:
    """Return the number of last pieces of a document over which the time at its end is averaged."""
    return min(LAST, length // 2)


class _Timed:
    """Model that records the start times of some steps."""

    has_weights = False

    def __init__(self, model: Model, noted: Sequence[int], device: torch.device) -> None:
        self.model, self.device = model, device
        self.times = dict.fromkeys(noted, 0.0)
        self.steps = 0

    def encode(self, source: Tensor, source_valid: Tensor | None = None, *, task: Tensor | None = None) -> Any:
        return self.model.encode(source, source_valid, task=task)

    def start(self, encoded: Any, *, hypotheses: int = 1, pieces: Tensor | None = None) -> Any:
        return self.model.start(encoded, hypotheses=hypotheses, pieces=pieces)

    def step(self, token: Tensor, state: Any, *, need_weights: bool = False) -> tuple[Logits, Any, Tensor | None]:
        if self.steps in self.times:
            wait(self.device)
            self.times[self.steps] = time.perf_counter()
        self.steps += 1
        return self.model.step(token, state, need_weights=need_weights)


def _model(
    name: str, roles: Sequence[str], options: Mapping[str, Any], longest: int, setting: DocumentSetting
) -> Network:
    """Return an untrained model in which no hypothesis ends before its limit."""
    recipe = setting.recipe.tied(joint=setting.recipe.data.tokenizer.joint)
    by_role = {f"{role}.{key}": value for key, value in options.items() for role in roles}
    attention = AttentionSettings.model_validate({"options": by_role, **dict.fromkeys(roles, name)})
    size = recipe.model.model_copy(
        update={"max_length": max(longest + 1, recipe.model.max_length), "output_bias": True}
    )
    settings = recipe.model_copy(update={"attention": attention, "model": size})
    model = build_model(settings, source_vocabulary=setting.vocabulary, target_vocabulary=setting.vocabulary)
    assert model.output_bias is not None
    with torch.no_grad():
        model.output_bias[EOS] = -torch.inf
    return model.to(setting.device)


def _documents(length: int, setting: DocumentSetting) -> SourceBatch:
    """Return sources of `length` pieces, with a limit of `length` target pieces."""
    draw, count = torch.Generator().manual_seed(setting.recipe.seed), setting.documents
    source = torch.randint(EOS + 1, setting.vocabulary, (count, length), generator=draw)
    source[:, -1] = EOS
    direction = torch.zeros(count, dtype=torch.long, device=setting.device)
    return SourceBatch(source.to(setting.device), [length] * count, direction)


def _decode(model: Network, batch: SourceBatch, setting: DocumentSetting) -> tuple[float, float]:
    """Return the seconds per document, and per piece at the end of the documents."""
    length, count = batch.limits[0], len(batch.limits)
    settings = setting.recipe.decoding.model_copy(update={"beam": setting.beam, "coverage_penalty": 0.0})
    steps: Model = StepGraphs(model) if setting.device.type == "cuda" else model
    at_end = pieces_at_end(length)
    timed = _Timed(steps, (length - 1 - at_end, length - 1), setting.device)
    with decoding_with(model, find_dtype(setting.arithmetic)):
        begin = time.perf_counter()
        beam_search(cast(Model, timed), batch, settings)
        wait(setting.device)
    first, last = timed.times.values()
    return (time.perf_counter() - begin) / count, (last - first) / at_end / count


def table(benchmark: DocumentBenchmark) -> str:
    """Format milliseconds per piece at the end and in all of a document; × is relative to `full`."""
    setting, size = benchmark.setting, benchmark.setting.recipe.model
    head = (
        f"decoding {_length_of(setting)} of as many source as target pieces, beam {setting.beam}, "
        f"{setting.arithmetic}, on {hardware(setting.device)}\n"
        f"(untrained model: {size.encoder_layers} + {size.decoder_layers} layers of width {size.d_model}, "
        f"{setting.vocabulary:,} pieces; encoder full; ×: how many times faster than full in both roles)"
    )
    halves = " (at most the last half)" if benchmark.lengths[0] < 2 * LAST else ""
    last = _section(benchmark, f"milliseconds per piece, last {LAST} pieces{halves}", lambda row: row.last)
    per_piece = _section(benchmark, "milliseconds per piece, whole document", lambda row: row.seconds / row.length)
    return "\n\n".join([head, last, per_piece])


def as_object(benchmark: DocumentBenchmark) -> dict[str, Any]:
    """Return all results as JSON values, with unrounded numbers."""
    setting = benchmark.setting
    return {
        **about(setting.device, {}),
        "documents": setting.documents,
        "beam": setting.beam,
        "arithmetic": setting.arithmetic,
        "repeats": setting.repeats,
        "vocabulary": setting.vocabulary,
        "model": setting.recipe.model.model_dump(mode="json"),
        "options": dict(setting.options),
        "rows": [{**asdict(row), "pieces_at_the_end": pieces_at_end(row.length)} for row in benchmark.rows],
    }


def bars(benchmark: DocumentBenchmark) -> list[Bars]:
    """Return the speeds at the end of documents as bars, one chart per length."""
    setting = benchmark.setting
    what = _length_of(setting)
    return [
        Bars(
            title=f"end of {what} of {length:,} pieces, beam {setting.beam}, on {hardware(setting.device)}",
            unit="pieces per second",
            speeds=[(_label(row), 1 / row.last, True) for row in benchmark.rows if row.length == length],
        )
        for length in benchmark.lengths
    ]


def _section(benchmark: DocumentBenchmark, title: str, cost: Callable[[MeasuredDocument], float]) -> str:
    rows = [["", *(f"{length:,}" for length in benchmark.lengths)]]
    for name in benchmark.names:
        measured = [benchmark.row(name, length) for length in benchmark.lengths]
        full = [benchmark.row("full", length) for length in benchmark.lengths]
        cells = [
            f"{cost(row) * 1e3:.3g} {times(cost(base), cost(row)):>6}" for row, base in zip(measured, full, strict=True)
        ]
        rows.append([_label(measured[0]), *cells])
    return f"{title}\n{aligned(rows)}"


def _length_of(setting: DocumentSetting) -> str:
    return "one document" if setting.documents == 1 else f"{setting.documents:,} documents at once,"


def _label(row: MeasuredDocument) -> str:
    """Format "linear", or "band (decoder)" if it fills one of the two roles."""
    return row.attention if len(row.roles) > 1 else f"{row.attention} ({row.roles[0]})"
