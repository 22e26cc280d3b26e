"""A peer that speaks the protocol as far as a test wants it to, and then something else."""

from __future__ import annotations

import json
import secrets
from types import TracebackType
from typing import Any

from warmcast.loader.handshake import Answer, Ask
from warmcast.loader.registry import Presence, Registry, mailbox
from warmcast.loader.transports import Endpoint
from warmcast.manifests.deadline import Deadline

TIME = 15.0


class Impostor:
    """Registered as a sender of an identity, or asking one, by its own connection."""

    def __init__(self, registry: str, identity: str) -> None:
        self.registry = Registry(registry)
        self.deadline = Deadline.after(TIME)
        self.presence = Presence(
            sender="impostor",
            identity=identity,
            host="elsewhere",
            device="cpu",
            transports=("gloo",),
        )
        self.endpoint = Endpoint(
            worker="impostor", host="elsewhere", device="cpu", gpu="", nccl="", transports=("gloo",)
        )

    def __enter__(self) -> Impostor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.registry.close()

    def announce(self) -> None:
        self.registry.announce(self.presence, self.deadline)

    def asked(self) -> dict[str, Any]:
        """The next request that a receiver sends."""
        return self._pop(mailbox(self.presence.sender))

    def answer(self, ask: dict[str, Any], **changed: object) -> dict[str, Any]:
        """The answer that a sender would give, but for what is changed."""
        right = Answer(
            request=ask["request"],
            status="ready",
            echo=ask["nonce"] + 1,
            nonce=5,
            endpoint=self.endpoint,
            transport="gloo",
            whole=True,
        )
        return right.model_dump(mode="json") | changed

    def ask(self, layout: str, **changed: object) -> dict[str, Any]:
        """The request that a receiver would send, but for what is changed."""
        right = Ask(
            request=secrets.token_hex(16),
            identity=self.presence.identity,
            layout=layout,
            arena=True,
            endpoint=self.endpoint,
            nonce=7,
            seconds=2.0,
        )
        return right.model_dump(mode="json") | changed

    def answered(self, ask: dict[str, Any]) -> dict[str, Any]:
        """What a sender answers."""
        return self._pop(mailbox(ask["request"]))

    def put(self, owner: str, message: object, suffix: str = "") -> None:
        """Put a message, bytes as they are and all else as JSON, into somebody's mailbox."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        self.registry.push(mailbox(owner) + suffix, data, self.deadline)

    def _pop(self, box: str) -> dict[str, Any]:
        message = self.registry.pop(box, self.deadline)
        assert message is not None, "nobody wrote"
        parsed: dict[str, Any] = json.loads(message)
        return parsed
