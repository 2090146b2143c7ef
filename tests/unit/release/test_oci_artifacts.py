"""Deliveries and releases in OCI registries: pushed to Debian's docker-registry, and pulled from hostile ones."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.support.interruption import slow_server
from tests.support.provenance import World
from tests.support.registry import (
    HTPASSWD,
    LOGIN,
    PASSWORD,
    SKOPEO,
    USER,
    Fixed,
    Front,
    docker_registry,
    front,
    needs_registry,
)
from tvmflow.cli import main
from tvmflow.core import signing
from tvmflow.core.errors import DownloadError, EnvironmentProblem, UsageError, VerifyFailed
from tvmflow.provenance.write import sign_statements
from tvmflow.release.oci_artifacts import Pulled, Pushed, pull_artifact, push_artifact
from tvmflow.store import oci
from tvmflow.store.addresses import OciReference, parse_oci_reference
from tvmflow.store.local import LocalStore
from tvmflow.store.oci import MANIFEST, OciError, Repository, title_annotations

pytestmark = needs_registry

WEIGHTS = random.Random(0).randbytes(200_000)


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture
def registry(upstream: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Front]:
    """A server before the registry, and nobody's credentials."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setattr(oci, "_PAUSE_S", 0.01)
    with front(upstream) as server:
        yield server
    oci._LOGINS.clear()


@dataclass(frozen=True)
class Site:
    """A registry, a repository of the test's own in it, and beside them a folder of files and a store.

    Attributes:
        registry: The server before the registry.
        name: The name of the repository.
        root: The folder of the test.
        folder: The files to push.
        store: An empty store.
    """

    registry: Front
    name: str
    root: Path
    folder: Path
    store: LocalStore

    def reference(self, tag: str = "1", within: str = "") -> OciReference:
        return parse_oci_reference(f"oci://{self.registry.host}/{self.name}{within}:{tag}")

    def push(self, folder: Path | None = None, tag: str = "1", within: str = "") -> Pushed:
        return push_artifact(folder or self.folder, self.reference(tag, within), self.store)

    def pull(
        self,
        to: str = "got",
        *keys: signing.PublicKey,
        of: OciReference | None = None,
        store: LocalStore | None = None,
    ) -> Pulled:
        return pull_artifact(of or self.reference(), self.root / to, store or self.store, keys)

    def refusal(
        self, within: str = "", of: OciReference | None = None, store: LocalStore | None = None
    ) -> str:
        """Return the message of a pull that is refused, after which nothing is left."""
        folder = self.root / within
        with pytest.raises(DownloadError) as caught:
            self.pull(f"{folder}/got", of=of, store=store)
        assert not list(folder.glob("*got*"))
        assert "hunter" not in str(caught.value)
        return caught.value.message

    def pulled_files(self) -> dict[str, bytes]:
        return content(self.root / "got")


@pytest.fixture
def site(request: pytest.FixtureRequest, registry: Front, tmp_path: Path) -> Site:
    folder = tmp_path / "net"
    (folder / "include").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(WEIGHTS)
    (folder / "include/net.h").write_text("int net(void);\n")
    (folder / "empty.txt").touch()
    store = LocalStore(str(tmp_path / "store"))
    store.create()
    name = hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:12]
    return Site(registry, name, tmp_path, folder, store)


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---------------------------------------------------------------- files


def test_what_the_registry_has_is_not_sent_again(site: Site) -> None:
    """One changed file is sent alone, and another repository of the registry takes files over."""
    first = site.push()
    assert (first.files, first.sent_files, first.sent) == (3, 2, len(WEIGHTS) + 15)
    (site.folder / "include/net.h").write_text("int net(int);\n")
    second = site.push(tag="2")
    assert (second.sent_files, second.sent) == (1, 14)
    assert second.address != first.address
    other = site.push(within="/other")
    assert (other.sent, site.registry.sent("POST", "mount=sha256")[0].size) == (0, 0)
    site.registry.uploads = [Fixed(403, b"{}")]
    site.registry.requests.clear()
    site.push(within="/denied")
    # a file that may not be taken over is sent
    assert ["mount" in one.path for one in site.registry.sent("POST")][:3] == [True, False, True]
    assert site.push(tag="2") == second._replace(sent=0, sent_files=0)
    pulled = site.pull(of=site.reference(within="/other"))
    assert site.pulled_files() == content(site.folder)
    assert pulled.address == other.address and pulled.is_new
    assert not site.pull(of=site.reference("2")).is_new
    # by digest, what a tag was before
    site.pull("before", of=parse_oci_reference(first.address))
    assert (site.root / "before/include/net.h").read_text() == "int net(void);\n"


