import pytest

from mtkit.attention.contract import Site
from mtkit.attention.heads.guided import Guided
from mtkit.recipe import TrainingSettings
from mtkit.training.limits import ENDLESS, Limits
from mtkit.training.progress import Progress

FLOPS_PER_TOKEN = 500.0


def limits(**settings: object) -> Limits:
    return Limits(TrainingSettings.model_validate(settings), updates_per_epoch=10, flops_per_token=FLOPS_PER_TOKEN)


@pytest.mark.parametrize(
    ("settings", "before", "at"),
    [
        ({"max_updates": 5}, Progress(update=4), Progress(update=5)),
        ({"max_epochs": 2}, Progress(epoch=1, batch=9), Progress(epoch=2)),
        ({"max_tokens": 700}, Progress(tokens=699), Progress(tokens=700)),
        ({"max_flops": 350_000.0}, Progress(tokens=699), Progress(tokens=700)),
        ({"max_minutes": 1.5}, Progress(seconds=89.9), Progress(seconds=90.0)),
        ({"patience": 3}, Progress(stale=2), Progress(stale=3)),
    ],
)
def test_a_limit_is_reached_at_its_number_and_not_before(
    settings: dict[str, object], before: Progress, at: Progress
) -> None:
    ((name, number),) = settings.items()
    assert limits(**settings).reached(before) is None
    assert limits(**settings).reached(at) == f"{name} = {number:,.10g}"
    assert limits().reached(at) is None


def test_the_nearest_limit_says_how_much_is_done_and_left() -> None:
    both = limits(max_updates=100, max_minutes=10)
    progress = Progress(update=20, seconds=300)
    assert both.done(progress) == 0.5
    assert both.seconds_left(progress, seconds_per_update=1.0) == 80
    assert both.seconds_left(progress, seconds_per_update=9.0) == 300
    assert limits(max_epochs=3).seconds_left(progress, 2.0) == 20.0
    assert limits().seconds_left(progress, 1.0) is None
    assert limits().done(progress) == 0.0


@pytest.mark.parametrize("settings", [{"max_tokens": 8_000}, {"max_flops": 8_000 * FLOPS_PER_TOKEN}])
def test_tokens_and_flops_are_limits_like_any_other(settings: dict[str, float]) -> None:
    progress = Progress(update=20, tokens=2_000, seconds=300)
    alone, beside = limits(**settings), limits(**settings, max_updates=50)
    assert alone.done(progress) == 0.25
    assert alone.done(Progress(update=81, tokens=8_099)) == 1.0
    assert alone.total_updates(progress) == 80
    assert alone.is_estimate(80)
    assert alone.total_updates(Progress()) == ENDLESS
    assert alone.seconds_left(progress, seconds_per_update=2.0) == 120
    assert limits(**settings, max_minutes=6).seconds_left(progress, 2.0) == 60
    assert beside.done(progress) == 0.4
    assert beside.total_updates(progress) == 50
    assert not beside.is_estimate(50)
    assert beside.seconds_left(progress, 2.0) == 60


def test_total_updates_follow_from_the_limits() -> None:
    assert limits(max_updates=100, max_epochs=3).total_updates(Progress()) == 30
    assert limits(max_updates=20, max_epochs=3).total_updates(Progress()) == 20
    assert limits(max_minutes=1).total_updates(Progress(update=7, seconds=20.0)) == 21
    assert limits(max_minutes=1, max_updates=20).total_updates(Progress(update=7, seconds=20.0)) == 20
    assert limits(max_minutes=1).total_updates(Progress(update=25, seconds=61.0)) == 25
    assert limits(patience=2).total_updates(Progress(update=7)) == ENDLESS
    assert limits(max_minutes=1).total_updates(Progress()) == ENDLESS


@pytest.mark.parametrize("settings", [{"max_minutes": 60}, {"patience": 3}, {"max_updates": 30_000}])
def test_guided_heads_are_guided_at_full_weight_as_long_as_their_options_say(settings: dict[str, float]) -> None:
    guided = Guided(Site("encoder", 32, 4), hold=20_000)
    progress = Progress(update=5_000, seconds=900.0)
    guided.after_update(5_001, limits(**settings).total_updates(progress))
    assert guided.factor == 1.0


def test_all_limits_are_described() -> None:
    text = limits(max_updates=5, max_minutes=1.5, patience=2).describe()
    assert text == "5 updates or 1.5 minutes or 2 validations without a better BLEU"
    assert limits(patience=2, best_by="exact").describe() == "2 validations without a better exact match"
    assert limits().describe() == "Ctrl-C"
    work = limits(max_tokens=12_345_678_901, max_flops=1e15).describe()
    assert work == "12,345,678,901 target tokens or 1e+15 training FLOPs"


def test_large_numbers_are_written_out() -> None:
    long = limits(max_updates=1_234_567, max_minutes=10_080.5)
    assert long.describe() == "1,234,567 updates or 10,080.5 minutes"
    assert long.reached(Progress(update=1_234_567)) == "max_updates = 1,234,567"
    assert limits(max_updates=1_000_000).describe() == "1,000,000 updates"
