from weakref import ref

import pytest

from mtkit.data.prepared import Prepared
from mtkit.errors import RunError
from mtkit.model.build import build_model
from mtkit.model.sublayers import LayerNorm
from mtkit.training.precision import Precision
from mtkit.training.update import Updater
from mtkit.training.world import World
from tests.training.conftest import tiny
from tests.training.test_update import CPU, StandIn, work_of


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


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_of_all_norms_an_update_holds_only_the_last_output(prepared: Prepared, norm: str, precision: str) -> None:
    recipe, outputs, held = tiny(model={"norm": norm}), [], []
    model = build_model(recipe, **prepared.model_sizes).train()
    for module in model.modules():
        if isinstance(module, LayerNorm):
            module.register_forward_hook(lambda *args: outputs.append(ref(args[2].untyped_storage())))
    model.register_forward_hook(lambda *_: held.append(sum(output() is not None for output in outputs)))
    steps = Updater(model, recipe, World("cpu"), Precision(precision, CPU))
    steps.run(work_of(prepared, [0, 1, 2]), 1, rate=0.0, total_updates=2)
    assert held == [1]
    assert len(outputs) > 4