def test_other_files_are_not_replaced(site: Site) -> None:
    site.push()
    (site.folder / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="exists with other files"):
        site.pull("net")
    assert (site.folder / "mine.txt").exists()


@pytest.mark.parametrize("kind", ["link", "name", "empty"])
def test_what_no_registry_can_have_is_not_pushed(site: Site, kind: str) -> None:
    folder = site.folder
    if kind == "link":
        (site.folder / "link").symlink_to("/etc/passwd")
    elif kind == "name":
        (site.folder / "a\\b").touch()
    else:
        folder = site.root / "nothing"
        folder.mkdir()
    with pytest.raises(UsageError):
        site.push(folder)
    assert not site.registry.requests


@pytest.mark.skipif(SKOPEO is None, reason="needs skopeo")
def test_skopeo_reads_an_artifact(site: Site) -> None:
    """It copies files and manifest to a folder of its own, byte by byte."""
    pushed = site.push()
    at = f"docker://{site.registry.upstream}/{site.name}:1"
    subprocess.run(
        [str(SKOPEO), "copy", "--quiet", "--src-tls-verify=false", at, f"dir:{site.root}/copy"],
        check=True,
    )
    manifest = (site.root / "copy/manifest.json").read_bytes()
    assert pushed.address.endswith(hashlib.sha256(manifest).hexdigest())
    value = json.loads(manifest)
    assert value["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    kinds = {
        layer["annotations"]["org.opencontainers.image.title"]: layer["mediaType"]
        for layer in value["layers"]
    }
    assert kinds == {
        "empty.txt": "application/vnd.cncf.model.weight.config.v1.raw",
        "include/net.h": "application/vnd.cncf.model.code.v1.raw",
        "weights.bin": "application/vnd.cncf.model.weight.v1.raw",
    }
    assert (site.root / "copy" / hashlib.sha256(WEIGHTS).hexdigest()).read_bytes() == WEIGHTS


@pytest.mark.slow
def test_the_client_of_oras_reads_an_artifact(site: Site) -> None:
    """It writes the files under their names."""
    client = pytest.importorskip("oras.client")
    site.push()
    made = client.OrasClient(insecure=True)
    made.pull(target=f"{site.registry.host}/{site.name}:1", outdir=str(site.root / "got"))
    assert site.pulled_files() == content(site.folder)


