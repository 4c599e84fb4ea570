"""`python -m mylib compile module:function --machine "h100 x 64"`, and `plan`."""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._core.status import StatusLine
from ._planning.plan import PlanError, plan
from ._programs.machines import WITHOUT_TRITON, CompilerError, Machine, OutOfMemoryError

_FUNCTION = """
module:function, a function that is called with a mylib.machines.Machine and returns a lowered
function: step.lower(...) of a step of mylib.filter_jit whose arrays are on a mesh of that machine
"""

_STEP = """
module:function, a function that is called with a mylib.machines.Machine and returns a step and its
arguments, which may be abstract, as a tuple: (step, batch, model, state). A dict after them has
keywords of mylib.plan, such as {"layers": Block}
"""


_EXAMPLES = """
examples:
  python -m mylib compile train:lowered --machine "v5p 4x4x8" --save step.mylib
  python -m mylib plan train:training --machine "h100 x 64" --save plan.json

To start a script in several processes: python -m mylib.testing launch -n 4 train.py
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Carries out a command line, and returns the exit status."""
    options = _parser().parse_args(arguments)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mylib",
        description="Compiles and plans steps of JAX for machines that you don't have.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.import_module("mylib").__version__
    parser.add_argument("--version", action="version", version=f"mylib {version}")
    commands = parser.add_subparsers(required=True, metavar="command")
    about = "Compiles a program for a machine that you needn't have, and prints what it needs."
    command = commands.add_parser("compile", description=about, help=about)
    command.add_argument("function", help=_FUNCTION)
    command.add_argument("--machine", type=_machine, required=True, help="such as 'v5p 4x4x8'")
    command.add_argument("--save", metavar="FILE", help="where to save it, for load_compiled")
    command.set_defaults(run=_compile)
    about = "Finds a mesh, placements and a policy for a step, on a machine that you needn't have."
    command = commands.add_parser("plan", description=about, help=about)
    command.add_argument("function", help=_STEP)
    command.add_argument("--machine", type=_machine, required=True, help="such as 'h100 x 64'")
    about = "candidates at most, instead of the function's; 8 by default"
    command.add_argument("--compile", type=int, default=argparse.SUPPRESS, help=about)
    about = "seconds, instead of the function's; 600 by default"
    command.add_argument("--budget", type=float, default=argparse.SUPPRESS, help=about)
    command.add_argument("--save", metavar="FILE", help="where to save it, for mylib.Plan.of")
    command.set_defaults(run=_plan)
    return parser


def _called(options: argparse.Namespace) -> Any:
    """The result of the function that is named."""
    name, _, attribute = options.function.partition(":")
    # As `python -m` does.
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        _parser().error(f"there is no module {name!r} here")
    if not hasattr(module, attribute):
        _parser().error(f"{name} has no function {attribute!r}")
    return getattr(module, attribute)(options.machine)


def _machine(text: str) -> Machine:
    try:
        return Machine.of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _compile(options: argparse.Namespace) -> int:
    machine: Machine = options.machine
    try:
        with _timed("traced and lowered"):
            lowered = _called(options)
        with _timed(f"compiled for {machine}"):
            # What is saved must run there: see `Compiled.save`.
            is_run = options.save is not None and machine.chip.platform == "gpu"
            compiled = lowered.compile(WITHOUT_TRITON if is_run else None)
    except (CompilerError, OutOfMemoryError) as error:
        print(error, file=sys.stderr)
        return 1
    fit = compiled.fits(machine)
    print(fit)
    try:
        report = compiled.audit()
        print(report, report.estimate(machine), sep="\n")
    except ValueError as error:
        # What only reports must not cost the program.
        print(error)
    if options.save is not None:
        compiled.save(options.save)
        print(f"saved in {options.save}, {os.path.getsize(options.save):,} bytes")
    return 0 if fit else 1


def _plan(options: argparse.Namespace) -> int:
    step, *args = _called(options)
    keywords = args.pop() if args and isinstance(args[-1], dict) else {}
    given = {key: n for key, n in vars(options).items() if key in ("compile", "budget")}
    start = time.monotonic()
    try:
        # On terminals it writes a line of its own meanwhile.
        planned = plan(step, *args, machine=options.machine, **(keywords | given))
    except (CompilerError, PlanError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"planned for {options.machine} in {time.monotonic() - start:.1f} s", planned, sep="\n")
    if options.save is not None:
        Path(options.save).write_text(planned.as_text())
        print(f"saved in {options.save}")
    return 0


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Prints how long something took; on a terminal also that it is running."""
    start = time.monotonic()
    with StatusLine(f"not yet {what}"):
        yield
    print(f"{what} in {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
