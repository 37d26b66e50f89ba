"""Build the extension modules; FASTSER_BUILD chooses how.

release  optimised, the default
strict   release, and every warning of Cython or of the C compiler is an error
trace    line tracing for coverage, annotated HTML
asan     AddressSanitizer and UndefinedBehaviorSanitizer
"""

import os

from Cython.Build import cythonize
from Cython.Compiler import Options
from setuptools import Extension, setup

MODES = {  # FASTSER_BUILD -> compiler flags, linker flags
    "release": (["-O2"], []),
    "strict": (["-O2", "-Wall", "-Wextra", "-Werror"], []),
    "trace": (["-O0", "-g", "-DCYTHON_TRACE_NOGIL=1", "-DCYTHON_USE_SYS_MONITORING=0"], []),
    "asan": (["-O1", "-g", "-fsanitize=address,undefined"], ["-fsanitize=address,undefined"]),
}
MODULES = ("_lists", "_frames", "_msgpack", "_pickler", "_message")

mode = os.environ.get("FASTSER_BUILD", "release")
if mode not in MODES:
    raise SystemExit(f"FASTSER_BUILD={mode!r}: expected one of {', '.join(MODES)}")
cflags, ldflags = MODES[mode]
Options.warning_errors = mode == "strict"

setup(
    ext_modules=cythonize(
        [
            Extension(
                f"fastser.{name}",
                [f"fastser/{name}.pyx"],
                extra_compile_args=cflags,
                extra_link_args=ldflags,
            )
            for name in MODULES
        ],
        compiler_directives={
            "language_level": 3,
            "warn.unused": True,
            "warn.maybe_uninitialized": True,
            "linetrace": mode == "trace",
        },
        annotate=mode == "trace",
        force=True,  # a mode never reuses the C code of another
    )
)
