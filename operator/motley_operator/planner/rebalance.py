"""How many engines each group should have: a small integer program, solved by HiGHS.

    minimise    hours x sum(price_g x n_g)  +  sum(start_g x grown_g + leave_g x shrunk_g)
    subject to  sum(sessions_g x n_g)                 >= sessions wanted
                sum(turns_g x effective_g x n_g)      >= effective turns an hour wanted
                sum(gpus_g x n_g over a GPU type)     <= GPUs of that type
                sum(gpus_g x n_g)                     <= GPU cap
                sum(price_g x n_g)                    <= dollars an hour
                minimum_g <= n_g <= maximum_g, n_g whole

The trainer takes what it takes, so the cheapest fleet that serves it is the one with the fewest dollars per effective token:
price / (throughput x effective-sample ratio). When the fleet cannot be had, the shortage is made as small as it can be first,
as shares of what is wanted, and dollars are minimised second.

What binds is read off the dual values of the same program without "whole": what one more session costs, what one more GPU, engine
or dollar would save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any

Pool = tuple[str, str]  # GPU type, capacity type
NOT_ZERO = 1e-7  # of a dual value, in dollars over the horizon
GAP = 1e-5  # a fleet whose dollars are this near the bound, as a share, is taken as the cheapest
WHOLE = 1e-6  # how far from a whole number the solver may stop


@dataclass(frozen=True)
class Option:
    """One group as the program sees it."""

    name: str
    pool: Pool
    gpus_per_engine: int
    sessions: int | Fraction  # per engine
    engines: int  # now
    minimum: int
    maximum: int
    usd_per_hour: Decimal | None  # of one engine; None: no price, so it stays as it is
    turns_per_hour: Decimal | None = None  # of one engine at the latency bound
    effective: Decimal = Decimal(1)  # part of its samples that trains: ESS, 0..1
    placeable: int | None = None  # most engines that the nodes seen can hold; None: not looked at
    start_usd: Decimal = Decimal(0)  # moving costs, per engine
    leave_usd: Decimal = Decimal(0)

    @property
    def bounds(self) -> tuple[int, int]:
        """Fewest and most. A minimum is asked for even where there is no node: that is how an autoscaler hears of it."""
        if self.usd_per_hour is None:
            return self.engines, self.engines
        most = self.maximum if self.placeable is None else min(self.maximum, self.placeable)
        return self.minimum, max(self.minimum, most)


@dataclass(frozen=True)
class Need:
    """What the fleet has to do, and the caps on it."""

    sessions: int
    turns_per_hour: Decimal | None = None  # effective ones; None: not known, sessions alone decide
    gpus: Mapping[Pool, int] = field(default_factory=dict)  # a pool that is not named has no limit
    gpu_cap: int | None = None
    usd_per_hour: Decimal | None = None
    hours: Decimal = Decimal(1)  # over which a move has to pay for itself


@dataclass(frozen=True)
class Binding:
    """One constraint that shapes the answer."""

    constraint: str
    unit: str
    usd_per_hour: Decimal | None  # what one unit less of it would save; None: it keeps the need from being met

    def __str__(self) -> str:
        if self.usd_per_hour is None:
            return f"{self.constraint} keeps the need from being met"
        return f"{self.constraint}: ${self.usd_per_hour}/h for one {self.unit}"


@dataclass(frozen=True)
class Fleet:
    """The program's answer."""

    engines: Mapping[str, int]
    usd_per_hour: Decimal  # of what has a price
    sessions: int
    turns_per_hour: Decimal | None  # effective
    moving_usd: Decimal
    met: bool
    proven: bool  # the solver proved that nothing is cheaper
    binding: tuple[Binding, ...]
    refused: str = ""  # caps and minimums contradict each other: nothing is changed


def effective_turns(option: Option) -> Decimal:
    return (option.turns_per_hour or Decimal(0)) * option.effective


def moving_usd(options: Sequence[Option], engines: Mapping[str, int]) -> Decimal:
    total = Decimal(0)
    for option in options:
        change = engines[option.name] - option.engines
        total += change * option.start_usd if change > 0 else -change * option.leave_usd
    return total


def fleet_of(
    options: Sequence[Option],
    need: Need,
    engines: Mapping[str, int],
    *,
    proven: bool = True,
    binding: tuple[Binding, ...] = (),
    refused: str = "",
) -> Fleet:
    """What these engines are and cost, in exact arithmetic."""
    sessions = int(sum((option.sessions * engines[option.name] for option in options), Fraction(0)))
    turns = sum((effective_turns(option) * engines[option.name] for option in options), Decimal(0))
    known = any(option.turns_per_hour is not None for option in options)
    return Fleet(
        engines=dict(engines),
        usd_per_hour=sum(
            (engines[option.name] * (option.usd_per_hour or Decimal(0)) for option in options), Decimal(0)
        ),
        sessions=sessions,
        turns_per_hour=turns if known else None,
        moving_usd=moving_usd(options, engines),
        met=sessions >= need.sessions and (need.turns_per_hour is None or turns >= need.turns_per_hour),
        proven=proven,
        binding=binding,
        refused=refused,
    )


