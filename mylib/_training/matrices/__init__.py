"""`by_matrix`: optimisers that need whole matrices, at the price of two all-to-alls."""

from .balance import loads_of as loads_of
from .by_matrix import by_matrix as by_matrix
from .state import MatrixState as MatrixState, from_plain as from_plain, to_plain as to_plain
