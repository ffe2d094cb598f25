"""What a module's forward does, read off its source.

Projections may be computed together only if they always run on the same x, and a gated MLP may be
replaced only if its forward is exactly ``down(act(gate(x)) * up(x))``. Names say neither, so the
syntax tree of the class's ``forward`` is asked. Source that is not there, or that reads otherwise,
means "do not group".
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

Answer = TypeVar("Answer")


def _remembered(ask: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Cache by the class and its present ``forward``, which may be replaced at any time."""
    answers: dict[tuple[type, Any], Answer] = {}

    @functools.wraps(ask)
    def remembered(cls: type) -> Answer:
        key = cls, getattr(cls, "forward", None)
        if key not in answers:
            answers[key] = ask(cls)
        return answers[key]

    return remembered


class GatedMLP(NamedTuple):
    """Attribute names in ``self.down(self.activation(self.gate(x)) * self.up(x))``."""

    gate: str
    up: str
    down: str
    activation: str


def _parse(thing: object) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(thing))).body[0]  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None


def _forward(cls: type) -> ast.FunctionDef | None:
    tree = _parse(inspect.unwrap(cls.forward)) if hasattr(cls, "forward") else None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _self_attribute(node: ast.AST) -> str | None:
    """``name`` where the node is ``self.name``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else None
    return None


def _call_on_one(node: ast.AST) -> tuple[str, ast.expr] | None:
    """``(name, argument)`` where the node is ``self.name(argument)``."""
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        name = _self_attribute(node.func)
        if name is not None and not isinstance(node.args[0], ast.Starred):
            return name, node.args[0]
    return None


@_remembered
def shared_inputs(cls: type) -> tuple[tuple[str, ...], ...]:
    """Groups of attributes that ``cls.forward`` calls on one and the same local variable.

    All calls of a group stand in one block of statements, so that one runs if the others do, and
    nothing assigns to the variable between them.
    """
    forward = _forward(cls)
    groups: list[tuple[str, ...]] = []
    if forward is not None:
        _walk_block(forward.body, groups)
    return tuple(groups)


def _walk_block(block: list[ast.stmt], groups: list[tuple[str, ...]]) -> None:
    open_groups: dict[str, list[str]] = {}

    def close(variable: str) -> None:
        names = open_groups.pop(variable, [])
        if len(names) > 1:
            groups.append(tuple(names))

    for statement in block:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        inner = _inner_blocks(statement)
        if not inner:
            for name, variable in _calls(statement):
                names = open_groups.setdefault(variable, [])
                if name not in names:
                    names.append(name)
        for nested in inner:
            _walk_block(nested, groups)
        leaves = any(isinstance(n, ast.Return | ast.Raise) for n in ast.walk(statement))
        for variable in list(open_groups) if inner and leaves else _stored(statement):
            close(variable)
    for variable in list(open_groups):
        close(variable)


def _inner_blocks(statement: ast.stmt) -> list[list[ast.stmt]]:
    blocks = [getattr(statement, field, None) or [] for field in ("body", "orelse", "finalbody")]
    blocks += [handler.body for handler in getattr(statement, "handlers", [])]
    blocks += [case.body for case in getattr(statement, "cases", [])]
    return [block for block in blocks if block]


def _calls(node: ast.AST) -> list[tuple[str, str]]:
    """``(name, variable)`` for every ``self.name(variable)`` that the node surely evaluates."""
    found: list[tuple[str, str]] = []
    conditional = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension, ast.NamedExpr)
    if isinstance(node, conditional) or hasattr(node, "generators"):
        return found
    call = _call_on_one(node)
    if call is not None and isinstance(call[1], ast.Name):
        found.append((call[0], call[1].id))
    for child in ast.iter_child_nodes(node):
        found += _calls(child)
    return found


def _stored(statement: ast.stmt) -> set[str]:
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del)
    }


@_remembered
def gated_mlp(cls: type) -> GatedMLP | None:
    """The names in ``cls.forward`` if it is a gated MLP of its one argument and nothing else."""
    forward = _forward(cls)
    if forward is None or [a.arg for a in forward.args.args[:1]] != ["self"]:
        return None
    arguments = forward.args
    if len(arguments.args) != 2 or arguments.kwonlyargs or arguments.vararg or arguments.kwarg:
        return None
    x = arguments.args[1].arg
    calls = sum(isinstance(node, ast.Call) for part in forward.body for node in ast.walk(part))
    result = _inlined_result(forward, x)
    down = _call_on_one(result) if result is not None else None
    if down is None or not isinstance(down[1], ast.BinOp) or not isinstance(down[1].op, ast.Mult):
        return None
    for gated, linear in ((down[1].left, down[1].right), (down[1].right, down[1].left)):
        activation, up = _call_on_one(gated), _call_on_one(linear)
        gate = _call_on_one(activation[1]) if activation is not None else None
        if activation is None or up is None or gate is None:
            continue
        if all(isinstance(e, ast.Name) and e.id == x for e in (gate[1], up[1])):
            names = GatedMLP(gate[0], up[0], down[0], activation[0])
            return names if len(set(names)) == 4 and calls == 4 else None
    return None


def _inlined_result(forward: ast.FunctionDef, x: str) -> ast.expr | None:
    """The returned expression with local variables put in, of a body without branches."""
    values: dict[str, ast.expr] = {}

    class Inline(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return values.get(node.id, node)

    for statement in forward.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # the docstring
        if isinstance(statement, ast.Return) and statement.value is not None:
            return Inline().visit(statement.value)
        if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
            return None
        target = statement.targets[0]
        if not isinstance(target, ast.Name) or target.id in values or target.id == x:
            return None
        values[target.id] = Inline().visit(statement.value)
    return None


@_remembered
def embedding_is_scaled(cls: type) -> bool:
    """Whether ``cls.forward`` is ``super().forward(ids) * self.embed_scale``, cast or not."""
    forward = _forward(cls)
    if forward is None or len(forward.args.args) != 2:
        return False
    result = _inlined_result(forward, forward.args.args[1].arg)
    if not isinstance(result, ast.BinOp) or not isinstance(result.op, ast.Mult):
        return False
    looked_up = f"super().forward({forward.args.args[1].arg})"
    scales = ("self.embed_scale", "self.embed_scale.to(self.weight.dtype)")
    return ast.unparse(result.left) == looked_up and ast.unparse(result.right) in scales


@_remembered
def reads_weight_only(cls: type) -> frozenset[str]:
    """Attributes that ``cls.forward`` knows by their ``.weight`` (or ``.bias``) alone.

    An adapter on such a layer would never be trained: nothing calls it. Any other use of the
    attribute in the class (a call, passing it on, even ``.weight.dtype``) takes it off the list.
    """
    forward = _forward(cls)
    if forward is None:
        return frozenset()
    sources = [_parse(base) for base in cls.__mro__ if base.__module__ != "torch.nn.modules.module"]
    read = _uses(forward)[0]
    for source in sources:
        if source is not None:
            read -= _uses(source)[1]
    return frozenset(read)


def _uses(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names used as ``self.name.weight`` for its values, and names used in any other way."""
    reads, others = set(), set()
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        name = _self_attribute(node)
        if name is None or not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Store):
            continue
        up = parents.get(node)
        if isinstance(up, ast.Attribute) and up.attr in ("weight", "bias"):
            if isinstance(up.ctx, ast.Load) and not isinstance(parents.get(up), ast.Attribute):
                reads.add(name)
            continue
        others.add(name)
    return reads, others
