"""Makes small model folders with no weights in them: SGLang fills them itself (`--load-format dummy`).

    python3 tests/gpu/engine/models.py FOLDER

`dense` is bound by launches, not arithmetic, so that graphs show; `moe` is a small mixture of experts; `wide`
has few layers and a large vocabulary: its decode graphs need memory in proportion to their batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "initializer_range": 0.02,
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {**COMMON, **QWEN3, "num_hidden_layers": 32, "vocab_size": 32768},
    "wide": {**COMMON, **QWEN3, "num_hidden_layers": 4, "vocab_size": 151936},
    "moe": {
        **COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 16,
        "vocab_size": 32768,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    },
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_model(folder: Path, name: str) -> Path:
    """One model: config.json and a tokenizer whose words are `w0`, `w1`, ...

    Only the last is special: with untrained weights any token may come, and Hearth's canary takes an
    empty answer for a wrong one.
    """
    config = MODELS[name]
    target = folder / name
    target.mkdir(parents=True, exist_ok=True)
    size = config["vocab_size"]
    last = {"eos_token_id": size - 1, "pad_token_id": size - 1}
    (target / "config.json").write_text(json.dumps({**config, **last}, indent=1))
    (target / "generation_config.json").write_text(json.dumps(last))
    _write_tokenizer(target, size)
    return target


def _write_tokenizer(target: Path, size: int) -> None:
    words = {f"w{i}": i for i in range(size)}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w2"},
    }
    (target / "tokenizer.json").write_text(json.dumps(document))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": f"w{size - 1}",
        "chat_template": TEMPLATE,
        "model_max_length": 40960,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    for each in MODELS:
        print(write_model(Path(sys.argv[1]), each))
