"""Objects in a bucket of S3: ``s3://bucket/prefix``.

Server and credentials are found as boto3 finds them, or are others than the origin's:
``?endpoint=https://…&region=…&profile=…``, a profile of ``~/.aws``; ``anonymous`` sends none.
"""

from __future__ import annotations

from warmcast.flows.upstreams.bucket import BucketUpstream
from warmcast.flows.upstreams.options import endpoint, flag, parse_options
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.stores.s3 import S3Access, S3Store

_OPTIONS = ("endpoint", "region", "profile", "anonymous")


def open_s3(source: str, deadline: Deadline) -> BucketUpstream:  # noqa: ARG001
    """Open a prefix of a bucket; nothing is asked yet."""
    url, _, query = source.partition("?")
    options = parse_options(url, query, _OPTIONS)
    server = options.get("endpoint")
    access = S3Access(
        endpoint=endpoint(url, server) if server else None,
        profile=options.get("profile"),
        region=options.get("region"),
        anonymous=flag(url, options, "anonymous"),
    )
    return BucketUpstream(S3Store(url, access=access, any_key=True), ask_checksums=True)
