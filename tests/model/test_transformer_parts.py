"""A batch encoded in parts is the batch encoded whole."""

import pytest
import torch
from torch import Tensor

from mtkit.attention import mechanisms
from mtkit.model.build import build_model
from mtkit.model.network import Encoded
from mtkit.model.transformer import encoded_in_parts
from mtkit.recipe import load_recipe

SMALL = {"d_model": 16, "heads": 2, "feed_forward": 24, "max_length": 32, "encoder_layers": 2, "decoder_layers": 1}
LENGTHS = [12, 12, 12, 9, 5, 5, 3, 2, 1]


def batch() -> tuple[Tensor, Tensor]:
    valid = torch.arange(12) < torch.tensor(LENGTHS)[:, None]
    return torch.randint(4, 24, (9, 12)).masked_fill(~valid, 0), valid


def few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtkit.model.transformer.TOGETHER", 24)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name, each in mechanisms().items() if "encoder" in each.roles])
def test_every_mechanism_encodes_parts_as_it_does_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = build_model(
        load_recipe(None, {"model": SMALL, "attention": {"encoder": name}}), source_vocabulary=24, target_vocabulary=24
    )
    net = net.eval().double()  # some processors' rounding in float32 is more than a tolerance that shows mistakes
    source, valid = batch()
    whole = net.encode(source, valid)
    few_together(monkeypatch)
    parts = net.encode(source, valid)
    assert parts.memory.shape == whole.memory.shape
    torch.testing.assert_close(parts.memory[valid], whole.memory[valid], rtol=0.0, atol=1e-10)


def test_parts_are_as_wide_as_their_segments_and_hold_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    few_together(monkeypatch)
    source, valid = batch()
    task, seen = torch.arange(9), []

    def encode(source: Tensor, source_valid: Tensor | None, *, task: Tensor | None) -> Encoded:
        assert source_valid is not None
        assert task is not None
        seen.append((task.tolist(), source.shape[1]))
        return Encoded(source[..., None].float() + 1.0, source_valid, None, task)

    with torch.no_grad():
        found = encoded_in_parts(encode, source, valid, task)
        assert found is not None
        assert seen == [([0, 1], 12), ([2, 3], 12), ([4, 5, 6, 7], 5), ([8], 1)]
        assert torch.equal(found.memory[..., 0][valid], (source + 1.0)[valid])
        assert found.valid is valid
        assert found.task is task
        carried = encoded_in_parts(lambda *a, **b: Encoded(torch.zeros(1, 1, 1), None, carry=1), source, valid, task)
        assert carried is None
    assert encoded_in_parts(encode, source, valid, task) is None, "with gradients"
