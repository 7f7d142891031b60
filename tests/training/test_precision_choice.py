import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtkit import device
from mtkit.attention import mechanisms
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.errors import RunError
from mtkit.model.build import build_model
from mtkit.model.network import Network
from mtkit.recipe import Recipe
from mtkit.runs import Run
from mtkit.training import precision_choice, update
from mtkit.training.checkpoint import verified_tensors
from mtkit.training.data_loader import DataLoader
from mtkit.training.precision import Precision, update_precisions
from mtkit.training.precision_choice import LIMIT, measure_precisions
from mtkit.training.train import train
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.processes import together
from tests.training.conftest import tiny

CPU = torch.device("cpu")
NAMES = ("float32", "bfloat16")
WAYS = [Precision(name, torch.device("cpu")) for name in NAMES]
Seconds = Callable[[str, int], float]


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that has bfloat16 units, whatever this one has."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)


class Clock:
    """Stands still, but for the updates of the precisions that are measured: each takes the seconds that are set."""

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: Seconds = lambda name, calls: 1.0
        self.calls: list[tuple[str, int]] = []

    def update(self, name: str, tokens: int) -> None:
        self.calls.append((name, tokens))
        self.now += self.seconds(name, len(self.calls))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time as the choice sees it. Updates made for the choice have rate 0, and no others."""
    found, run = Clock(), Updater.run

    def timed(self: Updater, work: Any, number: int, *, rate: float, total_updates: int) -> None:
        run(self, work, number, rate=rate, total_updates=total_updates)
        if rate == 0.0:
            found.update(self.precision.name, work.tokens)

    monkeypatch.setattr(Updater, "run", timed)
    monkeypatch.setattr(precision_choice, "monotonic", lambda: found.now)
    return found


def model_of(recipe: Recipe, prepared: Prepared) -> Network:
    size = prepared.tokenizers.target.size
    return build_model(recipe, source_vocabulary=size, target_vocabulary=size)


def chosen(prepared: Prepared, recipe: Recipe) -> precision_choice.Faster:
    world = World("cpu")
    batches = DataLoader(recipe, prepared, 1024, world).samples(3)
    return measure_precisions(recipe, model_of(recipe, prepared), batches, world, WAYS)


@pytest.mark.parametrize(("faster", "slower"), [NAMES, NAMES[::-1]])
def test_the_faster_one_is_chosen(prepared: Prepared, clock: Clock, faster: str, slower: str) -> None:
    clock.seconds = lambda name, calls: 0.1 if name == faster else 0.16
    found = chosen(prepared, tiny())
    assert str(found) == f"{faster}: 1.60 times as fast as {slower} here (9 updates of each)"


@pytest.mark.parametrize("making", [0.3, LIMIT / 2 + 0.1])
def test_what_comes_once_does_not_count(prepared: Prepared, clock: Clock, making: float) -> None:
    """The first updates make kernels: here bfloat16's take long, and it is the faster one afterwards."""
    seen: dict[tuple[str, int], int] = {}

    def seconds(name: str, calls: int) -> float:
        key = (name, clock.calls[-1][1])
        seen[key] = seen.get(key, 0) + 1
        first = name == "bfloat16" and seen[key] == 1
        return making if first else 0.05 if name == "bfloat16" else 0.1

    clock.seconds = seconds
    found = chosen(prepared, tiny())
    assert (found.name, found.ratio) == ("bfloat16", pytest.approx(2.0))
    assert (found.updates < 9) == (making > 1.0)


def test_both_make_the_same_updates_and_take_turns_in_being_the_first(prepared: Prepared, clock: Clock) -> None:
    chosen(prepared, tiny())
    one, other = ([tokens for name, tokens in clock.calls if name == each] for each in NAMES)
    assert one == other
    turns = [name for name, _ in clock.calls[2:]]
    assert turns[:4] in (["float32", "bfloat16", "bfloat16", "float32"], ["bfloat16", "float32", "float32", "bfloat16"])


def test_measuring_ends_when_its_time_is_over(prepared: Prepared, clock: Clock) -> None:
    clock.seconds = lambda name, calls: 100.0 if calls <= 2 else LIMIT / 4.5
    assert chosen(prepared, tiny()).updates == 3
    for most, updates in ((3.0, 2), (30.0, 1)):
        clock.calls.clear()
        clock.seconds = lambda name, calls, most=most: most if name == "float32" else most / 1.5  # type: ignore[misc]
        found = chosen(prepared, tiny())
        assert (found.name, found.updates) == ("bfloat16", updates)
        assert found.ratio == pytest.approx(1.5)


