"""Relative labels: which pair has which, and what it adds to a score."""

import torch

from mtkit.attention.contract import Site
from mtkit.attention.sparse._relative_labels import RelativeLabels


def make(heads: int = 2, width: int = 4, clip: int = 2) -> RelativeLabels:
    labels = RelativeLabels(Site("encoder", heads * width, heads), width, clip=clip).double()
    torch.nn.init.normal_(labels.vectors)
    torch.nn.init.normal_(labels.biases)
    return labels


def test_a_label_tells_the_clipped_distance_and_the_side() -> None:
    at = torch.arange(5)
    assert make().label(at, at).tolist() == [
        [0, 1, 2, 2, 2],
        [3, 0, 1, 2, 2],
        [4, 3, 0, 1, 2],
        [4, 4, 3, 0, 1],
        [4, 4, 4, 3, 0],
    ]


def test_vectors_and_biases_are_scaled_as_the_product_of_query_and_key_is() -> None:
    labels, q = make(), torch.randn(3, 2, 5, 4, dtype=torch.float64)
    at, member = torch.arange(5), torch.rand(5, 5) < 0.5
    near, far = labels.bias(q, at, at, 0.5), labels.belonging(q, member, 0.5)
    for head in range(2):
        for i in range(5):
            for j in range(5):
                for given, label in ((near, labels.label(at, at)[i, j]), (far, 5 + member[i, j].long())):
                    wanted = 0.5 * (q[:, head, i] @ labels.vectors[head, label] + labels.biases[head, label])
                    torch.testing.assert_close(given[:, head, i, j], wanted)


def test_in_blocks_it_gives_what_it_gives_in_one() -> None:
    labels, q, at = make(), torch.randn(3, 2, 6, 4, dtype=torch.float64), torch.arange(6)
    whole = labels.bias(q, at, at, 0.5).detach()
    blocks = labels.bias(q.unflatten(2, (1, 2, 3)), at.view(1, 2, 3), at.expand(1, 1, 6), 0.5)
    torch.testing.assert_close(blocks.detach().flatten(2, 4), whole)
