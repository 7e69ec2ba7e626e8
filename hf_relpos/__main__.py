"""`python -m hf_relpos`: the command line, for launchers that start modules."""

from .cli import app


if __name__ == "__main__":
    app(prog_name="hf-relpos")
