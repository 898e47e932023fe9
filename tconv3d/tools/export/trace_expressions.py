"""Follows expressions and calls: what they mean where it is known, and what they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .compute import compute, computed
from .program import Declaration, parameter_name
from .syntax import Node
from .trace_base import Base
from .values import (
    Array,
    Closure,
    Config,
    Enumeration,
    Enumerator,
    Functions,
    Instance,
    Object,
    Plain,
    Pointer,
    Record,
    Scope,
    Space,
    Table,
    Template,
    as_int,
    key,
)


class Expressions(Base):
    """Traces expressions."""

    def value(self, node: Node, scope: Scope) -> Any:
        method = _METHODS.get(node.kind)
        if method is not None:
            return method(self, node, scope)
        for kid in node.kids:
            self.value(kid, scope)
        return None

    def number(self, node: Node, scope: Scope) -> Any:
        text = node.text.replace("'", "").lower()
        if text.startswith("0x") and "p" not in text:
            return int(text.rstrip("ul"), 16)
        if any(mark in text for mark in ".epf"):
            return Object(Plain("float" if text.endswith("f") else "double"))
        return int(text.rstrip("ul"))

    def name(self, node: Node, scope: Scope) -> Any:
        return self.lookup(node.text, scope)

    def within(self, node: Node, scope: Scope) -> Any:
        """The value of `Scope::name`."""
        outer = node.get("scope")
        if outer is not None and outer.kind == "template_type" and outer.need("name").text == "Choose":
            return self.chosen(node, outer.need("arguments").kids, scope)
        found = self.type_of(outer, scope) if outer is not None else Space("tconv3d")
        return self.inside(found, node.need("name"), scope)

    def chosen(self, node: Node, given: Sequence[Node], scope: Scope) -> Any:
        """The type `Choose<condition, A, B>::type`: A or B."""
        condition, first, second = given
        self.quiet += 1
        found = self.truth(self.argument(condition, scope))
        self.quiet -= 1
        self.note(node, found)
        if found is None or node in self.f.mixed:  # the text stays, with everything that it mentions
            self.argument(condition, scope)
            type_ = self.type_of(node.need("scope"), scope)
            self.inside(type_, node.need("name"), scope)
        return self.argument(first if found else second, scope) if found is not None else None

    def inside(self, found: Any, name: Node, scope: Scope) -> Any:
        if name.kind in ("dependent_name", "dependent_type"):
            return self.inside(found, name.kids[0], scope)
        if name.kind == "qualified_identifier":
            return self.inside(self.inside(found, name.need("scope"), scope), name.need("name"), scope)
        if name.kind in ("template_function", "template_type", "template_method"):
            base = self.inside(found, name.need("name"), scope)
            return self.with_arguments(base, name, scope)
        text = name.text
        if isinstance(found, Config):
            return self.config_constant(found, text)
        if isinstance(found, Space):
            root = self.roots.get(found.name)
            return self.lookup(text, root) if root is not None else None
        if isinstance(found, Enumeration):
            return Enumerator(found.declaration, text)
        if isinstance(found, Instance):
            member = self.find_member(found, text)
            if member is not None:
                return self.declared(*member)
            return found.arguments.get(text)
        self.mention(text)
        return None

    def config_constant(self, config: Config, name: str) -> Any:
        value = config.constants.get(name)
        if isinstance(value, str):
            return self.named_type(value)
        return Table(value) if isinstance(value, tuple) else value

    def with_arguments(self, base: Any, node: Node, scope: Scope) -> Any:
        given = [self.argument(kid, scope) for kid in node.need("arguments").kids if kid.kind != "comment"]
        if isinstance(base, Template):
            return self.applied(base, given)
        if isinstance(base, Functions):
            return Functions(base.candidates, tuple(given), base.of)
        return None

    def templated(self, node: Node, scope: Scope) -> Any:
        return self.with_arguments(self.lookup(node.need("name").text, scope), node, scope)

    def argument(self, node: Node, scope: Scope) -> Any:
        """The value of a template argument, which the grammar may take for a type."""
        declarator = node.get("declarator") if node.kind == "type_descriptor" else None
        if declarator is not None and declarator.kind == "abstract_function_declarator":
            return self.call_like_type(node.need("type"), declarator, scope)
        if node.kind == "type_descriptor" and declarator is None:
            inner = node.need("type")
            if inner.kind in ("type_identifier", "qualified_identifier", "dependent_type"):
                return self.type_of(inner, scope)
        return self.type_of(node, scope) if node.kind == "type_descriptor" else self.value(node, scope)

    def call_like_type(self, function: Node, declarator: Node, scope: Scope) -> Any:
        """The value of a call `f(a, b)` as a template argument, which the grammar takes for a type of functions."""
        values = [self.argument(kid.get("type") or kid, scope) for kid in declarator.need("parameters").kids]
        target = self.value(function, scope)
        if isinstance(target, Table):
            return entry(target, values)
        return self.call_functions(function, target, values) if isinstance(target, Functions) else None

    def parenthesized(self, node: Node, scope: Scope) -> Any:
        return self.value(node.kids[0], scope)

    def unary(self, node: Node, scope: Scope) -> Any:
        operand = self.value(node.need("argument"), scope)
        mark, number = node.need("operator").text, as_int(operand)
        if mark == "!":
            self.note(node.need("argument"), self.truth(operand))
        if number is None:
            return (
                operand
                if isinstance(operand, Object) and mark in "-+~"
                else Object(Plain("bool"))
                if mark == "!"
                else None
            )
        return {"!": int(not number), "-": -number, "+": number, "~": ~number}.get(mark)

    def pointed(self, node: Node, scope: Scope) -> Any:
        operand = self.value(node.need("argument"), scope)
        if not isinstance(operand, Object):
            return None
        if node.need("operator").text == "&":
            return Object(Pointer(operand.type))
        return Object(operand.type.to) if isinstance(operand.type, Pointer) else None

    def binary(self, node: Node, scope: Scope) -> Any:
        mark, first, second = node.need("operator").text.strip(), node.need("left"), node.need("right")
        left = self.value(first, scope)
        if mark in ("&&", "||"):
            return self.logical(mark, first, second, self.truth(left), scope)
        right = self.value(second, scope)
        if isinstance(left, Enumerator) and isinstance(right, Enumerator) and mark in ("==", "!="):
            return int((left == right) == (mark == "=="))
        a, b = as_int(left), as_int(right)
        if a is None or b is None:
            if mark in ("==", "!=", "<", ">", "<=", ">="):
                return Object(Plain("bool"))
            return joined_type(left, right)
        return compute(mark, a, b)

    def logical(self, mark: str, first: Node, second: Node, left: bool | None, scope: Scope) -> Any:
        decisive = mark == "||"
        self.note(first, left)
        if left is decisive:
            return int(decisive)
        right = self.truth(self.value(second, scope))
        self.note(second, right)
        if right is decisive:
            return int(decisive)
        return Object(Plain("bool")) if left is None or right is None else int(not decisive)

    def choice(self, node: Node, scope: Scope) -> Any:
        condition = node.need("condition")
        found = self.truth(self.value(condition, scope))
        self.note(node, found)
        both = [
            self.value(node.need(role), scope) if found is not other else None
            for role, other in (("consequence", False), ("alternative", True))
        ]
        if found is not None:
            return both[0] if found else both[1]
        return both[0] if key(both[0]) == key(both[1]) else joined_type(*both)

    def sizeof(self, node: Node, scope: Scope) -> Any:
        inner = node.get("type")
        if inner is not None:
            return self.size(self.type_of(inner, scope))
        found = self.value(node.need("value").kids[0], scope)
        return self.size(found.type if isinstance(found, Object) else found)

    def subscript(self, node: Node, scope: Scope) -> Any:
        held = self.value(node.need("argument"), scope)
        for kid in node.need("indices").kids:
            self.value(kid, scope)
        if isinstance(held, Object):
            inner = held.type
            if isinstance(inner, Array):
                return Object(inner.of)
            return Object(inner.to) if isinstance(inner, Pointer) else None
        return None

    def field(self, node: Node, scope: Scope) -> Any:
        held = self.value(node.need("argument"), scope)
        name = node.need("field")
        given: Node | None = None
        while name.kind in ("dependent_name", "template_method"):
            given = name if name.kind == "template_method" else given
            name = name.get("name") or name.kids[0]
        if isinstance(held, Record):
            member = self.find_member(held.type, name.text)
            known = self.declared(*member) if member is not None else None
            if isinstance(known, Functions):
                return Functions(known.candidates, (), held)
            return held.members.get(name.text)
        type_ = held.type if isinstance(held, Object) else None
        type_ = type_.to if isinstance(type_, Pointer) else type_
        member = self.find_member(type_, name.text) if isinstance(type_, Instance) else None
        if member is None:
            if not isinstance(type_, Plain):
                self.mention(name.text)
            if given is not None:
                for kid in given.need("arguments").kids:
                    self.argument(kid, scope)
            return Object(Plain("unsigned")) if isinstance(type_, Plain) else None
        found = self.declared(*member)
        return self.with_arguments(found, given, scope) if given is not None else found

    def this(self, node: Node, scope: Scope) -> Any:
        found: Scope | None = scope
        while found is not None and found.instance is None:
            found = found.parent
        return Object(Pointer(found.instance)) if found is not None else None

    def braced(self, node: Node, scope: Scope) -> Any:
        return [self.value(kid, scope) for kid in node.kids if kid.kind != "comment"]

    def literal(self, node: Node, scope: Scope) -> Any:
        type_ = self.type_of(node.need("type"), scope)
        return self.brace(type_, self.braced(node.need("value"), scope))

    def lambda_(self, node: Node, scope: Scope) -> Any:
        closure = Closure(node, scope)
        if not self.quiet:
            self.closures.setdefault(node, closure)
        return closure

    def assignment(self, node: Node, scope: Scope) -> Any:
        value = self.value(node.need("right"), scope)
        target = self.value(node.need("left"), scope)
        if isinstance(value, list) and isinstance(target, Object):
            return self.brace(target.type, value)
        return target if isinstance(target, Object) else None

    def update(self, node: Node, scope: Scope) -> Any:
        target = self.value(node.need("argument"), scope)
        return target if isinstance(target, Object) else None

    def call(self, node: Node, scope: Scope) -> Any:
        function = node.need("function")
        listed = [kid for kid in node.need("arguments").kids if kid.kind != "comment"]
        if function.kind == "template_function" and function.need("name").text.endswith("_cast"):
            return self.converted(function, listed[0], scope)
        values = [self.value(kid, scope) for kid in listed]
        target = self.value(function, scope)
        if isinstance(target, Closure):
            return self.call_closure(target, values)
        if isinstance(target, Table):
            return entry(target, values)
        if isinstance(target, Functions):
            return self.call_functions(node, target, values)
        if isinstance(target, (Plain, Instance)):
            return self.brace(target, values) if isinstance(target, Instance) else self.as_type(target, values)
        for value in values:
            if isinstance(value, Closure):
                self.call_closure(value, [])
        return None

    def as_type(self, type_: Plain, values: list[Any]) -> Any:
        number = as_int(values[0]) if len(values) == 1 else None
        return number if number is not None and type_.name not in ("float", "double") else Object(type_)

    def converted(self, function: Node, argument: Node, scope: Scope) -> Any:
        type_ = self.argument(function.need("arguments").kids[0], scope)
        value = self.value(argument, scope)
        inner = type_.to if isinstance(type_, Pointer) else None
        if isinstance(inner, Instance) and function.need("name").text == "reinterpret_cast" and not self.quiet:
            self.f.whole.add(inner.declaration)
            self.brace(inner, [None] * 99)
        if isinstance(type_, Plain):
            return self.as_type(type_, [value])
        return Object(type_) if type_ is not None else None

    def call_functions(self, node: Node, target: Functions, values: list[Any]) -> Any:
        chosen = self.overloads(target, values)
        if not self.quiet:
            self.f.calls.setdefault(node, set()).update(declaration for declaration, _, _ in chosen)
        results = []
        for declaration, instance, given in chosen:
            self.need(declaration)
            self.walk_function(declaration, instance, given, values)
            results.append(self.result(declaration, instance, given, values, target.of))
        return results[0] if len({key(result) for result in results}) == 1 else None

    def overloads(
        self, target: Functions, values: list[Any]
    ) -> list[tuple[Declaration, Instance | None, dict[str, Any]]]:
        found, exact = [], []
        for declaration, instance in target.candidates:
            fitting = self.fit(declaration, instance, target.arguments, values)
            if fitting is not None:
                given, same = fitting
                found.append((declaration, instance, given))
                if same:
                    exact.append(found[-1])
        plain = [each for each in exact if not each[0].parameters]
        unknown = [(d, i, dict.fromkeys(map(parameter_name, d.parameters))) for d, i in target.candidates]
        return plain or exact or found or unknown

    def fit(
        self, declaration: Declaration, instance: Instance | None, given: Sequence[Any], values: list[Any]
    ) -> tuple[dict[str, Any], bool] | None:
        """Returns the template arguments of a function for these arguments, and whether all types are the same."""
        if len(given) > len(declaration.parameters):
            return None
        names = [parameter_name(parameter) for parameter in declaration.parameters]
        for parameter, value in zip(declaration.parameters, given, strict=False):
            wants_type = parameter.kind.startswith(("type_", "optional_type_"))
            if value is not None and wants_type != isinstance(value, (Plain, Pointer, Array, Instance, Config)):
                return None
        bound: dict[str, Any] = dict(zip(names, given, strict=False))
        scope = Scope(instance.scope if instance else self.roots[declaration.namespace])
        scope.names.update(dict.fromkeys(names))
        scope.names.update(bound)
        listed = declaration.function.need("parameters").kids if declaration.function.get("parameters") else []
        listed = [parameter for parameter in listed if parameter.kind.endswith("parameter_declaration")]
        needed = [parameter for parameter in listed if parameter.get("default_value") is None]
        if not len(needed) <= len(values) <= len(listed):
            return None
        same = True
        self.quiet += 1
        free = set(names) - bound.keys()
        for parameter, value in zip(listed, values, strict=False):
            type_ = value.type if isinstance(value, Object) else Plain("int") if isinstance(value, int) else None
            declarator = parameter.get("declarator")
            deduce(parameter.need("type"), declarator, type_, value, free, bound)
            scope.names.update(bound)
            wanted = self.type_of(parameter.need("type"), scope)
            wanted = self.wrapped(wanted, declarator, scope) if declarator is not None else wanted
            fits = fits_type(wanted, type_)
            if fits is False:
                self.quiet -= 1
                return None
            same = same and fits is True
        for parameter, name in zip(declaration.parameters, names, strict=True):
            default = parameter.get("default_value") or parameter.get("default_type")
            if name not in bound and default is not None:
                bound[name] = self.argument(default, scope)
        self.quiet -= 1
        for parameter, name in zip(declaration.parameters, names, strict=True):
            default = parameter.get("default_value") or parameter.get("default_type")
            if default is not None and not self.quiet:
                self.argument(default, scope)
            bound.setdefault(name, None)
        return bound, same

    def result(
        self,
        declaration: Declaration,
        instance: Instance | None,
        given: dict[str, Any],
        values: list[Any],
        of: Record | None = None,
    ) -> Any:
        known = all(as_int(value) is not None or isinstance(value, (Record, Enumerator)) for value in values)
        if known and declaration.core.has("type_qualifier", "constexpr"):
            value = computed(self, declaration, instance, {**(of.members if of else {}), **given}, values)
            if value is not None:
                return value
        result = declaration.core.get("type")
        if result is None:
            return None
        scope = Scope(instance.scope if instance else self.roots[declaration.namespace])
        scope.names.update(given)
        type_ = self.declared_type(result, declaration.core.need("declarator"), scope)
        return Object(type_) if type_ is not None else None


def entry(table: Table, values: Iterable[Any]) -> Any:
    found: Any = table.values
    for value in values:
        index = as_int(value)
        if index is None or not isinstance(found, tuple) or not 0 <= index < len(found):
            return Object(Plain("int"))
        found = found[index]
    return found


def joined_type(left: Any, right: Any) -> Any:
    """Returns an object of the type of an arithmetic expression, if it is easy to know."""
    types = [
        Plain("int") if isinstance(side, int) else side.type if isinstance(side, Object) else None
        for side in (left, right)
    ]
    if isinstance(types[0], (Pointer, Array)):
        return Object(Pointer(types[0].of) if isinstance(types[0], Array) else types[0])
    if types[0] == types[1]:
        return Object(types[0]) if types[0] is not None else None
    for wide in ("double", "float", "unsigned long long", "long long", "unsigned"):
        if Plain(wide) in types and all(isinstance(each, Plain) for each in types):
            return Object(Plain(wide))
    return None


def fits_type(wanted: Any, given: Any) -> bool | None:
    """Says whether an argument has exactly the type of a parameter; None if it may be converted or is not known."""
    if wanted is None or given is None:
        return None
    if isinstance(given, Array) and isinstance(wanted, Pointer):
        given = Pointer(given.of)
    if isinstance(wanted, Pointer) and isinstance(given, Pointer):
        if wanted.to == Plain("void"):
            return True
        if given.to is None or wanted.to is None:
            return None
        return bool(wanted.to == given.to)
    if isinstance(wanted, Array) and isinstance(given, Array):
        return None if fits_type(wanted.of, given.of) is None else wanted.of == given.of
    if wanted == given:
        return True
    if isinstance(wanted, Plain) and isinstance(given, Plain):
        return None
    if isinstance(given, Instance) and given.declaration.name == "Int" and isinstance(wanted, Plain):
        return None
    if isinstance(given, Enumeration) or isinstance(wanted, Enumeration):
        return None
    if isinstance(given, Instance) and given.bases:
        return None
    return False


def deduce(
    node: Node, declarator: Node | None, given: Any, value: Any, free: set[str], bound: dict[str, Any]
) -> None:
    """Binds template parameters that the type of an argument tells."""
    while declarator is not None:
        if declarator.kind in ("pointer_declarator", "array_declarator"):
            size = declarator.get("size")
            if isinstance(given, Array) and size is not None and size.text in free:
                bound[size.text] = given.count
            given = given.to if isinstance(given, Pointer) else given.of if isinstance(given, Array) else None
        declarator = declarator.get("declarator") or next(
            (k for k in declarator.kids if k.kind.endswith("declarator")), None
        )
    if node.kind == "type_identifier" and node.text in free:
        if isinstance(value, Closure):
            return
        if given is not None:
            bound[node.text] = given
        return
    if node.kind != "template_type" or not isinstance(given, Instance):
        return
    if given.declaration.name == node.need("name").text:
        names = [parameter_name(parameter) for parameter in given.declaration.parameters]
        for name, argument in zip(names, node.need("arguments").kids, strict=False):
            if argument.text in free:
                bound[argument.text] = given.arguments.get(name)


_METHODS = {
    "number_literal": Expressions.number,
    "true": lambda tracer, node, scope: 1,
    "false": lambda tracer, node, scope: 0,
    "identifier": Expressions.name,
    "type_identifier": Expressions.name,
    "field_identifier": Expressions.name,
    "namespace_identifier": Expressions.name,
    "qualified_identifier": Expressions.within,
    "template_function": Expressions.templated,
    "template_type": Expressions.templated,
    "parenthesized_expression": Expressions.parenthesized,
    "condition_clause": lambda tracer, node, scope: tracer.value(node.need("value"), scope),
    "unary_expression": Expressions.unary,
    "pointer_expression": Expressions.pointed,
    "binary_expression": Expressions.binary,
    "conditional_expression": Expressions.choice,
    "sizeof_expression": Expressions.sizeof,
    "subscript_expression": Expressions.subscript,
    "field_expression": Expressions.field,
    "call_expression": Expressions.call,
    "this": Expressions.this,
    "initializer_list": Expressions.braced,
    "compound_literal_expression": Expressions.literal,
    "lambda_expression": Expressions.lambda_,
    "assignment_expression": Expressions.assignment,
    "update_expression": Expressions.update,
    "type_descriptor": Expressions.type_of,
    "dependent_type": Expressions.type_of,
    "primitive_type": Expressions.type_of,
    "sized_type_specifier": Expressions.type_of,
    "decltype": Expressions.type_of,
}
