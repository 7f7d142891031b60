from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtkit import product_rate
from mtkit.benchmark.training import (
    TURN,
    OwnTrainer,
    Plan,
    Trained,
    TrainingBenchmark,
    measure_training,
    own_trainers,
)
from mtkit.benchmark.training_report import _beside, as_object, bars, label_of, table
from mtkit.data.prepared import Prepared, open_prepared
from mtkit.errors import MtkitError
from mtkit.model.sublayers import POOL_ELEMENTS
from mtkit.recipe import Recipe
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.world import World
from tests.training.conftest import tiny

PLAN = Plan(updates=TURN + 2, warmup=3)


class Other:
    """Another program, which only notes what it is given."""

    program, attention, precision = "other", "full", "float32"

    def __init__(self) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.given: list[tuple[int, int]] = []
        self.loss = 0.0

    def arithmetic(self) -> AbstractContextManager[object]:
        return nullcontext()

    def update(self, work: UpdateBatches, number: int) -> None:
        self.given.append((number, work.tokens))
        self.loss += work.tokens

    def read_loss(self) -> float:
        loss, self.loss = self.loss, 0.0
        return loss


@pytest.fixture(autouse=True, scope="module")
def _small() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_rate, "LARGE", {"cpu": 32})
        patch.setattr(product_rate, "BLOCK_SECONDS", 1e-4)
        yield
    torch.set_num_threads(threads)


def recipe_on(prepared: Prepared, **groups: dict[str, object]) -> Recipe:
    return tiny(**groups).model_copy(update={"data": prepared.settings})


def measured(prepared: Prepared, other: Other, plan: Plan = PLAN) -> TrainingBenchmark:
    recipe, world = recipe_on(prepared), World("cpu")
    own = [
        OwnTrainer(recipe_on(prepared, training={"precision": "float32"}), prepared, world),
        OwnTrainer(
            recipe_on(prepared, training={"precision": "float32"}, attention={"name": "linear"}), prepared, world
        ),
    ]
    return measure_training(recipe, prepared, own, [other], plan, world)


@pytest.fixture(scope="module")
def other() -> Other:
    return Other()


@pytest.fixture(scope="module")
def benchmark(prepared_folder: Path, other: Other) -> TrainingBenchmark:
    return measured(open_prepared(prepared_folder), other)


def test_all_train_on_the_same_batches_and_the_warm_up_is_not_counted(
    benchmark: TrainingBenchmark, other: Other
) -> None:
    full, linear, theirs = benchmark.rows
    assert [number for number, _ in other.given] == list(range(1, PLAN.warmup + PLAN.updates + 1))
    tokens = [tokens for _, tokens in other.given[PLAN.warmup :]]
    assert full.tokens == linear.tokens == theirs.tokens == [sum(tokens[:TURN]), sum(tokens[TURN:])]
    assert theirs.loss == 1.0  # one a token, that of the warm-up read and dropped
    assert len(full.seconds) == 2
    assert min(full.seconds) > 0


def test_two_entries_of_one_mechanism_are_two_rows(prepared: Prepared) -> None:
    recipes = [
        (f"band[window_radius={radius}]", recipe_on(prepared, attention={"name": "band", "options": options}))
        for radius in (1, 9)
        for options in [{"window_radius": radius}]
    ]
    own = own_trainers(recipes, prepared, World("cpu"), ["float32", "bfloat16"])
    found = measure_training(recipes[0][1], prepared, own, [], PLAN, World("cpu"))
    assert [row.attention for row in found.rows] == [name for name, _ in recipes for _ in range(2)]
    assert all(row.operations for row in found.rows)
    columns = _beside(found)["× float32"]
    assert columns[label_of(found.rows[1])] is found.rows[0]
    assert columns[label_of(found.rows[3])] is found.rows[2]