def test_batches_are_of_the_run_s_data_from_narrow_to_wide(prepared: Prepared) -> None:
    recipe = tiny()
    one = DataLoader(recipe, prepared, 1024, World("cpu"))
    first, *others = one.samples(3)
    assert [len(each) for each in first.rows] == [1]
    widths = [each.batches[0].target_in.shape[1] for each in others]
    assert widths[0] < widths[1] < widths[2]
    planned = [set(rows.tolist()) for rows in one.plan(0)]
    assert all(set(each.rows[0].tolist()) in planned for each in others)
    assert all(each.tokens == each.batches[0].target_tokens for each in others)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_training_is_that_with_the_precision_given(
    prepared: Prepared, tmp_path: Path, units: None, clock: Clock, name: str, deterministic: bool
) -> None:
    clock.seconds = lambda precision, calls: 0.1 if precision == name else 0.2
    attention = {"encoder": "routing", "decoder": "performer", "cross": "sac", "options": {"clusters": 2}}
    said: list[str] = []

    def trained(folder: str, precision: str) -> dict[str, torch.Tensor]:
        training = {"max_updates": 8, "precision": precision, "deterministic": deterministic}
        recipe = tiny(attention=attention, training=training)
        train(recipe, prepared, tmp_path / folder, command=["mtkit"], device="cpu", say=said.append)
        last = tmp_path / folder / "checkpoints" / "update-00000008"
        files = {file: verified_tensors(last, file) for file in ("model", "optimizer", "ema")}
        return {f"{file}/{key}": value for file, tensors in files.items() for key, value in tensors.items()}

    given = trained("given", name)
    assert not clock.calls
    assert "precision" not in Run(tmp_path / "given").about
    measured_first = trained("measured", "auto")
    assert clock.calls
    assert any(line.startswith(f"{name}: 2.00 times as fast as") for line in said)
    assert Run(tmp_path / "measured").about.get("precision") == name
    assert all(torch.equal(given[key], measured_first[key]) for key in given)


def precision_line(prepared: Prepared, folder: Path, updates: int) -> str:
    """What a training with automatic precision says on it."""
    said: list[str] = []
    recipe = tiny(training={"max_updates": updates, "precision": "auto"})
    train(recipe, prepared, folder, command=["mtkit"], device="cpu", say=said.append)
    return next(line for line in said if " on cpu" in line)


def test_a_resumed_run_takes_what_was_measured_on_whatever_machine(
    prepared: Prepared, tmp_path: Path, units: None, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.seconds = lambda precision, calls: 0.2 if precision == "float32" else 0.1
    assert "; bfloat16 on cpu" in precision_line(prepared, tmp_path / "run", 8)
    calls = len(clock.calls)
    clock.seconds = lambda precision, calls: 0.1 if precision == "float32" else 0.2
    assert "; bfloat16 on cpu" in precision_line(prepared, tmp_path / "run", 12)
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False)
    assert "; bfloat16 on cpu" in precision_line(prepared, tmp_path / "run", 16)
    assert len(clock.calls) == calls
    with pytest.raises(RunError, match="precision: auto -> float32"):
        train(tiny(), prepared, tmp_path / "run", command=["mtkit"], device="cpu")


def test_a_run_of_an_earlier_version_goes_on_as_it_began(
    prepared: Prepared, tmp_path: Path, units: None, clock: Clock
) -> None:
    precision_line(prepared, tmp_path / "run", 8)
    path = tmp_path / "run" / "run.json"
    about = json.loads(path.read_text())
    del about["precision"]
    path.write_text(json.dumps(about))
    clock.calls.clear()
    clock.seconds = lambda precision, calls: 0.1 if precision == "float32" else 0.2
    assert "; bfloat16 on cpu" in precision_line(prepared, tmp_path / "run", 12)
    assert not clock.calls


def test_without_units_nothing_is_measured(
    prepared: Prepared, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, probe, lambda: False)
    assert [str(precision) for precision in update_precisions("auto", CPU)] == ["float32"]
    assert "; float32 on cpu" in precision_line(prepared, tmp_path / "run", 8)
    assert Run(tmp_path / "run").about.get("precision") == "float32"
    # a machine with such units keeps the precision of the run that it resumes
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert "; float32 on cpu" in precision_line(prepared, tmp_path / "run", 12)
    assert not clock.calls


