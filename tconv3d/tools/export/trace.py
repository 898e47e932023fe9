"""Follows a kernel from its entry through everything that is compiled for given constants.

The tracer knows the values of template parameters and constants, so it walks only into branches that are taken, and
notes in `Findings` which statements it saw, which conditions had which values, and which declarations, members and
variables it needed. It is cautious: for what it does not understand, every declaration of a mentioned name is needed.
This module does not change any text (`rewrite` does).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .program import Declaration, Unit, declarator_name
from .purity import Purity
from .syntax import Node
from .values import (
    SIZES,
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
    size_of,
)

_ENDS = {"return_statement", "break_statement", "continue_statement"}
_MOST = 2_000  # calls of one function, after which its template arguments count as unknown


@dataclass
class Findings:
    """What the tracers of all kernels of an export have seen."""

    live: set[Declaration] = field(default_factory=set)
    seen: set[Node] = field(default_factory=set)  # statements, lambdas and functions' bodies that were walked
    truth: dict[Node, set[bool | None]] = field(default_factory=dict)  # of conditions and operands of && and ||
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


class Tracer:
    """Traces one kernel with one set of constants."""

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
        self.computing = 0
        self.steps = 0
        self.closures: dict[Node, Closure] = {}
        self.called: set[Node] = set()
        self.times: dict[Declaration, int] = {}
        self.queue: list[tuple[Node, Scope]] = []  # bodies that are still to be walked

    # ---- entry

    def run(self) -> None:
        """Walks from `run<Config>(args)`."""
        found = self.lookup("run", self.roots["tconv3d"])
        assert isinstance(found, Functions)
        for declaration, _ in found.candidates:
            self.f.live.add(declaration)
            name = _parameter_name(declaration.parameters[0])
            self.walk_function(declaration, None, {name: self.config}, [])
        self.drain()

    def need_all_of(self, name: str) -> None:
        """Needs every member of a struct."""
        found = self.lookup(name, self.roots["tconv3d"])
        assert isinstance(found, Instance)
        work = [found]
        while work:
            struct = work.pop()
            self.f.whole.add(struct.declaration)
            for member in (each for found_ in struct.declaration.members.values() for each in found_):
                if member.kind == "member":
                    self.need(member)
                    type_ = self.member_type(member, struct.scope)
                    work += [type_] if isinstance(type_, Instance) else []

    def drain(self) -> None:
        """Walks bodies until none is left, and lambdas that nobody was seen to call."""
        while self.queue:
            while self.queue:
                body, scope = self.queue.pop()
                self.f.seen.add(body)
                self.block(body, scope)
            for closure in [each for node, each in self.closures.items() if node not in self.called]:
                self.call_closure(closure, [])

    def named_type(self, name: str) -> Any:
        """Returns a type that a constant names, such as `float` or `tconv3d::Half`."""
        bare = name.removeprefix("tconv3d::")
        if bare in SIZES:
            return Plain(bare)
        if "<" in bare:
            from .syntax import parse

            node = next(n for n in parse(f"using T = {bare};").walk() if n.kind == "type_descriptor")
            return self.type_of(node, self.roots["tconv3d"])
        return self.lookup(bare, self.roots["tconv3d"])

    # ---- names

    def lookup(self, name: str, scope: Scope | None) -> Any:
        while scope is not None:
            if name in scope.names:
                if name in scope.places and not self.quiet:
                    self.f.read.add(scope.places[name])
                return scope.names[name]
            if scope.instance is not None:
                found = self.find_member(scope.instance, name)
                if found is not None:
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
            scope.names[_parameter_name(parameter)] = value
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
        names = [_parameter_name(parameter) for parameter in primary.parameters]
        return self.instantiate(primary, dict(zip(names, values, strict=False)), template.scope)

    def matched(self, declaration: Declaration, values: list[Any], scope: Scope) -> dict[str, Any] | None:
        """Returns the parameters of a specialisation if it is the one for these arguments."""
        names = {_parameter_name(parameter) for parameter in declaration.parameters}
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
            return found.type if isinstance(found, (Object, Record)) else Plain("int") if isinstance(found, int) else None
        if kind == "enum_specifier":
            return None
        found = self.value(node, scope)
        if found is None and kind == "type_identifier":
            return Plain(node.text)
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
                        total = -(-total // size) * size + size * (inner.count or 0 if isinstance(inner, Array) else 1)
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
        """Walks through a function with these template arguments; only lambdas matter among its arguments."""
        closures = tuple(value if isinstance(value, Closure) else None for value in values)
        self.times[declaration] = self.times.get(declaration, 0) + 1
        if self.times[declaration] > _MOST:  # a recursion whose end is not known
            given = dict.fromkeys(given)
        place = declaration, instance, key(given), closures
        if self.quiet or place in self.walked or declaration.body is None:
            return
        self.walked.add(place)
        scope = Scope(instance.scope if instance else self.roots[declaration.namespace])
        for parameter in declaration.parameters:
            scope.names[_parameter_name(parameter)] = None
        scope.names.update(given)
        result = declaration.core.get("type")
        if result is not None:
            self.type_of(result, scope)
        self.bind(declaration.function, scope, values)
        for listed in (kid for kid in declaration.core.kids if kid.kind == "field_initializer_list"):
            for each in listed.kids:
                name, *given = each.kids
                member = self.find_member(instance, name.text) if instance is not None else None
                if member is not None:
                    self.declared(*member)
                else:
                    self.value(name, scope)
                for kid in given:
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

    # ---- statements: each returns whether what follows in its block is never reached

    def block(self, node: Node, scope: Scope) -> bool:
        inner = Scope(scope)
        ended = False
        for statement in node.kids:
            if statement.kind == "comment":
                continue
            if ended:
                break
            ended = self.statement(statement, inner)
        return ended

    def statement(self, node: Node, scope: Scope) -> bool:
        if not self.quiet:
            self.f.seen.add(node)
        kind = node.kind
        if kind == "compound_statement":
            return self.block(node, scope)
        if kind == "if_statement":
            return self.condition(node, scope)
        if kind == "declaration":
            self.declaration(node, scope)
        elif kind == "expression_statement":
            for kid in node.kids:
                self.effect(kid, scope)
        elif kind in ("for_statement", "while_statement", "do_statement"):
            self.loop(node, scope)
        elif kind == "return_statement":
            for kid in node.kids:
                self.returned(kid, scope)
        elif kind == "static_assert_declaration":
            self.assertion(node, scope)
        elif kind == "alias_declaration":
            name = node.need("name")
            scope.names[name.text] = self.type_of(node.need("type"), scope)
            scope.places[name.text] = name
        elif kind == "else_clause":
            return self.statement(node.kids[0], scope)
        elif kind == "preproc_call":
            for word in (node.get("argument").text if node.get("argument") else "").split():  # type: ignore[union-attr]
                self.lookup(word, scope)
        elif kind not in _ENDS and kind != "comment":
            for kid in node.kids:
                self.value(kid, scope)
        return kind in _ENDS

    def returned(self, node: Node, scope: Scope) -> None:
        value = self.value(node, scope)
        if isinstance(value, list) and value:
            owner: Node | None = node
            while owner is not None and owner.kind not in ("function_definition", "lambda_expression"):
                owner = owner.parent
            result = owner.get("type") if owner is not None else None
            if result is not None:
                self.brace(self.type_of(result, scope), value)

    def condition(self, node: Node, scope: Scope) -> bool:
        clause = node.need("condition")
        condition = clause.need("value")
        found = self.truth(self.value(condition, scope))
        self.note(node, found)
        then, otherwise = node.need("consequence"), node.get("alternative")
        ends = [False, otherwise is None and found is not None and found]
        if found is not False:
            ends[0] = self.statement(then, Scope(scope))
        if found is not True and otherwise is not None:
            ends[1] = self.statement(otherwise, Scope(scope))
        ended = all(ends) if found is None else ends[0] if found else ends[1] and otherwise is not None
        return ended and not (found is not None and node in self.f.mixed)

    def loop(self, node: Node, scope: Scope) -> None:
        inner = Scope(scope)
        first = node.get("initializer")
        if first is not None:
            self.statement(first, inner) if first.kind.endswith(("declaration", "statement")) else self.effect(
                first, inner
            )
        condition = node.get("condition")
        if condition is not None:
            self.value(condition.get("value") or condition, inner)
        update = node.get("update")
        if update is not None:
            self.effect(update, inner)
        self.statement(node.need("body"), inner)

    def declaration(self, node: Node, scope: Scope) -> None:
        constant = node.has("type_qualifier", "constexpr") or node.has("type_qualifier", "const")
        type_ = self.type_of(node.need("type"), scope)
        for declarator in node.fields.get("declarator", []):
            name = declarator_name(declarator)
            value_node = declarator.get("value")
            value = self.value(value_node, scope) if value_node is not None else None
            inner = declarator.need("declarator") if declarator.kind == "init_declarator" else declarator
            own = self.wrapped(type_, inner, scope)
            if isinstance(value, list):
                value = self.brace(own, value)
            if isinstance(value, (int, Record)) and not constant:
                value = None
            if isinstance(value, (Closure, int, Record, Enumerator)):
                found: Any = value
            elif own is not None:
                found = Object(own)
            else:
                found = value if isinstance(value, Object) else None
            if name is not None:
                scope.names[name.text] = found
                scope.places[name.text] = name

    def effect(self, node: Node, scope: Scope) -> None:
        """Walks an expression whose value nobody takes: writing a variable or a member does not read it."""
        target = node.get("left") or node.get("argument")
        if node.kind == "comma_expression":
            self.effect(node.need("left"), scope)
            self.effect(node.need("right"), scope)
        elif node.kind == "assignment_expression" and target is not None:
            value = self.value(node.need("right"), scope)
            if isinstance(value, list):
                value = self.brace(self.object_type(target, scope), value)
            if target.kind not in ("identifier", "field_expression") or not self.is_pure(node.need("right")):
                self.value(target, scope)
            else:
                self.written(node, target, scope)
        elif node.kind == "update_expression" and target is not None and target.kind in ("identifier", "field_expression"):
            self.written(node, target, scope)
        else:
            self.value(node, scope)

    def object_type(self, target: Node, scope: Scope) -> Any:
        self.quiet += 1
        found = self.value(target, scope)
        self.quiet -= 1
        return found.type if isinstance(found, Object) else None

    def written(self, node: Node, target: Node, scope: Scope) -> None:
        """Needs the object whose member is written, but not the member; a variable of a reference type is read."""
        writes = self.f.writes.setdefault(node, set())
        if target.kind == "field_expression":
            held = self.value(target.need("argument"), scope)
            type_ = held.type if isinstance(held, Object) else None
            type_ = type_.to if isinstance(type_, Pointer) else type_
            member = self.find_member(type_, target.need("field").text) if isinstance(type_, Instance) else None
            if member is None:
                writes.add(None)
                self.value(target, scope)
            else:
                writes.add(member[0][0])
            return
        found: Scope | None = scope
        while found is not None and target.text not in found.names:
            member = self.find_member(found.instance, target.text) if found.instance is not None else None
            if member is not None:
                writes.add(member[0][0])
                return
            found = found.parent
        place = found.places.get(target.text) if found is not None else None
        if place is None or _is_reference(place):
            writes.add(None)
            self.value(target, scope)
        else:
            writes.add(place)

    def is_pure(self, node: Node) -> bool:
        return self.purity.is_pure(node)

    # ---- expressions

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
        if found is not None:
            return self.argument(first if found else second, scope)
        self.argument(condition, scope)
        self.type_of(node.need("scope"), scope)
        return None

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
            return operand if isinstance(operand, Object) and mark in "-+~" else Object(Plain("bool")) if mark == "!" else None
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

    def cast(self, node: Node, scope: Scope) -> Any:
        """`static_cast<T>(x)` and `reinterpret_cast<T>(x)` are calls of template functions to the grammar."""
        raise NotImplementedError

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

    # ---- calls

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
        unknown = [(d, i, dict.fromkeys(map(_parameter_name, d.parameters))) for d, i in target.candidates]
        return plain or exact or found or unknown

    def fit(
        self, declaration: Declaration, instance: Instance | None, given: Sequence[Any], values: list[Any]
    ) -> tuple[dict[str, Any], bool] | None:
        """Returns the template arguments of a function for these arguments, and whether all types are the same."""
        if len(given) > len(declaration.parameters):
            return None
        names = [_parameter_name(parameter) for parameter in declaration.parameters]
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
            deduce(parameter.need("type"), declarator, type_, value, free, bound, self)
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
            from .compute import computed

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


def outer_with(instance: Instance) -> Scope:
    """Returns the scope in which the bases of a struct are named: its template's parameters, not its members."""
    scope = Scope(instance.scope.parent)
    scope.names.update(instance.arguments)
    return scope


