"""CI services that run the shell steps of their files on this machine: caches and artifacts are folders."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml  # noqa: TID251 - of other tools, with values that recipes refuse

ROOT: Final = Path(__file__).parents[2]
# `gh` as far as the action calls it: runs by event, the artifacts of each, and comments.
_GH: Final = """\
case "$1 $2" in
    "run list") cat "$SERVICE/listed/${10}" ;;
    "run download") cp "$SERVICE/artifacts/$3/$7"/* "$9" ;;
    "pr comment") cp "$7" "$SERVICE/comment.md" ;;
esac
"""
# `pip` of both services: what it would install is written down.
_PIP: Final = 'echo "$@" >> "$SERVICE/pip.log"\n'
# `curl` of GitLab's job: an artifact of the last job, and a note.
_CURL: Final = """\
for word; do last=$word; done
case "$last" in
    */notes) cp comparison.md "$SERVICE/comment.md" ;;
    *) cp "$SERVICE/artifacts/trials.jsonl.gz" earlier.jsonl.gz ;;
esac
"""


class Service:
    """A CI service with one job.

    Attributes:
        folder: Where it keeps caches, artifacts and comments.
        checkout: The project that it checks out for each run.
    """

    def __init__(self, folder: Path, checkout: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.checkout = checkout
        self._environment = environment
        self._runs = 0
        programs = folder / "bin"
        programs.mkdir(parents=True)
        tvmflow = f'exec "{sys.executable}" -m tvmflow "$@"\n'
        for name, text in {
            "gh": _GH,
            "curl": _CURL,
            "pip": _PIP,
            "python": _PIP,
            "tvmflow": tvmflow,
        }.items():
            self.replace_program(name, text)

    @property
    def comment(self) -> str:
        """The last comment on a pull request; empty without one."""
        path = self.folder / "comment.md"
        return path.read_text() if path.exists() else ""

    @property
    def installed(self) -> str:
        """The arguments of `pip`, a line a call."""
        return (self.folder / "pip.log").read_text()

    def replace_program(self, name: str, text: str) -> None:
        """Replace a program that the steps call by a script of bash."""
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def evict_caches(self) -> None:
        """Lose all caches, as services do when they were not used for a week."""
        shutil.rmtree(self.folder / "caches")

    def _check_out(self) -> Path:
        self._runs += 1
        work = self.folder / f"run-{self._runs}"
        ignored = shutil.ignore_patterns("cache", "dist", ".tvmflow*")
        shutil.copytree(self.checkout, work, ignore=ignored)
        return work

    def _run_shell(self, script: str, work: Path, variables: dict[str, str]) -> tuple[int, str]:
        path = f"{self.folder / 'bin'}:{self._environment['PATH']}"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
            cwd=work,
            env={**self._environment, "PATH": path, "SERVICE": str(self.folder), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        return done.returncode, done.stdout

    def _save(self, name: str, work: Path, paths: list[str], area: str) -> None:
        for path in paths:
            source, to = work / path, self.folder / area / name / path
            if source.is_dir():
                shutil.copytree(source, to, dirs_exist_ok=True)
            elif source.exists():
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, to)

    def _restore(self, prefixes: list[str], work: Path) -> str:
        """Restore the latest cache whose name begins with the first prefix that has one; return its name."""
        caches = self.folder / "caches"
        for prefix in prefixes:
            found = [path for path in caches.glob("*") if path.name.startswith(prefix)]
            if found:
                latest = max(found, key=lambda path: path.stat().st_mtime_ns)
                shutil.copytree(latest, work, dirs_exist_ok=True)
                return latest.name
        return ""


class GithubActions(Service):
    """GitHub: the steps of the action, called with a workflow's inputs."""

    def run(self, workflow: str, branch: str = "main", target: str = "") -> tuple[int, str]:
        """Run a workflow on a branch, or on a pull request to `target`; return its exit code and output."""
        work = self._check_out()
        job = yaml.safe_load(workflow)["jobs"]["models"]
        call = next(step for step in job["steps"] if "tvmflow/" in step.get("uses", ""))
        action = yaml.safe_load((ROOT / "action.yml").read_text())
        inputs = {name: entry.get("default", "") for name, entry in action["inputs"].items()}
        inputs |= call["with"]
        values = {
            "github.action_path": str(ROOT),
            "github.event_name": "pull_request" if target else "push",
            "github.event.pull_request.number": "7",
            "github.head_ref || github.ref_name": branch,
            "github.base_ref || github.event.repository.default_branch": target or "main",
            "github.run_id": str(self._runs),
            "github.run_attempt": "1",
            "github.token": "token",
            "inputs.folder || '.'": inputs["folder"] or ".",
            "inputs.folder && format('{0}/', inputs.folder)": inputs["folder"]
            and f"{inputs['folder']}/",
            "runner.os": "Linux",
            **{f"inputs.{name}": str(value) for name, value in inputs.items()},
        }

        def fill(text: str) -> str:
            return re.sub(r"\$\{\{ (.*?) \}\}", lambda match: values[match[1]], text)

        listed = self.folder / "listed" / values["github.event_name"]
        code, output = 0, ""
        for step in action["runs"]["steps"]:
            condition = step.get("if", "success()")
            needed = {
                "success()": code == 0,
                "always()": True,
                "steps.cache.outputs.cache-matched-key == ''": code == 0
                and not values.get("steps.cache.outputs.cache-matched-key"),
                "github.event_name == 'pull_request' && !cancelled()": bool(target),
            }[condition]
            if not needed:
                continue
            if "run" in step:
                variables = {name: fill(value) for name, value in step.get("env", {}).items()}
                variables["GITHUB_STEP_SUMMARY"] = str(self.folder / "summary.md")
                variables |= {"GITHUB_REPOSITORY": "o/r", "GITHUB_WORKFLOW": "models"}
                place = work / fill(step.get("working-directory", "."))
                status, text = self._run_shell(step["run"], place, variables)
                code, output = code or status, output + text
            else:
                self._use(step["uses"], step.get("with", {}), work, values, fill)
        listed.parent.mkdir(exist_ok=True)
        with listed.open("a") as stream:
            stream.write(f"{self._runs}\n")
        return code, output

    def _use(
        self, name: str, options: dict[str, Any], work: Path, values: dict[str, str], fill: Any
    ) -> None:
        paths = fill(str(options.get("path", ""))).split()
        if name.startswith("actions/cache/restore"):
            key, more = fill(options["key"]), fill(options["restore-keys"]).split("\n")
            found = self._restore([key, *filter(None, more)], work)
            values["steps.cache.outputs.cache-matched-key"] = found
            values["steps.cache.outputs.cache-primary-key"] = key
        elif name.startswith("actions/cache/save"):
            self._save(fill(options["key"]), work, paths, "caches")
        elif name.startswith("actions/upload-artifact"):
            self._save(fill(options["name"]), work, paths, f"artifacts/{self._runs}")
        else:
            assert name.startswith("actions/setup-python"), name


