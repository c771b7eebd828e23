from __future__ import annotations

import subprocess
import sys

import psutil


def test_a_stub_ends_soon_after_its_server():
    script = (
        "import os, sys, time\n"
        "from trtpd.runtime.serve.processes import end_with_parent\n"
        "if os.fork() == 0:\n"
        "    end_with_parent(look_every_s=0.02)\n"
        "    print(os.getpid(), flush=True)\n"
        "    time.sleep(60)\n"
        "else:\n"
        "    time.sleep(60)\n"
    )
    server = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    stub = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    server.stdout.close()
    gone, _ = psutil.wait_procs([stub], timeout=10)
    assert gone
