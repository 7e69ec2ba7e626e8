"""Tables and files of benchmarks, and numbers in words.

hf_relpos is imported where it is used: benchmarks also run with an older Transformers, as a peer that only measures.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


# Title, columns, rows.
Table = tuple[str, list[str], list[list[str]]]


def machine_and_versions(environment: dict[str, Any]) -> str:
    """What `measuring.environment` returns, in a line; the JSON file has all of it."""
    cores = f"{environment['threads']} of {environment['cores']} cores, load {environment['load']:.1f}"
    cpu = f"family/model {environment['cpu_family_model']}, {environment['cpu_capability']}"
    versions = f"torch {environment['torch']}, transformers {environment['transformers']}"
    return f"{environment['machine']} ({cpu}), {cores}; {versions}; {environment['date']}."


def describe(environment: dict[str, Any]) -> str:
    """What was run, where, and how it was timed, in paragraphs."""
    times = environment["protocol"].replace(", which other jobs on the machine change less than wall time", "")
    return f"{machine_and_versions(environment)}\n\n`{environment['command']}`\n\nTimes: {times}.\n"


NOTES = "<!-- notes -->"


def notes_of(path: Path) -> str | None:
    """The notes of a card: text below the line `<!-- notes -->`, written by hand; None without that line."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text.partition(f"{NOTES}\n")[2] if f"{NOTES}\n" in text else None


def with_notes(card: str, path: Path) -> str:
    """A card with the notes of the file that it replaces, and room for them."""
    return f"{card}\n{NOTES}\n{notes_of(path) or ''}"


def keep_notes(card: str, path: Path) -> str:
    """A card with the notes of the file that it replaces, if it has any."""
    return card if notes_of(path) is None else with_notes(card, path)


def stored(path: Path) -> dict[str, Any]:
    """The results of earlier runs in `path`.json; {} without any."""
    file = path.with_name(f"{path.name}.json")
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def write_report(path: Path, content: dict[str, Any], card: str) -> None:
    """Write `path`.json and `path`.md, each atomically; notes in the latter are kept."""
    from hf_relpos.files import write_json, write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path.with_name(f"{path.name}.json"), content)
    card_path = path.with_name(f"{path.name}.md")
    write_text(card_path, keep_notes(card, card_path))


def print_tables(tables: Sequence[Table]) -> None:
    """Print tables in the terminal."""
    from rich.console import Console

    from hf_relpos.console import print_table

    for title, columns, rows in tables:
        print_table(Console(width=140), title, columns, rows)


def markdown_sections(tables: Sequence[Table]) -> str:
    """Tables as Markdown, each under its title; of one without rows the title alone."""
    from hf_relpos.console import markdown_table

    made = [(title, f"\n{markdown_table(columns, rows)}\n" if rows else "") for title, columns, rows in tables]
    return "".join(f"\n## {title}\n{text}" for title, text in made)
