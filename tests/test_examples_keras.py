"""The examples of Keras, Flax NNX and Equinox learn, in a few steps already, and the same on one replica and on two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
OTHERS = {"common", "digits", "preflight_reports", "readme", "resume"}  # run by tests of their own
NUMBER = r"(\d+(?:\.\d+)?)"

pytestmark = pytest.mark.slow


def above(least: float) -> Callable[[float], bool]:
    return lambda value: value > least


def below(most: float) -> Callable[[float], bool]:
    return lambda value: value < most


LEARNT: dict[str, tuple[str, Callable[..., bool]]] = {
    "keras_fit": (f"held-out accuracy: {NUMBER}%", above(90)),
    "keras_custom_loop": (f"held-out accuracy: {NUMBER}%", above(90)),
    "nnx": (f"held-out accuracy: {NUMBER}%", above(90)),
    "equinox_mlp": (f"held-out accuracy: {NUMBER}%", above(85)),
    "dcgan": (rf"score: {NUMBER} \(the real digits: {NUMBER}\)", lambda drawn, real: 1.2 < drawn < real),
    "vae": (f"held-out loss: {NUMBER}", below(30)),
    "wgan_gp": (f"distance from the real digits: {NUMBER} at first, {NUMBER} now", lambda first, now: now < first / 2),
    "accumulation": (f"largest difference of the losses: {NUMBER}", below(1e-4)),
    "distillation": (
        f"labels: {NUMBER}%\nheld-out accuracy of the student of the teacher: {NUMBER}%",
        lambda alone, taught: taught > alone,
    ),
    "transformer": (f"loss {NUMBER}\nYou may .{{60}}$", below(3.4)),
}
"""What an example prints in the end, and what its numbers are after a few steps."""

RANDOM_PER_REPLICA = {"dcgan", "vae", "wgan_gp"}


def run(name: str, replicas: int) -> str:
    """What it prints."""
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), "--quick", "--replicas", str(replicas)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    # Where TensorFlow is installed Keras imports it, and its C++ part introduces itself.
    said = [
        line for line in result.stderr.splitlines() if not re.match(r"WARNING: All log messages before|I0000 ", line)
    ]
    assert said == []
    return result.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(rf"\b(?:loss|distance) {NUMBER}", printed)]


def test_all_examples_are_run():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == LEARNT.keys() | OTHERS


@pytest.mark.parametrize("name", LEARNT)
def test_example_learns_the_same_on_one_replica_and_on_two(name):
    alone, together = run(name, 1), run(name, 2)
    result, is_good = LEARNT[name]
    for printed in (alone, together):
        found = re.search(result, printed)
        assert found, printed
        assert is_good(*map(float, found.groups())), printed
    if name not in RANDOM_PER_REPLICA:
        assert losses(alone)
        assert losses(together) == pytest.approx(losses(alone), rel=1e-2)
