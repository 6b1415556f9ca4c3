"""The limit of open files."""

from __future__ import annotations

import logging
import resource
from dataclasses import replace

import pytest

from trio_router.cli.descriptors import fit_descriptors, raise_limit
from trio_router.config import gather
from trio_router.front.settings import HttpSettings
from trio_router.rows import SECTIONS
from trio_router.settings import ServiceSettings, service_settings

SETTINGS = service_settings(gather(SECTIONS, flags={"worker_urls": ["grpc://a:1"]}))


@pytest.fixture
def limits(monkeypatch):
    """`limits(soft, hard)` sets what the system says, and remembers what it was told."""

    class Limits:
        told: list[tuple[int, int]] = []  # noqa: RUF012  # made anew for each test

        def __call__(self, soft: int, hard: int, *, refuse: bool = False) -> Limits:
            def set_limit(which: int, value: tuple[int, int]) -> None:
                if refuse:
                    raise ValueError("current limit exceeds maximum limit")
                self.told.append(value)

            monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
            monkeypatch.setattr(resource, "setrlimit", set_limit)
            return self

    made = Limits()
    made.told = []
    return made


class TestRaising:
    def test_a_limit_that_is_high_enough_stays(self, limits):
        system = limits(5000, 9000)
        assert raise_limit(5000) == 5000
        assert system.told == []

    def test_a_low_one_is_raised_as_far_as_is_wanted(self, limits):
        system = limits(1024, 9000)
        assert raise_limit(5000) == 5000
        assert system.told == [(5000, 9000)]

    def test_or_as_far_as_it_goes(self, limits):
        system = limits(1024, 4000)
        assert raise_limit(5000) == 4000
        assert system.told == [(4000, 4000)]

    def test_no_limit_is_no_limit(self, limits):
        assert limits(resource.RLIM_INFINITY, resource.RLIM_INFINITY).told == []
        assert raise_limit(5000) == 5000
        system = limits(1024, resource.RLIM_INFINITY)
        assert raise_limit(5000) == 5000
        assert system.told == [(5000, resource.RLIM_INFINITY)]

    def test_a_system_that_refuses_is_believed(self, limits):
        limits(256, 9000, refuse=True)
        assert raise_limit(5000) == 256


class TestFitting:
    def test_where_the_limit_goes_high_enough_the_settings_stay(self, limits, caplog):
        limits(256, 100_000)
        assert fit_descriptors(SETTINGS) is SETTINGS
        assert caplog.records == []

    def test_where_it_does_not_fewer_clients_are_let_in_and_that_is_said(self, limits, caplog):
        limits(256, 1024)
        with caplog.at_level(logging.WARNING):
            fitted: ServiceSettings = fit_descriptors(SETTINGS)
        assert fitted.descriptors <= 1024
        [record] = caplog.records
        assert f"at most {fitted.front.http.max_connections} HTTP" in record.getMessage()

    def test_modest_settings_fit_anywhere(self, limits):
        limits(256, 256)
        modest = replace(SETTINGS, front=replace(SETTINGS.front, http=HttpSettings(max_connections=50)))
        assert fit_descriptors(replace(modest, grpc=replace(modest.grpc, max_connections=50))).descriptors <= 256
