"""`fit`, `evaluate` and `predict` take batches from wherever they come, each as often as its source can give it."""

from __future__ import annotations

import dataclasses
import itertools
import threading

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError, ArgumentTypeError

import keras  # isort: skip
from keras import layers  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 3)).astype(np.float32)
Y = (X @ rng.normal(size=(3, 2))).astype(np.float32)
LABELS = (Y[:, :1] > 0).astype(np.float32)
BATCH = 8  # and a last batch of 6 rows, which four replicas cannot share
WEIGHTS_OF_CLASSES = {0: 0.3, 1: 2.0}


@pytest.fixture(params=[1, 4], ids=lambda n: f"replicas{n}")
def n(request):
    return request.param


def plain(outputs=2):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layers.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(outputs)])
    model.compile("sgd", "mse")
    return model


def replicated(n, outputs=2):
    model = plain(outputs)
    view = px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))
    view.compile("sgd", "mse")
    return view


def batches(*arrays):
    for first in range(0, len(X), BATCH):
        yield tuple(array[first : first + BATCH] for array in arrays)


def pairs():
    return batches(X, Y)


class OwnIterable:
    def __iter__(self):
        return pairs()


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return -(-len(X) // BATCH)

    def __getitem__(self, i):
        rows = slice(i * BATCH, (i + 1) * BATCH)
        return X[rows], Y[rows]


def torch_loader():
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    return data.DataLoader(data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=BATCH)


def tf_dataset():
    tf = pytest.importorskip("tensorflow")
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)


def grain_dataset():
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(zip(X, Y))).batch(BATCH)


def pandas_frame():
    return pytest.importorskip("pandas").DataFrame(X, columns=list("abc"))


RE_ITERABLE = {
    "function of a generator": lambda: pairs,
    "function of a list": lambda: lambda: list(pairs()),
    "function of arrays": lambda: lambda: (X, Y),
    "function of a PyDataset": lambda: lambda: Sequence(),
    "PyDataset": Sequence,
    "own iterable": OwnIterable,
    "torch": torch_loader,
    "tf.data": tf_dataset,
    "grain": grain_dataset,
}


@pytest.mark.parametrize("source", RE_ITERABLE)
def test_a_source_is_read_once_in_each_epoch(n, source):
    view, model = replicated(n), plain()
    options = {"batch_size": BATCH} if source == "function of arrays" else {}
    data = RE_ITERABLE[source]
    history = view.fit(data(), epochs=3, verbose=0, shuffle=False, validation_data=data(), **options).history
    expected = model.fit(X, Y, BATCH, epochs=3, verbose=0, shuffle=False, validation_data=(X, Y))
    for name, values in expected.history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    np.testing.assert_allclose(
        view.evaluate(data(), verbose=0, **options), model.evaluate(X, Y, BATCH, verbose=0), rtol=1e-5
    )


