"""Reward and loss curves by rank and seed: SFT, DPO, GRPO, PPO, CISPO; replay of routes on a sparse
base; samplers in 8 bits.

Command: python -m benchmarks --config=configs/sweeps/learning.py:cpu
  --workdir=runs/sweeps/cpu/learning
Sizes: configs/sweeps/learning.py:ci, configs/sweeps/learning.py:cpu,
  configs/sweeps/learning.py:gpu, configs/sweeps/learning.py:pod
Size cpu: SmolLM2-135M, three seeds, 12 steps of GRPO; about two hours on two CPU cores, point by
  point. Ranks have one alpha, so that one learning rate serves all; rank 512 stands for full
  rank, of 576 columns, and takes up to 24 GB of memory. gpu: Qwen3-4B; pod: Qwen3-30B-A3B.
"""

from ml_collections import ConfigDict

BASES = {
    "ci": "tiny-random",
    "cpu": "smollm2-135m-instruct",
    "gpu": "Qwen/Qwen3-4B",
    "pod": "Qwen/Qwen3-30B-A3B",
}
MINT = "arXiv 2605.13779"
BAND = ("--config.policies.*.loss.band_low=0.5", "--config.policies.*.loss.band_high=2.0")


def _training(
    config: str,
    about: str,
    axes: dict,
    options: tuple,
    policies: tuple,
    figures: tuple,
    curve: str,
    minutes: float,
) -> dict:
    return {
        "config": config,
        "about": about,
        "axes": axes,
        "options": options,
        "minutes": minutes,
        "each": {"policy": policies},
        "figures": {name: f"policies/name={{policy}}/{name}" for name in figures},
        "curve": curve,
        "curve_of": "{policy}",
    }


