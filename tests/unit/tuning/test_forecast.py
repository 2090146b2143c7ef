"""The forecast of a search: what it finds in the ledger, and what is left to measure."""

from __future__ import annotations

from tests.support.trials import trial
from tvmflow.core.keys import UNLIMITED_TRIALS
from tvmflow.tuning.budget import (
    Budget,
    BudgetRules,
    Task,
    end_name,
    forecast_trials,
    measure_pace,
    workload_shares,
)
from tvmflow.tuning.ledger import WorkloadRecords
from tvmflow.tuning.trials import Baseline, ExhaustedMark, SearchEnd, SearchTime

TASKS = [Task(name * 64, f"kernel_{name}", 1, 1e6, "") for name in "ab"]
SCHEDULES = 8


def ledger(**trials: int) -> dict[str, WorkloadRecords]:
    """Return the records of both workloads: an untuned time, and so many trials, a second apart."""
    records = {task.key: WorkloadRecords() for task in TASKS}
    for name, number in trials.items():
        records[name * 64].keep(Baseline(SCHEDULES, 1e-2, "2023-01-01T00:00:00.000+00:00"))
        for index in range(number):
            records[name * 64].keep(trial(index, when=f"2024-01-01T00:00:{index:02d}.000+00:00"))
    return records


def test_an_empty_ledger_leaves_the_whole_budget() -> None:
    """All kernels are new, and nothing says how long a trial takes."""
    forecast = forecast_trials(TASKS, ledger(), BudgetRules(40), SCHEDULES, "evolutionary/0")
    assert forecast.kernels == forecast.new_kernels == ("kernel_a", "kernel_b")
    assert (forecast.reused, forecast.at_most, forecast.seconds_per_trial) == (0, 40, None)


def test_a_raised_budget_leaves_what_the_ledger_lacks() -> None:
    """As the search itself counts: the trials of rounds that it replays are never measured again."""
    forecast = forecast_trials(TASKS, ledger(a=19, b=3), BudgetRules(64), SCHEDULES, "any")
    assert (forecast.new_kernels, forecast.reused, forecast.at_most) == ((), 22, 42)
    # 21 intervals: each of b's trials has one of a at the same second
    assert forecast.seconds_per_trial == 18 / 21


def test_a_budget_that_the_ledger_has_leaves_nothing() -> None:
    """The same trials that the search would give out, and no other."""
    records, rules = ledger(a=40, b=40), BudgetRules(30)
    assert forecast_trials(TASKS, records, rules, SCHEDULES, "any").at_most == 0
    budget = Budget(workload_shares(TASKS, records, rules, SCHEDULES, "any"), rules)
    while planned := budget.next_round():
        for key, count in planned.items():
            budget.record(key, [1e-3] * count)
    assert forecast_trials(TASKS, records, rules, SCHEDULES, "any").reused == budget.spent == 30


def test_an_exhausted_space_leaves_nothing_for_its_kernel() -> None:
    """The search that came to its end marked it; another search goes on."""
    records = ledger(a=2, b=2)
    for key in records:
        records[key].keep(ExhaustedMark("evolutionary/0", 2, "2024-01-01T00:01:00.000+00:00"))
    rules = BudgetRules(64)
    assert forecast_trials(TASKS, records, rules, SCHEDULES, "evolutionary/0").at_most == 0
    assert forecast_trials(TASKS, records, rules, SCHEDULES, "evolutionary/1").at_most == 60


def test_the_limit_of_each_kernel_counts() -> None:
    """`trials_per_task` may leave less than the budget of all."""
    rules = BudgetRules(UNLIMITED_TRIALS, trials_per_task=10)
    forecast = forecast_trials(TASKS, ledger(a=4), rules, SCHEDULES, "any")
    assert forecast.is_unlimited
    assert (forecast.new_kernels, forecast.at_most) == (("kernel_b",), 16)


def test_pauses_between_searches_are_no_trials() -> None:
    """The ledger's clock ran on overnight; a handful of intervals says nothing."""
    evening = [trial(index, when=f"2024-01-01T22:00:{2 * index:02d}+00:00") for index in range(8)]
    morning = [trial(index, when=f"2024-01-02T08:00:{2 * index:02d}+00:00") for index in range(8)]
    assert measure_pace([*evening, *morning]) == 2.0
    assert measure_pace(evening) is None


def test_what_earlier_searches_spent_is_no_longer_left() -> None:
    """Half of 40 seconds, as they noted it themselves, and what had its share is named."""
    records = ledger(a=10, b=10)
    for key in records:
        records[key].keep(SearchTime(10.0, 10, "2024-01-01T00:01:00.000+00:00"))
    rules = BudgetRules(UNLIMITED_TRIALS, minutes=40 / 60)
    forecast = forecast_trials(TASKS, records, rules, SCHEDULES, "any")
    assert (forecast.reused, forecast.spent_s, forecast.seconds_left) == (20, 20.0, 20.0)
    assert forecast.at_most and forecast.finished_kernels == ()

    end = SearchEnd(
        end_name("any", rules), rules.trials, rules.minutes, 0.5, 10, "2024-01-02T00:00Z"
    )
    records["a" * 64].keep(end)
    forecast = forecast_trials(TASKS, records, rules, SCHEDULES, "any")
    assert forecast.finished_kernels == ("kernel_a",) and forecast.at_most
    longer = rules._replace(minutes=1.0)
    assert forecast_trials(TASKS, records, longer, SCHEDULES, "any").finished_kernels == ()
    other = end_name("any", rules._replace(patience=8))
    assert other != end.search
