"""Rewrites a template's syntax tree so that every operand whose size matters goes through the sandbox's budget."""

# ruff: noqa: N802, N815  (method names are Jinja's node names)
from __future__ import annotations

from typing import Any, TypeVar

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from edgellama.chat.limits import ADVICE, MAX_INT_BITS, exceeded
from edgellama.errors import TemplateError

MAX_TREE_DEPTH = 100
MAX_TREE_NODES = 20_000
"""About ten times what the longest published templates have; compiling takes about 30 microseconds a node."""
_Tree = TypeVar("_Tree", bound=nodes.Node)


def harden(tree: _Tree) -> _Tree:
    """Put a budgeted filter around every operand; raises `TemplateError` for what no chat template needs."""
    result: _Tree = _Harden().visit(tree)
    return result


def check_size(tree: nodes.Node) -> None:
    """Refuse a tree that would exhaust the time or stack of what walks it, without recursion."""
    level: list[nodes.Node] = [tree]
    count = 0
    for _ in range(MAX_TREE_DEPTH):
        if any(isinstance(node, nodes.If) and len(node.elif_) > MAX_TREE_DEPTH for node in level):
            raise exceeded("has a long chain of elif", f"{MAX_TREE_DEPTH}")  # nested, once it is Python
        level = [child for node in level for child in node.iter_child_nodes()]
        count += len(level)
        if count > MAX_TREE_NODES:
            raise exceeded("is too long", f"{MAX_TREE_NODES} pieces")
        if not level:
            return
    raise exceeded("is nested too deeply", f"{MAX_TREE_DEPTH} levels")


class _Harden(NodeTransformer):
    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _through(" each", node.iter)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _operand(" plain", node.expr)
        for compared in node.ops:
            compared.expr = _operand(" plain", compared.expr)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_operand(" text", child) for child in node.nodes]
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _operand(" plain", node.key)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _through(" made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        if isinstance(node.value, int) and node.value.bit_length() > MAX_INT_BITS:
            raise exceeded("contains a huge number", f"{MAX_INT_BITS} bits")
        return node

    def visit_Output(self, node: nodes.Output) -> Any:
        """Literal text is not finalized, so it is charged by a statement in front."""
        size = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.generic_visit(node)
        if not size:
            return node
        charge = _through(" data", nodes.Const(size, lineno=node.lineno))
        return [nodes.ExprStmt(charge, lineno=node.lineno), node]

    def _outside(self, node: nodes.Node) -> nodes.Node:
        raise TemplateError(f"the chat template wants to load another file (line {node.lineno})", ADVICE)

    visit_Include = visit_Import = visit_FromImport = visit_Extends = _outside


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _operand(name: str, node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _through(name, node)
