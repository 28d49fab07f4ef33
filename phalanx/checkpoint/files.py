"""One checkpoint on disk: arrays kept by Orbax, the rest as JSON, and a list of all files with their checksums.

A folder is filled under another name and gets its own when everything in it has reached the disk, so that one
that has its name is complete, whenever the program or the machine stops. It is written by one process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np

from phalanx.errors import CheckpointError

logger = logging.getLogger("phalanx")

FORMAT = 1
_ARRAYS, _CONTENTS, _CHECKSUMS = "arrays", "contents.json", "checksums.json"


def load_orbax() -> Any:
    """Orbax, which is needed for checkpoints alone.

    Raises:
        ImportError: when it is not installed.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "Checkpoints are kept with Orbax: pip install 'phalanx[checkpoint]'.", name=error.name
        ) from error
    return orbax.checkpoint


def _checkpointer() -> Any:
    """Orbax's, for this process alone: it waits for no other."""
    orbax = load_orbax()
    me = jax.process_index()
    alone = orbax.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"phalanx{me}"
    )
    handler = orbax.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return orbax.Checkpointer(handler, multiprocessing_options=alone)


# ---- writing -------------------------------------------------------------------------------------


def temporary(folder: Path) -> Path:
    """Where a checkpoint is until it is complete."""
    return folder.with_name(f".{folder.name}.incomplete")


def remove_incomplete(directory: Path) -> None:
    """Remove what is left of checkpoints whose writing was broken off."""
    for left in directory.glob(".*.incomplete"):
        shutil.rmtree(left, ignore_errors=True)


def write(folder: Path, contents: dict[str, Any], arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Write a checkpoint, all of it or nothing."""
    unfinished = temporary(folder)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        # Orbax has no arrays without elements; their shapes are in the contents.
        filled = {name: array for name, array in arrays.items() if array.size}
        if filled:
            _checkpointer().save(unfinished / _ARRAYS, args=load_orbax().args.PyTreeSave(filled))
        _write_json(unfinished / _CONTENTS, contents)
        body = {"format": FORMAT, "files": {name: _fingerprint(unfinished / name) for name in _files(unfinished)}}
        _write_json(unfinished / _CHECKSUMS, {"body": body, "sha256": _digest_of(body)})
        for path in [*unfinished.rglob("*"), unfinished]:
            _flush(path)
        os.rename(unfinished, folder)
        _flush(folder.parent)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_json(path: Path, content: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, allow_nan=False, indent=1)


def _flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Remove a checkpoint; broken off, it leaves no half of one under its name."""
    unfinished = temporary(folder)
    os.rename(folder, unfinished)
    shutil.rmtree(unfinished, ignore_errors=True)


# ---- reading -------------------------------------------------------------------------------------


def read(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Contents and arrays of a checkpoint, whose files are all as they were written.

    Raises:
        CheckpointError: naming a file that is missing, cut off or altered.
    """
    verify(folder)
    contents = _read_json(folder / _CONTENTS)
    specs: dict[str, Any] = contents["arrays"]
    arrays = {name: np.zeros(shape, _dtype(dtype)) for name, (dtype, shape) in specs.items() if 0 in shape}
    names = [name for name in specs if name not in arrays]
    if names:
        orbax = load_orbax()
        as_numpy = {name: orbax.RestoreArgs(restore_type=np.ndarray) for name in names}
        try:
            found = _checkpointer().restore(folder / _ARRAYS, args=orbax.args.PyTreeRestore(restore_args=as_numpy))
        except Exception as error:
            raise CheckpointError(f"The arrays of checkpoint {folder} cannot be read: {error}") from error
        arrays |= {name: np.asarray(array) for name, array in found.items()}
    return contents, arrays


def _dtype(name: str) -> Any:
    return jax.numpy.dtype(name)


def verify(folder: Path) -> None:
    """Check that every file is as it was written.

    Raises:
        CheckpointError: naming one that is not.
    """
    table = folder / _CHECKSUMS
    if not table.is_file():
        raise CheckpointError(f"{folder} is no checkpoint of Phalanx's, or damaged: {table} is missing.")
    said = _read_json(table)
    body = said.get("body") if isinstance(said, dict) else None
    if body is None or said.get("sha256") != _digest_of(body):
        raise _damaged(table, "it is not as it was written")
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"Checkpoint {folder} is of format {body['format']}, and this version of Phalanx reads format {FORMAT}. Read it"
            " with the version that wrote it."
        )
    for name, (size, digest) in body["files"].items():
        path = folder / name
        if not path.is_file():
            raise _damaged(path, "it is missing")
        found = path.stat().st_size
        if found != size:
            raise _damaged(path, f"it has {found} bytes instead of {size}")
        if _fingerprint(path)[1] != digest:
            raise _damaged(path, "its bytes are not those that were written")


def _damaged(path: Path, how: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint file {path} is damaged: {how}. Nothing was restored. Use an older checkpoint, with"
        " manager.restore(checkpoint, step), or remove this one's folder."
    )


def _files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> list[Any]:
    """Size and checksum of a file."""
    with open(path, "rb") as file:
        return [os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def _digest_of(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise _damaged(path, f"it is not as it was written ({error})") from error
