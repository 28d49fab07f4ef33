"""Variables as values and as Python objects: creation, reading, updates, operators, copies, names."""

from __future__ import annotations

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import tree_leaves

import phalanx as px
from phalanx.errors import (
    AggregationRequiredError,
    ArgumentError,
    ArgumentTypeError,
    AssignmentError,
    AssignmentTypeError,
    FrozenVariableError,
    StrategyError,
    VariableCreationError,
    VariableWriteError,
)

DTYPES = ["float32", "float16", "bfloat16", "int8", "int32", "uint8", "bool", "complex64"]


@pytest.fixture
def two():
    return px.Mirrored(jax.devices()[:2])


# ---- creation ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("initial", "dtype"),
    [
        (1.0, "float32"),
        (1, "int32"),
        (True, "bool"),
        (1j, "complex64"),
        ([1, 2.5], "float32"),
        ([[1], [2]], "int32"),
        (np.float32(1), "float32"),
        (np.arange(3, dtype=np.int8), "int8"),
        (jnp.ones(2, jnp.bfloat16), "bfloat16"),
        (lambda: [1.0, 2.0], "float32"),
    ],
    ids=lambda x: getattr(x, "__name__", None) or repr(x)[:20],
)
def test_the_dtype_is_that_of_the_initial_value(initial, dtype):
    v = px.Variable(initial)
    assert v.dtype == v.value.dtype == dtype
    assert not v.value.weak_type, "arithmetic with a variable must not change its dtype"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_can_be_asked_for(dtype):
    v = px.Variable(jnp.ones(2), dtype=dtype)
    assert v.dtype == v.value.dtype == jnp.dtype(dtype)
    assert v.numpy().astype(complex).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("initial", [jnp.zeros(3), np.zeros(3, np.float32)], ids=["jax", "numpy"])
def test_the_initial_value_stays_the_callers(initial):
    v = px.Variable(initial)
    for _ in range(2):
        px.function(lambda: v.assign_add(jnp.ones(3)))()
    assert np.asarray(initial).tolist() == [0.0] * 3


def test_a_numpy_array_that_changes_later_does_not_change_the_variable():
    source = np.zeros(3, np.float32)
    v = px.Variable(source)
    w = px.Variable(jnp.ones(3)).assign(source)
    source[:] = 7.0
    assert v.numpy().tolist() == w.numpy().tolist() == [0.0] * 3


def test_a_callable_initial_value_is_called_once_and_outside_traces():
    calls = []

    def initial():
        calls.append(float(jnp.ones(())))  # needs a concrete value
        return jnp.zeros(2)

    holder = []

    @px.function
    def build():
        if not holder:
            holder.append(px.Variable(initial))
        return holder[0].value

    assert build().tolist() == [0.0, 0.0]
    assert calls == [1.0]


def test_another_variable_can_be_the_initial_value(two):
    with two.scope():
        v = px.Variable(jnp.ones(2))
        ema = px.Variable(v, trainable=False)
    for _ in range(3):
        two.run(px.function(lambda: v.assign_add(jnp.ones(2))))
    assert (v.numpy().tolist(), ema.numpy().tolist()) == ([4.0, 4.0], [1.0, 1.0])


def test_only_mirrored_variables_are_trainable_unless_told():
    assert px.Variable(0.0).trainable
    assert not px.Variable(0.0, synchronization="on_read").trainable
    assert px.Variable(0.0, synchronization="on_read", trainable=True).trainable
    assert not px.Variable(0.0, trainable=False).trainable


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"aggregation": "avg"},
            ArgumentError,
            "aggregation must be one of 'none', 'sum', 'mean', 'only_first_replica', got 'avg'",
        ),
        ({"aggregation": None}, ArgumentError, "aggregation must be one of"),
        ({"synchronization": "always"}, ArgumentError, "synchronization must be one of 'auto', 'on_write', 'on_read'"),
        ({"trainable": 1}, ArgumentTypeError, "trainable must be True, False or None, got 1"),
        ({"name": 3}, ArgumentTypeError, "name must be a string, got 3"),
        ({"constraint": 0.5}, ArgumentTypeError, "constraint must be a function"),
        ({"dtype": "floatx"}, ArgumentTypeError, "'floatx' is not a dtype"),
        (
            {"dtype": "int32", "aggregation": "mean"},
            ArgumentError,
            "aggregation='mean' cannot merge values of dtype int32",
        ),
        ({"aggregation": ["sum"]}, ArgumentError, "aggregation must be one of"),
    ],
)
def test_a_wrong_option_is_named(options, error, words):
    with pytest.raises(error, match=words):
        px.Variable(1, **options)