def entry(table: Table, values: Iterable[Any]) -> Any:
    found: Any = table.values
    for value in values:
        index = as_int(value)
        if index is None or not isinstance(found, tuple) or not 0 <= index < len(found):
            return Object(Plain("int"))
        found = found[index]
    return found


def compute(mark: str, a: int, b: int) -> int | None:
    """Returns the result of an operator of C++, whose division rounds towards zero."""
    if mark in ("/", "%"):
        if b == 0:
            return None
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if mark == "/" else a - b * quotient
    if mark in ("<<", ">>"):
        return None if not 0 <= b < 64 else a << b if mark == "<<" else a >> b
    table = {
        "+": a + b, "-": a - b, "*": a * b, "&": a & b, "|": a | b, "^": a ^ b,
        "==": int(a == b), "!=": int(a != b), "<": int(a < b), ">": int(a > b), "<=": int(a <= b), ">=": int(a >= b),
    }  # fmt: skip
    return table.get(mark)


def joined_type(left: Any, right: Any) -> Any:
    """Returns an object of the type of an arithmetic expression, if it is easy to know."""
    types = [Plain("int") if isinstance(side, int) else side.type if isinstance(side, Object) else None for side in (left, right)]
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
        return True if wanted.to == given.to else False
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
    node: Node, declarator: Node | None, given: Any, value: Any, free: set[str], bound: dict[str, Any], tracer: Tracer
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
    elif node.kind == "template_type" and isinstance(given, Instance):
        if given.declaration.name == node.need("name").text:
            names = [_parameter_name(parameter) for parameter in given.declaration.parameters]
            for name, argument in zip(names, node.need("arguments").kids, strict=False):
                if argument.text in free:
                    bound[argument.text] = given.arguments.get(name)


