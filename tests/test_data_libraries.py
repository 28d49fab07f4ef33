"""Datasets of other libraries as sources; each test needs its library (``pip install phalanx[data-tests]``)."""

from __future__ import annotations

import contextlib
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feeding import feeding_threads, replicas, rows_of, whole

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

# What the libraries warn of among themselves.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

X = np.arange(20, dtype=np.float32).reshape(10, 2)
Y = np.arange(10, dtype=np.int32)


def library(name: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name)


def columns(dataset, *names):
    """The rows of each column of an epoch, without the padding."""
    found = [jax.tree.map(lambda rows, mask: rows[mask > 0], *_alike(whole(element))) for element in dataset]
    return jax.tree.map(lambda *parts: np.concatenate(parts).tolist(), *found)


def _alike(element):
    *parts, mask = element
    tree = parts[0] if len(parts) == 1 else parts
    return tree, jax.tree.map(lambda _: mask, tree)


def feed(source, batch_size=None, n=2, **options):
    return replicas(n).distribute_dataset(source, batch_size, remainder="pad", mask=True, **options)


def resumes_exactly(make, taken=2):
    """Whether a new dataset goes on where another one stopped, in the middle of its second epoch."""
    run = make()
    rows_of_all = [[jax.tree.map(np.ndarray.tolist, whole(element)) for element in run] for _ in range(3)]
    stopped = make()
    list(stopped)
    iterator = iter(stopped)
    for _ in range(taken):
        next(iterator)
    resumed = make()
    resumed.load_state_dict(stopped.state_dict())
    rest = [[jax.tree.map(np.ndarray.tolist, whole(element)) for element in resumed] for _ in range(2)]
    return rest == [rows_of_all[1][taken:], rows_of_all[2]] and rest[0] != []


# ---- h5py ----------------------------------------------------------------------------------------


@pytest.fixture
def hdf5(tmp_path):
    h5py = library("h5py")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        yield file


def test_hdf5_datasets_are_rows(hdf5):
    source = {"x": hdf5.create_dataset("x", data=X), "y": hdf5.create_dataset("y", data=Y)}
    dataset = feed(source, 4)
    assert len(dataset) == 3
    assert columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}


def test_hdf5_datasets_are_shuffled_and_mix_with_arrays(hdf5):
    source = (hdf5.create_dataset("x", data=X), Y)
    x, y = columns(feed(source, 4, shuffle=True, seed=1))
    assert sorted(y) == Y.tolist() and y != Y.tolist()
    assert x == X[y].tolist()
    assert columns(feed((X, Y), 4, shuffle=True, seed=1)) == [x, y]


def test_hdf5_datasets_are_read_batch_by_batch(hdf5):
    huge = hdf5.create_dataset("huge", shape=(2**40, 4), chunks=(1024, 4), dtype="f4")  # 16 TiB, none of it written
    huge[:2] = [[1] * 4, [2] * 4]
    dataset = replicas(2).distribute_dataset(huge, 2)
    assert len(dataset) == 2**39
    assert rows_of([next(iter(dataset))]) == [[[1] * 4, [2] * 4]]


def test_hdf5_text_and_groups_are_refused(hdf5):
    with pytest.raises(ArgumentTypeError, match=r"\['text'\] is not numeric"):
        feed({"text": hdf5.create_dataset("text", data=["a", "b"])}, 2)
    with pytest.raises(ArgumentTypeError, match="distribute_dataset takes arrays"):
        feed({"group": hdf5}, 2)


# ---- pandas --------------------------------------------------------------------------------------


def test_pandas_frames_and_series_are_rows():
    pandas = library("pandas")
    frame = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1]}, index=range(100, 110))
    assert columns(feed(frame, 4)) == X.tolist()
    source = {"x": frame, "y": pandas.Series(Y, index=list("abcdefghij"))}
    assert columns(feed(source, 4)) == {"x": X.tolist(), "y": Y.tolist()}
    assert columns(feed([frame[:4], frame[4:]])) == X.tolist()


def test_a_pandas_column_that_is_not_numeric_is_named():
    pandas = library("pandas")
    frame = pandas.DataFrame({"a": [1, 2], "text": ["a", "b"]})
    for unfit in (frame, frame.assign(text=pandas.Categorical(["a", "b"]))):
        with pytest.raises(ArgumentTypeError, match="column 'text' of source is not numeric"):
            feed(unfit, 2)
    with pytest.raises(ArgumentTypeError, match=r"\['text'\] is not numeric"):
        feed({"text": frame["text"]}, 2)