@pytest.mark.parametrize("initial", ["abc", None, object(), [[1], [1, 2]], {"a": 1}, np.array(["a"]), np.array([None])])
def test_an_initial_value_that_is_no_array_is_refused(initial):
    with pytest.raises((ArgumentError, ArgumentTypeError), match="Variable 'w': initial_value"):
        px.Variable(initial, name="w")


@pytest.mark.parametrize(("initial", "dtype"), [(1.5, "int32"), (1j, "float32"), ([1.0], "bool")])
def test_an_initial_number_is_not_cut_down(initial, dtype):
    with pytest.raises(AssignmentTypeError, match=r"\.astype"):
        px.Variable(initial, dtype=dtype)


def test_a_value_of_a_jax_transformation_cannot_be_initial():
    with pytest.raises(VariableCreationError, match="as a function without arguments"):
        jax.grad(lambda x: px.Variable(x).value)(1.0)


# ---- reading -------------------------------------------------------------------------------------


def test_every_way_of_reading_gives_the_value():
    v = px.Variable([1.0, 2.0])
    for value in (v.value, v.read_value(), jnp.asarray(v), v[:]):
        assert isinstance(value, jax.Array)
        assert value.tolist() == [1.0, 2.0]
    for value in (v.numpy(), np.asarray(v), np.array(v), np.array(v, np.float64)):
        assert isinstance(value, np.ndarray)
        assert value.tolist() == [1.0, 2.0]


def test_a_snapshot_stays_what_it_was():
    v = px.Variable(jnp.zeros(4))
    step = px.function(lambda: v.assign_add(jnp.ones(4)).value)
    snapshots = []
    for _ in range(4):
        snapshots += [v.value, jnp.asarray(v), step(), v.components[0].value, v.numpy()]
    assert [float(s[0]) for s in snapshots] == [0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4]


def test_jax_functions_take_variables(two):
    with two.scope():
        v = px.Variable([1.0, 4.0])
    assert jnp.sqrt(v).tolist() == [1.0, 2.0]
    assert jnp.concatenate([v, v]).shape == (4,)
    assert jax.jit(lambda x: x * 2)(v).tolist() == [2.0, 8.0]
    assert jax.grad(lambda x: (x * x).sum())(v.value).tolist() == [2.0, 8.0]
    assert jax.vmap(lambda x: x + 1)(v).tolist() == [2.0, 5.0]
    assert jax.lax.add(v, v).tolist() == [2.0, 8.0]
    assert jax.device_get(v.value).tolist() == [1.0, 4.0]


def test_reading_is_fine_under_transformations_that_compute_at_once():
    v = px.Variable(3.0)
    assert float(jax.grad(lambda x: x * v.value)(2.0)) == 3.0
    assert jax.vmap(lambda x: x * v)(jnp.arange(3.0)).tolist() == [0.0, 3.0, 6.0]


def test_a_raw_jit_would_freeze_the_value():
    v = px.Variable(3.0, name="w")
    for transformation in (jax.jit, jax.make_jaxpr, jax.checkpoint, lambda f: lambda: jax.eval_shape(f)):
        with pytest.raises(FrozenVariableError, match=r"Variable 'w' is read.*px\.function instead of jax\.jit"):
            transformation(lambda: v * 2.0)()
    with pytest.raises(FrozenVariableError, match=r"px\.scan"):
        jax.lax.scan(lambda c, x: (c + v, x), 0.0, jnp.arange(2.0))


# ---- updates -------------------------------------------------------------------------------------


