"""TensorFlow's names: asking for one says what it is called here."""

from __future__ import annotations

from collections.abc import Iterable

from phalanx.errors import ArgumentTypeError

MODULE = {
    "AggregationMethod": 'a string: aggregation="sum"',
    "ConcreteFunction": "f.get_concrete_function(...)",
    "InputContext": "what strategy.distribute_datasets_from_function hands to its function",
    "MirroredStrategy": "px.Mirrored()",
    "MultiWorkerMirroredStrategy": "px.connect(), then px.Mirrored()",
    "OneDeviceStrategy": 'px.OneDevice("gpu:0")',
    "ReduceOp": 'a string: "sum" or "mean"',
    "TPUStrategy": "px.TPU()",
    "VariableAggregation": 'a string: px.Variable(..., aggregation="sum")',
    "VariableSynchronization": 'a string: px.Variable(..., synchronization="on_read")',
    "autodiff": "px.ForwardAccumulator",
    "constant": "jnp.asarray",
    "custom_gradient": "jax.custom_vjp",
    "has_strategy": "px.get_strategy() is strategy; outside every scope it is a default one, with one replica",
    "stop_gradient": "jax.lax.stop_gradient",
}
"""Names of ``tf``, ``tf.distribute`` and ``tf.autodiff``."""

STRATEGY = {
    "cluster_resolver": "what px.connect() returns, and px.cluster.describe()",
    "experimental_assign_to_logical_device": "nothing: a replica is one device",
    "experimental_distribute_dataset": "strategy.distribute_dataset(source, batch_size=...)",
    "experimental_distribute_datasets_from_function": "strategy.distribute_datasets_from_function(fn)",
    "experimental_distribute_values_from_function": "strategy.distribute_values_from_function(fn)",
    "experimental_local_results": "strategy.local_results(value)",
    "experimental_run_v2": "strategy.run(fn, args=...)",
    "extended": "strategy.update(variable, fn, args) and px.get_replica_context().merge_call",
    "num_replicas_in_sync": "strategy.num_replicas",
}
"""Names of ``tf.distribute.Strategy``."""


OPTIMIZER = {
    "apply": "optimizer.apply_gradients(zip(gradients, variables))",
    "iterations": "a count in optimizer.state, where optax keeps one: optimizer.state[0].count (optax.adam)",
    "learning_rate": (
        'optimizer.state.hyperparams["learning_rate"], of px.Optimizer(optax.inject_hyperparams(optax.adam)(1e-3))'
    ),
    "load_own_variables": "assigning to each of optimizer.variables, after optimizer.build(variables)",
    "minimize": "tape.gradient(loss, variables), then optimizer.apply_gradients(zip(gradients, variables))",
    "save_own_variables": "optimizer.variables, which pickle by their values",
}
"""Names of Keras optimizers."""


_COMPILED = (
    "every function is compiled by XLA (px.run_functions_eagerly(True) runs them as plain Python, for debugging)"
)
_NO_MEANING = "it has no meaning here"

FUNCTION = {
    "autograph": "Python code is not rewritten: write px.cond, px.while_loop and px.scan where it depends on arrays",
    "experimental_attributes": _NO_MEANING,
    "experimental_autograph_options": _NO_MEANING,
    "experimental_compile": _COMPILED,
    "experimental_follow_type_hints": _NO_MEANING,
    "experimental_implements": _NO_MEANING,
    "experimental_relax_shapes": "reduce_retracing=True lets numbers and arrays share a trace",
    "jit_compile": _COMPILED,
}
"""Parameters of ``tf.function`` that `px.function` does not have."""


def refuse_arguments(caller: str, given: Iterable[str], names: dict[str, str]) -> None:
    """Raise for the first of the keyword arguments, none of which the caller knows."""
    for name in given:
        if name in names:
            raise ArgumentTypeError(f"{caller} takes no {name}: {names[name]}. Leave the argument out.")
        raise ArgumentTypeError(f"{caller} got an unexpected keyword argument {name!r}.")


def no_such(owner: str, name: str, names: dict[str, str]) -> AttributeError:
    """The error for an attribute that does not exist."""
    here = names.get(name)
    hint = "" if here is None else f"; what TensorFlow calls {name} is here {here}"
    return AttributeError(f"{owner} has no attribute {name!r}{hint}", name=name)
