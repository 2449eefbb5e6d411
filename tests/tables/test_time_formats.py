"""Times in a strptime format are read as the meant moment, or refused."""

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from laserbatch.pipeline.tables.conversion import ConversionFault, to_time
from laserbatch.pipeline.tables.settings import SourceTime
from laserbatch.pipeline.tables.times import parse_times


def parsed(text: str, time_format: str) -> str:
    return f"{to_time(pa.array([None, text]), time_format)[1].as_py():%Y-%m-%d %H:%M:%S}"


@pytest.mark.parametrize(
    ("zone", "expected"),
    [
        ("CEST", "2024-05-31 21:30:00"),
        ("UTC", "2024-05-31 23:30:00"),
        ("Z", "2024-05-31 23:30:00"),
        ("EDT", "2024-06-01 03:30:00"),
        ("+0530", "2024-05-31 18:00:00"),
        ("-02:30", "2024-06-01 02:00:00"),
        ("+02", "2024-05-31 21:30:00"),
        ("Europe/Berlin", "2024-05-31 21:30:00"),
        ("America/New_York", "2024-06-01 03:30:00"),
    ],
)
@pytest.mark.parametrize("directive", ["%z", "%Z"])
def test_a_zone_is_resolved(zone, expected, directive):
    assert parsed(f"2024-05-31 23:30:00 {zone}", f"%Y-%m-%d %H:%M:%S {directive}") == expected


def test_a_zone_may_be_before_the_end():
    assert parsed("Fri May 31 23:30:00 CEST 2024", "%a %b %d %H:%M:%S %Z %Y") == "2024-05-31 21:30:00"


@pytest.mark.parametrize("zone", ["CST", "IST", "BST", "XYZ", "Europe/Nowhere", ""])
def test_a_zone_that_is_unknown_or_means_several_is_refused(zone):
    with pytest.raises(ConversionFault, match=r"row 1.*its zone an offset such as"):
        parsed(f"2024-05-31 23:30:00 {zone}", "%Y-%m-%d %H:%M:%S %Z")


@pytest.mark.parametrize("local", ["2024-03-31 02:30", "2024-10-27 02:30"])
def test_an_hour_that_a_zone_skips_or_repeats_is_refused(local):
    with pytest.raises(ConversionFault):
        parsed(f"{local} Europe/Berlin", "%Y-%m-%d %H:%M %Z")


@pytest.mark.parametrize(
    ("text", "time_format"),
    [
        ("2024-02-30 10:00:00 UTC", "%Y-%m-%d %H:%M:%S %Z"),
        ("31/04/2024", "%d/%m/%Y"),
        ("02/29/23", "%D"),
        ("2023-02-29", "%F"),
        ("20240631", "%Y%m%d"),
        ("31. Jun 2024", "%d. %b %Y"),
        ("2024-05-31 25:00", "%Y-%m-%d %H:%M"),
        ("2024-05-31 and more", "%Y-%m-%d"),
    ],
)
def test_a_day_that_does_not_exist_is_refused(text, time_format):
    with pytest.raises(ConversionFault, match=f"row 1: '{text}' is not an existing day and time"):
        parsed(text, time_format)


@pytest.mark.parametrize(
    ("time_format", "message"),
    [
        ("%H:%M", "one directive for the year"),
        ("%Y-%j", "%j is not supported"),
        ("%Y-%m-%d %H:%M:%S.%f", "%f is not supported"),
        ("%Y-%m", "one directive for the day"),
        ("%F %z %Z", "two zones"),
    ],
)
def test_a_format_that_cannot_be_read_right_is_refused(time_format, message):
    with pytest.raises(ValidationError, match=message):
        SourceTime(column="when", unit=time_format)


FORMATS = ("%Y-%m-%d %H:%M:%S", "%d.%m.%Y %H:%M:%S", "%D %T", "%F %T", "%b %d %Y %I:%M:%S %p", "%Y%m%d%H%M%S")


@given(
    moment=st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(2068, 1, 1)),
    time_format=st.sampled_from(FORMATS),
)
def test_times_are_read_as_python_reads_them(moment, time_format):
    text = moment.strftime(time_format.replace("%D", "%m/%d/%y").replace("%F", "%Y-%m-%d").replace("%T", "%H:%M:%S"))
    expected = moment.replace(microsecond=0, tzinfo=datetime.UTC)
    assert parse_times(pa.array([text, None]), time_format).to_pylist() == [expected, None]
