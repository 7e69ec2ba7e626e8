"""Terminal output: progress bars, tables, and errors and warnings without tracebacks."""

import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


# Called as progress(stage, completed, total) during a long computation.
ProgressCallback = Callable[[str, float, float], None]

LINE_SECONDS = 30.0  # between two lines of progress, where there is no terminal


@contextmanager
def spinner(what: str, visible: bool = True) -> Iterator[None]:
    """A spinner on standard error while something takes long, removed at the end; nothing without a terminal.

    Args:
        what: is done.
        visible: whether it is shown.
    """
    with Console(stderr=True, quiet=not visible).status(what):
        yield


@contextmanager
def progress_bar(console: Console, visible: bool = True, first: str = "starting") -> Iterator[ProgressCallback]:
    """A bar for each stage, with the time that the stage still takes, removed at the end.

    Where there is no terminal, it is a line every half minute.

    Args:
        console: where it is shown.
        visible: whether it is.
        first: the stage before anything is counted.

    Yields:
        A function to call as `progress(stage, completed, total)`; another stage begins a bar of its own.
    """
    has_bar = visible and console.is_terminal
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not has_bar) as bar:
        task = bar.add_task(first, total=None)  # it moves before anything is counted
        stage, due = first, 0.0

        def update(description: str, completed: float, total: float) -> None:
            nonlocal stage, due
            if description != stage:
                stage = description
                bar.reset(task, description=description)
            bar.update(task, completed=completed, total=total)
            if visible and not has_bar and completed < total and time.monotonic() >= due:
                due = time.monotonic() + LINE_SECONDS
                line = f"{description}: {100 * completed / total:.0f} %"
                console.print(line, markup=False, highlight=False, soft_wrap=True)

        yield update


@contextmanager
def timed_step(console: Console, title: str) -> Iterator[None]:
    """A rule with the title of a step; afterwards its wall time and processor time, in seconds."""
    started, used = time.monotonic(), time.process_time()
    console.rule(title)
    yield
    console.print(f"  {time.monotonic() - started:.1f} s, {time.process_time() - used:.1f} s of processor time")


def new_table(*columns: str, **settings: Any) -> Table:
    """An empty table that cuts nothing off in a narrow terminal; `settings` are of `rich.table.Table`."""
    table = Table(*columns, box=box.SIMPLE_HEAD, **settings)
    for column in table.columns:
        column.overflow = "fold"
    return table


def print_table(console: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column is text and whose others are numbers."""
    table = new_table(*columns, title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    console.print(table)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose first column is text and whose others are numbers; no newline at the end."""
    lines = [list(columns), ["---", *["---:"] * (len(columns) - 1)], *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def print_message(kind: str, text: str) -> None:
    """Print "kind: text" to stderr, not wrapped, with brackets as they are."""
    Console(stderr=True).print(f"{kind}: {text}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def plain_errors(options: Mapping[str, str] | None = None) -> Iterator[None]:
    """Print an error that the user can correct, a bad value or a missing extra, without traceback.

    Args:
        options: option of the command line for each argument of a function that an error may begin with.

    Raises:
        typer.Exit: with code 2, for a `ValueError` or a `ModuleNotFoundError`.
    """
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        text = " ".join(str(error).split())
        for argument, option in (options or {}).items():
            text = re.sub(rf"^(?:texts: )?{argument} = ", f"{option} ", text)
            text = re.sub(rf"^{argument}\['(\w+)'\] = ", rf"{option} \1=", text)
        print_message("Error", text)
        raise typer.Exit(2) from None


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each `UserWarning` as one line of text; other categories, for programmers, are shown as before."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_plainly(message: Warning | str, category: type[Warning], *place: Any, **named: Any) -> None:
            if not issubclass(category, UserWarning):
                return show(message, category, *place, **named)
            print_message("Warning", " ".join(str(message).split()))

        warnings.showwarning = show_plainly
        yield
