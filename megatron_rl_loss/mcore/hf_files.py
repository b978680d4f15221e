"""Hugging Face checkpoint folders: reads safetensors lazily, writes them in shards, atomically."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightsError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class SafetensorsFolder(Mapping[str, Tensor]):
    """The tensors of a checkpoint folder; each is read from disk when it is asked for.

    Reads `model.safetensors.index.json` and the files it names, or a single `model.safetensors`.

    Args:
        folder: the checkpoint's folder.
        single_file: name of the file where there is no index.

    Raises:
        WeightsError: no such files, a file the index names is missing, broken or lacks a tensor.
    """

    def __init__(self, folder: str | Path, *, single_file: str = SINGLE_FILE) -> None:
        self.folder = Path(folder)
        self._single_file = single_file
        self._handles: dict[str, Any] = {}
        index = self._read_index()
        files = sorted(set(index.values())) if index else [single_file]
        for file in files:
            handle = self._open(file)
            self._handles.update(dict.fromkeys(handle.keys(), handle))
        lost = sorted(set(index) - set(self._handles))
        if lost:
            raise WeightsError(
                f"{self.folder / INDEX_FILE} names tensors that its files lack: {listed(lost)}. "
                "Download the checkpoint again."
            )

    def __getitem__(self, name: str) -> Tensor:
        return self._handles[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def row(self, name: str, index: int) -> Tensor:
        """Returns `self[name][index]`; only that part is read."""
        return self._handles[name].get_slice(name)[index]

    def header(self, name: str) -> tuple[tuple[int, ...], Any]:
        """Returns a tensor's shape and dtype (or safetensors' name of an unusual one), unread."""
        tensor = self._handles[name].get_slice(name)
        dtype = tensor.get_dtype()
        return tuple(tensor.get_shape()), _SAFETENSORS_DTYPES.get(dtype, dtype)

    def _read_index(self) -> dict[str, str]:
        path = self.folder / INDEX_FILE
        if path.exists():
            return json.loads(path.read_text())["weight_map"]
        if (self.folder / self._single_file).exists():
            return {}
        raise WeightsError(
            f"{self.folder} has neither {self._single_file} nor {INDEX_FILE}; pass the folder of a "
            "Hugging Face checkpoint in safetensors format."
        )

    def _open(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(self.folder / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise WeightsError(
                f"{self.folder / file} cannot be read ({error}). Download the checkpoint again."
            ) from error


class CheckpointWriter:
    """Writes a checkpoint next to its final folder and moves it there when it is whole.

    A reader of the final folder sees the old state or the whole new one. What an interrupted
    writer leaves behind is a folder with a name that starts with a dot.

    Args:
        folder: the final folder.
        overwrite: replace what is there; otherwise it must not exist.

    Raises:
        WeightsError: the folder exists and `overwrite` is off.
    """

    def __init__(self, folder: str | Path, *, overwrite: bool = False) -> None:
        self.folder = Path(folder)
        if self.folder.exists() and not overwrite:
            raise WeightsError(
                f"{self.folder} exists already; choose another folder, or pass overwrite=True."
            )
        self.unfinished = self.folder.with_name(f".{self.folder.name}.unfinished")
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)

    def write_tensors(self, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int) -> None:
        """Writes a stream of tensors in files of at most `max_shard_bytes`, and their index.

        A single tensor larger than that gets a file of its own.
        """
        files: list[list[str]] = []
        num_bytes = 0
        for shard in _shards(tensors, max_shard_bytes):
            self._write_shard(shard, len(files))
            files.append(list(shard))
            num_bytes += sum(tensor.nbytes for tensor in shard.values())
        self._name_files(files, num_bytes)

    def write_file(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes one safetensors file into the checkpoint."""
        from safetensors.torch import save_file

        save_file(dict(tensors), self.unfinished / name, metadata={"format": "pt"})

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Writes one JSON file into the checkpoint."""
        (self.unfinished / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")

    def finish(self) -> None:
        """Moves the checkpoint to its final folder."""
        old = self.folder.with_name(f".{self.folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(old)
        self.unfinished.rename(self.folder)
        shutil.rmtree(old, ignore_errors=True)

    def discard(self) -> None:
        """Removes what was written so far."""
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def _write_shard(self, shard: dict[str, Tensor], number: int) -> None:
        from safetensors.torch import save_file

        save_file(shard, self.unfinished / f"{number}.part", metadata={"format": "pt"})

    def _name_files(self, files: list[list[str]], num_bytes: int) -> None:
        """Gives the parts their names, which hold the number of files, and writes the index."""
        if len(files) == 1:
            (self.unfinished / "0.part").rename(self.unfinished / SINGLE_FILE)
            return
        weight_map = {}
        for number, names in enumerate(files):
            file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
            (self.unfinished / f"{number}.part").rename(self.unfinished / file)
            weight_map.update({name: file for name in names})
        self.write_json(
            INDEX_FILE, {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        )


def config_json(hf_config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the content of `config.json` for weights of `dtype`.

    Args:
        hf_config: a `transformers` configuration object, or a dict. Where the model was loaded
            from is left out.
        dtype: of the tensors in the checkpoint.
    """
    if isinstance(hf_config, Mapping):
        config = dict(hf_config)
    else:
        config = json.loads(hf_config.to_json_string(use_diff=False))
    config.pop("_name_or_path", None)
    name = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[name] = str(dtype).removeprefix("torch.")
    return config


def _shards(
    tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.cpu()
        size += tensor.nbytes
    yield shard


def listed(names: list[str], limit: int = 20) -> str:
    """Returns the names in one line, the first few of many."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
