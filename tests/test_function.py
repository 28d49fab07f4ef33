"""Traced functions: which calls share a trace, what is said about it, and the ways of using them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import threading
import warnings
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.errors import (
    ArgumentError,
    ArgumentTypeError,
    RetraceError,
    StrategyError,
    TracingError,
)


def counted(fn: Any = lambda *args, **kwargs: (args, kwargs), **options: Any) -> tuple[Any, list[Any]]:
    """A traced function and the list that gets an entry for each run of its body."""
    runs: list[Any] = []

    @functools.wraps(fn)
    def body(*args, **kwargs):
        runs.append(args)
        return fn(*args, **kwargs)

    return px.function(body, **options), runs


# ---- which calls share a trace -------------------------------------------------------------------

ONES = np.ones(2, np.float32)
KINDS: dict[str, list[Any]] = {
    "int": [1, 2, -5],
    "float": [1.0, 2.5],
    "complex": [1j, 2 + 1j],
    "True": [True, True],
    "False": [False],
    "None": [None, None],
    "text": ["a", "a"],
    "other text": ["b"],
    "int32 scalar": [jnp.int32(1), np.int32(2)],
    "float32 scalar": [jnp.float32(1), np.float32(2)],
    "bool scalar": [jnp.asarray(True), np.bool_(False)],
    "float32[2]": [jnp.ones(2), ONES],
    "float32[3]": [jnp.ones(3)],
    "int32[2]": [jnp.ones(2, int)],
    "float16[2]": [jnp.ones(2, jnp.float16)],
    "key": [jax.random.key(0), jax.random.key(1)],
    "list": [[1.0, ONES], [2.0, ONES]],
    "tuple": [(1.0, ONES)],
    "longer list": [[1.0, ONES, ONES]],
    "dict": [{"a": 1.0, "b": ONES}, {"b": ONES, "a": 2.0}],
    "other dict": [{"a": 1.0, "c": ONES}],
    "empty": [[]],
    "dtype": [jnp.float32, jnp.float32],
    "range": [range(3), range(3)],
}


def test_calls_of_one_kind_share_a_trace_and_different_kinds_do_not():
    f, runs = counted(lambda x: x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # many kinds of arguments
        for expected, (kind, values) in enumerate(KINDS.items(), start=1):
            for value in values:
                f(value)
                assert len(runs) == f.trace_count == expected, kind
        for values in KINDS.values():
            f(values[0])
    assert len(runs) == len(KINDS)


def test_one_and_true_and_one_point_nothing_give_their_own_results():
    f = px.function(lambda x: x)
    assert f(1).dtype == jnp.int32
    assert f(1.0).dtype == jnp.float32
    assert f(True) is True


def test_arguments_mean_the_same_however_they_are_passed():
    f, runs = counted(lambda x, y=2.0, *, scale=1.0: x * y * scale)
    for call in (f(3.0), f(3.0, 2.0), f(x=3.0), f(y=2.0, x=3.0), f(3.0, scale=1.0), f(3.0, 2.0, scale=1.0)):
        assert float(call) == 6.0
    assert len(runs) == 1


def test_extra_arguments_and_keywords_reach_the_body():
    f, runs = counted(lambda x, *rest, **named: x + sum(rest) + sum(named.values()))
    assert float(f(1.0, 2.0, 3.0, a=4.0, b=5.0)) == float(f(1.0, 2.0, 3.0, b=5.0, a=4.0)) == 15.0
    assert float(f(1.0)) == 1.0
    assert len(runs) == 2


class Point(NamedTuple):
    x: Any
    y: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    rows: Any
    name: str = dataclasses.field(metadata={"static": True}, default="train")


def test_pytrees_go_in_and_come_out_as_they_are():
    f, runs = counted(lambda tree: jax.tree.map(lambda leaf: leaf * 2, tree))
    point = f(Point(1.0, [ONES, None]))
    assert isinstance(point, Point) and float(point.x) == 2.0 and point.y[0].tolist() == [2.0, 2.0]
    assert point.y[1] is None
    batch = f(Batch(ONES))
    assert isinstance(batch, Batch) and batch.name == "train" and batch.rows.tolist() == [2.0, 2.0]
    f(Batch(ONES + 1))
    f(Batch(ONES, name="test"))
    assert len(runs) == 3


def test_results_that_are_no_arrays_come_back_as_they_are():
    marker = object()
    f = px.function(lambda: {"text": "a", "none": None, "flag": True, "object": marker, "number": 3, "empty": ()})
    result = f()
    assert (result["text"], result["none"], result["flag"], result["empty"]) == ("a", None, True, ())
    assert result["object"] is marker
    assert isinstance(result["number"], jax.Array) and int(result["number"]) == 3


def test_parts_of_a_strategy_are_arguments_and_results():
    strategy = px.Mirrored(jax.devices()[:2])
    parts = strategy.distribute_values_from_function(lambda context: ONES * context.replica_id)
    f, runs = counted(lambda p: strategy.run(lambda x: x + 1, args=(p,)))
    for _ in range(2):
        result = f({"p": parts}["p"])
    assert isinstance(result, px.PerReplica)
    assert [v.tolist() for v in result.values] == [[1.0, 1.0], [2.0, 2.0]]
    assert len(runs) == 1


def test_two_objects_are_two_arguments_and_equal_values_are_one():
    class Model:
        def __init__(self, scale):
            self.scale = scale

    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float

    f, runs = counted(lambda x, thing: x * thing.scale)
    a, b = Model(2.0), Model(3.0)
    assert [float(f(1.0, thing)) for thing in (a, b, a, b)] == [2.0, 3.0, 2.0, 3.0]
    assert len(runs) == 2
    assert [float(f(1.0, Config(s))) for s in (4.0, 5.0, 4.0)] == [4.0, 5.0, 4.0]
    assert len(runs) == 4


def test_functions_given_as_arguments_are_compared_by_what_they_do():
    f, runs = counted(lambda x, g: g(x))

    def times(n):
        return lambda x: x * n

    assert [float(f(1.0, times(n))) for n in (2, 3, 2, 3)] == [2.0, 3.0, 2.0, 3.0]
    assert len(runs) == 2


def test_the_place_of_a_call_is_part_of_its_kind():
    strategy, other = px.Mirrored(jax.devices()[:2]), px.Mirrored(jax.devices()[2:4])
    f, runs = counted(lambda x: x + px.get_strategy().num_replicas)
    for _ in range(2):
        assert float(f(1.0)) == 2.0
        for s in (strategy, other):
            with s.scope():
                assert float(f(1.0)) == 3.0
    assert len(runs) == 3
    assert float(strategy.run(lambda: f(1.0))) == 3.0
    assert len(runs) == 4


def test_settings_of_jax_are_part_of_the_kind():
    f, runs = counted(lambda x: x * 2)
    for _ in range(2):
        assert f(1.0).dtype == jnp.float32
        with jax.enable_x64(True):
            assert f(1.0).dtype == jnp.float64
    assert len(runs) == 2
    assert "JAX settings" in f.explain_retraces()


def test_a_trace_leaves_no_mark_on_the_programs_of_other_devices():
    strategies = [px.Mirrored([d]) for d in jax.devices()[:2]]
    f = px.function(lambda s, x: s.run(lambda y: y + 1, args=(x,)))
    for s in (*strategies, *strategies):
        assert f(s, 1.0).devices() == set(s.devices)


# ---- static arguments ----------------------------------------------------------------------------


def test_numbers_named_static_are_python_numbers_in_the_body():
    f, runs = counted(lambda x, n, power=1: [x**power] * n, static_argnames=("n", "power"))
    assert len(f(1.0, 3)) == 3
    assert len(f(2.0, n=3)) == 3
    assert [float(x) for x in f(2.0, 1, power=3)] == [8.0]
    assert len(runs) == 2


def test_one_static_name_can_be_given_as_text():
    f = px.function(lambda x, n: x[:n], static_argnames="n")
    assert f(jnp.ones(3), 2).shape == (2,)


@pytest.mark.parametrize("value", [[1], {"a": 1}, np.ones(2), {1}], ids=["list", "dict", "array", "set"])
def test_an_unhashable_static_argument_is_named(value):
    f = px.function(lambda x, config: x, static_argnames="config")
    with pytest.raises(ArgumentTypeError, match=rf"'config' is a {type(value).__name__}, .* cannot be hashed. Pass"):
        f(1.0, value)


def test_an_unhashable_object_inside_an_argument_is_named_with_its_place():
    @dataclasses.dataclass
    class Plain:  # eq without hash
        x: int

    f = px.function(lambda x, **options: x)
    with pytest.raises(ArgumentTypeError, match=r"f|<lambda>.*argument 'options_'\['a'\]\[1\] is a Plain"):
        f(1.0, options_={"a": [1, Plain(2)]})


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"static_argnames": "n"}, ArgumentError, r"static_argnames has \['n'\], but the parameters are \['x'\]"),
        ({"static_argnames": (1,)}, ArgumentTypeError, "must be names of arguments"),
        ({"input_signature": 3}, ArgumentTypeError, "must be a list with one entry per argument"),
        ({"input_signature": [ONES], "static_argnames": "x"}, ArgumentError, "cannot be combined"),
    ],
)
def test_options_that_make_no_sense_are_refused_at_once(options, error, words):
    with pytest.raises(error, match=words):
        px.function(lambda x: x, **options)


@pytest.mark.parametrize("thing", [3, None, "f", [lambda: 1]])
def test_only_functions_can_be_traced(thing):
    with pytest.raises(ArgumentTypeError, match=r"px\.function takes a function, got"):
        px.function()(thing)


# ---- signatures ----------------------------------------------------------------------------------


def test_an_input_signature_converts_arguments():
    f, runs = counted(lambda x: x.sum(), input_signature=[jax.ShapeDtypeStruct((1, 3), jnp.float32)])
    for x in (jnp.ones((1, 3)), np.ones((1, 3)), [[1, 1, 1]], [[1.0, 1, 1]], np.ones((1, 3), int)):
        assert float(f(x)) == 3.0
    assert len(runs) == 1


ROWS_OF_3 = SimpleNamespace(shape=(None, 3), dtype=jnp.float32)
SYMBOLIC = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), jnp.float32)


@pytest.mark.parametrize("spec", [ROWS_OF_3, SYMBOLIC], ids=["None", "symbolic"])
def test_a_size_in_an_input_signature_can_be_left_open(spec):
    f = px.function(lambda x: x.sum(), input_signature=[spec])
    assert [float(f(jnp.ones((n, 3)))) for n in (2, 5, 0)] == [6.0, 15.0, 0.0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((np.ones((2, 4)),), r"argument 'x': input_signature asks for shape \(None, 3\), got \(2, 4\)"),
        ((np.ones(3),), r"asks for shape \(None, 3\), got \(3,\)"),
        ((jnp.ones((2, 3), int),), "argument 'x' has dtype float32, got .* int32"),
        ((np.ones((2, 3)), 1), "too many positional arguments"),
        ((), "missing a required argument: 'x'"),
        (("a",), "argument 'x': value must be numeric, got str"),
    ],
)
def test_arguments_that_miss_the_input_signature_are_refused(args, words):
    f = px.function(lambda x: x.sum(), input_signature=[ROWS_OF_3])
    with pytest.raises(ArgumentTypeError, match=words):
        f(*args)


def test_an_input_signature_can_be_a_structure():
    spec = {"a": jax.ShapeDtypeStruct((), jnp.float32), "b": jax.ShapeDtypeStruct((2,), jnp.int32)}
    f = px.function(lambda tree: tree["a"] + tree["b"], input_signature=[spec])
    assert f({"a": 1, "b": [1, 2]}).tolist() == [2.0, 3.0]
    with pytest.raises(ArgumentTypeError, match="argument 'tree' does not have the structure"):
        f({"a": 1})


def test_calls_that_python_would_refuse_are_refused_in_its_words():
    f = px.function(lambda x, *, y: x)
    with pytest.raises(ArgumentTypeError, match=r"<lambda>\(x, \*, y\): missing a required .*'y'"):
        f(1.0)
    with pytest.raises(ArgumentTypeError, match="unexpected keyword argument 'z'"):
        f(1.0, y=1.0, z=2.0)


def test_reduced_retracing_joins_numbers_and_arrays_of_their_dtype():
    f, runs = counted(lambda x: x * 2, reduce_retracing=True)
    for x in (1.0, jnp.float32(1), np.float32(1), 2.0):
        assert f(x).dtype == jnp.float32
    assert len(runs) == 1
    f(1)
    assert len(runs) == 2


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([object()]), np.datetime64("2020-01-01"), 2**70])
def test_values_that_jax_cannot_take_are_refused_by_the_name_of_the_argument(value):
    with pytest.raises(ArgumentTypeError, match="argument 'x'"):
        px.function(lambda x: x)(value)


# ---- what is said about traces -------------------------------------------------------------------


def test_retraces_are_explained_by_the_argument_that_changed():
    f = px.function(lambda x, *rest, training=False, **more: x)
    f(jnp.ones(2))
    f(jnp.ones(3))
    f(jnp.ones(3, int))
    f(jnp.ones(3), training=True)
    f([jnp.ones(3)], training=True)
    f([jnp.ones(3)], 1, training=True)
    f([jnp.ones(3)], jnp.int32(1), training=True)
    f([jnp.ones(3)], jnp.int32(1), training=True, z="a")
    with px.OneDevice().scope():
        f([jnp.ones(3)], jnp.int32(1), training=True, z="a")
    assert f.explain_retraces().splitlines() == [
        "<lambda>: traced 9 times.",
        "trace 2: argument 'x': float32[2] -> float32[3]",
        "trace 3: argument 'x': float32[3] -> int32[3]",
        "trace 4: argument 'training': False -> True",
        "trace 5: argument 'x': float32[3] -> [float32[3]]",
        "trace 6: argument 'rest[0]': not given -> Python number (int32[])",
        "trace 7: argument 'rest[0]': Python number (int32[]) -> int32[]",
        "trace 8: argument 'z': not given -> 'a'",
        "trace 9: context: cross-replica -> cross-replica of OneDevice(cpu:0)",
    ]


def test_a_function_that_keeps_being_traced_warns_once_and_says_why():
    f = px.function(lambda x: x)
    with pytest.warns(UserWarning, match=r"traced for 10 kinds .* argument 'x': float32\[9\] -> float32\[10\]") as seen:
        for n in range(1, 31):
            f(np.ones(n, np.float32))
    assert len(seen) == 1
    assert seen[0].filename == __file__


def test_strict_turns_traces_after_the_warm_up_into_errors():
    f = px.function(lambda x: x)
    px.strict()
    f(jnp.ones(4))
    f(jnp.ones(2))  # the second call may still differ: the last batch of an epoch
    with pytest.raises(RetraceError, match=r"after warm-up \(argument 'x': float32\[2\] -> float32\[3\]\)"):
        f(jnp.ones(3))
    assert f(jnp.ones(4)).shape == (4,)
    assert f.trace_count == 2
    px.strict(False)
    assert f(jnp.ones(3)).shape == (3,)
    with pytest.raises(ArgumentTypeError, match="strict takes True or False, got 1"):
        px.strict(1)  # type: ignore[arg-type]


def test_the_body_needs_no_values():
    f = px.function(lambda x: x if x > 0 else -x)
    with pytest.raises(TracingError, match=r"at .*test_function.py:\d+ a Python value was asked for.* px\.cond or"):
        f(1.0)
    for need in (int, float, np.asarray, lambda x: range(x), lambda x: jnp.ones(3)[jnp.ones(3) > x]):
        with pytest.raises(TracingError, match="Python value was asked for"):
            px.function(need)(jnp.int32(1))


# ---- ways of making one --------------------------------------------------------------------------


def test_it_looks_like_the_function_it_was_made_of():
    @px.function(donate=False)
    def documented(x: float, *, scale: float = 2.0) -> jax.Array:
        """What it does."""
        return jnp.asarray(x * scale)

    assert documented.__name__ == documented.name == "documented"
    assert documented.__doc__ == "What it does."
    assert documented.__module__ == __name__
    assert str(inspect.signature(documented)) == "(x: 'float', *, scale: 'float' = 2.0) -> 'jax.Array'"
    assert documented.__wrapped__(1.0).tolist() == 2.0
    assert repr(documented) == "<px.function documented, 0 traces>"


class Times:
    def __init__(self, k):
        self.k = px.Variable(k)

    def __call__(self, x):
        return self.k * x


def test_partials_callable_objects_and_builtins_can_be_traced():
    g = px.function(functools.partial(lambda k, x, *, b: k * x + b, 3.0, b=1.0))
    assert float(g(2.0)) == float(g(x=2.0)) == 7.0
    assert g.trace_count == 1
    h = px.function(Times(2.0))
    assert float(h(3.0)) == 6.0
    assert float(px.function(sum)([1.0, 2.0])) == 3.0
    assert float(px.function(jnp.sin)(0.0)) == 0.0
    assert float(px.function(jax.jit(lambda x: x + 1))(1.0)) == 2.0


def test_a_traced_function_can_be_traced_again():
    f, runs = counted(lambda x: x + 1)
    assert float(px.function(f)(1.0)) == 2.0
    assert len(runs) == 1


class Scale:
    traces = 0

    def __init__(self, k):
        self.k = px.Variable(k)

    @px.function
    def times(self, x):
        """Multiply."""
        Scale.traces += 1
        return self.k * x

    @px.function
    def add(self, x=1.0, *, twice=False):
        self.k.assign_add(x * (2 if twice else 1))
        return self.k.value

    @classmethod
    @px.function
    def named(cls, x):
        return cls.__name__, x + 1

    @staticmethod
    @px.function
    def free(x):
        return x + 2


class Shifted(Scale):
    @px.function
    def times(self, x):
        return super().times(x) + 1


def test_methods_have_one_cache_for_each_object():
    Scale.traces = 0
    a, b = Scale(2.0), Scale(5.0)
    for _ in range(2):
        assert (float(a.times(1.0)), float(b.times(1.0))) == (2.0, 5.0)
    assert (Scale.traces, a.times.trace_count, b.times.trace_count) == (2, 1, 1)
    assert [float(a.add()), float(a.add(2.0)), float(a.add(x=1.0, twice=True)), float(b.k)] == [3.0, 5.0, 7.0, 5.0]


def test_methods_of_objects_that_nobody_keeps_can_be_called():
    assert float(Scale(2.0).times(3.0)) == 6.0
    assert Scale(2.0).times.get_concrete_function(1.0)(3.0) == 6.0
    assert "func" in Scale(2.0).times.lower(1.0).as_text()
    assert Scale(2.0).times.cost(1.0)["flops"] >= 1
    times = Scale(4.0).times
    gc.collect()
    assert float(times(2.0)) == 8.0


def test_methods_can_be_overridden_and_called_through_the_class():
    assert float(Shifted(2.0).times(3.0)) == 7.0
    assert float(Scale.times(Scale(2.0), 3.0)) == 6.0


def test_class_and_static_methods():
    assert Shifted.named(1)[0] == "Shifted" and Scale(1.0).named(1)[0] == "Scale"
    assert (int(Scale.free(1)), int(Shifted(1.0).free(1))) == (3, 3)
    for kind in (classmethod, staticmethod):
        with pytest.raises(ArgumentTypeError, match=f"@{kind.__name__} above, @px.function below"):
            px.function(kind(lambda x: x))


def test_a_traced_method_looks_like_a_method():
    a = Scale(2.0)
    assert (a.times.__name__, a.times.__doc__, a.times.__self__) == ("times", "Multiply.", a)
    assert str(inspect.signature(a.add)) == "(x=1.0, *, twice=False)"
    assert a.times == a.times and len({a.times, a.times}) == 1 and a.times != Scale(2.0).times
    assert "times" in repr(a.times) and "Scale" in repr(a.times)
    with pytest.raises(ArgumentTypeError, match=r"times\(x\): missing a required argument"):
        a.times()


def test_objects_with_traced_methods_are_freed():
    scale = Scale(2.0)
    scale.times(1.0)
    refs = [weakref.ref(scale), weakref.ref(scale.k)]
    del scale
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_a_method_of_a_class_with_slots_says_what_it_needs():
    class Slotted:
        __slots__ = ()

        @px.function
        def f(self):
            return 1

    with pytest.raises(ArgumentTypeError, match="Add '__weakref__' to __slots__"):
        Slotted().f()


def test_an_object_that_traces_its_methods_itself_can_be_copied():
    class Model:
        def __init__(self):
            self.w = px.Variable(1.0)
            self.step = px.function(self._step)

        def _step(self, x):
            self.w.assign_add(x)
            return self.w.value

    model = Model()
    model.step(1.0)
    twin = copy.deepcopy(model)
    assert float(twin.step(5.0)) == 7.0
    assert float(model.w) == 2.0


@px.function
def of_this_module(x):
    return x + 1


def test_a_decorated_function_is_pickled_by_name_as_functions_are():
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    assert copy.deepcopy([of_this_module])[0] is of_this_module


# ---- calling each other --------------------------------------------------------------------------


def test_recursion_over_a_static_depth():
    power = px.function(lambda x, n: x * power(x, n - 1) if n else jnp.ones_like(x), static_argnames="n")
    assert float(power(2.0, 5)) == 32.0
    assert power.trace_count == 6


def test_functions_that_call_each_other():
    even = px.function(lambda x, n: x if n == 0 else odd(x, n - 1), static_argnames="n")
    odd = px.function(lambda x, n: -x if n == 0 else even(x, n - 1), static_argnames="n")
    assert (float(even(3.0, 4)), float(even(3.0, 3))) == (3.0, -3.0)


def test_recursion_without_an_end_is_pythons_error_and_leaves_no_trace_active():
    endless = px.function(lambda x: endless(x))
    with pytest.raises(RecursionError):
        endless(1.0)
    assert float(px.function(lambda x: x + 1)(1.0)) == 2.0


def test_a_nested_function_is_traced_once_for_each_kind():
    inner, inner_runs = counted(lambda x: x * 2)
    outer, outer_runs = counted(lambda x: inner(x) + inner(x) + inner(x[:2]).sum())
    for _ in range(2):
        assert outer(jnp.ones(4)).tolist() == [8.0] * 4
    assert (len(inner_runs), len(outer_runs)) == (2, 1)


# ---- concrete functions --------------------------------------------------------------------------


def test_a_concrete_function_is_traced_ahead_and_reads_variables_when_called():
    v = px.Variable(3.0)
    f, runs = counted(lambda x, training=False: v * x if training else x)
    concrete = f.get_concrete_function(jax.ShapeDtypeStruct((2,), jnp.float32), training=True)
    assert len(runs) == 1 and concrete.captured_variables == (v,)
    assert concrete(jnp.ones(2), True).tolist() == [3.0, 3.0]
    v.assign(4.0)
    assert concrete(np.ones(2, np.float32), training=True).tolist() == [4.0, 4.0]
    assert f(jnp.ones(2), True).tolist() == [4.0, 4.0]
    assert len(runs) == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((jnp.ones(3), True), r"argument 'x' of this concrete function is float32\[2\], got float32\[3\]"),
        ((jnp.ones(2, int), True), r"is float32\[2\], got int32\[2\]"),
        ((jnp.ones(2), False), "argument 'training' of this concrete function is True, got False"),
        (([jnp.ones(2)], True), "takes arguments of structure"),
        (("a", True), r"is float32\[2\], got 'a'"),
        ((), "missing a required argument"),
    ],
)
def test_a_concrete_function_refuses_other_arguments(args, words):
    f = px.function(lambda x, training: x)
    concrete = f.get_concrete_function(jnp.ones(2), True)
    with pytest.raises(ArgumentTypeError, match=words):
        concrete(*args)


def test_a_concrete_function_stays_in_its_context():
    concrete = px.function(lambda x: x).get_concrete_function(1.0)
    with px.OneDevice().scope(), pytest.raises(StrategyError, match="traced in the context cross-replica and is"):
        concrete(1.0)


def test_the_program_can_be_looked_at():
    v = px.Variable(jnp.ones((4, 4)))
    f, runs = counted(lambda x: x @ v)
    text = f.lower(jnp.ones((4, 4))).as_text()
    assert "dot_general" in text and "tensor<4x4xf32>" in text
    assert f.cost(jnp.ones((4, 4)))["flops"] >= 2 * 4**3 - 4**2
    assert len(runs) == 1


def test_what_a_tape_computes_is_part_of_the_program():
    v = px.Variable(jnp.ones((4, 4)))

    @px.function
    def f(x):
        with px.GradientTape() as tape:
            y = (jnp.exp(x @ v) + jnp.sin(x)).sum()
        return tape.gradient(y, v)

    text = f.lower(jnp.ones((4, 4))).as_text()
    assert text.count("func.func private") == text.count("call @") == 1, "the function itself"


# ---- debugging -----------------------------------------------------------------------------------


def test_functions_can_run_as_plain_python():
    v = px.Variable(1.0)
    f, runs = counted(lambda x, y=2.0: v.assign_add(x * y).value if x > 0 else None)
    px.run_functions_eagerly(True)
    assert [float(f(1.0)), float(f(1.0, y=3.0)), f(-1.0)] == [3.0, 6.0, None]
    assert len(runs) == 3 and f.trace_count == 0
    px.run_functions_eagerly(False)
    with pytest.raises(TracingError):
        f(1.0)
    with pytest.raises(ArgumentTypeError, match="takes True or False, got 'yes'"):
        px.run_functions_eagerly("yes")  # type: ignore[arg-type]


# ---- threads -------------------------------------------------------------------------------------


def in_threads(n, work):
    """Run work(i) in n threads that start together; results in order, errors raised."""
    barrier = threading.Barrier(n)
    results: list[Any] = [None] * n

    def run(i):
        barrier.wait()
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for r in results:
        if isinstance(r, BaseException):
            raise r
    return results


def test_a_first_call_raced_by_threads_is_traced_once():
    f, runs = counted(lambda x: x * 2)
    assert [float(r) for r in in_threads(4, lambda i: f(float(i)))] == [0.0, 2.0, 4.0, 6.0]
    assert len(runs) == 1


@pytest.mark.parametrize("n", [1, 2])
def test_concurrent_calls_lose_no_update(n):
    strategy = px.Mirrored(jax.devices()[:n])
    with strategy.scope():
        total = px.Variable(0.0, aggregation="mean")
        other = px.Variable(jnp.zeros(3))

    @px.function
    def step(x):
        strategy.run(lambda: total.assign_add(x))
        other.assign_add(jnp.ones(3))
        return other.value

    @px.function
    def other_step(x):
        other.assign_add(jnp.full(3, x))

    def work(i):
        for _ in range(20):
            (step if i % 2 else other_step)(1.0)
            other.value.sum().block_until_ready()  # what was read stays readable
            total.assign_add(1.0)

    in_threads(4, work)
    assert float(total) == 2 * 20 + 4 * 20
    assert other.numpy().tolist() == [80.0] * 3


def test_threads_trace_functions_that_call_each_other():
    f = px.function(lambda x, n: x + 1 if n == 0 else g(x, n - 1), static_argnames="n")
    g = px.function(lambda x, n: x - 1 if n == 0 else f(x, n - 1), static_argnames="n")
    assert [float(r) for r in in_threads(4, lambda i: (f if i % 2 else g)(1.0, i))] == [0.0, 0.0, 0.0, 0.0]


def test_a_body_that_waits_for_a_thread_that_traces_is_an_error_there(monkeypatch):
    monkeypatch.setattr("phalanx._turns._PATIENCE_SECONDS", 0.1)
    preprocess = px.function(lambda x: x + 1)

    @px.function
    def body(x):
        x = px.function(lambda x: x * 1)(x)
        with pytest.raises(
            TracingError, match="<lambda> cannot be traced: thread 'MainThread' has been tracing .*body"
        ):
            in_threads(1, lambda i: preprocess(1.0))
        return x

    assert float(body(1.0)) == 1.0
    assert in_threads(1, lambda i: float(preprocess(1.0))) == [2.0]


def test_each_thread_has_its_own_scope_and_trace():
    strategy = px.Mirrored(jax.devices()[:2])
    inside, outside = threading.Event(), threading.Event()

    def work(i):
        if i == 0:
            with strategy.scope():
                inside.set()
                assert outside.wait(20)
                return px.get_strategy().num_replicas
        assert inside.wait(20)
        outside.set()
        return px.get_strategy().num_replicas

    assert in_threads(2, work) == [2, 1]


@pytest.mark.parametrize("warm", [False, True])
def test_without_jit_functions_do_the_same(warm):
    v, x = px.Variable(np.zeros(3, np.float32)), jnp.arange(3.0) + warm
    assign, add = px.function(lambda x: v.assign(x).value), px.function(lambda: v.assign_add(jnp.ones(3)))
    if warm:
        assign(x), add()
    with jax.disable_jit():
        assert assign(x).tolist() == x.tolist()
        add()
        add()
        with px.GradientTape() as tape:
            y = (v * v).sum()
        assert tape.gradient(y, v).tolist() == (2 * x + 4).tolist()
    assert v.numpy().tolist() == (x + 2).tolist()


class Counter:
    def __init__(self):
        self.n = px.Variable(0.0)

    @px.function
    def count(self, x):
        return self.n.assign_add(x).value


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_method_is_copied_as_methods_of_python_are(copied):
    counter = Counter()
    count = copied(counter.count)
    assert float(count(2.0)) == float(count.__self__.n) == 2.0
    assert (count == counter.count) == (count.__self__ is counter) == (copied is copy.copy)


def test_types_stand_for_arrays_that_no_memory_would_hold():
    f, runs = counted(lambda x: x.sum())
    huge = jax.ShapeDtypeStruct((1 << 20, 1 << 22), jnp.float32)
    assert f.get_concrete_function(huge).name == f.name
    assert f.cost(huge)["flops"] > 1 << 41
    assert "1048576x4194304xf32" in f.lower(huge).as_text()
    assert f.trace_count == 1
