"""Names of JAX and Equinox that are strings: no error shows when they change.

`tests/test_compat_names.py` makes a real program for each of them, on both supported versions of
JAX, and says what to do when one disappears. No other module of mylib compares the name of a
primitive with a literal, or reads a parameter by one.
"""

# --- primitives: `eqn.primitive.name` -------------------------------------------------------------

# Control flow.
COND = "cond"
SCAN = "scan"
WHILE = "while"

# Calls. The types of their results come from their jaxpr.
CLOSED_CALL = "closed_call"
CUSTOM_JVP_CALL = "custom_jvp_call"
CUSTOM_VJP_CALL = "custom_vjp_call"
CUSTOM_VMAP_CALL = "custom_vmap_call"
EVAL_JAXPR = "eval_jaxpr"
# An operation that has the types of its results among its parameters.
HI_CALL = "call_hi_primitive"
JIT = "jit"
REMAT = "remat2"
SHARD_MAP = "shard_map"
# Calls of one jaxpr that do nothing else: their operands are its arguments, the last ones if it has
# fewer, and their results its results.
CALLS = frozenset({JIT, CLOSED_CALL, EVAL_JAXPR, CUSTOM_JVP_CALL, CUSTOM_VJP_CALL})
# Calls that mylib doesn't handle specially. Their types are right, too.
OTHER_CALLS = frozenset(
    {
        "composite", "compute_on", "custom_linear_solve", "linear_call", "program_order",
        "remat_opt", "run_state", "xla_metadata_call",
    }
)  # fmt: skip

SCATTER_ADD = "scatter-add"
SCATTERS = frozenset(
    {"scatter", SCATTER_ADD, "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"}
)
# Operations with a jaxpr for pairs of numbers. They have the types of ordinary operations.
ELEMENTWISE = SCATTERS | {"reduce", "reduce_window", "select_and_scatter"}

# All equations whose jaxprs have reliable types.
KNOWN_CALLS = CALLS | OTHER_CALLS | ELEMENTWISE | {
    COND, CUSTOM_VMAP_CALL, REMAT, SCAN, SHARD_MAP, WHILE,
}  # fmt: skip

# Kernels: they run on one device, with values of their own.
KERNELS = frozenset({"core_map", "mpmd_map", "pallas_call"})

# Calls of functions of Python.
CALLBACKS = frozenset({"buffer_callback", "io_callback", "pure_callback"})

# Calls without a jaxpr, which can't be analysed.
OPAQUE_CALLS = CALLBACKS | {"call_exported", "ffi_call", "mosaic_gpu_p", "tpu_custom_call"}

# Only in shard_map. They name mesh axes without communicating.
AXIS_INDEX = "axis_index"
PVARY = "pvary"
# The sums over devices in JAX's types.
PSUM = "psum_invariant"
REDUCE_SCATTER = "reduce_scatter"

# Primitives that a user calls to communicate, without those that only start or await it.
COLLECTIVES = frozenset(
    {
        PSUM, REDUCE_SCATTER, "all_gather", "all_gather_invariant", "all_gather_reduced",
        "all_to_all", "pbroadcast", "pmax", "pmin", "ppermute", "precv", "psend", "psum",
        "ragged_all_to_all", "unreduced_psum", "unreduced_reduce_scatter",
    }
)  # fmt: skip

# Single operations that an analysis treats specially.
BARRIER = "optimization_barrier"
CHECKPOINT_NAME = "name"
CONSTRAINT = "sharding_constraint"
CONVERT = "convert_element_type"
DEVICE_PUT = "device_put"
DIV = "div"
DOT = "dot_general"
CONVOLUTION = "conv_general_dilated"
RAGGED_DOT = "ragged_dot_general"
# `jax.nn.dot_product_attention(..., implementation="cudnn")`.
CUDNN_BACKWARD = "dot_product_attention_bwd_wrapper"
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"
PALLAS = "pallas_call"
MUL = "mul"
REDUCE_SUM = "reduce_sum"
RESHARD = "reshard"
SELECT = "select_n"
SLICE = "slice"
STOP_GRADIENT = "stop_gradient"

