"""What a router process learns from its workers: sampling defaults and the context length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trio_router.service import (
    context_length,
    sampling_defaults,
)


class TestSamplingDefaults:
    @staticmethod
    def router(*recommended: str) -> Any:
        facts = [
            SimpleNamespace(model="tiny", model_info=SimpleNamespace(default_sampling_params_json=text))
            for text in recommended
        ]
        workers = [SimpleNamespace(facts=None), *(SimpleNamespace(facts=each) for each in facts)]
        return SimpleNamespace(registry=SimpleNamespace(workers=workers))

    def test_the_first_worker_that_recommends_something_is_heard(self):
        router = self.router("", '{"temperature": 0.7, "top_k": 20}', '{"temperature": 0.1}')
        assert sampling_defaults(router, "tiny") == {"temperature": 0.7, "top_k": 20.0}

    def test_only_for_its_own_model(self):
        assert sampling_defaults(self.router('{"temperature": 0.7}'), "other") == {}

    def test_what_is_no_number_or_no_sampling_parameter_is_left_out(self):
        router = self.router('{"temperature": "hot", "top_p": true, "min_p": null, "max_tokens": 5, "top_k": 3}')
        assert sampling_defaults(router, "tiny") == {"top_k": 3.0}

    @pytest.mark.parametrize("text", ["[1]", "{", "null"])
    def test_what_is_no_object_recommends_nothing(self, text):
        assert sampling_defaults(self.router(text), "tiny") == {}


class TestContextLength:
    @staticmethod
    def router(**lengths: int) -> Any:
        workers = [
            SimpleNamespace(facts=SimpleNamespace(model=model, model_info=SimpleNamespace(max_context_length=length)))
            for model, length in lengths.items()
        ]
        return SimpleNamespace(registry=SimpleNamespace(workers=[SimpleNamespace(facts=None), *workers]))

    def test_it_is_the_longest_that_a_worker_of_the_model_tells(self):
        router = self.router(tiny=8192, other=100)
        router.registry.workers += self.router(tiny=16384).registry.workers
        assert context_length(router, "tiny") == 16384

    def test_without_a_word_from_workers_it_is_not_known(self):
        assert context_length(self.router(tiny=0), "tiny") is None
        assert context_length(self.router(other=1), "tiny") is None
