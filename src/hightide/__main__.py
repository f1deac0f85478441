"""`python -m hightide` is the `hightide` command."""

from hightide.cli.main import app

if __name__ == "__main__":
    app(prog_name="hightide")
