"""No scenario is forgotten, and no difference goes undocumented."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import goldens
from goldens.kit import DIFFERENT, GOLDENS, REPLAYED

ELSEWHERE: dict[str, str] = {
    "train_batch_norm_keras": "the moving statistics of a Keras layer; those written by hand are replayed",
    "train_batch_norm_keras_synchronized": "the option of a Keras layer; the same written by hand is replayed",
    "train_keras_layers_custom_loop": "a loop around Keras layers and a Keras metric",
    "train_keras_loss_objects": "how loss objects of Keras reduce",
    "train_metrics": "metrics of Keras",
    "train_metrics_uneven": "metrics of Keras",
}
"""Groups and single scenarios that are not replayed here, and why."""

DIFFERENCES = Path(__file__).parents[2] / "docs" / "differences.md"


@pytest.fixture(scope="module", autouse=True)
def _all_replays_are_registered() -> None:
    for module in pkgutil.iter_modules(goldens.__path__):
        importlib.import_module(f"goldens.{module.name}")


def _scenarios() -> dict[str, str]:
    return {golden.name: golden.group for golden in GOLDENS.values()}


def _documented() -> set[str]:
    """Scenario names, in backticks, of the first column of the tables."""
    rows = [line for line in DIFFERENCES.read_text().splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_scenario_is_replayed_or_listed_with_a_reason():
    answered = REPLAYED.keys() | DIFFERENT.keys()
    missing = [
        name
        for name, group in _scenarios().items()
        if name not in answered and name not in ELSEWHERE and group not in ELSEWHERE
    ]
    assert missing == []


def test_what_is_listed_as_tested_elsewhere_is_not_replayed_here():
    scenarios = _scenarios()
    for name in ELSEWHERE:
        assert name in scenarios or name in scenarios.values()
        assert name not in REPLAYED and name not in DIFFERENT


def test_every_difference_has_its_line_in_the_documentation():
    assert sorted(DIFFERENT.keys() - _documented()) == []


def test_every_line_of_the_documentation_has_its_test():
    assert sorted(_documented() - DIFFERENT.keys()) == []