def test_the_commands_say_what_they_did(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    """The address with the digest is what others are given; a password in an address is not repeated."""
    address, store = (
        f"oci://{site.registry.host}/{site.name}",
        ("--store", str(site.root / "store")),
    )
    assert main.main(["push", f"{address}:1", str(site.folder), *store]) == 0
    first, pinned, _ = capsys.readouterr().out.splitlines()
    assert first == f"pushed {address}:1: 3 files (200.0 kB), 2 files sent (200.0 kB)"
    assert pinned.startswith(f"  as     {address}@sha256:")
    assert main.main(["push", f"{address}:1", str(site.folder), *store]) == 0
    assert capsys.readouterr().out.startswith(
        f"pushed {address}:1: 3 files (200.0 kB), nothing to send"
    )
    to = ("--to", str(site.root / "got"))
    assert main.main(["pull", pinned.split()[1], *to, *store, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["is_new"], said["files"], said["address"]) == (True, 3, pinned.split()[1])
    assert main.main(["pull", f"oci://ann:hunter2@{site.registry.host}/{site.name}", *store]) == 2
    assert main.main(["push", address, str(site.folder), *store]) == 2
    assert (
        f"fix: write {address}:TAG" in (error := capsys.readouterr().err) and "hunter" not in error
    )


# ---------------------------------------------------------------- statements


@pytest.fixture
def delivered(tmp_path: Path) -> Path:
    world = World(tmp_path / "world")
    world.deliver()
    return world.folder


@pytest.mark.parametrize("has_referrers", [False, True])
def test_a_signature_is_added_later(site: Site, has_referrers: bool, delivered: Path) -> None:
    """It changes no digest, and whoever trusts its key pulls it, also where the registry lists no referrers."""
    site.registry.has_referrers = has_referrers
    unsigned = site.push(delivered)
    assert unsigned.statements == 2
    ours, theirs = (site.root / key for key in ("ours", "theirs"))
    public = [signing.generate_key(path) for path in (ours, theirs)]
    with pytest.raises(VerifyFailed, match="not signed"):
        site.pull("got", public[0])
    for path in delivered.glob("*.intoto.jsonl"):
        sign_statements(path, signing.load_private_key(ours))
    signed = site.push(delivered)
    assert signed.address == unsigned.address
    with pytest.raises(VerifyFailed):
        site.pull("got", public[1])
    assert not list(site.root.glob("*got*"))
    pulled = site.pull("got", public[0])
    assert site.pulled_files() == content(delivered)
    assert pulled.signature.startswith(f"signed by {ours}.pub (")
    tagged = site.registry.sent(
        "PUT", f"/manifests/{unsigned.address.partition('@')[2].replace(':', '-')}"
    )
    assert bool(tagged) != has_referrers
    shutil.copytree(delivered, site.root / "outer" / "inner")
    site.push(site.root / "outer")
    assert site.pull("moved", public[0]).signature == f"{pulled.signature}, in inner"


@pytest.mark.parametrize("path", ["sitecustomize.py", "include/net.so", "lib.so.1"])
def test_signed_content_under_another_name_is_refused(
    site: Site, delivered: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to a registry could have Python import it; neither push nor pull takes it."""
    ours = site.root / "ours"
    public = signing.generate_key(ours)
    for file in delivered.glob("*.intoto.jsonl"):
        sign_statements(file, signing.load_private_key(ours))
    (delivered / path).parent.mkdir(exist_ok=True)
    shutil.copyfile(delivered / "net.so", delivered / path)
    with pytest.raises(VerifyFailed, match="its path is not in its statement"):
        site.push(delivered)
    # another tool pushes it
    monkeypatch.setattr("tvmflow.release.oci_artifacts._check", lambda *_: "")
    site.push(delivered)
    monkeypatch.undo()
    monkeypatch.setenv("DOCKER_CONFIG", str(site.root / "docker"))
    with pytest.raises((VerifyFailed, DownloadError), match=Path(path).name):
        site.pull("got", public)
    assert not (site.root / "got").exists()


def test_a_changed_file_is_not_pushed(site: Site, delivered: Path) -> None:
    """What is there is not what its statement says."""
    (delivered / "net.so").write_bytes(b"other")
    with pytest.raises(VerifyFailed, match=r"net\.so"):
        site.push(delivered)
    assert not site.registry.requests


# ---------------------------------------------------------------- interrupted transfers


def test_an_upload_that_breaks_is_sent_again(site: Site) -> None:
    site.registry.cut_uploads = [1000, 50_000]
    pushed = site.push()
    assert pushed.sent == len(WEIGHTS) + 15
    site.pull()
    assert site.pulled_files() == content(site.folder)


def test_a_blob_is_sent_once_by_threads_that_need_it(site: Site) -> None:
    """Docker's registry refuses manifests that name a blob while another upload of it ends."""
    repository = oci.Repository(site.reference())
    with ThreadPoolExecutor(8) as pool:
        sent = list(pool.map(lambda _: repository.put_blob(oci.EMPTY, b"{}"), range(16)))
    assert sorted(sent) == [0] * 15 + [2]
    assert len(site.registry.sent("PUT")) == 1


def test_a_manifest_that_names_a_blob_too_early_is_sent_again(site: Site) -> None:
    """What is refused for good is refused three times."""
    site.registry.refused_manifests = [Fixed(400, b"{}")] * 2
    site.push()
    site.pull()
    assert site.pulled_files() == content(site.folder)
    site.registry.refused_manifests = [Fixed(400, b"{}")] * 3
    with pytest.raises(OciError, match="answers 400"):
        site.push(tag="2")


def test_a_push_that_fails_moves_no_tag(site: Site) -> None:
    """The files that arrived are not sent again."""
    site.push()
    (site.folder / "more.bin").write_bytes(WEIGHTS[1:])
    site.registry.cut_uploads = [1000] * 9
    with pytest.raises(OciError, match="no answer from"):
        site.push()
    site.registry.cut_uploads.clear()
    site.pull()
    assert not (site.root / "got/more.bin").exists()
    assert site.push().sent == len(WEIGHTS) - 1


def test_a_refusal_that_drips_is_not_waited_for() -> None:
    """It is reported without the words of the registry."""
    head, started = b"HTTP/1.1 403 No\r\nContent-Length: 4000\r\n\r\n", time.monotonic()
    with slow_server(head, b" ", 0.02) as url:
        host = url.removeprefix("http://")
        repository = Repository(parse_oci_reference(f"oci://{host}/a/b"), timeout_s=0.3)
        with pytest.raises(OciError, match="denies access: 403"):
            repository.find_manifest("1")
    assert time.monotonic() - started < 10


def test_a_download_that_breaks_is_resumed(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rest is requested; when it breaks for good, nothing is left in the folder, and the next pull goes on."""
    site.push()
    site.registry.cut_downloads = [70_000]
    site.pull()
    assert [one.range for one in site.registry.sent("GET", "/blobs/") if one.range] == [
        "bytes=70000-"
    ]
    other = LocalStore(str(site.root / "other"))
    other.create()
    site.registry.cut_downloads = [50_000, *[0] * 6]
    monkeypatch.setattr("tvmflow.store.downloads.time.sleep", lambda _: None)
    assert "the connection ended" in site.refusal("new", store=other)
    site.registry.requests.clear()
    site.pull("new/got", store=other)
    assert site.registry.sent("GET", hashlib.sha256(WEIGHTS).hexdigest())[0].range == "bytes=50000-"
    assert not list(Path(other.downloads).glob("*.part"))


# ---------------------------------------------------------------- credentials


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if HTPASSWD is None:
        pytest.skip("needs htpasswd")
    with docker_registry(tmp_path_factory.mktemp("closed"), with_login=True) as host:
        yield host


def log_in(place: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the password where a tool would."""
    (tmp_path / "docker").mkdir(exist_ok=True)
    config: dict[str, Any] = {}
    if place == "variable":
        monkeypatch.setenv("TVMFLOW_TOKEN_127_0_0_1", f"{USER}:{PASSWORD}")
    elif place == "config":
        config = {"auths": {host: {"auth": LOGIN}}}
    elif place == "netrc":
        (tmp_path / "netrc").write_text(f'machine 127.0.0.1 login {USER} password "{PASSWORD}"\n')
    else:
        config = {"credHelpers": {host: "test"}, "auths": {host: {}}}
        helper = tmp_path / "bin/docker-credential-test"
        helper.parent.mkdir()
        secret = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
        helper.write_text(f"#!/bin/sh\n[ \"$(cat)\" = {host} ] && echo '{secret}'\n")
        helper.chmod(0o755)
        monkeypatch.setenv("PATH", str(helper.parent), prepend=":")
    (tmp_path / "docker/config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("place", ["variable", "config", "helper", "netrc"])
def test_the_login_of_docker_is_used(
    site: Site, place: str, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registry that wants a password gets it where it is kept; without one, the message says how."""
    site.registry.upstream = closed
    with pytest.raises(OciError) as caught:
        site.push()
    assert "denies access: 401" in caught.value.message
    assert caught.value.fix.startswith(f"log in with `docker login {site.registry.host}`")
    log_in(place, site.registry.host, site.root, monkeypatch)
    site.push()
    site.pull()
    assert site.pulled_files() == content(site.folder)
    assert not any(
        "hunter" in path.read_text(errors="ignore")
        for path in Path(site.store.root).rglob("*")
        if path.is_file()
    )


def test_a_wrong_password_is_not_shown(
    site: Site, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names where it comes from."""
    site.registry.upstream = closed
    monkeypatch.setenv("TVMFLOW_TOKEN_127_0_0_1", f"{USER}:hunter3")
    with pytest.raises(OciError) as caught:
        site.push()
    assert "$TVMFLOW_TOKEN_127_0_0_1" in caught.value.fix and "hunter" not in str(caught.value)


def test_a_token_is_fetched_from_its_server(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """The password goes to the token server, the token to the registry, and a new one is fetched when it ends."""
    site.registry.token = "first"
    log_in("config", site.registry.host, site.root, monkeypatch)
    site.push()
    site.registry.token = "second"
    site.pull()
    assert site.pulled_files() == content(site.folder)
    asked = site.registry.sent("GET", "/token")
    assert {one.authorization for one in asked} == {f"Basic {LOGIN}"}
    scope = f"repository:{site.name}:pull"
    queries = [parse_qs(urlsplit(one.path).query) for one in asked]
    assert [query["scope"] for query in queries] == [[scope], [f"{scope},push"], [scope]]
    others = {
        one.authorization for one in site.registry.requests if not one.path.startswith("/token")
    }
    assert others == {"", "Bearer first", "Bearer second"}


def test_no_credential_leaves_its_host(
    site: Site, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not over a redirect of a blob, and no file to an upload elsewhere."""
    log_in("config", site.registry.host, site.root, monkeypatch)
    site.push()
    with front(upstream) as other:
        site.registry.token = "token"
        digest = hashlib.sha256(WEIGHTS).hexdigest()
        at = f"http://{other.host}/v2/{site.name}/blobs/sha256:{digest}"
        site.registry.answers[digest] = Fixed(307, b"", {"Location": at})
        site.pull()
        # what the storage wants is not what the registry wants
        other.token = "other"
        shutil.rmtree(site.store.downloads)
        assert "denies access" in site.refusal("new")
        assert len(other.requests) == 2
        assert {one.authorization for one in other.requests} == {""}
        site.registry.uploads = [Fixed(202, b"", {"Location": f"http://{other.host}/upload"})]
        (site.folder / "new.bin").write_bytes(WEIGHTS[2:])
        with pytest.raises(OciError, match="which is not on it"):
            site.push()
        assert not other.sent("PUT")


@pytest.mark.parametrize("login", ["none", "registry", "victim", "both"])
@pytest.mark.parametrize(
    "realm",
    [
        "http://{victim}/token",
        "http://LOCALHOST:{port}/token",
        "http://localhost.:{port}/token",
        "http://2130706433:{port}/token",
        "http://127.1:{port}/token",
        "http://0x7f.1:{port}/token",
        "http://[::ffff:127.0.0.1]:{port}/token",
        "http://{registry}@{victim}/token",
        "http://{victim}\\.{registry}/token",
        "//{victim}/token",
        "https://{victim}/token",
        "file:///etc/passwd",
        "http://{victim}/token?scope=repository:private:pull",
        "http://{registry}:1/token",
    ],
)
def test_no_token_of_another_registry_is_requested(
    site: Site, upstream: str, monkeypatch: pytest.MonkeyPatch, realm: str, login: str
) -> None:
    """A registry names the token server of another one, for which there may be a login: nobody asks there."""
    site.push()
    with front(upstream) as victim:
        victim.token, site.registry.token = "token of the victim", "token"
        port = victim.host.partition(":")[2]
        names = {"victim": victim.host, "registry": site.registry.host, "port": port}
        site.registry.realm = realm.format(**names)
        hosts = {"registry": [site.registry.host], "victim": [victim.host], "none": []}
        known = hosts.get(login, [site.registry.host, victim.host])
        (site.root / "docker").mkdir()
        config = {"auths": {host: {"auth": LOGIN} for host in known}}
        (site.root / "docker/config.json").write_text(json.dumps(config))
        assert "as its token server, which is" in site.refusal()
        assert not victim.requests
        assert {one.authorization for one in site.registry.requests} == {""}


def test_a_token_server_elsewhere_is_named_by_the_user(
    site: Site, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one registry, with the port; it is asked for what the request needs, and with this registry's login."""
    site.push()
    log_in("config", site.registry.host, site.root, monkeypatch)
    with front(upstream) as server:
        server.token = site.registry.token = "token"
        site.registry.realm = f"http://{server.host}/token?a=b&Scope=repository:private:push"
        for wrong in ("", f"{server.host}={server.host}", f"{site.registry.host}=127.0.0.1"):
            monkeypatch.setenv("TVMFLOW_AUTH_SERVERS", wrong)
            with pytest.raises(OciError, match=r"are not sent there") as caught:
                site.pull()
            setting = f"$TVMFLOW_AUTH_SERVERS={site.registry.host}={server.host}"
            assert setting in caught.value.fix
        monkeypatch.setenv("TVMFLOW_AUTH_SERVERS", f"a=b,{site.registry.host}={server.host}")
        site.pull()
        (request,) = server.requests
        assert request.authorization == f"Basic {LOGIN}"
        asked = parse_qs(urlsplit(request.path).query)
        assert asked == {"a": ["b"], "service": ["test"], "scope": [f"repository:{site.name}:pull"]}
        monkeypatch.setenv("TVMFLOW_AUTH_SERVERS", f"https://{server.host}")
        oci._LOGINS.clear()
        with pytest.raises(EnvironmentProblem, match="is not REGISTRY=HOST"):
            site.pull("new")


def test_a_token_server_does_not_redirect(site: Site, upstream: str) -> None:
    """Another host would be asked, which was not checked."""
    site.push()
    with front(upstream) as other:
        site.registry.token = other.token = "token"
        at = {"Location": f"http://{other.host}/token"}
        site.registry.answers["/token"] = Fixed(307, b"", at)
        assert "denies access" in site.refusal()
        assert not other.requests


def test_what_a_registry_repeats_is_not_shown(
    site: Site, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the password nor its code, in an error of the registry."""
    site.registry.upstream = closed
    log_in("config", site.registry.host, site.root, monkeypatch)
    site.push()
    said = json.dumps({"errors": [{"message": f"no {PASSWORD} and {LOGIN}"}]}).encode()
    site.registry.answers["/manifests/1"] = Fixed(403, said)
    message = site.refusal()
    assert "no … and …" in message


def test_http_is_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere it is requested by name, and credentials stay here."""
    made = oci.Repository(parse_oci_reference("oci://registry.example/a:1"))
    assert made.url == "https://registry.example/v2/a"
    monkeypatch.setenv("TVMFLOW_PLAIN_HTTP", "other.example, registry.example")
    made = oci.Repository(parse_oci_reference("oci://registry.example/a:1"))
    assert made.url == "http://registry.example/v2/a"
    monkeypatch.setenv("TVMFLOW_TOKEN_REGISTRY_EXAMPLE", "ann:hunter2")
    assert oci.find_credential("registry.example", made.url) is None
    assert oci.find_credential("registry.example", "https://registry.example") is not None
    assert oci.Repository(parse_oci_reference("oci://docker.io/a/b:1")).url.startswith(
        "https://registry-1.docker.io/"
    )


# ---------------------------------------------------------------- hostile registries

DIGEST = hashlib.sha256(WEIGHTS).hexdigest()


def layer(path: str = "weights.bin", size: object = len(WEIGHTS), **changes: Any) -> dict[str, Any]:
    made = {
        "mediaType": "application/octet-stream",
        "digest": f"sha256:{DIGEST}",
        "size": size,
        "annotations": title_annotations(path),
    }
    return made | changes


def manifest(*layers: Any, **changes: Any) -> bytes:
    config = {
        "mediaType": "application/vnd.oci.empty.v1+json",
        "digest": oci.EMPTY.digest,
        "size": 2,
    }
    return json.dumps(
        {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": layers} | changes
    ).encode()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (manifest(layer("../../x")), "a file with the name '../../x'"),
        (manifest(layer("/etc/passwd")), "a file with the name '/etc/passwd'"),
        (manifest(layer("a/../../b")), "a file with the name"),
        (manifest(layer("C:\\x")), "a file with the name"),
        (manifest(layer("a\x1b[2J")), "a file with the name"),
        (manifest(layer("\ud800")), "a file with the name"),
        (manifest(layer("x" * 300)), "a file with the name"),
        (manifest(layer("a"), layer("a")), "a file with the name 'a'"),
        (manifest(layer("a"), layer("a/b")), "a file with the name 'a/b'"),
        (manifest(layer(annotations={})), "a file with the name ''"),
        (manifest(layer(mediaType="application/vnd.cncf.model.weight.v1.tar")), "is an archive"),
        (manifest(layer(digest="sha256:../../x")), "is not a sha256"),
        (manifest(layer(digest="md5:00")), "is not a sha256"),
        (manifest(layer(size=-1)), "a file of -1 bytes"),
        (manifest(layer(size=1 << 60)), "bytes"),
        (manifest(layer(size="1")), "the limit is 0 B"),
        (manifest(layer(size=1)), "the limit is 1 B"),
        (manifest(layer(size=len(WEIGHTS) + 1)), "its manifest says 200001"),
        (manifest(layer(digest=f"sha256:{'0' * 64}")), "answers 404"),
        (manifest(*[layer(str(number)) for number in range(10_001)]), "more than 10000 files"),
        (manifest(), "it is not an artifact with files"),
        (json.dumps({"manifests": [{"digest": "sha256:1"}]}).encode(), "an index perhaps"),
        (b"[" * 100_000, "nests too deeply"),
        (b"<html>", "it is not JSON"),
        (b"{}" + b" " * (5 << 20), "larger than 4 MB"),
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_refused(site: Site, text: bytes, why: str) -> None:
    """Nothing is left, neither beside the folder nor in the store."""
    site.push()
    site.registry.answers["/manifests/1"] = Fixed(200, text)
    assert why in site.refusal("elsewhere")
    assert not list(Path(site.store.downloads).glob("*.part"))
    assert {path.name for path in site.root.iterdir()} <= {"net", "store", "elsewhere", "docker"}


@pytest.mark.parametrize(
    ("end", "answer", "why"),
    [
        (DIGEST, Fixed(200, b"other" * 40_000), "its sha256 is"),
        (DIGEST, Fixed(200, b"x" * 65_536, endless=True), "it has"),
        (DIGEST, Fixed(200, b"short"), "its sha256 is"),
        ("/manifests/1", Fixed(200, b"x" * 65_536, endless=True), "larger than 4 MB"),
        ("/manifests/1", Fixed(200, manifest(layer()), {"Docker-Content-Digest": "sha256:0"}), "digest"),
        ("/manifests/1", Fixed(302, b"", {"Location": "file:///etc/passwd"}), "not allowed"),
        ("/manifests/1", Fixed(401, b"{}", {"WWW-Authenticate": 'Bearer realm="file:///x"'}), "not encrypted"),
        ("/manifests/1", Fixed(401, b"{}", {"WWW-Authenticate": "a" * 60_000}), "more than 8,192"),
        ("/manifests/1", Fixed(500, b'{"errors": [{"message": "a\\u001b[2Jb"}]}'), "500"),
        ("/manifests/1", Fixed(404), "there is no artifact with the tag 1"),
    ],
)  # fmt: skip
def test_a_hostile_answer_is_refused(site: Site, end: str, answer: Fixed, why: str) -> None:
    site.push()
    site.registry.answers[end] = answer
    message = site.refusal()
    assert why in message and "\x1b" not in message
    assert not list(Path(site.store.downloads).glob("*.part"))


def test_a_pinned_artifact_is_that_one(site: Site) -> None:
    """A manifest with another digest is refused; a tag that is moved meanwhile changes nothing."""
    pushed = site.push()
    pinned = parse_oci_reference(pushed.address)
    site.registry.answers[pinned.digest] = Fixed(200, manifest(layer("other.bin")))
    assert "its manifest has the digest" in site.refusal(of=pinned)
    site.registry.answers.clear()
    site.registry.answers[DIGEST] = Fixed(404)
    assert "answers 404" in site.refusal()


def test_statements_about_another_artifact_are_not_taken(site: Site, delivered: Path) -> None:
    """A registry may list what refers to something else."""
    site.registry.has_referrers = True
    pushed = site.push(delivered)
    other = site.push(tag="2")
    listed = site.registry.referrers[pushed.address.partition("@")[2]]
    site.registry.referrers[other.address.partition("@")[2]] = listed
    site.pull(of=site.reference("2"))
    assert site.pulled_files() == content(site.folder)
