"""Mistakes that engines have made, each planted by replacing one function of ours while a rank runs.

A fault is a context manager without arguments, so that ranks can be told its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from ndbench.engines import bundled
from ndbench.parallel import attention, collectives, gradients, initialize, parallelize, replicate, tensor
from ndbench.parallel.context import shard_sequence
from ndbench.training import loss, step


@contextmanager
def row_wise_sum_missing() -> Iterator[None]:
    """Each tp rank goes on with its own part of a sum."""
    with patch.object(tensor, "sum_partials", lambda x, group: x):
        yield


@contextmanager
def reduce_scatter_without_sum() -> Iterator[None]:
    with patch.object(tensor, "scatter_partials", lambda x, group: collectives.own_part(x, group, 1)):
        yield


@contextmanager
def input_gradient_not_summed_over_tp() -> Iterator[None]:
    with patch.object(tensor, "enter_replicated", lambda x, group: x):
        yield


@contextmanager
def norm_weights_not_summed_over_tp() -> Iterator[None]:
    """Sequence parallel: each tp rank keeps the gradient of its shard of the sequence."""
    with patch.object(gradients.Gradients, "sum_over_tp", lambda self: None):
        yield


@contextmanager
def replicated_gradients_counted_twice() -> Iterator[None]:
    """The norm adds up what several ranks hold copies of."""
    with patch.object(gradients, "copies", lambda parameter, world_size: 1):
        yield


@contextmanager
def norm_of_local_shards() -> Iterator[None]:
    original = gradients.Gradients.norm

    def local(self: gradients.Gradients, *also: torch.Tensor) -> Any:
        norm, summed = original(self, *also)
        group, self.group = self.group, None
        norm = original(self, *also)[0]
        self.group = group
        return norm, summed

    with patch.object(gradients.Gradients, "norm", local):
        yield


@contextmanager
def gradients_not_clipped() -> Iterator[None]:
    with patch.object(gradients.Gradients, "clip", lambda self, norm, max_norm: None):
        yield


@contextmanager
def gradients_not_clipped_by_value() -> Iterator[None]:
    with patch.object(gradients.Gradients, "clip_by_value", lambda self, limit: None):
        yield


def _rate_moves(by: Callable[[step.Step, Any], int]) -> Any:
    """The schedule moves ``by(step, batch)`` at each optimizer step, not one."""
    original = step.Step.__call__

    def call(self: step.Step, batch: Any) -> Any:
        result = original(self, batch)
        self.optimizer.taken += by(self, batch) - 1
        return result

    return patch.object(step.Step, "__call__", call)


@contextmanager
def rate_moves_once_per_micro_step() -> Iterator[None]:
    with _rate_moves(lambda self, batch: len(batch.input_ids) // (self.micro_batch_size or len(batch.input_ids))):
        yield


@contextmanager
def rate_moves_once_per_rank() -> Iterator[None]:
    with _rate_moves(lambda self, batch: self.mesh.config.world_size):
        yield


@contextmanager
def mean_of_means() -> Iterator[None]:
    """Each rank divides by its own tokens, and the ranks' means are averaged."""
    original = step.Step.backward

    def means(self: step.Step, batch: Any) -> Any:
        size = self.mesh.loss.size()
        real = dist.all_reduce

        def average(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if x.dtype == torch.int64:
                return x.mul_(size)
            return real(x, *args, **kwargs)

        with patch.object(step.dist, "all_reduce", average):
            return original(self, batch)

    with patch.object(step.Step, "backward", means):
        yield


@contextmanager
def gradients_doubled() -> Iterator[None]:
    original = step.Step.backward

    def doubled(self: step.Step, batch: Any) -> Any:
        result = original(self, batch)
        for parameter in self.gradients.parameters:
            gradient = self.gradients.held.of(parameter)
            if gradient is not None:
                gradient.mul_(2)
        return result

    with patch.object(step.Step, "backward", doubled):
        yield


@contextmanager
def replicas_not_reduced() -> Iterator[None]:
    """HSDP without its all-reduce between replicas."""
    original = parallelize.apply_fully_shard

    def alone(model: Any, blocks: Any, mesh: Any, *rest: Any) -> None:
        original(model, blocks, replace(mesh, fsdp_mesh=mesh.fsdp), *rest)

    with patch.object(parallelize, "apply_fully_shard", alone):
        yield


@contextmanager
def replicas_not_summed() -> Iterator[None]:
    """DDP whose buckets are filled and not reduced."""
    with patch.object(replicate.Buckets, "_all_reduce", lambda self, flat: None):
        yield


@contextmanager
def replicas_averaged() -> Iterator[None]:
    original = replicate.Buckets._all_reduce

    def mean(self: replicate.Buckets, flat: torch.Tensor) -> Any:
        flat.div_(2)
        return original(self, flat)

    with patch.object(replicate.Buckets, "_all_reduce", mean):
        yield


@contextmanager
def only_the_last_micro_batch_counts() -> Iterator[None]:
    original = step.Step.backward

    def last(self: step.Step, batch: Any) -> Any:
        real = torch.autograd.backward

        def forget(x: torch.Tensor, upstream: torch.Tensor) -> None:
            self.gradients.held.forget()
            for module in self.model.modules():
                for parameter in module.parameters(recurse=False):
                    parameter.grad = None
            real(x, upstream)

        with patch.object(torch.autograd, "backward", forget):
            return original(self, batch)

    with patch.object(step.Step, "backward", last):
        yield


@contextmanager
def mean_over_micro_batches() -> Iterator[None]:
    """The sum over micro-batches is divided by their number once more."""
    real = torch.autograd.backward
    with patch.object(torch.autograd, "backward", lambda x, upstream: real(x / 2, upstream)):
        yield


def _wrong_shard(which: int) -> Callable[..., torch.Tensor]:
    """Of the three tensors of a step (ids, labels, positions), one is cut into contiguous chunks."""
    calls = [0]

    def shard(x: torch.Tensor, cp_size: int, cp_rank: int, method: str, dim: int = 1) -> torch.Tensor:
        wrong = calls[0] % 3 == which
        calls[0] += 1
        return shard_sequence(x, cp_size, cp_rank, "ulysses" if wrong else method, dim)

    return shard


@contextmanager
def labels_not_permuted() -> Iterator[None]:
    with patch.object(step, "shard_sequence", _wrong_shard(1)):
        yield


@contextmanager
def rope_positions_not_permuted() -> Iterator[None]:
    with patch.object(step, "shard_sequence", _wrong_shard(2)):
        yield


@contextmanager
def tokens_not_permuted() -> Iterator[None]:
    with patch.object(step, "shard_sequence", _wrong_shard(0)):
        yield


@contextmanager
def attention_within_the_shard_only() -> Iterator[None]:
    """Context parallelism forgotten: each rank attends to its own tokens."""
    with patch.object(parallelize, "configure", lambda model, group, *how: attention.configure(model, None, *how)):
        yield


@contextmanager
def window_ignored() -> Iterator[None]:
    original = attention.ndbench_attention

    def without(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("sliding_window") is not None:
            kwargs["sliding_window"] = 10**6
        return original(*args, **kwargs)

    with patch.object(attention, "ndbench_attention", without):
        attention.register()
        yield
    attention.register()


@contextmanager
def documents_ignored() -> Iterator[None]:
    original = attention.ndbench_attention

    def without(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **(kwargs | {"document_ids": None}))

    with patch.object(attention, "ndbench_attention", without):
        attention.register()
        yield
    attention.register()


@contextmanager
def same_data_on_every_batch_rank() -> Iterator[None]:
    from tests.parity import ranks

    original = ranks.batch
    with patch.object(ranks, "batch", lambda case, number, rank, count: original(case, number, 0, count)):
        yield


@contextmanager
def vocabulary_shards_off_by_one() -> Iterator[None]:
    """An odd vocabulary is cut by rounding down in one place and up in the other."""
    original = loss.sum_and_gradient

    def shifted(logits: Any, labels: Any, gradient: Any, group: Any, start: int, upstream: Any) -> Any:
        return original(logits, labels, gradient, group, start - (1 if start else 0), upstream)

    with patch.object(loss, "sum_and_gradient", shifted):
        yield


@contextmanager
def target_logit_not_summed_over_tp() -> Iterator[None]:
    original = loss.all_reduce

    def partial(x: torch.Tensor, group: Any, op: str = "sum") -> torch.Tensor:
        total = original(x, group, op)
        return total if op == "max" else torch.stack([total[0], x[1]])

    with patch.object(loss, "all_reduce", partial):
        yield


@contextmanager
def loss_counted_by_every_tp_rank() -> Iterator[None]:
    original = gradients.Gradients.norm

    def again(self: gradients.Gradients, summed: torch.Tensor) -> Any:
        return original(self, summed * 2)

    with patch.object(gradients.Gradients, "norm", again):
        yield


@contextmanager
def weights_start_differently_per_rank() -> Iterator[None]:
    original = initialize.Weights._normal

    def by_rank(self: initialize.Weights, name: str, *rest: Any) -> torch.Tensor:
        return original(self, f"{name}{dist.get_rank()}", *rest)

    with patch.object(initialize.Weights, "_normal", by_rank):
        yield


@contextmanager
def rope_frequencies_lost() -> Iterator[None]:
    """Buffers that no checkpoint holds come out of allocation with whatever is there."""
    original = parallelize.materialize

    def lose(model: Any, *args: Any) -> None:
        original(model, *args)
        for buffer in model.buffers():
            buffer.zero_()

    with patch.object(parallelize, "materialize", lose):
        yield


@contextmanager
def tied_embeddings_come_apart() -> Iterator[None]:
    original = parallelize.materialize

    def untie(model: Any, *args: Any) -> None:
        original(model, *args)
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    with patch.object(parallelize, "materialize", untie):
        yield


@contextmanager
def parameters_rounded_to_bf16() -> Iterator[None]:
    """Forward and backward silently compute in bf16."""
    original = bundled.BundledEngine.build

    def low(self: Any, model: Any, training: Any, *args: Any) -> None:
        original(self, model, replace(training, precision="bf16"), *args)

    with patch.object(bundled.BundledEngine, "build", low):
        yield
