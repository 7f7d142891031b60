"""What attention mechanisms cost here: time, peak memory and FLOPs beside those of `full`, at growing lengths.

Two works are measured: forward and backward over whole sequences, and one decoding step (decoder and cross roles) at
growing positions. Each in two forms: the whole sub-layer, and the attention without its projections.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtkit.attention import Attention, build, mechanisms
from mtkit.attention.registry import check_role, find
from mtkit.attention.slots import SLOTS
from mtkit.benchmark.attention_work import BEYOND, Walk, seconds_of, training, without_projections
from mtkit.benchmark.cost import Cost, cost_of, free_bytes, predict_bytes
from mtkit.errors import MtkitError, did_you_mean, shown
from mtkit.memory import in_words, is_oom

WORKS = ("forward-backward", "step")
FORMS = ("sub-layer", "attention")
METRICS = ("seconds", "peak_bytes", "flops")

PROBES = (128, 256)
"""Lengths that tell how much memory a longer one will need."""


@dataclass(frozen=True)
class Setting:
    """The work that every mechanism is given; `options` go to each mechanism that has them, or a slot, by name."""

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
    """One mechanism at one length: the best time of all repeats of the forward-backward, the mean time of a step.

    `peak_bytes` are beyond weights and inputs, with gradients; those of a step count the state before it. See `Cost`.
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
    """All measurements of one run, a line for everything that was left out, and a line for everything that failed."""

    setting: Setting
    lengths: tuple[int, ...]
    measurements: list[Measurement]
    skipped: list[str]
    failed: list[str]

    def ratio(self, row: Measurement, metric: str) -> float | None:
        """How many times less than `full` it takes of one of METRICS; None where full was not measured."""
        for full in self.measurements:
            if (full.attention, full.work, full.form, full.length) == ("full", row.work, row.form, row.length):
                cost = getattr(row, metric)
                return float(getattr(full, metric) / cost) if cost else None
        return None

    def rows(self, attention: str, work: str, form: str) -> list[Measurement]:
        """The measurements of one mechanism in one work and form, by length."""
        wanted = (attention, work, form)
        return [each for each in self.measurements if (each.attention, each.work, each.form) == wanted]

    def exponent(self, attention: str, work: str, form: str, metric: str) -> float | None:
        """p where the cost grows as T^p, fitted over all lengths measured; None with fewer than two."""
        rows = self.rows(attention, work, form)
        return fit_exponent([row.length for row in rows], [getattr(row, metric) for row in rows])


def fit_exponent(lengths: Sequence[float], costs: Sequence[float]) -> float | None:
    """The slope of log cost over log length by least squares; None with fewer than two lengths or a cost of 0."""
    if len(set(lengths)) < 2 or min(costs) <= 0:
        return None
    x, y = [math.log(each) for each in lengths], [math.log(each) for each in costs]
    middle_x, middle_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - middle_x) * (b - middle_y) for a, b in zip(x, y, strict=True))
    return covariance / sum((a - middle_x) ** 2 for a in x)


def default_names(role: str) -> list[str]:
    """`full`, and every mechanism of growth 1 whose paper gives it the role. Raises: MtkitError for no role."""
    check_role(find("full"), role)
    return ["full", *(each.name for each in mechanisms().values() if each.growth == 1 and role in each.published)]


def measure_attention(
    names: Sequence[str],
    lengths: Sequence[int],
    setting: Setting,
    *,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Benchmark:
    """Measures `full` and the mechanisms named, in turns, so that what slows the machine down slows all of them.

    `on_progress` is told how many of how many parts are done. What does not fit in memory is left out, with a line.
    Where a mechanism raises something else at work, the others are measured.

    Raises: MtkitError for a name, role, option or length that cannot be, and where nothing fits.
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
        _build(name, "sub-layer", min(lengths[-1], PROBES[-1]), setting, options)  # mistakes show before any work
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
    """The measurements so far, and what is known of the memory that longer lengths will need."""

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
        """All mechanisms at one length: each is counted once, which warms it up, then all are timed in turns."""
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
        best = dict.fromkeys(works, math.inf)
        for _ in range(self.setting.repeats):
            for name in list(works):
                work = works.pop(name)
                with self._alone(name, form, length):
                    best[name] = min(best[name], seconds_of(work, self.setting.device))
                    works[name] = work  # it has not failed
        for name in works:
            cost = costs[name]
            self._keep(Measurement(name, "forward-backward", form, length, best[name], cost.peak_bytes, cost.flops))
        self._advance(len(self.names))

    def steps(self, name: str, form: str) -> None:
        """One mechanism at every length whose forward-backward was measured, on one walk through all positions."""
        measured = (name, "forward-backward", form)
        lengths = [each.length for each in self.measurements if (each.attention, each.work, each.form) == measured]
        done = self._done
        if lengths:
            with self._alone(name, form, lengths[-1]):
                attention = self._build(name, form, lengths[-1] + BEYOND)
                walk = Walk(attention, *self._inputs(lengths[-1])[:2])
                for length in lengths:
                    seconds, cost = walk.measure(length)
                    self._keep(Measurement(name, "step", form, length, seconds, cost.peak_bytes, cost.flops))
                    self._advance(1)
        self._advance(len(self.lengths) - (self._done - done))

    @contextmanager
    def _alone(self, name: str, form: str, length: int) -> Iterator[None]:
        """What is raised inside costs this mechanism its measurement, and no other."""
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
        """Whether the mechanism takes this length, and memory will hold its work, judged by what shorter ones took."""
        held = self._held.setdefault((name, form), {})
        for probe in PROBES:
            if probe < length and len(held) < len(PROBES):
                work = training(self._build(name, form, probe), *self._inputs(probe))
                held[probe] = cost_of(work, self.setting.device).peak_bytes
        inputs = 3 * torch.float32.itemsize * self.setting.batch * length * self.setting.width
        need, free = inputs + predict_bytes(held, length, find(name).growth), free_bytes(self.setting.device)
        if need > free:
            self._skip(name, form, length, f"needs about {in_words(need)}, and {in_words(free)} are free")
            return False
        longest = self._build(name, form, length).longest
        if longest is not None and longest < length:
            self._skip(name, form, length, f"takes {longest:,} positions at most")
            return False
        return True

    def _inputs(self, length: int) -> tuple[Tensor, Tensor | None, Tensor]:
        """Query, memory and the gradient of the output, each (B, T, D)."""
        shape = (self.setting.batch, length, self.setting.width)
        query, memory, gradient = (
            torch.randn(shape, generator=self._generator, device=self.setting.device) for _ in range(3)
        )
        return query, memory if self.setting.role == "cross" else None, gradient

    def _build(self, name: str, form: str, length: int) -> Attention:
        return _build(name, form, length, self.setting, self.options)

    def _keep(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)

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
    """For each mechanism those options that it has; slots are options of all.

    Raises: MtkitError for an unknown name, and for an option that none of them has.
    """
    takes = {name: {*find(name).options, *SLOTS} for name in names}
    known = sorted(set().union(*takes.values()))
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known)
            raise MtkitError(f"none of {', '.join(takes)} has an attention option {shown(option)}{hint}")
    return {name: {key: value for key, value in options.items() if key in own} for name, own in takes.items()}
