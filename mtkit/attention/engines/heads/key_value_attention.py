"""Attention that keeps the keys and values of all it has seen: what decoding does alike for every such mechanism."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtkit.attention.contract import State
from mtkit.attention.engines.cache.step_cache import append, start_cache, written
from mtkit.attention.engines.heads.head_attention import HeadAttention
from mtkit.attention.engines.softmax.dot_product import step_rows


class Newest(NamedTuple):
    """The newest token of each hypothesis and all it may see, as whole sequences (see `step_rows`).

    In the decoder role each of the B*N hypotheses is a segment with one query; in the cross role, and where hypotheses
    share their past (`shared_past`), the N hypotheses are the queries of their segment.
    """

    q: Tensor
    """(B*N, H, 1, K), or (B, H, N, K)."""
    keys: Tensor
    """(B*N, G, L, K), or (B, G, S, K); of a shared past the M rows of all hypotheses, (B, G, M, K)."""
    values: Tensor
    """(B*N, G, L, V), or (B, G, S, V)."""
    visible: Tensor | None
    """(B, 1, 1, S) in the cross role, (B, 1, N, M) of a shared past, or None where all is seen."""
    query_position: Tensor
    """(1,); 0 in the cross role, which has no positions."""
    key_position: Tensor
    """(L,), or (S,), or (M,), in which those of hypotheses repeat."""


class KeyValueAttention(HeadAttention):
    """Attention over projected heads whose state is the keys and values of all tokens so far, or of the source."""

    def start(
        self,
        batch_size: int,
        memory: Tensor | None = None,
        memory_valid: Tensor | None = None,
        *,
        hypotheses: int = 1,
        carry: Any = None,
        memory_carry: Any = None,
        task: Tensor | None = None,
    ) -> tuple[State, Any]:
        """An empty key and value cache; in the cross role the projected source, once for all hypotheses."""
        if memory is not None:
            # heads first in memory too, for otherwise each step's products would copy them
            k, v = (x.contiguous() for x in self.keys_values(memory))
            return {"shared": {"keys": k, "values": v, "valid": memory_valid}}, None
        return start_cache(batch_size, hypotheses, self.q_proj.weight, **self.cache_shapes), None

    def newest(self, query: Tensor, state: State) -> tuple[Newest, State]:
        """What a step with query (B, N, D) attends with, and the state with its keys and values added."""
        here = torch.full((1,), state.get("count", 0), device=query.device)
        visible = None
        if "shared" in state:
            shared = state["shared"]
            visible = None if shared["valid"] is None else shared["valid"][:, None, None, :]
            rows = step_rows(self.queries(query).transpose(1, 2), shared["keys"], shared["values"])
        else:
            token = query.flatten(0, 1).unsqueeze(1)  # (B*N, 1, D): a segment of one token for each hypothesis
            k, v = self.keys_values(token, here)
            q, k, v = (x.squeeze(2).unflatten(0, query.shape[:2]) for x in (self.queries(token, here), k, v))
            state = append(state, keys=k, values=v)
            rows = step_rows(q, written(state, "keys"), written(state, "values"))
        return Newest(*rows, visible, here, torch.arange(rows[1].shape[2], device=query.device)), state
