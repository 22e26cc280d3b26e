"""``python -m warmcast.infra.bench``: where the package is on the path but not installed."""

import sys
from importlib.metadata import EntryPoint

from warmcast.manifests.command import GROUP, main

if __name__ == "__main__":
    main(["bench", *sys.argv[1:]], [EntryPoint("bench", "warmcast.infra.bench.cli:bench", GROUP)])
