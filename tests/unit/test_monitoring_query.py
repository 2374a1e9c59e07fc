"""What fills in a dashboard's query and names its series; the stand-in's pages; numbers for people."""

import math

import pytest
from monitoring.gallery import human, with_gaps
from monitoring.query import Series, fill_in

from tests.monitoring.standin import PAGES, grown


def test_variables_are_filled_in():
    assert fill_in('x{host=~"$host", model=~"$model"}', "a|b") == 'x{host=~"a|b", model=~".*"}'


def test_a_series_is_named_as_grafana_does():
    series = Series({"host": "gpu1", "kind": "hang"})
    assert series.name("{{kind}} on {{host}}") == "hang on gpu1"


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.25, "percentunit", "25.0%"), (1234567, "short", "1.23M"), (0.5, "s", "0.5 s"), (0, "short", "0")],
)
def test_numbers_are_short(value, unit, text):
    assert human(value, unit) == text


def test_counters_of_a_recorded_page_grow_and_gauges_stay():
    page = (
        '# TYPE a_total counter\na_total{x="1"} 10.0\ng 3.0\nw_timestamp_seconds 5.0\nh_bucket{le="+Inf"} 2\n'
    )
    assert grown(page, 1.5, 99.0).splitlines() == [
        "# TYPE a_total counter",
        'a_total{x="1"} 15.0',
        "g 3.0",
        "w_timestamp_seconds 99.0",
        'h_bucket{le="+Inf"} 3.0',
    ]


@pytest.mark.parametrize("path", sorted(PAGES.iterdir()), ids=lambda path: path.stem)
def test_pages_name_no_address_of_where_they_were_recorded(path):
    text = path.read_text()
    assert not any(word in text for word in ("/root", "/work", "/tmp", "192.168", "10.0."))


def test_a_line_is_broken_where_a_series_was_away():
    drawn = with_gaps([(0, 1), (1, 1), (2, 1), (9, 2), (10, 2)])
    assert [at for at, value in drawn if math.isnan(value)] == [3]
    assert len(drawn) == 6
    assert with_gaps([]) == []
    assert with_gaps([(5, 1)]) == [(5, 1)]
