"""The page: what is generated goes where the page has room for it, and nowhere else."""

from __future__ import annotations

from study.test_summary import record

from benchmarks.study import report, tables
from benchmarks.study.alarm import Alarm
from benchmarks.study.summary import summarise


def run(arm: str, seed: int, rewards: list[float]) -> tables.Run:
    steps = [record(step, reward) for step, reward in enumerate(rewards, 1)]
    return tables.Run(arm, seed, steps, summarise(steps, 0.02), Alarm(None, None, None, None, ""))


def test_a_page_without_markers_gets_every_part_with_its_heading() -> None:
    page = report.fill("# Page\n", {"One": "1", "Two": "2"})
    assert [line for line in page.splitlines() if line.startswith("#")] == ["# Page", "## One", "## Two"]


def test_prose_around_the_markers_stays_when_the_parts_are_made_again() -> None:
    page = f"# Page\nbefore\n{report.START}\nold\n{report.END}\nbetween\n{report.START}\n{report.END}\nafter\n"
    once = report.fill(page, {"One": "new", "Two": "2"})
    assert report.fill(once, {"One": "new", "Two": "2"}) == once
    assert "old" not in once
    kept = [line for line in once.splitlines() if line in ("before", "new", "between", "2", "after")]
    assert kept == ["before", "new", "between", "2", "after"]


def test_seeds_stand_beside_each_other_in_their_order() -> None:
    runs = [run("sc_mis", 0, [0.5] * 10), run("sc_mis", 1, [0.75] * 10)]
    row = tables.outcomes(runs).splitlines()[-1]
    assert "| `sc_mis` | 0.50 / 0.75 | **0.62** | 0.50 / 0.75 | - / - |" in row
    assert row.endswith("| stable: 0.847 at 180 |")


def test_the_last_line_names_the_seeds_that_collapsed() -> None:
    fallen = run("grpo", 1, [0.9] * 6 + [0.1] * 6)
    found = report.result([run("grpo", 0, [0.9] * 12), fallen])
    assert found["arms"]["grpo"]["collapsedSeeds"] == [1]
    assert found["runs"] == 2


def test_a_table_of_all_seeds_has_one_header() -> None:
    text = report._with_seeds([run("grpo", 0, [0.9] * 3), run("grpo", 1, [0.9] * 3)])
    lines = text.splitlines()
    assert [line.split(",")[0] for line in lines] == ["seed", "0", "0", "0", "1", "1", "1"]
