"""The notebooks run from the first cell to the last, and hold no output of an old run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples/notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_its_last_cell_says_equal(path, tmp_path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells)
    sources = ["".join(cell["source"]) for cell in cells]
    program = tmp_path / "notebook.py"
    program.write_text("\n\n".join([*sources[:-1], f"print({sources[-1]})"]))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    result = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, timeout=250)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "equal", result.stdout
