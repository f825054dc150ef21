"""A comparison as JUnit XML: a cell is a test case, so that every CI's own pages show what broke.

Regressed is a failure, invalid and missing are errors, what could not be decided or compared is skipped with why.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

from ndbench.compare.result import CellVerdict, Comparison
from ndbench.report import facts

KINDS = {"regressed": "failure", "invalid": "error", "missing": "error"}
SKIPPED = ("inconclusive", "incomparable", "new", "no_baseline")
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(comparison: Comparison) -> str:
    """The document. A run that failed without a failing cell (nothing measured, say) gets a case that says so."""
    counts = comparison.counts
    failures = counts.get("regressed", 0)
    errors = counts.get("invalid", 0) + counts.get("missing", 0)
    whole = comparison.exit_code != 0 and failures + errors == 0
    suite = ElementTree.Element(
        "testsuite",
        name=_clean(comparison.suite or "ndbench"),
        tests=str(len(comparison.cells) + whole),
        failures=str(failures),
        errors=str(errors + whole),
        skipped=str(sum(counts.get(word, 0) for word in SKIPPED)),
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (
        ("run", comparison.run),
        ("verdict", comparison.verdict),
        ("exit_code", str(comparison.exit_code)),
        ("exit_reason", comparison.exit_reason),
        ("baseline", comparison.baseline or "none"),
    ):
        ElementTree.SubElement(properties, "property", name=name, value=_clean(value))
    for cell in comparison.cells:
        suite.append(_case(comparison, cell))
    if whole:
        case = ElementTree.SubElement(suite, "testcase", classname=_clean(comparison.suite), name="the run")
        ElementTree.SubElement(case, "error", message=_clean(comparison.exit_reason))
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _case(comparison: Comparison, cell: CellVerdict) -> ElementTree.Element:
    seconds = cell.current.step_seconds if cell.current is not None else None
    case = ElementTree.Element("testcase", classname=_clean(comparison.suite or "ndbench"), name=_clean(cell.name))
    if seconds is not None:
        case.set("time", f"{seconds:.6f}")
    said = facts.sentences(cell)
    kind = KINDS.get(cell.verdict) or ("skipped" if cell.verdict in SKIPPED else None)
    if kind is not None:
        told = ElementTree.SubElement(case, kind, message=_clean(f"{cell.verdict}: {(said or [''])[0]}"))
        if kind != "skipped":
            told.set("type", cell.verdict)
        told.text = _clean("\n".join(said))
    elif said:
        ElementTree.SubElement(case, "system-out").text = _clean("\n".join(said))
    if cell.current is not None and cell.current.log_tail and cell.verdict in KINDS:
        ElementTree.SubElement(case, "system-err").text = _clean("\n".join(facts.tail(cell.current.log_tail, 30)))
    return case


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold at all; the writer escapes the others."""
    return _NOT_XML.sub("", facts.printable(text))
