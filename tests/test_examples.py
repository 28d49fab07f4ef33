"""The examples run as they are printed, and say that their checks passed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.slow


def run(script: Path, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


def block(language: str) -> str:
    """The README's first block in a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    assert found, f"README.md has no {language} block"
    return found[1]


def figures(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def test_example_file_is_the_readmes():
    assert (ROOT / "examples/readme.py").read_text() == block("python")


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_readme_example_prints_the_same_on_any_number_of_replicas(replicas, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(block("python"))
    result = run(script, cwd=tmp_path, JAX_NUM_CPU_DEVICES=str(replicas))
    assert result.returncode == 0, result.stderr
    expected = block("text").replace("replicas: 8", f"replicas: {replicas}")
    assert re.sub(r"\d+\.\d+", "#", result.stdout) == re.sub(r"\d+\.\d+", "#", expected)
    assert figures(result.stdout) == pytest.approx(figures(expected), abs=2e-4)


def test_digits_pass_their_own_checks(tmp_path):
    result = run(ROOT / "examples/digits.py", "--quick", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    checks = [line for line in result.stdout.splitlines() if line.startswith("check: ")]
    assert len(checks) == 3
    assert all(line.endswith(": passed") for line in checks)
    assert "bit-identical on 8 replicas" in result.stdout
    assert "losses on 1 and on 8 replicas" in result.stdout
    assert (tmp_path / "out/digits.png").read_bytes().startswith(b"\x89PNG")


def test_digits_take_the_number_of_epochs_and_replicas_and_fail_when_a_check_fails(tmp_path):
    result = run(ROOT / "examples/digits.py", "--epochs", "1", "--replicas", "3", cwd=tmp_path)
    assert "epoch  1:" in result.stdout and "epoch  2:" not in result.stdout
    assert "3 on cpu" in result.stdout
    failed = [line for line in result.stdout.splitlines() if line.endswith("FAILED")]
    assert len(failed) == 1 and "held-out accuracy" in failed[0]
    assert result.returncode == 1


def test_a_run_that_is_killed_and_started_again_ends_with_the_same_bits(tmp_path):
    result = run(ROOT / "examples/resume.py", "--replicas", "2", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    whole, killed, again, check = result.stdout.splitlines()
    assert whole.startswith("undisturbed    from step 0: loss")
    assert killed == "killed         ended by signal 9"
    assert int(re.match(r"started again  from step (\d+): loss", again)[1]) in (15, 17, 20)
    assert check.endswith("passed")