@dataclass(frozen=True)
class _Row:
    """lower <= coefficients . columns <= upper."""

    name: str
    unit: str
    coefficients: Mapping[int, float]
    lower: float
    upper: float


@dataclass(frozen=True)
class _Program:
    """Columns: n, grown and shrunk of each group, then the shortages, as shares of what is wanted."""

    costs: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    rows: tuple[_Row, ...]
    groups: int


_INF = float("inf")


def _demand_rows(options: Sequence[Option], need: Need) -> list[_Row]:
    """Each with its shortage column, which lies in [0, 1]; the first for sessions, the second for turns."""
    first = 3 * len(options)
    rows = []
    if need.sessions:
        serves: dict[int, float] = {index: float(option.sessions) for index, option in enumerate(options)}
        serves[first] = float(need.sessions)
        rows.append(_Row(f"sessions {need.sessions}", "session", serves, need.sessions, _INF))
    if need.turns_per_hour:
        turns = {index: float(effective_turns(option)) for index, option in enumerate(options)}
        turns[first + 1] = float(need.turns_per_hour)
        name = f"effective turns an hour {need.turns_per_hour:.0f}"
        rows.append(_Row(name, "turn an hour", turns, float(need.turns_per_hour), _INF))
    return rows


def _cap_rows(options: Sequence[Option], need: Need) -> list[_Row]:
    rows = []
    for pool in sorted({option.pool for option in options}):
        mine = [(index, option) for index, option in enumerate(options) if option.pool == pool]
        if pool in need.gpus:
            asked = sum(option.bounds[0] * option.gpus_per_engine for _, option in mine)
            limit = max(need.gpus[pool], asked)
            uses = {index: float(option.gpus_per_engine) for index, option in mine}
            rows.append(_Row(f"GPUs of {' '.join(pool)} {limit}", "GPU", uses, -_INF, limit))
    if need.gpu_cap is not None:
        uses = {index: float(option.gpus_per_engine) for index, option in enumerate(options)}
        rows.append(_Row(f"GPU cap {need.gpu_cap}", "GPU", uses, -_INF, need.gpu_cap))
    if need.usd_per_hour is not None:
        pays = {index: float(option.usd_per_hour or 0) for index, option in enumerate(options)}
        rows.append(
            _Row(f"dollars an hour {need.usd_per_hour}", "dollar an hour", pays, -_INF, float(need.usd_per_hour))
        )
    return rows


def _program(options: Sequence[Option], need: Need) -> _Program:
    count = len(options)
    hours = float(need.hours)
    bounds = [option.bounds for option in options]
    moves = [
        _Row(
            f"moves of {option.name}",
            "",
            {index: 1.0, count + index: -1.0, 2 * count + index: 1.0},
            option.engines,
            option.engines,
        )
        for index, option in enumerate(options)
    ]
    return _Program(
        costs=(
            *(hours * float(option.usd_per_hour or 0) for option in options),
            *(float(option.start_usd) for option in options),
            *(float(option.leave_usd) for option in options),
            0.0,
            0.0,
        ),
        lower=(*(float(low) for low, _ in bounds), *[0.0] * (2 * count + 2)),
        upper=(*(float(high) for _, high in bounds), *[_INF] * (2 * count), 0.0, 0.0),
        rows=(*_demand_rows(options, need), *_cap_rows(options, need), *moves),
        groups=count,
    )


@dataclass(frozen=True)
class _Answer:
    columns: tuple[float, ...]
    column_duals: tuple[float, ...]
    row_duals: tuple[float, ...]
    proven: bool


def _highs(program: _Program, *, whole: bool, limit_s: float) -> _Answer | None:
    """One solve; None when nothing satisfies every row."""
    import highspy
    import numpy

    class Quiet(highspy.Highs):  # type: ignore[misc]
        """Its constructor prints a banner while it sets up callbacks: standard output is the caller's."""

        def enableCallbacks(self) -> None:  # noqa: N802 (the library's name)
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    solver: Any = Quiet()
    solver.setOptionValue("threads", 1)
    solver.setOptionValue("time_limit", limit_s)
    solver.setOptionValue("mip_rel_gap", GAP)
    solver.setOptionValue("mip_abs_gap", 1e-6)
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.costs), len(program.rows)
    lp.col_cost_ = numpy.array(program.costs)
    lp.col_lower_, lp.col_upper_ = numpy.array(program.lower), numpy.array(program.upper)
    lp.row_lower_ = numpy.array([row.lower for row in program.rows], dtype=float)
    lp.row_upper_ = numpy.array([row.upper for row in program.rows], dtype=float)
    entries = [sorted(row.coefficients.items()) for row in program.rows]
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = numpy.cumsum([0, *map(len, entries)])
    lp.a_matrix_.index_ = numpy.array([index for entry in entries for index, _ in entry], dtype=numpy.int32)
    lp.a_matrix_.value_ = numpy.array([value for entry in entries for _, value in entry], dtype=float)
    if whole:
        kinds = [highspy.HighsVarType.kInteger] * program.groups
        lp.integrality_ = kinds + [highspy.HighsVarType.kContinuous] * (len(program.costs) - program.groups)
    solver.passModel(lp)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    solution = solver.getSolution()
    if not solution.value_valid:
        return None
    return _Answer(
        columns=tuple(solution.col_value),
        column_duals=tuple(solution.col_dual),
        row_duals=tuple(solution.row_dual),
        proven=status == highspy.HighsModelStatus.kOptimal,
    )


