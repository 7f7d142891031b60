"""Steps that are repeated from a record: the same searches as by computed steps."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention.states import tensors_of
from mtkit.decoding.contract import Hypotheses, SourceBatch
from mtkit.decoding.engines.model_engine import SEARCHES, Ensemble, decoding_with
from mtkit.decoding.step_graphs import StepGraphs
from mtkit.errors import MtkitError
from mtkit.model.build import build_model
from mtkit.model.network import Logits, Network
from mtkit.recipe import DecodingSettings, make_recipe

VOCABULARY = 40


class Recorder:
    """Records as a CUDA graph does: nothing is computed at first, and each repetition overwrites the same results."""

    def __init__(self) -> None:
        self.repeated: dict[str, int] = {}

    def __call__(self, compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        (call,) = (cell.cell_contents for cell in compute.__closure__ or ())
        changed = list(tensors_of([call._inputs, *call._compute.args[:1]]))
        before = [tensor.clone() for tensor in changed]
        results = compute()
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        outputs = _outputs(results)
        for output in outputs:
            output.zero_()
        name = "step" if isinstance(results[0], Logits) else "best"

        def repeat() -> None:
            self.repeated[name] = self.repeated.get(name, 0) + 1
            for output, value in zip(outputs, _outputs(compute()), strict=True):
                output.copy_(value)

        return results, repeat


def _outputs(results: Any) -> list[Tensor]:
    return list(tensors_of([each.hidden if isinstance(each, Logits) else each for each in results]))


def network(**groups: object) -> Network:
    model = {"d_model": 32, "heads": 4, "feed_forward": 48, "encoder_layers": 2, "decoder_layers": 2, "max_length": 200}
    torch.manual_seed(3)
    recipe = make_recipe({"model": {**model, **groups.pop("model", {})}, **groups})  # type: ignore[dict-item]
    built = build_model(recipe, source_vocabulary=VOCABULARY, target_vocabulary=VOCABULARY)
    for name, parameter in built.named_parameters():
        if name.endswith("tokens.weight"):
            torch.nn.init.normal_(parameter, std=1.0)
    return built.eval()


def batch(limits: list[int], *, in_lines: bool = False) -> SourceBatch:
    source = torch.randint(5, VOCABULARY, (len(limits), 9))
    source[:, -1] = 3
    source[0, 4:] = torch.tensor([3, 0, 0, 0, 0])
    lines = [[limit] for limit in limits] if in_lines else None
    return SourceBatch(source, limits, torch.arange(len(limits)), lines=lines)


def searched(model: Any, given: SourceBatch, recorder: Any, **settings: object) -> Hypotheses:
    used = DecodingSettings.model_validate(settings)
    with decoding_with(model, None):
        return SEARCHES[used.method](StepGraphs(model, recorder) if recorder else model, given, used)


@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"model": {"norm": "post", "positions": "learned"}},
        {"model": {"positions": "none"}, "attention": {"options": {"positions": "rotary"}}},
        {"model": {"positions": "none"}, "attention": {"decoder": "full", "options": {"positions": "alibi"}}},
        {"attention": {"decoder": "multi-query", "cross": "grouped-query"}},
        {"attention": {"decoder": "realformer", "cross": "linear"}},
        {"attention": {"decoder": "gla", "cross": "sigmoid"}},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["greedy", "beam", "sample"])
def test_repeated_steps_give_the_same_hypotheses(groups: dict[str, object], method: str) -> None:
    model = network(**groups)
    given = batch([90, 12, 70, 33, 90, 5, 64, 90, 90, 41, 20, 90], in_lines=not groups)
    recorder = Recorder()
    settings = {"method": method, "beam": 3, "n_best": 2 if method == "sample" else 1, "seed": 4, "max_pieces": 90}
    wanted = searched(model, given, None, **settings)
    found = searched(model, given, recorder, **settings)
    assert torch.equal(found.pieces, wanted.pieces)
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-5, atol=1e-5)
    assert (wanted.pieces != 0).sum(-1).amax() > 40
    assert recorder.repeated["step"] > 60
    assert method == "sample" or recorder.repeated["best"] > 60


def test_a_mechanism_without_a_fixed_state_is_computed_step_by_step() -> None:
    model, given, recorder = network(attention={"decoder": "band"}), batch([30, 20]), Recorder()
    wanted, found = (searched(model, given, each, method="beam", beam=2) for each in (None, recorder))
    assert torch.equal(found.pieces, wanted.pieces)
    assert not recorder.repeated


def test_an_ensemble_is_repeated_too() -> None:
    model = Ensemble([network(), network(attention={"decoder": "linear"})]).eval()
    given, recorder = batch([40, 20, 33]), Recorder()
    wanted, found = (searched(model, given, each, method="beam", beam=2) for each in (None, recorder))
    assert torch.equal(found.pieces, wanted.pieces)
    assert recorder.repeated["step"] > 20


def test_steps_are_computed_if_they_cannot_be_recorded() -> None:
    def refuse(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        raise RuntimeError("operation not permitted when stream is capturing")

    model, given = network(), batch([20, 12])
    wanted = searched(model, given, None, method="beam", beam=2)
    with pytest.warns(UserWarning, match="without CUDA graphs: operation not permitted"):
        found = searched(model, given, refuse, method="beam", beam=2)
    assert torch.equal(found.pieces, wanted.pieces)


def test_short_memory_ends_a_recording() -> None:
    def refuse(compute: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(MtkitError, match="memory"):
        searched(network(), batch([20, 12]), refuse, method="greedy")


def test_a_beam_may_be_wider_than_the_vocabulary() -> None:
    """The first step has as many hypotheses as there are pieces, the next ones the whole beam."""
    model, recorder = network(), Recorder()
    given = batch([20, 12])
    wanted, found = (searched(model, given, each, method="beam", beam=VOCABULARY + 4) for each in (None, recorder))
    assert torch.equal(found.pieces, wanted.pieces)
    assert recorder.repeated["step"] > 5
