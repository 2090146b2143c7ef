"""Files of models in a bucket: downloaded, resumed and checked like those of a web server."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.store.s3 import S3, serving_s3
from tvmflow.core.errors import DownloadError
from tvmflow.store.downloads import download

pytest.importorskip("obstore", reason="obstore is not installed: pip install 'tvmflow[remote]'")

MODEL = random.Random(0).randbytes(3_000_000)
DIGEST = hashlib.sha256(MODEL).hexdigest()
URL = "s3://models/nets/model.onnx"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    with serving_s3() as server:
        server.objects["/models/nets/model.onnx"] = MODEL
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "hunter2")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter3")
        yield server


def get(folder: Path, digest: str = DIGEST, url: str = URL) -> Path:
    return download(url, digest, folder, backoff_s=0.01, timeout_s=5.0, retries=1)


def test_an_object_is_downloaded_once(s3: S3, tmp_path: Path) -> None:
    """The second call sends no request."""
    assert get(tmp_path).read_bytes() == MODEL
    count = len(s3.requests)
    assert get(tmp_path) == tmp_path / DIGEST
    assert len(s3.requests) == count


def test_an_interrupted_object_is_resumed(s3: S3, tmp_path: Path) -> None:
    """What has arrived is kept while the object is the same, and only then."""
    (tmp_path / f"{DIGEST}.part").write_bytes(MODEL[:1_000_000])
    (tmp_path / f"{DIGEST}.validator").write_text(f'"{hashlib.md5(MODEL).hexdigest()}"')
    assert get(tmp_path).read_bytes() == MODEL
    assert s3.requests[-1] == "GET /models/nets/model.onnx bytes=1000000-"
    other = tmp_path / "other"
    other.mkdir()
    (other / f"{DIGEST}.part").write_bytes(b"of another version")
    (other / f"{DIGEST}.validator").write_text('"another"')
    assert get(other).read_bytes() == MODEL


def test_a_complete_part_of_an_object_is_not_downloaded_again(s3: S3, tmp_path: Path) -> None:
    """The digest decides."""
    (tmp_path / f"{DIGEST}.part").write_bytes(MODEL)
    (tmp_path / f"{DIGEST}.validator").write_text(f'"{hashlib.md5(MODEL).hexdigest()}"')
    assert get(tmp_path).read_bytes() == MODEL
    assert [request.partition(" ")[0] for request in s3.requests] == ["HEAD"]


def test_what_a_bucket_refuses(s3: S3, tmp_path: Path) -> None:
    """No such object, no access, other content: each with its sentence, and without credentials."""
    with pytest.raises(DownloadError, match="there is no such bucket or object") as missing:
        get(tmp_path, url="s3://models/nets/modle.onnx")
    s3.statuses = [403]
    with pytest.raises(DownloadError, match="access denied") as denied:
        get(tmp_path)
    with pytest.raises(DownloadError, match=f"its sha256 is {DIGEST}") as changed:
        get(tmp_path, "0" * 64)
    s3.statuses = [503] * 9
    with pytest.raises(DownloadError, match=r"503 .*\(2 attempts\)") as busy:
        get(tmp_path)
    for caught in (missing, denied, changed, busy):
        assert "hunter" not in str(caught.value)
        assert caught.value.message.startswith("s3://models/nets/")
