"""The update of another program's model on mtkit's batches: AdamW, clipping, autocast, label smoothing."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mtkit.data.batches import Batch
from mtkit.data.prepared import Prepared
from mtkit.errors import MtkitError, shown
from mtkit.recipe import Recipe
from mtkit.training.data_loader import UpdateBatches
from mtkit.training.optimization.schedule import build_schedule
from mtkit.training.world import World


class PeerTrainer(ABC):
    """Trains the model that `build` returns, by the loss that `loss_of` returns."""

    program: str
    attention = "full"
    precisions: tuple[str, ...]
    """Precisions of the program's own trainer: float32, or autocast to the others."""
    fused: bool | None
    """Whether its AdamW updates all parameters in one operation; None: PyTorch's default."""

    def __init__(self, recipe: Recipe, prepared: Prepared, world: World, precision: str) -> None:
        """Build the model. Raises: MtkitError under torchrun, and for an unsupported model, precision or loss."""
        if world.size > 1:
            raise MtkitError("--beside measures one process; leave it out under torchrun")
        if recipe.training.r_drop:
            raise MtkitError(f"{self.program} has no R-Drop: leave out --beside, or set training.r_drop: 0")
        if precision not in self.precisions:
            raise MtkitError(f"{self.program} has no precision {shown(precision)}; it has {', '.join(self.precisions)}")
        self.precision = precision
        settings, torch_state = recipe.training, torch.random.get_rng_state()
        self.settings, self.device = settings, world.device
        torch.manual_seed(recipe.seed)
        self.model: Any = self.build(recipe, prepared).to(world.device).train()
        torch.random.set_rng_state(torch_state)
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=1.0,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=self.fused,
        )
        self._schedule = build_schedule(settings, recipe.model.d_model)
        self._scaler = torch.amp.GradScaler(world.device.type, enabled=precision == "float16")
        self._loss = torch.zeros((), device=world.device)

    @abstractmethod
    def build(self, recipe: Recipe, prepared: Prepared) -> nn.Module:
        """Return the model. Raises: MtkitError if the program has no such model."""

    @abstractmethod
    def loss_of(self, batch: Batch) -> Tensor:
        """Return the sum of the batch's losses."""

    def arithmetic(self) -> AbstractContextManager[object]:
        """Context that changes nothing: the program trains with the process's settings."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """Context in which the model computes."""
        reduced = self.precision != "float32"
        return torch.autocast(self.device.type, getattr(torch, self.precision) if reduced else None, enabled=reduced)

    def update(self, work: UpdateBatches, number: int) -> None:
        """Run forward and backward of each batch, clip, and step."""
        for batch in work.batches:
            loss = self.loss_of(batch)
            self._scaler.scale(loss / work.tokens).backward()
            self._loss += loss.detach()
        self._scaler.unscale_(self._optimizer)
        if self.settings.clip_norm > 0:
            nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule(number, 0.0)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()

    def read_loss(self) -> float:
        """Return the loss from the running sum of `update`."""
        loss = float(self._loss)
        self._loss.zero_()
        return loss
