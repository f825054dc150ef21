"""Streams that cannot show every sign (a C locale, a Latin-1 terminal, a log): the nearest ASCII instead of an error.

Imported by the command line before anything is printed, so it imports next to nothing.
"""

from __future__ import annotations

import codecs
import io
from typing import Any

ERRORS = "ndbench.lookalike"
LOOKALIKES = {
    "…": "...", "±": "+-", "→": "->", "←": "<-", "\u2013": "-", "\u2014": "-", "\u2011": "-", "·": "-", "\u00d7": "x",
    "≥": ">=", "≤": "<=", "≠": "!=", "≈": "~", "\u2018": "'", "\u2019": "'", "“": '"', "”": '"', "\u00a0": " ",
    "✓": "+", "✗": "x", "▲": "^", "○": "o", "●": "*", "★": "*", "─": "-", "━": "-", "│": "|",
}  # fmt: skip


def is_plain(encoding: str | None) -> bool:
    """Whether text of this encoding has to do without block characters and arrows."""
    return not (encoding or "utf-8").lower().startswith("utf")


def ascii_text(text: str) -> str:
    """The text in ASCII: a lookalike where there is one, else ``?``."""
    if text.isascii():
        return text
    text = text.replace("\u00d7/\u00f7", "x or /")
    return "".join(letter if letter.isascii() else LOOKALIKES.get(letter, "?") for letter in text)


def forgive(stream: Any) -> None:
    """Let a stream of a small encoding write lookalikes where it would raise ``UnicodeEncodeError``."""
    if isinstance(stream, io.TextIOWrapper) and is_plain(stream.encoding):
        stream.reconfigure(errors=ERRORS)


def _lookalike(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return ascii_text(error.object[error.start : error.end]), error.end


codecs.register_error(ERRORS, _lookalike)