def test_a_function_may_return_a_distributed_dataset(n):
    view, model = replicated(n), plain()
    whole = X[:16], Y[:16]
    history = view.fit(lambda: view.strategy.distribute_dataset(whole, batch_size=BATCH), epochs=2, verbose=0).history
    expected = model.fit(*whole, BATCH, epochs=2, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def test_a_table_of_pandas_is_an_array(n):
    view, model = replicated(n), plain()
    history = view.fit(pandas_frame(), Y, batch_size=BATCH, verbose=0, shuffle=False).history
    expected = model.fit(X, Y, BATCH, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)


def test_predictions_of_a_source_are_one_for_each_row_in_order(n):
    view = replicated(n)
    np.testing.assert_allclose(
        view.predict(lambda: batches(X), verbose=0), view.predict(X, BATCH, verbose=0), rtol=1e-5
    )


# ---- where the data ends -------------------------------------------------------------------------


def test_an_iterator_that_has_ended_is_an_error_at_the_next_epoch(n):
    view, once = replicated(n), replicated(n)
    with pytest.raises(ArgumentError, match=r"gives its batches once.*fit\(batches, \.\.\.\)"):
        view.fit(pairs(), epochs=3, verbose=0)
    once.fit(pairs(), epochs=1, verbose=0)  # says nothing: the length was unknown, and that is harmless
    for got, expected in zip(view.get_weights(), once.get_weights()):
        np.testing.assert_array_equal(got, expected)


def test_validation_data_that_has_ended_is_an_error_at_the_next_validation(n):
    with pytest.raises(ArgumentError, match="gives its batches once"):
        replicated(n).fit(X, Y, BATCH, epochs=2, verbose=0, validation_data=pairs())


def test_too_few_batches_are_told_with_both_numbers(n):
    with pytest.warns(UserWarning, match="ended after 3 batches, and steps_per_epoch=5 asks"):
        replicated(n).fit(pairs(), steps_per_epoch=5, verbose=0)


def test_an_endless_iterator_goes_on_from_epoch_to_epoch(n):
    numbers = (np.full((BATCH, 3), number, np.float32) for number in itertools.count())
    view = replicated(n)
    mean = keras.metrics.MeanMetricWrapper(lambda y, predicted: y[:, 0], "mean")
    view.compile("sgd", "mse", metrics=[mean])
    history = view.fit(((x, x[:, :2]) for x in numbers), steps_per_epoch=2, epochs=3, verbose=0).history
    np.testing.assert_allclose(history["mean"], [0.5, 2.5, 4.5])  # batches 0 to 5, none of them twice


def test_passes_of_a_function_may_differ_in_length(n):
    lengths = iter([1, 3, 2])
    seen = []

    def data():
        for batch in itertools.islice(pairs(), next(lengths)):
            seen[-1] += 1
            yield batch

    def counted():
        seen.append(0)
        return data()

    replicated(n).fit(counted, epochs=3, verbose=0)
    assert seen == [1, 3, 2]


def test_datasets_that_a_function_makes_hear_of_epochs_and_leave_no_workers(n):
    made = []

    class Workers(Sequence):
        ends = 0

        def __init__(self):
            super().__init__(workers=2)
            made.append(self)

        def on_epoch_end(self):
            self.ends += 1

    threads = threading.active_count()
    replicated(n).fit(Workers, epochs=3, verbose=0)
    assert len(made) == 3 and all(data.ends for data in made)
    assert threading.active_count() <= threads + 1  # what JAX keeps


def test_targets_beside_what_holds_them_are_refused(n):
    for source in (pairs, pairs(), OwnIterable()):
        with pytest.raises(ArgumentError, match="y was given beside a .*, whose elements hold it"):
            replicated(n).fit(source, Y, verbose=0)


@pytest.mark.parametrize("source", [[[1.0, 2.0]], "data.csv", 3, {"a": "b"}])
def test_what_holds_no_batches_is_refused(n, source):
    with pytest.raises(ArgumentTypeError, match="Keras models take arrays"):
        replicated(n).fit(source, verbose=0)


def test_a_dataset_of_hugging_face_is_refused_with_the_way_to_give_its_batches(n):
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    with pytest.raises(ArgumentTypeError, match="Give a function of batches"):
        replicated(n).fit(table, verbose=0)
    view, model = replicated(n), plain()
    rows = table.with_format("numpy")
    view.fit(lambda: ((b["x"], b["y"]) for b in rows.iter(batch_size=BATCH)), epochs=2, verbose=0)
    model.fit(X, Y, BATCH, epochs=2, verbose=0, shuffle=False)
    for got, expected in zip(view.get_weights(), model.get_weights()):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_source_without_batches_is_refused(n):
    for source in (iter(()), lambda: iter(())):
        with pytest.raises((ArgumentError, ValueError), match="at least one batch"):
            replicated(n).fit(source, verbose=0)


# ---- weights of classes --------------------------------------------------------------------------


WITH_LABELS = {
    "arrays": lambda: (X, LABELS),
    "generator": lambda: (batches(X, LABELS),),
    "function": lambda: (lambda: batches(X, LABELS),),
    "numbers of classes": lambda: ((batch for batch in batches(X, LABELS[:, 0].astype(np.int32))),),
}


@pytest.mark.parametrize("source", WITH_LABELS)
def test_weights_of_classes_are_those_of_their_rows(n, source):
    view, model = replicated(n, 1), plain(1)
    options = {"batch_size": BATCH} if source == "arrays" else {}
    history = view.fit(
        *WITH_LABELS[source](), class_weight=WEIGHTS_OF_CLASSES, verbose=0, shuffle=False, **options
    ).history
    of_rows = np.where(LABELS[:, 0] == 1, *reversed(WEIGHTS_OF_CLASSES.values())).astype(np.float32)
    expected = model.fit(X, LABELS, BATCH, sample_weight=of_rows, verbose=0, shuffle=False).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-5)
    for got, wanted in zip(view.get_weights(), model.get_weights()):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_classes_without_a_weight_count_as_they_are(n):
    view, model = replicated(n, 1), plain(1)
    unknown = np.where(LABELS > 0, 7, -1).astype(np.int32)
    view.fit(X, unknown, BATCH, class_weight={1: 5.0}, verbose=0, shuffle=False)
    model.fit(X, unknown, BATCH, verbose=0, shuffle=False)
    for got, wanted in zip(view.get_weights(), model.get_weights()):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_weights_that_are_nought_in_a_replica_s_rows_give_no_nan():
    view = replicated(4, 1)
    labels = np.repeat([[0.0], [1.0]], 4, axis=0).astype(np.float32)
    view.fit(((x, labels) for x in [X[:8]]), class_weight={0: 0.0, 1: 1.0}, verbose=0)
    assert all(np.isfinite(weight).all() for weight in view.get_weights())


