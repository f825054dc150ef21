"""How the ring adds up the gradients of its blocks, and packs keys and values to send. No communication here."""

from __future__ import annotations

import torch


def sum_dtype(dtype: torch.dtype, summands: int) -> torch.dtype:
    """What up to ``summands`` blocks of ``dtype`` are added up in: float32 at least, unless they are two.

    One addition is computed in float32 and rounded once whatever it is stored in; more would round each time.
    """
    return dtype if summands <= 2 else torch.promote_types(dtype, torch.float32)


def packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k and v [b, h, s, d] as one tensor [2, b, s, h, d] to send."""
    return torch.stack((k.transpose(1, 2), v.transpose(1, 2)))


def unpacked(kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return kv[0].transpose(1, 2), kv[1].transpose(1, 2)


def first_keys(k: torch.Tensor, keys: slice, block: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The gradients of a block's keys and values among zeros for the others, packed."""
    if block[0].shape[2] == k.shape[2] and block[0].dtype == dtype:
        return packed(*block)
    dkv = no_keys(k, dtype)
    add_keys(dkv, keys, block)
    return dkv


def no_keys(k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Packed zeros for keys and values shaped like ``k``."""
    b, h, s, d = k.shape
    return torch.zeros(2, b, s, h, d, dtype=dtype, device=k.device)


def add_keys(dkv: torch.Tensor, keys: slice, block: list[torch.Tensor]) -> None:
    for total, part in zip(unpacked(dkv), block, strict=True):
        total[:, :, keys] += part


class RowSum:
    """The sum in ``dtype`` of blocks that have some rows of ``like`` [b, h, s, d] each: one with all takes it in."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, waits: bool) -> None:
        """``waits``: the first block may wait for one with all rows, which will be the only other."""
        self.dtype, self._like, self._waits = dtype, like, waits
        self._sum: torch.Tensor | None = None
        self._waiting: tuple[slice, torch.Tensor] | None = None

    def add(self, rows: slice, block: torch.Tensor) -> None:
        if self._sum is None and block.shape[2] == self._like.shape[2]:
            self._sum = block.to(self.dtype)
            self._settle()
        elif self._waits and self._sum is None and self._waiting is None:
            self._waiting = (rows, block)
        else:
            self.whole()[:, :, rows] += block

    def whole(self) -> torch.Tensor:
        """The sum so far, zeros where there was no block."""
        if self._sum is None:
            self._sum = torch.zeros_like(self._like, dtype=self.dtype)
            self._settle()
        return self._sum

    def _settle(self) -> None:
        assert self._sum is not None
        if self._waiting is not None:
            rows, block = self._waiting
            self._sum[:, :, rows] += block
            self._waiting = None
