"""A random model of DeepSeek-V3's kind (latent attention, routed and shared experts) learns half of
a small task: the base of ``configs/tiny/grpo_moe.py``.

Command: python -m benchmarks --config=configs/bench/pretrain.py --workdir=runs/bench/pretrain
Small: configs/bench/pretrain.py:ci takes one step. About a minute on two CPU cores.
"""

from ml_collections import ConfigDict


def get_config(size: str = "") -> ConfigDict:
    config = ConfigDict()
    config.bench = "pretrain"
    config.seed = 0
    config.steps = 1 if size == "ci" else 40
    config.batch_size = 64
    config.learning_rate = 3e-3
    config.envs = ("larger_of_two", "digit_sum")
    config.model = ConfigDict(  # fields of config.json; the vocabulary is that of the characters
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "hidden_size": 64,
            "intermediate_size": 128,
            "moe_intermediate_size": 40,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        }
    )
    return config
