"""A Jinja environment for templates that somebody else wrote: no way out, and bounded work, memory and output.

A chat template arrives inside a worker's archive and is a program. The library's immutable sandbox keeps it from the
interpreter; the meter keeps it from loops and strings without end. This module must not know what a message is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from trio_router.text.filters import chat_filters, metered_concat, metered_loop
from trio_router.text.metering import MAX_TEXT_CHARACTERS, METHODS, OPERATORS, Meter, TooCostly, check_brace_format


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """The settings, filters and functions that model authors write for (the transformers library's), metered.

    Render with `render` of this class only: it brings the meter along.
    """

    intercepted_binops = frozenset(OPERATORS)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # Constants are not folded: that would run operators and filters while compiling, where nothing counts.
            optimized=False,
            extensions=["jinja2.ext.loopcontrols", GenerationTag],
            finalize=_finalize,
        )
        self.filters = chat_filters()
        # Makes random text, as much as it is asked for.
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "namespace": PlainNamespace, "dict": _make_dict}

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """Run a template of this environment; raises whatever the template does, and TooCostly."""
        context = template.new_context({**variables, **Meter().variables()})
        return self.concat(template.root_render_func(context))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Between parsing and compiling; the library's hook for this purpose."""
        _Metering().visit(source)
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """End a macro, a `set` block or the whole; the library reads this attribute wherever output becomes a text."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_TEXT_CHARACTERS:
                raise TooCostly("the template makes too much text")
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result can be much larger than its operands."""
        meter = Meter.of(context)
        meter.work()
        OPERATORS[operator](meter, left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Make `str.format` safe, as inherited, and narrow."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_brace_format(value.__self__)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as inherited
        """Call a function, macro or method for a template."""
        meter = Meter.of(__context)
        meter.work()
        name = getattr(__obj, "__name__", "")
        owner = getattr(__obj, "__self__", None)
        if name in ("format", "format_map"):
            meter.measure([args, kwargs])
        elif name in METHODS and isinstance(owner, str | bytes | int):
            args = METHODS[name](meter, owner, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str):
            meter.make(len(result))
        return result


class PlainNamespace(Namespace):
    """`namespace()` without names that Python itself might call: they would be set unseen by the sandbox."""

    def __init__(*arguments: Any, **attributes: Any) -> None:
        self, *given = arguments
        values = dict(*given, **attributes)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}: it begins with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # A function in place of the class, whose attributes lead to every object there is.
    return dict(*args, **kwargs)


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - as the library declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse up to `{% endgeneration %}`."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Metering(NodeTransformer):
    """Puts counting filters where the compiled code would otherwise work unseen: loops and `~`."""

    def visit_For(self, node: nodes.For) -> nodes.For:  # noqa: N802 - the library finds it by this name
        if node.recursive:
            # A loop calls itself past the counting filter; no chat template does.
            raise TemplateSyntaxError("recursive loops are not supported in chat templates", node.lineno)
        self.generic_visit(node)
        # The annotation says Node; the parser puts nothing but expressions here.
        node.iter = metered_loop(cast("nodes.Expr", node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:  # noqa: N802 - as above
        self.generic_visit(node)
        return metered_concat(node.nodes, line=node.lineno)


@pass_context
def _finalize(context: Context, value: object) -> str:
    """What `{{ ... }}` puts out."""
    Meter.of(context).measure(value)
    return str(value)


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))
