"""Import this to install fastser: ``distributed.worker.preload: [fastser.dask.preload]`` in dask's config.

The same for ``scheduler``, ``nanny`` and ``client``, or ``dask worker --preload fastser.dask.preload``.
"""

from __future__ import annotations

from typing import Any

from fastser.dask import install

install()


def dask_setup(server: Any) -> None:
    """Called by distributed when the process is up; the import did the work, before any message."""
