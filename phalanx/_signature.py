"""What of a call belongs to the key of a trace, and what is an input of the program.

Arrays and Python numbers are inputs: their type is part of the key. Everything else (bools, strings,
None, functions, objects, variables) is static: its value is part of the key, by equality where the
object defines one and else by identity. Identities are held weakly, so that a cache never keeps a
model alive.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from phalanx import _jax
from phalanx._checks import is_foreign_variable, is_numeric, refuse_foreign_array, take_apart
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.variables import Component, Variable

NUMBERS = (int, float, complex)


def is_input(leaf: Any) -> bool:
    """True for what becomes an input of the program."""
    if type(leaf) is _jax.ConcreteArray:  # most are, and JAX's own isinstance takes longer
        return True
    if isinstance(leaf, bool):
        return False
    if isinstance(leaf, (np.ndarray, np.generic)):
        return is_numeric(leaf.dtype)
    return isinstance(leaf, (jax.Array, *NUMBERS))


class Identity:
    """A key that is equal for one object only, and does not keep it alive where that can be had."""

    __slots__ = ("_id", "_kind", "_ref")

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._kind = type(value).__name__
        try:
            self._ref: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._ref = lambda: value

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Identity) and self._id == other._id and self._ref() is other._ref() is not None

    def __hash__(self) -> int:
        return self._id

    @property
    def value(self) -> Any:
        """The object, or None once it is gone."""
        return self._ref()

    def watch(self, callback: Callable[[], None]) -> Any:
        """Call back once the object is gone, for as long as the result is kept."""
        value = self._ref()
        if isinstance(self._ref, weakref.ref) and value is not None:
            return weakref.ref(value, lambda _: callback())
        return None

    def __repr__(self) -> str:
        value = self._ref()
        return f"<{self._kind} {value.name}>" if isinstance(value, Variable) else f"<{self._kind}>"


class Given:
    """Functions as an argument: known by what they do, and not kept."""

    __slots__ = ("functions", "key")

    def __init__(self, functions: tuple[Callable[..., Any], ...]) -> None:
        self.functions = functions
        self.key = tuple(map(function_key, functions))


def _hashes_by_identity(value: Any) -> bool:
    method: Any = type(value).__hash__
    return method is object.__hash__


def static_key(value: Any, label: str) -> Hashable:
    """A key for a static value, or an error that names the argument."""
    if isinstance(value, Given):
        return value.key
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return function_key(value)
    if isinstance(value, (Variable, Component)) or is_foreign_variable(value) or _hashes_by_identity(value):
        return Identity(value)
    if isinstance(value, (np.ndarray, np.generic)) and not is_numeric(value.dtype):
        raise ArgumentTypeError(
            f"{label} is not numeric: it has dtype {value.dtype}. Look up strings and objects on the host,"
            " before the traced function."
        )
    if type(value) in _PLAIN:
        return _plain_key(value)
    if isinstance(value, tuple):
        return (type(value), tuple(static_key(part, label) for part in value))
    refuse_foreign_array(value, label)
    try:
        hash(value)
    except TypeError:
        raise ArgumentTypeError(
            f"{label} is a {type(value).__name__}, which is static here and cannot be hashed. Pass a tuple or"
            " frozenset, an array, or an object that hashes."
        ) from None
    return (type(value), value)


_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})


def _plain_key(value: Any) -> Hashable:
    """Tells apart what computes differently although it is equal: 1, 1.0 and True, 0.0 and -0.0; and NaN is itself."""
    if value != value or (value == 0 and not isinstance(value, int)):
        return (type(value), repr(value))
    return (type(value), value)


def identities(key: Any) -> Iterator[Identity]:
    """The identities that a key is made of."""
    if isinstance(key, Identity):
        yield key
    elif isinstance(key, tuple):
        for part in key:
            yield from identities(part)


def function_key(fn: Any, seen: dict[Any, int] | None = None) -> Hashable:
    """Equal for functions with the same code that see the same values: closed-over cells, defaults, globals.

    A function that is defined anew in every round of a loop is the same program each time. One that reads a
    global which was bound to something else (a learning rate in a notebook) is another. The functions of its
    own module that it calls are looked into likewise; `seen` numbers those that were.
    """
    seen = {} if seen is None else seen
    if isinstance(fn, functools.partial):
        keywords = tuple((k, _value_key(v, seen)) for k, v in fn.keywords.items())
        return ("partial", function_key(fn.func, seen), tuple(_value_key(v, seen) for v in fn.args), keywords)
    if isinstance(fn, types.MethodType):
        return ("method", function_key(fn.__func__, seen), Identity(fn.__self__))
    if not isinstance(fn, types.FunctionType):
        return Identity(fn)
    if fn in seen:
        return ("seen", seen[fn])
    seen[fn] = len(seen)
    cells = tuple(_value_key(_contents(c), seen) for c in fn.__closure__ or ())
    defaults = tuple(_value_key(v, seen) for v in fn.__defaults__ or ())
    keywords = tuple((k, _value_key(v, seen)) for k, v in (fn.__kwdefaults__ or {}).items())
    module = fn.__globals__
    read = tuple((name, _global_key(module[name], module, seen)) for name in _names_in(fn.__code__) if name in module)
    return (fn.__code__, Identity(module), cells, defaults, keywords, read)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Names that the code, or a function defined in it, may look up in its module."""
    inner = (_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *(name for names in inner for name in names))))


