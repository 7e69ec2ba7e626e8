"""The table of docs/reliability.md: what random inputs ended in, from the counts that `make fuzz` stores.

make fuzz                          # tries them, and stores the counts in docs/results/fuzz.json
python scripts/maintenance/write_cards.py      # writes the table anew from the stored counts
"""

from collections import Counter, defaultdict


CARD_PATH = "reliability.md"  # below docs

TEXT = """\
# Reliability

How the package treats broken and odd inputs. Written by `make fuzz`, which runs the property tests
`tests/test_fuzz_*.py` on random inputs; `make test` runs a few
fixed ones. Each input must give a right answer, or an error of a documented type that names what is wrong. NaN, a
hang, a partial file or any other exception fails the test, and its smallest form becomes a regression test.
`docs/results/fuzz.json` divides some areas further.

"""


def card(counts: dict[str, dict[str, int]]) -> str:
    """The table in Markdown, of counts by area and outcome; the JSON file has the parts of an area, "area: part"."""
    areas: defaultdict[str, Counter[str]] = defaultdict(Counter)
    parts = Counter(name.partition(":")[0] for name in counts)
    for name, outcomes in counts.items():
        area = name.partition(":")[0]
        areas[area if parts[area] > 1 else name].update(outcomes)
    rows = ["| area | inputs | right answers | errors, by type |", "| --- | --- | --- | --- |"]
    for area, outcomes in areas.items():
        errors = ", ".join(f"`{name}` {count:,}" for name, count in outcomes.most_common() if name != "right")
        rows.append(f"| {area} | {outcomes.total():,} | {outcomes['right']:,} | {errors or '–'} |")
    total = sum(areas.values(), Counter())
    rows.append(f"| all | {total.total():,} | {total['right']:,} | {total.total() - total['right']:,} |")
    return TEXT + "\n".join(rows) + "\n"
