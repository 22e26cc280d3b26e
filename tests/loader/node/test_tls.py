"""TLS between nodes: who is vouched for, who is not, and certificates that change."""

from __future__ import annotations

import datetime
import http.client
import ssl
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.loader.node.fleet import Agent, Fleet, load, publish, read, told
from warmcast.loader.node.peers import Certificates

_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_END = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


class Authority:
    """Vouches for nodes; names play no part."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self._name, self._key, authority=True)

    def write(self, folder: Path, name: str) -> Certificates:
        """A node's certificate and key, and the authority's, each in its place at once."""
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        certificate = self._sign(subject, key, authority=False)
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        pem = serialization.Encoding.PEM
        files = {
            "tls.key": private,
            "tls.crt": certificate.public_bytes(pem),
            "ca.crt": self.certificate.public_bytes(pem),
        }
        for file, data in files.items():
            put(folder / file, data)
        return Certificates(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, authority: bool
    ) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(_BEGIN)
            .not_valid_after(_END)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )


def put(path: Path, data: bytes) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


def words(files: Certificates) -> dict[str, object]:
    return {"tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.authority}


def healthy(agent: Agent, authority: Path) -> bool:
    """Whether an agent answers somebody who has no certificate and trusts the authority alone."""
    context = ssl.create_default_context(cafile=authority)
    context.check_hostname = False
    connection = http.client.HTTPSConnection(
        urlsplit(agent.url).netloc, timeout=20, context=context
    )
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == 200
    except ssl.SSLCertVerificationError:
        return False
    finally:
        connection.close()


def test_nodes_that_one_authority_vouches_for(fleet: Fleet, tmp_path: Path):
    """One of another authority is passed by, and passes by the others; all load right."""
    ours, theirs = Authority("ours"), Authority("theirs")
    for name, authority in (("a", ours), ("b", ours), ("c", theirs)):
        fleet.begin(name, **words(authority.write(tmp_path / name, name)))
    a, b, c = fleet.agents
    for agent in fleet.agents:
        agent.wait_ready()
        assert agent.url.startswith("https://")
    fleet.all_know(3)
    model = publish(fleet.origin, 100)
    report = load(fleet.origin, a, model)
    assert " ring" in told(report)
    assert "c is passed by for 30 s" in a.log
    assert "CERTIFICATE_VERIFY_FAILED" in a.log
    assert "b is passed by" not in a.log
    assert told(load(fleet.origin, c, model)).endswith(f"chunks: {len(model.chunks)} origin")
    assert healthy(b, tmp_path / "a" / "ca.crt")
    assert not healthy(b, tmp_path / "c" / "ca.crt")
    plain = http.client.HTTPConnection(urlsplit(a.url).netloc, timeout=20)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/metrics")
        plain.getresponse()
    plain.close()


def test_certificates_that_change(fleet: Fleet, tmp_path: Path):
    """Half of a change changes nothing; a whole one counts from the next connection on."""
    old, new = Authority("old"), Authority("new")
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        fleet.begin(folder.name, **words(old.write(folder, folder.name)))
    a, b = agents = fleet.agents
    for agent in agents:
        agent.wait_ready()
    fleet.all_know(2)
    models = [publish(fleet.origin, 101 + n) for n in range(3)]
    assert read(a, fleet.store, models[0])["ring"] > 0

    right = (folders[0] / "tls.crt").read_bytes()
    put(folders[0] / "tls.crt", right[: len(right) // 2])
    (folders[0] / "tls.key").rename(folders[0] / "gone")
    # b forgets its connections, so that a has to make new ones.
    assert b.end() == 0
    fleet.all_know(1)
    b.restart()
    fleet.all_know(2)
    assert read(a, fleet.store, models[1])["ring"] > 0
    a.wait(lambda _: "the certificates that there are stay" in a.log, "says that it goes on")
    assert healthy(a, folders[0] / "ca.crt")
    assert "is passed by" not in a.log

    for folder in folders:
        new.write(folder, folder.name)
    for agent in agents:
        agent.wait(lambda _, a=agent: "the certificates are taken anew" in a.log, "takes them")
        assert healthy(agent, folders[0] / "ca.crt")
    assert read(a, fleet.store, models[2])["ring"] > 0
    assert read(b, fleet.store, models[2])["ring"] > 0
    assert "is passed by" not in a.log + b.log


@pytest.mark.parametrize("missing", ["tls.crt", "tls.key", "ca.crt"])
def test_certificates_that_cannot_be_read(fleet: Fleet, tmp_path: Path, missing: str):
    files = Authority("ours").write(tmp_path / "a", "a")
    (tmp_path / "a" / missing).write_text("no certificate")
    agent = fleet.begin("a", **words(files))
    assert agent.process.wait(20) == 2
    (line,) = agent.log.splitlines()
    assert line.startswith("warmcast: certificates: expected PEM files")


def test_a_part_of_the_certificates(fleet: Fleet, tmp_path: Path):
    agent = fleet.begin("a", tls_cert=tmp_path / "tls.crt")
    assert agent.process.wait(20) == 2
    (line,) = agent.log.splitlines()
    assert "--tls-cert, --tls-key and --tls-ca together" in line
