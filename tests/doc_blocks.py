"""Code blocks of README.md and docs/, and a process that runs those of a page.

A page is run from its first block to its last, in one folder and one Python namespace, as a reader would paste them.
Where a block cannot run in the tests, a comment on the line before says why; a reader of the page does not see it:

    <!-- not run in the tests: needs a GPU -->

As a program this file is that process: it imports what is slow once, and gives each page a process of its own.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple


FENCE = re.compile(r"^(?:<!-- not run in the tests: ([^\n]+) -->\n)?```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """`reason`: why it is not run, empty where it is."""

    language: str
    reason: str
    text: str


def blocks(page: Path) -> list[Block]:
    """The code blocks of a page; a fence with anything but its language, or without, is an error."""
    found = []
    for reason, language, text in FENCE.findall(page.read_text("utf-8")):
        assert language.isalpha(), f"{page}: ```{language}"
        found.append(Block(language, reason, text))
    return found


def commands(text: str) -> list[str]:
    """The commands of a block of bash, continued lines joined."""
    return [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]


def run_command(command: str) -> None:
    """`hf-relpos` without a new interpreter, anything else in a shell."""
    print("$", command, flush=True)
    words = shlex.split(command, comments=True)
    if words[0] != "hf-relpos":
        subprocess.run(["bash", "-euc", command], check=True)
        return
    from hf_relpos.cli import app

    status = app(words[1:], standalone_mode=False)  # a SystemExit is a failure
    assert not status, f"exit code {status}: {command}"


def run_page(folder: str, found: list[Block]) -> None:
    """All blocks of a page, in that folder."""
    os.chdir(folder)
    names: dict = {"__name__": "__main__"}
    for number, block in enumerate(found, 1):
        if block.language == "python":
            print(f">>> block {number}", flush=True)
            exec(compile(block.text, f"block {number}", "exec"), names)
        else:
            for command in commands(block.text):
                run_command(command)


def main() -> None:
    """For each line of the input, {"folder", "blocks"}, a page: a line {"status", "log"}."""
    import torch
    import transformers.trainer  # noqa: F401

    import hf_relpos.cli
    import hf_relpos.conversion
    import hf_relpos.models.modeling_relpos_bert  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        log = Path(request["folder"]).with_suffix(".log")
        process = os.fork()
        if not process:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            status = 0
            try:
                run_page(request["folder"], [Block(*block) for block in request["blocks"]])
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(process, 0)
        print(json.dumps({"status": status, "log": log.read_text()}), flush=True)


if __name__ == "__main__":
    main()
