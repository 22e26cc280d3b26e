"""A worker process: loads, serves, tells what it did on standard output, line by line.

Standard input is its leash: it goes on while that is open. One JSON object is the argument.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from tests.loader.models import bits
from warmcast.loader import Loader
from warmcast.manifests.errors import WarmcastError
from warmcast.manifests.identity import Mesh


def main(options: dict[str, Any]) -> None:
    """Load ``model`` (a name in ``tests.loader.models``) and serve it until standard input ends."""
    build = getattr(importlib.import_module("tests.loader.models"), options["model"])
    mesh = Mesh.grid(*options["mesh"]) if options.get("mesh") else None
    loader = Loader.from_env()
    with loader.skeleton():
        model = build()
    try:
        report = loader.load(model, options["ref"], mesh=mesh, **options.get("load", {}))
    except WarmcastError as cause:
        tell({"error": type(cause).__name__, "message": str(cause)})
        raise SystemExit(1) from None
    if options.get("serve", True):
        loader.serve(model)
    state = {name: bits(tensor)[2].hex() for name, tensor in model.state_dict().items()}
    tell({"report": report.to_json(), "state": state})
    sys.stdin.read()
    loader.close()


def tell(value: dict[str, Any]) -> None:
    """One line of JSON."""
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