# ---- PyTorch -------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return library("torch")


def test_a_torch_loader_gives_batches(torch):
    data = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    dataset = feed(torch.utils.data.DataLoader(data, batch_size=4))
    assert len(dataset) == 3
    assert columns(dataset) == columns(dataset) == [X.tolist(), Y.tolist()]


def test_a_torch_loader_of_dicts_without_batches_gives_rows(torch):
    rows = [{"x": torch.tensor(x), "y": torch.tensor(y)} for x, y in zip(X, Y)]
    dataset = feed(torch.utils.data.DataLoader(rows, batch_size=None), 4)
    assert columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}


def test_a_torch_loader_with_workers_stops_them_when_the_loop_is_left(torch):
    data = torch.utils.data.TensorDataset(torch.arange(1000.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context="spawn")
    for (x,) in replicas(2).distribute_dataset(loader):
        assert whole(x).tolist() == [0, 1, 2, 3]
        break
    assert feeding_threads() == []
    assert torch.multiprocessing.active_children() == []


def test_torch_datasets_and_tensors_are_rows(torch):
    tensors = torch.tensor(X), torch.tensor(Y)
    for source in (torch.utils.data.TensorDataset(*tensors), tensors):
        assert columns(feed(source, 4)) == [X.tolist(), Y.tolist()]


def test_a_torch_dataset_with_a_length_ends_there_and_is_read_by_index(torch):
    asked = []

    class Endless(torch.utils.data.Dataset):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            asked.append(i)
            return {"x": X[i % 10], "y": Y[i % 10]}

    dataset = feed(Endless(), 4)
    assert len(dataset) == 3
    assert columns(dataset) == columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}
    assert resumes_exactly(lambda: feed(Endless(), 2))
    next(iter(dataset))
    state = dataset.state_dict()
    resumed = feed(Endless(), 4)
    resumed.load_state_dict(state)
    asked.clear()
    next(iter(resumed))
    assert asked[0] == 4


def test_every_view_and_dtype_of_a_torch_tensor_is_fed(torch):
    z = torch.tensor(X[:, 0] + 1j * X[:, 1])
    for tensor in (z.conj(), z.conj().imag, z.real):
        assert rows_of(replicas(2).distribute_dataset(tensor, 10)) == [tensor.resolve_conj().resolve_neg().tolist()]
    (element,) = replicas(2).distribute_dataset(torch.tensor(X).to(torch.float8_e4m3fn), 10)
    assert element.dtype == jnp.float8_e4m3fn
    assert whole(element).astype(np.float32).tolist() == torch.tensor(X).to(torch.float8_e4m3fn).float().tolist()


@pytest.mark.parametrize("make", ["to_sparse", "meta", "nested"])
def test_tensors_without_plain_values_say_why(torch, make):
    tensor = {
        "to_sparse": lambda: torch.tensor(X).to_sparse(),
        "meta": lambda: torch.ones(4, device="meta"),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
    }[make]()
    with pytest.raises(ArgumentTypeError, match=r"\['x'\] of element 0 is no array, or none .*Tensor \(.+\)"):
        list(feed([{"x": tensor}]))


def test_torch_bfloat16_and_parameters_are_fed(torch):
    weights = torch.nn.Parameter(torch.tensor(X, dtype=torch.bfloat16))
    (element,) = replicas(2).distribute_dataset((weights, weights), 10)
    assert element[0].dtype == jnp.bfloat16
    assert whole(element)[1].astype(np.float32).tolist() == X.tolist()
    (element,) = replicas(2).distribute_dataset(lambda: [weights])
    assert whole(element).astype(np.float32).tolist() == X.tolist()


def test_a_torch_loader_is_resumed_by_counting(torch):
    data = torch.utils.data.TensorDataset(torch.tensor(X))
    assert resumes_exactly(lambda: feed(torch.utils.data.DataLoader(data, batch_size=2)))


