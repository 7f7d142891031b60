"""CA-MTL: a learned map over positions, modulated by the task, is added to the scores of the upper layers.

Paper: Pilault, Elhattami and Pal, "Conditionally Adaptive Multi-Task Learning", ICLR 2021, arXiv 2009.09139,
section 3.1. Here a task is a translation direction.
Departures: the modulation starts at zero, so that training starts from full attention (the published code draws it).
Each layer has its own task embedding. The number of blocks is an option, not tied to the model's width.
Cost: O(T S) time and memory, because the added map rules out the fused kernel; heads share one map per task.
O(max_length²/blocks) parameters per layer. A step costs O(t), and the added row is as wide as one block.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mtkit.attention.bases.score_attention import Pairs, ScoreAttention
from mtkit.attention.contract import Attended, Beginning, Inputs, Site, State, packing
from mtkit.attention.kernels.dot_product import upcast
from mtkit.attention.options import Null, OneOf, Positive
from mtkit.errors import MtkitError

LAYERS = ("top-half", "all")


class CaMtl(ScoreAttention):
    """Scaled dot-product attention with a block-diagonal map of positions added to its scores, one for each task.

    tasks: number of tasks. blocks: number of diagonal blocks of the map, which together cover max_length positions.
    task_dim: width of the task embedding. apply_layers: layers that add the map, "top-half" (the paper's) or "all".
    per_block: whether the task modulates every entry of each block separately (the paper's equation, with task_dim
    times 2 max_length²/blocks parameters); otherwise all blocks and rows share one modulation per column (its code).
    """

    roles = published = frozenset({"encoder", "decoder"})
    keeps_shapes = False
    paper = "Pilault et al. 2021, arXiv 2009.09139"
    small: ClassVar[Mapping[str, Any]] = {"tasks": 3, "blocks": 20, "task_dim": 4}
    variants = ({"apply_layers": "all"},)

    def __init__(
        self,
        site: Site,
        *,
        tasks: Positive = 1,
        blocks: Positive = 8,
        task_dim: Annotated[Positive | None, Null("d_model")] = None,
        apply_layers: Annotated[str, OneOf(LAYERS)] = "top-half",
        per_block: bool = False,
    ) -> None:
        super().__init__(site)
        self.tasks = tasks
        self.per_block = per_block
        self.applies = apply_layers == "all" or site.layer >= site.layers // 2
        if not self.applies:  # a layer of full attention
            return
        self.longest: int = site.max_length
        self.block = -(-site.max_length // blocks)
        task_dim = task_dim or site.d_model
        modulated = site.max_length * self.block if per_block else self.block
        self.task_embedding = nn.Embedding(tasks, task_dim)
        self.task_proj = nn.Linear(task_dim, task_dim)
        self.modulation = nn.Linear(task_dim, 2 * modulated)
        self.map = nn.Parameter(torch.zeros(site.max_length, self.block))
        nn.init.normal_(self.task_embedding.weight, std=task_dim**-0.5)
        nn.init.xavier_uniform_(self.task_proj.weight)
        for zero in (self.task_proj.bias, self.modulation.weight, self.modulation.bias):
            nn.init.zeros_(zero)

    def logits(self, pairs: Pairs, carry: Any) -> tuple[Tensor, Any]:
        """Return Q K^T / sqrt(K) + M(task).

        Raises: MtkitError if T is more than `longest`, and (on the CPU) for an unknown task.
        """
        scores = self.scores(pairs)
        if not self.applies:
            return scores, None
        if pairs.state is None:
            return upcast(scores) + self._maps(pairs.task, len(pairs.query_position)).unsqueeze(1), None
        position = pairs.state["count"] - 1
        self._fits(position + 1)
        column = position % self.block  # in the query's block; nothing is added to keys of earlier blocks
        row = self._rows(pairs.state["shared"]["condition"], position, position + 1)[:, 0, : column + 1]
        row = F.pad(row, (position - column, 0)).repeat_interleave(pairs.hypotheses, 0)  # (B*N, t)
        return upcast(scores) + row[:, None, None], None

    def begin(self, inputs: Beginning) -> tuple[State, Any]:
        """Return an empty cache and, under "shared", each segment's modulation of the map."""
        state, _ = super().begin(inputs)
        if self.applies:
            state["shared"] = {"condition": self._condition(self._checked(inputs.task).expand(inputs.batch_size))}
        return state, None

    @torch.no_grad()
    def learned_numbers(self, inputs: Inputs | None = None) -> dict[str, Tensor]:
        """Add the root mean square of each task's map, the same in all heads."""
        learned = super().learned_numbers(inputs)
        if self.applies:
            maps = self._rows(self._condition(torch.arange(self.tasks, device=self.map.device)), 0, self.longest)
            learned["map size"] = maps.square().mean((1, 2)).sqrt().unsqueeze(0)
        return learned

    @packing
    def naive(self, inputs: Inputs) -> Attended:
        query = inputs.query
        pairs = self.pairs(query, valid=inputs.query_valid)
        logits = self.scores(pairs)
        if self.applies:
            tasks = [0] * len(query) if inputs.task is None else inputs.task.tolist()
            logits = logits + torch.stack([self._naive_map(task, query.shape[1]) for task in tasks]).unsqueeze(1)
        weights = self.softmax(logits, pairs)
        return Attended(self.merge_heads(self.outputs(weights, pairs), query), weights=weights)

    def _naive_map(self, task: int, length: int) -> Tensor:
        z = self.task_proj(self.task_embedding.weight[task])
        size = (self.longest, self.block) if self.per_block else (1, self.block)
        gamma, beta = self.modulation(z).view(2, *size).expand(2, self.longest, self.block)
        rows = []
        for t in range(length):
            entries = (1 + gamma[t]) * self.map[t] + beta[t]
            left = entries.new_zeros(t // self.block * self.block)
            rows.append(torch.cat([left, entries, entries.new_zeros(length)])[:length])
        return torch.stack(rows)

    def _maps(self, task: Tensor | None, length: int) -> Tensor:
        """Return M of each segment, (B, T, T), or (1, T, T) if all have task 0.

        It is built per segment, or per task and then picked, whichever builds fewer.
        """
        self._fits(length)
        tasks = self._checked(task)
        per_segment = len(tasks) <= self.tasks
        needed = tasks if per_segment else torch.arange(self.tasks, device=tasks.device)
        rows = self._rows(self._condition(needed), 0, length)
        blocks = -(-length // self.block)
        rows = F.pad(rows, (0, 0, 0, blocks * self.block - length))
        squares = rows.unflatten(1, (blocks, self.block))  # (maps, C, b, b)
        diagonal = torch.diag_embed(squares.movedim(1, -1)).permute(0, 3, 1, 4, 2)  # (maps, C, b, C, b)
        maps = diagonal.flatten(3, 4).flatten(1, 2)[:, :length, :length]
        return maps if per_segment else maps.index_select(0, tasks)

    def _condition(self, task: Tensor) -> Tensor:
        """Return the input of `_rows` for each task (B,): gamma and beta concatenated, (B, 2 b); per block, z (B,
        task_dim).
        """
        with torch.autocast(task.device.type, enabled=False):
            z = _linear_float32(self.task_proj, upcast(self.task_embedding(task)))
            return z if self.per_block else _linear_float32(self.modulation, z)

    def _rows(self, condition: Tensor, first: int, last: int) -> Tensor:
        """Return rows `first` to `last` of M inside their blocks, (B, last - first, b), in at least float32."""
        if not self.per_block:
            gamma, beta = condition.unsqueeze(1).chunk(2, -1)
        else:
            shape = (2, self.longest, self.block)
            weight = self.modulation.weight.view(*shape, -1)[:, first:last]
            bias = self.modulation.bias.view(shape)[:, first:last]
            with torch.autocast(condition.device.type, enabled=False):
                gamma, beta = torch.einsum("prcz,bz->pbrc", upcast(weight), condition) + bias.unsqueeze(1)
        return (1 + gamma) * upcast(self.map[first:last]) + beta

    def _checked(self, task: Tensor | None) -> Tensor:
        """Return task, or (1,) of task 0. On a GPU its range is not checked: reading it would halt every update."""
        if task is None:
            return torch.zeros(1, dtype=torch.long, device=self.map.device)
        if task.device.type == "cpu" and len(task) and not 0 <= int(task.min()) <= int(task.max()) < self.tasks:
            wrong = next(number for number in task.tolist() if not 0 <= number < self.tasks)
            raise MtkitError(f"camtl has no task {wrong}: it was built for tasks = {self.tasks}, counted from 0")
        return task

    def _fits(self, length: int) -> None:
        if length > self.longest:
            raise MtkitError(f"camtl was built for {self.longest} positions, not {length}: raise model.max_length")


def _linear_float32(linear: nn.Linear, x: Tensor) -> Tensor:
    """Return the linear map of x in at least float32, whatever the type of its weights."""
    return F.linear(x, upcast(linear.weight), upcast(linear.bias))
