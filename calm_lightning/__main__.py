"""python -m calm_lightning, the same as calm."""

from calm_lightning.cli import main

if __name__ == "__main__":
    main()
