"""benchmarks.observability: what its tables say of given turns, and that what a page takes is measured."""

from __future__ import annotations

from benchmarks.observability import CONTENDERS, alone_to_text, pages, pieces, summary, to_text


def test_a_contender_is_compared_with_the_turns_beside_its_own() -> None:
    """The machine is twice as slow in the second half, and "metrics" takes a tenth more in both."""
    others = [contender.name for contender in CONTENDERS[1:]]
    figures: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in CONTENDERS}
    for ms in (10.0, 10.0, 20.0, 20.0):
        for name in others:
            figures["off"].append({"ms": ms, "cpu_ms": 2 * ms})
            more = 1.1 if name == "metrics" else 1.0
            figures[name].append({"ms": ms * more, "cpu_ms": 2 * ms * more})
    rows = {row["name"]: row for row in summary(figures)}
    for name in others:
        for unit in ("ms", "cpu_ms"):
            expected = 10.0 if name == "metrics" else 0.0
            assert [round(each, 6) for each in rows[name][f"{unit}_more_percent"]] == [expected] * 3
    text = to_text(list(rows.values()), 50)
    assert "| metrics | 16.50 | +10.00 % (+10.00 to +10.00) | 33.00 | +10.00 % (+10.00 to +10.00) |" in text
    assert "| off | 15.00 | – | 30.00 | – |" in text


def test_a_scraper_asks_every_page_of_two_machines_and_a_cpu_machine() -> None:
    assert pages(9400) == [9400, 9401, 9402, 9403, 9405, 9406, 9407, 9410]


def test_each_thing_takes_some_time() -> None:
    rows = pieces(100.0, 0.01)
    assert len(rows) >= 6
    assert all(row["us"] > 0 and row["percent"] > 0 for row in rows)
    assert alone_to_text(rows).count("\n") == len(rows) + 1