def test_a_torch_loader_that_gives_batches_is_not_for_a_batch_size(torch):
    rows = torch.utils.data.TensorDataset(torch.tensor(X))
    sampler = torch.utils.data.BatchSampler(range(10), 4, drop_last=False)
    stream = type("Stream", (torch.utils.data.IterableDataset,), {"__iter__": lambda self: iter(X)})()
    Loader = torch.utils.data.DataLoader
    for loader in (Loader(rows, 4), Loader(rows), Loader(rows, batch_sampler=sampler), Loader(stream, 2)):
        with pytest.raises(
            ArgumentError, match=r"DataLoader gives batches, .* Leave batch_size out .*, or let it give"
        ):
            feed(loader, 4)
        with pytest.raises(ArgumentError, match="gives batches"):
            list(feed(lambda loader=loader: loader, 4))
    assert columns(feed(Loader(stream, batch_size=None), 4)) == X.tolist()


def test_a_torch_loader_shuffled_by_the_epoch_is_resumed_exactly(torch):
    rows = torch.utils.data.TensorDataset(torch.tensor(Y))

    def loader(epoch):
        order = torch.Generator().manual_seed(epoch)
        return torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True, generator=order)

    dataset = feed(loader)
    first, second = columns(dataset), columns(dataset)
    assert first != second and sorted(first) == sorted(second) == Y.tolist()
    assert resumes_exactly(lambda: feed(loader))


@pytest.mark.parametrize("kind", ["torch", "tensorflow", "h5py", "pandas"])
def test_arrays_of_other_libraries_are_no_arguments(kind, tmp_path):
    module = library(kind)
    with module.File(tmp_path / "x.h5", "w") if kind == "h5py" else contextlib.nullcontext() as file:
        array = {
            "torch": lambda: module.tensor(X),
            "tensorflow": lambda: module.constant(X),
            "h5py": lambda: file.create_dataset("x", data=X),
            "pandas": lambda: module.Series(Y),
        }[kind]()
        strategy = replicas(2)
        f, whatever = px.function(lambda x, **named: 1), lambda x: 1
        nested = px.function(lambda: strategy.run(whatever, (array,)))
        for call in (lambda: f(array), lambda: f(1, a=[array]), lambda: strategy.run(whatever, ((array,),)), nested):
            with pytest.raises(
                ArgumentTypeError, match=rf"argument.* is a \w+ of {kind}, .* pass np\.asarray\(tensor\)"
            ):
                call()
        assert float(px.function(lambda x: x.sum())(np.asarray(array))) == np.asarray(array).sum()


def test_a_torch_module_is_an_argument_like_other_objects(torch):
    module = torch.nn.Linear(1, 1)
    assert px.function(lambda module: jnp.ones(module.in_features))(module).shape == (1,)


# ---- grain ---------------------------------------------------------------------------------------


@pytest.fixture
def grain():
    return library("grain")


def grain_loader(grain, shuffle, operations=()):
    class Rows(grain.sources.RandomAccessDataSource):
        def __len__(self):
            return 10

        def __getitem__(self, i):
            return {"x": X[i], "y": Y[i]}

        def __repr__(self):  # part of the loader's state
            return "Rows()"

    sampler = grain.samplers.IndexSampler(10, shuffle=shuffle, seed=0, num_epochs=1)
    return grain.DataLoader(data_source=Rows(), sampler=sampler, operations=list(operations), worker_count=0)


def test_a_grain_loader_gives_batches_or_rows(grain):
    batched = grain_loader(grain, False, [grain.transforms.Batch(4)])
    for dataset in (feed(batched), feed(grain_loader(grain, False), 4)):
        assert columns(dataset) == columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}


def test_a_grain_loader_is_resumed_with_its_own_state(grain):
    make = lambda: feed(grain_loader(grain, True, [grain.transforms.Batch(2)]))  # noqa: E731
    assert resumes_exactly(make)
    assert resumes_exactly(lambda: feed(grain_loader(grain, True), 2))
    dataset = make()
    next(iter(dataset))
    assert b"last_seen_indices" in dataset.state_dict()["source"]


def test_grain_map_datasets_give_batches_or_rows(grain):
    rows = grain.MapDataset.range(10).map(lambda i: {"x": X[i], "y": Y[i]})
    for dataset in (feed(rows.batch(4)), feed(rows, 4)):
        assert len(dataset) == 3
        assert columns(dataset) == columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}


