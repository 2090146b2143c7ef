"""Addresses of files: their parts, their neighbours, and the variable with the token of a host."""

from __future__ import annotations

import pytest

from tvmflow.store.addresses import (
    HubFile,
    InvalidAddress,
    check_address,
    parse_hub_file,
    sibling,
    token_variable,
    with_suffix,
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


def test_neighbours() -> None:
    """They have the same revision, query and host."""
    assert sibling("https://h/a/m.onnx?raw=1", "w/d b") == "https://h/a/w/d%20b?raw=1"
    assert sibling("s3://b/m.onnx", "d b") == "s3://b/d b"
    assert sibling(f"hf://org/net@{COMMIT}/m.onnx", "d") == f"hf://org/net/d@{COMMIT}"
    assert with_suffix("gs://b/a/net", "-0001.params") == "gs://b/a/net-0001.params"


def test_no_two_hosts_share_a_variable() -> None:
    """A token must not be sent to a host with a similar name."""
    hosts = ["a-b.c", "a.b.c", "a--b.c", "ab.c", "a.b-c"]
    assert len({token_variable(host) for host in hosts}) == len(hosts)
    assert token_variable("A.example") == token_variable("a.example") == "TVMFLOW_TOKEN_A_EXAMPLE"
    assert [token_variable(host) for host in ("a_b.c", "::1", "-a.b", "")] == [""] * 4
