"""Threads in the background and the end of the process."""

from __future__ import annotations

from forked import run_script


def test_a_thread_that_is_about_to_end_is_awaited_at_the_end_of_the_process_and_no_other() -> None:
    """Inside of torch it would abort the process."""
    script = """
        import atexit, os, threading, time
        from hightide.stores.threads import END_TIMEOUT_S, background

        soon = background("soon", lambda: time.sleep(0.1))
        background("never", threading.Event().wait)
        began_s = time.monotonic()
        atexit._run_exitfuncs()  # as the interpreter does at its end
        print(soon.is_alive(), time.monotonic() - began_s > END_TIMEOUT_S, flush=True)
        os._exit(0)
    """
    ended = run_script(script, [], timeout_s=20.0)
    assert (ended.status, ended.stdout) == (0, "False True\n"), ended
