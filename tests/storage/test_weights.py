from pathlib import Path

import pytest
import torch
from torch import nn

from mtkit.errors import RunError
from mtkit.storage.weights import load_weights


def model() -> nn.Module:
    made = nn.Linear(2, 3)
    made.register_buffer("seen", torch.tensor(0))
    return made


def test_weights_of_another_precision_are_loaded() -> None:
    one = model()
    load_weights(
        one, {name: value + 1 for name, value in one.state_dict().items()} | {"bias": torch.ones(3).half()}, Path()
    )
    assert one.state_dict()["bias"].tolist() == [1.0] * 3
    assert one.state_dict()["bias"].dtype == torch.float32
    assert int(one.state_dict()["seen"]) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("bias", None, "only the recipe's model has bias"),
        ("scale", torch.ones(3), "only the file has scale"),
        ("bias", torch.ones(4), r"bias is \(4,\) in the file and \(3,\) in the recipe's model"),
        ("bias", torch.ones(3, dtype=torch.int64), "bias is torch.int64 in the file and torch.float32"),
        ("bias", torch.ones(3, dtype=torch.complex64), "bias is torch.complex64 in the file and torch.float32"),
        ("seen", torch.tensor(1.5), "seen is torch.float32 in the file and torch.int64"),
    ],
)
def test_weights_of_another_model_are_named_and_none_is_loaded(
    name: str, value: torch.Tensor | None, message: str
) -> None:
    one = model()
    before = {key: tensor.clone() for key, tensor in one.state_dict().items()}
    weights = {key: tensor + 1 for key, tensor in before.items() if key != name}
    with pytest.raises(RunError, match=f"run holds another model: {message}"):
        load_weights(one, weights if value is None else weights | {name: value}, Path("run"))
    assert all(torch.equal(tensor, before[key]) for key, tensor in one.state_dict().items())
