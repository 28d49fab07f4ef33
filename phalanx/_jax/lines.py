"""The user's line: the innermost that is neither ours nor JAX's, Keras's or Python's own."""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import traceback
from typing import Any

import jax
from jax._src import source_info_util as _source_info_util
from jax._src import traceback_util as _traceback_util
from jax.extend import source_info_util as _source_info

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_JAX = os.path.dirname(os.path.abspath(jax.__file__))
_never_users: tuple[str, ...] = (_PACKAGE + os.sep, _JAX + os.sep)
_STDLIB = sysconfig.get_path("stdlib") + os.sep

_source_info.register_exclusion(_PACKAGE)
_traceback_util.register_exclusion(_PACKAGE)


@functools.cache
def _is_users(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return False
    path = os.path.abspath(filename)
    in_library = path.startswith(_STDLIB) and "site-packages" not in path
    return not (in_library or path.startswith(_never_users))


def pass_over(folder: str) -> None:
    """Lines in this folder are not the user's: messages name the line that called what is there."""
    global _never_users
    _never_users += (os.path.abspath(folder) + os.sep,)
    _is_users.cache_clear()


def line_of(equation: Any) -> str:
    """'file.py:12' of the user's line that an operation comes from."""
    return re.sub(r"(:\d+):\d+ \(.*\)$", r"\1", _source_info.summarize(equation.source_info))


def users_line_of(equation: Any) -> str:
    """As `line_of`, in a file that is not installed where there is one: of the user, not of the user's libraries."""
    frames = list(_source_info_util.user_frames(equation.source_info.traceback))
    own = [f for f in frames if "site-packages" not in f.file_name] or frames
    return f"{short_path(own[0].file_name)}:{own[0].start_line}" if own else ""


def short_path(path: str) -> str:
    """Of an installed package's file, the part that says which."""
    return path.rpartition("site-packages/")[2]


def scope_of(equation: Any) -> str:
    """The named scopes that an operation was traced in: of Keras, its layers."""
    return str(equation.source_info.name_stack)


def line_of_error(error: BaseException) -> str:
    """'file.py:12' of the innermost of the user's lines that an error passed through."""
    lines = [f"{f.filename}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__) if _is_users(f.filename)]
    return lines[-1] if lines else user_line()


def user_line() -> str:
    """'file.py:12' of the innermost frame that is the user's."""
    frame = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "<unknown line>"
