import threading

import pytest

from trtpd.kv_transfer.hands import Hands


@pytest.fixture(params=[1, 2])
def hands(request):
    made = Hands(request.param)
    yield made
    made.close()


def test_every_job_is_done_once(hands):
    done = []
    hands.share([lambda i=i: done.append(i) for i in range(100)], worth=True)
    assert sorted(done) == list(range(100))


def test_with_two_cores_two_threads_work_at_once():
    met, hands = threading.Barrier(2, timeout=20), Hands(2)

    def meet() -> None:
        met.wait()

    hands.share([meet, meet], worth=True)
    hands.close()


def test_what_a_job_raises_comes_out_once_no_job_runs_any_more(hands):
    running = []

    def slow():
        running.append(1)
        threading.Event().wait(0.05)
        running.pop()

    def fail():
        raise ValueError("told to")

    with pytest.raises(ValueError, match="told to"):
        hands.share([slow, fail, *[slow] * 50], worth=True)
    assert running == []


def test_after_a_failure_the_next_jobs_are_done(hands):
    with pytest.raises(ZeroDivisionError):
        hands.share([lambda: 1 // 0] * 4, worth=True)
    done = []
    hands.share([lambda: done.append(1)] * 4, worth=True)
    assert len(done) == 4