# Sums of products, whose result may be of a wider dtype than their operands.
PRODUCTS = frozenset({CONVOLUTION, DOT, RAGGED_DOT})

# Decompositions of matrices, and solving with them.
FACTORS = frozenset({"cholesky", "eigh", "lu", "qr", "svd", "triangular_solve"})

REARRANGES = frozenset(
    {"broadcast_in_dim", "copy", "reshape", "rev", "split", "squeeze", "transpose"}
)
# Operations that only rearrange their first operand. The others, if any, are indices.
VIEWS = REARRANGES | {CONSTRAINT, RESHARD, SLICE, "dynamic_slice"}

# Operations of one array that turn a gradient into a gradient (`per_device/summed_twice.py`).
LINEAR_IN_ONE = REARRANGES | {
    CHECKPOINT_NAME, CONSTRAINT, CONVERT, RESHARD, SLICE, "neg", "reduce_precision",
}  # fmt: skip
# The same for several arrays, all of which must be gradients or constants.
LINEAR_IN_ALL = frozenset({"add", "add_any", "clamp", "concatenate", "max", "min", "pad", "sub"})

# Operations that only move or rearrange their operand: `recompute_resharded` does not save their
# results.
ONLY_MOVED = REARRANGES | {
    BARRIER, CONSTRAINT, PVARY, STOP_GRADIENT, "all_gather", "all_gather_done",
    "all_gather_invariant", "all_gather_reduced", "all_gather_reduced_start", "all_gather_start",
    "concatenate", "layout_constraint", "pad", "preduced", "reduced_vary_cast",
    "reduced_vary_cast_p", "relayout", "stack", "tile", "unstack",
}  # fmt: skip

# Primitives that hold, place or move an array, and don't show how it is used.
STRUCTURE = CALLS | (REARRANGES - {"rev", "split"}) | {
    BARRIER, CONSTRAINT, CONVERT, DEVICE_PUT, PVARY, REMAT, RESHARD, SCAN, SHARD_MAP, SLICE, WHILE,
    "dynamic_slice", "dynamic_update_slice",
}  # fmt: skip

# Draw random numbers, or make keys.
RANDOM = frozenset({"random_bits", "random_fold_in", "random_seed", "random_split", "threefry2x32"})

# --- how operations relate dimensions (`_plan`) ---------------------------------------------------

