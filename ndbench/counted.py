"""``1 rank``, ``8 ranks``: numbers and their nouns, so that no line says ``1 ranks``. Imports nothing."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """``number`` with its noun: ``1 repeat``, ``1,200 steps``; ``plural`` where an ``s`` does not make it."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def were(number: int) -> str:
    """``was`` of one, ``were`` of any other number: also of ``1 of 3 repeats``."""
    return "was" if number == 1 else "were"
