"""Layers around an attention of one's own, which may break the contract."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mtkit.attention import Attended, Attention, Inputs, Site, State
from mtkit.errors import MtkitError
from mtkit.model.layers import Context, DecoderLayer, EncoderLayer, StackPass
from mtkit.recipe import ModelSettings

MODEL = ModelSettings(d_model=8, heads=2, feed_forward=8)


class Mine(Attention):
    """Gives what it is told to."""

    def __init__(self, role: str, given: Any) -> None:
        super().__init__(Site(role, 8, 2))
        self.given = given

    def attend(self, inputs: Inputs) -> Attended:
        found = self.given(inputs.query)
        assert found is None or isinstance(found, Attended | Tensor)
        return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda query: query, r"^attend of Mine returns Tensor; it must return Attended\(output\)$"),
        (lambda query: None, r"^attend of Mine returns NoneType; "),
        (
            lambda query: Attended(query[:, :1]),
            r"^attend of Mine makes an output \(2, 1, 8\) from a query \(2, 3, 8\); it must have the query's shape$",
        ),
    ],
)
def test_what_a_mechanism_returns_against_the_contract_is_said(given: Any, message: str) -> None:
    x = torch.zeros(2, 3, 8)
    context = Context(torch.zeros(2, 5, 8), None, None, None, None)
    with pytest.raises(MtkitError, match=message):
        EncoderLayer(Mine("encoder", given), MODEL)(x, StackPass(), valid=None, task=None)
    with pytest.raises(MtkitError, match=message):
        DecoderLayer(Mine("decoder", given), Mine("cross", Attended), MODEL)(x, StackPass(), context)
    with pytest.raises(MtkitError, match=message):
        DecoderLayer(Mine("decoder", Attended), Mine("cross", given), MODEL)(x, StackPass(), context)


class Carrying(Attention):
    """Notes the carry that it is given, and carries the numbers of its role and layer."""

    def __init__(self, role: str, layer: int, noted: list[tuple[str, int, Any]]) -> None:
        super().__init__(Site(role, 8, 2, layer=layer))
        self.noted = noted

    def attend(self, inputs: Inputs) -> Attended:
        self.noted.append((self.site.role, self.site.layer, inputs.carry))
        return Attended(inputs.query, carry=(self.site.role, self.site.layer))

    def advance(self, inputs: Inputs, state: State) -> tuple[Attended, State]:
        return self.attend(inputs), state


def test_each_attention_gets_what_the_same_one_of_the_layer_below_carries() -> None:
    noted: list[tuple[str, int, Any]] = []
    layers = [DecoderLayer(Carrying("decoder", i, noted), Carrying("cross", i, noted), MODEL) for i in range(3)]
    wanted = [(role, i, (role, i - 1) if i else None) for i in range(3) for role in ("decoder", "cross")]
    x, stack_pass = torch.zeros(2, 3, 8), StackPass()
    for layer in layers:
        x = layer(x, stack_pass, Context(torch.zeros(2, 5, 8), None, None, None, None))
    assert noted == wanted
    noted.clear()
    stack_pass = StackPass()
    for layer in layers:
        x, _, _ = layer.step(x, {"self": {}, "cross": {}}, stack_pass, need_weights=False)
    assert noted == wanted
    noted.clear()
    encoder, stack_pass = [EncoderLayer(Carrying("encoder", i, noted), MODEL) for i in range(3)], StackPass()
    for layer in encoder:
        x = layer(x, stack_pass, valid=None, task=None)
    assert noted == [("encoder", i, ("encoder", i - 1) if i else None) for i in range(3)]
