"""A fixture around `hub_server.HubServer`: clients in fresh processes that see it as the only Hub there is.

`huggingface_hub` reads its endpoint, its cache folder, offline mode and whether to use Xet once, at import. So the
client code of a test runs in a process of its own, `hub.run("...")`, with those settings in its environment. The
process of the tests stays offline.
"""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hub_server import HubServer, Request


ROOT = Path(__file__).resolve().parents[1]
# a module that is None in sys.modules cannot be imported, and importlib.util.find_spec does not find it
RUNNER = (
    "import runpy, sys; sys.modules.update(dict.fromkeys(sys.argv[2:])); runpy.run_path(sys.argv[1], {}, '__main__')"
)


class Hub:
    """A running Hub, and the environment that makes clients use it."""

    def __init__(self, server: HubServer, folder: Path):
        self.server, self.folder = server, folder
        self.url, self.token, self.user = server.url, server.token, server.user
        changed = re.compile(r"(HF_|HUGGING|TRANSFORMERS_).*|.*_PROXY", re.IGNORECASE)
        self.env = {name: value for name, value in os.environ.items() if not changed.fullmatch(name)}
        # whatever goes elsewhere ends here too, with a 501 and a line in `requests`
        self.env |= {"http_proxy": self.url, "https_proxy": self.url, "no_proxy": "127.0.0.1"}
        self.env |= {"HF_ENDPOINT": self.url, "HF_TOKEN": self.token, "HF_HOME": str(folder / "home")}
        disabled = [f"HF_HUB_DISABLE_{name}" for name in ("XET", "TELEMETRY", "PROGRESS_BARS")]
        self.env |= dict.fromkeys([*disabled, "DISABLE_SAFETENSORS_CONVERSION"], "1")
        self.env |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        self.env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.env.setdefault("OMP_NUM_THREADS", "1")

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path to content of everything in the repository."""
        return self.server.files(repo_id, revision)

    def put(self, repo_id: str, files: dict[str, bytes | str], **options) -> str:
        """Put files into a repository without a client, making it if needed; returns the sha of the commit."""
        return self.server.put(repo_id, files, **options)

    @property
    def requests(self) -> list[Request]:
        """Every request so far: method, path, query, headers, body, status."""
        return self.server.requests

    def run(
        self, code: str, *, without: tuple[str, ...] = ("hf_relpos",), extra_env: dict[str, str | None] | None = None
    ) -> subprocess.CompletedProcess:
        """Run Python code in a fresh process with empty caches, where the modules `without` cannot be imported.

        The working directory is a new empty folder. `extra_env` is added to the environment (None removes a variable;
        `HF_HOME=hub.env["HF_HOME"]` shares a cache between runs). Fails with everything the process wrote unless it
        exits with 0.
        """
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        (folder / "work").mkdir()
        script = folder / "client.py"
        script.write_text(textwrap.dedent(code), encoding="utf-8")
        given = self.env | {"HF_HOME": str(folder / "home")} | (extra_env or {})
        env = {key: value for key, value in given.items() if value is not None}
        command = [sys.executable, "-c", RUNNER, str(script), *without]
        how = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(command, env=env, cwd=folder / "work", **how)
        if done.returncode:
            last = "\n".join(f"{r.status} {r.method} {r.path}" for r in self.requests[-10:])
            output = f"--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}\n--- last requests\n{last}"
            pytest.fail(f"the client process exited with {done.returncode}\n{output}", pytrace=False)
        return done


@contextmanager
def running_hub(folder: Path) -> Iterator[Hub]:
    """A new, empty Hub. For fixtures of other scopes, to push once and look at the result in several tests."""
    folder.mkdir(exist_ok=True)
    with HubServer() as server:
        yield Hub(server, folder)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A new, empty Hub."""
    with running_hub(tmp_path / "hub") as hub:
        yield hub
