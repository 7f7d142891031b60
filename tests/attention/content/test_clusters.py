"""Clusters: how centroids move, that all processes move them alike, and what the lists of members hold."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, distributed
from torch.utils.checkpoint import checkpoint

from mtkit.attention import reorder
from mtkit.attention.content._clusters import Centroids, enlist, enlisted, start_lists


def moved(decay: float, *batches: Tensor, valid: Tensor | None = None) -> Centroids:
    torch.manual_seed(3)
    centroids = Centroids(1, 2, 4, decay)
    for x in batches:
        centroids.gather(x, valid)
    centroids.update()
    return centroids


def test_one_update_is_the_moving_sum_over_the_moving_count() -> None:
    x = torch.randn(2, 1, 20, 4)
    before, after = moved(0.9), moved(0.9, x)
    own = before.nearest(x)
    for c in range(2):
        mine = x[own == c]
        expected = (0.9 * before.mean[0, c] + 0.1 * mine.sum(0)) / (0.9 + 0.1 * len(mine))
        torch.testing.assert_close(after.mean[0, c], expected, rtol=1e-4, atol=1e-5)  # but for the smoothing


def test_without_memory_a_centroid_is_the_mean_of_its_vectors() -> None:
    x = torch.randn(4).expand(1, 1, 30, 4)
    own = moved(0.0).nearest(x)[0, 0, 0]
    torch.testing.assert_close(moved(0.0, x).mean[0, own], x[0, 0, 0], rtol=1e-4, atol=1e-5)


def test_a_centroid_that_nothing_comes_to_stays() -> None:
    x = torch.randn(4).expand(1, 1, 30, 4)
    centroids = moved(0.5, x)
    other = 1 - centroids.nearest(x)[0, 0, 0]
    before = centroids.mean[0, other].clone()
    for _ in range(200):
        centroids.gather(x, None)
        centroids.update()
    torch.testing.assert_close(centroids.mean[0, other], before, rtol=0.02, atol=0.02)


def test_what_is_gathered_adds_up_over_batches_and_leaves_padding_out() -> None:
    x, valid = torch.randn(2, 1, 6, 4), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    whole = moved(0.9, x, valid=valid)
    parts = moved(0.9, x[:1], x[1:, :, :4])
    torch.testing.assert_close(whole.mean, parts.mean)
    assert not torch.equal(whole.mean, moved(0.9, x).mean)


def test_an_update_without_tokens_moves_nothing() -> None:
    centroids = moved(0.9, torch.randn(2, 1, 6, 4))
    before = {name: value.clone() for name, value in centroids.state_dict().items()}
    centroids.update()
    for name, value in centroids.state_dict().items():
        torch.testing.assert_close(value, before[name])


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_are_not_gathered_again(reentrant: bool) -> None:
    centroids, calls = Centroids(1, 2, 4, 0.9), []

    def layer(x: Tensor) -> Tensor:
        calls.append(None)
        centroids.gather(x, None)
        return x.sin()

    x = torch.randn(1, 1, 7, 4, requires_grad=True)
    output = checkpoint(layer, x, use_reentrant=reentrant)
    assert centroids.new_mass.sum() == 7
    output.sum().backward()
    assert len(calls) == 2, "the layer was computed again"
    assert centroids.new_mass.sum() == 7


def test_nothing_is_gathered_in_evaluation() -> None:
    centroids = Centroids(1, 2, 4, 0.9).eval()
    centroids.gather(torch.randn(1, 1, 7, 4), None)
    assert not centroids.new_mass.any()


def _process(rank: int, folder: str, x: Tensor) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    save_file({"mean": moved(0.9, x[rank : rank + 1]).mean}, f"{folder}/{rank}")
    distributed.destroy_process_group()


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="forks")
def test_processes_move_their_centroids_together(tmp_path: Path) -> None:
    x = torch.randn(2, 1, 12, 4)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_process, args=(rank, str(tmp_path), x)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    one, other = (load_file(tmp_path / str(rank))["mean"] for rank in range(2))
    assert torch.equal(one, other)
    torch.testing.assert_close(one, moved(0.9, x).mean)


def test_of_equal_products_the_first_come_first_whatever_the_width_of_the_batch() -> None:
    centroids = Centroids(heads=2, clusters=3, width=4, decay=0.9)
    words = torch.randn(4, 4)[torch.randint(4, (40,))].expand(1, 2, 40, 4)
    alone, _ = centroids.best(words, 12, None)
    for padding in (1, 3, 24, 100):
        beside = torch.cat([words, torch.zeros(1, 2, padding, 4)], 2)
        valid = torch.arange(40 + padding).unsqueeze(0) < 40
        assert torch.equal(centroids.best(beside, 12, valid)[0], alone)
    products = centroids.scores(words).take_along_dim(alone.transpose(2, 3), 2)
    equal = products[:, :, 1:] == products[:, :, :-1]
    assert equal.any()
    assert (alone.transpose(2, 3).diff(dim=2)[equal] > 0).all()


def test_lists_keep_the_last_members_of_each_group_of_each_hypothesis() -> None:
    most, groups = 5, 3
    lists = start_lists(1, 2, 1, groups, torch.zeros(()))
    history: list[list[int]] = [[], []]
    for position in range(30):
        group = torch.randint(0, groups, (1, 2, 1))
        lists = enlist(lists, group, position, most)
        for hypothesis in range(2):
            history[hypothesis].append(group[0, hypothesis, 0].item())  # type: ignore[arg-type]
        if position == 11:
            lists, history = reorder(lists, torch.tensor([[1, 1]])), [list(history[1]), list(history[1])]
        for each in range(groups):
            members, rank = enlisted(lists, torch.full((1, 2, 1), each))
            for hypothesis, past in enumerate(history):
                mine = [i for i, g in enumerate(past) if g == each]
                found = zip(rank[0, hypothesis, 0].tolist(), members[0, hypothesis, 0].tolist(), strict=True)
                assert sorted(pair for pair in found if pair[0] >= 0) == list(enumerate(mine))[-most:]
    assert lists["members"].shape == (1, 2, 1, groups, most)
