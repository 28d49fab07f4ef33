"""Everything that is printed as code runs: the pages, the README's snippets and the docstrings.

The blocks of a page run in order in one namespace. A block with ``>>>`` is a doctest. Of any other
block the output must stand in the ``text`` block that follows it; without one it must print nothing.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib
import inspect
import io
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx
import phalanx as px

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "docs").rglob("*.md") if "```python" in path.read_text())
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def namespace() -> dict[str, Any]:
    """What the index page says every page assumes."""
    return {"__name__": "__main__", "px": px, "jax": jax, "jnp": jnp, "np": np, "optax": optax}


def run_doctest(source: str, names: dict[str, Any], name: str, filename: str, line: int) -> None:
    test = doctest.DocTestParser().get_doctest(source, names, name, filename, line)
    report = io.StringIO()
    runner = doctest.DocTestRunner(optionflags=OPTIONS, verbose=False)
    runner.run(test, out=report.write, clear_globs=False)
    names.update(test.globs)
    assert not runner.failures, report.getvalue()


def run_plain(source: str, names: dict[str, Any], filename: str, line: int, expected: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n" * line + source, filename, "exec"), names)
    assert printed.getvalue() == expected, f"{filename}:{line} prints\n{printed.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT / "docs")))
def test_page_runs(page):
    text = page.read_text()
    names = namespace()
    blocks = [(m[2], textwrap.dedent(m[3]), text.count("\n", 0, m.start()) + 1) for m in BLOCK.finditer(text)]
    for (language, source, line), following in zip(blocks, [*blocks[1:], ("", "", 0)]):
        if language != "python":
            continue
        if ">>> " in source:
            run_doctest(source, names, page.stem, str(page), line)
        else:
            run_plain(source, names, str(page), line, following[1] if following[0] == "text" else "")


# ---- docstrings ----------------------------------------------------------------------------------


def documented() -> Iterator[tuple[str, Any]]:
    """Every function, class and method of the package that has an example in its docstring."""
    for info in pkgutil.walk_packages(phalanx.__path__, "phalanx."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) != info.name:
                continue
            members = vars(value).items() if inspect.isclass(value) else ()
            for path, member in [(name, value), *((f"{name}.{key}", member) for key, member in members)]:
                has_doc = inspect.isclass(member) or inspect.isroutine(member) or isinstance(member, property)
                if has_doc and ">>> " in (inspect.getdoc(member) or ""):
                    yield f"{info.name.removeprefix('phalanx.')}.{path}", member


DOCUMENTED = dict(documented())


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_runs(name):
    run_doctest(inspect.getdoc(DOCUMENTED[name]), namespace(), name, name, 0)


# ---- completeness --------------------------------------------------------------------------------


def public() -> dict[str, Any]:
    return {name: value for name, value in vars(px).items() if not name.startswith("_") and not inspect.ismodule(value)}


def test_reference_lists_every_public_name():
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    listed = {path.split(".")[-1] for path in re.findall(r"^::: phalanx\.(\S+)$", pages, re.MULTILINE)}
    assert listed >= {*public(), "errors"}


def test_every_public_name_and_its_methods_have_a_docstring():
    for name, value in public().items():
        assert inspect.getdoc(value), name
        methods = inspect.getmembers(value, inspect.isfunction) if inspect.isclass(value) else []
        for method, function in methods:
            if not method.startswith("_") and function.__module__.startswith("phalanx"):
                assert inspect.getdoc(getattr(value, method)), f"{name}.{method}"
