"""Serves one base: many tenants train adapters over it and sample from them, by Tinker's and OpenAI's clients.

When everything is compiled it prints one line, ``{"ready": true, "url": ...}``, and serves until SIGTERM or Ctrl-C. What was
acknowledged is in the workdir: the same command goes on with it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from mint_jax import multihost
from mint_jax.errors import UserError
from mint_jax.jobs import common, settings
from mint_jax.jobs.common import Config
from mint_jax.jobs.hold import Hold
from mint_jax.jobs.settings import Count, Natural, Place
from mint_jax.metrics import Progress
from mint_jax.train.blocks import BlockShape
from mint_jax.train.live import SHAPES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(settings.WithCatalog):
    """What the job has.

    Attributes:
        host: where it listens; other places than loopback need keys, and a certificate or a proxy that has one.
        port: 0: any that is free.
        name: what clients call the base; empty: as base says.
        tokenizer: what Tinker's clients load the tokenizer by, a hub's name or a folder that they see; empty: the base's name.
        peft_folder: below which /v1/load_lora_adapter may read PEFT adapters; empty: nowhere.
        api_keys: folder of API keys, which python -m mint_jax.service.keys makes; empty: everybody may do everything, on loopback alone.
        hosts: names by which a server without keys is reached beside localhost and its addresses, behind a proxy say; requests whose
            Host header has another are refused.
        certificate: file of a TLS certificate with its chain; empty: no TLS.
        private_key: its file, where the certificate's has none.
        behind_tls: a proxy before the server encrypts.
        ranks: of policies: each takes the next of these, powers of two.
        slots: of policies in training on the device, for each of ranks; further ones wait in memory and on the disk.
        adapters: of revisions to be sampled on the device, for each of ranks.
        shapes: blocks, rows, tokens and targets a position of the training steps there are.
        max_rows: rows that are sampled together.
        cache_gib: of the sampler's cache, GiB at most; 0: one on a CPU, most of the free memory elsewhere.
        reuse_decoded: prompts that begin with what was drawn before, a chat's next turn say, are not read again as far as the cache has
            them; log-probabilities behind it then depend on that in the last bits (by 2e-5 at most in float32).
        host_gib: of idle policies' states in host memory, and of cached adapters, each.
        gap_s: seconds that rows which decode wait for a training step at most, where any is as short.
        idle_gap_s: the same while none decode.
        snapshot_every: updates of a policy between two snapshots of its state.
        snapshot_s: seconds after which one is taken all the same.
        session_s: seconds without a sign of life after which a session ends, and its policies leave training.
        body_mb: of a request's body, MB at most.
        tenant_requests: of one tenant in flight; more are told to come back.
        tenant_tokens: of one tenant's samples and training requests in flight, likewise; 0: any number. This and the next two are of
            tenants of which quotas.json, beside the keys, says nothing else.
        tenant_policies: of one tenant in training; 0: any number.
        tenant_gib: of one tenant's named checkpoints and training states, GiB; 0: any number.
    """

    host: str = "127.0.0.1"
    port: Natural = 8000
    name: str = ""
    tokenizer: Place = ""
    peft_folder: Place = ""
    api_keys: Place = ""
    hosts: tuple[str, ...] = ()
    certificate: Place = ""
    private_key: Place = ""
    behind_tls: bool = False
    ranks: tuple[int, ...] = (32,)
    slots: Count = 4
    adapters: Count = 16
    shapes: tuple[Any, ...] = tuple(tuple(shape) for shape in SHAPES)
    max_rows: Count = 32
    cache_gib: float = 0.0
    reuse_decoded: bool = False
    host_gib: float = 4.0
    gap_s: float = 0.5
    idle_gap_s: float = 2.0
    snapshot_every: Count = 16
    snapshot_s: float = 60.0
    session_s: float = 86400.0
    body_mb: Count = 256
    tenant_requests: Count = 1000
    tenant_tokens: Natural = 0
    tenant_policies: Natural = 0
    tenant_gib: float = 0.0


def sizes_of(config: Config) -> Any:
    """``service.server.Sizes`` of the settings.

    Raises:
        UserError: ranks or shapes that are none.
    """
    from mint_jax.service.server import Sizes

    shapes = []
    for shape in config.shapes:
        if not isinstance(shape, list | tuple) or len(shape) not in (3, 4) or not all(type(n) is int and n > 0 for n in shape):
            raise UserError(f"shapes has {shape!r}; expected blocks, rows and tokens of a step, and targets a position, as in (4, 1, 1024)")
        shapes.append(BlockShape(*shape))
    if not config.ranks:
        raise UserError("ranks is empty; expected the ranks that policies may have, as in (8, 32)")
    ranks: list[int] = list(config.ranks)
    return Sizes(
        slots=dict.fromkeys(ranks, int(config.slots)),
        adapters=dict.fromkeys(ranks, int(config.adapters)),
        shapes=shapes,
        max_rows=config.max_rows,
        cache_bytes=common.cache_bytes(config),
        reuse_decoded=config.reuse_decoded,
        host_bytes=int(config.host_gib * 2**30),
        gap_s=config.gap_s,
        idle_gap_s=config.idle_gap_s,
        every=config.snapshot_every,
        every_s=config.snapshot_s,
        session_s=config.session_s,
    )


def run(config: Config, workdir: Path) -> dict[str, Any]:
    """Serves until it is told to stop."""
    settings.complete(config)
    if (count := multihost.count()) > 1:
        raise UserError(f"the service is of one process, here are {count}: start one over all its devices")
    try:
        from mint_jax.service import app, binding, gate
        from mint_jax.service.keys import Keys
        from mint_jax.service.quotas import Quota, Quotas
        from mint_jax.service.server import Server
    except ImportError as error:
        raise UserError(f"the service needs {error.name}: install mint-jax[serve]") from None
    keys = Keys(Path(config.api_keys)) if config.api_keys else None
    binding.check_binding(config.host, keys, bool(config.certificate) or config.behind_tls)
    binding.check_hosts(config.hosts)
    sizes = sizes_of(config)
    default = Quota(
        tokens=config.tenant_tokens or None, policies=config.tenant_policies or None, bytes=int(config.tenant_gib * 2**30) or None
    )
    quotas = Quotas(default, Path(config.api_keys) if config.api_keys else None)
    limits = gate.Limits(body_bytes=config.body_mb << 20, tenant=config.tenant_requests, held_bytes=4 * config.body_mb << 20)
    held = Hold(workdir)
    try:
        common.save_config(config, workdir)
        base = common.open_base(config)
        named = {"name": config.name or None, "tokenizer": config.tokenizer or None}
        folder = Path(config.peft_folder) if config.peft_folder else None
        server = Server(base, workdir, sizes, config.catalog or None, config.payloads or None, **named, peft_folder=folder, quotas=quotas)
        progress: list[Progress] = []

        def warmed(what: str, done: int, total: int) -> None:
            if not done:
                progress.append(Progress("compiling", total))
            progress[-1].update(done, what)

        server.warm(warmed)
        tls = {"ssl_certfile": config.certificate, "ssl_keyfile": config.private_key or None} if config.certificate else {}

        def started(port: int) -> None:
            where = f"[{config.host}]" if ":" in config.host else config.host
            print(json.dumps({"ready": True, "url": f"{'https' if tls else 'http'}://{where}:{port}"}), flush=True)

        with server.running():
            web = app.Web(server, app.make(server, keys, limits, config.hosts), config.host, config.port, started, **tls)
            web.run()
        if not web.started:
            raise UserError(f"port {config.port} of {config.host} cannot be used: choose another --config.port, or 0 for any that is free")
    finally:
        held.release()
    counts = {"tokens_sampled": server.engine.counts["drawn_tokens"], "training_steps": server.live.counts["steps"]}
    return {"job": "serve", "stopped_by": web.stopped_by, **counts}