class GitlabCi(Service):
    """GitLab: the scripts of a job."""

    def run(self, pipeline: str, branch: str = "main", target: str = "") -> tuple[int, str]:
        """Run a job on a branch, or on a merge request to `target`; return its exit code and output."""
        work = self._check_out()
        job = yaml.safe_load(pipeline)["tvmflow"]
        variables = {
            "CI_PROJECT_DIR": str(work),
            "CI_DEFAULT_BRANCH": "main",
            "CI_COMMIT_BRANCH": "" if target else branch,
            "CI_MERGE_REQUEST_IID": "7" if target else "",
            "CI_MERGE_REQUEST_TARGET_BRANCH_NAME": target,
            "CI_API_V4_URL": "https://gitlab.example.org/api/v4",
            "CI_PROJECT_ID": "1",
            "CI_JOB_NAME": "tvmflow",
            "CI_JOB_TOKEN": "token",
            "TVMFLOW_GITLAB_TOKEN": "token",
        }
        for name, value in job["variables"].items():
            variables[name] = value.replace("$CI_PROJECT_DIR", str(work))
        for cache in job["cache"]:
            self._restore([cache["key"]], work)
        # each is one shell, and the job is what the first one ends with
        code, output = self._run_shell("\n".join(job["script"]), work, variables)
        output += self._run_shell("\n".join(job["after_script"]), work, variables)[1]
        for cache in job["cache"]:
            shutil.rmtree(self.folder / "caches" / cache["key"], ignore_errors=True)
            self._save(cache["key"], work, cache["paths"], "caches")
        self._save("", work, job["artifacts"]["paths"], "artifacts")
        return code, output
