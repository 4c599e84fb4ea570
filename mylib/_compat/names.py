"""Names of JAX and Equinox that are strings: Python does not notice when they change.

`tests/test_compat_names.py` makes a real program for each of them, on both supported versions of
JAX, and says what to do when one is gone. No other module of mylib compares the name of a primitive
with a literal, or reads a parameter by one.
"""

# --- primitives: `eqn.primitive.name` -------------------------------------------------------------

# Control flow.
COND = "cond"
SCAN = "scan"
WHILE = "while"

# Calls. JAX takes the types of what they return from the program that they hold.
CLOSED_CALL = "closed_call"
CUSTOM_JVP_CALL = "custom_jvp_call"
CUSTOM_VJP_CALL = "custom_vjp_call"
CUSTOM_VMAP_CALL = "custom_vmap_call"
EVAL_JAXPR = "eval_jaxpr"
JIT = "jit"
REMAT = "remat2"
SHARD_MAP = "shard_map"
# Calls that nothing here looks at closely, but which have right types as well.
OTHER_CALLS = frozenset(
    {
        "composite",
        "compute_on",
        "custom_linear_solve",
        "linear_call",
        "program_order",
        "remat_opt",
        "run_state",
        "xla_metadata_call",
    }
)

# Operations that hold a program for pairs of numbers. Their types are those of any operation.
ELEMENTWISE = frozenset(
    {
        "reduce",
        "reduce_window",
        "scatter",
        "scatter-add",
        "scatter-max",
        "scatter-min",
        "scatter-mul",
        "scatter-sub",
        "select_and_scatter",
    }
)

# Every equation whose programs may be taken at their word.
KNOWN_CALLS = (
    frozenset(
        {
            COND,
            SCAN,
            WHILE,
            CLOSED_CALL,
            CUSTOM_JVP_CALL,
            CUSTOM_VJP_CALL,
            CUSTOM_VMAP_CALL,
            EVAL_JAXPR,
            JIT,
            REMAT,
            SHARD_MAP,
        }
    )
    | OTHER_CALLS
    | ELEMENTWISE
)

# Kernels: what is inside runs on one device, on values that are none of the program around it.
KERNELS = frozenset({"core_map", "mpmd_map", "pallas_call"})

# Calls of something that is no jaxpr. JAX can't look into them.
OPAQUE_CALLS = frozenset(
    {
        "buffer_callback",
        "call_exported",
        "ffi_call",
        "io_callback",
        "mosaic_gpu_p",
        "pure_callback",
        "tpu_custom_call",
    }
)

# What only shard_map has. These name mesh axes without sending anything along them.
AXIS_INDEX = "axis_index"
PVARY = "pvary"
# The sums over devices that JAX's types know.
PSUM = "psum_invariant"
REDUCE_SCATTER = "reduce_scatter"

# Single operations that an analysis has to tell from others.
BARRIER = "optimization_barrier"
CHECKPOINT_NAME = "name"
CONVERT = "convert_element_type"
DEVICE_PUT = "device_put"
DIV = "div"
MUL = "mul"
REDUCE_SUM = "reduce_sum"
RESHARD = "reshard"
SELECT = "select_n"
SLICE = "slice"
STOP_GRADIENT = "stop_gradient"

# Sums of products, whose result may be of a wider dtype than their operands.
PRODUCTS = frozenset({"conv_general_dilated", "dot_general", "ragged_dot_general"})

# Operations of one array that make a gradient of a gradient (`_per_device/sums.py`).
LINEAR_IN_ONE = frozenset(
    {
        CHECKPOINT_NAME,
        CONVERT,
        RESHARD,
        SLICE,
        "broadcast_in_dim",
        "copy",
        "neg",
        "reduce_precision",
        "reshape",
        "rev",
        "sharding_constraint",
        "split",
        "squeeze",
        "transpose",
    }
)
# Operations of several arrays, all of which have to be gradients, or constants.
LINEAR_IN_ALL = frozenset({"add", "add_any", "clamp", "concatenate", "max", "min", "pad", "sub"})

