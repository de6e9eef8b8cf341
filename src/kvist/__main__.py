"""The ``kvist`` command and ``python -m kvist``: a door that every installation has, with or without the daemon.

The law: where a package that the command needs is not installed, it says in one sentence what to install, and exits
with 2.
"""

import importlib
import sys


def main() -> None:
    """Run the command line."""
    try:
        commands = importlib.import_module("kvist.cli.main")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "kvist":
            raise
        sys.stderr.write(f"kvist: this command needs {error.name}, which is missing: pip install 'kvist[server]'\n")
        sys.exit(2)
    commands.app(prog_name="kvist")


if __name__ == "__main__":
    main()
