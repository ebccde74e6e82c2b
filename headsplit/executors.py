"""Where the calls of a sweep run: here, in processes of their own, on dask workers or as jobs of a cluster."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

# the options of each kind
KINDS: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "processes": ("workers",),
    "dask": ("workers", "address"),
    "submitit": ("folder", "cluster", "parameters"),
}
# XLA's CPU client takes its threads from the first two (--xla_cpu_multi_thread_eigen=false leaves all of them at work),
# numerical libraries theirs from the others
_COUNTS = ("NPROC", "PJRT_NPROC", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
ONE_THREAD: dict[str, str] = {name: "1" for name in _COUNTS}


def one_thread() -> None:
    """Lets a process compute on one thread: an initializer of workers, before their first computation.

    CPU devices that XLA_FLAGS asks for beyond the first have a thread each all the same.
    """
    os.environ.update(ONE_THREAD)


def start_worker() -> None:
    """One thread, Ctrl-C is left to the process that gives out the work, and no worker outlives that process."""
    from tqdm import tqdm

    one_thread()
    tqdm.set_lock(threading.RLock())  # its own is shared by processes, and left over when one is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def executor_for(
    kind: str,
    *,
    workers: int | None = None,
    address: str | None = None,
    folder: str = "slurm-logs",
    cluster: str | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Iterator[Any]:
    """An executor for `compare.sweep`, closed at the end.

    Args:
        kind: "none" (this process: None), "processes", "dask" or "submitit".
        workers: processes of one thread each, as many as there are cores unless given.
        address: of a dask scheduler that is there already; a local one with `workers` unless given.
        folder: where submitit writes its jobs and logs.
        cluster: of submitit, "slurm" or "local"; slurm where it finds one unless given.
        parameters: of its jobs, as in `submitit.AutoExecutor.update_parameters`.

    Raises:
        ValueError: a kind that is not known, or whose packages are not installed.
    """
    if kind not in KINDS:
        raise ValueError(f"executor: expected one of {', '.join(KINDS)}, got {kind!r}")
    workers = len(os.sched_getaffinity(0)) if workers is None else workers
    try:
        if kind == "none":
            yield None
        elif kind == "processes":
            with _processes(workers) as pool:
                yield pool
        elif kind == "dask":
            with _dask(workers, address) as pool:
                yield pool
        else:
            yield _submitit(folder, cluster, parameters or {})
    except ImportError as error:
        if error.name not in ("distributed", "dask", "submitit"):
            raise
        install = "pip install 'headsplit[cluster]'"
        raise ValueError(f"executor: {kind} needs {error.name}, which is not installed: {install}") from error


@contextmanager
def _processes(workers: int) -> Iterator[ProcessPoolExecutor]:
    # spawn: a fork of a process in which JAX has threads may hang
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=start_worker)
    try:
        yield pool
    except BaseException:  # what is still at work is lost; killed, as a simulation would go on to the end of its block
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


@contextmanager
def _dask(workers: int, address: str | None) -> Iterator[Any]:
    from distributed import Client, LocalCluster

    if address is not None:
        with Client(address) as client, client.get_executor() as pool:
            yield pool
        return
    own: dict[str, Any] = {"threads_per_worker": 1, "dashboard_address": None, "env": ONE_THREAD}
    with (
        LocalCluster(n_workers=workers, **own) as cluster,
        Client(cluster) as client,
        client.get_executor() as pool,
    ):
        yield pool


def _submitit(folder: str, cluster: str | None, parameters: Mapping[str, Any]) -> Any:
    import submitit

    pool = submitit.AutoExecutor(folder=folder, cluster=cluster)
    pool.update_parameters(**parameters)
    return pool