# Operations that return what they were given, elsewhere or in another form: `recompute_resharded`
# does not save their results.
ONLY_MOVED = frozenset(
    {
        BARRIER,
        PVARY,
        STOP_GRADIENT,
        "all_gather",
        "all_gather_done",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_gather_reduced_start",
        "all_gather_start",
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "layout_constraint",
        "pad",
        "preduced",
        "reduced_vary_cast",
        "reduced_vary_cast_p",
        "relayout",
        "reshape",
        "rev",
        "sharding_constraint",
        "split",
        "squeeze",
        "stack",
        "tile",
        "transpose",
        "unstack",
    }
)

# --- parameters: `eqn.params[...]` ----------------------------------------------------------------

# Over which mesh axes, or dimensions.
PARAM_AXES = "axes"
PARAM_AXIS_NAME = "axis_name"
# Programs.
PARAM_BODY_JAXPR = "body_jaxpr"
PARAM_BRANCHES = "branches"
PARAM_CALL = "call"
PARAM_CALL_JAXPR = "call_jaxpr"
PARAM_COND_JAXPR = "cond_jaxpr"
PARAM_JAXPR = "jaxpr"
# How the arguments of a loop are divided.
PARAM_BODY_NCONSTS = "body_nconsts"
PARAM_COND_NCONSTS = "cond_nconsts"
PARAM_FT_IN = "ft_in"
PARAM_NUM_CARRY = "num_carry"
PARAM_NUM_CONSTS = "num_consts"
PARAM_LENGTH = "length"
PARAM_REVERSE = "reverse"
PARAM_UNROLL = "unroll"
# How a `jit` inside of a program was made.
PARAM_COMPILER_OPTIONS = "compiler_options_kvs"
PARAM_DONATED = "donated_invars"
PARAM_IN_LAYOUTS = "in_layouts"
PARAM_IN_SHARDINGS = "in_shardings"
PARAM_INLINE = "inline"
PARAM_KEEP_UNUSED = "keep_unused"
PARAM_NAME = "name"
PARAM_OUT_LAYOUTS = "out_layouts"
PARAM_OUT_SHARDINGS = "out_shardings"
# How a `shard_map` inside of a program was made.
PARAM_CHECK_VMA = "check_vma"
PARAM_IN_SPECS = "in_specs"
PARAM_MANUAL_AXES = "newly_manual_axes"
PARAM_MESH = "mesh"
PARAM_OUT_SPECS = "out_specs"
# How a checkpoint inside of a program was made.
PARAM_POLICY = "policy"
PARAM_PREVENT_CSE = "prevent_cse"
# What a single operation does.
PARAM_DEVICES = "devices"
PARAM_DST_SHARDING = "dst_sharding"
PARAM_LIMITS = "limit_indices"
PARAM_NEW_DTYPE = "new_dtype"
PARAM_PREFERRED = "preferred_element_type"
PARAM_STARTS = "start_indices"

# --- transformations, by their entries in an equation's stack of names ----------------------------

STACK_JVP = "jvp"
STACK_RECOMPUTED = "rematted_computation"
STACK_TRANSPOSE = "transpose"

# --- parts of texts of errors and warnings --------------------------------------------------------

# A donated array is given again.
TEXT_DELETED = "deleted"
# Two donated arguments are one.
TEXT_DONATE = "donate"
# The beginning of the warning that names no array.
TEXT_NOT_DONATED = "Some donated buffers were not usable"
# A function inside of shard_map finds an array of another mesh.
TEXT_OTHER_MESH = "should match the mesh of sharding"
# What collectives on the CPU are made with fails to start.
TEXT_GLOO = "gloo"
# The error of Equinox's callback.
TEXT_EQUINOX_ERROR = "_EquinoxRuntimeError"
# Statuses of the coordination service.
TEXT_ALREADY_EXISTS = "ALREADY_EXISTS"
TEXT_DEADLINE = "DEADLINE_EXCEEDED"
TEXT_NOT_FOUND = "NOT_FOUND"

# --- events and loggers ---------------------------------------------------------------------------

# Something has been compiled in this thread.
EVENT_COMPILED = "/jax/core/compile/backend_compile_duration"
# Says every error that a callback raises.
LOGGER_CALLBACK = "jax._src.callback"
