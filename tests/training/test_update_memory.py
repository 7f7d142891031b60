import pytest

from mtkit.errors import RunError
from mtkit.training.precision import Precision
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.training.conftest import tiny
from tests.training.test_update import CPU, StandIn


def test_optimiser_state_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = StandIn(10)
    size = 4 * (10 * 6 + 1)
    for ema, parts in ((0.0, 3), (0.9, 4)):
        recipe = tiny(training={"ema": ema})
        monkeypatch.setattr("mtkit.training.update.available_bytes", lambda parts=parts: size * parts)
        Updater(model, recipe, World("cpu"), Precision("float32", CPU))
        monkeypatch.setattr("mtkit.training.update.available_bytes", lambda parts=parts: size * parts - 1)
        with pytest.raises(
            RunError, match=r"gradients and optimiser state .* are available here: lower model\.d_model"
        ):
            Updater(model, recipe, World("cpu"), Precision("float32", CPU))
