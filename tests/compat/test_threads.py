"""What `lowtide.compat.threads` takes from the inside of `concurrent.futures` is there."""

import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import thread as pools

from lowtide.compat.threads import abandon_daemon_pools


def test_only_pools_of_daemons_are_abandoned():
    made = {}

    def start() -> None:
        pool = made[threading.current_thread().daemon] = ThreadPoolExecutor(1)
        pool.submit(int).result()

    for daemon in (True, False):
        thread = threading.Thread(target=start, daemon=daemon)
        thread.start()
        thread.join()
    waited_for = {thread.daemon for thread in pools._threads_queues}
    assert waited_for == {True, False}
    abandon_daemon_pools()
    assert {thread.daemon for thread in pools._threads_queues} == {False}
    for pool in made.values():
        pool.shutdown()
