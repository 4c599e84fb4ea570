"""Products of an optimiser of whole matrices: Muon, SOAP, Shampoo, without `mylib.by_matrix`."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from .._products import products_of_equation
from .._programs import products_of_optimisers
from .trace import SMALL


class MatrixProduct(NamedTuple):
    """With FSDP each device computes its rows of the product, and needs the whole second factor,
    of `nbytes`: XLA gathers it, for each product. All `times` together they are `flops`.
    """

    nbytes: int
    times: int
    flops: float
    dtype: str


def matrix_products(program: Any) -> Iterator[MatrixProduct]:
    """The large products in the optimisers of a step."""
    for eqn, times, _ in products_of_optimisers(program):
        factor = eqn.invars[1].aval
        if factor.size >= SMALL:
            flops, nbytes = (
                2.0 * times * products_of_equation(eqn),
                factor.size * factor.dtype.itemsize,
            )
            yield MatrixProduct(nbytes, times, flops, str(factor.dtype))
