"""Knows what names and types mean to a tracer of kernels, and which instances of structs and functions there are.

`trace` explains the whole; this module has what expressions (`trace_expressions`) and statements need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .program import Declaration, Unit, declarator_name, parameter_name
from .purity import Purity
from .syntax import Node
from .values import (
    SIZES,
    Array,
    Closure,
    Config,
    Enumeration,
    Functions,
    Instance,
    Object,
    Plain,
    Pointer,
    Record,
    Scope,
    Space,
    Template,
    as_int,
    key,
    size_of,
)

_MOST = 2_000  # calls of one function, after which its template arguments count as unknown


@dataclass
class Findings:
    """What the tracers of all kernels of an export have seen."""

    live: set[Declaration] = field(default_factory=set)
    seen: set[Node] = field(default_factory=set)  # statements, lambdas and functions' bodies that were walked
    truth: dict[Node, set[bool | None]] = field(default_factory=dict)  # values of conditions, && and ||
    read: set[Node] = field(default_factory=set)  # declarators of variables and parameters that are read
    names: set[str] = field(default_factory=set)  # members of objects whose type is not known
    mixed: set[Node] = field(default_factory=set)  # conditions after which some instances end and others go on
    whole: set[Declaration] = field(default_factory=set)  # structs whose members all stay, because bytes are read
    calls: dict[Node, set[Declaration]] = field(default_factory=dict)  # what a call may call
    braced: set[Declaration] = field(default_factory=set)  # structs that a list of values in braces makes
    constant: set[tuple[str, str]] = field(default_factory=set)  # struct and member: members that nobody writes
    odd_calls: set[Declaration] = field(default_factory=set)  # functions that something else than a call mentions
    writes: dict[Node, set[Any]] = field(default_factory=dict)  # assignments: the members or variables they write

    def is_known(self, node: Node) -> bool | None:
        """Returns the value that a condition has in every instance, or None."""
        found = self.truth.get(node, {None})
        return next(iter(found)) if len(found) == 1 else None


LITERALS = {"true": 1, "false": 0}


def listed(name: str) -> list[str]:
    """Returns the name of a template and its arguments, `A<B, C<D>>` as A, B and C<D>."""
    head, bracket, inside = name.partition("<")
    found, depth, start = [head.strip()], 0, 0
    if not bracket:
        return found
    inside = inside.rstrip().removesuffix(">")
    for i, letter in enumerate(f"{inside},"):
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            found.append(inside[start:i].strip())
            start = i + 1
    return found


class Base:
    """Traces one kernel with one set of constants: names, structs, types and functions."""

    def __init__(self, units: Sequence[Unit], constants: dict[str, Any], findings: Findings) -> None:
        self.f = findings
        self.spaces: dict[str, dict[str, list[Declaration]]] = {}
        for unit in units:
            for declaration in unit.declarations:
                space = self.spaces.setdefault(declaration.namespace, {})
                space.setdefault(declaration.name, []).append(declaration)
        self.config = Config(constants)
        self.purity = Purity(units)
        self.roots = {name: Scope(None, None, name) for name in self.spaces}
        self.instances: dict[Any, Instance] = {}
        self.by_declaration: dict[Declaration, list[Instance]] = {}
        self.walked: set[Any] = set()
        self.values: dict[Any, Any] = {}
        self.quiet = 0
        self.steps = 0
        self.closures: dict[Node, Closure] = {}
        self.called: set[Node] = set()
        self.times: dict[Declaration, int] = {}
        self.queue: list[tuple[Node, Scope]] = []  # bodies that are still to be walked

    def value(self, node: Node, scope: Scope) -> Any:
        """Returns the value of an expression, and notes what it needs."""
        raise NotImplementedError

    def argument(self, node: Node, scope: Scope) -> Any:
        """Returns the value of a template argument."""
        raise NotImplementedError

    # ---- names

    def lookup(self, name: str, scope: Scope | None) -> Any:
        while scope is not None:
            if name in scope.names:
                if name in scope.places and not self.quiet:
                    self.f.read.add(scope.places[name])
                return scope.names[name]
            if scope.instance is not None:
                found = self.find_member(scope.instance, name)
                if found is not None and found[1].declaration.name != name:  # a struct's own name is no constructor
                    return self.declared(*found)
            if scope.parent is None:
                return self.global_name(name, scope)
            scope = scope.parent
        return None

    def global_name(self, name: str, scope: Scope) -> Any:
        for space in dict.fromkeys((scope.namespace, "tconv3d")):
            found = self.spaces.get(space, {}).get(name)
            if found:
                return self.declared(found, None, space)
        if f"tconv3d::{name}" in self.spaces:
            return Space(f"tconv3d::{name}")
        return {"tconv3d": Space("tconv3d"), "ptx": Space("tconv3d::ptx")}.get(name)

    def find_member(self, instance: Instance, name: str) -> tuple[list[Declaration], Instance] | None:
        found = instance.declaration.members.get(name)
        if found:
            return found, instance
        for base in instance.bases:
            if isinstance(base, Instance) and (inherited := self.find_member(base, name)):
                return inherited
        return None

    def declared(self, found: list[Declaration], instance: Instance | None, space: str = "") -> Any:
        """Returns what a declared name means, and notes that the declaration is needed."""
        first = found[0]
        scope = instance.scope if instance else self.roots[space or "tconv3d"]
        if first.kind == "function":
            return Functions(tuple((each, instance) for each in found))
        if first.kind == "struct":
            if any(each.parameters or each.arguments is not None for each in found):
                return Template(tuple(found), scope)
            return self.instantiate(first, {}, scope)
        self.need(first)
        if first.kind == "constant":
            return self.constant(first, instance, scope)
        if first.kind == "alias":
            place = (first, instance, bool(self.quiet))
            if place not in self.values:
                self.values[place] = self.type_of(first.core.need("type"), scope)
            return self.values[place]
        if first.kind == "using":
            return self.value(first.core.kids[0], scope)
        if first.kind == "enum":
            return Enumeration(first)
        type_ = self.member_type(first, scope)
        if first.outer is not None and (first.outer.name, first.name) in self.f.constant and first.value is not None:
            known = self.value(first.value, scope)
            return known if isinstance(known, int) else Object(type_)
        return Object(type_)

    def need(self, declaration: Declaration) -> None:
        if not self.quiet:
            self.f.live.add(declaration)

    def member_type(self, declaration: Declaration, scope: Scope) -> Any:
        field_ = declaration.core.parent
        assert field_ is not None
        if declaration.value is not None and ("init", declaration, id(scope)) not in self.walked and not self.quiet:
            self.walked.add(("init", declaration, id(scope)))
            self.value(declaration.value, scope)
        return self.declared_type(field_.need("type"), declaration.core, scope)

    def constant(self, declaration: Declaration, instance: Instance | None, scope: Scope) -> Any:
        place = (declaration, instance, bool(self.quiet))
        if place not in self.values:
            self.values[place] = None  # while it is computed, so that a constant cannot need itself
            if not self.quiet:
                field_ = declaration.core.parent
                field_ = field_.parent if field_ is not None and field_.kind == "init_declarator" else field_
                assert field_ is not None
                self.type_of(field_.need("type"), scope)
            value = self.value(declaration.value, scope) if declaration.value is not None else None
            if isinstance(value, list):
                field_ = declaration.core.parent
                assert field_ is not None
                value = self.brace(self.type_of(field_.need("type"), scope), value)
            self.values[place] = value
        return self.values[place]

    def named_type(self, name: str) -> Any:
        """Returns a type that a constant names, such as `float` or `tconv3d::Half`."""
        bare = name.removeprefix("tconv3d::")
        if bare in SIZES:
            return Plain(bare)
        if bare in LITERALS or bare.lstrip("-").isdigit():
            return LITERALS[bare] if bare in LITERALS else int(bare)
        head, *given = listed(bare)
        found = self.lookup(head, self.roots["tconv3d"])
        if not given:
            return found
        # Not by the grammar, which does not understand deep lists of template arguments.
        place = (name, bool(self.quiet))
        if place not in self.values:
            self.values[place] = self.applied(found, [self.named_type(each) for each in given])
        return self.values[place]

    # ---- structs

    def instantiate(self, declaration: Declaration, arguments: dict[str, Any], outer: Scope) -> Instance:
        self.need(declaration)
        place = declaration, key(arguments), id(outer)
        if place in self.instances:
            made = self.instances[place]
        else:
            made = self.instances[place] = Instance(declaration, arguments, outer)
            for clause in (kid for kid in declaration.core.kids if kid.kind == "base_class_clause"):
                made.bases += [self.type_of(kid, outer_with(made)) for kid in clause.kids]
        if not self.quiet and ("struct", place) not in self.walked:
            self.walked.add(("struct", place))
            self.enter_struct(made)
        return made

    def enter_struct(self, made: Instance) -> None:
        declaration = made.declaration
        self.by_declaration.setdefault(declaration, []).append(made)
        for kid in declaration.core.kids:
            if kid.kind in ("alignas_qualifier", "base_class_clause"):
                for inner in kid.kids:
                    self.value(inner, made.scope) if kid.kind == "alignas_qualifier" else self.type_of(
                        inner, made.scope
                    )
        body = declaration.core.get("body")
        for kid in body.kids if body else []:
            if kid.kind == "static_assert_declaration":
                self.assertion(kid, made.scope)
        for name in self.f.names & declaration.members.keys():
            self.touch(made, name)
        for name in ("operator", declaration.name):  # conversions and constructors
            for function in declaration.members.get(name, []):
                if function.kind == "function":
                    self.f.live.add(function)
                    self.walk_function(function, made, {}, [])

    def assertion(self, node: Node, scope: Scope) -> None:
        """Notes whether an assertion holds; an assertion whose truth is not known needs what it mentions."""
        condition = node.need("condition")
        self.quiet += 1
        found = self.truth(self.value(condition, scope))
        self.quiet -= 1
        self.note(node, found)
        if found is not True:
            self.value(condition, scope)

    def touch(self, instance: Instance, name: str) -> None:
        """Needs every member of this name, whatever it is."""
        found = self.declared(instance.declaration.members[name], instance)
        if isinstance(found, Functions):
            for declaration, _ in found.candidates:
                self.f.live.add(declaration)
                self.f.odd_calls.add(declaration)
                self.walk_function(declaration, instance, {}, [])

    def mention(self, name: str) -> None:
        """Needs the members of this name in all structs."""
        if self.quiet or name in self.f.names:
            return
        self.f.names.add(name)
        for declaration, instances in list(self.by_declaration.items()):
            if name in declaration.members:
                for instance in list(instances):
                    self.touch(instance, name)

    def applied(self, template: Template, given: list[Any]) -> Any:
        """Returns the struct of a template with these arguments, by the specialisation that fits."""
        primary = next((d for d in template.declarations if d.arguments is None), template.declarations[0])
        values = list(given)
        scope = Scope(template.scope)
        for parameter, value in zip(primary.parameters, values, strict=False):
            scope.names[parameter_name(parameter)] = value
        for parameter in primary.parameters[len(values) :]:
            default = parameter.get("default_value") or parameter.get("default_type")
            values.append(self.value(default, scope) if default is not None else None)
        special = [d for d in template.declarations if d.arguments is not None]
        if special and any(value is None for value in values):
            for declaration in template.declarations:
                self.need(declaration)
            return None
        for declaration in special:
            bound = self.matched(declaration, values, template.scope)
            if bound is not None:
                self.need(primary)
                return self.instantiate(declaration, bound, template.scope)
        names = [parameter_name(parameter) for parameter in primary.parameters]
        return self.instantiate(primary, dict(zip(names, values, strict=False)), template.scope)

    def matched(self, declaration: Declaration, values: list[Any], scope: Scope) -> dict[str, Any] | None:
        """Returns the parameters of a specialisation if it is the one for these arguments."""
        names = {parameter_name(parameter) for parameter in declaration.parameters}
        bound: dict[str, Any] = {}
        assert declaration.arguments is not None
        for node, value in zip(declaration.arguments, values, strict=True):
            if node.text in names:
                bound[node.text] = value
                continue
            self.quiet += 1
            wanted = self.argument(node, scope)
            self.quiet -= 1
            if wanted != value:
                return None
        return bound

    # ---- types

    def type_of(self, node: Node, scope: Scope) -> Any:
        """Returns the type that a node of the grammar's type nodes means."""
        kind = node.kind
        if kind in ("primitive_type", "sized_type_specifier"):
            return Plain(" ".join(node.text.split()))
        if kind == "type_descriptor":
            inner = self.type_of(node.need("type"), scope)
            declarator = node.get("declarator")
            return self.wrapped(inner, declarator, scope) if declarator is not None else inner
        if kind == "dependent_type":
            return self.type_of(node.kids[0], scope)
        if kind == "placeholder_type_specifier":
            return None
        if kind == "decltype":
            found = self.value(node.kids[0], scope)
            return (
                found.type
                if isinstance(found, (Object, Record))
                else Plain("int")
                if isinstance(found, int)
                else None
            )
        if kind == "enum_specifier":
            return None
        found = self.value(node, scope)
        if found is None and kind == "type_identifier":
            return None if _is_bound(node.text, scope) else Plain(node.text)
        return self.enclosing(found, scope) if isinstance(found, Template) else found

    def enclosing(self, template: Template, scope: Scope | None) -> Any:
        """Returns the instance that the name of a template means inside of that template."""
        while scope is not None:
            if scope.instance is not None and scope.instance.declaration in template.declarations:
                return scope.instance
            scope = scope.parent
        return None

    def declared_type(self, type_: Node, declarator: Node, scope: Scope) -> Any:
        return self.wrapped(self.type_of(type_, scope), declarator, scope)

    def wrapped(self, inner: Any, declarator: Node | None, scope: Scope) -> Any:
        """Adds the pointers and arrays of a declarator to a type; references are left out."""
        while declarator is not None:
            kind = declarator.kind
            following = declarator.get("declarator") or next(
                (k for k in declarator.kids if k.kind.endswith("declarator")), None
            )
            if kind in ("pointer_declarator", "abstract_pointer_declarator"):
                inner = Pointer(inner)
            elif kind in ("array_declarator", "abstract_array_declarator"):
                size = declarator.get("size")
                inner = Array(inner, as_int(self.value(size, scope)) if size is not None else None)
            declarator = following
        return inner

    def size(self, type_: Any) -> int | None:
        if isinstance(type_, Instance):
            total, align = 0, 1
            for found in type_.declaration.members.values():
                for each in found:
                    if each.kind == "member":
                        field_ = each.core.parent
                        assert field_ is not None
                        inner = self.declared_type(field_.need("type"), each.core, type_.scope)
                        size = self.size(inner.of if isinstance(inner, Array) else inner)
                        if size is None or (isinstance(inner, Array) and inner.count is None):
                            return None
                        total = -(-total // size) * size + size * (
                            inner.count or 0 if isinstance(inner, Array) else 1
                        )
                        align = max(align, size)
            return -(-total // align) * align
        if isinstance(type_, Array) and isinstance(type_.of, Instance):
            each_size = self.size(type_.of)
            return None if each_size is None or type_.count is None else each_size * type_.count
        return size_of(type_)

    def brace(self, type_: Any, values: list[Any]) -> Any:
        """Returns an object that is made of a list in braces, and needs the members that get a value."""
        if isinstance(type_, Instance):
            if values:
                self.f.braced.add(type_.declaration)
            members = [m for found in type_.declaration.members.values() for m in found if m.kind == "member"]
            for member in members[: len(values)]:
                self.need(member)
                if not self.quiet:
                    self.member_type(member, type_.scope)
            if members and len(values) == len(members) and all(as_int(value) is not None for value in values):
                return Record(type_, {m.name: as_int(v) for m, v in zip(members, values, strict=True)})
        return Object(type_)

    # ---- conditions

    def truth(self, value: Any) -> bool | None:
        number = as_int(value)
        return None if number is None else bool(number)

    def note(self, node: Node, truth: bool | None) -> None:
        if not self.quiet:
            self.f.truth.setdefault(node, set()).add(truth)

    # ---- functions

    def walk_function(
        self, declaration: Declaration, instance: Instance | None, given: dict[str, Any], values: Sequence[Any]
    ) -> None:
        """Walks through a function with these template arguments.

        Among its arguments only lambdas matter, and lists in braces, which make objects of the parameters' types.
        """
        closures = tuple(
            value if isinstance(value, Closure) else len(value) if isinstance(value, list) else None
            for value in values
        )
        self.times[declaration] = self.times.get(declaration, 0) + 1
        if self.times[declaration] > _MOST:  # a recursion whose end is not known
            given = dict.fromkeys(given)
        place = declaration, instance, key(given), closures
        if self.quiet or place in self.walked or declaration.body is None:
            return
        self.walked.add(place)
        scope = Scope(instance.scope if instance else self.roots[declaration.namespace])
        for parameter in declaration.parameters:
            scope.names[parameter_name(parameter)] = None
        scope.names.update(given)
        result = declaration.core.get("type")
        if result is not None:
            self.type_of(result, scope)
        self.bind(declaration.function, scope, values)
        for listed in (kid for kid in declaration.core.kids if kid.kind == "field_initializer_list"):
            for each in listed.kids:
                name, *initializers = each.kids
                member = self.find_member(instance, name.text) if instance is not None else None
                if member is not None:
                    self.declared(*member)
                else:
                    self.value(name, scope)
                for kid in initializers:
                    self.value(kid, scope)
        self.queue.append((declaration.body, scope))

    def bind(self, function: Node, scope: Scope, values: Sequence[Any]) -> None:
        parameters = function.get("parameters")
        listed = [k for k in parameters.kids if k.kind.endswith("parameter_declaration")] if parameters else []
        for i, parameter in enumerate(listed):
            declarator = parameter.get("declarator")
            type_ = self.type_of(parameter.need("type"), scope)
            default = parameter.get("default_value")
            if default is not None:
                self.value(default, scope)
            if declarator is None:
                continue
            name = declarator_name(declarator)
            type_ = self.wrapped(type_, declarator, scope)
            given = values[i] if i < len(values) else None
            if isinstance(given, list):
                self.brace(type_, given)
            if isinstance(given, Closure):
                found: Any = given
            else:
                found = Object(type_) if type_ is not None else given if isinstance(given, Object) else None
            if name is not None:
                scope.names[name.text] = found
                scope.places[name.text] = name

    def call_closure(self, closure: Closure, values: Sequence[Any]) -> Any:
        self.called.add(closure.node)
        types = tuple(key(value) for value in values)
        place = closure, types
        if self.quiet or place in self.walked:
            return None
        self.walked.add(place)
        scope = Scope(closure.scope)
        declarator = closure.node.get("declarator")
        if declarator is not None:
            self.bind(declarator, scope, values)
        self.queue.append((closure.node.need("body"), scope))
        return None


def _is_bound(name: str, scope: Scope | None) -> bool:
    """Tells whether a name is a parameter of a template, whose value need not be known."""
    while scope is not None:
        if name in scope.names:
            return True
        scope = scope.parent
    return False


def outer_with(instance: Instance) -> Scope:
    """Returns the scope in which the bases of a struct are named: its template's parameters, not its members."""
    scope = Scope(instance.scope.parent)
    scope.names.update(instance.arguments)
    return scope
