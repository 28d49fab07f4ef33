"""The command `phalanx`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slices import needs_libtpu

import phalanx as px
from phalanx.cli import main

EXAMPLE = """
import jax, jax.numpy as jnp, phalanx as px
strategy = px.Mirrored()
w = px.Variable(jnp.zeros((128, 256)), name="w")

@px.function
def step(x):
    return strategy.reduce("mean", strategy.run(lambda x: (x @ w).sum(), (x,)))

def preflight_known(global_batch=64):
    return step, jax.ShapeDtypeStruct((global_batch, 128), jnp.float32)

class Trainer:
    train = px.function(lambda self, x: x * 2)

trainer = Trainer()
fixed = jax.jit(lambda x: x + jnp.ones((8, 4)))
huge = jax.jit(lambda x: jnp.ones((2**19, 2**16)) + x)

if __name__ == "__main__":
    raise SystemExit("must not run")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(EXAMPLE)
    return str(path)


def test_all_slices_are_listed(capsys):
    assert main(["preflight", "--topology", "list"]) == 0
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith("v5e:4x4"))
    assert line.split() == ["v5e:4x4", "16", "16", "16", "GiB", "256", "GiB", "4"]
    assert all(f"\n{name}:" in out for name in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"))


def test_a_step_that_fits_is_0_and_its_report_is_written(file, tmp_path, capsys):
    page, data = tmp_path / "r.html", tmp_path / "r.json"
    call = ["preflight", f"{file}:known", "--topology", "cpu:2", "--global-batch", "32"]
    assert main([*call, "--html", str(page), "--json", str(data)]) == 0
    assert "step on cpu:2: 2 devices, 32 rows" in capsys.readouterr().out
    assert json.loads(data.read_text())["bytes"]["params"] == 4 * 128 * 256 and "<html" in page.read_text()


def test_arguments_and_methods_can_be_named(file, capsys):
    assert main(["preflight", f"{file}:step", "--arg", "float32[64,128]", "--topology", "cpu:2", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["inputs"] == 4 * 32 * 128
    assert main(["preflight", f"{file}:trainer.train", "--arg", "bfloat16[8]", "--topology", "cpu:1"]) == 0


@needs_libtpu
def test_slices_are_compared_in_one_table_and_1_says_that_some_do_not_fit(file, capsys):
    assert main(["preflight", f"{file}:known", "--compare", "v5e:2x2,v6e:2x2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["v5e:2x2", "4", "fits"], ["v6e:2x2", "4", "fits"]]
    assert main(["preflight", f"{file}:huge", "--arg", "float32[]", "--topology", "v5e:1x1", "--quick"]) == 1
    assert "does not fit" in capsys.readouterr().out


@needs_libtpu
def test_a_step_of_one_size_has_no_largest_batch(file, capsys):
    call = ["preflight", f"{file}:fixed", "--arg", "float32[8,4]", "--topology", "v5e:1x1", "--largest-batch"]
    assert main(call) == 2
    assert "cannot be lowered" in capsys.readouterr().err


def test_wrong_calls_are_2_and_say_what_is_wrong(file, tmp_path, capsys):
    for call, text in [
        (["preflight"], "needs a step"),
        (["preflight", f"{file}:step"], "--topology or --compare"),
        (["preflight", f"{file}:step", "--topology", "v9"], "not known"),
        (["preflight", f"{file}:step", "--topology", "cpu:1"], "--arg for each, or a function preflight_step in"),
        (["preflight", f"{file}:known", "--compare", "cpu:1,cpu:2", "--html", "r.html"], "are for one slice"),
        (["preflight", f"{file}:step", "--topology", "cpu:1", "--arg", "float32"], "not a dtype with a shape"),
        (["preflight", f"{file}:step", "--topology", "cpu:1", "--arg", "float31[3]"], "'float31' is not a dtype"),
        (["preflight", f"{file}:nothing", "--topology", "cpu:1"], "has no 'nothing'"),
        (["preflight", f"{file}:trainer.no", "--topology", "cpu:1"], "has no 'no'"),
        (["preflight", "no_file.py:step", "--topology", "cpu:1"], "no file 'no_file.py'"),
        (["preflight", "step", "--topology", "cpu:1"], "not FILE:NAME"),
    ]:
        assert main(call) == 2, call
        assert text in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["no-such-command"])
    assert ended.value.code == 2


def test_the_version_can_be_asked_for(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"phalanx {px.__version__}\n"


def test_what_fails_in_the_users_file_is_2_and_shown_from_there_on(tmp_path, capsys):
    """1 would say that the step does not fit."""
    path = tmp_path / "wrong.py"
    step = "import jax.numpy as jnp\ndef step(x):\n    "
    for text, shown in [
        ("def step(:", "SyntaxError"),
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise SystemExit(0)", "ended by itself (exit code 0), before it had 'step'"),
        (step + "raise ValueError('of mine')", "ValueError: of mine"),
        (step + "return x @ jnp.ones((5, 5))", "contracting dimensions"),
        (step + "raise SystemExit(0)", "ended by itself (exit code 0), while 'step' was traced"),
        ("def preflight_step(rows=1):\n    raise KeyError('mine')", "in preflight_step:"),
        ("preflight_step = 3", "preflight_step in"),
        ("def preflight_step():\n    pass", "returned (None,); a tuple that begins with the step is expected"),
    ]:
        path.write_text(text)
        assert main(["preflight", f"{path}:step", "--arg", "float32[2,3]", "--topology", "cpu:1"]) == 2, text
        said = capsys.readouterr().err
        assert said.startswith("phalanx: ") and shown in said, said
        assert not any(name in said for name in ("runpy", "phalanx/cli", "phalanx/preflight")), said


def test_a_file_with_arguments_of_its_own_does_not_see_ours(tmp_path):
    path = tmp_path / "own.py"
    path.write_text("import sys\nassert sys.argv == [__file__], sys.argv\ndef step(x):\n    return x * 2\n")
    given = list(sys.argv)
    assert main(["preflight", f"{path}:step", "--arg", "float32[2,3]", "--topology", "cpu:1"]) == 0
    assert sys.argv == given


def test_the_maker_of_a_step_need_not_take_the_batch(tmp_path, capsys):
    path = tmp_path / "maker.py"
    path.write_text(
        "import jax\ndef preflight_step():\n    return (lambda x: x.sum()), jax.ShapeDtypeStruct((64, 2), 'float32')\n"
    )
    call = ["preflight", f"{path}:step", "--topology", "cpu:1", "--json", "-", "--global-batch"]
    assert main([*call, "16"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"]["inputs"] == 16 * 2 * 4


def test_what_cannot_be_done_is_said_before_anything_is_compiled(file, tmp_path, capsys, monkeypatch):
    import phalanx as px

    monkeypatch.setattr(px, "preflight", lambda *args, **kwargs: pytest.fail("compiled"))
    monkeypatch.setattr(px, "profile", lambda *args, **kwargs: pytest.fail("run"))
    known = ["preflight", f"{file}:known"]
    for call, text in [
        ([*known, "--topology", "cpu:1", "--html", str(tmp_path)], "is a folder"),
        ([*known, "--topology", "cpu:1", "--json", str(tmp_path / "no" / "x.json")], "there is no folder"),
        ([*known, "--compare", "cpu:1,v9"], "'v9' is not known"),
        ([*known, "--compare", "cpu:1,cpu:2", "--html", "x.html"], "are for one slice"),
        ([*known, "--topology", "cpu:1,cpu:2"], "not known"),
        ([*known, "--topology", "cpu:1", "--arg", "float32[8 4]"], "not a dtype with a shape"),
        (["profile", f"{file}:step", "--batches", "w", "--html", str(tmp_path)], "is a folder"),
        (["launch", "-n", "1", "--port", "99999", file], "--port must be from 1 to 65535"),
    ]:
        assert main(call) == 2, call
        assert text in capsys.readouterr().err


def test_a_reader_that_has_read_enough_ends_the_output():
    shown = subprocess.run(
        f"{sys.executable} -m phalanx preflight --topology list | head -1",
        shell=True, capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
    )  # fmt: skip
    assert shown.stdout.startswith("topology") and shown.stderr == ""


def test_info_says_what_there_is_and_how_to_get_what_is_missing(capsys, monkeypatch):
    from phalanx.cli import info

    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "devices          8" in out and "processes        1" in out and "jax " in out
    version = info._version
    monkeypatch.setattr(info, "_version", lambda package: None if package == "libtpu" else version(package))
    assert main(["info"]) == 0
    assert "pip install 'phalanx[preflight]'" in capsys.readouterr().out


@pytest.mark.slow
def test_nothing_but_our_own_words_reaches_the_terminal(file):
    """Also where JAX is free to look for a TPU that is not there."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    for call in (["info"], ["preflight", f"{file}:known", "--topology", "cpu:2"]):
        done = subprocess.run(
            [sys.executable, "-m", "phalanx", *call], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0 and done.stderr == "", done.stderr
        assert not any(word in done.stdout for word in ("WARNING", "E0000", "libtpu.so", "TPU_"))


def test_a_step_is_profiled(file, tmp_path, capsys):
    with open(file, "a") as more:
        more.write("\nbatches = strategy.distribute_dataset(jnp.ones((64, 128)), batch_size=32)\n")
    page, data = tmp_path / "p.html", tmp_path / "p.json"
    call = ["profile", f"{file}:step", "--batches", "batches", "--steps", "2", "--html", str(page), "--json", str(data)]
    assert main(call) == 0
    assert "ms per step over 2 steps" in capsys.readouterr().out
    assert json.loads(data.read_text())["steps"] == 2 and "<html" in page.read_text()
    assert main(["profile", f"{file}:step"]) == 2
    assert "profile needs --batches" in capsys.readouterr().err
    assert main(["profile", f"{file}:step", "--batches", "rows"]) == 2
    said = capsys.readouterr().err
    known = said.rpartition("It has: ")[2]
    assert "has no 'rows'" in said and "batches" in known and "step" not in known