def test_grain_batches_are_not_for_a_batch_size(grain):
    rows = grain.MapDataset.range(12)
    batches = rows.batch(4), rows.batch(4).map(lambda x: x), rows.batch(4).to_iter_dataset(), rows.batch(4).repeat(2)
    for source in (*batches, rows.to_iter_dataset().batch(4), grain_loader(grain, False, [grain.transforms.Batch(4)])):
        with pytest.raises(ArgumentError, match="gives batches, and batch_size=4 would stack them"):
            feed(source, 4)
    assert columns(feed(rows.map(lambda x: x).shuffle(seed=1).to_iter_dataset(), 4)) != list(range(12))


def test_a_grain_dataset_that_repeats_for_ever_has_no_length(grain):
    dataset = feed(grain.MapDataset.range(10).repeat(), 4)
    with pytest.raises(TypeError, match="does not tell"):
        len(dataset)
    iterator = iter(dataset)
    assert [whole(next(iterator))[0].tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_grain_iter_datasets_are_resumed_with_their_own_state(grain):
    def make(batch_size=None):
        rows = grain.MapDataset.range(10).seed(3).shuffle().to_iter_dataset()
        return feed(rows if batch_size else rows.batch(2), batch_size)

    assert sorted(columns(make())) == list(range(10))
    assert resumes_exactly(make)
    assert resumes_exactly(lambda: make(2))
    asked = []
    counting = feed(grain.MapDataset.range(10).map(lambda i: asked.append(i) or X[i]).to_iter_dataset(
        grain.ReadOptions(num_threads=0)), 2)  # fmt: skip
    next(iter(counting))
    state = counting.state_dict()
    asked.clear()
    counting.load_state_dict(state)
    next(iter(counting))
    assert min(asked) == 2  # what was fed before is not read again


# ---- TensorFlow ----------------------------------------------------------------------------------


@pytest.fixture
def tf():
    return library("tensorflow")


def test_tf_data_gives_batches_or_rows(tf):
    rows = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y})
    for dataset in (feed(rows.batch(4)), feed(rows, 4)):
        assert len(dataset) == 3
        assert columns(dataset) == columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}


def test_tf_batches_are_not_for_a_batch_size(tf):
    rows = tf.data.Dataset.range(12)
    batches = rows.batch(4), rows.batch(4).map(lambda x: x).prefetch(1), rows.padded_batch(4).shuffle(2).repeat(2)
    for source in (*batches, rows.batch(2).rebatch(4), rows.batch(4, num_parallel_calls=2).take(2)):
        with pytest.raises(ArgumentError, match="gives batches, and batch_size=4 would stack them"):
            feed(source, 4)
    for source in (rows.batch(4).unbatch().prefetch(1), rows.shuffle(3, seed=1).map(lambda x: x).cache()):
        assert sorted(columns(feed(source, 4))) == list(range(12))


def test_tf_data_of_unknown_or_endless_length_has_none(tf):
    rows = tf.data.Dataset.range(10)
    for endless in (rows.repeat().batch(4), rows.filter(lambda i: i > 3).batch(4)):
        with pytest.raises(TypeError, match="does not tell"):
            len(feed(endless))


def test_tf_data_is_resumed_by_counting(tf):
    assert resumes_exactly(lambda: feed(tf.data.Dataset.range(10).batch(2)))


def test_tf_text_and_ragged_columns_are_named(tf):
    text = tf.data.Dataset.from_tensor_slices({"x": X, "text": ["a"] * 10}).batch(5)
    with pytest.raises(ArgumentTypeError, match=r"\['text'\] of element 0 is not numeric"):
        list(feed(text))
    ragged = tf.data.Dataset.from_tensor_slices({"r": tf.ragged.constant([[1.0], [2.0, 3.0]])}).batch(2)
    with pytest.raises(ArgumentTypeError, match=r"\['r'\] of element 0 is ragged: its rows differ in length"):
        list(feed(ragged))


def test_tf_tensors_are_rows(tf):
    assert columns(feed((tf.constant(X), tf.constant(Y)), 4)) == [X.tolist(), Y.tolist()]


# ---- Hugging Face --------------------------------------------------------------------------------


