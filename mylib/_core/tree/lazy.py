"""Signatures and annotations, in which names may be undefined: since Python 3.14 annotations are
evaluated when they are read, and one that was imported for type checkers only raises there.
"""

import inspect
import sys
from functools import partial

if sys.version_info >= (3, 14):
    from annotationlib import Format, get_annotations

    annotations_of = partial(get_annotations, format=Format.FORWARDREF)
    signature_of = partial(inspect.signature, annotation_format=Format.FORWARDREF)
else:
    annotations_of, signature_of = inspect.get_annotations, inspect.signature