def test_weights_of_classes_for_several_targets_are_refused(n):
    with pytest.raises(ArgumentError, match="class_weight is for one array of targets, got dict"):
        replicated(n).fit(((x, {"a": y}) for x, y in pairs()), class_weight={0: 1.0}, verbose=0)


# ---- text ----------------------------------------------------------------------------------------


def words():
    return {"text": np.array(["a", "b"] * 4), "x": X[:8]}


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("as_arrays", [True, False])
def test_text_is_refused_by_the_name_of_its_column(n, is_built, as_arrays):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, batch):
            return self.dense(batch["x"])

    model = Model()
    if is_built:
        model({"x": X})
    view = px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))
    view.compile("sgd", "mse")
    data = (words(), Y[:8]) if as_arrays else ((pair for pair in [(words(), Y[:8])]),)
    with pytest.raises(ArgumentTypeError, match=r"'text'.* is not numeric .*Turn it into numbers"):
        view.fit(*data, verbose=0)


# ---- what comes out ------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Result:
    logits: jax.Array
    aux: jax.Array | None


def test_predictions_keep_holes_and_classes_over_several_batches(n):
    class Structured(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return {"result": Result(self.dense(x), None), "aux": None, "pair": (x, [None, 2 * x])}

    heard = []
    model = Structured()
    view = px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))
    listen = keras.callbacks.LambdaCallback()
    listen.on_predict_batch_end = lambda batch, logs: heard.append(logs["result"])  # Keras takes dicts apart
    found = view.predict(X[:10], batch_size=4, verbose=0, callbacks=[listen])
    assert isinstance(found["result"], Result) and found["result"].aux is None and found["aux"] is None
    np.testing.assert_allclose(found["result"].logits, model.dense(X[:10]), rtol=1e-5)
    np.testing.assert_array_equal(found["pair"][0], X[:10])
    assert found["pair"][1][0] is None
    np.testing.assert_array_equal(found["pair"][1][1], 2 * X[:10])
    assert [result.logits.shape for result in heard] == [(4, 3), (4, 3), (2, 3)]
    np.testing.assert_allclose(view.predict_on_batch(X[:5])["result"].logits, model.dense(X[:5]), rtol=1e-5)