# Each number of a result is computed from the numbers at its own place.
BY_ELEMENT = frozenset(
    {
        BARRIER, CHECKPOINT_NAME, CONSTRAINT, CONVERT, DEVICE_PUT, DIV, MUL, RESHARD, SELECT,
        STOP_GRADIENT, "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan",
        "atan2", "atanh", "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil",
        "clamp", "complex", "conj", "copy", "cos", "cosh", "digamma", "eq", "erf", "erf_inv",
        "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite",
        "le", "lgamma", "log", "log1p", "logistic", "lt", "lt_to", "max", "min", "ne", "neg",
        "nextafter", "not", "one_minus_square", "or", "population_count", "pow", "real",
        "reduce_precision", "rem", "round", "rsqrt", "shift_left", "shift_right_arithmetic",
        "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
    }
)  # fmt: skip
# They add up all that is along the dimensions of a parameter "axes".
SUMS = frozenset({REDUCE_SUM, "psum"})
# Their results have an array's dimensions without those of the parameter "axes". Collectives, also
# of several arrays, are among them if all axes are dimensions: what `jax.vmap` makes of them.
REDUCTIONS = SUMS | {
    "argmax", "argmin", "pmax", "pmin", "reduce_and", "reduce_max", "reduce_min", "reduce_or",
    "reduce_prod",
}  # fmt: skip
# They run along the dimensions of a parameter "axis", "dimension" or "dimensions".
ALONG = frozenset(
    {
        "cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum", "rev", "sort", "squeeze", "stack",
        "top_k", "unstack",
    }
)  # fmt: skip
# Dimensions that keep their size stay as they are; of the others a part is read or written.
PAD = "pad"
WINDOWS = frozenset(
    {
        "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum",
        "select_and_gather_add", "select_and_scatter_add",
    }
)  # fmt: skip
CUTS = WINDOWS | {
    PAD, SLICE, "concatenate", "dynamic_slice", "dynamic_update_slice", "split", "tile",
}  # fmt: skip
# A result's numbers depend on where they are, for random numbers in all dimensions.
NUMBERED = frozenset({"iota", "random_bits", "random_gamma", "random_split"})
ADDS = frozenset({"add", "add_any", "sub"})
BROADCAST = "broadcast_in_dim"
GATHER = "gather"
RESHAPE = "reshape"
TRANSPOSE = "transpose"
# Made of nothing, or of keys.
MADE = RANDOM | {
    "empty", "empty2", "iota", "platform_index", "random_gamma", "random_unwrap", "random_wrap",
}  # fmt: skip
# Their results are in memory, because compilers fuse them with nothing that follows.
SOLID = SCATTERS | {
    COND, CONSTRAINT, CONVOLUTION, CUDNN_BACKWARD, CUDNN_FORWARD, DOT, GATHER, RAGGED_DOT, SCAN,
    SHARD_MAP, WHILE, "concatenate", "cumsum", "dynamic_update_slice", "reduce_window_max", "sort",
    "top_k",
}  # fmt: skip
# They add up numbers of their first operand, or products of them: a scatter also of its third.
ADDED_UP = PRODUCTS | {
    REDUCE_SUM, SCATTER_ADD, "cumsum", "reduce_window_sum", "scatter-sub", "select_and_scatter_add",
}  # fmt: skip
# They round nothing.
EXACT = VIEWS | ONLY_MOVED | MADE | {
    CHECKPOINT_NAME, DEVICE_PUT, GATHER, SELECT, "abs", "argmax", "argmin", "bitcast_convert_type",
    "ceil", "clamp", "complex", "conj", "cummax", "cummin", "dynamic_update_slice", "floor", "imag",
    "is_finite", "max", "min", "neg", "nextafter", "real", "reduce_max", "reduce_min",
    "reduce_window_max", "reduce_window_min", "round", "scatter", "scatter-max", "scatter-min",
    "select_and_gather_add", "sign", "sort", "top_k",
}  # fmt: skip
# Their result is their operand.
ALIASES = frozenset({BARRIER, CHECKPOINT_NAME, "reshape", "squeeze", "transpose"})
# Their result has the numbers of the first operand, if it has as many.
SAME_NUMBERS = (ALIASES - {BARRIER}) | SUMS | {
    BROADCAST, CONSTRAINT, DEVICE_PUT, RESHARD, "copy", "reduce_precision",
}  # fmt: skip
# Their result needs no memory.
FILLED = frozenset({"broadcast_in_dim", "empty", "empty2", "iota"})
# They only show something, or return one number for all that `vmap` has made of one, in Equinox.
SHOWS = frozenset({"debug_callback", "debug_print", "unvmap_all", "unvmap_any", "unvmap_max"})

# --- kernels of JAX, by their names ---------------------------------------------------------------

# Of `jax.experimental.pallas.ops.tpu.splash_attention`.
KERNEL_SPLASH = r"splash_m[hq]a_(?P<of>fwd|dkv|dq)(?P<segments>_segmented)?_(no_)?residuals"

# --- parameters: `eqn.params[...]` ----------------------------------------------------------------