def test_assigning_returns_the_variable():
    v = px.Variable(1.0)
    assert v.assign(2.0) is v
    assert v.assign_add(1.0) is v
    assert v.assign_sub(0.5) is v
    assert float(v.assign(1.0).assign_add(2.0)) == 3.0


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 2), ("float32", True), ("float32", np.int64(2)), ("float32", np.float64(2.0)), ("bfloat16", 2.0),
     ("complex64", 2.0), ("int32", 2), ("int32", np.int64(2)), ("uint8", 2), ("float32", [[2.0]])],
)  # fmt: skip
def test_numbers_and_numpy_arrays_take_the_dtype_of_the_variable(dtype, value):
    v = px.Variable(jnp.zeros(np.shape(value)), dtype=dtype)
    v.assign(value)
    assert v.dtype == v.value.dtype == jnp.dtype(dtype)
    assert np.all(v.numpy().astype(complex) == np.asarray(value))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 1j), ("int32", 1.5), ("int32", 2.0), ("bool", 1), ("float32", jnp.int32(1)), ("int32", jnp.float32(1)),
     ("float32", jnp.bfloat16(1)), ("int32", np.float64(1))],
)  # fmt: skip
def test_a_value_of_another_kind_is_refused(dtype, value):
    v = px.Variable(jnp.zeros((), dtype), name="w")
    with pytest.raises(AssignmentTypeError, match=f"Variable 'w' has dtype {dtype}, got a value of dtype"):
        v.assign(value)
    assert v.numpy() == 0


def test_a_value_of_another_shape_is_refused():
    v = px.Variable(jnp.zeros((2, 3)), name="w")
    for value in (0.0, jnp.zeros(3), jnp.zeros((3, 2)), jnp.zeros((2, 3, 1)), np.zeros((0, 3)), []):
        for update in (v.assign, v.assign_add, v.assign_sub):
            with pytest.raises(AssignmentError, match=r"'w' has shape \(2, 3\), got a value of shape"):
                update(value)
    assert not v.numpy().any()


def test_a_bool_variable_is_assigned_only():
    v = px.Variable(True)
    assert not v.assign(False)
    with pytest.raises(AssignmentError, match="cannot add to a variable of dtype bool"):
        v.assign_add(True)


@pytest.mark.parametrize(
    ("transformation", "words"),
    [
        (lambda f: jax.grad(f)(1.0), "JVP|Linearize"),
        (lambda f: jax.vmap(f)(jnp.ones(2)), "Batch"),
        (lambda f: jax.jit(f)(1.0), "jit"),
        (lambda f: jax.lax.scan(lambda c, x: (f(x), x), 0.0, jnp.ones(2)), "scan"),
    ],
    ids=["grad", "vmap", "jit", "scan"],
)
def test_transformations_cannot_carry_an_update_out(transformation, words):
    v = px.Variable(0.0, name="w")

    def fn(x):
        v.assign(1.0)
        return x

    with pytest.raises(VariableWriteError, match=f"Variable 'w' is assigned inside a JAX transformation .*({words})"):
        transformation(fn)
    assert float(v) == 0.0


@pytest.mark.parametrize(
    ("method", "argument", "expected"),
    [("add", 10.0, [1, 12, 3]), ("subtract", 10.0, [1, -8, 3]), ("set", 9, [1, 9, 3]), ("multiply", 3.0, [1, 6, 3]),
     ("divide", 2.0, [1, 1, 3]), ("min", 0.0, [1, 0, 3]), ("max", 7.0, [1, 7, 3])],
)  # fmt: skip
def test_indexed_updates_change_the_variable(method, argument, expected):
    v = px.Variable([1.0, 2.0, 3.0])
    assert getattr(v.at[1], method)(argument) is v
    assert v.numpy().tolist() == expected


def test_repeated_indices_add_up():
    v = px.Variable(jnp.zeros(3))
    v.at[jnp.array([0, 0, 2])].add([1.0, 2.0, 3.0])
    v.at[1:].subtract(1.0)
    assert v.numpy().tolist() == [3.0, -1.0, 2.0]


def test_indexed_updates_of_replicas_are_merged(two):
    with two.scope():
        v = px.Variable(jnp.zeros(3), aggregation="sum")
        own = px.Variable(jnp.zeros(3), synchronization="on_read", aggregation="sum")
    two.run(lambda: (v.at[px.get_replica_context().replica_id].add(5.0), own.at[0].set(1.0)) and ())
    assert v.numpy().tolist() == [5.0, 5.0, 0.0]
    assert own.numpy().tolist() == [2.0, 0.0, 0.0]


def test_indexed_updates_check_kind_and_shape():
    v = px.Variable(jnp.zeros(3, jnp.int32), name="w")
    with pytest.raises(AssignmentTypeError, match="'w' has dtype int32"):
        v.at[0].set(1.5)
    for index, value in [(0, jnp.arange(2)), (slice(0, 2), jnp.arange(3)), ("a", 1), ((0, 0), 1), (1.5, 1)]:
        for method in ("set", "add", "max"):
            with pytest.raises(AssignmentError, match=rf"Variable 'w' has shape \(3,\), and at\[.*\]\.{method}"):
                getattr(v.at[index], method)(value)
    assert not v.numpy().any()


