"""The sizes in bytes from which one way of moving an array is faster than another.

Measured on CPU (`benchmarks/placement.py`, benchmarks/results/placement.md), except
`WORTH_COMPILING`, which is an estimate: no accelerator has been measured.
"""

# XLA's CPU client uses a buffer with this alignment without a copy.
ALIGNMENT = 64
# Below this, XLA is slower with unaligned memory than a copy to aligned memory.
WORTH_SHARING = 32 * 1024
# Below this, arrays on accelerators go through the host, where nothing is compiled.
WORTH_COMPILING = 1024 * 1024
# Above this, CPU devices with a whole copy each run a program to cut out their shards.
WORTH_CUTTING = 16 * 1024 * 1024