def get_config(size: str = "cpu") -> ConfigDict:
    if size not in BASES:
        raise ValueError(f"learning size {size!r}; expected ci, cpu, gpu or pod")
    tiny, large = size == "ci", size in ("gpu", "pod")
    seeds = (0, 1) if tiny else (0, 1, 2)
    ranks = (1,) if tiny else (1, 4, 16, 64)
    base = (f"--config.base={BASES[size]}", *(("--config.dtype=bfloat16",) if large else ()))
    base += ("--config.mesh.tensor=-1", "--config.mesh.data=1") if size == "pod" else ()
    ranked = (
        "--config.policies.*.adapter.rank={rank}",
        "--config.policies.*.adapter.alpha=32",
        "--config.tensorboard=False",
    )
    short = {
        "ci": ("--config.steps=2",),
        "cpu": ("--config.steps=12", "--config.eval.samples=2"),
    }.get(size, ())
    quick = f"configs/quickstart.py{':ci' if tiny else ''}"
    four = ("adder", "bracket", "copier", "larger")
    rewards = ("reward_before", "reward_after")
    grpo = (
        *base,
        *ranked,
        *short,
        *(("--config.eval.examples=2", "--config.eval.samples=1") if tiny else ()),
    )
    grids = {
        "rl": _training(
            quick,
            "Group advantages, one update on a rollout: with ppo that is GRPO; and cispo.",
            {
                "loss": ("ppo",) if tiny else ("ppo", "cispo"),
                "rank": ranks if tiny else (*ranks, 512),
            },
            (*grpo, "--config.policies.*.loss.kind={loss}"),
            four,
            rewards,
            "reward",
            0.4 if tiny else 2.5,
        )
        | {"seeds": seeds},
    }
    if not tiny:
        sft, dpo = "configs/sft/smollm2.py", "configs/dpo/smollm2.py"
        short_two = (*base, *ranked)
        before = {name: (f"{name}_before", f"{name}_after") for name in ("loss", "margin")}
        reward = ("adder", "larger")
        grids |= {
            "sft": _training(
                sft,
                "Held-out loss.",
                {"rank": ranks},
                short_two,
                ("adder", "bracket"),
                before["loss"],
                "loss",
                0.7,
            )
            | {"seeds": seeds},
            "dpo": _training(
                dpo,
                "Held-out margin of implicit rewards.",
                {"rank": ranks},
                short_two,
                reward,
                before["margin"],
                "margin",
                1.0,
            )
            | {"seeds": seeds},
            "rl_two_updates": _training(
                quick,
                "PPO: two updates on each rollout, so that the ratio is clipped.",
                {"rank": ranks},
                (*grpo, "--config.policies.*.sampling.updates=2"),
                four,
                rewards,
                "reward",
                3.5,
            )
            | {"seeds": seeds},
            "a_sparse_base": {
                "config": "configs/bench/pretrain.py",
                "about": "The sparse base of the next grid.",
                "axes": {},
                "minutes": 1,
                "figures": {"loss_before": "loss_before", "loss_after": "loss_after"},
            },
            "replay": _training(
                "configs/tiny/grpo_moe.py",
                "The trainer's routers differ from the sampler's by noise, whose experts are"
                " replayed or not.",
                {"router_noise": (0.0, 0.3, 1.0), "replay": (True, False)},
                (
                    "--config.base={workdir}/points/a_sparse_base/base",
                    "--config.router_noise={router_noise}",
                    "--config.policies.*.sampling.replay={replay}",
                ),
                ("everything", "experts"),
                (*rewards, "gap"),
                "reward",
                0.7,
            )
            | {"seeds": seeds},
        }
        for name, band in (("eight_bits", ()), ("eight_bits_band", BAND)):
            grids[name] = _training(
                quick,
                "The sampler's base in 8 bits, the trainer's own not;"
                f" {'tokens outside the band are masked' if band else 'no band'}.",
                {"quantise": ("int8", "float8")},
                (*grpo, "--config.quantise={quantise}", "--config.trainer_quantise=", *band),
                four,
                rewards,
                "reward",
                3,
            ) | {"seeds": seeds}
            grids[name]["options"] = tuple(
                option.replace("{rank}", "16") for option in grids[name]["options"]
            )
    config = ConfigDict()
    config.bench = "sweep"
    config.sweep = "learning"
    config.size = size
    config.claim = (
        "Whether what a policy learns depends on its rank, down to 1, and whether it survives a"
        " sampler that is not the trainer."
    )
    config.grids = ConfigDict(grids)
    references = {
        "mint_grpo": {
            "who": "MinT",
            "source": MINT,
            "grid": "rl",
            "settings": {},
            "figures": {"reward_before": 0.11, "reward_after": 0.47},
            "note": "Qwen3-8B on AIME24, a moving mean of train accuracy: another task",
        }
    }
    if not tiny:
        references |= {
            "mint_dpo": {
                "who": "MinT",
                "source": MINT,
                "grid": "dpo",
                "settings": {},
                "figures": {"margin_before": -0.03, "margin_after": 30.88},
                "note": "chat pairs: another task",
            },
            "mint_replay": {
                "who": "MinT",
                "source": MINT,
                "grid": "replay",
                "settings": {"replay": True},
                "figures": {"out_of_route": 0.000013},
                "note": "30B; 0.000097 without replay",
            },
        }
    config.references = ConfigDict(references)
    curves = {"kind": "curves", "y": "reward", "panels": "policy"}
    pictures = {"rl": curves | {"grid": "rl", "by": ("loss", "rank")}}
    if not tiny:
        pictures |= {
            "sft": curves | {"grid": "sft", "y": "loss", "by": ("rank",)},
            "dpo": curves | {"grid": "dpo", "y": "margin", "by": ("rank",)},
            "rl_two_updates": curves | {"grid": "rl_two_updates", "by": ("rank",)},
            "replay": curves | {"grid": "replay", "by": ("router_noise", "replay")},
            "eight_bits": curves | {"grid": "eight_bits", "by": ("quantise",)},
            "eight_bits_band": curves | {"grid": "eight_bits_band", "by": ("quantise",)},
        }
    config.pictures = ConfigDict(pictures)
    return config
