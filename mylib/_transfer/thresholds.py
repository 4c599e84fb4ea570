"""From what size on one way of moving an array is quicker than another, in bytes.

Measured on CPU (`benchmarks/placement.py`, docs/benchmarks.md), but for `WORTH_COMPILING`, which is
an estimate: no accelerator has been measured.
"""

# A buffer that starts on such a boundary is taken over by XLA's CPU client without a second copy.
ALIGNMENT = 64
# Below this, XLA takes longer over memory that is not on such a boundary than a copy onto one does.
WORTH_SHARING = 32 * 1024
# Below this, arrays on accelerators go through the host, where no shape compiles anything.
WORTH_COMPILING = 1024 * 1024
# Above this, CPU devices that have a whole copy each cut their shards out of it by a program.
WORTH_CUTTING = 16 * 1024 * 1024
