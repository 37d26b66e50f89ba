"""Handlers of the dask family and reducers of the pickler, one file per library, loaded when needed."""

from __future__ import annotations

import importlib
from functools import partial

from fastser.dispatch import Dispatch, dask_deserialize, dask_serialize, reducers

LIBRARIES = {  # top-level module of a type -> the file here that handles its types
    "array": "builtins",
    "builtins": "builtins",
    "functools": "functions",
    "h5py": "h5py",
    "netCDF4": "netcdf4",
    "numpy": "numpy",
    "pyarrow": "arrow",
    "scipy": "scipy",
    "sparse": "sparse",
}


def register_lazily(*registries: Dispatch) -> None:
    """Let each of *registries* load the handlers of a library when it first meets a type of it."""
    for toplevel, name in LIBRARIES.items():
        for registry in registries:
            registry.register_lazy(toplevel, partial(importlib.import_module, f"{__name__}.{name}"))


register_lazily(dask_serialize, dask_deserialize, reducers)