# Mesh axes, or dimensions.
PARAM_AXES = "axes"
PARAM_AXIS_NAME = "axis_name"
PARAM_AXIS = "axis"
PARAM_BROADCAST_DIMENSIONS = "broadcast_dimensions"
PARAM_DIMENSION = "dimension"
PARAM_DIMENSIONS = "dimensions"
PARAM_DIMENSION_NUMBERS = "dimension_numbers"
PARAM_BATCH_GROUPS = "batch_group_count"
PARAM_FEATURE_GROUPS = "feature_group_count"
PARAM_PERMUTATION = "permutation"
PARAM_RAGGED = "ragged_dot_dimension_numbers"
PARAM_SLICE_SIZES = "slice_sizes"
# Jaxprs.
PARAM_BODY_JAXPR = "body_jaxpr"
PARAM_COND_JAXPR = "cond_jaxpr"
PARAM_JAXPR = "jaxpr"
# The split of a loop's arguments.
PARAM_BODY_NCONSTS = "body_nconsts"
PARAM_COND_NCONSTS = "cond_nconsts"
PARAM_FT_IN = "ft_in"
PARAM_NUM_CARRY = "num_carry"
PARAM_NUM_CONSTS = "num_consts"
PARAM_LAYOUT = "layout"
PARAM_LENGTH = "length"
# What a Pallas kernel says that it computes.
PARAM_COST = "cost_estimate"
PARAM_REVERSE = "reverse"
PARAM_UNROLL = "unroll"
# The options of a nested `jit`.
PARAM_IN_SHARDINGS = "in_shardings"
PARAM_INLINE = "inline"
PARAM_NAME = "name"
PARAM_OUT_LAYOUTS = "out_layouts"
PARAM_OUT_SHARDINGS = "out_shardings"
# The options of a nested `shard_map`.
PARAM_CHECK_VMA = "check_vma"
PARAM_IN_SPECS = "in_specs"
PARAM_MANUAL_AXES = "newly_manual_axes"
PARAM_MESH = "mesh"
PARAM_OUT_SPECS = "out_specs"
# The parameters and results of the rules of custom derivatives.
PARAM_OUT_TREES = "out_trees"
PARAM_SYMBOLIC_ZEROS = "symbolic_zeros"
# Parameters of a checkpoint inside a program.
PARAM_DIFFERENTIATED = "differentiated"
PARAM_POLICY = "policy"
PARAM_PREVENT_CSE = "prevent_cse"
# Parameters of single operations.
PARAM_DEVICES = "devices"
PARAM_DST_SHARDING = "dst_sharding"
PARAM_LHS_DILATION = "lhs_dilation"
PARAM_LIMITS = "limit_indices"
PARAM_NEW_DTYPE = "new_dtype"
PARAM_OUT_SHARDING = "out_sharding"
PARAM_PADDING = "padding"
PARAM_PADDING_CONFIG = "padding_config"
PARAM_WINDOW = "window_dimensions"
PARAM_PREFERRED = "preferred_element_type"
PARAM_RHS_DILATION = "rhs_dilation"
PARAM_SHARDING = "sharding"
PARAM_STARTS = "start_indices"
PARAM_STRIDES = "window_strides"

# --- arguments of the functions of `jax.lax`, as their frames on the stack name them --------------

ARGUMENT_AXIS_NAME = "axis_name"

# --- transformations, by their entries in an equation's stack of names ----------------------------

STACK_JVP = "jvp"
STACK_RECOMPUTED = "rematted_computation"
STACK_TRANSPOSE = "transpose"
STACK_VMAP = "vmap"

# --- what JAX writes between the scopes of an instruction's name ----------------------------------

SCOPE_BODY = "body"
SCOPE_BRANCH = "branch_"
SCOPE_CHECKPOINT = "checkpoint"
SCOPE_CONDITION = "cond"

# --- parts of texts of errors and warnings --------------------------------------------------------

# A donated array is passed again.
TEXT_DELETED = "deleted"
# The start of JAX's warning, which names no array.
TEXT_NOT_DONATED = "Some donated buffers were not usable"
# A PartitionSpec without a mesh.
TEXT_NO_MESH = "jax.set_mesh"
# A function inside shard_map captures an array on another mesh.
TEXT_OTHER_MESH = "should match the mesh of sharding"
# The type of an operand is on another mesh than the one in force.
TEXT_VALUE_OF_OTHER_MESH = "should match the aval mesh"
# One on Explicit axes.
TEXT_CLOSING_OVER = "Closing over inputs to shard_map"
# An argument is on other devices than the mesh in force, and an operand on a mesh of another size.
TEXT_CONTEXT_MESH = "context mesh"
TEXT_SIZE_OF_MESH = "cannot change the size of the mesh"
# Two trees don't match, because of the classes of two nodes.
TEXT_OTHER_TYPE = "different type"
# A Python callback in a program has raised, on CPUs.
TEXT_CALLBACK = "CpuCallback"
# The error of Equinox's callback.
TEXT_EQUINOX_ERROR = "_EquinoxRuntimeError"
# Statuses of the coordination service.
TEXT_ALREADY_EXISTS = "ALREADY_EXISTS"
TEXT_DEADLINE = "DEADLINE_EXCEEDED"
TEXT_NOT_FOUND = "NOT_FOUND"

