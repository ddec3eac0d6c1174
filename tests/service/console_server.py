"""A server with keys for the console's checks in a browser: prints its url and keys as one line of
JSON, and ends with its input.

python -m tests.service.console_server FOLDER [BASE]
"""

import json
import os
import sys
from pathlib import Path

import numpy as np

from mint_jax.mesh import single_device_mesh
from mint_jax.models import base as base_lib
from mint_jax.service import keys as keys_lib
from mint_jax.service.keys import Keys
from tests.service.console_world import furnish, train
from tests.service.sites import Site

SCOPES = {"ann": ("read", "sample", "train"), "reader": ("read",), "root": keys_lib.SCOPES}


def main(folder: Path, base: str = "tiny-random") -> None:
    os.environ["TINKER_TELEMETRY"] = "0"
    rng = np.random.default_rng()
    loaded = base_lib.load(base, single_device_mesh())
    secrets = {tenant: keys_lib.add(folder, tenant, scopes)[1] for tenant, scopes in SCOPES.items()}
    site = Site(loaded, folder / "server", keys=Keys(folder))
    furnish(site.server.catalog, loaded, rng)
    model = train(site, secrets["ann"], rng, 24)
    print(json.dumps({"url": site.url, "keys": secrets, "model": model}), flush=True)
    sys.stdin.read()
    site.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
