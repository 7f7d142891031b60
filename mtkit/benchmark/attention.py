"""Cost of attention mechanisms on this machine: time, peak memory and FLOPs at growing lengths, compared with `full`.

Two tasks are measured: forward and backward over a sequence, and one decoding step (decoder and cross roles) at
growing positions. Both in two forms: the complete sub-layer, and the attention without its projections.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor

from mtkit.attention import Attention, build, mechanisms
from mtkit.attention.registry import check_role, find
from mtkit.attention.slots import SLOTS
from mtkit.benchmark.attention_work import BEYOND, Walk, clock_of, training, without_projections
from mtkit.benchmark.cost import Cost, cost_of, free_bytes, predict_bytes
from mtkit.device import seconds_of
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.memory import in_words, is_oom

WORKS = ("forward-backward", "step")
FORMS = ("sub-layer", "attention")
METRICS = ("seconds", "peak_bytes", "flops")

PROBES = (128, 512, 2048)
"""Lengths whose memory predicts the memory of longer ones. Mechanisms of blocks need many blocks to show their cost."""


@dataclass(frozen=True)
class Setting:
    """Sizes of the measured task; `options` apply to each mechanism or slot that has them."""

    role: str = "encoder"
    width: int = 512
    heads: int = 8
    batch: int = 1
    repeats: int = 3
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """One mechanism at one length: the best forward-backward time of all repeats, or the mean time of a step.

    With one thread on the CPU, `seconds` is the processor's time, otherwise the wall clock's. `peak_bytes` excludes
    weights and inputs, and includes gradients; for a step, it includes the state. See `Cost`.
    """

    attention: str
    work: str
    form: str
    length: int
    seconds: float
    peak_bytes: int
    flops: int


@dataclass(frozen=True)
class Benchmark:
    """Measurements of one run, with a line for each omitted and each failed measurement."""

    setting: Setting
    lengths: tuple[int, ...]
    measurements: list[Measurement]
    skipped: list[str]
    failed: list[str]

    def ratio(self, row: Measurement, metric: str) -> float | None:
        """Return `full`'s cost in one of METRICS divided by the row's cost; None if `full` was not measured."""
        for full in self.measurements:
            if (full.attention, full.work, full.form, full.length) == ("full", row.work, row.form, row.length):
                cost = getattr(row, metric)
                return float(getattr(full, metric) / cost) if cost else None
        return None

    def rows(self, attention: str, work: str, form: str) -> list[Measurement]:
        """Return the measurements of one mechanism, task and form, by length."""
        wanted = (attention, work, form)
        return [
            measurement
            for measurement in self.measurements
            if (measurement.attention, measurement.work, measurement.form) == wanted
        ]

    def exponent(self, attention: str, work: str, form: str, metric: str) -> float | None:
        """Return p of a cost T^p, fitted over all measured lengths; None with fewer than two."""
        rows = self.rows(attention, work, form)
        return fit_exponent([row.length for row in rows], [getattr(row, metric) for row in rows])


def fit_exponent(lengths: Sequence[float], costs: Sequence[float]) -> float | None:
    """Return the least-squares slope of log cost over log length; None with fewer than two lengths or a cost of 0."""
    if len(set(lengths)) < 2 or min(costs) <= 0:
        return None
    return linear_regression([math.log(length) for length in lengths], [math.log(cost) for cost in costs]).slope


def default_names(role: str) -> list[str]:
    """Return `full` and the mechanisms of growth 1 published in the role. Raises: MtkitError for an unknown role."""
    check_role(find("full"), role)
    return [
        "full",
        *(
            mechanism.name
            for mechanism in mechanisms().values()
            if mechanism.growth == 1 and role in mechanism.published
        ),
    ]


def measure_attention(
    names: Sequence[str],
    lengths: Sequence[int],
    setting: Setting,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Benchmark:
    """Measure `full` and the named mechanisms.

    Forward and backward are measured in turns, so that a slow moment of the machine affects all of them. Steps are
    measured once per mechanism, and their time is the mean of `STEPS` steps.

    `on_progress` receives the number of finished parts and of all parts. A measurement that does not fit in memory is
    omitted, with a line. If a mechanism raises another error, the others are still measured.

    Raises: MtkitError for an invalid name, role, option or length, and if nothing fits in memory.
    """
    lengths = tuple(sorted(set(lengths)))
    if not lengths or lengths[0] < 1:
        raise MtkitError(f"lengths are whole numbers from 1, not {list(lengths)}")
    if min(setting.width, setting.heads, setting.batch, setting.repeats) < 1:
        raise MtkitError("width, heads, batch and repeats are whole numbers from 1")
    names = list(dict.fromkeys(["full", *names]))
    for name in names:
        check_role(find(name), setting.role)
    options = options_of(names, setting.options)
    for name in names:
        _build(name, "sub-layer", min(lengths[-1], PROBES[0]), setting, options)  # mistakes show before any work
    run = _Run(names, lengths, setting, options, on_progress)
    for form in FORMS:
        for length in lengths:
            run.forward_backward(form, length)
        if setting.role != "encoder":
            for name in names:
                run.steps(name, form)
    if not run.measurements:
        raise MtkitError(f"nothing could be measured; {[*run.skipped, *run.failed][0]}; choose shorter lengths")
    return Benchmark(setting, lengths, run.measurements, run.skipped, run.failed)


class _Run:
    """Measurements so far, and the predicted memory of longer lengths."""

    def __init__(
        self,
        names: list[str],
        lengths: tuple[int, ...],
        setting: Setting,
        options: dict[str, dict[str, Any]],
        on_progress: Callable[[int, int], None],
    ) -> None:
        self.names, self.lengths, self.setting, self.options = names, lengths, setting, options
        self.measurements: list[Measurement] = []
        self.skipped: list[str] = []
        self.failed: list[str] = []
        self._held: dict[tuple[str, str], dict[int, int]] = {}
        self._generator = torch.Generator(setting.device).manual_seed(setting.seed)
        self._on_progress = on_progress
        works = 1 if setting.role == "encoder" else 2
        self._done, self._parts = 0, len(FORMS) * len(names) * len(lengths) * works

    def forward_backward(self, form: str, length: int) -> None:
        """Measure all mechanisms at one length: count each one's operations, which warms it up, then time in turns."""
        fitting = []
        for name in self.names:
            with self._alone(name, form, length):
                if self._fits(name, form, length):
                    fitting.append(name)
        inputs = self._inputs(length if fitting else 1)
        works: dict[str, Callable[[], None]] = {}
        costs: dict[str, Cost] = {}
        for name in fitting:
            with self._alone(name, form, length):
                work = training(self._build(name, form, length), *inputs)
                costs[name] = cost_of(work, self.setting.device)
                works[name] = work
                self._held.setdefault((name, form), {})[length] = costs[name].peak_bytes
        best, device = dict.fromkeys(works, math.inf), self.setting.device
        for _ in range(self.setting.repeats):
            for name in list(works):
                work = works.pop(name)
                with self._alone(name, form, length):
                    best[name] = min(best[name], seconds_of(work, device, clock_of(device)))
                    works[name] = work  # it has not failed
        for name in works:
            cost = costs[name]
            self.measurements.append(
                Measurement(name, "forward-backward", form, length, best[name], cost.peak_bytes, cost.flops)
            )
        self._advance(len(self.names))

    def steps(self, name: str, form: str) -> None:
        """Measure one mechanism's steps at all lengths whose forward-backward was measured, in one pass."""
        measured = (name, "forward-backward", form)
        lengths = [
            measurement.length
            for measurement in self.measurements
            if (measurement.attention, measurement.work, measurement.form) == measured
        ]
        done = self._done
        if lengths:
            with self._alone(name, form, lengths[-1]):
                attention = self._build(name, form, lengths[-1] + BEYOND)
                walk = Walk(attention, *self._inputs(lengths[-1])[:2])
                for length in lengths:
                    seconds, cost = walk.measure(length)
                    self.measurements.append(
                        Measurement(name, "step", form, length, seconds, cost.peak_bytes, cost.flops)
                    )
                    self._advance(1)
        self._advance(len(self.lengths) - (self._done - done))

    @contextmanager
    def _alone(self, name: str, form: str, length: int) -> Iterator[None]:
        """Turn an error raised inside into a failed measurement of this mechanism only."""
        try:
            yield
        except MtkitError:
            raise
        except Exception as error:
            if is_oom(error):
                self._skip(name, form, length, "does not fit in memory")
            else:
                why = " ".join(f"{type(error).__name__}: {error}".split())
                self.failed.append(f"{name}, {form}, at {length:,}: failed, {why}")

    def _fits(self, name: str, form: str, length: int) -> bool:
        """Return whether the mechanism supports this length and its predicted memory is free."""
        held, free = self._held.setdefault((name, form), {}), free_bytes(self.setting.device)
        for probe in PROBES:
            if max(held, default=0) < probe < length and self._needed(name, form, probe) <= free:
                work = training(self._build(name, form, probe), *self._inputs(probe))
                held[probe] = cost_of(work, self.setting.device).peak_bytes
        need = self._needed(name, form, length)
        if need > free:
            self._skip(name, form, length, f"needs about {in_words(need)}, and {in_words(free)} are free")
            return False
        longest = self._build(name, form, length).longest
        if longest is not None and longest < length:
            self._skip(name, form, length, f"takes {longest:,} positions at most")
            return False
        return True

    def _needed(self, name: str, form: str, length: int) -> float:
        """Return the bytes of inputs and of the mechanism, as predicted from shorter lengths."""
        inputs = 3 * torch.float32.itemsize * self.setting.batch * length * self.setting.width
        return inputs + predict_bytes(self._held[name, form], length, find(name).growth)

    def _inputs(self, length: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return query, memory and output gradient, each (B, T, D)."""
        shape = (self.setting.batch, length, self.setting.width)
        query, memory, gradient = (
            torch.randn(shape, generator=self._generator, device=self.setting.device) for _ in range(3)
        )
        return query, memory if self.setting.role == "cross" else None, gradient

    def _build(self, name: str, form: str, length: int) -> Attention:
        return _build(name, form, length, self.setting, self.options)

    def _skip(self, name: str, form: str, length: int, why: str) -> None:
        self.skipped.append(f"{name}, {form}, at {length:,}: skipped, it {why}")

    def _advance(self, parts: int) -> None:
        self._done += parts
        self._on_progress(self._done, self._parts)


def _build(name: str, form: str, length: int, setting: Setting, options: Mapping[str, Mapping[str, Any]]) -> Attention:
    attention = build(
        name,
        role=setting.role,
        d_model=setting.width,
        heads=setting.heads,
        max_length=length,
        seed=setting.seed,
        **options[name],
    ).to(setting.device)
    return without_projections(attention) if form == "attention" else attention


def options_of(names: Iterable[str], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the options that each mechanism has; every mechanism has the slots as options.

    Raises: MtkitError for an unknown name, and for an option that no mechanism has.
    """
    takes = {name: {*find(name).options, *SLOTS} for name in names}
    known = sorted(set().union(*takes.values()))
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise MtkitError(f"none of {', '.join(takes)} has an attention option {shown(option)}{hint}")
    return {name: {key: value for key, value in options.items() if key in own} for name, own in takes.items()}
