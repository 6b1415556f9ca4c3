"""Foreign templates: they cannot leave, and they cannot go on for ever. Each refusal says what was wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from trio_router.text import metering, sandbox
from trio_router.text.metering import TooCostly
from trio_router.text.sandbox import ChatEnvironment


def render(source: str, **variables: object) -> str:
    environment = ChatEnvironment()
    return environment.render(environment.from_string(source), variables)


def sixty_times(start: str, step: str) -> str:
    """A template that replaces the value x, `start` at first, by the expression `step` again and again."""
    return (
        "{% set ns = namespace(x=" + start + ") %}"
        "{% for turn in range(60) %}{% set x = ns.x %}{% set ns.x = " + step + " %}{% endfor %}"
    )


class TestEscape:
    @pytest.mark.parametrize(
        "expression",
        [
            "''.__class__",
            "''['__class__']",
            "''|attr('__class__')",
            "'{0.__class__}'.format(1)",
            "'{x.__class__}'.format_map({'x': 1})",
            "[1].append(2)",
            "{'a': 1}.update(b=2)",
            "messages.clear()",
            "raise_exception.__globals__",
            "range.__init__",
            "cycler.__init__.__globals__",
            "self.__init__",
            "namespace(a=1).__class__",
            "dict.__subclasses__()",
            "namespace(__call__=range)",
            "namespace({'__class__': 1})",
            "(''|e).__html__",
            "['{0.__class__}'.format]|map('call')|list",
        ],
    )
    def test_the_interpreter_is_out_of_reach(self, expression: str):
        try:
            output = render("{% set x = " + expression + " %}{{ x }}{{ x.y }}", messages=[1])
        except (SecurityError, TemplateError, TypeError):
            return
        # Text formats find nothing where others are refused.
        assert output == ""

    def test_a_namespace_takes_no_attribute_that_python_calls(self):
        with pytest.raises(SecurityError, match="begins with an underscore"):
            render("{% set ns = namespace() %}{% set ns.__class__ = 1 %}")
        assert render("{% set ns = namespace(self=1) %}{% set ns.b = 2 %}{{ ns.self }}{{ ns.b }}") == "12"

    def test_the_meter_itself_is_out_of_reach(self):
        assert render("{{ meter }}{{ context }}{{ the_meter }}") == ""


class TestEndlessWork:
    @pytest.mark.parametrize(
        "source",
        [
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) %}{% for b in range(99999) if b == 1 %}{% endfor %}{% endfor %}",
            "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "{% for a in range(99999) %}{{ range(99999)|list|length }}{% endfor %}",
            "{% for a in range(99999) %}{{ range(99999)|map('string')|select('eq', 'x')|list }}{% endfor %}",
            "{% for a in range(99999) %}{{ range(99999)|sum }}{% endfor %}",
            "{% for a in range(20) %}{% set b = [0] * 99999 %}{% endfor %}",
            sixty_times("[0]", "x + x"),
            sixty_times("[0]", "[x, x]") + "{{ ns.x }}",
            sixty_times("[0]", "[x, x]") + "{{ ns.x|tojson }}",
            sixty_times("[0]", "[x, x]") + "{{ ns.x ~ '' }}",
            sixty_times("[0]", "[x, x]") + "{{ '%s' % ns.x }}",
            sixty_times("[0]", "[x, x]") + "{{ '{}'.format(ns.x) }}",
            "{{ ([[0] * 99999] * 99999)|sum(start=[]) }}",
        ],
    )
    def test_too_many_steps(self, source: str, monkeypatch: pytest.MonkeyPatch):
        # The real bound takes about a second each.
        monkeypatch.setattr(metering, "MAX_STEPS", 200_000)
        with pytest.raises(TooCostly, match="more than 200000 steps"):
            render(source)

    def test_a_range_is_bounded(self):
        with pytest.raises(OverflowError, match="Range too big"):
            render("{% for a in range(100001) %}{% endfor %}")

    def test_recursive_loops_are_refused_with_their_line(self):
        with pytest.raises(TemplateError, match="recursive loops are not supported"):
            render("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}")

    @pytest.mark.parametrize("expression", ["2 ** 99999999", "(2 ** 4000) * (2 ** 4000)", "(-2) ** 99999999"])
    def test_numbers_stay_small(self, expression: str):
        with pytest.raises(TooCostly, match="more than 4096 bits"):
            render("{{ " + expression + " }}")


class TestEndlessText:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'x' * 99999999999 }}",
            "{{ 99999999999 * 'x' }}",
            sixty_times("'x'", "x ~ x"),
            sixty_times("'x'", "x + x"),
            "{% set ns = namespace(t='x') %}{% for a in range(60) %}{% set t %}{{ ns.t }}{{ ns.t }}{% endset %}"
            "{% set ns.t = t %}{% endfor %}",
            sixty_times("'x'", "'%s%s' % (x, x)"),
            sixty_times("'x'", "'{0}{0}'.format(x)"),
            sixty_times("'x'", "x|replace('x', 'xx')"),
            sixty_times("'x'", "x.replace('x', 'xx')"),
            sixty_times("'x'", "x.join('ab') ~ x"),
            sixty_times("'x'", "'ab'|join(x) ~ x"),
            "{% macro f(t) %}{{ t }}{{ t }}{% endmacro %}" + sixty_times("'x'", "f(x)"),
            "{{ ('x' * 9999999 ~ '\n')|indent(99999999) }}",
            "{{ (['x' * 9999]*99999)|join }}",
            "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
            "{% macro f() %}{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{{ f() }}",
        ],
    )
    def test_too_much_text(self, source: str):
        with pytest.raises(TooCostly, match="too much text"):
            render(source)

    @pytest.mark.parametrize(
        "expression",
        [
            "'x'.center(99999999)",
            "'x'.ljust(10000, '-')",
            "'x'.zfill(99999999)",
            "'x'|center(99999999)",
            "[1]|tojson(indent=99999999)",
            "('x'|safe).rjust(99999999)",
            "['x']|map('center', 99999999)|list",
        ],
    )
    def test_too_wide(self, expression: str):
        with pytest.raises(TooCostly, match="more than 9999 columns"):
            render("{{ " + expression + " }}")

    @pytest.mark.parametrize(
        "expression",
        [
            "'%99999999d' % 1",
            "'%*d' % (99999999, 1)",
            "'%.99999999f' % 1.0",
            "'%99999999d'|format(1)",
            "'{:>99999999}'.format(1)",
            "'{:{}}'.format(1, 99999999)",
            "'{0!r:^99999999}'.format(1)",
            "'{x:>99999999}'.format_map({'x': 1})",
        ],
    )
    def test_formats_of_a_computed_or_large_width_are_refused(self, expression: str):
        with pytest.raises(SecurityError, match="computed or very large width"):
            render("{{ " + expression + " }}")

    @pytest.mark.parametrize(
        "expression", ["'\t'.expandtabs(9)", "'x'.translate({120: 'y'})", "(1).to_bytes(9, 'big')"]
    )
    def test_methods_without_a_use_in_templates_are_refused(self, expression: str):
        with pytest.raises(SecurityError, match="not supported"):
            render("{{ " + expression + " }}")


class TestOrdinaryWork:
    def test_a_long_conversation_is_far_from_the_bounds(self, monkeypatch: pytest.MonkeyPatch):
        source = (
            "{% set ns = namespace(out='') %}{% for m in messages %}{% if loop.last %}!{% endif %}"
            "{% set ns.out = m.role ~ ': ' ~ (m.content|trim) %}{{ ns.out + '\n' }}{% endfor %}"
        )
        monkeypatch.setattr(metering, "MAX_STEPS", 30_000)
        monkeypatch.setattr(metering, "MAX_TOTAL_CHARACTERS", 1_500_000)
        messages = [{"role": "user", "content": "word " * 60}] * 1000
        assert len(render(source, messages=messages)) == 1000 * (len("user: \n") + 299) + 1

    @pytest.mark.parametrize(
        ("source", "expected"),
        [
            (
                "{% for a in [1,2,3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
                "1/3,2/3,3/3",
            ),
            (
                "{% for a in [1,2] %}{{ loop.previtem|default('-') }}{{ loop.nextitem|default('-') }}{% endfor %}",
                "-21-",
            ),
            ("{% for a in [] %}x{% else %}none{% endfor %}", "none"),
            ("{% for a in missing %}x{% else %}none{% endfor %}", "none"),
            ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
            ("{% for a in [1,2,3,4] if a % 2 == 0 %}{{ a }}{% endfor %}", "24"),
            ("{% for a in 'xyz' %}{% if loop.first %}{% continue %}{% endif %}{{ a }}{% break %}{% endfor %}", "y"),
            ("{{ 'a' ~ 1 ~ none ~ missing }}", "a1None"),
            ("{{ '%5.2f|%-4s|' % (3.14159, 'x') }}", " 3.14|x   |"),
            ("{{ '{:>5}|{:03d}'.format('x', 7) }}", "    x|007"),
            ("{{ 'x'.center(5, '-') }}{{ '7'.zfill(3) }}", "--x--007"),
            ("{{ ', '.join(['a', 'b']) }}{{ ['a', 'b']|join(', ', ) }}", "a, ba, b"),
            ("{{ [{'n': 1}, {'n': 2}]|sum(attribute='n') }}{{ [[1], [2]]|sum(start=[]) }}", "3[1, 2]"),
            ("{{ [{'n': 'a'}, {'n': 'b'}]|join('-', attribute='n') }}", "a-b"),
            ("{{ 'aaa'|replace('a', 'b', 2) }}{{ 'aaa'.replace('a', 'b', 1) }}", "bbabaa"),
            ("{{ 'a\nb'|indent('> ', true) }}", "> a\n> b"),
            ("{% filter upper %}shout{% endfilter %}", "SHOUT"),
            ("{% set t %}caught{% endset %}{{ t }}", "caught"),
            ("{% call(x) f() %}<{{ x }}>{% endcall %}", "<1>"),
            ("{% generation %}{% set inner = 1 %}kept{% endgeneration %}{{ inner|default('gone') }}", "keptgone"),
            (
                "{{ {'b': 1, 'a': 'é<'}|tojson }}{{ [1]|tojson(separators=(',', ':'), indent=1) }}",
                '{"b": 1, "a": "é<"}[\n 1\n]',
            ),
        ],
    )
    def test_works_as_written(self, source: str, expected: str):
        macro = "{% macro f() %}{{ caller(1) }}{% endmacro %}"
        assert render(macro + source) == expected


@pytest.mark.parametrize("hook", ["_generate", "call_binop", "call"])
def test_the_library_still_calls_what_is_overridden(hook: str, monkeypatch: pytest.MonkeyPatch):
    """The meter hangs on these methods: a release of the library that no longer called one would switch it off."""
    called: list[str] = []
    inherited: Callable[..., object] = getattr(ChatEnvironment, hook)

    def spy(*args: object, **kwargs: object) -> object:
        called.append(hook)
        return inherited(*args, **kwargs)

    monkeypatch.setattr(sandbox.ChatEnvironment, hook, spy)
    assert render("{{ 'a' + 'b'.upper() }}") == "aB"
    assert called
