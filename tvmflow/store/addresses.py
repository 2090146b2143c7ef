"""Addresses of model files: `https://`, `file://`, a bucket, the Hugging Face Hub, or an OCI registry."""

from __future__ import annotations

import re
import urllib.parse
from typing import Final, NamedTuple

from tvmflow.core.formatting import excerpt, quoted
from tvmflow.core.text import did_you_mean

HUB: Final = "hf"
OCI: Final = "oci"
BUCKETS: Final = ("s3", "gs", "az")
_WEB: Final = ("https", "http")
SCHEMES: Final = (HUB, OCI, *_WEB, "file", *BUCKETS)

_HUB_FORM: Final = "hf://ORGANIZATION/NAME/FILE@COMMIT"
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
# The first part of Hub addresses that do not name a model.
_OTHER_KINDS: Final = frozenset({"datasets", "spaces", "buckets", "kernels"})

OCI_FORM: Final = "oci://HOST/NAME:TAG or oci://HOST/NAME@sha256:DIGEST"
_OCI: Final = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(?::[0-9]{1,5})?|\[[0-9A-Fa-f:.]+\](?::[0-9]{1,5})?)"
    r"/(?P<name>[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?"
    r"(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
    r"(?:#(?P<path>.+))?"
)
_MAX_OCI_NAME: Final = 255
# Programs disagree about other characters in a host, such as a backslash, so they are refused.
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+(%[A-Za-z0-9._-]+)?")


class InvalidAddress(ValueError):
    """An address that names no file. The text is for people, and contains no secrets."""


class HubFile(NamedTuple):
    """A file in a Hub repository (`ORGANIZATION/NAME`): its path, and a commit, branch or tag."""

    repository: str
    path: str
    revision: str

    @property
    def is_pinned(self) -> bool:
        """True for a full commit hash, whose content never changes."""
        return bool(_COMMIT.fullmatch(self.revision))

    @property
    def address(self) -> str:
        """The address as it is written in recipes."""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB}://{self.repository}/{self.path}{revision}"


class OciReference(NamedTuple):
    """An artifact in an OCI registry: host, repository, tag or digest, and optionally one of its files."""

    host: str
    name: str
    tag: str = ""
    digest: str = ""
    path: str = ""

    @property
    def version(self) -> str:
        """The digest, or else the tag: the name of the artifact in requests."""
        return self.digest or self.tag

    @property
    def address(self) -> str:
        """The address as it is written in recipes."""
        version = f"@{self.digest}" if self.digest else f":{self.tag}" if self.tag else ""
        return f"{OCI}://{self.host}/{self.name}{version}" + (f"#{self.path}" if self.path else "")


def is_address(text: str) -> bool:
    """Return whether a field's value is an address rather than a path."""
    return "://" in text


def scheme_of(address: str) -> str:
    """Return the scheme of an address in lowercase."""
    return address.partition("://")[0].lower()


def check_address(address: str) -> None:
    """Check an address without a request; InvalidAddress if it cannot name a file, or has credentials."""
    scheme = scheme_of(address)
    if scheme not in SCHEMES:
        valid = ", ".join(SCHEMES)
        raise InvalidAddress(
            f"{quoted(scheme)} is not a supported URL scheme{did_you_mean(scheme, SCHEMES)} (valid: {valid})"
        )
    if scheme == HUB:
        parse_hub_file(address)
        return
    if scheme == OCI:
        parse_oci_reference(address)
        return
    try:
        parts = urllib.parse.urlsplit(address)
        # A port that is not a number may be part of a password.
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise InvalidAddress("this is not a valid URL") from None
    if "@" in parts.netloc:
        variable = token_variable(host or "")
        fix = f"set ${variable} or use ~/.netrc" if variable else "use ~/.netrc"
        if scheme in BUCKETS:
            fix = "use the environment variables of the service"
        raise InvalidAddress(
            f"credentials do not belong in a URL, which is shown and shared: write it without them, and {fix}"
        )
    if scheme in BUCKETS and not (host and parts.path.strip("/")):
        raise InvalidAddress(f"write it as {scheme}://BUCKET/PATH/TO/FILE")
    if scheme in _WEB:
        _check_web_address(host or "", f"{parts.path}{parts.query}")


def _check_web_address(host: str, path: str) -> None:
    """Check what would make a request fail before the server answers."""
    try:
        is_host = bool(_HOST.fullmatch(host.encode("idna").decode()))
    except UnicodeError:
        is_host = False
    if not is_host:
        raise InvalidAddress("the URL has no valid host")
    if not path.isascii() or not path.isprintable() or " " in path:
        raise InvalidAddress("characters such as spaces are percent-encoded in a URL: %20")