# --- events ---------------------------------------------------------------------------------------

# This thread has compiled a program.
EVENT_COMPILED = "/jax/core/compile/backend_compile_duration"

# --- files and functions of JAX on the stack ------------------------------------------------------

# Functions of JAX that trace a function, lower a program, and compile one.
FRAMES_TRACING = frozenset(
    {
        ("partial_eval.py", "trace_to_jaxpr"), ("partial_eval.py", "trace_to_jaxpr_dynamic"),
        ("partial_eval.py", "trace_to_jaxpr_nocache"),
    }
)  # fmt: skip
FRAMES_COMPILING = frozenset(
    {("compiler.py", "compile_or_get_cached"), ("mlir.py", "lower_jaxpr_to_module")}
)
# Functions of JAX that call Python from a running program.
FRAMES_CALLBACK = frozenset(
    {("callback.py", "pure_callback_impl"), ("callback.py", "io_callback_impl")}
)

# --- serialised executables: what may be made of the pickle ---------------------------------------

PICKLED_PARTS = {
    "jax": "P",
    "jax._src.core": "ManualAxisType MemorySpace ShapedArray",
    "jax._src.interpreters.pxla": "AllArgsInfo UnloadedMeshExecutable",
    "jax._src.layout": "AutoLayoutSingleton Format Layout",
    "jax._src.linear_util": "DebugInfo",
    "jax._src.mesh": "AbstractDevice AbstractMesh AxisType Mesh",
    "jax._src.named_sharding": "_unpickle_named_sharding",
    "jax._src.random.prng": "KeyTy PRNGImpl",
    "jax._src.random.rbg": """
        _rbg_fold_in _rbg_random_bits _rbg_seed _rbg_split _unsafe_rbg_fold_in _unsafe_rbg_split
    """,
    "jax._src.random.threefry2x32": """
        threefry_fold_in threefry_random_bits threefry_seed threefry_split
    """,
    "jax._src.sharding_impls": "_unpickle_gspmd_sharding _unpickle_single_device_sharding",
    "jax._src.stages": "ArgInfo",
    "jaxlib._jax": "DeviceList",
    "ml_dtypes": """
        bfloat16 float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn
        float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu int2 int4 uint2 uint4
    """,
    "numpy": "dtype ndarray",
    "numpy._core.multiarray": "_reconstruct",
}
PICKLED_NAMES = frozenset(
    f"{module}.{name}" for module, all in PICKLED_PARTS.items() for name in all.split()
)

# --- the profiler: planes, lines and statistics of `jax.profiler.ProfileData` ---------------------

PROFILE_HOST_PLANE = "/host:CPU"
PROFILE_DEVICE_PLANE = r"/device:(?P<kind>GPU|TPU):(?P<number>\d+)"
# The line with calls of Python.
PROFILE_PYTHON_LINE = "python"
# The statistics of an operation.
PROFILE_HLO_OP, PROFILE_HLO_MODULE, PROFILE_PROGRAM_ID = "hlo_op", "hlo_module", "program_id"
PROFILE_RUN_ID, PROFILE_DEVICE_ORDINAL = "run_id", "device_ordinal"
# An operation on a CPU ends in an event with this name, that has the operation's number.
PROFILE_END_OF_EVENT, PROFILE_PRODUCER, PROFILE_CONSUMER = "end: ", "_p", "_c"
# Of GPUs: tests/measured has traces of them.
PROFILE_STREAM_LINE, PROFILE_COMMAND_BUFFER = "Stream", "command_buffer"
PROFILE_COPIES = "Memcpy", "Memset"