@pytest.fixture
def table():
    datasets = library("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})


def test_a_hugging_face_dataset_is_a_dict_of_rows(table):
    dataset = feed(table, 4)
    assert len(dataset) == 3
    assert columns(dataset) == {"x": X.tolist(), "y": Y.tolist()}


def test_a_hugging_face_dataset_is_shuffled_and_resumed(table):
    found = columns(feed(table, 4, shuffle=True, seed=1))
    assert found == columns(feed({"x": X, "y": Y}, 4, shuffle=True, seed=1))
    assert resumes_exactly(lambda: feed(table, 2, shuffle=True, seed=1))


def test_a_hugging_face_transform_says_what_the_rows_are(table):
    doubled = table.with_transform(lambda rows: {"twice": [[2 * a for a in x] for x in rows["x"]]})
    assert columns(feed(doubled, 4)) == {"twice": (2 * X).tolist()}


def test_a_hugging_face_text_column_is_refused_at_once(table):
    with pytest.raises(ArgumentTypeError, match="column 'text' is not numeric"):
        feed(table.add_column("text", ["a"] * 10), 4)
    assert columns(feed(table.add_column("text", ["a"] * 10).remove_columns("text"), 4))["y"] == Y.tolist()


def test_a_hugging_face_stream_gives_rows(table):
    stream = table.to_iterable_dataset().map(lambda row: {"x": row["x"], "twice": 2 * row["y"]}, remove_columns=["y"])
    dataset = feed(stream, 4)
    assert columns(dataset) == columns(dataset) == {"twice": (2 * Y).tolist(), "x": X.tolist()}
    assert resumes_exactly(lambda: feed(stream, 2))


def test_iterators_of_one_hugging_face_stream_do_not_disturb_each_other(table, monkeypatch):
    stream = table.to_iterable_dataset().map(lambda row: row)
    inside = []

    def epoch(_):  # is asked for while an iterator begins; another one goes through all rows meanwhile
        if not inside:
            inside.append(True)
            list(feed(stream, 4, prefetch=0))
            inside.clear()
        return 0

    monkeypatch.setattr(type(stream), "epoch", property(epoch))
    assert columns(feed(stream, 4, prefetch=0))["y"] == Y.tolist()


def test_a_hugging_face_dict_of_splits_says_which_there_are(table):
    datasets = library("datasets")
    splits = {"train": table, "test": table}
    streams = {name: split.to_iterable_dataset() for name, split in splits.items()}
    for source in (datasets.DatasetDict(splits), datasets.IterableDatasetDict(streams)):
        with pytest.raises(ArgumentTypeError, match=r"Choose a split: dataset\['train'\], or dataset\['test'\]"):
            feed(source, 4)


def test_a_hugging_face_ragged_column_is_named():
    table = library("datasets").Dataset.from_dict({"r": [[1], [2, 3]]})
    with pytest.raises(ArgumentTypeError, match="column 'r' is ragged: its rows differ in length"):
        list(feed(table, 2))


def test_a_hugging_face_dataset_needs_a_batch_size_and_rows(table):
    with pytest.raises(ArgumentError, match="batch_size"):
        feed(table)
    with pytest.raises(ArgumentError, match="the source is empty"):
        feed(table.select([]), 4)


# ---- Keras ---------------------------------------------------------------------------------------


def py_dataset(batches=3, told=None):
    keras = library("keras")

    class Batches(keras.utils.PyDataset):
        @property
        def num_batches(self):
            return batches

        def __getitem__(self, i):
            return X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4]

        def on_epoch_begin(self):
            (told if told is not None else []).append("begin")

        def on_epoch_end(self):
            (told if told is not None else []).append("end")

    return Batches()


def test_a_py_dataset_is_not_for_a_batch_size():
    with pytest.raises(ArgumentError, match="gives batches, and batch_size=4"):
        feed(py_dataset(), 4)


def test_a_py_dataset_gives_batches_and_is_told_of_epochs():
    told = []
    dataset = feed(py_dataset(told=told))
    assert len(dataset) == 3
    assert columns(dataset) == columns(dataset) == [X.tolist(), Y.tolist()]
    assert told == ["begin", "end"] * 2


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_py_dataset_is_told_of_the_end_of_a_pass_that_was_left(prefetch):
    told = []
    for _ in feed(py_dataset(told=told), prefetch=prefetch):
        break
    assert feeding_threads() == []
    assert told == ["begin", "end"]


def test_a_py_dataset_without_end_has_no_length():
    dataset = feed(py_dataset(batches=None))
    with pytest.raises(TypeError):
        len(dataset)
    assert whole(next(iter(dataset)))[1].tolist() == [0, 1, 2, 3]


def test_a_py_dataset_is_resumed_by_counting():
    assert resumes_exactly(lambda: feed(py_dataset()))
