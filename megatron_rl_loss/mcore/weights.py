"""Moves weights between Hugging Face checkpoints and a Megatron model's ranks, tensor by tensor.

Loading checks the whole checkpoint against the whole model before it changes a single weight.
Both ways are exact: load and export give the same bits where the dtypes are the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from ..errors import WeightsError
from .hf_files import CheckpointWriter, SafetensorsFolder, config_json
from .model_spec import ModelSpec
from .weights_check import (
    model_problems,
    named_parameters,
    source_problems,
    tensor_parallel_of,
    unwrapped,
)
from .weights_gather import Owner, all_shards, device, find_owners, share
from .weights_map import OUTPUT_LAYER, Replicated, WeightRule, weight_rules
from .weights_moe import PerExpert


def load_hf_weights(
    chunks: Sequence[torch.nn.Module],
    source: Mapping[str, Tensor] | str | Path,
    spec: ModelSpec,
) -> None:
    """Copies a Hugging Face checkpoint into this rank's model chunks.

    Each rank reads the tensors its layers need, one parameter's at a time, and keeps its slice.
    Padding rows of the vocabulary become 0. Values are cast to the model's dtype. Load before
    the optimizer is built: it copies the weights into its fp32 master weights.

    Args:
        chunks: this rank's model, one entry per virtual pipeline stage; `Float16Module` and DDP
            wrappers are looked through.
        source: a checkpoint folder with safetensors, or a mapping from Hugging Face names to
            whole tensors, such as a `state_dict()`. A mapping may have a method
            `header(name) -> (shape, dtype)` to be checked without reading its tensors.
        spec: the checkpoint's architecture.

    Raises:
        WeightsError: tensors are missing, unexpected, of another shape or dtype, or the model is
            not of this architecture; the message names them all and no weight has changed.
    """
    if isinstance(source, (str, Path)):
        source = SafetensorsFolder(source)
    if spec.moe is not None:
        source = PerExpert(source, spec)
    models = unwrapped(chunks)
    rules = weight_rules(spec, models[0].vocab_size)
    problems = model_problems(models, spec, rules) + source_problems(source, spec, rules)
    if problems:
        raise WeightsError(
            "the checkpoint and the model do not match, nothing was loaded:\n  "
            + "\n  ".join(problems)
            + "\nCheck that model, spec and checkpoint are of the same configuration."
        )
    with torch.no_grad():
        for name, parameter in named_parameters(models):
            rule = rules[name]
            tensors = [source[hf_name] for hf_name in rule.hf_shapes]
            parameter.copy_(rule.layout.shard(tensors, *tensor_parallel_of(rule)))


def export_hf_weights(
    chunks: Sequence[torch.nn.Module], spec: ModelSpec, *, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole model as Hugging Face tensors, one after the other, on every rank.

    The order is that of the layers. Padding rows of the vocabulary are left out; tied embeddings
    come once, as `model.embed_tokens.weight`. Each tensor is new memory on the model's device.

    Args:
        chunks: this rank's model, as in `load_hf_weights`.
        spec: the model's architecture.
        dtype: to cast to; by default each parameter's own.

    Raises:
        WeightsError: the model is not of this architecture, or its weights may be out of date.

    Communicates: gathers each parameter over the tensor-parallel ranks and broadcasts it over the
    pipeline, an expert also over the expert-parallel ranks. Every rank of the model (with experts:
    of the world) must take the stream to its end, at the same time.
    """
    models = unwrapped(chunks)
    _check_up_to_date(chunks)
    rules = weight_rules(spec, models[0].vocab_size)
    problems = model_problems(models, spec, rules)
    if problems:
        raise WeightsError("the model is not of this spec:\n  " + "\n  ".join(problems))
    own = {name: parameter.detach() for name, parameter in named_parameters(models)}
    owners = find_owners({name: dtype or parameter.dtype for name, parameter in own.items()})
    for name, rule in rules.items():
        if name == OUTPUT_LAYER and spec.tied_embeddings:
            continue
        yield from _whole_tensors(rule, own.get(name), owners[name])


def save_hf_checkpoint(
    folder: str | Path,
    chunks: Sequence[torch.nn.Module],
    spec: ModelSpec,
    hf_config: Any,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Writes the model as a Hugging Face checkpoint that `from_pretrained` loads.

    Global rank 0 writes safetensors files, their index and `config.json` beside the final folder
    and renames it when all is there, so that nobody ever sees half a checkpoint.

    Args:
        folder: the checkpoint's folder.
        chunks, spec, dtype: as in `export_hf_weights`.
        hf_config: the Hugging Face configuration, an object or a dict.
        max_shard_bytes: largest size of one file.
        overwrite: replace an existing folder, which stays as it is until the new one is whole.

    Raises:
        WeightsError: the folder exists, or writing failed; on every rank.

    Communicates: as `export_hf_weights`, of a dense model within its first data-parallel copy;
    then all ranks wait for rank 0.
    """
    writer: CheckpointWriter | None = None
    with shared_failure(f"cannot start writing {folder}"):
        if dist.get_rank() == 0:
            writer = CheckpointWriter(folder, overwrite=overwrite)
    with shared_failure(f"writing {folder} failed"):
        first_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        # the experts of one copy may be on ranks of all data-parallel copies
        if first_copy or spec.moe is not None:
            stream = export_hf_weights(chunks, spec, dtype=dtype)
            _write(writer, stream, max_shard_bytes)
        if writer is not None:
            saved = dtype or next(chunks[0].parameters()).dtype
            writer.write_json("config.json", config_json(hf_config, saved))
            writer.finish()


def _write(
    writer: CheckpointWriter | None, stream: Iterator[tuple[str, Tensor]], max_shard_bytes: int
) -> None:
    """Writes the stream on the rank that has a writer, and takes it to its end on the others."""
    try:
        if writer is not None:
            writer.write_tensors(stream, max_shard_bytes)
    except Exception:
        if writer is not None:
            writer.discard()
        raise
    finally:
        # a full disk here must not leave the other ranks waiting in a collective
        for _ in stream:
            pass


@contextlib.contextmanager
def shared_failure(what: str) -> Iterator[None]:
    """Raises on every rank if rank 0's block failed."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    message = [None if failure is None else str(failure)]
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    if message[0] is not None:
        raise WeightsError(f"{what} on rank 0: {message[0]}")


def _check_up_to_date(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            raise WeightsError(
                "overlap_param_gather is on: the weights are only gathered in the next forward "
                "pass, so what is here may be a step old. Switch it off to export weights."
            )


def _whole_tensors(
    rule: WeightRule, parameter: Tensor | None, owner: Owner
) -> Iterator[tuple[str, Tensor]]:
    """Returns a parameter's Hugging Face tensors on every rank of the model."""
    if parameter is not None and owner.in_stage:
        tensors = rule.layout.merge(_all_shards(rule, parameter.to(owner.info)))
    else:
        tensors = [
            torch.empty(shape, dtype=owner.info, device=device())
            for shape in rule.hf_shapes.values()
        ]
    share(tensors, owner, is_expert=rule.expert is not None)
    return zip(rule.hf_shapes, tensors, strict=True)


def _all_shards(rule: WeightRule, shard: Tensor) -> list[Tensor]:
    if isinstance(rule.layout, Replicated):
        return [shard]
    return all_shards(shard, is_expert=rule.expert is not None)
