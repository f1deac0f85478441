"""`python -m hightide` is the `hightide` command."""

import gc
import os
import signal

from hightide.cli.streams import check_working_folder, make_usable

EXIT_INTERRUPTED = 130  # as shells have it


def _end(*_: object) -> None:
    """Nothing has begun. An exception would not do: torch takes whatever ends its import of numpy for its absence."""
    os.write(2, b"\ninterrupted\n")
    os._exit(EXIT_INTERRUPTED)


make_usable()
check_working_folder()
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # and not ignored
    signal.signal(signal.SIGINT, _end)
gc.disable()  # importing torch makes very many objects, and looking through them for garbage takes time

from hightide.cli.main import run  # noqa: E402

gc.freeze()  # they stay to the end: nobody looks through them then either
gc.enable()
if signal.getsignal(signal.SIGINT) is _end:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    run()


if __name__ == "__main__":
    main()