def test_each_row_says_what_it_cost(benchmark: TrainingBenchmark) -> None:
    full, linear, theirs = benchmark.rows
    assert [row.attention for row in benchmark.rows] == ["full", "linear", "full"]
    assert full.peak_bytes > 4 * 4 * full.parameters  # weights, gradients and two moments, and what passes keep
    assert min(full.peak_bytes, linear.peak_bytes) > POOL_ELEMENTS  # each has the masks of dropout
    assert full.operations is not None
    assert full.operations == theirs.operations != linear.operations
    assert 2.0 < full.loss < 8.0
    share = benchmark.share(full)
    assert share == pytest.approx(full.operations * full.speed / benchmark.rates["float32"].best)


class Failing(Other):
    """Fails at its second timed update."""

    attention = "frail"

    def update(self, work: UpdateBatches, number: int) -> None:
        if number == PLAN.warmup + 2:
            raise RuntimeError("no memory\nfor this")
        super().update(work, number)


def test_one_that_fails_leaves_the_others_their_numbers(prepared: Prepared, other: Other) -> None:
    frail = Failing()
    benchmark = measured(prepared, frail)
    assert [row.failed for row in benchmark.rows] == [None, None, "RuntimeError: no memory"]
    assert [len(row.seconds) for row in benchmark.rows] == [2, 2, 0]
    text, rows = table(benchmark), as_object(benchmark)["rows"]
    assert "failed: other frail float32: RuntimeError: no memory\n" in text
    assert "×: relative to mtkit full float32" in text
    assert "tokens_per_second" in rows[0]
    assert "tokens_per_second" not in rows[2]
    assert len(bars(benchmark).speeds) == 2


def test_one_that_fails_alone_shows_its_error(prepared: Prepared) -> None:
    world = World("cpu")
    own = OwnTrainer(recipe_on(prepared, training={"precision": "float32"}), prepared, world)
    own.update = Failing().update  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory"):
        measure_training(recipe_on(prepared), prepared, [own], [], PLAN, world)


def row(attention: str, precision: str, speed: int, program: str = "mtkit") -> Trained:
    return Trained(program, attention, precision, 1, tokens=[speed], seconds=[1.0])


def test_attentions_are_ordered_by_speed_beside_full_and_the_first_precision(benchmark: TrainingBenchmark) -> None:
    rows = [
        row("full", "float32", 100),
        row("full", "bfloat16", 300),
        row("linear", "float32", 50),
        row("linear", "bfloat16", 600),
        row("full", "float32", 900, program="other"),
    ]
    lines = [line.split() for line in table(replace(benchmark, rows=rows)).split("\n") if line.startswith("  ")][:6]
    assert lines[0][:6] == ["tokens/s", "×", "×", "full", "×", "float32"]
    assert [line[:7] for line in lines[1:]] == [
        ["mtkit", "linear", "float32", "50", "×0.06", "×0.50", "×1.00"],
        ["mtkit", "linear", "bfloat16", "600", "×0.67", "×2.00", "×12.00"],
        ["mtkit", "full", "float32", "100", "×0.11", "×1.00", "×1.00"],
        ["mtkit", "full", "bfloat16", "300", "×0.33", "×1.00", "×3.00"],
        ["other", "full", "float32", "900", "×1.00", "-", "-"],
    ]


def test_speed_is_the_mean_and_the_middle_turn() -> None:
    row = Trained("mtkit", "full", "float32", 1, tokens=[10, 10, 40], seconds=[1.0, 2.0, 2.0])
    assert row.speed == 12.0
    assert row.median == 10.0


def test_the_report_compares_with_the_other_program(benchmark: TrainingBenchmark) -> None:
    text, content = table(benchmark), as_object(benchmark)
    assert "×: relative to other full float32" in text
    assert ", 1 update after 3 of warm-up" in table(replace(benchmark, plan=Plan(updates=1, warmup=3)))
    assert [row["times_base"] for row in content["rows"]][2] == 1.0
    assert content["rows"][0]["tokens_per_second"] == benchmark.rows[0].speed
    assert [own for *_, own in bars(benchmark).speeds] == [True, True, False]


@pytest.mark.parametrize("plan", [Plan(updates=0), Plan(warmup=1)])
def test_nothing_to_measure_is_refused(plan: Plan, prepared: Prepared) -> None:
    with pytest.raises(MtkitError, match="from"):
        measured(prepared, Other(), plan)
