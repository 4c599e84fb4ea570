"""Signatures and annotations, in which names may be undefined: since Python 3.14 annotations are
evaluated when they are read, and one that was imported for type checkers only raises there.
"""

import inspect
import sys
from collections.abc import Mapping
from typing import Any


def annotations_of(obj: Any) -> Mapping[str, Any]:
    """The annotations of a class itself, or of a function."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return annotationlib.get_annotations(obj, format=annotationlib.Format.FORWARDREF)
    return inspect.get_annotations(obj)


def signature_of(fun: Any) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(fun, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(fun)
