"""Tiny real Megatron models: configurations and model chunks. Import after `cpu_shim.prepare()`."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu

from .sizes import TINY, TinyRun, TinySizes
from .te_names import use_te_names

QWEN_THETA = 1_000_000
MLA_THETA = 10_000
YARN: dict[str, Any] = {
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def start_ranks(run: TinyRun, seed: int = 1) -> None:
    """Join the process group (torchrun's environment) and make Megatron's groups."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        virtual_pipeline_model_parallel_size=run.vpp if run.vpp else None,
        expert_model_parallel_size=run.ep,
        expert_tensor_parallel_size=run.expert_tp,
    )
    model_parallel_cuda_manual_seed(seed)


def stop_ranks() -> None:
    """Undo Megatron's groups, so that the process can make others."""
    parallel_state.destroy_model_parallel()


def transformer_config(run: TinyRun, sizes: TinySizes = TINY) -> Any:
    """Megatron's configuration of a run."""
    dtype = torch.bfloat16 if run.bf16 else torch.float32
    common: dict[str, Any] = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "ffn_hidden_size": sizes.ffn,
        "gated_linear_unit": True,
        "activation_func": silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-6,  # transformers fixes it for MLA's norms
        "add_bias_linear": False,
        "qk_layernorm": True,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "tensor_model_parallel_size": run.tp,
        "pipeline_model_parallel_size": run.pp,
        "virtual_pipeline_model_parallel_size": run.vpp if run.vpp else None,
        "expert_model_parallel_size": run.ep,
        "expert_tensor_parallel_size": run.expert_tp,
        "sequence_parallel": run.sp,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": run.bf16,
        "deallocate_pipeline_outputs": False,
        # Batched sends and receives of two stages in a ring would be matched the wrong way round.
        "overlap_p2p_comm": bool(run.vpp),
        "batch_p2p_comm": not run.vpp,
        "mtp_num_layers": run.mtp if run.mtp else None,
    }
    if run.moe:
        common |= {
            "num_moe_experts": sizes.experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": sizes.moe_ffn,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": run.grouped,
            "moe_router_dtype": "fp32" if run.bf16 else None,
        }
    if run.kind in {"qwen3", "qwen3moe"}:
        common |= {"num_query_groups": sizes.kv_groups, "kv_channels": sizes.head_dim}
        if run.moe:
            common |= {
                "moe_layer_freq": [1] * sizes.layers,
                "moe_router_score_function": "softmax",
                "moe_router_pre_softmax": False,
            }
        return TransformerConfig(**common)
    return MLATransformerConfig(**common, **_mla(run, sizes))


def _mla(run: TinyRun, sizes: TinySizes) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "rope", "rotary_base": float(MLA_THETA)}
    if run.kind == "mla_yarn":
        yarn = dict(YARN)
        rope = {
            "rope_type": "yarn",
            "rotary_base": float(MLA_THETA),
            "rotary_scaling_factor": yarn.pop("factor"),
            **yarn,
        }
    return {
        "moe_layer_freq": [0] + [1] * (sizes.layers - 1),
        "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora,
        "qk_head_dim": sizes.qk_nope,
        "qk_pos_emb_head_dim": sizes.qk_rope,
        "v_head_dim": sizes.v_head,
        "moe_shared_expert_intermediate_size": sizes.shared_ffn,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 1e-3,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        **rope,
    }


def build_chunks(run: TinyRun, sizes: TinySizes = TINY) -> tuple[Any, list[Any]]:
    """The configuration and this rank's model chunks, in virtual-stage order."""
    if run.spec == "te":
        use_te_names()
    config = transformer_config(run, sizes)
    return config, [_chunk(run, sizes, config, stage) for stage in range(run.chunks)]


def _chunk(run: TinyRun, sizes: TinySizes, config: Any, stage: int) -> Any:
    te = run.spec == "te"
    virtual = stage if run.vpp else None
    if run.kind == "qwen3":
        spec: Any = (
            get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
            if te
            else get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
        )
    else:
        spec = get_gpt_decoder_block_spec(
            config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=virtual
        )
    options: dict[str, Any] = {}
    if run.mtp:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=te, vp_stage=virtual
        )
    if "vp_stage" in inspect.signature(GPTModel.__init__).parameters:
        options["vp_stage"] = virtual
    where: dict[str, Any] = {"ignore_virtual": False, "vp_stage": virtual}
    return GPTModel(
        config,
        spec,
        vocab_size=sizes.padded_vocab,
        max_sequence_length=2048,
        pre_process=parallel_state.is_pipeline_first_stage(**where),
        post_process=parallel_state.is_pipeline_last_stage(**where),
        parallel_output=True,
        share_embeddings_and_output_weights=run.tied,
        position_embedding_type="rope",
        rotary_base=QWEN_THETA if run.kind.startswith("qwen3") else MLA_THETA,
        **options,
    )
