"""Who may have what: tokens, and names that lead nowhere.

What is refused is counted, and nothing that a request says becomes a path.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.loader.node.fleet import CHUNK, Agent, Fleet, Model, publish, read
from warmcast.loader.node import tokens
from warmcast.loader.node.tokens import LEEWAY, LIFETIME, LONGEST, NotAllowed
from warmcast.loader.node.tokens import Fleet as Key
from warmcast.manifests.deadline import Deadline
from warmcast.manifests.errors import UsageError

MANIFEST = "0123456789abcdef" * 4
NOW = 1_700_000_000
KEY = Key(b"the key of a fleet, 32 bytes or more")


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the clock by which tokens are made and checked."""
    return lambda now: monkeypatch.setattr(tokens.time, "time", lambda: now)


def test_a_token_is_pinned(at: Callable[[float], None]):
    """Agents of two versions have to understand each other."""
    at(NOW)
    assert KEY.token(MANIFEST) == PINNED
    assert KEY.check(PINNED) == MANIFEST


@pytest.mark.parametrize(
    ("off", "allowed"),
    [
        (0, True),
        (LIFETIME + LEEWAY, True),
        (LIFETIME + LEEWAY + 1, False),
        (-LONGEST - LEEWAY + LIFETIME, True),
        (-LONGEST - LEEWAY + LIFETIME - 1, False),
        (1e9, False),
        (-1e9, False),
    ],
)
def test_clocks_that_differ(at: Callable[[float], None], off: float, allowed: bool):
    at(NOW)
    token = KEY.token(MANIFEST)
    at(NOW + off)
    if allowed:
        assert KEY.check(token) == MANIFEST
    else:
        with pytest.raises(NotAllowed, match="s from now; compare the nodes' clocks"):
            KEY.check(token)
    assert KEY.check(KEY.token(MANIFEST)) == MANIFEST  # after the jump it is as before


def test_no_token_is_good_for_longer_than_a_load(at: Callable[[float], None]):
    at(NOW)
    token = KEY.token(MANIFEST, lifetime=1e9)
    at(NOW + LONGEST + LEEWAY + 1)
    with pytest.raises(NotAllowed):
        KEY.check(token)


ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_."


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 200), st.sampled_from(ALPHABET + "=+/ \n\0é٣"))
def test_no_token_with_another_character_passes(place: int, character: str):
    token = KEY.token(MANIFEST)
    place %= len(token)
    # Of the last one too, of which two bits say nothing of the signature's bytes.
    assume(token[place] != character)
    with pytest.raises(NotAllowed):
        KEY.check(token[:place] + character + token[place + 1 :])


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 200), st.text(max_size=3), st.integers(0, 3))
def test_no_token_with_something_put_in_or_left_out_passes(place: int, text: str, gone: int):
    token = KEY.token(MANIFEST)
    altered = token[: place % len(token)] + text + token[place % len(token) + gone :]
    assume(altered != token)
    with pytest.raises(NotAllowed):
        KEY.check(altered)


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=32, max_size=64))
def test_no_token_of_another_key_passes(key: bytes):
    assume(key != b"the key of a fleet, 32 bytes or more")
    with pytest.raises(NotAllowed, match="signature of this fleet"):
        KEY.check(Key(key).token(MANIFEST))


def test_a_short_key_is_refused():
    with pytest.raises(UsageError, match="32 bytes at least, found 31"):
        Key(b"k" * 31)


# Requests


@pytest.fixture(scope="module")
def warm(shared: Fleet) -> Model:
    """A model that the nodes have."""
    model = publish(shared.origin, 50)
    read(shared.agents[0], shared.store, model)
    return model


def ask(agent: Agent, path: str, **headers: str) -> tuple[int, bytes]:
    """The status and body of an answer for nodes, asked for byte by byte as it is written."""
    connection = http.client.HTTPConnection(urlsplit(agent.url).netloc, timeout=20)
    try:
        connection.putrequest("GET", path)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def refused(agent: Agent) -> int:
    return agent.metrics()["warmcast_refused_total"]


def test_a_token_for_a_manifest_opens_its_chunks(shared: Fleet, warm: Model):
    a, _ = shared.agents
    token = Key.read(shared.key).token(warm.manifest.digest)
    chunk = f"/chunks/{warm.file.sha256}/1"
    status, data = ask(a, chunk, Authorization=f"Bearer {token}")
    assert (status, len(data)) == (200, CHUNK)
    part = ask(a, f"{chunk}?begin=100&length=50", Authorization=f"Bearer {token}")
    assert part == (200, data[100:150])
    manifest = f"/manifests/{warm.manifest.digest}"
    assert ask(a, manifest, Authorization=f"Bearer {token}") == (200, warm.manifest.data)


