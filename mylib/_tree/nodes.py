"""The nodes of a tree, one level at a time."""

from typing import Any

import jax.tree_util as jtu


def children_of(node: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """The children of a node with their keys, and its structure; a leaf has no children."""
    children, treedef = jtu.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    return [(path[0], child) for path, child in children if path], treedef
