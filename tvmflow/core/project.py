"""The root of a project, and its folders for store, deliveries and releases.

The root is the nearest folder, at or above the current one, with `tvmflow.toml`, with a table `[tool.tvmflow]` in
`pyproject.toml`, or with `.git`; otherwise the current folder. Imports almost nothing, for fast up-to-date runs.
"""

import os

TABLE_FILE = "tvmflow.toml"
SHARED_FILE = "pyproject.toml"
REPOSITORY = ".git"

DEFAULTS = {"store": "cache", "dist": "dist", "releases": "releases"}
"""The settings of a project and their defaults: folders relative to the root."""

# As in git, the search for the root stops below these folders, for example to avoid network file systems.
_CEILING_VARIABLE = "GIT_CEILING_DIRECTORIES"
# Possible beginnings of the table in `pyproject.toml`, after removal of spaces and quotes.
_HEADERS = (b"\n[tool.tvmflow]", b"\n[tool]", b"\ntool.", b"\ntool=")


class Project:
    """A project with absolute paths; `marker` is the file that makes `root` the root, or empty."""

    def __init__(self, root: str, marker: str = "", settings: dict[str, str] | None = None) -> None:
        self.root = root
        self.marker = marker
        self.settings = settings or {}

    @property
    def store(self) -> str:
        """The folder of the store."""
        return self._folder("store")

    @property
    def dist(self) -> str:
        """The folder for delivered files."""
        return self._folder("dist")

    @property
    def releases(self) -> str:
        """The folder of all releases."""
        return self._folder("releases")

    def origin(self, name: str) -> str:
        """Return which setting determines a folder, for messages."""
        if name in self.settings:
            return f"`{name}` in {shortest_path(self.marker)}"
        return "the default"

    def _folder(self, name: str) -> str:
        folder = self.settings.get(name, DEFAULTS[name])
        return os.path.normpath(os.path.join(self.root, folder))


def list_packaged_paths(name: str) -> list[str]:
    """Return the possible paths of a packaged file or folder: in the installed package and in a checkout."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return [os.path.join(package, name), os.path.join(os.path.dirname(package), name)]


def find_project() -> Project:
    """Return the project of the current folder; RecipeError for mistakes in its table."""
    here = folder = os.getcwd()
    named = os.environ.get(_CEILING_VARIABLE, "").split(os.pathsep)
    ceilings = {os.path.normpath(path) for path in named if path}
    while True:
        project = _read_project(folder)
        parent = os.path.dirname(folder)
        if project is not None:
            return project
        if parent == folder or parent in ceilings:
            return Project(here)
        folder = parent


def _read_project(folder: str) -> Project | None:
    content = _read(f"{folder}/{TABLE_FILE}")
    if content is not None:
        # An empty file only marks the root and needs no TOML parser.
        is_empty = all(line.strip()[:1] in (b"", b"#") for line in content.splitlines())
        settings = {} if is_empty else _read_table(f"{folder}/{TABLE_FILE}", content)
        return Project(folder, f"{folder}/{TABLE_FILE}", settings)
    content = _read(f"{folder}/{SHARED_FILE}")
    if content is not None and b"tvmflow" in content:
        bare = b"\n" + content.translate(None, b" \t\"'")
        if any(header in bare for header in _HEADERS):
            settings = _read_table(f"{folder}/{SHARED_FILE}", content)
            if settings is not None:
                return Project(folder, f"{folder}/{SHARED_FILE}", settings)
    if os.path.lexists(f"{folder}/{REPOSITORY}"):
        return Project(folder, f"{folder}/{REPOSITORY}")
    return None


def _read(path: str) -> bytes | None:
    try:
        if not os.path.isfile(path):
            return None
        with open(path, "rb") as stream:
            return stream.read()
    except OSError as error:
        from tvmflow.core.errors import EnvironmentProblem

        raise EnvironmentProblem(f"{path} cannot be read: {error.strerror}") from error


def _read_table(path: str, content: bytes) -> dict[str, str] | None:
    # Most projects have no table, and importing the TOML parser takes as long as an up-to-date run.
    from tvmflow.core.project_table import read_table

    table = () if path.endswith(TABLE_FILE) else ("tool", "tvmflow")
    return read_table(shortest_path(path), content, table, DEFAULTS)


def shortest_path(path: str) -> str:
    """Return a path for messages: relative if it is inside the current folder, never with `..`."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    is_inside = relative.partition(os.sep)[0] != os.pardir
    return relative if is_inside and len(relative) < len(path) else path


STORE_VARIABLE = "TVMFLOW_STORE"


def store_root(argv: list[str], default: str) -> str:
    """Return the path of the store: `--store DIR` in `argv`, $TVMFLOW_STORE, or `default`."""
    root = os.environ.get(STORE_VARIABLE) or default
    for index, word in enumerate(argv):
        if word == "--store" and index + 1 < len(argv):
            root = argv[index + 1]
        elif word.startswith("--store="):
            root = word.partition("=")[2]
    return os.path.abspath(root)