_EMPTY = object()


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _EMPTY


def _global_key(value: Any, module: dict[str, Any], seen: dict[Any, int]) -> Hashable:
    if isinstance(value, types.FunctionType) and value.__globals__ is not module:
        return Identity(value)
    return _value_key(value, seen)


def _value_key(value: Any, seen: dict[Any, int]) -> Hashable:
    if type(value) in _PLAIN:
        return _plain_key(value)
    if isinstance(value, tuple):
        return (type(value), tuple(_value_key(v, seen) for v in value))
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return function_key(value, seen)
    return Identity(value)


class Signature:
    """Binds calls of one function to (key, inputs) and back."""

    def __init__(
        self,
        fn: Callable[..., Any],
        static_argnames: tuple[str, ...],
        input_signature: Any,
        reduce_retracing: bool,
        skip: int = 0,
    ) -> None:
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._static = static_argnames
        self._input_signature = input_signature
        self._strong = reduce_retracing
        try:
            signature = inspect.signature(fn)
            parameters = list(signature.parameters.values())[skip:]
            self.of_calls: inspect.Signature | None = signature.replace(parameters=parameters)
            """The parameters that callers see."""
        except (TypeError, ValueError):
            self.of_calls, parameters = None, []
        unknown = set(static_argnames) - {p.name for p in parameters}
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ArgumentError(
                f"{self.name}: static_argnames has {sorted(unknown)}, but the parameters are"
                f" {[p.name for p in parameters]}."
            )
        plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._plain_arity = len(parameters) if all(p.kind in plain for p in parameters) else None
        self._names = [p.name for p in parameters]

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in one canonical form, defaults filled in."""
        if self._input_signature is not None:
            args, kwargs = self._conform(args, kwargs)
        if self.of_calls is None or (not kwargs and len(args) == self._plain_arity):
            return args, kwargs
        try:
            bound = self.of_calls.bind(*args, **kwargs)
        except TypeError as error:
            raise ArgumentTypeError(f"{self.name}{self.of_calls}: {error}.") from None
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _conform(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        assert self.of_calls is not None
        try:
            args = self.of_calls.bind(*args, **kwargs).args
        except TypeError as error:
            raise ArgumentTypeError(f"{self.name}{self.of_calls}: {error}.") from None
        spec = tuple(self._input_signature)
        if len(args) != len(spec):
            raise ArgumentTypeError(f"{self.name}: input_signature has {len(spec)} arguments, got {len(args)}.")
        return tuple(_conform_to(s, a, f"{self.name}: argument {n!r}") for s, a, n in zip(spec, args, self._names)), {}

    def split(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Flatten bound arguments into a key and inputs."""
        if self._static:
            names = self._names
            args = tuple(Static(a) if i < len(names) and names[i] in self._static else a for i, a in enumerate(args))
            kwargs = {k: Static(v) if k in self._static else v for k, v in kwargs.items()}
        try:
            leaves, structure = jax.tree.flatten((args, kwargs))
        except (TypeError, ValueError):
            for label, value in (*zip(self._names, args), *kwargs.items()):
                take_apart(value, f"{self.name}: argument {label!r}")
            raise
        keys: list[Hashable] = []
        inputs: list[Any] = []
        for i, leaf in enumerate(leaves):
            if is_input(leaf):
                inputs.append(leaf)
                keys.append(self._type(leaf, i, structure))
            else:
                value = leaf.value if isinstance(leaf, Static) else leaf
                try:
                    keys.append(static_key(value, ""))
                except ArgumentTypeError:
                    keys.append(static_key(value, f"{self.name}: {self.label(structure, i)}"))
        return Call(leaves, structure, tuple(keys), inputs)

    def _type(self, leaf: Any, index: int, structure: Any) -> Any:
        try:
            aval = _jax.type_of(leaf)
        except (TypeError, OverflowError) as error:
            reason = str(error).partition("\n")[0]
            raise ArgumentTypeError(f"{self.name}: {self.label(structure, index)} cannot be traced: {reason}") from None
        return aval.update(weak_type=False) if self._strong and getattr(aval, "weak_type", False) else aval

    def label(self, structure: Any, index: int) -> str:
        """How messages call the leaf: "argument 'x'['a']"."""
        paths, _ = jax.tree_util.tree_flatten_with_path(
            jax.tree.unflatten(structure, range(structure.num_leaves)), is_leaf=lambda x: isinstance(x, int)
        )
        path = next(path for path, leaf in paths if leaf == index)
        if path[0].idx == 0:
            name = self._positional(path[1].idx)
        else:
            name = path[1].key
        return f"argument {name!r}{jax.tree_util.keystr(path[2:])}"

    @property
    def open_sizes(self) -> list[str]:
        """The arguments of which the input signature leaves a size open."""
        specs = zip(self._names, self._input_signature or ())
        return [
            f"argument {name!r}"
            for name, spec in specs
            if any(not isinstance(d, int) for leaf in jax.tree.leaves(spec) for d in getattr(leaf, "shape", ()))
        ]

    @property
    def example(self) -> tuple[Any, ...] | None:
        """Arguments of the types that the input signature asks for, where it leaves nothing open."""
        return None if self._input_signature is None or self.open_sizes else tuple(self._input_signature)

    def changes(self, old: Call, new: Call) -> list[str]:
        """In words, which arguments make two calls need traces of their own."""
        if old.structure == new.structure:
            pairs = enumerate(zip(old.keys, new.keys))
            return [f"{self.label(new.structure, i)}: {describe(a)} -> {describe(b)}" for i, (a, b) in pairs if a != b]
        before, after = map(self._by_name, (old, new))
        names = [n for n in dict.fromkeys([*before, *after]) if before.get(n) != after.get(n)]
        return [f"argument {n!r}: {before.get(n, 'not given')} -> {after.get(n, 'not given')}" for n in names]

    def _by_name(self, call: Call) -> dict[str, str]:
        """Each argument in words."""
        args, kwargs = jax.tree.unflatten(call.structure, [_Shown(describe(key)) for key in call.keys])
        named = ((self._positional(i), value) for i, value in enumerate(args))
        return {name: repr(value) for name, value in (*named, *kwargs.items())}

    def _positional(self, index: int) -> str:
        if self.of_calls is None:
            return f"#{index}"
        parameters = list(self.of_calls.parameters.values())
        for i, p in enumerate(parameters):
            if p.kind is p.VAR_POSITIONAL:
                return f"{p.name}[{index - i}]"
            if i == index:
                break
        return parameters[index].name


