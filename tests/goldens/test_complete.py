"""No scenario is forgotten, and no difference goes undocumented."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import goldens
from goldens.kit import DIFFERENT, GOLDENS, REPLAYED

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"


@pytest.fixture(scope="module", autouse=True)
def _all_replays_are_registered() -> None:
    for module in pkgutil.iter_modules(goldens.__path__):
        importlib.import_module(f"goldens.{module.name}")


def _documented() -> set[str]:
    """Scenario names, in backticks, of the first column of the tables."""
    rows = [line for line in DIFFERENCES.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_scenario_is_replayed():
    names = {name for name, _ in GOLDENS}
    assert sorted(names - REPLAYED.keys() - DIFFERENT.keys()) == []


def test_every_difference_has_its_line_in_the_documentation():
    assert sorted(DIFFERENT.keys() - _documented()) == []


def test_every_line_of_the_documentation_has_its_test():
    assert sorted(_documented() - DIFFERENT.keys()) == []
