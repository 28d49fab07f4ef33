"""How the package hangs together: who may import what."""

from __future__ import annotations

import ast
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
MODULES = {path: ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def name_of(path):
    parts = ("phalanx", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def imports_of(nodes):
    """Full names that these statements import when they run, functions' bodies and type checking left out."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_of(node.orelse)
        elif not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from imports_of(ast.iter_child_nodes(node))


def test_jax_internals_are_imported_in_one_package():
    inner = ("jax._src", "jax.extend", "jax.interpreters")
    guilty = {
        name_of(path)
        for path, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in imports_of([node])
        if name.startswith(inner)
    }
    assert guilty and all(name.startswith("phalanx._jax") for name in guilty)


def test_imports_point_downwards():
    """There is an order of the modules in which each imports earlier ones only."""
    needs = {}
    for path, tree in MODULES.items():
        found = set()
        for name in imports_of(tree.body):
            while name.startswith("phalanx.") and name not in NAMES:
                name = name.rpartition(".")[0]
            if name.startswith("phalanx."):
                found.add(name)
        needs[name_of(path)] = found - {name_of(path)}
    done: set[str] = {"phalanx"}
    del needs["phalanx"]
    while needs:
        free = {name for name, found in needs.items() if found <= done}
        assert free, f"these import each other: {sorted(needs)}"
        done |= free
        needs = {name: found for name, found in needs.items() if name not in free}