class _Shown:
    """Takes a leaf's place in the repr of an argument."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


class Static:
    """Marks an argument that is named in static_argnames."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Call:
    """One call: its leaves, how they are put together, its key, and the values of its inputs."""

    __slots__ = ("inputs", "keys", "leaves", "structure")

    def __init__(self, leaves: list[Any], structure: Any, keys: tuple[Hashable, ...], inputs: list[Any]) -> None:
        self.leaves = leaves
        self.structure = structure
        self.keys = keys
        self.inputs = inputs

    @property
    def input_types(self) -> list[Any]:
        """Types of the inputs, in order."""
        return [key for leaf, key in zip(self.leaves, self.keys) if is_input(leaf)]

    def without_values(self) -> Call:
        """The same kind of call, with its arrays and objects free to go."""
        return Call([0 if is_input(leaf) else None for leaf in self.leaves], self.structure, self.keys, [])

    def arguments(self, inputs: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs with other values for the inputs."""
        rest = iter(inputs)
        leaves = [next(rest) if is_input(x) else x.value if isinstance(x, Static) else x for x in self.leaves]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return args, kwargs


def _conform_to(spec: Any, argument: Any, label: str) -> Any:
    leaves, structure = jax.tree.flatten(spec, is_leaf=lambda s: hasattr(s, "shape") and hasattr(s, "dtype"))
    try:
        values = structure.flatten_up_to(argument)
    except (ValueError, TypeError):
        raise ArgumentTypeError(f"{label} does not have the structure of input_signature, {spec}.") from None
    return jax.tree.unflatten(structure, [_conform_leaf(s, v, label) for s, v in zip(leaves, values)])


def _conform_leaf(spec: Any, value: Any, label: str) -> Any:
    from phalanx._conversion import check_kind, to_array
    from phalanx.errors import AssignmentError

    array = to_array(label, "value", value)
    shape, dtype = tuple(spec.shape), jax.numpy.dtype(spec.dtype)
    fits = len(shape) == array.ndim and all(s == d for s, d in zip(shape, array.shape) if isinstance(s, int))
    if not fits:
        raise ArgumentTypeError(f"{label}: input_signature asks for shape {shape}, got {tuple(array.shape)}.")
    strong = isinstance(array, jax.Array) and not array.weak_type
    try:
        check_kind(label, array.dtype, dtype, exact=strong)
    except AssignmentError as error:
        raise ArgumentTypeError(str(error)) from None
    if _jax.is_tracer(array) or isinstance(array, jax.Array):
        return array.astype(dtype)
    return np.asarray(array, dtype)


def describe(key: Any) -> str:
    """A part of a trace's key in words."""
    if hasattr(key, "str_short"):
        return f"Python number ({key.str_short()})" if key.weak_type and not key.shape else str(key.str_short())
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type):
        return repr(key[1])
    if isinstance(key, tuple) and key and isinstance(key[0], types.CodeType):
        return f"<function {getattr(key[0], 'co_qualname', key[0].co_name)}>"
    if isinstance(key, tuple) and key and isinstance(key[0], str):
        return " of ".join(str(k[0] if isinstance(k, tuple) else k) for k in key if k is not None)
    return repr(key)
