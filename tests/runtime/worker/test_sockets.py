from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest
import zmq

from trtpd.errors import InternalError, ServeError
from trtpd.runtime.worker.sockets import SocketThread, connect, make_keys, open_socket


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


@pytest.mark.parametrize("there", [False, True])
def test_keys_that_could_not_be_written_leave_nothing_and_name_the_folder(tmp_path, monkeypatch, there):
    folder = tmp_path / "keys"
    if there:
        folder.mkdir()
        (folder / "mine").touch()
    write = Path.write_text

    def full(path, *args, **more):
        if path.name == "transfer.key_secret":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, *args, **more)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ServeError, match=rf"{folder} \(No space left on device\); free some space"):
        make_keys(folder)
    assert [path.name for path in folder.rglob("*") if path.is_file()] == (["mine"] if there else [])
    assert folder.exists() == there
    monkeypatch.undo()
    make_keys(folder)
    assert (folder / "workers" / "worker.key").is_file()
