"""Options of a reference worker, as its engine gets them."""

from __future__ import annotations

import pytest

from trio_router.cli.worker import WORKER_SECTIONS, worker_settings
from trio_router.config import gather
from trio_router.engine.settings import Connector, Role
from trio_router.errors import ConfigError


def settings_of(**flags):
    return worker_settings(gather(WORKER_SECTIONS, flags=flags)).worker


def test_a_worker_pulls_and_is_one_rank_unless_it_is_told_otherwise():
    settings = settings_of(role="prefill")
    assert (settings.role, settings.connector, settings.dp_size) == (Role.PREFILL, Connector.NIXL, 1)
    assert settings.lease == 30.0


def test_connector_and_ranks_are_chosen_by_flags():
    settings = settings_of(role="decode", connector="mooncake", dp_size="4")
    assert (settings.connector, settings.dp_size, settings.lease) == (Connector.MOONCAKE, 4, 480.0)
    assert settings_of(role="decode", connector="mooncake", lease_secs="2").lease == 2.0


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [({"connector": "smoke"}, "one of nixl, mooncake, store, none"), ({"dp_size": "0"}, "at least 1")],
)
def test_what_is_none_of_them_is_refused_by_name(flags, complaint):
    with pytest.raises(ConfigError, match=complaint):
        settings_of(**flags)


class TestMedia:
    def test_a_worker_takes_none_unless_it_is_told_to(self):
        settings = settings_of()
        assert settings.media.advertised == ""
        assert settings.served_name == "tiny-english"

    def test_with_a_processor_it_claims_another_model_and_tells_who_chose_it(self):
        settings = settings_of(mm_processor="inprocess")
        assert (settings.media.advertised, settings.media.source) == ("inprocess", "flag")
        assert settings.served_name == "tiny-vl-english"
        assert settings_of(mm_processor="inprocess", model_name="mine").served_name == "mine"

    def test_the_variable_and_the_flag_are_told_apart(self):
        found = gather(WORKER_SECTIONS, flags={}, environ={"TRIO_ROUTER_MM_PROCESSOR": "inprocess"})
        assert worker_settings(found).worker.media.source == "env"

    def test_files_may_be_named_where_a_directory_is(self, tmp_path):
        assert settings_of().media.schemes == ("http", "https", "data")
        media = settings_of(allowed_local_media_path=str(tmp_path)).media
        assert media.schemes == ("http", "https", "data", "file")
        assert media.allowed_local_path == tmp_path

    def test_lists_are_separated_by_commas(self):
        media = settings_of(mm_media_ref_schemes="data, HTTP", allowed_media_domains="a.example,b.example").media
        assert media.schemes == ("data", "http")
        assert media.allowed_domains == ("a.example", "b.example")

    def test_limits(self):
        media = settings_of(mm_max_items="3", mm_max_item_bytes="1000").media
        assert (media.limits, media.max_item_bytes) == ({"image": 3, "video": 3}, 1000)
        assert settings_of().media.limits == {"image": 8, "video": 2}

    def test_a_language_model_only_has_no_processor_whatever_it_is_given(self):
        media = settings_of(mm_processor="inprocess", language_model_only=True).media
        assert (media.advertised, media.sees) == ("", True)

    def test_an_older_worker_is_one_without_identities(self):
        assert settings_of().media.identity
        assert not settings_of(no_identity=True).media.identity

    @pytest.mark.parametrize(
        ("flags", "complaint"),
        [
            ({"mm_processor": "redis"}, "one of off, inprocess"),
            ({"mm_media_ref_schemes": "ftp"}, "'ftp' is none of"),
            ({"mm_media_ref_schemes": "file"}, "file needs allowed_local_media_path"),
        ],
    )
    def test_what_cannot_be_is_refused_by_name(self, flags, complaint):
        with pytest.raises(ConfigError, match=complaint):
            settings_of(**flags)
