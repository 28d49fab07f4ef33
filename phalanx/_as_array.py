"""What makes an object that stands for an array work where an array works."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from phalanx import _jax


class AsArray:
    """Behaves as its `value` in JAX's functions, in operators and for Python's protocols."""

    __array_priority__ = 1000

    def __init_subclass__(cls) -> None:
        _jax.register_array_like(cls, lambda instance: instance.value)

    @property
    def value(self) -> jax.Array:
        """The array here and now."""
        raise NotImplementedError

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.value, dtype)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.value, name)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.value)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.value)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]

    def __bool__(self) -> bool:
        return bool(self.value)

    def __float__(self) -> float:
        return float(self.value)

    def __int__(self) -> int:
        return int(self.value)

    def __complex__(self) -> complex:
        return complex(self.value)

    def __index__(self) -> int:
        return operator.index(self.value)

    def __format__(self, spec: str) -> str:
        return format(self.value if spec else repr(self), spec)

    __hash__ = object.__hash__


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        operands = [o.value if isinstance(o, AsArray) else o for o in others]
        return getattr(self.value, name)(*operands)

    method.__name__ = name
    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
_NAMES = [f"__{p}{name}__" for name in (*_BINARY, "divmod") for p in ("", "r")]
_NAMES += [f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert", "round")]

for _name in _NAMES:
    setattr(AsArray, _name, _forward(_name))
