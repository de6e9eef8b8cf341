"""``python -m kvist``."""

from kvist.cli.main import app

app(prog_name="kvist")
