"""What a client sends to the processes of a cluster; it must work where fastser cannot be imported."""

from __future__ import annotations

from typing import Any

from distributed.diagnostics.plugin import SchedulerPlugin, WorkerPlugin

NAME = "fastser"


def make() -> tuple[Any, Any]:
    """Return the plugins for the scheduler and the workers.

    The classes are local to this function, which is why they are pickled by value; their methods must
    find all they need by imports of their own.
    """

    def fastser_or_none(where: str) -> Any:
        try:
            from fastser.dask.rebinding import rebinding
        except ImportError as error:
            import logging

            logging.getLogger("distributed").warning(
                "fastser cannot be imported on %s, which stays as it is: %s", where, error
            )
            return None
        return rebinding

    class FastserScheduler(SchedulerPlugin):
        name = NAME
        idempotent = True

        async def start(self, scheduler: Any) -> None:
            self.scheduler = scheduler
            rebinding = fastser_or_none(scheduler.address)
            if rebinding is not None:
                rebinding.acquire(scheduler.id)

        async def close(self) -> None:
            rebinding = fastser_or_none(self.scheduler.address)
            if rebinding is not None:
                rebinding.release(self.scheduler.id)

    class FastserWorker(WorkerPlugin):
        name = NAME
        idempotent = True

        def setup(self, worker: Any) -> None:
            rebinding = fastser_or_none(worker.address)
            if rebinding is not None:
                rebinding.acquire(worker.id)
                rebinding.bind_spill(worker.data)

        def teardown(self, worker: Any) -> None:
            rebinding = fastser_or_none(worker.address)
            if rebinding is not None:
                rebinding.release(worker.id)
                rebinding.bind_spill(worker.data)

    return FastserScheduler(), FastserWorker()
