"""The Hugging Face checkpoint that a tiny training run starts from: config, weights, tokenizer.

    python -m weightbus.demo.megatron_cpu.origin OUT_DIR --kind qwen3

Run it in a process of its own: transformers models and `cpu_shim` do not go together. The weights
are random and are not those that training starts from; the names, shapes and dtypes are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ...schemas.errors import MissingDependencyError
from .sizes import TINY, TinyRun, TinySizes

try:
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
except ImportError as missing:
    raise MissingDependencyError(
        f"the tiny origin needs transformers: {missing}", next_step="pip install transformers"
    ) from missing

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def make_config(run: TinyRun, sizes: TinySizes = TINY, *, architecture: str = "deepseek_v3") -> Any:
    """The transformers config of a run's model.

    Args:
        run: the Megatron side.
        sizes: the model's sizes.
        architecture: for MLA models, `deepseek_v3` or `glm4_moe_lite`.
    """
    base: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": run.tied,
        "attn_implementation": "eager",
        "dtype": "bfloat16" if run.bf16 else "float32",
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if run.kind in {"qwen3", "qwen3moe"}:
        base |= {
            "num_key_value_heads": sizes.kv_groups,
            "head_dim": sizes.head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        }
        if run.kind == "qwen3":
            return transformers.Qwen3Config(**base)
        return transformers.Qwen3MoeConfig(
            **base,
            num_experts=sizes.experts,
            num_experts_per_tok=2,
            moe_intermediate_size=sizes.moe_ffn,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )
    base |= _mla(run, sizes)
    if architecture == "glm4_moe_lite":
        return transformers.Glm4MoeLiteConfig(
            **base, mlp_layer_types=["dense"] + ["sparse"] * (sizes.layers - 1)
        )
    return transformers.DeepseekV3Config(**base, first_k_dense_replace=1)


def _mla(run: TinyRun, sizes: TinySizes) -> dict[str, Any]:
    rope: dict[str, Any] = _YARN if run.kind == "mla_yarn" else {"rope_type": "default"}
    return {
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.q_lora,
        "kv_lora_rank": sizes.kv_lora,
        "qk_nope_head_dim": sizes.qk_nope,
        "qk_rope_head_dim": sizes.qk_rope,
        "v_head_dim": sizes.v_head,
        "n_routed_experts": sizes.experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": sizes.moe_ffn,
        "n_shared_experts": sizes.shared_ffn // sizes.moe_ffn,
        "n_group": 2,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "rope_interleave": True,
        "rope_parameters": {**rope, "rope_theta": 10_000.0},
    }


def make_origin(
    folder: Path,
    run: TinyRun,
    sizes: TinySizes = TINY,
    *,
    architecture: str = "deepseek_v3",
    seed: int = 0,
) -> Path:
    """Write the checkpoint folder; returns it."""
    config = make_config(run, sizes, architecture=architecture)
    torch.manual_seed(seed)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model = model.to(torch.bfloat16 if run.bf16 else torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.data = buffer.data.float()  # as the real checkpoints keep it
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    _amend_config(folder / "config.json", run)
    return folder


def _amend_config(path: Path, run: TinyRun) -> None:
    """Older readers know `torch_dtype`, and SGLang wants these keys of DeepSeek's models."""
    config: dict[str, Any] = json.loads(path.read_text())
    config["torch_dtype"] = "bfloat16" if run.bf16 else "float32"
    if run.kind in {"mla", "mla_yarn"}:
        config |= {
            "moe_layer_freq": 1,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "num_nextn_predict_layers": 0,
        }
    path.write_text(json.dumps(config, indent=2) + "\n")


def _write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: 4 special tokens and 256 bytes."""
    words = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        model_max_length=2048,
    ).save_pretrained(folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", default="deepseek_v3")
    parser.add_argument("--seed", type=int, default=0)
    TinyRun.add_arguments(parser)
    arguments = parser.parse_args()
    make_origin(
        arguments.out,
        TinyRun.from_arguments(arguments),
        architecture=arguments.architecture,
        seed=arguments.seed,
    )


if __name__ == "__main__":
    main()
