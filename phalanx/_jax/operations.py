"""Operations: primitives with their parameters, and what is remembered for each kind of them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
from jax._src import core as _core
from jax.extend import core as _jex

from phalanx._jax.traces import current_trace, is_eager


class Operation:
    """One primitive with its parameters: a function from arrays to a list of arrays."""

    __slots__ = ("params", "primitive")

    def __init__(self, primitive: Any, params: dict[str, Any]) -> None:
        self.primitive = primitive
        self.params = params

    def __call__(self, *args: Any) -> list[Any]:
        if self.params.get("inline") and not is_eager():
            # As JAX does it in a program; most functions of jnp ask for it.
            return list(_jex.jaxpr_as_fun(self.params["jaxpr"])(*args))
        outs = self.primitive.bind(*args, **self.params)
        return list(outs) if self.primitive.multiple_results else [outs]

    def key(self) -> Hashable | None:
        """Equal for operations that compute the same, without keeping jaxprs alive; None when there is none."""
        key = (self.primitive, *self.params, *map(_without_jaxprs, self.params.values()))
        try:
            hash(key)
        except TypeError:
            return None
        return key

    @staticmethod
    def of(key: Any) -> Operation:
        """The operation with this key, for as long as somebody else keeps its jaxprs."""
        primitive, *items = key
        names, values = items[: len(items) // 2], items[len(items) // 2 :]
        params = dict(zip(names, map(_with_jaxprs, values)))
        if "subfuns" in params:
            return LastingOperation(primitive, params.pop("subfuns"), params)
        return Operation(primitive, params)


class CustomOperation(Operation):
    """A custom_jvp, custom_vjp or call primitive: binding it again lets JAX's own rules apply."""

    __slots__ = ()

    def __init__(self, primitive: Any, functions: tuple[Any, ...], params: dict[str, Any]) -> None:
        super().__init__(primitive, dict(params, subfuns=functions))

    def __call__(self, *args: Any) -> list[Any]:
        return list(self.bind(*args))

    def bind(self, *args: Any) -> Any:
        """Outputs in the container that JAX's caller expects."""
        for function in self.params["subfuns"]:
            for store in filter(None, getattr(function, "stores", ())):
                store.reset()  # JAX takes note of which of function and rule ran, and refuses notes of two runs
        trace = current_trace()
        with _jex.take_current_trace():
            avals = tuple(_core.typeof(x) for x in args)
            return self.primitive.bind_with_trace(trace, tuple(args), avals, dict(self.params))

    def key(self) -> Hashable | None:
        return None


class LastingOperation(CustomOperation):
    """A custom operation whose functions compute the same whenever they are called, so that one call stands for all."""

    __slots__ = ()

    _turn = threading.RLock()  # for the notes that JAX takes in functions, which all calls share here

    @classmethod
    def of_call(cls, primitive: Any, functions: tuple[Any, ...], params: dict[str, Any]) -> LastingOperation | None:
        """The operation, unless its functions may have changed, or may have more to them than their arguments.

        JAX traces a jitted function once, and so may we; `jax.nn.relu` is one, with a rule.
        """
        fun, *rules = functions
        if type(fun.f) is not _Jitted or len(fun.transforms) > 1 or fun.f.__wrapped__.__closure__:
            return None
        same = (fun, *(rule.f for rule in rules))
        known = _lasting[same] = _lasting.pop(same, functions)
        if len(_lasting) > _MOST_LASTING:
            _lasting.pop(next(iter(_lasting)), None)
        return cls(primitive, known, params)

    def bind(self, *args: Any) -> Any:
        with self._turn:
            return super().bind(*args)

    def key(self) -> Hashable | None:
        return Operation.key(self)

    def note(self, functions: tuple[Any, ...]) -> None:
        """Let the functions of a later call have the notes of the first, which ran in their place."""
        with self._turn:
            for mine, theirs in zip(self.params["subfuns"], functions):
                for note, store in zip(mine.stores, theirs.stores):
                    if mine is not theirs and note:
                        store.store(note.val)


_Jitted = type(jax.jit(lambda: None))
_MOST_LASTING = 1024
_lasting: dict[tuple[Any, ...], tuple[Any, ...]] = {}
"""The functions of the first call, for those of each equal one."""


_Jaxpr = (_core.Jaxpr, _jex.ClosedJaxpr)


class _Reference(weakref.ref):  # type: ignore[type-arg]
    """A jaxpr that is not kept alive."""

    __slots__ = ()


class _References(tuple[Any, ...]):
    """A tuple some of whose items are references, after its type."""

    __slots__ = ()


def _without_jaxprs(value: Any) -> Any:
    if isinstance(value, _Jaxpr):
        return _Reference(value)
    if isinstance(value, tuple) and any(isinstance(item, (*_Jaxpr, tuple)) for item in value):
        return _References((type(value), *map(_without_jaxprs, value)))
    return value


def _with_jaxprs(value: Any) -> Any:
    if isinstance(value, _Reference):
        return value()
    if isinstance(value, _References):
        make, *items = value
        items = list(map(_with_jaxprs, items))
        return make(*items) if hasattr(make, "_fields") else make(items)
    return value


class OperationCache:
    """What was made for operations, by their keys; let go when the jaxpr of one is."""

    def __init__(self, make: Callable[..., Any], size: int = 4096) -> None:
        self._make = make
        self._size = size
        self._entries: dict[Hashable, tuple[Any, list[Any]]] = {}

    def get(self, key: Any, *rest: Hashable) -> Any:
        """``make(key, *rest)``, made once."""
        full = (key, *rest)
        entry = self._entries.get(full)
        if entry is None:
            entries = self._entries
            refs = [weakref.ref(ref(), lambda _: entries.pop(full, None)) for part in key for ref in _references(part)]
            entry = self._entries[full] = (self._make(key, *rest), refs)
            while len(self._entries) > self._size:
                self._entries.pop(next(iter(self._entries)), None)
        return entry[0]


def _references(key: Any) -> Iterator[Any]:
    if isinstance(key, _Reference):
        yield key
    elif isinstance(key, _References):
        for item in key:
            yield from _references(item)
