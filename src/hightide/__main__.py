"""`python -m hightide` is the `hightide` command."""

import gc

gc.disable()  # importing torch makes a million objects and no garbage: looking for it took a sixth of a plan's time

from hightide.cli.main import app  # noqa: E402

gc.enable()


def main() -> None:
    app(prog_name="hightide")


if __name__ == "__main__":
    main()
