"""Trains a small base of any supported family from random weights on environments' answers, and
writes a checkpoint directory: the base of GRPO with a mixture of experts.

All parameters train, on one device in float32; the tokenizer has one token per character.
"""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from mint_jax import params as params_lib
from mint_jax.envs import env as env_lib
from mint_jax.envs.env import Example
from mint_jax.errors import UserError
from mint_jax.files import new_directory
from mint_jax.models import hf, transformer
from mint_jax.models.config import ModelConfig
from mint_jax.models.hf_config import from_hf
from mint_jax.models.precision import as_stored

END, UNKNOWN = "<end>", "<unknown>"
IDS = {token: i for i, token in enumerate([END, UNKNOWN, "\n", *map(chr, range(32, 127))])}


def write_tokenizer(directory: Path) -> None:
    """Writes a tokenizer of single ASCII characters."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(IDS, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))


def encode_rows(examples: list[Example]) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids of prompt, space, answer and newline, ``[rows, T]`` padded with ``END``, and a
    mask of the tokens to learn.
    """
    texts = [(str(example.messages), f" {example.answer}\n") for example in examples]
    width = max(len(prompt) + len(answer) for prompt, answer in texts)
    tokens = np.zeros((len(texts), width), np.int32)
    learn = np.zeros((len(texts), width), np.float32)
    for row, (prompt, answer) in enumerate(texts):
        length = len(prompt) + len(answer)
        tokens[row, :length] = [IDS[c] for c in prompt + answer]
        learn[row, len(prompt) : length] = 1.0
    return tokens, learn


@as_stored
def mean_loss(
    params: Any, tokens_BT: jax.Array, learn_BT: jax.Array, cfg: ModelConfig
) -> jax.Array:
    """Returns the mean cross-entropy of the tokens to learn, in nats."""
    inputs = tokens_BT[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32), inputs.shape)
    placed = transformer.DecoderInputs(inputs, positions)
    h, _ = transformer.hidden_states(params, None, placed, cfg)
    logits = transformer.logits(params, None, h, cap=cfg.logit_cap)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:])
    return jnp.sum(losses * learn_BT[:, 1:]) / jnp.sum(learn_BT[:, 1:])


def run(config: Any, workdir: Path) -> dict[str, Any]:
    """Trains and saves ``workdir/base``; returns the losses before and after."""
    target = workdir / "base"
    if target.exists():
        raise UserError(f"{target} exists: remove it, or choose another --workdir")
    fields = {**config.model, "vocab_size": len(IDS), "eos_token_id": 0}
    cfg = from_hf(fields)
    environments = [env_lib.make(name) for name in config.envs]
    held_out = encode_rows([example for env in environments for example in env.held_out])
    tokens, learn = encode_rows([example for env in environments for example in env.train])

    params = params_lib.init(transformer.abstract(cfg), jax.random.key(config.seed))
    schedule = optax.cosine_decay_schedule(config.learning_rate, config.steps)
    optimizer = optax.adamw(schedule, weight_decay=0.01)
    loss = jax.jit(functools.partial(mean_loss, cfg=cfg))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    @as_stored
    def step(params, opt, tokens_BT, learn_BT):
        grads = jax.grad(mean_loss)(params, tokens_BT, learn_BT, cfg)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    before = float(loss(params, *held_out))
    opt, rng = jax.jit(optimizer.init)(params), np.random.default_rng(config.seed)
    for _ in range(config.steps):
        rows = rng.integers(0, len(tokens), config.batch_size)
        params, opt = step(params, opt, tokens[rows], learn[rows])
    after = float(loss(params, *held_out))
    with new_directory(target, "config.json") as staging:
        hf.save(params, cfg, staging)
        write_tokenizer(staging)
        (staging / "config.json").write_text(json.dumps(fields, indent=1))
    return {
        "base": str(target),
        "parameters": params_lib.count(params),
        "loss_before": round(before, 4),
        "loss_after": round(after, 4),
    }