@pytest.mark.parametrize(
    ("name", "reversible"), [*((name, False) for name in sorted(mechanisms())), ("full", True), ("sac", True)]
)
def test_measuring_leaves_every_model_as_it_is(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, name: str, reversible: bool
) -> None:
    monkeypatch.setattr(precision_choice, "LIMIT", 0.0)
    monkeypatch.setattr(precision_choice, "FIRST_LIMIT", 0.0)
    recipe = tiny(attention=dict.fromkeys(mechanisms()[name].roles, name), model={"reversible": reversible})
    model = model_of(recipe, prepared)
    before, random = {key: value.clone() for key, value in model.state_dict().items()}, torch.get_rng_state()
    batches = DataLoader(recipe, prepared, 1024, World("cpu")).samples(3)
    assert measure_precisions(recipe, model, batches, World("cpu"), WAYS).updates == 1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def measured_here(folder: Path, seconds: list[dict[str, float]]) -> str:
    """What is found where updates in each precision take this process, by rank, so many seconds."""
    now, run, recipe, prepared = 0.0, Updater.run, tiny(), open_prepared(folder)
    with World("cpu") as world:

        def timed(self: Updater, *given: Any, **more: Any) -> None:
            nonlocal now
            run(self, *given, **more)
            now += seconds[world.rank][self.precision.name]

        Updater.run, precision_choice.monotonic = timed, lambda: now  # type: ignore[assignment, method-assign]
        batches = DataLoader(recipe, prepared, 1024, world).samples(3)
        return str(measure_precisions(recipe, model_of(recipe, prepared), batches, world, WAYS))


def test_processes_agree_by_the_slowest_of_them(prepared: Prepared) -> None:
    seconds = [{"float32": 0.1, "bfloat16": 0.2}, {"float32": 0.5, "bfloat16": 0.3}]
    assert (
        together(2, measured_here, prepared.folder, seconds)
        == ["bfloat16: 1.67 times as fast as float32 here (4 updates of each)"] * 2
    )


class Gpu:
    """A world of one process on a GPU."""

    device, size, first = torch.device("cuda"), 1, True

    def agree(self, *values: float) -> tuple[float, ...]:
        return values


@pytest.mark.parametrize("faster", ["bfloat16", "bfloat16 with Triton", "bfloat16 with Triton and CUDA graphs"])
def test_kernels_on_a_gpu_are_chosen_once(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    train(tiny(), prepared, tmp_path / "run", command=[])
    measured: list[list[str]] = []

    def measure(*given: Any) -> precision_choice.Faster:
        measured.append([str(way) for way in given[4]])
        return precision_choice.Faster(faster, "other", 1.5, 4)

    monkeypatch.setattr(precision_choice, "measure_precisions", measure)
    monkeypatch.setattr("mtkit.training.precision.has_triton", lambda: True)
    monkeypatch.setattr(precision_choice, "can_resume", lambda _: False)
    monkeypatch.setattr("mtkit.training.precision.best_precision", lambda _: "bfloat16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    data, said = DataLoader(tiny(), prepared, 1024, World("cpu")), list[str]()
    recipe = tiny(training={"precision": "bfloat16"})
    given: list[Any] = [recipe, tmp_path / "run", None, data, Gpu(), said.append]
    chosen = [precision_choice.resolve_precision(*given) for _ in range(2)]
    wanted = ("bfloat16", faster != "bfloat16", "graphs" in faster)
    assert [(way.name, way.kernels, way.graphs) for way in chosen] == [wanted] * 2
    assert measured == [["bfloat16", "bfloat16 with Triton", "bfloat16 with Triton and CUDA graphs"]]
    assert len(said) == 1


@pytest.mark.parametrize(("deterministic", "processes"), [(True, 1), (False, 2)])
def test_kernels_are_not_measured_for_repeatable_results_and_several_gpus(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deterministic: bool, processes: int
) -> None:
    train(tiny(), prepared, tmp_path / "run", command=[])
    monkeypatch.setattr("mtkit.training.precision.has_triton", lambda: True)
    monkeypatch.setattr(precision_choice, "can_resume", lambda _: False)
    monkeypatch.setattr("mtkit.training.precision.best_precision", lambda _: "bfloat16")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **options: True)
    world = Gpu()
    world.size = processes
    recipe = tiny(training={"precision": "bfloat16", "deterministic": deterministic})
    given: list[Any] = [recipe, tmp_path / "run", None, None, world, print]
    assert not precision_choice.resolve_precision(*given).kernels


@pytest.mark.parametrize("kernels", [False, True])
def test_kernels_are_enabled_in_updates_alone(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    seen: list[bool] = []
    step = update.training_step

    def watched(*given: Any, **more: Any) -> Any:
        seen.append(device._kernels_enabled[0])
        return step(*given, **more)

    monkeypatch.setattr(update, "training_step", watched)
    way = Precision("float32", torch.device("cpu"), kernels=kernels)
    batches = DataLoader(tiny(), prepared, 1024, World("cpu")).samples(3)
    precision_choice.measure_precisions(tiny(), model_of(tiny(), prepared), batches, World("cpu"), [way])
    assert set(seen) == {kernels}
    assert not device._kernels_enabled[0]
