"""Megatron's own training loop, `megatron.training.pretrain()`, of any version.

Megatron-Core's wheel carries `megatron.training` from 0.19 on; before, it comes with a clone of
Megatron-LM on the PYTHONPATH.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, ContractError
from . import compat

EXTRA_ARGUMENTS = "extra_args_provider"


def run_pretrain(
    datasets_provider: Callable[..., Any],
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    extra_args_provider: Callable[[Any], Any] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
    log: Callable[[int, dict[str, float]], None] | None = None,
    **options: Any,
) -> None:
    """Calls `megatron.training.pretrain`, whose signature differs between versions.

    Up to 0.17 it parses the command line itself; from 0.18 on it takes a container that is made
    from parsed arguments. 0.19 also changed the order. Here everything goes by name.

    Args:
        datasets_provider: of ([train, valid, test samples], vp_stage=None), returns three data
            sets.
        model_provider: of (pre_process, post_process, vp_stage, config, pg_collection).
        forward_step: of (data_iterator, model).
        extra_args_provider: adds arguments to Megatron's parser, and returns it.
        args_defaults: values for Megatron's arguments that have no default.
        log: called on the last rank after each iteration (from 1) with its metrics, every one of
            them: Megatron's console leaves out those below 0, and averages over iterations.
        **options: passed on.

    Raises:
        ContractError: `megatron.training` is missing.
        ConfigError: an option that this version's `pretrain` does not take.
    """
    training = _megatron_training()
    pretrain = training.training.pretrain
    call = {
        "train_valid_test_dataset_provider": datasets_provider,
        "model_provider": model_provider,
        "model_type": _model_type(),
        "forward_step_func": forward_step,
        **options,
    }
    parsing = {
        EXTRA_ARGUMENTS: extra_args_provider,
        "args_defaults": dict(args_defaults or {}),
    }
    names = inspect.signature(pretrain).parameters
    if EXTRA_ARGUMENTS in names:
        call |= parsing
    else:
        call["cfg_container"] = _container(training, parsing)
    unknown = [name for name in call if name not in names]
    if unknown:
        raise ConfigError(
            f"pretrain() of megatron-core {compat.megatron_version()} does not take "
            f"{', '.join(unknown)}; it takes {', '.join(names)}."
        )
    if log is not None:
        _add_log(training.training, log)
    pretrain(**call)


def build_gpt(
    args: Any,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    *,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Returns Megatron's `GPTModel` as its arguments describe it, dense or mixture of experts.

    Args:
        args: Megatron's.
        pre_process, post_process: whether this stage has the embedding and the output layer.
        vp_stage: number of the model chunk, None without a virtual pipeline.
        config: Megatron's; None: made of the arguments.
        pg_collection: Megatron's groups; None: its global ones.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args

    config = config or core_transformer_config_from_args(args)
    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=args.transformer_impl == "transformer_engine",
        normalization=args.normalization,
        vp_stage=vp_stage,
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        **({} if pg_collection is None else {"pg_collection": pg_collection}),
    )
    compat.mark_expert_parameters(model)
    return model


def megatron_arguments() -> Any:
    """Returns Megatron's parsed arguments (`get_args()`)."""
    from megatron.training import get_args

    return get_args()


def norm_epsilon(args: Any) -> float:
    """Returns `--norm-epsilon`, which Megatron stores under one of two names."""
    name = "layernorm_epsilon" if hasattr(args, "layernorm_epsilon") else "norm_epsilon"
    return getattr(args, name)


def _megatron_training() -> ModuleType:
    compat.bind_typing_override()
    try:
        import megatron.training
        import megatron.training.training
    except ImportError as error:
        raise ContractError(
            f"megatron.training does not import ({error}). It comes with megatron-core 0.19 and "
            "newer, or with a clone of Megatron-LM on the PYTHONPATH."
        ) from error
    compat.leave_out_missing_makefile()
    return megatron.training


def _model_type() -> Any:
    from megatron.core.enums import ModelType

    return ModelType.encoder_or_decoder


def _add_log(training: ModuleType, log: Callable[[int, dict[str, float]], None]) -> None:
    """Calls `log` beside Megatron's own `training_log`, which has no hook."""
    megatrons = training.training_log
    signature = inspect.signature(megatrons)

    @functools.wraps(megatrons)
    def training_log(*args: Any, **kwargs: Any) -> Any:
        if dist.get_rank() == dist.get_world_size() - 1:
            given = signature.bind(*args, **kwargs).arguments
            log(given["iteration"], _metrics(given))
        return megatrons(*args, **kwargs)

    training.training_log = training_log


def _metrics(given: Mapping[str, Any]) -> dict[str, float]:
    metrics = {name: float(value) for name, value in given["loss_dict"].items()}
    for name in ("grad_norm", "learning_rate"):
        if given.get(name) is not None:
            metrics[name] = float(given[name])
    metrics["step_skipped"] = float(given["skipped_iter"])
    return metrics


def _container(training: ModuleType, parsing: Mapping[str, Any]) -> Any:
    """Returns 0.18's and newer versions' container, without a model config: we give a provider."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    return pretrain_cfg_container_from_args(parse_and_validate_args(**parsing))
