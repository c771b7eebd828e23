from __future__ import annotations

import threading

import pytest
import zmq

from trtpd.errors import InternalError
from trtpd.runtime.worker.sockets import SocketThread, connect, open_socket


def test_a_thread_that_failed_is_reported_and_keeps_nothing_from_closing(tmp_path):
    context: zmq.Context = zmq.Context()
    socket, failed = open_socket(context, zmq.DEALER), threading.Event()
    connect(socket, f"ipc://{tmp_path}/nobody", None)

    def break_down(item):
        raise ValueError(item)

    thread = SocketThread(
        socket,
        name="broken",
        on_frames=lambda frames: None,
        on_item=break_down,
        on_time=lambda: 1.0,
        on_failure=failed.set,
        monitor=lambda event: None,
    )
    thread.start()
    thread.post("odd")
    assert failed.wait(10)
    with pytest.raises(InternalError, match="broken stopped: ValueError"):
        thread.check()
    thread.close()
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()