def _parameter_name(parameter: Node) -> str:
    found = parameter.get("name") or declarator_name(parameter.get("declarator"))
    if found is None:
        found = next((kid for kid in parameter.kids if kid.kind == "type_identifier"), None)
    return found.text if found is not None else ""


def _is_reference(name: Node) -> bool:
    parent = name.parent
    while parent is not None and parent.kind.endswith("declarator"):
        if parent.kind == "reference_declarator":
            return True
        parent = parent.parent
    return False


_METHODS = {
    "number_literal": Tracer.number,
    "true": lambda tracer, node, scope: 1,
    "false": lambda tracer, node, scope: 0,
    "identifier": Tracer.name,
    "type_identifier": Tracer.name,
    "field_identifier": Tracer.name,
    "namespace_identifier": Tracer.name,
    "qualified_identifier": Tracer.within,
    "template_function": Tracer.templated,
    "template_type": Tracer.templated,
    "parenthesized_expression": Tracer.parenthesized,
    "condition_clause": lambda tracer, node, scope: tracer.value(node.need("value"), scope),
    "unary_expression": Tracer.unary,
    "pointer_expression": Tracer.pointed,
    "binary_expression": Tracer.binary,
    "conditional_expression": Tracer.choice,
    "sizeof_expression": Tracer.sizeof,
    "subscript_expression": Tracer.subscript,
    "field_expression": Tracer.field,
    "call_expression": Tracer.call,
    "this": Tracer.this,
    "initializer_list": Tracer.braced,
    "compound_literal_expression": Tracer.literal,
    "lambda_expression": Tracer.lambda_,
    "assignment_expression": Tracer.assignment,
    "update_expression": Tracer.update,
    "type_descriptor": Tracer.type_of,
    "dependent_type": Tracer.type_of,
    "primitive_type": Tracer.type_of,
    "sized_type_specifier": Tracer.type_of,
    "decltype": Tracer.type_of,
}
