import torch
from torch import nn

from mtkit.training.optimization.averaging import MovingAverage, mean_weights


def test_the_moving_average_follows_with_the_decay_of_the_update() -> None:
    model = nn.Linear(3, 2)
    average = MovingAverage(model, 0.9)
    expected = model.weight.detach().clone()
    for update in (1, 2, 500):
        nn.init.normal_(model.weight)
        decay = min(0.9, (1 + update) / (10 + update))
        expected = decay * expected + (1 - decay) * model.weight.detach()
        average.follow(update)
    torch.testing.assert_close(average.weights["weight"], expected)


def test_inside_the_block_the_model_has_the_averaged_weights_and_after_it_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight  # tied
    average = MovingAverage(model, 0.9)
    start, own = model[0].weight.detach().clone(), torch.randn(3, 3)
    with torch.no_grad():
        model[0].weight.copy_(own)
    with average.in_place():
        assert torch.equal(model[0].weight, start)
        assert model[1].weight is model[0].weight
    assert torch.equal(model[0].weight, own)
    assert torch.equal(average.weights["0.weight"], start)


def test_the_mean_keeps_types_and_takes_what_are_no_weights_from_the_last() -> None:
    checkpoints = [
        {"w": torch.tensor([1.0, value]), "drawn": torch.tensor([value]), "n": torch.tensor(int(value))}
        for value in (1.0, 2.0, 6.0)
    ]
    mean = mean_weights(iter(checkpoints), {"w"})
    torch.testing.assert_close(mean["w"], torch.tensor([1.0, 3.0]))
    assert (mean["drawn"].item(), mean["n"].item()) == (6.0, 6)
