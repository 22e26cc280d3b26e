"""``python -m warmcast.infra``: the demo where the package is on the path but not installed."""

import sys
from importlib.metadata import EntryPoint

from warmcast.manifests.command import GROUP, main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]], [EntryPoint("demo", "warmcast.infra.cli:demo", GROUP)])