def test_a_constraint_belongs_to_optimizers_and_not_to_assign():
    v = px.Variable(1.0, constraint=lambda x: jnp.clip(x, 0.0, 1.0))
    assert float(v.assign(5.0)) == 5.0


# ---- as an array ---------------------------------------------------------------------------------

BINARY = [
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, divmod,
]  # fmt: skip
BITWISE = [operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift]
UNARY = [operator.neg, operator.pos, abs, round]


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
def test_binary_operators_work_as_those_of_arrays(op):
    a, b = jnp.array([1.0, 5.0]), jnp.array([2.0, 3.0])
    v, w = px.Variable(a), px.Variable(b)
    expected = jax.tree.map(np.asarray, op(a, b))
    for left, right in [(v, w), (v, b), (a, w), (np.asarray(a), w), (v, np.asarray(b)), (v.components[0], w)]:
        if isinstance(left, px.Component) and op in (operator.eq, operator.ne):
            continue  # components are compared by identity
        np.testing.assert_array_equal(op(left, right), expected)
    scalar = jax.tree.map(np.asarray, op(2.0, b))
    np.testing.assert_array_equal(op(2.0, w), scalar)


@pytest.mark.parametrize("op", BITWISE, ids=lambda op: op.__name__)
def test_bitwise_operators_work_as_those_of_arrays(op):
    a, b = jnp.array([6, 5]), jnp.array([3, 1])
    np.testing.assert_array_equal(op(px.Variable(a), px.Variable(b)), op(a, b))
    np.testing.assert_array_equal(op(a, px.Variable(b)), op(a, b))


@pytest.mark.parametrize("op", UNARY, ids=lambda op: op.__name__)
def test_unary_operators_work_as_those_of_arrays(op):
    a = jnp.array([-1.6, 2.4])
    np.testing.assert_array_equal(op(px.Variable(a)), op(a))


def test_matrix_products_and_inversion():
    a = jnp.arange(4.0).reshape(2, 2)
    v = px.Variable(a)
    for product in (v @ v, a @ v, v @ a, np.asarray(a) @ v):
        np.testing.assert_array_equal(product, a @ a)
    np.testing.assert_array_equal(~px.Variable([True, False]), [False, True])


def test_augmented_assignment_makes_a_new_value_as_it_does_for_arrays():
    v = w = px.Variable(1.0)
    w += 1.0
    assert isinstance(w, jax.Array)
    assert (float(v), float(w)) == (1.0, 2.0)


def test_python_numbers_and_sequences():
    scalar, vector = px.Variable(3), px.Variable([1.0, 2.0])
    assert (int(scalar), float(scalar), complex(scalar), [10, 20, 30, 40][scalar]) == (3, 3.0, 3 + 0j, 40)
    assert list(range(scalar)) == [0, 1, 2]
    assert [float(x) for x in vector] == [1.0, 2.0]
    assert len(vector) == 2
    assert f"{px.Variable(1.5):.2f}" == "1.50"
    assert 2.0 in vector
    with pytest.raises(TypeError):
        len(scalar)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(vector)
    with pytest.raises(TypeError):
        iter(scalar)


def test_methods_and_attributes_of_arrays():
    v = px.Variable([[1.0, 2.0], [3.0, 4.0]])
    assert (v.shape, v.ndim, v.size, v.T.tolist()) == ((2, 2), 2, 4, [[1.0, 3.0], [2.0, 4.0]])
    assert float(v.sum()) == 10.0
    assert v.reshape(-1).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert v.astype(jnp.int32).dtype == jnp.int32
    assert v[0, 1] == 2.0
    with pytest.raises(AttributeError, match="'Variable' object has no attribute 'nonsense'"):
        _ = v.nonsense
    assert not hasattr(v, "_private")
    with pytest.raises(TypeError, match="item assignment"):
        v[0] = 1.0