def _with_shortage(program: _Program) -> _Program:
    """The first of two goals: the least shortage, whatever it costs."""
    count = 3 * program.groups
    return _Program(
        costs=(*[0.0] * count, 1.0, 1.0),
        lower=program.lower,
        upper=(*program.upper[:count], 1.0, 1.0),
        rows=program.rows,
        groups=program.groups,
    )


def _held_to(program: _Program, shortage: float) -> _Program:
    """The second goal: dollars, with the shortage held to its least."""
    count = 3 * program.groups
    total = _Row("shortage", "", {count: 1.0, count + 1: 1.0}, -_INF, shortage + WHOLE)
    return _Program(
        costs=program.costs,
        lower=program.lower,
        upper=(*program.upper[:count], 1.0, 1.0),
        rows=(*program.rows, total),
        groups=program.groups,
    )


def _binding(
    options: Sequence[Option], program: _Program, answer: _Answer | None, hours: Decimal | None
) -> tuple[Binding, ...]:
    """Rows and bounds with a dual value, dearest first. `hours` None: of the shortage, which has no price."""
    if answer is None:
        return ()

    def worth(dual: float) -> Decimal | None:
        return None if hours is None else (Decimal(repr(abs(dual))) / hours).quantize(Decimal("0.0001"))

    found: list[tuple[float, Binding]] = []
    for row, dual in zip(program.rows, answer.row_duals, strict=False):
        if row.unit and abs(dual) > NOT_ZERO and (hours is not None or row.upper < _INF):
            found.append((abs(dual), Binding(row.name, row.unit, worth(dual))))
    for index, option in enumerate(options):
        dual = answer.column_duals[index]
        low, high = option.bounds
        if abs(dual) <= NOT_ZERO or option.minimum == option.maximum or (hours is None and dual > 0):
            continue
        at_low = dual > 0
        if at_low and low == 0:
            continue  # nobody asked for it: there are no fewer engines than none
        placed = not at_low and option.placeable is not None and high < option.maximum
        kind = f"minReplicas {low}" if at_low else f"room on nodes for {high}" if placed else f"maxReplicas {high}"
        found.append((abs(dual), Binding(f"{kind} of {option.name}", "engine", worth(dual))))
    return tuple(binding for _, binding in sorted(found, key=lambda item: (-item[0], item[1].constraint)))


def _refusal(options: Sequence[Option], need: Need) -> str:
    minimum = sum((option.bounds[0] * (option.usd_per_hour or Decimal(0)) for option in options), Decimal(0))
    gpus = sum(option.bounds[0] * option.gpus_per_engine for option in options)
    if need.usd_per_hour is not None and minimum > need.usd_per_hour:
        return f"the minimums cost ${minimum}/h, the samplers' part of the cap is ${need.usd_per_hour}/h"
    if need.gpu_cap is not None and gpus > need.gpu_cap:
        return f"the minimums hold {gpus} GPUs, the cap is {need.gpu_cap}"
    return "no fleet satisfies every constraint"


def solve(options: Sequence[Option], need: Need, *, limit_s: float = 5.0) -> Fleet:
    """The cheapest fleet that serves the need; with the least shortage where nothing serves it."""
    program = _program(options, need)
    answer = _highs(program, whole=True, limit_s=limit_s)
    if answer is not None:
        binding = _binding(options, program, _highs(program, whole=False, limit_s=limit_s), need.hours)
    else:
        short = _with_shortage(program)
        least = _highs(short, whole=True, limit_s=limit_s)
        if least is None:
            now = {option.name: option.engines for option in options}
            return fleet_of(options, need, now, refused=_refusal(options, need))
        binding = _binding(options, short, _highs(short, whole=False, limit_s=limit_s), None)
        shortage = sum(least.columns[3 * program.groups :])
        answer = _highs(_held_to(program, shortage), whole=True, limit_s=limit_s) or least
    engines = {option.name: round(answer.columns[index]) for index, option in enumerate(options)}
    return fleet_of(options, need, engines, proven=answer.proven, binding=binding)
