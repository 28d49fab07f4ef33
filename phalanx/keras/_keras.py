"""The only module that knows Keras's insides, and its versions.

Supported: Keras 3.12 and newer with the JAX backend. What is public stands first; the rest carries no
promise, and tests/test_keras_variables.py says so when a release moves it.
"""

from __future__ import annotations

import functools
import os
import re
import sys

if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")

try:
    import keras as keras
except ImportError as error:
    raise ImportError(
        "phalanx.keras needs Keras 3.12 or newer: pip install 'phalanx[keras]'.", name=error.name
    ) from error

from collections.abc import Callable
from typing import Any

from phalanx.errors import ArgumentError, StrategyError

OLDEST = (3, 12)

if keras.config.backend() != "jax":
    raise StrategyError(
        f"phalanx.keras needs Keras's JAX backend, and Keras runs on {keras.config.backend()!r}. Set the environment"
        " variable KERAS_BACKEND=jax before Keras is imported (os.environ['KERAS_BACKEND'] = 'jax' in the first line)."
    )
if tuple(int(part) for part in keras.__version__.split(".")[:2]) < OLDEST:
    raise ImportError(f"phalanx.keras needs Keras {OLDEST[0]}.{OLDEST[1]} or newer, found {keras.__version__}.")
if keras.config.is_nnx_enabled():
    raise StrategyError("phalanx.keras works with Keras's own variables; unset KERAS_NNX_ENABLED.")

from keras.src import backend as backend
from keras.src.backend.common.stateless_scope import get_stateless_scope as get_stateless_scope
from keras.src.backend.jax import core as core
from keras.src.backend.jax.trainer import JAXEpochIterator as JAXEpochIterator
from keras.src.losses import loss as loss
from keras.src.trainers import data_adapters as data_adapters
from keras.src.trainers.data_adapters.array_slicing import train_validation_split as train_validation_split
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter as GeneratorDataAdapter
from keras.src.trainers.epoch_iterator import EpochIterator as EpochIterator
from keras.src.utils.naming import to_snake_case as to_snake_case

Variable = keras.Variable


def stored(variable: Any) -> Any:
    """The array in a variable that Phalanx has not taken over; None when it is not initialised."""
    return variable._value


def empty(variable: Any) -> None:
    """Take the array out of a variable, for which one of ours stands from here on."""
    variable._value = None


def stored_dtype(variable: Any) -> str:
    """The dtype of the array, whatever it is cast to where it is used."""
    return str(variable._dtype)


def automatic_name(class_name: str) -> str:
    """What Keras calls an object of a class that was not given a name; a number follows from the second on."""
    return str(to_snake_case(class_name))


def initialise(variable: Any) -> Any:
    """The initial value of a variable whose initialisation was put off."""
    value = variable._convert_to_tensor(variable._initializer(variable.shape, dtype=variable._dtype))
    variable._initializer = None
    return value


def autocast(variable: Any, value: Any) -> Any:
    """`value` in the dtype that a layer with mixed precision computes in."""
    return variable._maybe_autocast(value)


def converted(variable: Any, value: Any) -> Any:
    """`value` as an array of the variable's dtype."""
    return variable._convert_to_tensor(value, dtype=variable._dtype)


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of an attribute, once."""
    original = owner.__dict__.get(name) or getattr(owner, name)
    if getattr(getattr(original, "fget", original), "_of_phalanx", False):
        return
    new = make(original)
    if not isinstance(original, property):
        functools.update_wrapper(new, original)
    getattr(new, "fget", new)._of_phalanx = True
    setattr(owner, name, new)


def build(model: Any, x: Any) -> None:
    """Create the variables of a model for the shapes of `x`."""
    with backend.StatelessScope():
        model(x)


def knows_data(x: Any, y: Any, sample_weight: Any) -> bool:
    """Whether Keras has an adapter for it, generators aside."""
    is_dataset = (data_adapters.is_tf_dataset, data_adapters.is_torch_dataloader, data_adapters.is_grain_dataset)
    return (
        isinstance(x, (DataAdapter, keras.utils.PyDataset))
        or any(is_one(x) for is_one in is_dataset)
        or data_adapters.array_data_adapter.can_convert_arrays((x, y, sample_weight))
    )


def settings(model: Any) -> Any:
    """What the last `compile` was given; each makes an object of its own."""
    return getattr(model, "_compile_config", None)


def parts_of_optimizer(model: Any) -> list[Any]:
    """A model's optimizer with what it takes its steps from: its variables, and its learning rate or schedule."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return []
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [optimizer, inner, inner._learning_rate, *optimizer.variables]


def averages(optimizer: Any) -> Callable[[], Any]:
    """Gives pairs of weights and their moving averages in an optimizer with ``use_ema=True``, once it is built."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not optimizer.use_ema:
        raise ArgumentError("fit: validate_with='ema' needs an optimizer that keeps averages, with use_ema=True.")
    return lambda: zip(optimizer._trainable_variables, optimizer._model_variables_moving_average)


@functools.cache
def _optimizer_names() -> frozenset[str]:
    classes = [c for c in vars(keras.optimizers).values() if isinstance(c, type)]
    return frozenset(keras.src.utils.naming.to_snake_case(c.__name__) for c in classes)


def is_of_an_optimizer(variable: Any) -> bool:
    """Whether a variable's path begins as those of an optimizer's own do."""
    return re.sub(r"_\d+$", "", variable.path.partition("/")[0]) in _optimizer_names()


def callbacks(given: Any) -> list[Any]:
    """The callbacks given to `fit`, as a list."""
    return given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given or [])


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """x, y and sample weights of a batch."""
    return keras.utils.unpack_x_y_sample_weight(data)  # type: ignore[no-any-return]
