"""Oracles in torch, float64: one policy with its LoRA added to the base's weights by hand, and the
losses of its tokens.
"""

import numpy as np
import torch

torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other

MODULES = {"embed": "model.embed_tokens", "unembed": "lm_head"}
MODULES |= {f"dense/attn/{n}": f"model.layers.{{}}.self_attn.{n}_proj" for n in "qkvo"}
MODULES |= {f"dense/mlp/{n}": f"model.layers.{{}}.mlp.{n}_proj" for n in ("gate", "up", "down")}


def token_losses(logp, first, old, advantage, low, high, beta=0.0, dual=1e30, cap=1e30, whole=None):
    """Losses of each token by kind, as in the papers; ``whole`` are ratios of sequences."""
    ratio, gap = torch.exp(logp - first), torch.exp(first - old).clamp(max=cap)

    def surrogate(r):
        least = torch.minimum(r * advantage, r.clamp(low, high) * advantage)
        floor = torch.maximum(least, min(dual, 1e30) * advantage)
        return -gap * torch.where(advantage < 0, floor, least)

    return {
        "cross_entropy": -logp,
        "reinforce": -advantage * logp,
        "importance_sampling": -advantage * ratio * gap,
        "ppo": surrogate(ratio),
        "cispo": -gap * ratio.clamp(low, high).detach() * advantage * logp,
        "gspo": surrogate(ratio if whole is None else whole),
        "dro": -(advantage * logp - beta / 2 * (logp - old) ** 2),
    }


class TorchPolicy:
    """A policy whose ``factors``, by path, have gradients."""

    def __init__(self, model, factors, scale: float):
        self.model, self.scale = model, scale
        self.factors = {
            path: torch.tensor(np.float64(leaf), requires_grad=True) for path, leaf in factors
        }

    def logits(self, rows, bare=False, masks=None):
        """Logits ``[rows, T, V]`` of equally long rows of tokens; ``bare``: without the adapter.
        ``masks(path, layer, D)`` are factors ``[T, D]`` of the adapters' inputs.
        """
        if masks is not None:
            return self._masked(rows, masks)
        weights, changed = dict(self.model.named_parameters()), {}
        for path, layer, a_RD, b_RF in () if bare else self._pairs():
            delta_FD = self.scale * b_RF.T @ a_RD
            name = f"{MODULES[path].format(layer)}.weight"
            changed[name] = weights[name] + (delta_FD.T if path == "embed" else delta_FD)
        tokens = torch.tensor(np.array(rows))
        return torch.func.functional_call(self.model, changed, (tokens,)).logits

    def _pairs(self):
        for path in {p.rsplit("/", 1)[0]: None for p in self.factors}:
            pairs = zip(self.factors[f"{path}/a"], self.factors[f"{path}/b"])
            yield from ((path, layer, *pair) for layer, pair in enumerate(pairs))

    def _masked(self, rows, masks):
        hooks = []
        for path, layer, a_RD, b_RF in self._pairs():
            mask_TD = masks(path, layer, a_RD.shape[1])

            def add(module, inputs, out, of=(mask_TD, a_RD, b_RF)):
                mask_TD, a_RD, b_RF = of
                return out + self.scale * (inputs[0] * mask_TD) @ a_RD.T @ b_RF

            module = self.model.get_submodule(MODULES[path].format(layer))
            hooks.append(module.register_forward_hook(add))
        try:
            return self.model(torch.tensor(np.array(rows))).logits
        finally:
            for hook in hooks:
                hook.remove()

    def logp(self, prompt, tokens, bare=False, masks=None):
        """Log-probability of each token behind a prompt."""
        row = [*prompt, *tokens][: None if masks is None else -1]  # masks have no last token
        logp = torch.log_softmax(self.logits([row], bare, masks)[0], -1)
        return logp[range(len(prompt) - 1, len(prompt) + len(tokens) - 1), tokens]
