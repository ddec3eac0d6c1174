"""Programs of a job on a pod that is not attached: abstract arguments with shardings, and how each
is compiled. Nothing here allocates.

Axes: P policies, B rows of a policy, T tokens, M targets of a row, N adapters, Q prompts, G
rollouts of a prompt, S tokens of a prompt, C new tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mint_jax import params as params_lib
from mint_jax import sharding
from mint_jax.aot.settings import RolloutShape, TrainShape
from mint_jax.errors import UserError
from mint_jax.lora import tree as lora_tree
from mint_jax.lora.tree import AdapterConfig
from mint_jax.models import transformer
from mint_jax.models.config import ModelConfig
from mint_jax.models.paged import PAGE, RUN, TEAM, teams_at_once
from mint_jax.rollout import device, plans
from mint_jax.rollout.pages import pages_for
from mint_jax.rollout.samples import longest_table
from mint_jax.train import state as state_lib
from mint_jax.train import step
from mint_jax.train.batch import Batch
from mint_jax.train.config import LossConfig
from mint_jax.train.losses import Targets, stack_coefs

Tree = Any


@dataclasses.dataclass(frozen=True)
class Program:
    """Function with everything its compilation depends on."""

    name: str  # `train`, `optim`, `prefill` or `decode`
    fn: Callable[..., Any]  # function of `args`
    args: tuple[Any, ...]  # abstract arguments, each leaf with its sharding
    donated: tuple[int, ...]  # indices of arguments whose buffers the outputs reuse
    out: Any  # output shardings; donation requires those of the donated argument
    tokens: int  # tokens that one call reads or samples
    # true if its outermost loop of unknown length takes one step in a measured call
    steps: bool = False
    # trip counts of loops of data-dependent length, by scope; see `hlo.Module`
    trips: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # bytes of the arguments on each device that a call does not read, less those it writes there
    unread: int = 0

    def trace(self, mesh: Mesh) -> Any:
        """Returns the traced function, with its jaxpr and ``lower``."""
        with jax.set_mesh(mesh):
            call = jax.jit(self.fn, donate_argnums=self.donated, out_shardings=self.out)
            return call.trace(*self.args)


class Plan:
    """One base with its adapters on one mesh, as abstract trees; training adapters are float32.

    Raises:
        UserError: the mesh does not divide a dimension of the base or the adapters.
    """

    def __init__(
        self, cfg: ModelConfig, mesh: Mesh, dtype: Any, adapter: AdapterConfig, quantise: str = ""
    ):
        self.cfg, self.mesh, self.dtype, self.adapter = cfg, mesh, dtype, adapter
        self.specs = transformer.abstract(cfg, dtype, quantise)
        self.params = params_lib.abstract(self.specs, sharding.shardings(self.specs, mesh))
        factors = lora_tree.stack_specs(self.specs, adapter.names, adapter.bucket, 1)
        self.factors = {
            path: sharding.sharding_of(spec, mesh)
            for path, spec in params_lib.leaves_with_path(factors)
        }

    @property
    def base_bytes(self) -> int:
        """Bytes of the base on each device."""
        return device_bytes(self.params)

    def programs(self, train: TrainShape, rollout: RolloutShape) -> Iterator[Program]:
        """Returns the four programs of reinforcement learning."""
        yield from self.training(train)
        yield from self.sampling(rollout)

    def training(self, shape: TrainShape) -> tuple[Program, Program]:
        """Returns ``forward_backward`` and ``optim_step`` of every policy."""
        self._check_rows("train.policies x train.rows", shape.policies * shape.rows)
        P, bucket = shape.policies, self.adapter.bucket
        state = self._place(jax.eval_shape(lambda: state_lib.empty(self.specs, [self.adapter] * P)))
        slots = {bucket: self._whole((P,), jnp.int32)}
        coefs = self._plan(stack_coefs([LossConfig()] * P))
        hyper = {bucket: self._plan(state_lib.stack_hyper([], P))}
        fn = functools.partial(step.forward_backward, cfg=self.cfg, remat=shape.remat)
        tokens = P * shape.rows * shape.tokens
        out = (_shardings(state), None, None)
        args = (self.params, state, self._batch(shape), coefs, slots)
        optim = step.optim_step, (state, slots, hyper), (0,), out[:2], 0
        return (
            Program("train", fn, args, (1,), out, tokens),
            Program("optim", *optim, trips={"policies": P}),
        )

    def sampling(self, shape: RolloutShape) -> tuple[Program, Program]:
        """Returns ``prefill`` and ``decode`` at full length: last blocks, and last tokens."""
        parts = device.page_parts(self.cfg, self.mesh)
        self._check_rows("rollout.prompts", shape.prompts, parts)
        rows, blocks = shape.prompts * shape.rollouts, parts * -(-shape.blocks // parts)
        bucket, table = self.adapter.bucket, longest_table(shape.prompt_tokens + shape.new_tokens)
        resident = self.specs, self.adapter.names, bucket, shape.adapters
        stacks = {bucket: self._place(jax.eval_shape(lambda: lora_tree.empty_stack(*resident)))}
        # A rollout's first token is the prompt's last; its last token is sampled and never read.
        shared, own = pages_for(shape.prompt_tokens - 1, PAGE), pages_for(shape.new_tokens, PAGE)
        total_pages = shape.prompts * shared + rows * own
        dtype, lanes = jnp.dtype(self.dtype), device.lanes(self.mesh)
        kinds, windows = device.kinds(self.cfg), self.cfg.windows
        slots = plans.state_slots(rows // parts) * parts if "states" in kinds else 0
        near, reach = total_pages, 0
        if windows is not None:
            each = plans.near_pages(windows.size, rows // parts, blocks // parts)
            near, reach = min(near, each * parts), pages_for(windows.size - 1, PAGE) + 1
        specs = device.pool_specs(self.cfg, total_pages, dtype, False, lanes, slots, near)
        where = device.pool_shardings(self.cfg, specs, self.mesh)
        pool = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), specs, where
        )
        of_blocks = plans.blocks_plan([[]] * parts, blocks, table, stacks, kinds=kinds)
        reading, sizes = self._plan(of_blocks), (rows, parts, table, self.cfg.vocab_size)
        drawn = plans.rows_plan([], *sizes, stacks, kinds)[0]
        drawing = self._plan(drawn), self._whole((), jnp.int32)
        fill = functools.partial(device.prefill, cfg=self.cfg)
        draw = functools.partial(device.decode, cfg=self.cfg)
        past, own_runs = -(-(shape.prompt_tokens - 1) // RUN), -(-shape.new_tokens // RUN)
        here, teams = rows // parts, shape.prompts // parts * -(-shape.rollouts // TEAM)
        teams = teams if shape.rollouts > 1 else 0
        loops = {
            "runs": own_runs if teams else past + own_runs,
            "teams": -(-teams // teams_at_once(here, here)),
            "teams/runs": past,
            "indexer": past + own_runs,
        }
        of_states, of_near = (
            device_bytes(device.part_of(pool, self.cfg, kind)) for kind in ("states", "near")
        )
        of_pages = device_bytes(pool) - of_states - of_near

        def idle(rows: int) -> int:
            """Returns the bytes of states, less one reading and one writing for each row, and those
            of near pages that the windows of rows do not reach.
            """
            states = of_states - 2 * rows * of_states // max(slots, 1)
            return states + of_near * (near - min(near, rows * reach)) // near

        # of prefill, which reads one prompt of each part at least
        unread = of_pages * (total_pages - parts * shared) // total_pages + idle(parts)
        args, reads = (self.params, stacks, pool), {"runs": past, "indexer": past}
        if windows is not None:
            within = {"window/runs": -(-windows.size // RUN)}
            reads, loops = reads | within, loops | within
        filling = fill, (*args, reading), (2,), (where, None), blocks * PAGE
        decoding = draw, (*args, *drawing), (2,), (where, None), rows
        return (
            Program("prefill", *filling, trips=reads, unread=unread),
            Program("decode", *decoding, steps=True, trips=loops, unread=idle(rows)),
        )

    def _batch(self, shape: TrainShape) -> Batch:
        P, B = shape.policies, shape.rows
        ways = sharding.ways("batch", self.mesh)
        axes = (None, None if B % ways else "batch", None) if P % ways else ("batch", None, None)

        def rows(width: int, dtype: Any = jnp.int32) -> Any:
            return self._split((P, B, width), axes, dtype)

        weights, advantages, old_logp, ref_logp = [rows(shape.targets, jnp.float32)] * 4
        pairs: Any = self._whole((P, 0), jnp.float32)
        loss = Targets(weights, advantages, old_logp, ref_logp, rows(shape.targets), pairs)
        tokens, positions, own, parent = (rows(shape.tokens) for _ in range(4))
        return Batch(tokens, positions, own, parent, rows(shape.targets), rows(shape.targets), loss)

    def _check_rows(self, what: str, rows: int, ways: int | None = None) -> None:
        ways = sharding.ways("batch", self.mesh) if ways is None else ways
        if rows % ways:
            raise UserError(
                f"{what} is {rows} rows, which the mesh splits {ways} ways: choose a multiple, or a"
                " smaller fsdp"
            )

    def _split(self, shape: tuple[int, ...], axes: tuple[Any, ...], dtype: Any) -> Any:
        where = NamedSharding(self.mesh, sharding.partition(axes, self.mesh))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return self._split(shape, (None,) * len(shape), dtype)

    def _plan(self, plan: Tree) -> Tree:
        return jax.tree.map(lambda x: self._whole(np.shape(x), x.dtype), plan)

    def _place(self, tree: Tree) -> Tree:
        """Returns abstract adapters or training state, split like the base where it is."""
        whole = NamedSharding(self.mesh, PartitionSpec())

        def place(keys: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            path = "/".join(k.key for k in keys if isinstance(getattr(k, "key", None), str))
            spec = self.factors.get(path, whole).spec
            own = PartitionSpec(*spec[max(0, len(spec) - leaf.ndim) :])
            where = NamedSharding(self.mesh, own)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree_util.tree_map_with_path(place, tree)


def device_bytes(tree: Tree) -> int:
    """Returns the bytes of abstract arrays on each device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _shardings(tree: Tree) -> Tree:
    """Returns output shardings equal to those of the arguments."""
    return jax.tree.map(lambda x: x.sharding, tree)