def test_values_of_methods_follow_the_variable():
    v = px.Variable([1.0, 2.0])
    total = px.function(lambda: v.sum() + v.T.max())
    assert float(total()) == 5.0
    v.assign([10.0, 20.0])
    assert float(total()) == 50.0


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 1)])
def test_scalars_and_empty_variables(two, shape):
    with two.scope():
        v = px.Variable(jnp.zeros(shape), aggregation="sum")
        own = px.Variable(jnp.zeros(shape), aggregation="mean", synchronization="on_read")

    def fn():
        v.assign_add(jnp.ones(shape))
        own.assign_add(jnp.ones(shape))
        return v.value, own.value

    shared, parts = two.run(fn)
    assert (v.shape, shared.shape, parts.shape, own.value.shape) == (shape,) * 4
    assert np.all(v.numpy() == 2.0)
    assert np.all(own.numpy() == 1.0)
    assert (len(v), v.size) == (shape[0], int(np.prod(shape))) if shape else v.ndim == 0


def test_random_keys_live_in_variables(two):
    with two.scope():
        key = px.Variable(jax.random.key(0), name="key", trainable=False)
        own = px.Variable(jax.random.split(jax.random.key(1), 2), synchronization="on_read", trainable=False)

    @px.function
    def draw():
        def fn():
            fresh, used = jax.random.split(key.value)
            key.assign(fresh)
            return jax.random.uniform(jax.random.fold_in(used, px.get_replica_context().replica_id))

        return two.run(fn)

    first, second = draw(), draw()
    values = [float(x) for x in (*first.values, *second.values)]
    assert len(set(values)) == 4, "each replica and each step draws anew"
    expected = jax.random.split(jax.random.key(0))[0]
    assert jax.random.key_data(key.value).tolist() == jax.random.key_data(jax.random.split(expected)[0]).tolist()
    assert own.components[1].value.shape == (2,)
    assert "key" in repr(key)
    assert jax.random.key_data(copy.deepcopy(key).value).tolist() == jax.random.key_data(key.value).tolist()


def test_bfloat16_variables_accumulate_in_their_dtype(two):
    with two.scope():
        v = px.Variable(jnp.ones(2), dtype="bfloat16", aggregation="mean")
    two.run(lambda: v.assign_add(jnp.full(2, 0.5, jnp.bfloat16)))
    assert v.value.dtype == jnp.bfloat16
    assert v.numpy().astype(float).tolist() == [1.5, 1.5]
    assert pickle.loads(pickle.dumps(v)).dtype == jnp.bfloat16


# ---- as a Python object --------------------------------------------------------------------------


def test_identity_hash_and_elementwise_equality():
    v, w = px.Variable([1.0, 2.0]), px.Variable([1.0, 3.0])
    assert (v == w).tolist() == [True, False]
    assert (v != w).tolist() == [False, True]
    assert len({v, w, v}) == 2
    assert {v: "a", w: "b"}[w] == "b"
    assert [x is w for x in (v, w)] == [False, True]


def test_a_variable_is_one_leaf_of_a_pytree():
    v = px.Variable(1.0)
    assert [leaf is v for leaf in tree_leaves({"a": [v, 2]})] == [True, False]
    assert jax.tree.map(lambda x: x.shape, {"w": v}) == {"w": ()}


def test_the_repr_shows_name_shape_dtype_placement_and_a_short_value(two):
    assert repr(px.Variable(1.5, name="w")) == "Variable(name='w', shape=(), dtype=float32, value=1.5)"
    with two.scope():
        w = px.Variable(jnp.arange(1000.0), name="w")
        own = px.Variable(1, name="own", synchronization="on_read")
    assert repr(w) == "Variable(name='w', shape=(1000,), dtype=float32, mirrored x2, value=[ 0. 1. ... 998. 999.])"
    assert repr(own) == "Variable(name='own', shape=(), dtype=int32, per replica x2, value=[1 1])"
    assert repr(w.components[1]).startswith("Component('w', replica 1, value=")
    assert str(own) == f"{own}" == repr(own)


def test_a_repr_can_be_had_while_tracing_and_records_nothing(two):
    with two.scope():
        v = px.Variable(2.0, name="w")
    texts = []

    @px.function
    def step():
        two.run(lambda: texts.append(repr(v)))

    with px.GradientTape() as tape:
        texts.append(repr(v))
    step()
    assert texts == [repr(v)] * 2
    assert tape.watched_variables() == ()
    assert step.get_concrete_function().captured_variables == ()


