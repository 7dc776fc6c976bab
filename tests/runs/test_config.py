from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiny import config

from emdcfl.core.errors import ConfigError
from emdcfl.runs.config import (
    Choice,
    Config,
    EngineConfig,
    RunConfig,
    TrainingConfig,
    as_dict,
    check_options,
    config_hash,
    dump,
    from_dict,
    load,
    loads,
    override,
    parse_settings,
    template,
)
from emdcfl.runs.plan import plan

FULL = Config(
    run=RunConfig(seed=7, rounds=12, participants=4, evaluate_every=3),
    scenario=Choice("rotated-digits", {"clients": 16, "angles": [0, 90], "nested": {"b": 1, "a": [1.5, "x"]}}),
    method=Choice("emdcfl", {"tolerance": 0.03, "alpha": None}),
    model=Choice("cnn", {"width": 8}),
    training=TrainingConfig(local_epochs=2, batch_size=16, lr=0.05, momentum=0.0, weight_decay=0.0),
    engine=EngineConfig(workers=2, device="cuda:1", precision="bf16", on_failure="continue", quorum=1.0),
)


def test_template_parses_to_the_defaults() -> None:
    assert loads(template()) == Config()


def test_template_shows_every_key() -> None:
    uncommented = "\n".join(line.removeprefix("# ") if line.startswith("# ") and "=" in line else line for line in template().splitlines())
    for table in ("run", "training", "engine"):
        for key in getattr(Config(), table).__dataclass_fields__:
            assert f"\n{key} = " in uncommented


def test_dump_is_complete_and_runs_again() -> None:
    text = dump(FULL)
    again = loads(text)
    assert dump(again) == text
    assert config_hash(again) == config_hash(FULL)
    assert again.training == FULL.training and again.engine == FULL.engine and again.run == FULL.run
    assert again.scenario == FULL.scenario
    assert again.method.options == {"tolerance": 0.03, "alpha": "none"}  # TOML has no null; check_options reads the word back
    assert loads(dump(Config())) == Config()


def test_dump_does_not_depend_on_key_order() -> None:
    reordered = replace(FULL, scenario=Choice("rotated-digits", dict(reversed(FULL.scenario.options.items()))))
    assert dump(reordered) == dump(FULL)
    assert config_hash(reordered) == config_hash(FULL)


def test_the_hash_sees_every_setting() -> None:
    hashes, plain = [config_hash(Config()), config_hash(replace(Config(), model=Choice("cnn")))], Config()
    for table in (field.name for field in fields(Config) if field.name != "model"):
        own = getattr(plain, table)
        values = {field.name: {"x": 1} if field.name == "options" else "another" for field in fields(own)}
        hashes += [config_hash(replace(plain, **{table: replace(own, **{name: value})})) for name, value in values.items()]
    assert len(set(hashes)) == len(hashes) > 35


def test_an_integer_and_a_float_of_the_same_value_are_the_same_setting() -> None:
    assert config_hash(loads("[training]\nlr = 1")) == config_hash(loads("[training]\nlr = 1.0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[metod]\nname = 'x'", "unknown table [metod]: did you mean 'method'?"),
        ("[run]\nround = 3", "run has no key 'round': did you mean 'rounds'?"),
        ("[run]\nrounds = 'ten'", "run.rounds must be int or 'none', got 'ten' (str)"),
        ("[run]\nrounds = 0", "run.rounds must be at least 1, got 0"),
        ("[run]\nseed = -1", "run.seed must be from 0"),
        ("[run]\nparticipants = 0", "run.participants must be at least 1"),
        ("[training]\nlr = 0", "training.lr must be above 0, got 0.0"),
        ("[training]\nlr = nan", "training.lr must be finite, got nan"),
        ("[training]\nmomentum = 1.0", "training.momentum must be at least 0 and below 1"),
        ("[engine]\nquorum = 0.0", "engine.quorum must be above 0 and at most 1, got 0.0"),
        ("[engine]\nquorum = 1.5", "engine.quorum must be above 0 and at most 1, got 1.5"),
        ("[engine]\ndevice = 'gpu'", "engine.device must be 'auto', 'cpu', 'cuda' or 'cuda:<number>', got 'gpu'"),
        ("[engine]\non_failure = 'go'", "engine.on_failure must be 'auto' or 'stop' or 'continue', got 'go'"),
        ("[method]\nname = 3", "method.name must be the name of a method, got 3"),
        ("[model]\nwidth = 3", "model.name must be the name of a model, got nothing"),
        ("[method]\nsince = 2020-01-01", "method.since must be a number"),
        ("[method]\ntolerance = inf", "method.tolerance must be finite"),
        ("run = 3", "run must be a table"),
        ("[run", "not valid TOML"),
    ],
)
def test_bad_files_are_refused_in_one_line_that_names_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.toml: cannot read the config: No such file"):
        load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(tmp_path / "binary.toml")