def token_variable(host: str) -> str:
    """Return the name of the environment variable with a host's token; empty for an invalid host name.

    As in Terraform's `TF_TOKEN_…`, a dot becomes `_` and a hyphen `__`, so that hosts cannot share a variable.

    >>> token_variable("models.my-team.example")
    'TVMFLOW_TOKEN_MODELS_MY__TEAM_EXAMPLE'
    """
    labels = host.split(".")
    is_host = all(
        re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?", label) for label in labels
    )
    name = "_".join(label.replace("-", "__") for label in labels)
    return f"TVMFLOW_TOKEN_{name.upper()}" if is_host else ""


def parse_hub_file(address: str) -> HubFile:
    """Return the Hub file that an address names; the revision may follow the repository or the path."""
    first, *parts = address.partition("://")[2].removeprefix("models/").split("/")
    if first in _OTHER_KINDS:
        raise InvalidAddress(f"only models are read from the Hub: write it as {_HUB_FORM}")
    name, has_revision, revision = parts[0].partition("@") if parts else ("", "", "")
    path = "/".join(parts[1:])
    if not has_revision:
        path, at, last = path.rpartition("@")
        path, revision = (path, last) if at else (last, "")
    is_file = all(part not in ("", ".", "..") for part in path.split("/"))
    if not (_HUB_NAME.fullmatch(first) and _HUB_NAME.fullmatch(name) and is_file):
        raise InvalidAddress(f"this names no file on the Hub: write it as {_HUB_FORM}")
    return HubFile(f"{first}/{name}", path, revision)


def parse_oci_reference(address: str) -> OciReference:
    """Return the artifact that an address names."""
    rest = address.partition("://")[2]
    if "@" in rest.partition("/")[0]:
        raise InvalidAddress(
            "credentials do not belong in a URL, which is shown and shared: use `docker login`"
        )
    match = _OCI.fullmatch(rest)
    if match is None or len(match["name"]) > _MAX_OCI_NAME:
        raise InvalidAddress(f"this names nothing in an OCI registry: write it as {OCI_FORM}")
    return OciReference(**match.groupdict(default=""))


def sibling(address: str, name: str) -> str:
    """Return the address of a file, given its path relative to the folder of another file.

    >>> sibling("hf://org/net/onnx/model.onnx@main", "model.onnx_data")
    'hf://org/net/onnx/model.onnx_data@main'
    """
    if scheme_of(address) in (HUB, OCI):
        parse = parse_hub_file if scheme_of(address) == HUB else parse_oci_reference
        file: HubFile | OciReference = parse(address)
        folder, slash, _ = file.path.rpartition("/")
        return file._replace(path=f"{folder}{slash}{name}").address
    parts = urllib.parse.urlsplit(address)
    folder = parts.path.rpartition("/")[0]
    quoted_name = name if parts.scheme in BUCKETS else urllib.parse.quote(name)
    return parts._replace(path=f"{folder}/{quoted_name}").geturl()


def with_suffix(address: str, suffix: str) -> str:
    """Return the address with a suffix appended to the file's path.

    >>> with_suffix("hf://org/net/digits@main", "-symbol.json")
    'hf://org/net/digits-symbol.json@main'
    """
    return sibling(address, file_name(address) + suffix)


def file_name(address: str) -> str:
    """Return the last part of the path of an address."""
    if scheme_of(address) == HUB:
        return parse_hub_file(address).path.rpartition("/")[2]
    if scheme_of(address) == OCI:
        reference = parse_oci_reference(address)
        return (reference.path or reference.name).rpartition("/")[2]
    path = urllib.parse.urlsplit(address).path
    return urllib.parse.unquote(path).rpartition("/")[2]


def without_secrets(address: str) -> str:
    """Return an address without user, password, query and fragment, which may be secret.

    >>> without_secrets("https://me:pw@models.example:8443/net.onnx?token=1")
    'https://models.example:8443/net.onnx'
    """
    if scheme_of(address) == HUB:
        return address
    try:
        parts = urllib.parse.urlsplit(address)
    except ValueError:
        # An invalid address is not split reliably, so everything after the scheme may be secret.
        return f"{excerpt(scheme_of(address))}://…"
    host = parts.netloc.rpartition("@")[2]
    # In a registry's address, the fragment is the path of a file in the artifact.
    path = parts.fragment if parts.scheme == OCI else ""
    return parts._replace(netloc=host, query="", fragment=path).geturl()
