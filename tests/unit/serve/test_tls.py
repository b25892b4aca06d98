"""TLS with real certificates and real clients, while certificates change."""

import asyncio
import ipaddress
import json
import os
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from unit.serve.test_bytes_through import CHAT, END, EVENTS, STREAM, a_delta, a_site
from unit.serve.test_keys import too_many_open_files
from unit.serve.test_serve_gateway import a_cluster

from pipelines.deploy import _gateway_answers
from serve_app.cluster import Limits, TlsFiles
from serve_app.http.free_port import free_port
from serve_app.http.listener import Listener
from serve_app.http.tls import Certificate

NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
PEM, RAW = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8


def make(path, serial, password=None, host=None):
    """Write a certificate of 127.0.0.1, or of a name, that vouches for itself; return its files."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = x509.SubjectAlternativeName([x509.DNSName(host) if host else address])
    made = (
        x509.CertificateBuilder(NAME, NAME, key.public_key(), serial)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    hidden = (
        serialization.NoEncryption()
        if password is None
        else serialization.BestAvailableEncryption(password)
    )
    files = TlsFiles(certificate=path / "tls.crt", key=path / "tls.key")
    for file, data in (
        (files.certificate, made.public_bytes(PEM)),
        (files.key, key.private_bytes(PEM, RAW, hidden)),
    ):
        part = file.with_suffix(".part")
        part.write_bytes(data)
        os.replace(part, file)
    return files


@asynccontextmanager
async def a_listener(files, **limits):
    async def app(scope, receive, send):
        headers = [(b"content-type", b"text/plain"), (b"x-scheme", scope["scheme"].encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        text = json.dumps({"replicas": 0, "client": scope["client"][0]}).encode()
        await send({"type": "http.response.body", "body": text})

    listener, port = Listener(app, Limits(**limits), files), free_port()
    await listener.start("127.0.0.1", port)
    try:
        yield port, listener
    finally:
        await listener.stop()


def trusting(files, **options):
    context = ssl.create_default_context(cafile=str(files.certificate))
    for name, value in options.items():
        setattr(context, name, value)
    return context


async def serial_of(port, server_name="127.0.0.1"):
    """Serial number of the certificate that a new connection gets."""
    context = ssl._create_unverified_context()
    _, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context, server_hostname=server_name
    )
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return x509.load_der_x509_certificate(found).serial_number


def run(test):
    async def inside():
        async with asyncio.timeout(60):
            await test()

    asyncio.run(inside())


def test_callers_are_answered_who_trust_the_certificate_and_no_others(tmp_path):
    files = make(tmp_path, 1)

    async def test():
        async with a_listener(files) as (port, _):
            url = f"https://127.0.0.1:{port}/"
            async with httpx.AsyncClient(verify=trusting(files)) as client:
                answer = await client.get(url)
                assert (answer.headers["x-scheme"], answer.json()["client"]) == (
                    "https", "127.0.0.1",
                )  # fmt: skip
                with pytest.raises(httpx.RemoteProtocolError):
                    await client.get(url.replace("https", "http"))
            async with httpx.AsyncClient() as stranger:
                with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                    await stranger.get(url)
            assert await asyncio.to_thread(_gateway_answers, "127.0.0.1", port, "https")
            assert not await asyncio.to_thread(_gateway_answers, "127.0.0.1", port)

    run(test)


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_before_1_2_is_not_spoken(tmp_path):
    files = make(tmp_path, 1)

    async def test():
        async with a_listener(files) as (port, _):
            for version, is_spoken in (("TLSv1_1", False), ("TLSv1_2", True), ("TLSv1_3", True)):
                context = trusting(files)
                context.set_ciphers("ALL:@SECLEVEL=0")
                context.minimum_version = ssl.TLSVersion[version]
                context.maximum_version = ssl.TLSVersion[version]
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                except (ssl.SSLError, ConnectionError):
                    assert not is_spoken
                else:
                    assert is_spoken
                    writer.close()

    run(test)


def test_new_connections_get_a_new_certificate_and_old_ones_go_on(tmp_path):
    files = make(tmp_path, 1)

    async def test():
        async with a_listener(files) as (port, listener):
            async with httpx.AsyncClient(verify=trusting(files)) as client:
                await client.get(f"https://127.0.0.1:{port}/")
                assert not listener._certificate.reload()
                make(tmp_path, 2)
                assert listener._certificate.reload()
                assert [await serial_of(port, name) for name in ("127.0.0.1", "a.example")] == [
                    2,
                    2,
                ]
                # The same connection: it trusts the first one alone.
                assert (await client.get(f"https://127.0.0.1:{port}/")).status_code == 200

    run(test)


def test_files_that_do_not_fit_keep_the_certificate_from_before_and_say_so(tmp_path):
    files = make(tmp_path, 1)

    async def test():
        async with a_listener(files) as (port, listener):
            certificate = listener._certificate
            (tmp_path / "other").mkdir()
            other = make(tmp_path / "other", 2)
            os.replace(other.certificate, files.certificate)
            assert certificate.reload()
            assert "KEY_VALUES_MISMATCH" in certificate.problem
            assert await serial_of(port) == 1
            files.key.unlink()
            assert certificate.reload()
            assert "there is no file" in certificate.problem
            assert await serial_of(port) == 1
            os.replace(other.key, files.key)
            assert certificate.reload()
            assert certificate.problem is None
            assert await serial_of(port) == 2

    run(test)


def test_a_listener_looks_by_itself_and_stops_to_when_it_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("serve_app.watched_file._LOOK_EVERY_S", 0.01)
    files = make(tmp_path, 1)

    async def test():
        async with a_listener(files) as (port, listener):
            make(tmp_path, 3)
            while await serial_of(port) != 3:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert listener._watching.cancelled()

    run(test)


def test_a_folder_that_may_not_be_read_for_a_while_ends_nobodys_looking(tmp_path, monkeypatch):
    files = make(tmp_path, 1)

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    certificate = Certificate(files)
    with monkeypatch.context() as shut:
        shut.setattr("serve_app.http.tls.identity_of", lambda path: None)
        shut.setattr("os.path.isfile", lambda path: False)
        shut.setattr("pathlib.Path.is_file", refuse)
        assert certificate.reload()
        assert "may not be read" in certificate.problem
    assert certificate.reload()
    assert certificate.problem is None


def test_a_certificate_is_taken_once_it_can_be_read_though_it_is_the_same_by_then(tmp_path):
    certificate = Certificate(make(tmp_path, 1))
    before = certificate.value
    make(tmp_path, 2)
    with too_many_open_files():
        assert certificate.reload()
        assert certificate.value is before
    assert certificate.reload()
    assert certificate.problem is None
    assert certificate.value is not before


def test_a_handshake_that_does_not_end_is_given_up(tmp_path):
    files = make(tmp_path, 1)

    async def test():
        async with a_listener(files, head_timeout_s=0.2) as (port, _):
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
            held[0][1].write(b"\x16\x03\x01")
            assert await serial_of(port) == 1
            for reader, writer in held:
                assert await reader.read() == b""
                writer.close()

    run(test)


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path):
    files = make(tmp_path, 1, password=b"secret")
    with pytest.raises(ValueError, match=r"certificate .*tls.crt with key"):
        Certificate(files)
    with pytest.raises(ValueError, match="there is no file"):
        Certificate(TlsFiles(certificate=files.certificate, key=tmp_path / "none"))
    with pytest.raises(ValueError, match="must begin with /"):
        a_cluster(gateway={"tls": {"certificate": "tls.crt", "key": "/tls.key"}})


def test_tokens_come_one_by_one_through_tls(tmp_path):
    files = make(tmp_path, 1)
    tls = files.model_dump(mode="json")

    async def test():
        async with a_site(gateway={"tls": tls}) as (port, _, (endpoint,)):
            endpoint.pieces = [a_delta(content="a"), a_delta(content="b"), *END]
            endpoint.headers, endpoint.framing, endpoint.gap_s = EVENTS, "chunked", 0.05
            async with httpx.AsyncClient(verify=trusting(files)) as client:
                url = f"https://127.0.0.1:{port}{CHAT.decode()}"
                async with client.stream("POST", url, content=STREAM) as answer:
                    pieces = [one async for one in answer.aiter_raw()]
            assert b"".join(pieces) == b"".join(endpoint.pieces)
            assert len(pieces) > 1

    run(test)
