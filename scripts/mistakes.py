"""The mistakes that `plant_mistakes.py` plants: where, what, and the tests that must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mistake(NamedTuple):
    name: str
    file: str
    right: str
    wrong: str
    tests: str


SAME = "tests/mcore/test_same_gradient.py"
CUT = SAME + "::test_gradient_and_metrics_equal_the_reference_for_any_cut"
WEIGHTS = "tests/unit/test_token_weights.py"

CORE = [
    Mistake("factor without M", "mcore/scaling.py", "return num_microbatches * dp_size", "return dp_size", CUT),
    Mistake("factor without D", "mcore/scaling.py", "return num_microbatches * dp_size", "return num_microbatches", CUT),
    Mistake("factor twice", "mcore/forward_step.py", "return loss_sum * factor, metrics", "return loss_sum * factor * factor, metrics", CUT),
    Mistake("M frozen", "mcore/micro_batches.py", "return int(given() if callable(given) else given)", "return 3", "tests/unit/test_scaling_and_guard.py"),
    Mistake("local token count", "parallel/counts.py", "        dist.all_reduce(sums, group=dp_group)", "        pass", "tests/dist/test_counts.py"),
    Mistake("local groups", "parallel/counts.py", "everywhere = gather_rows(rows, dp_group)", "everywhere = gather_rows(rows, None)", "tests/dist/test_counts.py"),
    Mistake("local micro-batch mean", "ops/reduction.py", "return ones / max(1, counts.num_tokens)", "return ones / max(1, int(loss_mask.sum()) // 2)", WEIGHTS),
    Mistake("sequence mean over tokens", "ops/reduction.py", "return ones / (num_sequences * _column(loss_mask.sum(dim=1)))", "return ones / max(1, counts.num_tokens)", WEIGHTS),
    Mistake("padding counted", "ops/reduction.py", "torch.where(loss_mask, scale, 0.0)", "scale.expand_as(loss_mask)", WEIGHTS),
    Mistake("mask after the loss", "ops/reduction.py", "(torch.where(weights != 0, at_least_fp32(token_loss), 0.0) * weights)", "(token_loss * weights)", WEIGHTS),
    Mistake("inputs not cleaned", "losses/objective.py", "torch.where(mask, at_least_fp32(value), 0.0)", "at_least_fp32(value)", "tests/unit/test_objective.py"),
    Mistake("weights at masked positions count", "losses/objective.py", "torch.where(loss_mask, loss_weights, 0.0)", "loss_weights", "tests/unit/test_objective.py"),
    Mistake("labels not shifted", "parallel/token_batch.py", "torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], dim=1)", "tokens", "tests/unit/test_token_batch.py"),
    Mistake("flag let through", "mcore/guard.py", "    if config.calculate_per_token_loss:", "    if False:", "tests/unit/test_scaling_and_guard.py"),
    Mistake("flag without 1/C", "mcore/scaling.py", "return num_microbatches / cp_size", "return float(num_microbatches)", "tests/mcore/test_return_styles.py::test_per_token_flag_gives_the_reference_gradient_and_metrics"),
    Mistake("flag ignored", "mcore/forward_step.py", "calculate_per_token_loss=flag)", "calculate_per_token_loss=False)", "tests/mcore/test_return_styles.py::test_per_token_flag_gives_the_reference_gradient_and_metrics"),
    Mistake("DDP's flag not checked", "mcore/guard.py", "if factors and sums != bool(config.calculate_per_token_loss):", "if False:", "tests/mcore/test_return_styles.py::test_a_flag_changed_after_ddp_was_built_is_refused"),
    Mistake("interleaved count not checked", "mcore/train_step.py", "if num_microbatches < group or 0 < rest < stages:", "if False:", "tests/mcore/test_layouts.py::test_micro_batch_count_that_the_interleaved_schedule_cannot_run_is_refused"),
    Mistake("hook not checked", "mcore/guard.py", "if ranks > 1 and config.finalize_model_grads_func is None:", "if False:", "tests/unit/test_scaling_and_guard.py"),
    Mistake("temperature twice", "mcore/fused_head.py", "temperature=self.temperature,\n            with_entropy=with_entropy,\n            vocab_size=self.vocab_size,\n            loss_mask=batch.loss_mask,", "temperature=self.temperature**2,\n            with_entropy=with_entropy,\n            vocab_size=self.vocab_size,\n            loss_mask=batch.loss_mask,", CUT),
    Mistake("padded vocabulary", "mcore/fused_head.py", "            vocab_size=self.vocab_size,\n            loss_mask=batch.loss_mask,", "            loss_mask=batch.loss_mask,", CUT),
    Mistake("KL without weights", "losses/objective.py", "self.kl_coef * masked_sum(kl, weights)", "self.kl_coef * masked_sum(kl, (weights != 0).float() / 100)", CUT),
    Mistake("entropy sign", "losses/objective.py", "-self.entropy_coef * masked_sum", "self.entropy_coef * masked_sum", CUT),
    Mistake("sequence parallel tag", "mcore/layer_spec.py", "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False", CUT),
    Mistake("unmarked shards let through", "mcore/guard.py", 'if not getattr(weight, "tensor_model_parallel", False):', "if False:", "tests/mcore/test_forward_step.py"),
    Mistake("unshifted labels let through", "parallel/token_batch_checks.py", "if copies and not bool(following.all()):", "if False:", "tests/unit/test_token_batch.py"),
    Mistake("metrics' names not compared", "metrics.py", "if len(names) > 1 or float(ends.sum()):", "if False:", "tests/unit/test_metrics.py"),
    Mistake("shares not checked", "metrics.py", "if abs(shares - num_calls) > 1e-3 * num_calls:", "if False:", "tests/unit/test_metrics.py"),
]  # fmt: skip

CONTEXT = "tests/mcore/test_context_parallel.py"
CP_CUTS = CONTEXT + "::test_gradient_and_metrics_equal_the_reference_under_context_parallelism"
PACKED = "tests/mcore/test_packing.py"
PLANS = "tests/unit/test_planning.py"
CALLS = "tests/mcore/test_accumulate.py"
MOE = "tests/mcore/test_moe.py::test_fillers_add_nothing_to_policy_or_auxiliary_gradients"

LAYOUTS = [
    Mistake("CP in the factor", "mcore/forward_step.py", "return loss_sum * factor, metrics", "return loss_sum * factor * groups.cp.size(), metrics", CP_CUTS),
    Mistake("contiguous CP slices", "parallel/context_parallel.py", "for i in (cp_rank, 2 * cp_size - 1 - cp_rank):", "for i in (2 * cp_rank, 2 * cp_rank + 1):", CP_CUTS),
    Mistake("CP positions ignored by attention", "mcore/cpu_attention.py", "positions = zigzag_positions((0, end - start), rank, size)", "positions = zigzag_positions((0, end - start), 0, size)", CP_CUTS),
    Mistake("keys' gradients not summed over CP", "parallel/context_parallel.py", "            dist.all_reduce(gradient, group=ctx.group)", "            pass", CP_CUTS),
    Mistake("gather sums gradients", "parallel/context_parallel.py", "return _gather(x, cp_group, dim, cu_seqlens, False)", "return _gather(x, cp_group, dim, cu_seqlens, True)", "tests/dist/test_context_parallel.py"),
    Mistake("labels shifted after the CP split", "parallel/token_batch.py", "    labels[:, last] = 0\n    return labels", "    labels[:, last] = 0\n    labels[:, tokens.shape[1] // 4 - 1] = 0\n    return labels", CP_CUTS),
    Mistake("log-probs not gathered over CP", "mcore/token_log_probs.py", "return gather_sequence(values, groups.cp, cu_seqlens=offsets)", "return values", CONTEXT + "::test_log_probs_without_training_come_back_as_whole_rows"),
    Mistake("packed sequences see each other", "mcore/cpu_attention.py", "return (packed.cu_seqlens_q if padded is None else padded).tolist()", "return [0, length]", PACKED),
    Mistake("packed labels cross the boundary", "parallel/packing.py", "torch.cat([tokens[1:], tokens.new_zeros(1)])", "torch.cat([tokens[1:], tokens[:1]])", "tests/unit/test_packing.py"),
    Mistake("packed offsets without padding", "mcore/batch.py", "cu_seqlens_q_padded=padded,\n        cu_seqlens_kv_padded=padded", "cu_seqlens_q_padded=real,\n        cu_seqlens_kv_padded=real", PACKED),
    Mistake("last packed token trained", "parallel/packing.py", 'if "labels" not in named and bool(named["loss_mask"][-1]):', "if False:", "tests/unit/test_packing.py"),
    Mistake("a sequence planned twice", "mcore/planning.py", "bins[i].append(sequence)", "bins[i].append(order[0])", PLANS),
    Mistake("fillers instead of splitting", "mcore/planning.py", "return _split_largest(bins, costs, target, packed=False)", "return bins", PLANS),
    Mistake("unequal counts on ranks", "mcore/planning.py", "if len(shares[share]) < room:", "if True:", PLANS),
    Mistake("budget ignores padding", "mcore/planning.py", "i += min(max_rows, limit // costs[order[i]])", "i += max_rows", PLANS),
    Mistake("multiple ignored", "mcore/planning.py", "max_tokens_per_microbatch, dp_size * multiple)\n    missing = -len(bins) % (dp_size * multiple)", "max_tokens_per_microbatch, dp_size)\n    missing = -len(bins) % dp_size", PLANS),
    Mistake("filler trained", "mcore/collate.py", "torch.zeros(length, dtype=torch.bool)", "torch.ones(length, dtype=torch.bool)", PLANS),
    Mistake("every call finalizes", "mcore/accumulate.py", "    config.finalize_model_grads_func = recorder\n", "    config.finalize_model_grads_func = lambda *a, **k: (recorder(*a, **k), finalize(*a, **k))\n", CALLS),
    Mistake("overlap not held back", "mcore/accumulate.py", "stack.enter_context(chunk.no_sync())", "pass", CALLS),
    Mistake("schedule's no_sync ends the hold", "mcore/accumulate.py", "    config.no_sync_func, config.grad_sync_func = nullcontext, None\n", "", CALLS),
    Mistake("overlapped reduction not started", "mcore/accumulate.py", "            group.start_grad_sync()", "            pass", CALLS),
    Mistake("hooks not restored", "mcore/accumulate.py", "            setattr(config, name, hook)", "            pass", CALLS),
    Mistake("CP share of the metrics", "mcore/scaling.py", "return 1.0 / (num_microbatches * dp_size * cp_size)", "return 1.0 / (num_microbatches * dp_size)", CP_CUTS),
    Mistake("fillers reach the router", "mcore/batch.py", "return run() if batch.is_trained else run_filler(model, run)", "return run()", MOE),
    Mistake("recomputed fillers reach the router", "mcore/fillers.py", "        output.register_hook(partial(_rest_in_backward, routers))", "        pass", MOE),
    Mistake("fillers counted for the expert bias", "mcore/fillers.py", "                count.copy_(before)", "                pass", "tests/mcore/test_moe.py::test_fillers_do_not_move_the_expert_bias"),
]  # fmt: skip

LORA = "tests/mcore/test_lora.py"
LORA_CUT = "tests/mcore/test_lora_layouts.py::test_logits_gradients_and_step_equal_one_rank"
LORA_STATE = "tests/mcore/test_lora_state.py"

ADAPTERS = [
    Mistake("adapter: sequence parallel tag", "lora/adapter.py", "parameter.sequence_parallel = sharding.partial == name", "parameter.sequence_parallel = False", f"{LORA_CUT}[dense TP 2 SP]"),
    Mistake("adapter: expert groups by EP alone", "lora/apply.py", "return ep_size > 1 or etp_size != parallel_state.get_tensor_model_parallel_world_size()", "return ep_size > 1", f"{LORA_CUT}[MoE TP 2 SP, EP 1, ETP 1]"),
    Mistake("adapter: shards not marked", "lora/adapter.py", "sharded = dim is not None or sharding.is_expert", "sharded = False", f"{LORA_CUT}[dense TP 2]"),
    Mistake("adapter: no gradient sum over TP", "lora/adapter.py", '"copy": mappings.copy_to_tensor_model_parallel_region', '"copy": lambda h, group: h', f"{LORA_CUT}[dense TP 2]"),
    Mistake("adapter: expert sum over ETP left out", "lora/adapter.py", '"scatter_rank": mappings.reduce_scatter_last_dim_to_tensor_parallel_region', '"scatter_rank": lambda h, group: h.chunk(group.size(), -1)[group.rank()]', f"{LORA_CUT}[MoE TP 2 SP, EP 1, ETP 2]"),
    Mistake("adapter: numbered by local expert", "lora/names.py", "number = first + int(expert[1])", "number = int(expert[1])", f"{LORA_CUT}[MoE EP 2]"),
    Mistake("adapter: gate and up swapped in checkpoints", "lora/adapter.py", "i * sharding.size + sharding.rank", "(1 - i) * sharding.size + sharding.rank", LORA_STATE + "::test_the_models_own_sharded_state_dict_holds_the_adapters"),
    Mistake("adapter: base not frozen", "lora/apply.py", "chunk.requires_grad_(False)", "pass", LORA + "::test_only_adapters_are_trained_and_the_report_counts_them"),
    Mistake("adapter: not switched on again", "lora/disabled.py", "        adapter.num_disabled -= 1", "        pass", LORA + "::test_a_fresh_or_disabled_adapter_is_the_base_model_bit_for_bit"),
    Mistake("adapter: no graph under recomputation", "lora/apply.py", "        output.requires_grad_(True)", "        pass", LORA + "::test_recomputing_a_frozen_base_gives_the_same_gradients"),
    Mistake("adapter: merged without scale", "lora/adapter.py", "return self.scale * (b @ a)", "return b @ a", LORA + "::test_merged_weights_give_the_same_logits_and_the_chain_rule_the_same_gradients"),
    Mistake("adapter: moments not swapped", "lora/store.py", "    state.set_state({k: _moved(k, v, state) for k, v in saved.state.items()})", "    pass", LORA_STATE + "::test_training_two_adapters_in_turns_equals_training_each_alone"),
    Mistake("adapter: waiting gradient not swapped", "lora/store.py", "gradient.zero_() if saved.gradient is None else gradient.copy_(saved.gradient)", "gradient.zero_()", LORA_STATE + "::test_training_two_adapters_in_turns_equals_training_each_alone"),
    Mistake("adapter: moments not resumed", "lora/checkpoint.py", "    state.set_state(values)", "    state.set_state({})", LORA_STATE + "::test_resuming_in_any_layout_equals_the_uninterrupted_run"),
    Mistake("adapter: reference with adapters", "trainer.py", 'self.reference_mode if name == "ref_log_probs"', 'contextlib.nullcontext if name == "ref_log_probs"', "tests/mcore/test_lora_train.py::test_the_base_model_stays_and_is_its_own_reference"),
]  # fmt: skip

RESUMED = "tests/mcore/test_checkpoint.py"
SAME_LAYOUT = RESUMED + "::test_resuming_on_the_same_layout_changes_no_bit"
SAVED_FILES = "tests/unit/test_checkpoint_files.py"
SAVED_JOB = "tests/mcore/test_checkpoint_job.py"

CHECKPOINTS = [
    Mistake("checkpoint: the old one removed before the new one is whole", "mcore/checkpoint_files.py", "        os.rename(final, replaced)", "        shutil.rmtree(final)", SAVED_FILES),
    Mistake("checkpoint: checksums not compared", "mcore/checkpoint_files.py", "        elif found != expected:", "        elif False:", RESUMED + "::test_a_damaged_checkpoint_is_named_and_the_one_before_is_used"),
    Mistake("checkpoint: owner not checked", "mcore/checkpoint_write.py", "    files.check_owner(final.parent, token)", "    pass", RESUMED + "::test_an_older_run_does_not_write_into_a_newer_ones_folder"),
    Mistake("checkpoint: torch's failure not caught", "mcore/checkpoint_write.py", "except (Exception, torch_checkpoint.api.CheckpointException) as error:", "except Exception as error:", RESUMED + "::test_a_rank_that_cannot_write_is_an_error_on_every_rank"),
    Mistake("checkpoint: written from live tensors", "mcore/checkpoint_write.py", '.to("cpu", copy=True)', '.to("cpu")', RESUMED + "::test_training_goes_on_while_a_checkpoint_is_written_and_does_not_change_it"),
    Mistake("checkpoint: random states not restored", "mcore/checkpoint_state.py", '    if "rng" in wanted:', "    if False:", SAME_LAYOUT),
    Mistake("checkpoint: scheduler starts anew", "mcore/checkpoint_state.py", '        _load_scheduler(trained.scheduler, part["scheduler"])', "        pass", SAME_LAYOUT),
    Mistake("checkpoint: one step for all parameters", "mcore/compat.py", '            parameter_state["step"] = parameter_state["step"].clone()', "            pass", SAME_LAYOUT),
    Mistake("checkpoint: another model let through", "mcore/checkpoint_state.py", "    _check_tensors(folder, wanted)", "    pass", RESUMED + "::test_a_checkpoint_of_another_model_is_refused_on_every_rank"),
    Mistake("checkpoint: steps twice in the metrics", "report.py", "        self._forgetters.append(forget)", "        pass", "tests/unit/test_report.py"),
    Mistake("checkpoint: each rank stops by itself", "signals.py", "        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self._group)", "        pass", SAVED_JOB + "::test_a_signal_to_one_rank_stops_all_after_the_same_step"),
    Mistake("checkpoint: data from the start", "train.py", "for step in range(done, steps):", "for step in range(0, steps):", SAVED_JOB + "::test_a_finished_run_goes_on_with_more_steps"),
]  # fmt: skip

HEADS = "tests/mcore/test_fused_head.py::test_gradient_of_every_parameter_is_the_same_with_any_head"
VALUES = "tests/mcore/test_value.py::test_gradient_and_metrics_equal_the_reference_for_any_cut"
PPO = "tests/unit/test_ppo.py"

CRITIC_AND_HEAD = [
    Mistake("head: hidden's gradient stays partial", "logprobs/lm_head.py", "        dist.all_reduce(grad, group=group)", "        pass", HEADS),
    Mistake("head: its weight is not trained", "mcore/fused_head.py", "weight = layer.weight if weight is None else weight", "weight = (layer.weight if weight is None else weight).detach()", HEADS),
    Mistake("head: no log-probs of the whole sequence", "mcore/fused_head.py", '"sequence_parallel": layer.sequence_parallel,', '"sequence_parallel": False,', HEADS),
    Mistake("head: tokens of the loss in another order", "mcore/forward_step.py", "return x.transpose(0, 1).reshape(1, -1)", "return x.reshape(1, -1)", HEADS),
    Mistake("head: the loss made in forward is made twice", "mcore/forward_step.py", "return (loss_sum if made_in_forward is None else made_in_forward), metrics", "return (loss_sum if made_in_forward is None else loss_sum + made_in_forward * 2), metrics", HEADS),
    Mistake("head: only the last chunk's gradient", "logprobs/products.py", "part.add_(rows @ b)", "part.copy_(rows @ b)", "tests/unit/test_logprobs_head.py"),
    Mistake("head: a sequence-level loss cut into chunks", "losses/objective.py", '("sums over whole sequences", self.needs_sequences),', '("sums over whole sequences", False),', "tests/mcore/test_fused_head.py"),
    Mistake("head: a bias is dropped", "mcore/fused_head.py", "    if layer.bias is not None:", "    if False:", "tests/mcore/test_fused_head.py::test_what_the_head_would_get_wrong_is_an_obstacle"),
    Mistake("head: the factor of bf16 gradients rounded", "logprobs/forward_gradients.py", "g * grad_loss for g", "g * grad_loss.to(g.dtype) for g", "tests/unit/test_logprobs_head.py"),
    Mistake("head: a loss of one's own is trusted", "losses/objective.py", "not self.spec.token_level)", "False)", "tests/mcore/test_fused_head.py::test_gradients_in_forward_are_refused_for_a_loss_that_is_not_made_token_by_token"),
    Mistake("head: fp16 made in forward", "mcore/fused_head.py", "if self.makes_loss and getattr", "if False and getattr", "tests/mcore/test_fused_head.py::test_gradients_in_forward_are_refused_for_fp16"),
    Mistake("critic: parts of the weight's gradient", "mcore/value_model.py", "self.weight.sequence_parallel = config.sequence_parallel", "self.weight.sequence_parallel = False", VALUES),
    Mistake("critic: gathered values' gradients added", "mcore/value_model.py", "tensor_parallel_output_grad=False", "tensor_parallel_output_grad=True", VALUES),
    Mistake("critic: layers are not trained", "mcore/value_model.py", "linear(input_.float(), ", "linear(input_.float().detach(), ", VALUES),
    Mistake("critic: cut responses end at 0", "mcore/value_training.py", "torch.where(cut[:, None], later, 0.0)", "torch.zeros_like(later)", PPO),
    Mistake("critic: whitened per micro-batch", "mcore/value_training.py", "            _whiten(flat, groups)", "            [_whiten([batch], groups) for batch in flat]", PPO),
    Mistake("coefficients start anew after a resume", "trainer.py", "        self.coefs.load_state(state, self.forward_step)", "        pass", "tests/mcore/test_value_train.py::test_a_resumed_run_goes_on_with_critic_and_coefficients"),
    Mistake("DPO: half the advantage", "ops/preferences.py", "return (2.0 * beta * sign", "return (beta * sign", "tests/unit/test_preferences.py"),
]  # fmt: skip

TOP_K = "tests/mcore/test_top_k_distillation.py"
TOP_K_CUT = TOP_K + "::test_gradient_and_metrics_equal_the_reference_for_any_cut"

DISTILLATION = [
    Mistake("teacher: ids not sliced over CP", "parallel/token_batch.py", "for name, value in vars(batch).items() if isinstance(value, Tensor)", 'for name, value in vars(batch).items() if isinstance(value, Tensor) and name != "token_ids"', f"{TOP_K_CUT}[CP 2]"),
    Mistake("teacher: ids without the shard's offset", "logprobs/row_function.py", "local = ids - shard.start", "local = torch.cat([ids[:, :1] - shard.start, ids[:, 1:]], 1)", f"{TOP_K_CUT}[TP 2]"),
    Mistake("teacher: log-probs of unused entries counted", "losses/distillation.py", "torch.where(used, log_p.exp(), 0.0).sum(-1)", "log_p.exp().sum(-1)", "tests/unit/test_top_k_distillation.py"),
    Mistake("teacher: masked entries kept", "losses/objective.py", "mask = loss_mask.unsqueeze(-1) if is_of_set(name) else loss_mask", "mask = torch.ones_like(value, dtype=torch.bool) if is_of_set(name) else loss_mask", "tests/unit/test_top_k_distillation.py"),
    Mistake("teacher: rows of the fused head mixed up", "mcore/fused_head.py", "token_ids.transpose(0, 1)", "token_ids.reshape(token_ids.shape[1], token_ids.shape[0], -1)", f"{TOP_K_CUT}[head in blocks]"),
    Mistake("teacher: entropy taken for a token's log-prob", "mcore/fused_head.py", "own = 2 if with_entropy else 1", "own = 1", f"{TOP_K_CUT}[head in blocks]"),
]  # fmt: skip

EXPERTS = "tests/mcore/test_moe_weights.py"
EXPERT_BITS = EXPERTS + "::test_qwen3_moe_gives_hugging_faces_logits_and_its_bits_back"
PEFT = "tests/mcore/test_peft.py"
PEFT_LAYOUTS = PEFT + "::test_a_folder_loads_runs_merges_and_comes_back_in_any_layout"
PEFT_READS = PEFT + "::test_the_real_peft_gives_the_same_logits_with_what_was_saved"
PEFT_MADE = PEFT + "::test_an_adapter_made_by_peft_with_a_different_a_for_each_layer_loads"
PLAN = "tests/unit/test_plan.py"

EXPERTS_AND_PEFT = [
    Mistake("experts: softmax over all where top-k was meant", "mcore/model_moe.py", '"moe_router_pre_softmax": not moe', '"moe_router_pre_softmax": moe', EXPERT_BITS),
    Mistake("experts: up before gate in stacked ones", "mcore/weights_moe.py", "((names.gate, 0), (names.up, 1))", "((names.gate, 1), (names.up, 0))", EXPERTS + "::test_experts_that_transformers_stacked_load_too"),
    Mistake("experts: each rank counts its own from 0", "mcore/weights_map.py", "first_expert + int(sequential[1])", "int(sequential[1])", EXPERT_BITS),
    Mistake("experts: always from expert rank 0", "mcore/weights_gather.py", "_broadcast(tensors, owner.expert_rank, experts)", "_broadcast(tensors, 0, experts)", EXPERT_BITS),
    Mistake("experts: cut over the dense ranks", "mcore/weights_check.py", "    if rule.expert is None:\n        rank", "    if True:\n        rank", EXPERT_BITS),
    Mistake("experts: reduced over the dense ranks", "mcore/compat.py", "parameter.allreduce = ep_size == 1 and etp_size == tp_size", "parameter.allreduce = ep_size == 1", EXPERTS + "::test_gradients_of_every_weight_equal_one_ranks"),
    Mistake("experts: the sampler leaves them as they are", "rollouts/expert_views.py", "for part, view in zip(parts, weight.chunk(len(parts)), strict=True)", "for part, view in zip(parts, weight.clone().chunk(len(parts)), strict=True)", "tests/mcore/test_moe_train.py::test_the_sampler_takes_over_experts_by_their_checkpoint_names"),
    Mistake("PEFT: a shard of A for the whole", "lora/peft_tensors.py", "if sharding.a_dim is not None:", "if False:", PEFT_LAYOUTS),
    Mistake("PEFT: experts slowest along B", "lora/peft_export.py", "torch.stack(list(b), -1).flatten(1)", "torch.cat(list(b), 1)", PEFT_READS),
    Mistake("PEFT: up before gate in stacked ones", "lora/peft_export.py", "torch.cat([g.b, u.b])", "torch.cat([u.b, g.b])", PEFT_READS),
    Mistake("PEFT: alpha for another rank", "lora/peft_export.py", '"lora_alpha": scale * r,', '"lora_alpha": scale * max(ranks.values()),', PEFT_READS),
    Mistake("PEFT: blocks of B on top of each other", "lora/peft_import.py", "start = 0 if shared else rows.stop", "start = 0", PEFT_MADE),
    Mistake("PEFT: the folder's scale ignored", "lora/peft_import.py", "part.b.float() * (part.scale / handle.scale)", "part.b.float()", PEFT_MADE),
    Mistake("PEFT: transposed tensors let through", "lora/peft_import.py", "if actual != wanted[letter]:", "if False:", PEFT + "::test_missing_extra_and_transposed_tensors_are_named_and_nothing_is_loaded"),
    Mistake("PEFT: missing tensors let through", "lora/peft_import.py", "return [name for name in wanted if name not in there]", "return []", PEFT + "::test_missing_extra_and_transposed_tensors_are_named_and_nothing_is_loaded"),
    Mistake("plan: experts on every rank", "mcore/memory.py", "num = linear.num // (layout.ep if linear.is_expert else 1)", "num = linear.num", PLAN),
    Mistake("plan: optimizer state on every rank", "mcore/memory.py", "    if training.distributed_optimizer:", "    if False:", PLAN),
    Mistake("plan: gradients of frozen weights", "mcore/memory.py", "trained = found.base if adapters is None else found.adapters", "trained = found.base", PLAN),
]  # fmt: skip

STREAM = "tests/unit/test_rollout_stream.py"

ROLLOUTS = [
    Mistake("rollouts: lines' fields not compared", "rollouts/json_columns.py", "if list(record.keys()) != list(names):", "if False:", STREAM),
    Mistake("rollouts: numbers taken for a mask", "rollouts/json_columns.py", "if set(map(type, flat)) - {bool}:", "if False:", STREAM),
    Mistake("rollouts: a bool taken for a reward", "rollouts/json_columns.py", "types <= {int, float}", "types <= {int, float, bool}", STREAM),
    Mistake("rollouts: SFT asks for advantages", "pretrain.py", "if self._reads_advantages:", "if True:", "tests/unit/test_pretrain_data.py"),
    Mistake("export: base weights without training", "build.py", "folder, chunks = Path(config.run.dir) / EXPORT_FOLDER, job.trainer.chunks", "folder, chunks = Path(config.run.dir) / EXPORT_FOLDER, _model_chunks(config, job.spec, read_base_model(config.model.path, in_memory=True).weights)", "tests/mcore/test_train.py::test_the_trained_model_is_exported_the_same_from_any_layout"),
]  # fmt: skip

AUDITED = "tests/mcore/test_audit.py::"
AUDITED_EXPERTS = AUDITED + "test_experts_that_ddp_reduces_over_the_dense_ranks_are_named"

AUDIT = [
    Mistake("audit: the experts' mark is trusted", "mcore/audit_gradients.py", 'return ".experts." in name or not getattr', "return not getattr", AUDITED_EXPERTS),
    Mistake("audit: experts summed over the dense ranks", "mcore/audit_gradients.py", "    if is_expert(name, parameter):", "    if False:", AUDITED + "test_the_experts_and_adapters_of_a_model_are_audited"),
    Mistake("audit: fresh adapters", "audit_stand_in.py", "        handle.b.copy_(", "        torch.zeros_like(handle.b).copy_(", AUDITED + "test_an_adapters_a_without_its_tag_is_named"),
    Mistake("audit: experts not named", "mcore/audit_run.py", "return _largest(len(groups)) > 1", "return False", AUDITED_EXPERTS),
]  # fmt: skip

BAD_INPUT = [
    Mistake("input: teacher's mass not looked at", "rollouts/rollout.py", "if mask[i] and mass > MAX_TEACHER_MASS:", "if False:", "tests/unit/test_rollout_files.py"),
    Mistake("input: teacher's mass not looked at in columns", "rollouts/columns.py", "np.exp(log_probs).sum(-1).max() > MAX_TEACHER_MASS", "False", "tests/unit/test_rollout_stream.py"),
    Mistake("input: masked teacher entries kept", "rollouts/columns.py", "if name not in TOP_K or mask.values.all():", "if True:", "tests/unit/test_rollout_stream.py"),
    Mistake("input: offsets of a row not looked at", "parallel/context_parallel.py", "if len(offsets) < 2 or not rising or", "if", "tests/unit/test_context_parallel.py"),
    Mistake("input: layout not looked at in a dry run", "build.py", "    _megatron_config(config, model_spec_from_hf(read_hf_config(config.model.path)))", "    pass", "tests/mcore/test_train.py::test_dry_run_refuses_a_layout_that_cannot_hold_the_model"),
    Mistake("input: rotary settings per layer type", "mcore/model_spec.py", "or any(isinstance(x, Mapping) for x in given.values())", "", "tests/unit/test_model_spec.py"),
    Mistake("input: an error loses the checkpoint", "train.py", "            between.give_way()", "            pass", "tests/mcore/test_train.py::test_an_error_lets_the_checkpoint_that_is_being_written_get_to_the_disk"),
    Mistake("audit: other weights fit any factor", "mcore/audit_verdict.py", " and _matches(wrong, factors, sizes, tolerance)", "", "tests/unit/test_audit_verdict.py"),
    Mistake("audit: a small factor taken for no gradient", "mcore/audit_verdict.py", "if not any(f.factor or f.residual for f in factors):", "if all(abs(f.factor) < 1e-3 for f in factors):", "tests/unit/test_audit_verdict.py"),
    Mistake("audit: no constant factor", "mcore/audit_verdict.py", "or (one_factor and _constant(factors, tolerance))", "", "tests/unit/test_audit_verdict.py"),
]  # fmt: skip

MISTAKES = CORE + LAYOUTS + ADAPTERS + CHECKPOINTS + CRITIC_AND_HEAD + EXPERTS_AND_PEFT + ROLLOUTS
MISTAKES += AUDIT + DISTILLATION + BAD_INPUT
