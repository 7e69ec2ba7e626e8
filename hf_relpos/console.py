"""Terminal output: progress bars, tables, and errors and warnings without tracebacks."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table


# Seconds between two lines of progress where there is no terminal.
LINE_SECONDS = 30.0


@contextmanager
def spinner(what: str, visible: bool = True) -> Iterator[None]:
    """A spinner on standard error while something takes long, removed at the end.

    Args:
        what: is done.
        visible: whether it is shown; where there is no terminal it never is.
    """
    with Console(stderr=True, quiet=not visible).status(what):
        yield


@contextmanager
def progress_bar(
    console: Console, visible: bool = True, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[str, int, int], None]]:
    """A bar with the remaining time, removed at the end; where there is no terminal, a line every half minute.

    Args:
        console: where it is shown.
        visible: whether it is.
        clock: seconds, for the lines.

    Yields:
        A function to call as `progress(description, completed, total)`; it does nothing unless `visible`.
    """
    if visible and not console.is_terminal:
        yield _progress_lines(console, clock)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not visible) as bar:
        task = bar.add_task("starting", total=None)  # it moves before anything is counted

        def update(description: str, completed: int, total: int) -> None:
            bar.update(task, description=description, completed=completed, total=total)

        yield update


def _progress_lines(console: Console, clock: Callable[[], float]) -> Callable[[str, int, int], None]:
    """A function that prints progress, at most once every `LINE_SECONDS`."""
    start, printed = clock(), -LINE_SECONDS

    def update(description: str, completed: int, total: int) -> None:
        nonlocal printed
        passed = clock() - start
        if passed - printed < LINE_SECONDS or completed >= total:  # the result will say that it is done
            return
        printed = passed
        line = f"{description}: {100 * completed // max(total, 1)} % done after {passed:.0f} s"
        if completed:
            line += f", about {passed / completed * (total - completed):.0f} s left"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return update


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
def plain_errors() -> Iterator[None]:
    """Print an error that the user can correct, a bad value or a missing extra, without traceback.

    Raises:
        typer.Exit: with code 2, for a `ValueError` or a `ModuleNotFoundError`.
    """
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        print_message("Error", " ".join(str(error).split()))
        raise typer.Exit(2) from None


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each `UserWarning` as one line of text; other categories, for programmers, are shown as before."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def show_plainly(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: Any = None,
        ) -> None:
            if not issubclass(category, UserWarning):
                return show(message, category, filename, lineno, file, line)
            print_message("Warning", " ".join(str(message).split()))

        warnings.showwarning = show_plainly
        yield
