"""fastser in a cluster of dask.distributed: `install`, `uninstall`, `status`."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from fastser.dask import plugins
from fastser.dask.rebinding import rebinding

HERE = "here"


def install(client: Any = None) -> Any:
    """Let distributed use fastser: in this process, and with *client* in its whole cluster.

    Can be called again at any time, from any thread.  Processes with and without fastser understand each
    other, so the order in which they change does not matter.

    Parameters
    ----------
    client : distributed.Client, optional
        Its scheduler and all its workers, present and future, install too.  Those that cannot import
        fastser stay as they are and log a warning.

    Returns
    -------
    None
        An awaitable of it for an asynchronous client.

    Warns
    -----
    UserWarning
        If this release of distributed is not known; then only the families "dask" and "pickle" change.

    Examples
    --------
    >>> install()
    >>> status()["state"]
    'rebound'
    >>> uninstall()
    """
    rebinding.acquire(HERE)
    return None if client is None else client.sync(_install_cluster, client)


def uninstall(client: Any = None) -> Any:
    """Undo `install`, with *client* in its whole cluster: distributed is bound as it was before.

    Names that something else has rebound since then are left alone.

    Parameters
    ----------
    client : distributed.Client, optional

    Returns
    -------
    None
        An awaitable of it for an asynchronous client.
    """
    if client is None:
        rebinding.release(HERE)
        return None
    return client.sync(_uninstall_cluster, client)


def status(client: Any = None) -> Any:
    """Tell who speaks through fastser: this process, and with *client* each process of its cluster.

    Parameters
    ----------
    client : distributed.Client, optional

    Returns
    -------
    dict
        Of one process: the versions of fastser and distributed, and the state: "rebound", "registered"
        (families only, as distributed is not known), "absent" (not installed) or "missing" (not
        importable).  With *client* such dicts under "client", "scheduler" and each address under
        "workers"; an awaitable for an asynchronous client.

    Examples
    --------
    >>> status()["state"]
    'absent'
    """
    report = _reporter()
    return report() if client is None else client.sync(_status_cluster, client, report)


async def _install_cluster(client: Any) -> None:
    for plugin in plugins.make():
        await client.register_plugin(plugin)


async def _uninstall_cluster(client: Any) -> None:
    release = _releaser()
    for unregister in (client.unregister_worker_plugin, client.unregister_scheduler_plugin):
        with suppress(ValueError):  # was not registered
            await unregister(plugins.NAME)
    await client.run_on_scheduler(release)
    await client.run(release)
    rebinding.release(HERE)


async def _status_cluster(client: Any, report: Any) -> dict[str, Any]:
    return {
        "client": report(),
        "scheduler": await client.run_on_scheduler(report),
        "workers": await client.run(report),
    }


# Functions that run where fastser may be missing are local, and so pickled by value.


def _releaser() -> Any:
    def release(dask_scheduler: Any) -> None:  # by this name workers hand themselves over, too
        import sys

        module = sys.modules.get("fastser.dask.rebinding")
        if module is not None:
            module.rebinding.release("here")
            module.rebinding.release(dask_scheduler.id)
            module.rebinding.bind_spill(getattr(dask_scheduler, "data", None))

    return release


def _reporter() -> Any:
    def report() -> dict[str, Any]:
        from importlib.metadata import version

        try:
            import fastser
            from fastser.dask.rebinding import rebinding
        except ImportError:
            return {"state": "missing", "fastser": None, "distributed": version("distributed")}
        return {
            "state": rebinding.state,
            "fastser": fastser.__version__,
            "distributed": version("distributed"),
        }

    return report