def test_settings_are_toml_or_text() -> None:
    settings = [
        "method.tolerance=0.03",
        "method.solver=sinkhorn",
        "method.flags=[1, 2]",
        "method.on=true",
        "method.when=2020-01-01",
        "method.text=1\nother = 2",
        "scenario.groups.north=3",
        "model=cnn",
        "training.lr=1",
        "engine.device=cpu",
    ]
    changed = override(Config(), parse_settings(settings))
    expected = {"tolerance": 0.03, "solver": "sinkhorn", "flags": [1, 2], "on": True, "when": "2020-01-01", "text": "1\nother = 2"}
    assert changed.method == Choice("emdcfl", expected)
    assert changed.scenario.options == {"groups": {"north": 3}}
    assert changed.model == Choice("cnn")
    assert changed.training.lr == 1.0 and isinstance(changed.training.lr, float)
    assert changed.engine.device == "cpu"


def test_override_can_unset() -> None:
    assert override(FULL, {"run.rounds": "none"}).run.rounds is None


def test_override_leaves_the_original_alone() -> None:
    before = dump(FULL)
    override(FULL, {"scenario.nested.b": 2, "method.tolerance": 1})
    assert dump(FULL) == before


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("methd.tolerance", "--set methd.tolerance: unknown table 'methd': did you mean 'method'?"),
        ("run", "--set run: expected table.key=value"),
        ("run.", "--set run.: expected table.key=value"),
        ("run.sed", "--set: run has no key 'sed': did you mean 'seed'?"),
        ("run.seed.deep", "--set run.seed.deep: 'seed' is a value"),
    ],
)
def test_override_refuses_unknown_keys(key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        override(Config(), {key: "1"})
    assert str(caught.value).startswith(message)


@dataclass(frozen=True)
class Options:
    tolerance: float | Literal["auto"] = 0.025
    solver: Literal["exact", "sinkhorn"] = "exact"
    alpha: float | None = None
    count: int = 1
    number: int | float = 1
    level: Literal[1, 2] = 1
    folder: str | None = None
    widths: tuple[int, ...] = ()
    pair: tuple[int, str] = (1, "a")
    table: dict[str, float] | None = None


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ({"tolerance": "auto"}, {"tolerance": "auto"}),
        ({"tolerance": 1}, {"tolerance": 1.0}),
        ({"alpha": "none"}, {"alpha": None}),
        ({"alpha": None}, {"alpha": None}),
        ({"folder": "none"}, {"folder": None}),
        ({"number": 3}, {"number": 3}),
        ({"number": 3.5}, {"number": 3.5}),
        ({"widths": [1, 2]}, {"widths": (1, 2)}),
        ({"pair": [2, "b"]}, {"pair": (2, "b")}),
        ({"table": {"a": 1}}, {"table": {"a": 1.0}}),
    ],
)
def test_check_options_coerces(given_: dict[str, Any], expected: dict[str, Any]) -> None:
    checked = check_options(Options, given_, "method")
    assert checked == expected
    assert [type(v) for v in checked.values()] == [type(v) for v in expected.values()]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"tolerence": 1.0}, "m has no key 'tolerence': did you mean 'tolerance'?"),
        ({"tolerance": "automatic"}, "m.tolerance must be float or 'auto', got 'automatic' (str)"),
        ({"tolerance": True}, "m.tolerance must be float or 'auto', got True (bool)"),
        ({"solver": "exakt"}, "m.solver must be 'exact' or 'sinkhorn', got 'exakt' (str)"),
        ({"count": 1.0}, "m.count must be int, got 1.0 (float)"),
        ({"count": "none"}, "m.count must be int, got 'none' (str)"),
        ({"level": True}, "m.level must be 1 or 2, got True (bool)"),
        ({"widths": [1, "x"]}, "m.widths must be a list of int, got"),
        ({"pair": [1]}, "m.pair must be"),
        ({"table": {"a": "x"}}, "m.table must be a table of float or 'none'"),
        ({"alpha": float("nan")}, "m.alpha must be finite, got nan"),
    ],
)
def test_check_options_refuses(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_options(Options, given_, "m")
    assert str(caught.value).startswith(message)


def test_check_options_takes_functions_too() -> None:
    def build(*, clients: int = 2, angle: float = 0.0) -> None: ...

    def free(clients: int = 2, **rest: object) -> None: ...

    def bare() -> None: ...

    assert check_options(build, {"clients": 3, "angle": 1}, "s") == {"clients": 3, "angle": 1.0}
    with pytest.raises(ConfigError, match="s has no key 'client': did you mean 'clients'"):
        check_options(build, {"client": 3}, "s")
    assert check_options(free, {"clients": 3, "other": "x"}, "s") == {"clients": 3, "other": "x"}
    with pytest.raises(ConfigError, match="it takes no options"):
        check_options(bare, {"other": "x"}, "s")


plain = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abcé. ", min_size=1, max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abcdefgé_-. ", min_size=1, max_size=8).filter(lambda key: key != "name"), plain, max_size=4))
def test_any_options_survive_the_file(options: dict[str, Any]) -> None:
    config = from_dict({"method": {"name": "emdcfl", **options}})
    text = dump(config)
    assert loads(text) == config
    assert tomllib.loads(text) == as_dict(config)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
