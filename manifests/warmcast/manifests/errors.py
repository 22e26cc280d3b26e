"""Every error of the deployment's bytes, in one tree.

    WarmcastError                 a failed job: exit code 1
    ├── UsageError                a wrong argument, option or environment variable: exit code 2
    ├── DeadlineExceeded          a blocking call outlived the time it was given
    ├── InvalidData               bytes that came in do not mean what they should
    │   ├── InvalidHeader         a safetensors header
    │   └── InvalidManifest       a manifest, or a record beside it
    ├── IntegrityError            bytes differ from the checksum they were promised with
    └── StoreError                the object store did not do what was asked
        ├── NotFound              no such object, bucket or folder
        ├── PreconditionFailed    somebody else wrote first
        ├── CredentialsMissing    no credentials were configured
        ├── CredentialsRefused    the store refused the credentials
        ├── StoreFull             no space, or no quota, is left
        └── StoreUnreachable      no answer in time, or a connection that broke

A message is one line with what was expected, what was found and what to do; whatever came from
outside stands in it short and printable.
"""

from __future__ import annotations

_LONGEST = 500


def one_line(text: object) -> str:
    """``text`` as part of a message: one line, at most 500 characters, only printable ones.

    Names and values from hostile files reach terminals and logs through here.
    """
    words = str(text)[: 2 * _LONGEST].split()
    line = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in " ".join(words))
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1]}…"


class WarmcastError(Exception):
    """The root of the tree; ``exit_code`` is what a command that fails with it returns."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        do: str | None = None,
    ) -> None:
        """Build the one-line message from its parts.

        ``what`` names the thing that is wrong (a path, a field, a URL); ``expected``, ``found``
        and ``do`` (what the reader should do now) are left out where they add nothing.
        """
        parts = [
            f"{label} {one_line(value)}"
            for label, value in (("expected", expected), ("found", found))
            if value is not None
        ]
        message = f"{one_line(what)}: {', '.join(parts)}" if parts else one_line(what)
        super().__init__(f"{message}; {one_line(do)}" if do else message)


class UsageError(WarmcastError):
    """A wrong argument, option or environment variable."""

    exit_code = 2


class DeadlineExceeded(WarmcastError, TimeoutError):
    """A blocking call outlived the time it was given."""


class InvalidData(WarmcastError, ValueError):
    """Bytes that came in do not mean what they should."""


class InvalidHeader(InvalidData):
    """A safetensors header that breaks the format's rules."""


class InvalidManifest(InvalidData):
    """A manifest, ref or record that breaks the format's rules; the message names the field."""


class IntegrityError(WarmcastError):
    """Bytes differ from the checksum they were promised with."""


class StoreError(WarmcastError):
    """The object store did not do what was asked."""


class NotFound(StoreError):
    """No such object, bucket or folder."""


class PreconditionFailed(StoreError):
    """Somebody else wrote the object first."""


class CredentialsMissing(StoreError):
    """No credentials were configured for the store."""


class CredentialsRefused(StoreError):
    """The store refused the credentials."""


class StoreFull(StoreError):
    """No space, or no quota, is left in the store."""


class StoreUnreachable(StoreError):
    """The store gave no answer in time, or its connection broke."""
