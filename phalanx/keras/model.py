"""Models that train on a strategy: `Model` to subclass, `replicate` for those that exist."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from phalanx import state
from phalanx._checks import check_flag
from phalanx.distribute.in_effect import get_strategy
from phalanx.distribute.mirrored import Mirrored
from phalanx.distribute.strategy import Strategy
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.keras.once import write_once
from phalanx.keras.steps import Steps
from phalanx.keras.training import Loops, StatefulSteps


class Model(Loops, StatefulSteps, keras.Model):  # type: ignore[misc]
    """A `keras.Model` whose ``train_step(self, data)`` is written with variables and a tape, as in TensorFlow 2.

    It trains on the strategy in whose scope it is made (or on one device). ``train_step``, ``test_step`` and
    ``predict_step`` are run by each replica on its rows; losses are means over rows, and gradients are averaged
    by the optimizer.

    Example:
        >>> import keras
        >>> class Double(px.keras.Model):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.dense = keras.layers.Dense(1)
        ...     def call(self, x):
        ...         return self.dense(x)
        ...     def train_step(self, data):
        ...         x, y = data
        ...         with px.GradientTape() as tape:
        ...             loss = ((self(x) - y) ** 2).mean()
        ...         grads = tape.gradient(loss, self.trainable_variables)
        ...         self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
        ...         return {"loss": loss}
        >>> model = Double()
        >>> model.compile(optimizer="sgd")
        >>> history = model.fit(jnp.ones((8, 2)), jnp.ones((8, 1)), verbose=0)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is Model:  # of inputs and outputs: Keras would make this class, and all its subclasses, functional
            return replicate(keras.Model(*args, **kwargs), get_strategy())
        model = super().__new__(cls, *args, **kwargs)
        model.__dict__["__phalanx_steps__"] = Steps(get_strategy())
        return model

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if args or {"inputs", "outputs"} & kwargs.keys():
            raise ArgumentError(
                f"{type(self).__name__}: a px.keras.Model is written with call(). For inputs and outputs make a"
                " keras.Model(inputs, outputs), and px.keras.replicate it."
            )
        super().__init__(**kwargs)

    @property
    def _steps(self) -> Steps:  # type: ignore[override]
        return self.__dict__["__phalanx_steps__"]  # type: ignore[no-any-return]


def replicate(model: Any, strategy: Strategy | None = None, synchronize_batch_norm: bool = False) -> Any:
    """A Keras model that trains on a strategy, and shares everything with the original.

    The two are views of one model: weights, optimizer, compiled settings and history are the same objects. Only
    where the steps of ``fit``, ``evaluate``, ``predict`` and their like run differs.

    Args:
        model: Sequential, functional or subclassed; built or not, compiled before or after. Steps that its class
            defines, ``train_step(self, data)`` and its like, are run by each replica as in `Model`.
        strategy: default: the one in effect, or a `Mirrored` on all devices.
        synchronize_batch_norm: batch normalisation takes the mean and variance of all replicas' rows, as one device
            would (default: each replica those of its own rows; the moving statistics are means over the replicas).
            Layers made with ``synchronized=True`` do it everywhere.

    Raises:
        ArgumentTypeError: for something that is no Keras model, or one with a stateless ``train_step`` for JAX.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> replicated = px.keras.replicate(model, px.Mirrored())
        >>> replicated.compile(optimizer="sgd", loss="mse")
        >>> history = replicated.fit(jnp.ones((8, 2)), jnp.ones((8, 1)), verbose=0)
        >>> model.predict(jnp.ones((2, 2)), verbose=0).shape
        (2, 1)
    """
    if not isinstance(model, keras.Model):
        raise ArgumentTypeError(f"replicate takes a keras.Model, got {type(model).__name__}.")
    original = type(model)
    check_flag(synchronize_batch_norm, "replicate: synchronize_batch_norm")
    if strategy is not None and not isinstance(strategy, Strategy):
        raise ArgumentTypeError(f"replicate: strategy must be a strategy such as px.Mirrored(), got {strategy!r:.60}.")
    steps = Steps(strategy or state.context().strategy or _on_all_devices(), synchronize_batch_norm)
    # What is written to files, copied and pickled is the original.
    body: dict[str, Any] = {name: _of(model, name) for name in ("to_json", "__reduce__")}
    body["save"] = lambda self, filepath, *args, **kwargs: write_once(
        steps.strategy, model.save, filepath, *args, **kwargs
    )
    body |= {"__module__": original.__module__, "__qualname__": original.__qualname__}
    body["_steps"] = property(lambda self: steps)
    if not issubclass(original, Loops):
        _check_steps(original)
    view: Any = object.__new__(_with_loops(original, body))
    object.__setattr__(view, "__dict__", model.__dict__)  # not as Keras does it, which would track a copy
    return view


@functools.cache
def _on_all_devices() -> Strategy:
    return Mirrored()


def _of(model: Any, name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(model, name)(*args, **kwargs)

    return functools.wraps(getattr(model, name))(method)


def _with_loops(original: type, body: dict[str, Any]) -> type:
    """A subclass whose loops and steps stand between what users define and what Keras does.

    So a user's ``fit`` or ``train_step`` is called as in Keras, and its ``super()`` is ours.
    """
    if issubclass(original, Loops):
        return type(original.__name__, (original,), body)
    ours = [Loops, StatefulSteps]

    class InOrder(type(original)):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            view, *others = (c for c in super().mro() if c not in ours)
            of_keras = [c.__module__.partition(".")[0] == "keras" for c in others].index(True)
            return [view, *others[:of_keras], *ours, *others[of_keras:]]

    return InOrder(original.__name__, (original, *ours), body)


def _check_steps(original: type) -> None:
    """Steps that a user's class defines itself are written with variables and a tape."""
    for name in ("train_step", "test_step", "predict_step"):
        step = getattr(original, name)
        if step is not getattr(keras.Model, name) and "state" in inspect.signature(step).parameters:
            raise ArgumentTypeError(
                f"{original.__name__}.{name} is written for JAX, with the state as an argument and a result. replicate"
                f" takes {name}(self, data), which uses variables and a px.GradientTape."
            )
