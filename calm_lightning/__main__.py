"""The entry point of `calm` and of `python -m calm_lightning`."""

import sys


def main() -> None:
    """Say something at once: the libraries take seconds to load."""
    if not {"-h", "--help", "--print_config"} & set(sys.argv):
        print("calm: loading libraries", flush=True)
    from calm_lightning.cli import main

    main()


if __name__ == "__main__":
    main()
