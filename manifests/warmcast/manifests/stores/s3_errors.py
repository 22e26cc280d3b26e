"""What the answers of S3 servers, and the failures of botocore, mean as errors of ours."""

from __future__ import annotations

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
)

from warmcast.manifests.errors import (
    CredentialsMissing,
    CredentialsRefused,
    IntegrityError,
    NotFound,
    PreconditionFailed,
    StoreError,
    StoreFull,
    WarmcastError,
)
from warmcast.manifests.stores.http import Transient

_FULL = {"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioStorageQuotaExceeded"}
_CORRUPT = {
    "BadDigest",
    "InvalidDigest",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_REFUSED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"}
# A conflict between two conditional writes is settled by asking again.
_BUSY = {
    "ConditionalRequestConflict",
    "OperationAborted",
    "RequestTimeout",
    "SlowDown",
    "Throttling",
}


def error_of(where: str, status: int, code: str, retry_after: str | None = None) -> WarmcastError:
    """The error that an answer's HTTP status and S3 error code mean."""
    found = f"{status} {code}" if code and not code.isdigit() else str(status)
    if status == 507 or code in _FULL:
        return StoreFull(where, found=found, do="free space, or raise the quota")
    if code in _CORRUPT:
        return IntegrityError(
            where, expected="the bytes promised", found=found, do="send them again"
        )
    if status in (401, 403) or code in _REFUSED:
        return CredentialsRefused(
            where,
            expected="permission",
            found=found,
            do="check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and what they may do",
        )
    if status == 412:
        return PreconditionFailed(where, expected="the version named", found="another")
    if status == 404:
        missing = "no such bucket" if code == "NoSuchBucket" else "none"
        return NotFound(where, expected="an object", found=missing)
    if status >= 500 or status == 429 or code in _BUSY:
        seconds = retry_after if retry_after and retry_after.isdigit() else None
        return Transient(where, found, float(seconds) if seconds else None)
    return StoreError(where, expected="success", found=found)


def error_of_client(where: str, cause: ClientError) -> WarmcastError:
    """The error that an answer, as botocore raises it, means."""
    metadata = cause.response.get("ResponseMetadata", {})
    return error_of(
        where,
        metadata.get("HTTPStatusCode", 0),
        cause.response.get("Error", {}).get("Code", ""),
        metadata.get("HTTPHeaders", {}).get("retry-after"),
    )


def error_of_botocore(where: str, cause: BotoCoreError) -> StoreError:
    """The error that botocore's own failure means."""
    if isinstance(cause, NoCredentialsError | PartialCredentialsError | CredentialRetrievalError):
        return CredentialsMissing(
            where,
            expected="credentials",
            found=str(cause),
            do="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
        )
    return StoreError(where, expected="a request that can be made", found=str(cause))
