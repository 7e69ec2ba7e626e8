"""The committed cards of docs/results are what the committed results give."""

from launching import SCRIPTS, import_script


def test_cards_are_current(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)  # the modules of the cards are imported when they are needed
    cards = import_script("write_cards").cards()
    stale = [path for path, text in cards.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run: python scripts/write_cards.py"


def test_all_results_have_a_card():
    results = SCRIPTS.parent / "docs" / "results"
    stored = {str(path.relative_to(results)) for path in results.rglob("*.json")}
    assert stored <= set(import_script("write_cards").CARDS)
