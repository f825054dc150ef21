from __future__ import annotations

import copy
import json
import math

import pytest

from ndbench.results import schema
from ndbench.results.checks import RecordError
from ndbench.results.schema import migrate, new_record, validate
from tests.records import a_record


def test_a_whole_record_is_valid() -> None:
    assert validate(a_record())["outcome"] == "ok"


@pytest.mark.parametrize("field", sorted(schema.FIELDS))
def test_a_missing_field_is_named(field: str) -> None:
    record = a_record()
    del record[field]
    with pytest.raises(RecordError, match=f"lacks {field}|schema_version"):
        validate(record)


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(RecordError, match="has unknown colour"):
        validate(a_record() | {"colour": "red"})


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("repeat",), "1", r"record\.repeat must be an integer, got str '1'"),
        (("repeat",), True, r"record\.repeat must be an integer, got bool True"),
        (("outcome",), "fine", r"record\.outcome must be one of ok, oom"),
        (("steps", "loss"), "low", r"record\.steps\.loss must be a list"),
        (("steps", "loss", 3), math.nan, r"record\.steps\.loss\[3\] is nan"),
        (("steps", "grad_norm", 2), math.inf, r"record\.steps\.grad_norm\[2\] is inf"),
        (("steps", "seconds"), [], r"record\.steps\.seconds is empty"),
        (("steps", "seconds", 5), 0.0, r"record\.steps\.seconds\[5\] must be a number of seconds from 1e-09"),
        (("steps", "seconds", 5), None, r"record\.steps\.seconds\[5\] must be a number of seconds from 1e-09"),
        (("steps", "first_timed"), 12, r"first_timed is 12, of 12 steps"),
        (("metrics", "loss_last", "direction"), "down", r"metrics\.loss_last\.direction must be one of"),
        (("fingerprint", "hardware"), None, r"fingerprint\.hardware must be an object, got null"),
        (("structure", "collectives", 0, "count"), 1.5, r"structure\.collectives\[0\]\.count must be an integer"),
    ],
)
def test_a_wrong_value_is_named_with_its_path(path: tuple[str | int, ...], value: object, message: str) -> None:
    record = a_record()
    target: object = record
    for step in path[:-1]:
        target = target[step]  # type: ignore[index]
    target[path[-1]] = value  # type: ignore[index]
    with pytest.raises(RecordError, match=message):
        validate(record)


def test_a_newer_schema_is_refused_naming_both_versions() -> None:
    with pytest.raises(RecordError, match=r"r\.json has schema 99, this ndbench reads up to 1"):
        migrate(a_record() | {"schema_version": 99}, "r.json")


def test_a_value_that_is_no_record_is_refused() -> None:
    for value in ([], "text", {}, None, {"schema_version": "1"}, {"schema_version": 0}):
        with pytest.raises(RecordError):
            migrate(value)


def test_every_older_version_has_a_migration() -> None:
    assert sorted(schema.MIGRATIONS) == list(range(1, schema.SCHEMA_VERSION))


def test_an_older_record_is_migrated_one_version_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "SCHEMA_VERSION", 3)
    monkeypatch.setitem(
        schema.MIGRATIONS, 1, lambda record: record | {"schema_version": 2, "seed": record["seed"] + 10}
    )
    monkeypatch.setitem(schema.MIGRATIONS, 2, lambda record: record | {"schema_version": 3, "seed": record["seed"] * 2})
    assert migrate(a_record() | {"schema_version": 1})["seed"] == 20
    with pytest.raises(RecordError, match="has schema 1, this program writes 3"):
        validate(a_record() | {"schema_version": 1})


def test_version_1_is_read_as_it_was_written() -> None:
    record = a_record()
    assert record["schema_version"] == 1
    assert migrate(copy.deepcopy(record)) == record


def test_a_repeat_that_is_not_ok_needs_no_measurements() -> None:
    whole = a_record()
    record = new_record(
        **{k: whole[k] for k in ("run", "suite", "cell", "cell_id", "cell_version", "repeat", "seed", "start", "end")},
        outcome="timeout",
        reason="no step within 600 s",
        fingerprint=whole["fingerprint"],
        world=whole["world"],
    )
    assert record["steps"] is None
    assert record["session"] == record["run"]


def test_nonfinite_values_become_null_and_their_steps_are_listed() -> None:
    loss, norm = [1.0, math.nan, 2.0, 3.0], [1.0, 1.0, math.inf, 1.0]
    assert schema.finite_or_null(loss) == [1.0, None, 2.0, 3.0]
    assert schema.nonfinite_steps(loss, norm, None) == [1, 2]
    assert schema.metric(math.nan, "nats", "lower") == {
        "value": None,
        "unit": "nats",
        "direction": "lower",
        "reason": "the value was nan",
    }


def test_numbers_round_trip_to_the_bit() -> None:
    loss = [0.1 + 0.2, 1e-308, 2.0**-1074, 5.545177444479562]
    record = a_record(loss=loss * 3)
    assert json.loads(json.dumps(record))["steps"]["loss"] == loss * 3
