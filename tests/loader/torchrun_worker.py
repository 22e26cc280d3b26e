"""A rank under torchrun: loads its part from the origin and serves it, then boots again beside it.

One JSON object is the argument: ``ref`` and ``mesh``. What each load did goes to standard output.
"""

from __future__ import annotations

import json
import os
import sys

from tests.loader.models import bits
from tests.loader.test_groups import Parallel
from warmcast.loader import Loader
from warmcast.manifests.identity import Mesh


def main() -> None:
    """Load twice, the second time as a worker that knows nothing of the first."""
    options = json.loads(sys.argv[1])
    mesh = Mesh.grid(*options["mesh"])
    with Loader.from_env() as first, Loader.from_env() as second:
        for loader in (first, second):
            with loader.skeleton():
                model = Parallel(mesh.size)
            report = loader.load(model, options["ref"], mesh=mesh)
            loader.serve(model)
            told = {
                "rank": report.rank,
                "route": report.route,
                "down.weight": bits(model.down.weight)[2].hex(),
            }
            os.write(1, (json.dumps(told) + "\n").encode())


if __name__ == "__main__":
    main()
