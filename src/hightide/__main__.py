"""`python -m hightide` is the `hightide` command."""

import gc

from hightide.cli.streams import check_working_folder, make_usable

make_usable()
check_working_folder()
gc.disable()  # importing torch makes very many objects, and looking through them for garbage takes time

from hightide.cli.main import run  # noqa: E402

gc.freeze()  # they stay to the end: nobody looks through them then either
gc.enable()


def main() -> None:
    run()


if __name__ == "__main__":
    main()
