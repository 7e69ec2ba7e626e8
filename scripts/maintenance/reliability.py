"""The table of docs/reliability.md: what random inputs ended in, from the counts that `make fuzz` stores.

make fuzz                          # tries them, and stores the counts in docs/results/fuzz.json
python scripts/maintenance/write_cards.py      # writes the table anew from the stored counts
"""

CARD_PATH = "reliability.md"  # below docs

TEXT = """\
# Reliability

Written by `make fuzz`, which runs the property tests `tests/test_fuzz_*.py` on random inputs; `make test` tries a few,
always the same. Each input must end in a right answer, or in an error of a documented type that names what is
wrong: never in NaN, a hang, a partial file or any other exception. One that does not fails the test, and the inputs it
is reduced to become a test of their own. So the table counts inputs, not failures.

"""


def card(counts: dict[str, dict[str, int]]) -> str:
    """The table in Markdown, of counts by area and outcome, as the JSON file has them."""
    rows = ["| area | inputs | right answers | errors, by type |", "| --- | --- | --- | --- |"]
    for area, outcomes in counts.items():
        errors = sorted(((name, count) for name, count in outcomes.items() if name != "right"), key=lambda e: -e[1])
        listed = ", ".join(f"`{name}` {count:,}" for name, count in errors) or "–"
        rows.append(f"| {area} | {sum(outcomes.values()):,} | {outcomes.get('right', 0):,} | {listed} |")
    total, right = (
        sum(sum(outcomes.values()) for outcomes in counts.values()),
        sum(outcomes.get("right", 0) for outcomes in counts.values()),
    )
    rows.append(f"| all | {total:,} | {right:,} | {total - right:,} |")
    return TEXT + "\n".join(rows) + "\n"