def test_refs_are_told_to_nodes_alone(shared: Fleet, warm: Model):
    """By a token that no worker can have: theirs name a manifest."""
    a, _ = shared.agents
    key = Key.read(shared.key)
    assert a.client.resolve(warm.ref, Deadline.after(20)) == warm.manifest.digest
    token = key.token(tokens.NO_MANIFEST)
    status, data = ask(a, f"/refs/{warm.ref}", Authorization=f"Bearer {token}")
    assert (status, json.loads(data)["manifest"]) == (200, warm.manifest.digest)
    assert ask(a, "/refs/none@test", Authorization=f"Bearer {token}")[0] == 404
    assert ask(a, "/refs/..%2f..%2flock", Authorization=f"Bearer {token}")[0] == 404
    assert ask(a, f"/chunks/{warm.file.sha256}/0", Authorization=f"Bearer {token}")[0] != 200
    before = refused(a)
    for other in (key.token(warm.manifest.digest), Key(b"x" * 40).token(tokens.NO_MANIFEST)):
        assert ask(a, f"/refs/{warm.ref}", Authorization=f"Bearer {other}")[0] == 403
    assert refused(a) == before + 2


def test_who_has_no_right_gets_nothing(shared: Fleet, warm: Model, monkeypatch: pytest.MonkeyPatch):
    a, _ = shared.agents
    digest = warm.manifest.digest
    key = Key.read(shared.key)
    other = publish(shared.origin, 51)
    right, now = key.token(digest), time.time()
    with monkeypatch.context() as patch:
        patch.setattr(tokens.time, "time", lambda: now - 3600)
        expired = key.token(digest)
        patch.setattr(tokens.time, "time", lambda: now + 3 * 3600)
        early = key.token(digest)
    given = {
        "none": {},
        "empty": {"Authorization": ""},
        "no bearer's": {"Authorization": f"Basic {right}"},
        "malformed": {"Authorization": "Bearer w1.x.y.z"},
        "cut": {"Authorization": f"Bearer {right[:-1]}"},
        "long": {"Authorization": f"Bearer {right}{'x' * 4000}"},
        "expired": {"Authorization": f"Bearer {expired}"},
        "from a clock that is ahead": {"Authorization": f"Bearer {early}"},
        "another fleet's": {"Authorization": f"Bearer {Key(b'x' * 40).token(digest)}"},
        "another manifest's": {"Authorization": f"Bearer {key.token(other.manifest.digest)}"},
    }
    origin = a.metrics()["warmcast_origin_bytes_total"]
    for kind, headers in given.items():
        for path in (f"/chunks/{warm.file.sha256}/0", f"/manifests/{digest}"):
            before = refused(a)
            status, data = ask(a, path, **headers)
            assert (kind, path, status, len(data) < 400) == (kind, path, 403, True)
            assert refused(a) == before + 1, (kind, path)
    told = a.metrics()
    assert told["warmcast_origin_bytes_total"] == origin


def test_a_manifest_that_is_nowhere_gives_no_right(shared: Fleet, warm: Model):
    a, _ = shared.agents
    token = Key.read(shared.key).token(MANIFEST)
    status, _ = ask(a, f"/chunks/{warm.file.sha256}/0", Authorization=f"Bearer {token}")
    assert status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/chunks/../../../etc/passwd",
        "/chunks/%2e%2e/%2e%2e/etc/passwd",
        "/chunks/..%2f..%2fkey/0",
        "/chunks/{sha}/../../../lock",
        "/chunks/{sha}/%2e%2e%2f0",
        "/chunks/{sha}%00/0",
        "/chunks/{upper}/0",
        "/chunks/{sha}/-1",
        "/chunks/{sha}/1e3",
        "/chunks/{sha}/12345678",
        "/chunks/{sha}/999999",
        "/chunks/{sha}/0?begin=0&length=65537",
        "/chunks/{sha}/0?begin=-1&length=5",
        "/chunks/{sha}/0?begin=5",
        "/chunks/{sha}/0?begin=0&length=0",
        "/manifests/../lock",
        "/manifests/%2e%2e/lock",
        "/manifests/..%2flock",
        "/files/{digest}",
        "/others/{digest}",
        "/prefetch/{digest}",
        "//etc/passwd",
        "/",
    ],
)
def test_names_that_lead_nowhere(shared: Fleet, warm: Model, path: str):
    a, _ = shared.agents
    sha, digest = warm.file.sha256, warm.manifest.digest
    token = Key.read(shared.key).token(digest)
    asked = path.format(sha=sha, upper=sha.upper(), digest=digest)
    status, data = ask(a, asked, Authorization=f"Bearer {token}")
    assert status == 404
    assert b"root:" not in data
    assert shared.key.read_bytes() not in data


PINNED = (
    "w1.0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef.1700000300."
    "saoQPPlrPjyw6C3h1vcYnFdKxzzMtG5KuuiTWlzBulo"
)
