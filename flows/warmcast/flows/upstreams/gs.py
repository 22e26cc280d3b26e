"""Objects in a bucket of Google Cloud Storage: ``gs://bucket/prefix``.

Server and credentials are found as Google's libraries find them, or are others than the origin's:
``?endpoint=https://…&credentials=FILE``; ``anonymous`` sends none, for public buckets. A server at
``http://`` gets none either.
"""

from __future__ import annotations

from warmcast.flows.upstreams.bucket import BucketUpstream
from warmcast.flows.upstreams.options import endpoint, flag, parse_options
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores.gcs import GcsStore
from warmcast.manifests.stores.gcs_access import GcsAccess

_OPTIONS = ("endpoint", "credentials", "anonymous")


def open_gs(source: str, deadline: Deadline) -> BucketUpstream:  # noqa: ARG001
    """Open a prefix of a bucket; nothing is asked yet."""
    url, _, query = source.partition("?")
    options = parse_options(url, query, _OPTIONS)
    server = options.get("endpoint")
    access = GcsAccess(
        endpoint=endpoint(url, server) if server else None,
        credentials=options.get("credentials"),
        anonymous=flag(url, options, "anonymous"),
    )
    return BucketUpstream(GcsStore(url, access=access, any_key=True), ask_checksums=False)
