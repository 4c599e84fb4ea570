"""Products of an optimiser of whole matrices: Muon, SOAP, Shampoo, without `mylib.by_matrix`."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._compat import names, opened
from .._products import products_of_equation
from .._programs import jaxprs_in, optimiser_of
from .trace import SMALL


class MatrixProduct(NamedTuple):
    """With FSDP each device computes its rows of the product, and needs the whole second factor,
    of `nbytes`: XLA gathers it, for each product. All `times` together they are `flops`.
    """

    nbytes: int
    times: int
    flops: float
    dtype: str


def matrix_products(
    program: Any, times: int = 1, is_of_optimiser: bool = False
) -> Iterator[MatrixProduct]:
    """The products in the optimisers of a step. In a loop JAX doesn't know which function has
    called it, so the equation of the loop says whether it is of an optimiser.
    """
    for eqn in opened(program).eqns:
        name, inner = eqn.primitive.name, jaxprs_in(eqn)
        if name != names.DOT and (not inner or name in names.KERNELS):
            continue
        is_here = is_of_optimiser or bool(optimiser_of(eqn))
        if name == names.DOT:
            factor = eqn.invars[1].aval
            if is_here and math.prod(factor.shape) >= SMALL:
                flops, dtype = 2.0 * times * products_of_equation(eqn), factor.dtype
                yield MatrixProduct(factor.size * dtype.itemsize, times, flops, str(dtype))
        else:
            turns = eqn.params[names.PARAM_LENGTH] if name == names.SCAN else 1
            for x in inner:
                yield from matrix_products(x, times * turns, is_here)