def test_copies_are_independent():
    v = px.Variable([1.0, 2.0], name="w", trainable=False, aggregation="sum")
    model = {"layers": [v, v], "other": px.Variable(0.0)}
    copied = copy.deepcopy(model)
    assert copied["layers"][0] is copied["layers"][1], "shared variables stay shared"
    assert copied["layers"][0] is not v
    v.assign([5.0, 6.0])
    twin = copied["layers"][0]
    assert (twin.numpy().tolist(), twin.name, twin.trainable, twin.aggregation) == ([1.0, 2.0], "w", False, "sum")
    shallow = copy.copy(v)
    shallow.assign_add([1.0, 1.0])
    assert v.numpy().tolist() == [5.0, 6.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pickles_carry_the_value_and_not_the_devices(two, dtype):
    with two.scope():
        v = px.Variable(jnp.ones((2, 1)), name="w", dtype=dtype, aggregation="only_first_replica")
    restored = pickle.loads(pickle.dumps({"v": v}))["v"]
    assert (restored.strategy, restored.dtype, restored.shape, restored.name) == (None, v.dtype, (2, 1), "w")
    np.testing.assert_array_equal(restored.numpy(), v.numpy())
    with two.scope():
        inside = pickle.loads(pickle.dumps(v))
    assert inside.strategy is two
    two.run(lambda: inside.assign(v.value))


def test_per_replica_pickles_merge_and_spread_anew(two):
    four = px.Mirrored(jax.devices()[:4])
    table = {}
    for aggregation in ("sum", "mean", "only_first_replica"):
        with two.scope():
            table[aggregation] = px.Variable(0.0, synchronization="on_read", aggregation=aggregation)
    two.run(lambda: [v.assign(2.0 + px.get_replica_context().replica_id) for v in table.values()])
    before = {a: float(v) for a, v in table.items()}
    for scope in (two.scope, four.scope, None):
        if scope is None:
            restored = pickle.loads(pickle.dumps(table))
        else:
            with scope():
                restored = pickle.loads(pickle.dumps(table))
        assert {a: float(v) for a, v in restored.items()} == before
    with two.scope():
        same = copy.deepcopy(table)
    assert [float(c) for c in same["sum"].components] == [2.0, 3.0]


def test_components_know_their_container(two):
    with two.scope():
        v = px.Variable([1.0, 2.0], name="w")
    first, second = v.components
    assert first.container is second.container is v
    assert (second.replica_id, second.shape, second.dtype) == (1, (2,), jnp.float32)
    assert second.value.devices() == {jax.devices()[1]}
    assert first == v.components[0]
    assert first != second
    assert len({*v.components, *v.components}) == 2
    assert (first + 1.0).tolist() == [2.0, 3.0]
    assert jnp.sum(second) == 3.0
    assert np.asarray(second).tolist() == [1.0, 2.0]


def test_a_variable_dies_with_its_last_reference(two):
    import gc
    import weakref

    with two.scope():
        v = px.Variable(jnp.zeros(3))
    two.run(lambda: v.assign_add(jnp.ones(3)))  # noqa: F821
    ref = weakref.ref(v)
    del v
    two._eager_runs._functions.clear()  # a program in the cache may keep what it closes over
    gc.collect()
    assert ref() is None
    assert two.variables == []


def test_foreign_values_are_refused_by_name(two):
    other = px.Mirrored(jax.devices()[2:4])
    with two.scope():
        v = px.Variable(1.0, name="mine")
        own = px.Variable(1.0, name="own", synchronization="on_read", aggregation="sum")
    with pytest.raises(
        StrategyError, match=r"Variable 'mine' belongs to Mirrored\(cpu:0-1\) and is read under Mirrored\(cpu:2-3\)"
    ):
        other.run(lambda: v.value)
    with pytest.raises(StrategyError, match=r"Variable 'mine' belongs to Mirrored\(cpu:0-1\) and is assigned under"):
        other.run(lambda: v.assign(2.0))
    with other.scope():
        assert float(v) == 1.0, "one value for all can be read anywhere"
        with pytest.raises(StrategyError, match="'mine' belongs to"):
            v.assign(2.0)
        with pytest.raises(StrategyError, match="'own' belongs to"):
            _ = own.value
    assert float(v) == 1.0


def test_reading_components_that_do_not_merge_says_what_to_do(two):
    with two.scope():
        own = px.Variable(1.0, name="own", synchronization="on_read")
    for read in (lambda: own.value, lambda: own + 1.0, lambda: np.asarray(own), lambda: jnp.sum(own)):
        with pytest.raises(AggregationRequiredError, match=r"'own' has 2 components.*v\.components"):
            read()
