"""Addresses of files: their parts, their neighbours, and the variable with the token of a host."""

from __future__ import annotations

import pytest

from tvmflow.store.addresses import (
    HubFile,
    InvalidAddress,
    OciReference,
    check_address,
    parse_hub_file,
    parse_oci_reference,
    sibling,
    token_variable,
    with_suffix,
    without_secrets,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("address", "file"),
    [
        (f"hf://org/net/m.onnx@{COMMIT}", HubFile("org/net", "m.onnx", COMMIT)),
        (f"hf://org/net@{COMMIT}/a/m.onnx", HubFile("org/net", "a/m.onnx", COMMIT)),
        ("hf://models/org/net/a/m.onnx@main", HubFile("org/net", "a/m.onnx", "main")),
        ("hf://org/net/m.onnx", HubFile("org/net", "m.onnx", "")),
        ("hf://org/net@main/m@2.onnx", HubFile("org/net", "m@2.onnx", "main")),
    ],
)
def test_a_file_on_the_hub(address: str, file: HubFile) -> None:
    """The revision follows the path, or the repository as in the Hub's own addresses."""
    assert parse_hub_file(address) == file
    assert file.is_pinned == (file.revision == COMMIT)


@pytest.mark.parametrize(
    "address",
    [
        "hf://net/m.onnx",
        "hf://org/net/",
        "hf://org/net//m",
        "hf://org/../m/n",
        "hf://o rg/net/m",
        "hf://",
    ],
)
def test_what_is_no_file_on_the_hub(address: str) -> None:
    """Nothing of it can leave the repository in a URL."""
    with pytest.raises(InvalidAddress):
        check_address(address)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("https:///m.onnx", "no valid host"),
        (f"https://{'a' * 64}.example/m.onnx", "no valid host"),
        ("https://h/my model.onnx", "percent-encoded"),
        ("https://h/modèle.onnx", "percent-encoded"),
        ("https://h:port/m.onnx", "not a valid URL"),
    ],
)
def test_what_no_request_can_be_sent_to(url: str, problem: str) -> None:
    """It is a mistake in the recipe, not one of the network."""
    with pytest.raises(InvalidAddress, match=problem):
        check_address(url)


SHA = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("address", "reference"),
    [
        (f"oci://h.example/a@{SHA}", OciReference("h.example", "a", digest=SHA)),
        ("oci://h:5000/a/b-c:1.0", OciReference("h:5000", "a/b-c", tag="1.0")),
        (f"oci://[::1]:5000/a:1@{SHA}#d/m.onnx", OciReference("[::1]:5000", "a", "1", SHA, "d/m.onnx")),
    ],
)  # fmt: skip
def test_an_artifact_in_a_registry(address: str, reference: OciReference) -> None:
    """The digest decides where there is a tag, too; a file follows behind a #."""
    assert parse_oci_reference(address) == reference
    assert parse_oci_reference(reference.address).version == reference.version
    assert without_secrets(reference.address) == reference.address


@pytest.mark.parametrize(
    "address",
    [
        "oci://h", "oci://h/", "oci://h/A", "oci://h/a/../b", "oci://h/a//b", "oci://h/a:b:c", "oci://h/a b",
        "oci://h/a@sha256:00", "oci://h/a?b=1", f"oci://h/{'a' * 300}", "oci://ann:hunter2@h/a",
    ],
)  # fmt: skip
def test_what_is_no_artifact(address: str) -> None:
    """Nothing of it can leave the repository in a URL, and a password is not repeated."""
    with pytest.raises(InvalidAddress) as caught:
        check_address(address)
    assert "hunter2" not in str(caught.value) + without_secrets(address)


def test_neighbours() -> None:
    """They have the same revision, query and host."""
    assert sibling("https://h/a/m.onnx?raw=1", "w/d b") == "https://h/a/w/d%20b?raw=1"
    assert sibling(f"oci://h/a@{SHA}#x/m.onnx", "d") == f"oci://h/a@{SHA}#x/d"
    assert sibling("s3://b/m.onnx", "d b") == "s3://b/d b"
    assert sibling(f"hf://org/net@{COMMIT}/m.onnx", "d") == f"hf://org/net/d@{COMMIT}"
    assert with_suffix("gs://b/a/net", "-0001.params") == "gs://b/a/net-0001.params"


def test_no_two_hosts_share_a_variable() -> None:
    """A token must not be sent to a host with a similar name."""
    hosts = ["a-b.c", "a.b.c", "a--b.c", "ab.c", "a.b-c"]
    assert len({token_variable(host) for host in hosts}) == len(hosts)
    assert token_variable("A.example") == token_variable("a.example") == "TVMFLOW_TOKEN_A_EXAMPLE"
    assert [token_variable(host) for host in ("a_b.c", "::1", "-a.b", "")] == [""] * 4