keys = st.sampled_from(["name", "rounds", "seed", "lr", "tolerance", "device", "quorum", "workers", "x", "a\nb", ""])


@pytest.mark.slow
@given(
    st.dictionaries(
        st.sampled_from(["run", "scenario", "method", "model", "training", "engine", "x"]), st.dictionaries(keys, anything) | anything
    )
)
def test_any_tables_are_a_config_that_survives_its_file_or_an_error_of_one_line(raw: dict[str, Any]) -> None:
    try:
        config = from_dict(raw)
    except ConfigError as error:
        assert str(error) and "\n" not in str(error)  # noqa: PT017
        return
    assert config_hash(loads(dump(config))) == config_hash(config)


@pytest.mark.parametrize(
    "text", ["[run]\nseed = 0x" + "f" * 6000, "a = " + "[" * 3000, "[training]\nlr = 1" + "0" * 400, "x = 1" + "0" * 5000]
)
def test_numbers_and_nesting_beyond_reason_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loads(text)
    assert len(str(caught.value)) < 2000


# --- [privacy], another way to write a method's privacy options ---


def test_the_privacy_table_sets_the_methods_options() -> None:
    read = loads("[privacy]\nepsilon = 4\ndelta = 1e-6\n[method]\nname = 'emdcfl'\ntolerance = 'auto'\n")
    assert read.method == Choice("emdcfl", {"tolerance": "auto", "privacy_epsilon": 4, "privacy_delta": 1e-6})
    assert loads(dump(read)) == read


def test_set_privacy_epsilon_reaches_the_method_and_wins_over_what_was_there() -> None:
    first = plan(override(config(), {"privacy.epsilon": 4}))
    assert first.method.privacy_epsilon == 4.0
    again = plan(override(first.config, {"privacy.epsilon": 8}))
    assert again.method.privacy_epsilon == 8.0
    assert plan(override(again.config, {"privacy.epsilon": "none"})).method.privacy_epsilon is None


def test_a_method_without_noise_refuses_the_table() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.epsilon.*emdcfl.*fedavg"):
        plan(override(config(method="fedavg"), {"privacy.epsilon": 4}))


def test_unknown_keys_and_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="privacy_epsilom.*privacy_epsilon"):
        plan(override(config(), {"privacy.epsilom": 4}))
    with pytest.raises(ConfigError, match="privacy_epsilon.*much"):
        plan(override(config(), {"privacy.epsilon": "much"}))
    with pytest.raises(ConfigError, match="privacy"):
        loads("privacy = 4")
    assert "privacy_epsilon" not in dump(plan(Config()).config)
