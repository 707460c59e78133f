"""docs/cases.md and docs/architecture.md name tests: they are there."""

from __future__ import annotations

import ast
import re

import pytest
from operator_world import ROOT


def named(document: str) -> list[tuple[str, str]]:
    """(file, test); a file holds for the rest of its line."""
    result = []
    for line in (ROOT / document).read_text().splitlines():
        file = ""
        for found in re.findall(r"`([\w/]*\.py)?::(test_\w+)`", line):
            file = found[0] or file
            result.append((file, found[1]))
    return result


NAMED = named("docs/cases.md") + named("docs/architecture.md")


def test_the_table_has_every_case_and_every_point() -> None:
    text = (ROOT / "docs/cases.md").read_text()
    numbers = [int(number) for number in re.findall(r"^\| (\d+) \|", text, flags=re.M)]
    assert {*range(1, 17), *range(23, 41)} <= set(numbers)  # points 1-16, cases 23-40, and cases of other parts
    assert len(NAMED) > 80


@pytest.mark.parametrize("file", sorted({file for file, _ in NAMED}))
def test_every_test_that_the_table_names_exists(file: str) -> None:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert {name for where, name in NAMED if where == file} - there == set()
