from __future__ import annotations

import threading
import time

from sqlalchemy import select

from sglang.multimodal_gen.runtime.managers.storage.database import Database, jobs
from sglang.multimodal_gen.runtime.utils.errors import StoreUnavailable


def test_it_closes_while_a_thread_reads():
    """The threads of a database in memory share one connection: closed under them, it crashes."""
    database = Database("sqlite://")
    failures = []

    def read():
        try:
            while True:
                with database.read() as connection:
                    connection.execute(select(jobs.c.id)).all()
        except StoreUnavailable as error:  # closed: there are no tables any more
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    database.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert len(failures) == 4
