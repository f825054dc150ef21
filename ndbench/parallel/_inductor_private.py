"""The names of torch's Inductor without a public spelling, in one place; ``tests/parallel`` names the versions tried.

Nothing here knows what the calls are for.
"""

from __future__ import annotations

from typing import Any

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

TRIED_TORCH = ("2.11.0", "2.13.0", "2.14.1")


class GraphPass(CustomGraphPass):
    """A pass that is told by its source: compiled graphs are cached as long as ``files`` do not change."""

    files: tuple[str, ...] = ()

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, *self.files))


def lower_to_concatenation(operator: Any) -> None:
    """Have ``operator``, of a list of matrices, compiled so that what computes them writes side by side."""
    from torch._inductor import ir
    from torch._inductor.lowering import register_lowering

    def lower(parts: list[Any]) -> Any:
        return ir.TensorBox(ir.ConcatKernel.create(parts, 1))

    register_lowering(operator, type_promotion_kind=None)(lower)
