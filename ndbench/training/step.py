"""One optimizer step: micro-batches, one reduction, the global norm, clipping, the update. No wait for the device.

The loss is the sum over valid tokens of the global batch over the number of those tokens, whatever ranks and
micro-steps they are spread over.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from ndbench.engines.protocol import Batch, StepResult
from ndbench.parallel.context import shard_sequence
from ndbench.parallel.gradients import Gradients
from ndbench.parallel.mesh import Mesh
from ndbench.training.loss import IGNORED, Upstream
from ndbench.training.optimizer import ShardOptimizer


class Step:
    """The step of one rank; call it with the whole batch of its batch rank."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_sum: Callable[..., torch.Tensor],
        gradients: Gradients,
        optimizer: ShardOptimizer,
        mesh: Mesh,
        micro_batch_size: int | None,
        max_grad_norm: float | None,
        max_grad_value: float | None = None,
        computing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.model, self.loss_sum, self.gradients, self.optimizer = model, loss_sum, gradients, optimizer
        self.mesh, self.micro_batch_size = mesh, micro_batch_size
        self.max_grad_norm, self.max_grad_value = max_grad_norm, max_grad_value
        self.computing = computing

    def __call__(self, batch: Batch) -> StepResult:
        self.optimizer.advance()
        return self.on_device(batch)

    def on_device(self, batch: Batch) -> StepResult:
        """The step without what the host decides anew each time: the same work on the same memory for equal shapes."""
        loss, norm, tokens = self.backward(batch)
        scale = None
        if self.max_grad_norm is not None:
            if self.optimizer.scales and self.max_grad_value is None:
                scale = self.gradients.clip_scale(norm, self.max_grad_norm)
            else:
                self.gradients.clip(norm, self.max_grad_norm)
        if self.max_grad_value is not None:
            self.gradients.clip_by_value(self.max_grad_value)
        self.optimizer.update(scale)
        return StepResult(loss=loss, grad_norm=norm, tokens=tokens)

    def backward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Leave the gradients of the global batch in ``gradients.held``; returns loss, their norm, and valid tokens.

        ``gradients.held.settle()`` puts them on the parameters.
        """
        self.gradients.held.forget()
        micro_batches = self.micro_batches(batch)
        tokens = sum((labels != IGNORED).sum() for labels, _ in micro_batches)
        assert isinstance(tokens, torch.Tensor), "a batch has sequences"
        if self.mesh.loss.size() > 1:
            dist.all_reduce(tokens, group=self.mesh.loss.get_group())
        divisor = tokens.clamp(min=1).to(torch.float32)
        # Known before forward, which so can compute what backward is given it for.
        upstream = Upstream(divisor.reciprocal())
        summed = torch.zeros((), dtype=torch.float64, device=tokens.device)
        with self.computing():
            for index, (labels, inputs) in enumerate(micro_batches):
                self.gradients.held.expect(last=index + 1 == len(micro_batches))
                loss = self.loss_sum(labels=labels, upstream=upstream, **inputs)
                torch.autograd.backward(loss, upstream.value)
                summed += loss.detach()
        self.gradients.sum_over_tp()
        # Ranks of one tp group have the same loss: each brings its share to the sum over the world.
        norm, (total,) = self.gradients.norm(summed / self.mesh.config.tp_size)
        return (total / divisor).to(torch.float32), norm.to(torch.float32), tokens

    def micro_batches(self, batch: Batch) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """(labels, further arguments of ``loss_sum``) of each micro-step: this rank's shard of every sequence."""
        config = self.mesh.config
        input_ids, labels, position_ids = (
            shard_sequence(x, config.cp_size, self.mesh.cp.get_local_rank(), config.cp_method)
            for x in (batch.input_ids, batch.labels, batch.position_ids)
        )
        size = self.micro_batch_size or len(input_ids)
        made = []
        for start in range(0, len(input_ids), size):
            rows = slice(start, start + size)
            inputs = {"input_ids": input_ids[rows], "position_ids": position_ids[rows]}
            if batch.document_ids is not None:
                inputs["document_ids"] = batch.document_ids[rows]
            made.append((labels[rows], inputs))
        return made
