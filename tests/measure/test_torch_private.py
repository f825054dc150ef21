"""What we use of torch beyond its public API is still there, and works as it did in the versions it was read in."""

from __future__ import annotations

import torch

from ndbench.measure import _torch_private as private

READ_IN = ("2.11", "2.13")


def test_this_torch_is_one_that_was_read_or_newer() -> None:
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    oldest = tuple(int(part) for part in READ_IN[0].split("."))
    assert (major, minor) >= oldest, f"torch {torch.__version__}: private names were read in {', '.join(READ_IN)}"


def test_the_busy_kernel_exists() -> None:
    assert callable(torch.cuda._sleep)


def test_the_end_of_backward_is_told_once() -> None:
    told: list[int] = []
    x = torch.ones(2, requires_grad=True)
    private.on_gradient(x, lambda: private.at_end_of_backward(lambda: told.append(1)))
    (x * 2).sum().backward()
    assert told == [1]


def test_the_storage_patch_is_undone() -> None:
    sizes: list[int] = []
    undo = private.patch_storage_resize(lambda storage: sizes.append(storage.nbytes()))
    storage = torch.empty(4, dtype=torch.uint8).untyped_storage()
    storage.resize_(8)
    undo()
    storage.resize_(2)
    assert sizes == [8]
    assert "resize_" not in vars(torch.UntypedStorage)


def test_a_plain_tensor_is_no_dtensor() -> None:
    from torch.distributed.tensor import DTensor

    assert private.is_dtensor(DTensor)
    assert not private.is_dtensor(torch.Tensor)


def test_a_finished_work_still_has_the_operators_tensors_as_its_result() -> None:
    """DistributedDataParallel reads the result of its all-reduce; without it an instrumented backward fails."""
    from torch._C._distributed_c10d import FakeWork, Work

    tensors = [torch.ones(2)]
    kept, work = private.completed((tensors, FakeWork().boxed()))
    assert kept is tensors
    assert Work.unbox(work).get_future().value() is tensors or Work.unbox(work).get_future().value()[0] is tensors[0]
