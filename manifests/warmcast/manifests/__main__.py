"""``python -m warmcast.manifests``: the ``warmcast`` command, by the interpreter that is named."""

from warmcast.manifests.command import main

main()
