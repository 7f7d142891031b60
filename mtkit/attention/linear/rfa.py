"""Random feature attention: a Gaussian kernel of normalised queries and keys, estimated by random features.

Paper: Peng, Pappas, Yogatama, Schwartz, Smith and Kong, "Random Feature Attention", ICLR 2021, arXiv 2103.02143,
sections 2.2 to 3.2.
Departures: for directions w = sigma * N(0, I) / tau, the expected similarity of unit vectors q and k is
exp(-|sigma * (q - k)|² / (2 tau²)); with sigma = 1 the result estimates the softmax of q . k / tau². (The paper gives w
the variance sigma² in one place and 1 / sigma² in another.) The denominator can be negative; its magnitude is at least
1e-3 per visible key. The matrices of the pool are not stored but drawn again, as functions of seed, role, layer, head
and number. The default is 128 directions (the paper reports 64 and 128): with 64, the variance hides which token is
meant. Training differs from evaluation by dropout and by the matrix: training takes another one of the pool after each
update, evaluation takes the first. There are no weights, so attention dropout acts on the outputs of the heads.
Cost: O(T M V) time, O(T) memory for M features. A step reads at most 2 M V numbers per head, at any position. The
error of a similarity falls as 1 / sqrt(M). With arc-cosine features a key opposite to the query has similarity 0.
"""

from mtkit.attention.linear._random_features import RandomFeatureAttention


class RFA(RandomFeatureAttention):
    """Sums over keys of random features, whose products estimate a Gaussian kernel.

    feature_map: "sine" (the Gaussian kernel; a sine and a cosine for each direction) or "arc-cosine" (relu(w x), 1 for
    each direction). features: number of random directions D. tau: temperature of the kernel. learn_sigma: whether each
    head learns a factor for each component of the directions. pool: number of matrices of directions that training
    picks from. chunk: number of positions computed at once in the decoder role.
    """

    roles = published = frozenset({"encoder", "decoder", "cross"})
