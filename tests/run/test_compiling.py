"""What torch.compile did, read from its own counters: forward and backward, and more than the last few graphs."""

from __future__ import annotations

import pytest
import torch

from ndbench.run import compiling

READ_IN = ("2.13", "2.14")
"""Versions of torch whose private metrics were read for ``ndbench/run/compiling.py``."""


@pytest.mark.timeout(120)
def test_backward_graphs_are_part_of_the_compile_time_and_every_recompile_counts() -> None:
    from torch._dynamo import utils

    missing = [name for name in ("calculate_time_spent", "get_compilation_metrics") if not hasattr(utils, name)]
    assert not missing, f"torch {torch.__version__} lacks {missing}; read in {', '.join(READ_IN)}"
    utils.set_compilation_metrics_limit(3)  # type: ignore[no-untyped-call]  # torch's own is 64
    compiling.keep_count(True)
    torch._dynamo.reset()
    utils.counters.clear()  # other tests of this process may have found their graphs in the cache
    assert compiling.compile_time(True)[0] == 0.0
    before = compiling.counters()["recompiles"]
    model = torch.compile(torch.nn.Linear(3, 3), backend="aot_eager", dynamic=False)
    for rows in range(1, 7):
        model(torch.ones(rows, 3)).sum().backward()
    assert compiling.counters()["recompiles"] - before == 5
    spent = utils.calculate_time_spent()
    assert spent["entire_backward_compile"] > 0
    assert compiling.compile_time(True) == (spent["entire_frame_compile"] + spent["entire_backward_compile"], "cold")


def test_an_eager_run_compiled_nothing() -> None:
    assert compiling.compile_time(False) == (None, "off")
