"""Checkpoint folders are read lazily, and never seen half written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megatron_rl_loss.errors import WeightsError
from megatron_rl_loss.mcore.hf_files import CheckpointWriter, SafetensorsFolder, config_json

safetensors_torch = pytest.importorskip("safetensors.torch")

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4).bfloat16(),
    "c": torch.arange(100.0),
    "d": torch.ones(1),
}


def write(folder: Path, max_shard_bytes: int = 10**9) -> Path:
    writer = CheckpointWriter(folder)
    writer.write_tensors(TENSORS.items(), max_shard_bytes)
    writer.finish()
    return folder


@pytest.mark.parametrize(("max_shard_bytes", "num_files"), [(10**9, 1), (40, 3), (1, 4)])
def test_written_tensors_are_read_back_with_the_same_bits(tmp_path, max_shard_bytes, num_files):
    folder = write(tmp_path / "x", max_shard_bytes)
    assert len(list(folder.glob("*.safetensors"))) == num_files
    reader = SafetensorsFolder(folder)
    assert set(reader) == set(TENSORS) and len(reader) == 4
    for name, tensor in TENSORS.items():
        assert torch.equal(reader[name], tensor) and reader[name].dtype == tensor.dtype
        assert reader.header(name) == (tuple(tensor.shape), tensor.dtype)


def test_files_hold_at_most_the_asked_bytes_unless_one_tensor_is_larger(tmp_path):
    folder = write(tmp_path / "x", 40)
    for file in folder.glob("*.safetensors"):
        tensors = safetensors_torch.load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 40


def test_unfinished_checkpoint_is_not_in_the_final_folder(tmp_path):
    writer = CheckpointWriter(tmp_path / "x")
    writer.write_tensors(TENSORS.items(), 40)
    assert not (tmp_path / "x").exists()
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_overwriting_keeps_the_old_checkpoint_until_the_new_one_is_whole(tmp_path):
    folder = write(tmp_path / "x")
    with pytest.raises(WeightsError, match="exists already"):
        CheckpointWriter(folder)
    writer = CheckpointWriter(folder, overwrite=True)
    writer.write_tensors([("new", torch.ones(2))], 10**9)
    assert set(SafetensorsFolder(folder)) == set(TENSORS)
    writer.finish()
    assert set(SafetensorsFolder(folder)) == {"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        SafetensorsFolder(tmp_path)


def test_truncated_or_missing_file_is_named(tmp_path):
    folder = write(tmp_path / "x", 40)
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(WeightsError, match=file.name):
        SafetensorsFolder(folder)
    file.unlink()
    with pytest.raises(WeightsError, match=file.name):
        SafetensorsFolder(folder)


def test_index_that_names_a_tensor_its_files_lack_is_refused(tmp_path):
    folder = write(tmp_path / "x", 40)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = index["weight_map"]["a"]
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="ghost"):
        SafetensorsFolder(folder)


def test_config_json_states_the_dtype_and_not_where_the_model_came_from():
    config = {"model_type": "llama", "_name_or_path": "/some/where", "dtype": "float32"}
    assert config_json(config, torch.bfloat16) == {"model_type": "llama", "dtype": "bfloat16"}
    old = config_json({"torch_dtype": "float32"}, torch.float16)
    assert old == {"torch_dtype": "float16"}
